"""The doctor on the fitted set: it passes, and each fault is named by its cause."""

import json
from contextlib import redirect_stdout
from io import StringIO

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from ltx_train.__main__ import main
from ltx_train.doctor import LEAST_CLIPS
from ltx_train.doctor_job import REPORT, examine, open_files
from ltx_train.doctor_probes import drawn_probes, mean_and_error, psnr, scan, snr, wiener_loss
from ltx_train.doctor_report import Check, Diagnosis
from ltx_train.geometry import Latents, VideoGrid
from ltx_train.memory.settings import AccelerationSection
from ltx_train.tiny.drawing import FPS, KNOWN, Scenes, draw, sound
from ltx_train.tiny.fitted_layout import write_text_encoder
from ltx_train.tiny.fitted_set import FittedSet

CPU = AccelerationSection(device="cpu", mixed_precision_mode="no", compile="off")
FITTED = FittedSet.at()


@pytest.fixture(autouse=True, scope="module")
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def edited(path, change):
    """The fitted model file with some tensors changed: change(tensors) edits the dict."""
    with safe_open(str(FITTED.model), "pt") as file:
        metadata = file.metadata()
    tensors = load_file(FITTED.model)
    change(tensors)
    save_file(tensors, path, metadata)
    return path


@pytest.fixture
def few(monkeypatch):
    """Few clips, where it is not the captions that are judged."""
    monkeypatch.setattr("ltx_train.doctor.drawn_probes", lambda checkpoint: drawn_probes(checkpoint, LEAST_CLIPS))


@pytest.fixture
def silent(monkeypatch):
    """Leaves the sound out, for faults that have nothing to do with it."""
    monkeypatch.setattr("ltx_train.doctor.Doctor.sounds", lambda self, probes: None)


def visit(tmp_path, *files, **more):
    """(diagnosis, codes of what is wrong) without a preview."""
    found = examine(files, {}, CPU, out=tmp_path / "doctor", preview=False, **more)
    return found, [c.code for c in found.problems]


def test_the_fitted_set_passes(tmp_path):
    shown = []
    found = examine([FITTED.text_encoder, FITTED.model], {}, CPU, out=tmp_path / "doctor", say=shown.append)
    assert found.healthy and shown == found.checks and not [c for c in shown if c.verdict != "pass"]
    assert found.preview.is_file() and found.preview.suffix == ".mp4"
    report = json.loads((tmp_path / "doctor" / REPORT).read_text(encoding="utf-8"))
    assert report["healthy"] and report["problems"] == []
    assert found["video VAE"].numbers["psnr"] > 25 and found["audio VAE"].numbers["mel_snr"] > 20
    assert found["base loss, video"].numbers["share"] < 0.3 and found["base loss, audio"].numbers["share"] < 0.7
    assert found["captions"].numbers["gain"] > 0.2


def test_another_video_vae_is_named(tmp_path, silent, few):
    """A VAE that works by itself, but is not the transformer's: its latents' channels come in another order."""
    order = torch.randperm(128, generator=torch.Generator().manual_seed(0))

    def swap(tensors):
        encoder = [k for k in tensors if k.startswith("vae.encoder.conv_out.conv.")]
        decoder = "vae.decoder.conv_in.conv.weight"
        for key in encoder:
            tensors[key] = torch.cat([tensors[key][:128][order], tensors[key][128:]]).contiguous()
        tensors[decoder] = tensors[decoder][:, order].contiguous()
        for key in [k for k in tensors if k.startswith("vae.per_channel_statistics.")]:
            tensors[key] = tensors[key][order].contiguous()

    found, wrong = visit(tmp_path, edited(tmp_path / "model.safetensors", swap), FITTED.text_encoder)
    assert wrong == ["video_vae.other"] and found["video VAE"].verdict == "pass"
    assert found["captions"].verdict == "skipped"


def test_a_damaged_video_vae_is_named(tmp_path, silent, few):
    def scramble(tensors):
        for key in [k for k in tensors if k.startswith("vae.decoder.") and tensors[k].ndim == 5]:
            tensors[key] = tensors[key].flatten()[torch.randperm(tensors[key].numel())].view(tensors[key].shape)

    _, wrong = visit(tmp_path, edited(tmp_path / "model.safetensors", scramble), FITTED.text_encoder)
    assert wrong == ["video_vae.round_trip"]


def test_another_text_encoder_is_named(tmp_path):
    found, wrong = visit(tmp_path, FITTED.model, write_text_encoder(tmp_path / "other", seed=9))
    assert wrong == ["text_encoder.other"] and "captions do not help" in found["captions"].message
    assert found["base loss, video"].verdict == "pass"


