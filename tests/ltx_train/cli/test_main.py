"""The command line on a bad day: one clear line, a hint, the right exit code, nothing written over, names with anything in them."""

import json
import shutil
import sys

import pytest
from safetensors.torch import save_file
from torch import ones

from ltx_train import __main__ as command_line
from ltx_train.__main__ import main
from ltx_train.cli.show import console
from ltx_train.cli.training import lora_use
from ltx_train.config import LoraUse
from ltx_train.lora.files import read_lora
from ltx_train.tiny import media
from ltx_train.tiny.checkpoints import write_tiny


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return write_tiny(tmp_path_factory.mktemp("tiny"), "ltx2.3")


@pytest.fixture(scope="module")
def clips(tmp_path_factory):
    return media.dataset(tmp_path_factory.mktemp("d") / "clips [1080p]", 2, frames=9, width=64, height=64)


@pytest.fixture
def lora(tmp_path):
    parts = {"lora_A": ones(2, 16), "lora_B": ones(16, 2)}
    tensors = {f"diffusion_model.transformer_blocks.0.attn1.to_q.{name}.weight": value for name, value in parts.items()}
    path = tmp_path / "a lora.safetensors"
    save_file(tensors, path)
    return path


def assert_refused(capsys, *arguments, word="", code=2):
    """A verb must end with one clear line and a hint; both are returned."""
    assert main([str(a) for a in arguments]) == code
    lines = capsys.readouterr().err.splitlines()
    assert lines[0].startswith("error: ") and len(lines[0]) <= 127 and word in lines[0], lines[0]
    assert len(lines) > 1 and not any("Traceback" in line for line in lines)
    return "\n".join(lines)


def test_a_long_path_stays_on_one_line(capsys, tmp_path):
    assert_refused(capsys, "inspect", tmp_path / ("ä" * 90) / ("x" * 90 + ".safetensors"), word="Model file not found")


def test_the_report_ends_as_preprocessing_would(capsys, clips, tmp_path):
    assert main(["report", str(clips), "--json", "--resolution-buckets", "64x64x9"]) == 0
    assert json.loads(capsys.readouterr().out)["usable"] == 2
    shutil.copy(clips / "clip0.mp4", tmp_path / "no caption.mp4")
    assert main(["report", str(tmp_path), "--json"]) == 2
    told = capsys.readouterr()
    assert json.loads(told.out)["usable"] == 0 and told.err.startswith("error: None of 1 clips is usable; 1 have caption.missing.")


def test_brackets_in_names_are_no_markup(capsys, clips, tmp_path):
    for number, name in enumerate(("take [bold] 1", "take [/x] 2")):
        shutil.copy(clips / f"clip{number}.mp4", tmp_path / f"{name}.mp4" if "/" not in name else tmp_path / "take [red 2.mp4")
    assert main(["report", str(tmp_path)]) == 2
    assert "take [bold] 1.mp4" in capsys.readouterr().out
    console().print("a [/closing] tag")
    assert "[/closing]" in capsys.readouterr().out


def test_config_faults_of_options(capsys, clips, tmp_path):
    assert_refused(capsys, "report", clips, "--token-budget", "0", word="token_budget")
    assert_refused(capsys, "report", clips, "--frame-rate", "nan", word="clips.fps")
    assert_refused(capsys, "report", clips, "--audio-durations", "two", word="audio_durations")
    assert_refused(capsys, "report", clips, "--caption-column", "text", word="--caption-column")
    assert_refused(capsys, "report", clips, "--resolution-buckets", "63x64x9", word="63x64x9")
    assert_refused(capsys, "report", tmp_path / "nothing", word="There is no dataset")


@pytest.mark.parametrize("size", ["abc", "64", "64x64x", "0x64x9", "64×64"])
def test_sample_sizes(capsys, tiny, size):
    assert_refused(capsys, "sample", "--model-path", tiny["model"], "--prompt", "a", "--size", size, word="--size")


def test_sample_needs_a_model_and_a_prompt(capsys, tiny):
    assert_refused(capsys, "sample", word="--model-path")
    assert_refused(capsys, "sample", "--model-path", tiny["model"], word="--prompt")


@pytest.mark.parametrize("text, path, strength", [
    ("a.safetensors", "a.safetensors", 1.0), ("a:1e-1", "a", 0.1), ("a:-2", "a", -2.0), ("C:\\x.safetensors", "C:\\x.safetensors", 1.0),
    ("C:\\x.safetensors:0.5", "C:\\x.safetensors", 0.5), ("C:x.safetensors", "C:x.safetensors", 1.0), ("a:b/c:.5", "a:b/c", 0.5), (":0.5", ":0.5", 1.0),
])  # fmt: skip
def test_a_lora_and_its_strength(text, path, strength):
    use = LoraUse.model_validate(lora_use(text))
    assert (use.path, use.strength) == (path, strength)


def test_a_lora_that_is_no_file(capsys, tiny):
    assert_refused(capsys, "sample", "--model-path", tiny["model"], "--prompt", "a", "--lora", "", word="--lora names no file")


@pytest.mark.parametrize("strength", ["--5", "²", "nan", "inf", "-11", "", "0,8", "1.2.3"])
def test_a_strength_that_is_none(capsys, tiny, strength):
    assert_refused(capsys, "sample", "--model-path", tiny["model"], "--prompt", "a", "--lora", f"a.safetensors:{strength}", word="is no strength from -10 to 10")


