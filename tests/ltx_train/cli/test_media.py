"""The verbs caption, split and reference with the official scripts' flags."""

import json

import numpy as np
import pytest

from ltx_train.__main__ import main, parser
from ltx_train.cli.media import captioner_section, scene_section, seconds
from ltx_train.controls.kinds import Control
from ltx_train.data.probe import probe
from ltx_train.errors import ConfigError
from ltx_train.tiny import media


@pytest.fixture(scope="module")
def film(tmp_path_factory):
    """Three scenes of 20, 30 and 25 frames at 24 a second, with sound."""
    colours = ((200, 30, 30), (20, 60, 220), (30, 200, 40))
    frames = [np.full((96, 128, 3), colours[(n >= 20) + (n >= 50)], np.uint8) for n in range(75)]
    return media.encode(tmp_path_factory.mktemp("film") / "film.mp4", frames, 24, sound=media.tone(75 / 24, 48000))


def output_of(capsys, arguments):
    code = main(arguments)
    return code, json.loads(capsys.readouterr().out)


def test_split_cuts_a_film_with_the_official_flags(film, tmp_path, capsys):
    code, told = output_of(capsys, ["split", str(film), str(tmp_path / "out"), "--min-scene-length", "8", "--save-images", "2", "--json"])
    assert code == 0 and len(told["clips"]) == 3 and told["failed"] == {}
    assert [probe(tmp_path / "out" / f"film-scene-{n:03d}.mp4").frames for n in (1, 2, 3)] == [20, 30, 25]
    assert len(list((tmp_path / "out" / ".images").glob("*.png"))) == 6


def test_split_takes_times_as_the_official_script_does(film):
    options = parser().parse_args(["split", str(film), "out", "--filter-shorter-than", "1.5s", "--skip-start", "00:00:01", "--skip-end", "0.5", "-d", "2s", "--max-length", "900ms",
                                   "--min-scene-length", "12", "--detector", "adaptive", "--threshold", "2.5", "--luma-only", "--adaptive-window", "3", "--downscale", "2", "--frame-skip", "0", "--max-scenes", "4"])  # fmt: skip
    section = scene_section(options, film)
    assert (section.filter_shorter_than, section.skip_start, section.skip_end, section.duration, section.max_seconds, section.min_seconds) == (1.5, 1.0, 0.5, 2.0, 0.9, 0.5)
    assert (section.detector, section.threshold, section.luma_only, section.adaptive_window, section.downscale, section.max_scenes) == ("adaptive", 2.5, True, 3, 2, 4)
    assert [seconds(t) for t in ("5", "5s", "00:01:02.5", "1:30", "250ms")] == [5.0, 5.0, 62.5, 90.0, 0.25]
    with pytest.raises(ConfigError, match="no time"):
        seconds("soon")


@pytest.mark.parametrize("flags", [[], ["--detector", "content", "--luma-only", "--threshold", "10", "--downscale", "1", "--stats-file", "STATS"]])
def test_what_is_skipped_is_left_out(flags, film, tmp_path, capsys):
    flags = [str(tmp_path / "stats.csv") if f == "STATS" else f for f in flags]
    code, told = output_of(capsys, ["split", str(film), str(tmp_path), "--min-scene-length", "4", "--skip-start", "0.5s", "--skip-end", "1.5s", "--json", *flags])
    assert code == 0
    found = [probe(p).frames for p in sorted(tmp_path.glob("*.mp4"))]
    assert found == [8, 19], "from frame 12 to 39: the rest of the first scene, a part of the second"
    assert not flags or len((tmp_path / "stats.csv").read_text().splitlines()) > 70


