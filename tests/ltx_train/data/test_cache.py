"""Keys change exactly when they must; entries are whole or absent; the same content gives the same bytes."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from fractions import Fraction
from pathlib import Path

import pytest
import torch

from ltx_train.data.buckets import ClipOptions, parse_buckets, plan
from ltx_train.data.cache import Cache, forecast, pixel_facts
from ltx_train.data.dataset import open_dataset
from ltx_train.data.manifest import Manifest, ManifestEntry, manifest_entry
from ltx_train.data.orientation import Orientation
from ltx_train.data.probe import probe
from ltx_train.data.references import plan_reference
from ltx_train.data.sources import MemoryClip, Sample
from ltx_train.errors import DataError
from ltx_train.geometry import AudioGrid, Latents, VideoFactors, VideoGrid
from ltx_train.text import TextFeatures
from ltx_train.tiny.media import counter_clip

FACTORS = VideoFactors()


@pytest.fixture(scope="module")
def clip(tmp_path_factory):
    return counter_clip(tmp_path_factory.mktemp("clips") / "a.mp4", 40, sound=True)


def planned(path, buckets="64x64x9", roles=None, caption="c", **options):
    return plan(Sample("a.mp4", path, caption, roles or {}), probe(path), parse_buckets(buckets), ClipOptions(**options))


def keys(path, codec="vae", **more):
    cache, first = Cache("nowhere"), planned(path, **more)[0]
    return cache.video_key(first, codec), cache.audio_key(first, codec)


def test_keys_change_when_they_must(clip, tmp_path):
    video, audio = keys(clip)
    assert keys(clip) == (video, audio)
    for change in ({"buckets": "96x64x9"}, {"codec": "other"}, {"fps": 12}, {"crop": "random"}, {"letterbox": True}, {"frame_step": 2}, {"frame_selection": "uniform"}):
        assert keys(clip, **change)[0] != video, change
    assert keys(clip, buckets="96x64x9")[1] == audio, "another picture size leaves the sound"
    assert keys(clip, buckets="64x64x17")[1] != audio, "another length does not"
    other = counter_clip(tmp_path / "a.mp4", 40, sound=True, first=1)
    assert keys(other)[0] != video


def test_what_the_reader_makes_of_a_file_is_in_its_key(clip):
    first = planned(clip)[0]
    seen = [{}, {"orientation": Orientation(90)}, {"orientation": Orientation(0, True)}, {"sample_aspect": Fraction(4, 3)}, {"interlaced": True}, {"transfer": "pq"}]
    seen += [{"gamut": "bt2020"}, {"alpha": True}, {"coded_width": 8}]
    facts = [str(pixel_facts(replace(first, probe=replace(first.probe, **change)))) for change in seen]
    facts.append(str(pixel_facts(replace(first, probe=replace(first.probe, transfer="pq"), options=ClipOptions(hdr="refuse")))))
    assert len(set(facts)) == len(facts) == 10


def test_keys_stay_when_they_may(clip, tmp_path):
    video, audio = keys(clip)
    for change in ({"caption": "another"}, {"alpha_colour": (9, 9, 9)}, {"hdr": "refuse"}, {"windows": 5}, {"audio_max_seconds": 3}):
        assert keys(clip, **change) == (video, audio), change
    moved = tmp_path / "elsewhere.mp4"
    shutil.copy(clip, moved)
    os.utime(moved, (1, 1))
    assert keys(moved) == (video, audio), "a copy is the same clip"


def test_a_changed_file_is_noticed(tmp_path):
    path = counter_clip(tmp_path / "a.mp4", 12)
    cache = Cache(tmp_path / "cache")
    first = cache.video_key(planned(path)[0], "x")
    counter_clip(path, 12, first=3)
    os.utime(path, ns=(1, 1))
    assert cache.video_key(planned(path)[0], "x") != first


def test_references_masks_and_memory_have_keys(clip, tmp_path):
    mask = tmp_path / "m.png"
    mask.write_bytes(b"mask one")
    first = planned(clip, roles={"reference_video": clip, "video_mask": mask})[0]
    cache = Cache(tmp_path)
    assert cache.video_key(plan_reference(first, probe(clip), FACTORS), "x") != cache.video_key(planned(clip, buckets="64x64x17")[0], "x")
    key = cache.mask_key(first, "video_mask", FACTORS)
    assert cache.mask_key(first, "video_mask", VideoFactors(8, 16, 16)) != key
    mask.write_bytes(b"mask two!")
    assert cache.mask_key(first, "video_mask", FACTORS) != key
    clips = [MemoryClip("m", torch.full((9, 64, 64, 3), v)) for v in (0.0, 0.5)]
    made = [cache.video_key(plan(Sample("m", None, "", in_memory=c), probe(c), parse_buckets("64x64x9"), ClipOptions())[0], "x") for c in clips]
    assert made[0] != made[1]


def test_text_keys():
    cache = Cache("nowhere")
    assert cache.text_key("a", "e1") == cache.text_key("a", "e1") != cache.text_key("b", "e1")
    assert cache.text_key("a", "e1") != cache.text_key("a", "e2")


def test_round_trips_and_equal_bytes(tmp_path):
    video = Latents(torch.randn(1, 8, 2, 2, 3), VideoGrid(2, 2, 3, 30000 / 1001, FACTORS))
    audio = Latents(torch.randn(1, 8, 5, 16), AudioGrid(5))
    text = TextFeatures("v2", torch.randn(3, 8).bfloat16(), torch.randn(3, 4).bfloat16())
    folders = [Cache(tmp_path / n) for n in "ab"]
    for cache in folders:
        cache.put_latents("video-" + "1" * 40, video)
        cache.put_latents("audio-" + "2" * 40, audio)
        cache.put_text("text-" + "3" * 40, text, "caption")
        got = cache.get_latents("video-" + "1" * 40)
        assert got.grid == video.grid and torch.equal(got.values, video.values)
        assert cache.get_latents("audio-" + "2" * 40).grid == audio.grid
        back = cache.get_text("text-" + "3" * 40)
        assert back.kind == "v2" and torch.equal(back.video, text.video) and torch.equal(back.audio, text.audio)
    files = [{p.relative_to(c.root): p.read_bytes() for p in c.root.rglob("*.safetensors")} for c in folders]
    assert files[0] == files[1] and len(files[0]) == 3


def test_damaged_and_missing_entries_are_named(tmp_path):
    cache = Cache(tmp_path)
    key = "video-" + "1" * 40
    with pytest.raises(DataError, match="has no"):
        cache.get(key)
    cache.put(key, {"latents": torch.zeros(4)})
    cache.path(key).write_bytes(cache.path(key).read_bytes()[:-3])
    with pytest.raises(DataError, match="cannot be read"):
        cache.get(key)


KILLED = """
import os, sys, threading, time, torch
sys.path.insert(0, sys.argv[1])
from ltx_train.data.cache import Cache
cache = Cache(sys.argv[2])
print("go", flush=True)
for n in range(10000):
    cache.put(f"video-{n:040d}", {"x": torch.full((20000,), float(n))})