def test_merging_into_another_family_is_told(capsys, tiny, tmp_path):
    parts = {"lora_A": ones(2, 32), "lora_B": ones(32, 2)}
    save_file({f"diffusion_model.transformer_blocks.0.attn1.to_q.{n}.weight": v for n, v in parts.items()}, tmp_path / "l.safetensors", {"ltx_train.family": "ltx2"})
    assert main(["lora", "merge", str(tmp_path / "l.safetensors"), "--model", str(tiny["model"]), "--out", str(tmp_path / "m.safetensors")]) == 0
    assert "l.safetensors was trained on LTX-2 19B, not on LTX-2.3 22B." in capsys.readouterr().out


def test_a_folder_as_lora(capsys, tmp_path):
    assert_refused(capsys, "lora", "show", tmp_path, word="is a folder, not a LoRA file")


def test_verbs_on_runs_that_are_not_there(capsys, tmp_path):
    assert_refused(capsys, "stop", tmp_path / "no", word="No run is at")
    assert_refused(capsys, "resume", tmp_path, word="No run is at")
    assert_refused(capsys, "runs", tmp_path / "no", word="There is no folder")
    with pytest.raises(SystemExit) as caught:
        main(["resume", str(tmp_path), "--steps", "0"])
    assert caught.value.code == 2 and "no whole number above 0" in capsys.readouterr().err


def test_a_lora_is_never_written_over_its_source(capsys, lora):
    before = lora.read_bytes()
    for action in (["resize", "--rank", "1"], ["strip"], ["convert"]):
        assert_refused(capsys, "lora", action[0], lora, "--out", lora, *action[1:], word="must not write over its source")
    assert lora.read_bytes() == before
    assert_refused(capsys, "lora", "resize", lora, "--out", lora.with_name("b.safetensors"), word="rank of at least 1")
    assert main(["lora", "resize", str(lora), "--out", str(lora.with_name("b.safetensors")), "--rank", "1"]) == 0
    assert read_lora(lora.with_name("b.safetensors")).ranks == (1,)


@pytest.mark.parametrize("strength", ["nan", "inf"])
def test_a_lora_is_not_merged_at_no_number(capsys, lora, tiny, strength):
    out = lora.with_name("merged.safetensors")
    assert_refused(capsys, "lora", "merge", lora, "--out", out, "--model", tiny["model"], "--strength", strength, word="strength")
    assert not out.exists()


def test_decode_devices_and_limits(capsys, tiny, tmp_path):
    assert_refused(capsys, "decode", tmp_path, tmp_path / "o", "--model-path", tiny["model"], "--device", "quantum", word="device")
    with pytest.raises(SystemExit):
        main(["decode", str(tmp_path), "o", "--model-path", str(tiny["model"]), "--limit", "-1"])
    capsys.readouterr()
    (tmp_path / "index.json").write_text(json.dumps({"format": 1, "model": {"family": "ltxv-2b"}, "texts": {}, "skipped": [], "entries": []}))
    assert_refused(capsys, "decode", tmp_path, tmp_path / "o", "--model-path", tiny["model"], "--device", "cpu", word="made for ltxv-2b; the model is ltx2.3")


def test_env_takes_options_and_the_readme_s_words(capsys, monkeypatch):
    assert main(["env", "--json"]) in (0, 2)
    assert "python" in json.loads(capsys.readouterr().out)
    made = []
    monkeypatch.setattr("ltx_train.environment.create_environment", lambda folder, **options: made.append((folder.name, options["inherit"])) or folder)
    assert main(["env", "create", "somewhere", "--inherit"]) == 0 and made == [("somewhere", True)]


FAULTS = [
    (PermissionError(13, "Permission denied", "/locked/file"), 2, "error: No permission to use /locked/file"),
    (OSError(28, "No space left on device", "/full/file"), 2, "error: The disk is full: /full/file."),
    (MemoryError(), 4, "error: Out of memory."),
    (ModuleNotFoundError("No module named 'av'", name="av"), 2, "error: The package av is not installed."),
    (RuntimeError("Could not determine home directory."), 2, "error: A path begins with ~, and there is no such user here."),
    (KeyboardInterrupt(), 3, "Stopped."),
]


@pytest.mark.parametrize("fault", FAULTS, ids=lambda f: type(f[0]).__name__)
def test_every_exception_has_its_line_and_exit_code(capsys, monkeypatch, fault):
    error, code, line = fault

    def fail(options):
        raise error

    monkeypatch.setattr("ltx_train.cli.models.run_fields", fail)
    assert main(["fields"]) == code
    assert line in capsys.readouterr().err.splitlines()


def test_only_a_fault_of_ours_shows_a_traceback(capsys, monkeypatch):
    def fail(options):
        raise KeyError("ours")

    monkeypatch.setattr("ltx_train.cli.models.run_fields", fail)
    assert main(["fields"]) == 1
    told = capsys.readouterr().err
    assert "Traceback" in told and "error: KeyError: 'ours'" in told


def test_a_reader_that_has_gone_is_no_error(monkeypatch, tmp_path):
    def fail(options):
        raise BrokenPipeError

    monkeypatch.setattr("ltx_train.cli.models.run_fields", fail)
    with open(tmp_path / "out", "w") as file:
        monkeypatch.setattr(sys, "stdout", file)
        assert command_line.main(["fields"]) == 0
