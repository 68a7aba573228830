"""The report: rows, counts, exit when nothing is usable, and that its plans are what is read."""

from __future__ import annotations

import json
import time

import pytest

from ltx_train.data.buckets import ClipOptions, parse_buckets
from ltx_train.data.findings import CODES
from ltx_train.data.media import read_clip
from ltx_train.data.proposals import propose
from ltx_train.data.report import make_report, thumbnail, usable_or_raise
from ltx_train.data.sources import ChainSource, FolderSource, open_source
from ltx_train.errors import ConfigError, DataError
from ltx_train.geometry import VideoFactors
from ltx_train.tiny import media as tiny

FACTORS = VideoFactors()
BUCKETS = parse_buckets("128x96x9;128x96")


def report(folder, buckets=BUCKETS, **more):
    return make_report(open_source(folder).samples(), buckets, ClipOptions(), FACTORS, **more)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    folder = tmp_path_factory.mktemp("corpus")
    names = ["plain.mp4", "stereo.mp4", "turned90.mp4", "exif6.jpg", "empty.mp4", "text.mp4", "cut_faststart.mp4", "alone.wav", "cut.png", "animated.gif"]
    tiny.write_corpus(folder, names)
    return folder


def test_rows_say_what_is_read(corpus):
    found = report(corpus)
    data = json.loads(json.dumps(found.to_json()))
    assert (data["total"], data["usable"]) == (10, 6)
    rows = {row["id"]: row for row in data["clips"]}
    assert {n for n, row in rows.items() if not row["usable"]} == {"empty.mp4", "text.mp4", "cut_faststart.mp4", "cut.png"}
    for row in data["clips"]:
        assert row["usable"] != any(f["refused"] for f in row["findings"])
        assert all(f["code"] in CODES and f["message"] and f["fix"] for f in row["findings"])
    turned = rows["turned90.mp4"]
    assert (turned["rotation"], turned["bucket"], turned["frames_used"], turned["frames"]) == (270, "128x96x9", 9, 25)
    assert rows["stereo.mp4"]["audio"]["channels"] == 2 and rows["alone.wav"]["bucket"] is None
    assert data["findings"]["media.rotated"]["clips"] == 2 and data["with_audio"] == 2


def test_every_usable_row_is_read_and_no_other(corpus):
    found = report(corpus)
    assert len([read_clip(p) for p in found.plans]) == found.usable == 6
    assert {s["path"].rsplit("/", 1)[-1] for s in found.skipped()} == {"empty.mp4", "text.mp4", "cut_faststart.mp4", "cut.png"}


def test_thumbnails(corpus):
    rows = {row.sample.id: row for row in report(corpus).rows}
    small = thumbnail(rows["turned90.mp4"], 64)
    assert small.shape == (48, 64, 3) and tiny.read_counter(small) == 0
    assert thumbnail(rows["empty.mp4"]) is None and thumbnail(rows["alone.wav"]) is None


def test_wanted_roles_and_captions(tmp_path):
    tiny.counter_clip(tmp_path / "a.mp4", 12)
    (tmp_path / "a.txt").write_text("word " * 2000)
    found = report(tmp_path, wanted_roles=["reference_video"])
    codes = [f.code for f in found.rows[0].findings]
    assert found.usable == 0 and "role.unpaired" in codes and "caption.long" in codes
    assert found.rows[0].caption_tokens == 2500
    with pytest.raises(DataError, match="role.unpaired"):
        usable_or_raise(found)


def test_a_broken_reference_refuses_its_clip(tmp_path):
    tiny.dataset(tmp_path / "clips", 2)
    (tmp_path / "refs").mkdir()
    (tmp_path / "refs" / "clip0.mp4").write_bytes(b"")
    tiny.counter_clip(tmp_path / "refs" / "clip1.mp4", 25)
    source = FolderSource(path=str(tmp_path / "clips"), reference_video=str(tmp_path / "refs"))
    found = make_report(source.samples(), BUCKETS, ClipOptions(), FACTORS)
    assert [r.usable for r in found.rows] == [False, True] and "media.empty" in found.counts()


def test_each_dataset_has_its_buckets(tmp_path):
    for name in ("one", "two"):
        tiny.dataset(tmp_path / name, 1)
    sources = [FolderSource(path=str(tmp_path / "one"), resolution_buckets="64x64x9"), FolderSource(path=str(tmp_path / "two"))]
    found = make_report(ChainSource(sources=sources).samples(), BUCKETS, ClipOptions(), FACTORS)
    assert [str(p.bucket) for p in found.plans] == ["64x64x9", "128x96x9"]


def test_automatic_buckets(tmp_path):
    tiny.dataset(tmp_path, 2)
    found = report(tmp_path, lambda probes: propose(probes, FACTORS, 48))
    assert [str(b) for b in found.buckets] == ["128x96x25"] and found.usable == 2


def test_bad_buckets_and_empty_sets_are_errors(tmp_path, corpus):
    with pytest.raises(ConfigError):
        report(corpus, parse_buckets("100x96x9"))
    with pytest.raises(DataError):
        usable_or_raise(make_report([], BUCKETS, ClipOptions(), FACTORS))


def test_warnings(tmp_path):
    tiny.dataset(tmp_path, 4, sound=False)
    for file in tmp_path.glob("*.txt"):
        file.write_text("same")
    warnings = " ".join(report(tmp_path).warnings)
    assert "No clip has sound" in warnings and "same caption" in warnings


def test_a_thousand_files_are_quick(tmp_path):
    tiny.many_tiny_files(tmp_path, 1000)
    start = time.monotonic()
    found = report(tmp_path, parse_buckets("64x64x9"))
    assert found.usable == 1000
    assert time.monotonic() - start < 20  # 2.5 s when the machine is otherwise idle