def test_a_file_without_statistics_is_named(tmp_path, silent, few):
    def forget(tensors):
        for key in [k for k in tensors if k.startswith("vae.per_channel_statistics.")]:
            tensors[key] = torch.zeros_like(tensors[key]) if "mean-of-means" in key else torch.ones_like(tensors[key])

    found, wrong = visit(tmp_path, edited(tmp_path / "model.safetensors", forget), FITTED.text_encoder)
    assert wrong == ["latents.unnormalised"] and found["base loss, video"].verdict == "warning"


def encoded_clips(tmp_path):
    """Drawn clips and their preprocessed dataset."""
    from ltx_train.data.dataset import DataSection
    from ltx_train.data.writers import write_video
    from ltx_train.encode import Target
    from ltx_train.models.codec import EngineCodec
    from ltx_train.preprocess import preprocess
    from tests.end_to_end.corridor import Quiet

    clips = tmp_path / "clips"
    clips.mkdir()
    scenes = Scenes.random(4, torch.Generator().manual_seed(1), KNOWN)
    frames, waves = (draw(scenes, 17, 64, 64) * 255).round().to(torch.uint8), sound(scenes, 17 / FPS)
    for i in range(len(scenes)):
        write_video(clips / f"c{i}.mp4", frames[i], FPS, waves[i], 16000, crf=4)
        (clips / f"c{i}.txt").write_text(scenes.caption(i), encoding="utf-8")
    checkpoint = FITTED.open()
    codec = EngineCodec(checkpoint, device="cpu", dtype=torch.float32)
    root = tmp_path / "cache"
    preprocess(DataSection(dataset=str(clips), resolution_buckets="64x64x17", cache_dir=str(root)), Target.of(checkpoint), codec, Quiet())
    return clips, root


def make_raw(root):
    """Take the normalisation back from a cache's latents, as another tool would have left them."""
    from ltx_train.data.cache import Cache
    from ltx_train.data.manifest import Manifest

    source, cache = FITTED.open().source("video_vae"), Cache(root)
    mean, std = (source.get(f"per_channel_statistics.{n}", dtype=torch.float32).view(-1, 1, 1, 1) for n in ("mean-of-means", "std-of-means"))
    for entry in Manifest.read(root / "index.json").entries:
        path = cache.path(entry.video)
        with safe_open(str(path), "pt") as file:
            metadata = file.metadata()
        tensors = {name: value.clone() for name, value in load_file(path).items()}
        (name,) = tensors
        save_file({name: (tensors[name].float() * std + mean).to(tensors[name].dtype)}, path, metadata)


def test_the_users_clips_and_their_cache_pass_and_raw_latents_are_named(tmp_path, silent):
    clips, root = encoded_clips(tmp_path)
    found, wrong = visit(tmp_path, FITTED.model, FITTED.text_encoder, dataset=clips, buckets="64x64x17")
    assert wrong == [] and "4 clips of the dataset" in found["dataset"].message
    found, wrong = visit(tmp_path, FITTED.model, FITTED.text_encoder, dataset=root)
    assert wrong == [] and "4 of the cache" in found["dataset"].message

    make_raw(root)
    found, wrong = visit(tmp_path, FITTED.model, FITTED.text_encoder, dataset=root)
    assert wrong == ["latents.unnormalised"] and found["video VAE"].verdict == "pass"
    assert "Encode the dataset again" in found["base loss, video"].hint


def test_a_zeroed_block_is_named(tmp_path, silent, few):
    def zero(tensors):
        for key in [k for k in tensors if ".transformer_blocks.1." in k]:
            tensors[key] = torch.zeros_like(tensors[key])

    found, wrong = visit(tmp_path, edited(tmp_path / "model.safetensors", zero), FITTED.text_encoder)
    assert wrong[0] == "files.zero_block" and "transformer_blocks.1 holds zeros only" in found.problems[0].message


def test_damaged_files_are_named(tmp_path, silent, few):
    def spoil(tensors):
        tensors["model.diffusion_model.transformer_blocks.0.attn1.to_q.weight"][3, 3] = float("nan")

    found, wrong = visit(tmp_path, edited(tmp_path / "model.safetensors", spoil), FITTED.text_encoder)
    assert wrong[0] == "files.not_finite" and "transformer_blocks.0.attn1.to_q.weight" in found.problems[0].message
    cut = tmp_path / "cut.safetensors"
    cut.write_bytes(FITTED.model.read_bytes()[:-1000])
    found, wrong = visit(tmp_path, cut, FITTED.text_encoder)
    assert wrong == ["checkpoint.truncated"] and not found.healthy