def test_split_of_a_folder_names_what_it_cannot_cut(film, tmp_path, capsys):
    folder = tmp_path / "films"
    folder.mkdir()
    (folder / "a.mp4").write_bytes(film.read_bytes())
    (folder / "b.mp4").write_bytes(b"no film")
    code, told = output_of(capsys, ["split", str(folder), str(tmp_path / "out"), "--json"])
    assert code == 0 and list(told["failed"]) == ["b.mp4"] and len(told["clips"]) == 3
    assert main(["split", str(tmp_path / "none.mp4"), str(tmp_path / "out")]) == 2
    assert "There is no film" in capsys.readouterr().err


def test_reference_of_a_folder(tmp_path, capsys):
    folder = media.dataset(tmp_path / "clips", 2, frames=9, width=64, height=48, sound=False)
    (folder / "bad.mp4").write_bytes(b"no clip")
    code, told = output_of(capsys, ["reference", str(folder), "--type", "low_resolution", "--factor", "3", "--json"])
    assert code == 0 and told["made"] == ["clip0.mp4", "clip1.mp4"] and list(told["failed"]) == ["bad.mp4"]
    assert (folder / ".ltx_references" / "low_resolution" / "dataset.jsonl").is_file()
    code, told = output_of(capsys, ["reference", str(folder), "--type", "low_resolution", "--factor", "3", "--batch-size", "100", "--json"])
    assert code == 0 and told["made"] == [] and told["kept"] == ["clip0.mp4", "clip1.mp4"]
    assert main(["reference", str(folder), "--type", "canny", "--low", "300", "--high", "200"]) == 2
    assert main(["reference", str(folder), "--type", "grey", "--low", "3"]) == 2, "a setting of another kind is refused"
    assert main(["reference", str(tmp_path / "none")]) == 2


def test_all_controls_can_be_asked_for():
    from typing import get_args

    from ltx_train.cli.media import CONTROLS

    kinds = {c.model_fields["kind"].default for c in get_args(get_args(Control)[0])}
    assert kinds == set(CONTROLS)


def caption_options(*flags):
    return parser().parse_args(["caption", "clips", *flags])


def test_caption_takes_the_official_flags():
    options = caption_options("-o", "o.json", "-c", "qwen_omni", "--vllm-url", "http://127.0.0.1:9/v1", "--vllm-model", "m", "--no-thinking", "--max-tokens", "99", "-i", "ask", "-e", "mp4", "-r", "-f", "3", "--override", "-w", "4")
    values, hosts = captioner_section(options)
    assert values == {"kind": "endpoint", "url": "http://127.0.0.1:9/v1", "model": "m", "thinking": False, "max_tokens": 99, "instruction": "ask", "fps": 3.0} and hosts == frozenset()
    assert (options.override, options.recursive, options.num_workers, options.extensions) == (True, True, 4, "mp4")


def test_gemini_is_chosen_by_name_and_a_local_model_by_its_folder():
    values, hosts = captioner_section(caption_options("-c", "gemini_flash", "--skip-audio"))
    assert values["model"] == "gemini-3.5-flash" and values["send"] == "frames" and values["sound"] is False and values["repetition_penalty"] is None
    assert hosts == {"generativelanguage.googleapis.com"}
    values, _ = captioner_section(caption_options("-c", "local", "--model-path", "/m", "--device", "cpu"))
    assert values == {"kind": "local", "model_path": "/m", "device": "cpu"}
    with pytest.raises(ConfigError, match="needs --model-path"):
        captioner_section(caption_options("-c", "local"))


def test_caption_refuses_foreign_hosts_and_keys_in_the_open(tmp_path, capsys):
    folder = media.dataset(tmp_path / "clips", 1, frames=9, width=64, height=48, sound=False)
    (folder / "clip0.txt").unlink()
    assert main(["caption", str(folder), "--api-key", "secret"]) == 2
    assert "secret" not in capsys.readouterr().err
    assert main(["caption", str(folder), "--vllm-url", "http://example.org/v1"]) == 2
    assert "example.org is not allowed" in capsys.readouterr().err
    assert main(["caption", str(tmp_path / "none")]) == 2
    assert not (folder / "dataset.json").exists()
