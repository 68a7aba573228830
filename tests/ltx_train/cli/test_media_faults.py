"""caption, split, reference and demo on a bad day: options that contradict, films of one name, places that cannot be written, foreign folders."""

import json
import socket
import threading
import time

import numpy as np
import pytest
import torch

from ltx_train.__main__ import main
from ltx_train.captioner import job
from ltx_train.captioner.endpoint import Endpoint, EndpointCaptioner, EndpointError, check_address
from ltx_train.captioner.local import LocalCaptioner
from ltx_train.controls import depth
from ltx_train.errors import ConfigError, StopRequested
from ltx_train.tiny import media


@pytest.fixture(scope="module")
def film(tmp_path_factory):
    """Two scenes of 12 frames at 24 a second."""
    frames = [np.full((48, 64, 3), ((200, 30, 30), (20, 60, 220))[n >= 12], np.uint8) for n in range(24)]
    return media.encode(tmp_path_factory.mktemp("film") / "film.mp4", frames, 24)


def assert_refused(capsys, *words, told):
    """A verb must end with one clear line that says ``told``, and a hint."""
    assert main([str(word) for word in words]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert lines[0].startswith("error: ") and told in lines[0] and len(lines) > 1 and "Traceback" not in lines[0], lines


CONTRADICTIONS = [
    ("--adaptive-window 3", "--adaptive-window does nothing with the detector simple"),
    ("--detector content --fade-bias 0.5", "--fade-bias does nothing"),
    ("--detector content --frame-skip 2 --stats-file s.csv", "stats_file tells of every frame"),
    ("--max-length 1ms", "less than a frame"),
    ("--filter-shorter-than 60", "No scene of film.mp4 has 60 s"),
    ("--save-images -1", "no fewer than 0"),
]


@pytest.mark.parametrize(("flags", "told"), CONTRADICTIONS, ids=lambda value: value.split()[0])
def test_options_of_split_that_cannot_be(capsys, film, tmp_path, flags, told):
    assert_refused(capsys, "split", film, tmp_path / "out", *flags.split(), told=told)
    assert not (tmp_path / "out").exists()


def test_films_of_one_name_and_another_cut_never_share_clips(capsys, film, tmp_path):
    films, out = tmp_path / "films", tmp_path / "out"
    films.mkdir()
    for name in ("a.mov", "a.mp4"):
        (films / name).write_bytes(film.read_bytes())
    cut = ["split", str(films), str(out), "--min-scene-length", "8"]
    assert main(cut) == 0 and main(cut) == 0
    made = {path.name: path.stat().st_mtime_ns for path in out.glob("*.mp4")}
    assert sorted(made) == ["a-scene-001.mp4", "a-scene-002.mp4", "a_mp4-scene-001.mp4", "a_mp4-scene-002.mp4"]
    capsys.readouterr()
    assert_refused(capsys, *cut, "--max-length", "0.3", told="cut another way")
    assert_refused(capsys, *cut, "--detector", "content", "--stats-file", tmp_path / "s.csv", told="--stats-file is for one film")
    assert {path.name: path.stat().st_mtime_ns for path in out.glob("*.mp4")} == made


def test_places_that_are_none(capsys, film, tmp_path):
    (tmp_path / "file.txt").write_text("x")
    (tmp_path / "folder.json").mkdir()
    assert_refused(capsys, "split", film, tmp_path / "file.txt", told="is a file")
    assert_refused(capsys, "reference", film.parent, "-o", tmp_path / "refs.xlsx", told="cannot be paired in 'refs.xlsx'")
    assert_refused(capsys, "reference", film.parent, "-o", tmp_path / "folder.json", told="is a folder")
    assert_refused(capsys, "caption", film.parent, "-o", tmp_path / "folder.json", told="a folder of that name is there")
    assert_refused(capsys, "caption", film.parent, "-e", "xyz", told="ends in .xyz")
    assert_refused(capsys, "caption", tmp_path / "file.txt", told="No clip was found")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file.txt", "folder.json"]


ADDRESSES = ["http://127.0.0.1:abc/v1", "http://127.0.0.1:99999/v1", "http://[::1/v1", "http://127.0.0.1:9/v 1", "http://127.0.0.1:9/vü", "http://127.0.0.1:9/v1?key=3", "http://:80/", ""]


@pytest.mark.parametrize("url", ADDRESSES)
def test_an_address_that_is_none_is_told_as_one(url):
    with pytest.raises(ConfigError, match="no http"):
        check_address(url)


def test_something_else_that_listens_there_and_a_key_with_a_line_break(monkeypatch):
    monkeypatch.setenv("LTX_TRAIN_CAPTION_KEY", "secret\n")
    with socket.create_server(("127.0.0.1", 0)) as server:

        def answer():
            line, _ = server.accept()
            with line:
                line.sendall(b"SSH-2.0-OpenSSH_9.6\r\n")
                line.recv(1 << 16)

        threading.Thread(target=answer, daemon=True).start()
        endpoint = Endpoint(EndpointCaptioner(url=f"http://127.0.0.1:{server.getsockname()[1]}/v1", retries=0))
        assert endpoint.key == "secret"
        with pytest.raises(EndpointError, match="not as a web server does|reset"):
            endpoint.ask({})
    monkeypatch.setenv("LTX_TRAIN_CAPTION_KEY", "schlüssel")
    with pytest.raises(ConfigError, match="LTX_TRAIN_CAPTION_KEY"):
        Endpoint(EndpointCaptioner())


@pytest.mark.parametrize("text", ['{"model_type": "qwen', "[1]"])
def test_a_damaged_model_folder_is_named(tmp_path, text):
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ConfigError, match=r"config\.json"):
        LocalCaptioner(model_path=str(tmp_path)).build()