def test_a_model_without_text_encoder_is_examined_as_far_as_it_goes(tmp_path, few):
    found, wrong = visit(tmp_path, FITTED.model)
    assert wrong == [] and found["text encoder"].verdict == "skipped" and found["video VAE"].verdict == "pass" and found["base model"].verdict == "skipped"
    assert "gemma" in found["text encoder"].hint.lower()


@pytest.fixture
def files_only(monkeypatch):
    """Reads the files and tries nothing on clips."""
    monkeypatch.setattr("ltx_train.doctor.Doctor.probes", lambda self: (None, []))


def test_a_text_encoder_alone_is_no_model(tmp_path, files_only):
    found, wrong = visit(tmp_path, FITTED.text_encoder)
    assert wrong == ["files.no_transformer"] and "They hold: text encoder." in found.problems[0].hint and found["files: text encoder"].verdict == "pass"


def test_what_was_not_examined_is_said(tmp_path, capsys, files_only):
    options = ["--device", "cpu", "--precision", "no", "--no-preview", "--out", str(tmp_path / "d")]
    assert main(["doctor", str(FITTED.model), *options]) == 0
    assert "nothing is wrong with what was examined; not examined: text encoder, base model." in capsys.readouterr().out.splitlines()[-1]
    for wrong, said in ((["--stream-blocks", "-1"], "stream_blocks"), (["--quantization", "int7"], "quantization"), (["--device", "quantum"], "device")):
        assert main(["doctor", str(FITTED.model), *options, *wrong]) == 2
        assert said in capsys.readouterr().err.splitlines()[0]


def test_the_verb_speaks_json_and_says_what_is_wrong(tmp_path, silent):
    out = StringIO()
    with redirect_stdout(out):
        code = main(["doctor", str(FITTED.model), str(write_text_encoder(tmp_path / "other", seed=9)), "--device", "cpu", "--precision", "no", "--no-preview", "--out", str(tmp_path / "d"), "--json"])
    said = json.loads(out.getvalue())
    assert code == 2 and said["problems"] == ["text_encoder.other"] and said["preview"] is None and {"name", "verdict", "message", "hint", "numbers"} <= set(said["checks"][0])


# ---- measures


def test_wiener_loss_is_that_of_the_best_linear_predictor():
    """For Gaussian channels of variance m the regression of v = n - z on x = (1-s) z + s n has this mean square error."""
    generator = torch.Generator().manual_seed(0)
    scale = torch.tensor([0.5, 1.0, 2.0]).view(1, 3, 1, 1, 1)
    latents = Latents(scale * torch.randn(1, 3, 60, 40, 40, generator=generator), VideoGrid(60, 40, 40))
    noise = torch.randn(latents.values.shape, generator=generator)
    for sigma in (0.1, 0.5, 0.9):
        x, v = (1 - sigma) * latents.values + sigma * noise, noise - latents.values
        slope = (x * v).mean((0, 2, 3, 4)) / (x * x).mean((0, 2, 3, 4))
        error = (v - slope.view(1, 3, 1, 1, 1) * x).square().mean().item()
        assert wiener_loss([latents], sigma) == pytest.approx(error, rel=0.01)


def test_small_measures():
    assert mean_and_error([1.0, 2.0, 3.0]) == (2.0, pytest.approx((1 / 3) ** 0.5)) and mean_and_error([1.0])[1] == float("inf")
    one = torch.full((2, 2), 100, dtype=torch.uint8)
    assert psnr(one, one + 10) == pytest.approx(28.13, abs=0.01)
    assert snr(torch.ones(10), torch.full((10,), 1.1)) == pytest.approx(20, abs=0.01)


def test_probes_are_sized_for_the_model_and_the_scan_reads_everything():
    checkpoint = open_files([FITTED.model], {})
    assert drawn_probes(checkpoint, 2).frames.shape == (2, 17, 64, 64, 3)
    stored = {s.name: s for s in scan(checkpoint.source("connectors"))}
    assert len(stored) == len(list(checkpoint.source("connectors").keys())) and all(s.largest < 1e3 for s in stored.values())


def test_a_diagnosis_is_healthy_without_failures():
    found = Diagnosis("m", [Check("a", "pass", ""), Check("b", "warning", "", "w"), Check("c", "skipped", "")])
    assert found.healthy and found["b"].code == "w"
    found.checks.append(Check("d", "fail", "broken", "x.y"))
    assert not found.healthy and found.to_json()["problems"] == ["x.y"]