"""


def test_a_killed_writer_leaves_whole_files_only(tmp_path):
    root = Path(__file__).resolve().parents[3]
    child = subprocess.Popen([sys.executable, "-c", KILLED, str(root), str(tmp_path)], stdout=subprocess.PIPE)
    child.stdout.readline()
    try:
        child.wait(0.4)
    except subprocess.TimeoutExpired:
        child.kill()
        child.wait()
    cache = Cache(tmp_path)
    cache.clean()
    found = list(tmp_path.rglob("*.safetensors"))
    assert found and not list((tmp_path / "tmp").iterdir())
    for path in found:
        assert cache.get(f"video-{path.stem}").tensors["x"].unique().numel() == 1


def test_a_full_disk_is_named_and_leaves_nothing(tmp_path, monkeypatch):
    import errno

    cache = Cache(tmp_path)

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(DataError) as caught:
        cache.put("video-" + "1" * 40, {"x": torch.zeros(3)})
    assert caught.value.code == "cache.disk_full"
    assert [p for p in tmp_path.rglob("*") if p.is_file()] == []


def test_manifest_round_trip(tmp_path, clip):
    entry = manifest_entry(planned(clip)[0], text="text-1", video="video-1", audio=None, audio_grid=AudioGrid(1), factors=FACTORS)
    assert (entry.bucket, entry.fps, entry.audio_steps, entry.tokens) == ("64x64x9", 24.0, 9, 8)
    other = ManifestEntry("b", "b.wav", "c", "text-2", audio="audio-1", audio_steps=50, roles={"audio_mask": "mask-1"})
    manifest = Manifest((entry, other), {"family": "ltx2.3"}, ({"path": "x", "code": "media.empty"},), {"": "text-3"}, AudioGrid(1))
    cache = Cache(tmp_path)
    cache.write_index(manifest)
    assert Manifest.read(tmp_path) == manifest
    assert entry.group != other.group and replace(entry, audio="audio-9").group == entry.group
    (tmp_path / "index.json").write_text("{", encoding="utf-8")
    with pytest.raises(DataError, match="damaged"):
        Manifest.read(tmp_path)
    with pytest.raises(DataError, match="no index"):
        Manifest.read(tmp_path / "none")


@pytest.mark.parametrize("changes", [{"video": "../../x"}, {"video": "video-../x"}, {"text": 5}, {"weight": "x"}, {"repeats": 0}, {"roles": {"video_mask": "mask"}}])
def test_an_index_line_that_names_no_entry_is_told(tmp_path, changes):
    Cache(tmp_path).write_index(Manifest((ManifestEntry("a", "a.mp4", "c", "text-1", "video-2", weight=0.5),)))
    assert Manifest.read(tmp_path).entries[0].video == "video-2"
    data = json.loads((tmp_path / "index.json").read_text(encoding="utf-8"))
    data["entries"][0] |= changes
    (tmp_path / "index.json").write_text(json.dumps(data), encoding="utf-8")
    with pytest.raises(DataError) as error:
        Manifest.read(tmp_path)
    assert error.value.code == "cache.index"


def test_an_entry_that_holds_something_else_is_damaged(tmp_path):
    cache = Cache(tmp_path)
    for key, read in (("video-1", cache.get_latents), ("text-1", cache.get_text), ("mask-1", cache.get_mask)):
        cache.put(key, {"x": torch.zeros(1)}, {"grid": {"kind": "video"}})
        with pytest.raises(DataError, match="holds no") as error:
            read(key)
        assert error.value.code == "cache.damaged"


def test_an_empty_cache_is_told(tmp_path):
    Cache(tmp_path).write_index(Manifest(()))
    with pytest.raises(DataError, match="lists no clip"):
        open_dataset(tmp_path, factors=FACTORS)


def test_forecast(tmp_path, clip):
    plans = planned(clip, buckets="64x64x17")
    cache = Cache(tmp_path)
    found = forecast(cache, plans, FACTORS, codec="x", captions=["four" * 10])
    assert found.fits
    assert found.bytes_needed == 3 * 4 * 128 * 4 + round(17 / 24 * 25) * 128 * 4 + 4096 + 12 * 6144 * 2
    cache.put_latents(cache.video_key(plans[0], "x"), Latents(torch.zeros(1, 128, 3, 2, 2), VideoGrid(3, 2, 2)))
    assert forecast(cache, plans, FACTORS, codec="x").bytes_needed == 0