def test_the_depth_model_is_loaded_once_for_all_clips(monkeypatch):
    loaded = []
    monkeypatch.setattr(depth, "_Estimator", lambda control: loaded.append(control) or (lambda frame: frame[..., 0].numpy().astype(np.float32)))
    control = depth.DepthControl(model_path="somewhere")
    for _ in range(2):
        assert len(list(control.apply([torch.zeros(16, 16, 3, dtype=torch.uint8)]))) == 1
    assert len(loaded) == 1 and "estimator" not in control.model_dump()


@pytest.mark.parametrize("text", ["[]", "{", '{"a.mp4": 3}', b"\xff\xfe\x00"])
def test_a_damaged_record_of_what_was_made_says_nothing(tmp_path, text):
    from ltx_train.captioner.job import _Result
    from ltx_train.data.writers import Record

    for name in ("record.json", ".captions.json.written"):
        (tmp_path / name).write_bytes(text if isinstance(text, bytes) else text.encode())
    record = Record(tmp_path / "record.json")
    assert record.keys == {} and record.get(tmp_path / "a.mp4") is None
    record.set(tmp_path / "a.mp4", "x")
    assert json.loads((tmp_path / "record.json").read_text()) == {"a.mp4": "x"}
    assert not _Result(tmp_path / "captions.json").ours(tmp_path / "a.mp4", "a caption")


def test_a_stop_does_not_wait_for_an_endpoint_that_says_nothing(film, tmp_path, monkeypatch):
    asked, answer = threading.Event(), threading.Event()

    class Silent(Endpoint):
        def caption(self, path, sound=None):
            asked.set()
            answer.wait(60)
            return "too late"

    def check():
        if asked.is_set():
            raise StopRequested

    monkeypatch.setattr(job, "PATIENCE", 0.05)
    started = time.monotonic()
    with pytest.raises(StopRequested):
        job.caption_dataset(job.CaptionJob(input=str(film), output=str(tmp_path / "c.json")), captioner=Silent(EndpointCaptioner()), check=check)
    answer.set()
    assert time.monotonic() - started < 20 and not (tmp_path / "c.json").exists()


def test_what_is_wrong_is_told_before_anything_is_written(capsys, film, tmp_path):
    out = tmp_path / "out"
    assert_refused(capsys, "demo", "--steps", 0, "--out", out, told="--steps 0")
    assert_refused(capsys, "demo", "--family", "ltx2.3", "--media", tmp_path / "none", "--out", out, told="There is no dataset")
    assert_refused(capsys, "preprocess", film.parent, "--model-path", tmp_path / "none", told="Model file not found")
    assert_refused(capsys, "plan", "job.yaml", "--ram", -1, told="--ram -1")
    assert not out.exists() and [path.name for path in film.parent.iterdir()] == ["film.mp4"]


def test_a_link_to_nothing_fails_alone(capsys, film, tmp_path):
    (tmp_path / "a.mp4").symlink_to(tmp_path / "gone.mp4")
    (tmp_path / "b.mp4").write_bytes(film.read_bytes())
    assert main(["reference", str(tmp_path), "--type", "grey", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["made"] == ["b.mp4"] and "cannot be read" in told["failed"]["a.mp4"]
