"""Cached datasets, batches, the official folder, and what training may import."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from ltx_train.data.batches import Batches, collate
from ltx_train.data.cache import Cache
from ltx_train.data.dataset import CachedDataset, DataSection, make_sampler, open_dataset
from ltx_train.data.manifest import Manifest, ManifestEntry
from ltx_train.errors import DataError
from ltx_train.geometry import AudioGrid, Latents, VideoFactors, VideoGrid, patchify
from ltx_train.text import Context, TextFeatures

FACTORS = VideoFactors()


class Contexts:
    def batch(self, keys):
        return Context(torch.stack([torch.full((4, 2), float(len(k))) for k in keys]), None)


@pytest.fixture
def root(tmp_path):
    """Six clips of two buckets; clip 1 has no sound; clip 2 has a reference and a mask."""
    cache = Cache(tmp_path)
    entries = []
    for n in range(6):
        large = n >= 4
        grid = VideoGrid(2, 2, 4 if large else 2, 24.0, FACTORS)
        video, audio, text = f"video-{n:040d}", f"audio-{n:040d}", f"text-{n % 3:040d}"
        cache.put_latents(video, Latents(torch.full((1, 8, grid.frames, grid.height, grid.width), float(n)), grid))
        if n != 1:
            cache.put_latents(audio, Latents(torch.full((1, 8, 9, 16), float(n)), AudioGrid(9)))
        cache.put_text(text, TextFeatures("v1", torch.full((3, 8), float(n % 3))))
        bucket = "128x64x9" if large else "64x64x9"
        entries.append(ManifestEntry(f"clip{n}", f"{n}.mp4", "c", text, video, None if n == 1 else audio, 9, {}, bucket, tokens=grid.tokens, weight=1 + n))
    cache.put_latents("video-" + "a" * 40, Latents(torch.zeros(1, 8, 2, 1, 1), VideoGrid(2, 1, 1)))
    cache.put("mask-" + "b" * 40, {"mask": torch.ones(2, 2, 2)})
    entries[2] = replace(entries[2], roles={"reference_video": "video-" + "a" * 40, "video_mask": "mask-" + "b" * 40})
    cache.put_text("text-" + "e" * 40, TextFeatures("v1", torch.zeros(1, 8)))
    cache.write_index(Manifest(tuple(entries), {}, (), {"": "text-" + "e" * 40}, AudioGrid(1)))
    return tmp_path


def section(**fields):
    return DataSection(preprocessed_data_root="x", **fields)


def test_items_and_units(root):
    data = open_dataset(root, factors=FACTORS)
    assert isinstance(data, CachedDataset) and len(data) == 6 and data.missing() == []
    assert len({u.group for u in data.units()}) == 3 and data.audio_coverage() == 5 / 6
    item = data.item(2)
    assert item.video.values.shape == (1, 8, 2, 2, 2) and item.roles["reference_video"].grid.height == 1 and item.roles["video_mask"].shape == (2, 2, 2)
    assert data.features(item.text).kind == "v1" and len(data.text_keys()) == 3


def test_silence_is_zeros_and_marked(root):
    data = CachedDataset(root)
    batch = collate([data.item(0), data.item(1)], Context(torch.zeros(2, 1, 1), None), data.audio_grid)
    assert batch.audio_present.tolist() == [True, False] and batch.audio.values.shape == (2, 8, 9, 16)
    assert batch.audio.values[1].abs().sum() == 0 and batch.weight.tolist() == [1, 2]
    alone = collate([data.item(1)], Context(torch.zeros(1, 1, 1), None), data.audio_grid)
    assert alone.audio.values.shape == (1, 8, 9, 16) and not alone.audio_present.any()
    assert collate([data.item(1)], Context(torch.zeros(1, 1, 1), None)).audio is None


def test_moving_a_batch_casts_latents_only(root):
    data = CachedDataset(root)
    batch = collate([data.item(2)], Context(torch.zeros(1, 1, 1), None), data.audio_grid).to("cpu", torch.bfloat16)
    assert batch.video.values.dtype == batch.roles["reference_video"].values.dtype == batch.context.video.dtype == torch.bfloat16
    assert batch.weight.dtype == torch.float32 and batch.roles["video_mask"].dtype == torch.float32 and batch.size == 1


@pytest.mark.parametrize("workers", [0, 3])
def test_batches_are_the_samplers_whatever_the_threads(root, workers):
    data = CachedDataset(root)
    sampler = make_sampler(data, section(), batch_size=2, accumulation=2, seed=3)
    batches = Batches(data, sampler, Contexts(), workers=workers)
    for step, micro in [(0, 0), (0, 1), (1, 0), (1, 1), (7, 1), (2, 0), (2, 0)]:
        batch = batches.get(step, micro)
        assert batch.ids == tuple(f"clip{i}" for i in sampler.batch_ids(step, micro))
        assert batch.video.values[:, 0, 0, 0, 0].tolist() == [float(i) for i in sampler.batch_ids(step, micro)]
    batches.close()


def test_caption_dropout_swaps_the_key(root):
    class Keys:
        def batch(self, keys):
            self.keys = keys
            return Context(torch.zeros(len(keys), 1, 1), None)

    data, store = CachedDataset(root), Keys()
    batches = Batches(data, make_sampler(data, section(), batch_size=2, accumulation=1, seed=0), store, workers=0, caption_dropout=1.0)
    batches.get(0)
    assert store.keys == ["text-" + "e" * 40] * 2


class KeyContexts:
    """Contexts that tell the caption: the last digit of its key, for both streams."""

    def batch(self, keys):
        value = torch.tensor([float(int(k[-1], 16)) for k in keys])[:, None, None]
        return Context(value, value.clone())


def dropped_share(root, **rates):
    """Shares of samples that lost the caption in (video, audio, both) over many steps, and the contexts themselves."""
    data = CachedDataset(root)
    batches = Batches(data, make_sampler(data, section(), batch_size=2, accumulation=1, seed=0), KeyContexts(), workers=0, caption_dropout=section(**rates).caption_dropouts)
    contexts = [batches.get(step).context for step in range(400)]
    video, audio = torch.cat([c.video for c in contexts]).view(-1) == 14, torch.cat([c.audio for c in contexts]).view(-1) == 14
    return video.float().mean(), audio.float().mean(), (video & audio).float().mean()


@pytest.mark.parametrize(
    ("rates", "expected"),
    [
        ({}, (0, 0, 0)),
        ({"caption_dropout": 0.5}, (0.5, 0.5, 0.5)),
        ({"video_caption_dropout": 0.5}, (0.5, 0, 0)),
        ({"audio_caption_dropout": 0.5}, (0, 0.5, 0)),
        ({"video_caption_dropout": 0.5, "audio_caption_dropout": 0.5}, (0.5, 0.5, 0.25)),
        ({"caption_dropout": 0.2, "video_caption_dropout": 0.5}, (0.6, 0.2, 0.2)),
    ],
)
def test_caption_dropout_by_stream_is_by_independent_coins(root, rates, expected):
    assert dropped_share(root, **rates) == pytest.approx(expected, abs=0.06)  # 800 coins: 3 deviations of a fair one are 0.053


def test_caption_dropout_does_not_depend_on_how_the_batch_is_split(root):
    data, rates = CachedDataset(root), section(caption_dropout=0.3, video_caption_dropout=0.3, audio_caption_dropout=0.3).caption_dropouts

    def contexts(world, accumulation):
        found = []
        for rank in range(world):
            sampler = make_sampler(data, section(), batch_size=1, accumulation=accumulation, seed=3)
            batches = Batches(data, sampler, KeyContexts(), workers=0, rank=rank, world=world, caption_dropout=rates)
            found.append([batches.get(step, micro).context for step in range(8) for micro in range(accumulation)])
        return [(float(c.video), float(c.audio)) for together in zip(*found) for c in together]

    assert contexts(1, 4) == contexts(2, 2) == contexts(4, 1)


def test_a_cache_without_the_empty_caption_may_be_given_one(root):
    data = CachedDataset(root)
    data.manifest = replace(data.manifest, texts={})
    sampler = make_sampler(data, section(), batch_size=1, accumulation=1, seed=0)
    with pytest.raises(DataError, match="empty caption"):
        Batches(data, sampler, KeyContexts(), workers=0, caption_dropout=0.1)
    batches = Batches(data, sampler, KeyContexts(), workers=0, caption_dropout=1.0, empty_text="given-f")
    assert float(batches.get(0).context.video) == 15.0


def test_regularisation_reaches_the_batch(root):
    data = CachedDataset(root)
    assert not data.has_prior() and collate([data.item(0)], Context(torch.zeros(1, 1, 1), None)).prior is None
    kinds = ["", "plain", "prior"]
    data.manifest = replace(data.manifest, entries=tuple(replace(e, regularisation=kinds[n % 3], roles={}) for n, e in enumerate(data.manifest.entries)))
    batch = collate([data.item(n) for n in (0, 2, 3)], Context(torch.zeros(3, 1, 1), None)).to("cpu", torch.float64)
    assert data.has_prior() and batch.regularisation.tolist() == [False, True, False] == batch.prior.tolist()
    plain = collate([data.item(1)], Context(torch.zeros(1, 1, 1), None))
    assert plain.regularisation.tolist() == [True] and plain.prior is None


def test_mixed_shapes_are_named(root):
    data = CachedDataset(root)
    with pytest.raises(DataError, match="mixes latents"):
        collate([data.item(0), data.item(5)], Context(torch.zeros(2, 1, 1), None))


def test_training_imports_no_media_library():
    code = "import sys; import ltx_train.data.dataset, ltx_train.data.precomputed; print([m for m in ('av', 'PIL', 'diffusers', 'transformers', 'cv2') if m in sys.modules])"
    root = Path(__file__).resolve().parents[3]
    out = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"


def test_section_needs_some_data(tmp_path):
    with pytest.raises(ValueError, match="one of them"):
        DataSection()
    (tmp_path / "a.png").write_bytes(b"x")
    made = DataSection(dataset=str(tmp_path))
    assert made.cache_root() == tmp_path / ".ltx_cache" == made.data_root()
    assert DataSection.model_validate(made.model_dump(mode="json")) == made
    assert section(num_dataloader_workers=0).data_root() == Path("x")


# -- the official folder ---------------------------------------------------------------------------------------------


def official(root, kind="v2", names=("a", "sub/b"), sound=("a",), extra=True):
    """official_trainer.md 3.2: keys and shapes, padded captions with valid tokens at the end."""

    def save(folder, name, data):
        path = root / folder / f"{name}.pt"
        path.parent.mkdir(parents=True, exist_ok=True)
        torch.save(data, path)

    for n, name in enumerate(names):
        latents = {"latents": torch.randn(128, 3, 2, 4).bfloat16(), "num_frames": 3, "height": 2, "width": 4, "fps": 30000 / 1001}
        save("latents", name, latents)
        mask = torch.cat([torch.zeros(1024 - 5 - n), torch.ones(5 + n)]).long()
        width = {"v2": 4096, "v1": 3840, "legacy": 3840}[kind]
        text = {"prompt_attention_mask": mask}
        text |= {"prompt_embeds": torch.randn(1024, width).bfloat16()} if kind == "legacy" else {"video_prompt_embeds": torch.randn(1024, width).bfloat16()}
        if kind != "legacy":
            text["audio_prompt_embeds"] = torch.randn(1024, 2048).bfloat16() if kind == "v2" else text["video_prompt_embeds"]
        save("conditions", name, text)
        if name in sound:
            save("audio_latents", name, {"latents": torch.randn(8, 17, 16), "num_time_steps": 17, "frequency_bins": 16, "duration": 17 / 25})
        if extra:
            save("reference_latents", name, {**latents, "latents": patchify(latents["latents"][None])[0]})
            save("video_masks", name, {"mask": torch.ones(3, 2, 4)})
    return root


@pytest.mark.parametrize(("kind", "features"), [("v2", "v2"), ("v1", "v1"), ("legacy", "v1")])
def test_official_folder(tmp_path, kind, features):
    official(tmp_path / ".precomputed", kind)
    data = open_dataset(tmp_path, factors=FACTORS)
    assert len(data) == 2 and data.text_keys() == ["a", "sub/b"] and data.audio_coverage() == 0.5
    item = data.item(0)
    assert item.video.values.shape == (1, 128, 3, 2, 4) and item.video.grid.fps == pytest.approx(29.97, abs=1e-3)
    assert item.audio.grid.steps == 17 and item.roles["video_mask"].shape == (3, 2, 4)
    assert torch.equal(item.roles["reference_video"].values, item.video.values), "2-D latents are unpatchified"
    text = data.features("sub/b")
    assert text.kind == features and text.video.shape[0] == 6 and (text.audio is None) == (features == "v1")
    assert data.item(1).audio is None
    assert len({u.group for u in data.units()}) == 1, "a silent clip may share a batch with one that has sound"
    assert data.item(1).audio_steps == 17


def test_official_folder_by_named_directories(tmp_path):
    official(tmp_path)
    data = open_dataset(tmp_path, factors=FACTORS, directories={"video": "latents", "reference_video": "reference_latents"})
    assert set(data.item(0).roles) == {"reference_video"} and data.item(0).audio is None
    with pytest.raises(DataError, match="missing"):
        open_dataset(tmp_path, factors=FACTORS, directories={"video": "latents", "audio_mask": "audio_masks"})


def test_legacy_names_and_incomplete_samples(tmp_path):
    official(tmp_path, names=("latent_1", "alone"), extra=False, sound=())
    (tmp_path / "conditions" / "latent_1.pt").rename(tmp_path / "conditions" / "condition_1.pt")
    (tmp_path / "conditions" / "alone.pt").unlink()
    data = open_dataset(tmp_path, factors=FACTORS)
    assert len(data) == 1 and data.skipped == ["alone.pt"] and data.features("latent_1").video.shape[0] == 5


def test_no_pickle_is_run(tmp_path):
    import pickle

    official(tmp_path, names=("a",), extra=False)

    class Evil:
        def __reduce__(self):
            return (print, ("never",))

    (tmp_path / "latents" / "a.pt").write_bytes(pickle.dumps(Evil()))
    with pytest.raises(DataError, match="plain tensor"):
        open_dataset(tmp_path, factors=FACTORS).item(0)


def test_wrong_roots_are_named(tmp_path):
    with pytest.raises(DataError, match="neither"):
        open_dataset(tmp_path, factors=FACTORS)
