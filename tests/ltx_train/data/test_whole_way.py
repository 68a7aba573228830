"""From a folder of every awkward kind to batches, with a stand-in codec: nothing crashes, and all that is usable is trained on."""

from __future__ import annotations

import os

import pytest
import torch
import torch.nn.functional as F

from ltx_train.data.batches import Batches
from ltx_train.data.buckets import ClipOptions, encode_batches, parse_buckets
from ltx_train.data.cache import Cache
from ltx_train.data.dataset import CachedDataset, DataSection, make_sampler
from ltx_train.data.findings import MediaError
from ltx_train.data.manifest import Manifest, manifest_entry
from ltx_train.data.media import prepare, read_mask, read_sound_of
from ltx_train.data.report import make_report
from ltx_train.data.sources import FolderSource, open_source
from ltx_train.errors import DataError
from ltx_train.geometry import AudioGrid, Latents, VideoFactors, VideoGrid
from ltx_train.text import Context, TextFeatures
from ltx_train.tiny import media as tiny

FACTORS = VideoFactors()
GRID = AudioGrid(1)


def fake_video(frames):
    """[F,H,W,3] uint8 -> [1,3,F',H',W']: means over the latent cells."""
    pixels = F.avg_pool2d(frames.permute(0, 3, 1, 2).float(), 32)
    return torch.cat([pixels[:1], pixels[1:].reshape(-1, 8, *pixels.shape[1:]).mean(1)]).permute(1, 0, 2, 3)[None]


def encode_all(report, cache):
    """What preprocessing does, in a few lines."""
    entries, refused = [], []
    for batch in prepare(encode_batches(report.plans, 2), FACTORS, workers=2):
        for item in batch:
            try:
                if item.error is not None:
                    raise item.error
                sound = read_sound_of(item.plan)
            except DataError:
                refused.append(item.plan.id)
                continue
            plan, clip = item.plan, item.clip
            video = audio = None
            if clip.frames is not None:
                video = cache.video_key(plan, "fake")
                grid = VideoGrid.of_pixels(plan.bucket.width, plan.bucket.height, plan.bucket.frames, float(plan.fps), FACTORS)
                cache.put_latents(video, Latents(fake_video(clip.frames), grid))
            if sound is not None:
                audio = cache.audio_key(plan, "fake")
                grid = GRID.of_seconds(plan.seconds)
                cache.put_latents(audio, Latents(torch.ones(1, 8, grid.steps, 16), grid))
            text = cache.text_key(plan.sample.caption, "fake")
            cache.put_text(text, TextFeatures("v1", torch.ones(2, 4)))
            entries.append(manifest_entry(plan, text=text, video=video, audio=audio, audio_grid=GRID, factors=FACTORS))
    cache.write_index(Manifest(tuple(entries), {}, tuple(report.skipped()), {}, GRID))
    return refused


class Contexts:
    def batch(self, keys):
        return Context(torch.ones(len(keys), 2, 4), None)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    folder = tmp_path_factory.mktemp("all") / "clips"
    kinds = tiny.write_corpus(folder)
    before = {p: p.stat().st_mtime_ns for p in folder.rglob("*")}
    report = make_report(open_source(folder).samples(), parse_buckets("128x96x9;128x96"), ClipOptions(), FACTORS)
    cache = Cache(folder.parent / "cache")
    refused = encode_all(report, cache)
    assert {p: p.stat().st_mtime_ns for p in folder.rglob("*")} == before, "the user's folder is untouched"
    return kinds, report, cache, refused


def test_every_kind_ends_as_an_entry_or_a_finding(whole):
    kinds, report, cache, refused = whole
    assert report.total == len(kinds) > 80
    data = CachedDataset(cache.root)
    named = {os.path.basename(s["path"]) for s in data.manifest.skipped} | set(refused)
    trained = {e.id for e in data.manifest.entries}
    assert trained | named == set(kinds) and not trained & named
    assert named == {n for n, k in kinds.items() if k.expected.refused and k.expected.refused != "bucket.too_short"}
    assert data.missing() == [] and len(data) == report.usable - len(refused)


def test_it_trains(whole):
    _, _, cache, _ = whole
    data = CachedDataset(cache.root)
    sampler = make_sampler(data, DataSection(preprocessed_data_root="x"), batch_size=2, accumulation=1, seed=1)
    batches = Batches(data, sampler, Contexts(), workers=2)
    seen = set()
    for step in range(2 * len(data)):
        batch = batches.get(step)
        seen |= set(batch.ids)
        for latents in (batch.video, batch.audio):
            assert latents is None or (latents.batch == 2 and torch.isfinite(latents.values).all())
    batches.close()
    assert len(seen) == len(data)


def test_a_second_run_writes_the_same_bytes(whole, tmp_path):
    _, report, cache, _ = whole
    again = Cache(tmp_path)
    encode_all(report, again)
    files = [{p.relative_to(c.root): p.read_bytes() for p in c.root.rglob("*") if p.is_file()} for c in (cache, again)]
    assert files[0] == files[1] and len(files[0]) > 100


def test_link_loops_end(tmp_path):
    tiny.dataset(tmp_path / "a", 1)
    try:
        (tmp_path / "a" / "loop").symlink_to(tmp_path / "a", target_is_directory=True)
    except OSError:
        pytest.skip("this system makes no links")
    assert [s.id for s in FolderSource(path=str(tmp_path / "a")).samples()] == ["clip0.mp4"]


def test_masks_of_another_shape_are_named(tmp_path):
    tiny.dataset(tmp_path / "a", 1)
    (tmp_path / "m").mkdir()
    source = FolderSource(path=str(tmp_path / "a"), video_mask=str(tmp_path / "m"))
    torch.save({"mask": torch.ones(2, 3, 4)}, tmp_path / "m" / "clip0.pt")
    plan = make_report(source.samples(), parse_buckets("128x96x9"), ClipOptions(), FACTORS).plans[0]
    assert read_mask(plan, FACTORS).shape == (2, 3, 4)
    item = next(prepare([[plan]], FACTORS))[0]
    assert [f.code for f in item.notes] == ["mask.empty"]
    torch.save(torch.ones(2, 4, 4), tmp_path / "m" / "clip0.pt")
    with pytest.raises(MediaError, match="latents are"):
        read_mask(plan, FACTORS)
    (tmp_path / "m" / "clip0.pt").write_bytes(b"no tensor")
    assert next(prepare([[plan]], FACTORS))[0].error.code == "media.unreadable"
