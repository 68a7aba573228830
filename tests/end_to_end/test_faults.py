"""What goes wrong in real life: each fault is named, costs as little as it can, and harms nothing that was good."""

import ctypes
import math
import os
import shutil
import threading
import time
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from ltx_train import trainer
from ltx_train.data.cache import Cache
from ltx_train.data.manifest import Manifest
from ltx_train.errors import DataError, LtxTrainError
from ltx_train.models.codec import EngineCodec
from ltx_train.runs.events import SampleEvent, StepEvent, WarningEvent
from ltx_train.runs.run_dir import RunDir
from ltx_train.training.snapshots import load_snapshot
from tests.end_to_end.corridor import Done, at_step, finish, fork, furthest, same, train

ONE = {"batch_size": 1, "scheduler_type": "constant"}


@pytest.fixture
def cache(home, tmp_path):
    """A cache of five clips with sound that may be damaged."""
    shutil.copytree(home.cache("ltx2.3", home.clips), tmp_path / "cache")
    return tmp_path / "cache"


def settings(home, out, cache, steps=5, **more):
    optimization = {**ONE, "steps": steps, **more.pop("optimization", {})}
    return home.config(out, data={"preprocessed_data_root": str(cache), **more.pop("data", {})}, optimization=optimization, **more)


def left(path):
    """What a run that ended with an error left."""
    return Done(RunDir(path))


@contextmanager
def reached_into(live, step, act):
    """Call ``act(trainer)`` before an optimizer step (counted from 1)."""
    original = trainer.Trainer.optimizer_step

    def wrapped(self):
        if self.step + 1 == step:
            act(self)
        original(self)

    trainer.Trainer.optimizer_step = wrapped
    try:
        yield
    finally:
        trainer.Trainer.optimizer_step = original


# -- numbers that are not finite --


def spoil_gradient(self, index):
    """One number of one tensor's gradient is NaN in the coming step."""
    clip = self.clip

    def spoilt():
        self.parameters[index].grad.view(-1)[0] = math.nan
        self.clip = clip
        return clip()

    self.clip = spoilt


def spoil_clip(cache, index):
    """One number of a clip's latents is NaN; its entry."""
    entry = Manifest.read(cache).entries[index]
    path = Cache(cache).path(entry.video)
    tensors = load_file(path)
    with safe_open(str(path), "pt") as file:
        about = file.metadata()
    tensors["latents"][0, 0, 0, 0] = math.nan
    save_file({n: t.clone() for n, t in tensors.items()}, path, metadata=about)
    return entry


def test_nan_in_a_cache_file(home, tmp_path, cache):
    """The steps of that clip are skipped before the optimizer moves, and name it with its noise level; all other clips train."""
    entry = spoil_clip(cache, 2)
    done = train(settings(home, tmp_path / "run", cache, steps=10, checkpoints={"interval": 1, "keep_last_n": 0}))
    warnings = done.events(WarningEvent)
    assert len(warnings) == 2 and {w.code for w in warnings} == {"step.not_finite"}, "ten steps are two passes over five clips"
    assert all(entry.id in w.message and "sigma" in w.hint for w in warnings)
    skipped = [s for s, e in done.steps.items() if e.loss is None]
    assert skipped == [int(w.message.split()[1]) for w in warnings]
    states = {n: load_snapshot(done.run.path / "checkpoints" / f"state_step_{n:05d}") for n in range(1, 11)}
    for group in ("weights", "optimizer"):
        tensors = {n: state.tensors(group) for n, state in states.items()}
        stayed = [n for n in range(2, 11) if all(torch.equal(tensors[n - 1][k], t) for k, t in tensors[n].items())]
        assert stayed == [n for n in skipped if n > 1], group
    assert all(torch.isfinite(t).all() for t in done.snapshot["weights"].values())
    assert len(done.steps) == 10 and done.steps[10].loss_average is not None


@pytest.mark.skipif(os.environ.get("LTX_TRAIN_LONG") != "1", reason="LTX_TRAIN_LONG=1 trains with two ranks")
def test_nan_in_a_cache_file_of_one_rank(home, tmp_path, cache):
    """Every rank skips the step that one of them has the broken clip in; the clip is named, the rest is as with one rank."""
    entry = spoil_clip(cache, 2)
    batch = lambda n: {"optimization": {"batch_size": n, "optimizer_params": {"eps": 1e-3}, "learning_rate": 1e-3}}  # noqa: E731 - as in test_ranks.py
    alone = train(settings(home, tmp_path / "alone", cache, steps=6, **batch(2)))
    config = settings(home, tmp_path / "two", cache, steps=6, **batch(1))
    two = finish(fork(config, 2), config)
    bad = [s for s, e in alone.steps.items() if e.loss is None]
    assert bad and [s for s, e in two.steps.items() if e.loss is None] == bad
    assert all(entry.id in w.message for done in (alone, two) for w in done.events(WarningEvent) if w.code == "step.not_finite")
    assert furthest(alone.snapshot, two.snapshot) < 1e-5


def test_nan_in_a_trained_weight(home, tmp_path, cache):
    """The last good snapshot is taken back, said, and never overwritten by bad numbers."""

    def spoil(self):
        with torch.no_grad():
            self.parameters[1].view(-1)[0] = math.nan

    done = train(settings(home, tmp_path / "run", cache, checkpoints={"interval": 1, "keep_last_n": 0}), lambda live: reached_into(live, 4, spoil))
    assert done.warnings == ["step.not_finite", "step.rolled_back"]
    assert all(torch.isfinite(t).all() for t in done.snapshot["weights"].values()) and done.steps[5].loss is not None
    snapshots = {n: load_snapshot(done.run.path / "checkpoints" / f"state_step_0000{n}").tensors("weights") for n in (3, 4)}
    assert all(torch.equal(snapshots[3][n], t) for n, t in snapshots[4].items()), "step 4 was skipped and its weights are step 3's"


def test_weights_that_broke_are_not_saved(home, tmp_path, cache):
    """An update that gives NaN is found before the snapshot of its step is written."""

    def spoil(self):
        original = self.parts.optimizer.step

        def broken(*args, **key):
            original(*args, **key)
            with torch.no_grad():
                self.parameters[0].fill_(math.inf)
            self.parts.optimizer.step = original

        self.parts.optimizer.step = broken

    done = train(settings(home, tmp_path / "run", cache, checkpoints={"interval": 1, "keep_last_n": 0}), lambda live: reached_into(live, 3, spoil))
    assert done.warnings == ["step.rolled_back"]
    for n in range(1, 6):
        tensors = load_snapshot(done.run.path / "checkpoints" / f"state_step_0000{n}").tensors("weights")
        assert all(torch.isfinite(t).all() for t in tensors.values())


def test_nan_in_a_trained_weight_without_a_snapshot(home, tmp_path, cache):
    def spoil(self):
        with torch.no_grad():
            self.parameters[0].fill_(math.nan)

    with pytest.raises(LtxTrainError) as caught:
        train(settings(home, tmp_path / "run", cache), lambda live: reached_into(live, 2, spoil))
    assert caught.value.code == "step.weights_not_finite"


def test_nan_in_a_gradient(home, tmp_path, cache):
    """The optimizer does not move; the sample and the tensor are named."""

    config = settings(home, tmp_path / "run", cache, checkpoints={"interval": 1, "keep_last_n": 0})
    done = train(config, lambda live: reached_into(live, 3, lambda self: spoil_gradient(self, 3)))
    (warning,) = done.events(WarningEvent)
    ids = {e.id for e in Manifest.read(cache).entries}
    assert warning.code == "step.not_finite" and "gradient" in warning.message and any(i in warning.message for i in ids)
    assert "transformer_blocks" in warning.hint
    states = [load_snapshot(done.run.path / "checkpoints" / f"state_step_0000{n}") for n in (2, 3, 4)]
    for group in ("weights", "optimizer"):
        two, three, four = (s.tensors(group) for s in states)
        assert all(torch.equal(two[n], t) for n, t in three.items())
        assert not all(torch.equal(three[n], t) for n, t in four.items())
    assert done.steps[3].loss is not None and done.steps[3].grad_norm is None


@pytest.mark.parametrize("fp16", [False, True])
def test_what_makes_a_step_bad(fp16):
    """fp16's scaler expects overflowing gradients and skips them itself; a loss that is no number is bad with it too."""
    loop = SimpleNamespace(parts=SimpleNamespace(scaler=SimpleNamespace(is_enabled=lambda: fp16)))
    bad = lambda loss, norm: trainer.Trainer.is_bad(loop, SimpleNamespace(loss=loss), norm)  # noqa: E731
    assert (bad(1.0, 1.0), bad(math.nan, 1.0), bad(1.0, math.inf)) == (False, True, not fp16)


def test_nan_in_a_base_weight_ends_the_run(home, tmp_path, cache):
    """Nothing trains any more: after five such steps the run ends, and what it had learned is there."""

    def spoil(self):
        with torch.no_grad():
            self.parts.step.transformer.transformer_blocks[0].attn1.to_q.weight.fill_(math.nan)

    config = settings(home, tmp_path / "run", cache, steps=20, checkpoints={"interval": 1, "keep_last_n": 0})
    with pytest.raises(LtxTrainError) as caught:
        train(config, lambda live: reached_into(live, 3, spoil))
    done = left(tmp_path / "run")
    assert caught.value.code == "step.diverged" and done.warnings == ["step.not_finite"] * trainer.MAX_BAD_STEPS
    snapshots = [load_snapshot(done.run.path / "checkpoints" / f"state_step_{n:05d}").tensors("weights") for n in (2,)]
    assert all(torch.equal(snapshots[0][n], t) for n, t in done.snapshot["weights"].items())
    assert all(torch.isfinite(t).all() for t in load_file(done.lora).values())


def test_a_run_that_ends_in_bad_steps_says_so(home, tmp_path, cache):
    """Fewer than end it by themselves: good weights are saved and it is told; where no step was good, it has failed and saves nothing."""

    def spoil(self):
        with torch.no_grad():
            self.parts.step.transformer.transformer_blocks[0].attn1.to_q.weight.fill_(math.nan)

    done = train(settings(home, tmp_path / "run", cache, steps=3), lambda live: reached_into(live, 2, spoil))
    assert done.warnings == ["step.not_finite"] * 2 + ["step.last_skipped"] and done.lora is not None
    with pytest.raises(LtxTrainError, match="All 2 steps") as caught:
        train(settings(home, tmp_path / "none", cache, steps=2), lambda live: reached_into(live, 1, spoil))
    assert caught.value.code == "step.diverged" and not list((tmp_path / "none" / "checkpoints").glob("*"))


def test_what_is_seldom_meant_and_what_cannot_be_made_now(home, tmp_path, cache):
    """A scale of next to nothing is told at the start, a sample asked of a run without previews when it is; the run goes on."""

    def ask(self):
        (self.live.dir.path / "control" / "sample").write_text("{}")

    done = train(settings(home, tmp_path / "run", cache, steps=3, lora={"rank": 4, "alpha": 0.25}), lambda live: reached_into(live, 1, ask))
    assert done.warnings == ["config.caution", "sample.none"] and len(done.losses) == 3


# -- data --


def test_fewer_clips_than_a_batch(home, tmp_path):
    done = train(home.config(tmp_path / "run", optimization={"batch_size": 5}))
    assert done.warnings == ["data.small_group"] and len(done.losses) == 2


@pytest.fixture(scope="module")
def whole(home, tmp_path_factory):
    """Five steps on a cache that nothing happens to, read without workers."""
    return train(settings(home, tmp_path_factory.mktemp("whole") / "run", home.cache("ltx2.3", home.clips), data={"num_dataloader_workers": 0}))


@pytest.mark.parametrize("workers", [0, 2])
def test_a_cache_file_that_is_gone(home, tmp_path, cache, whole, workers):
    """The run ends naming it, with a snapshot of the step before: after preprocessing again nothing is lost."""
    entry = Manifest.read(cache).entries[0]
    gone = Cache(cache).path(entry.audio)
    kept = gone.read_bytes()
    config = settings(home, tmp_path / "run", cache, data={"num_dataloader_workers": workers})
    gone.unlink()
    with pytest.raises(DataError) as caught:
        train(config)
    assert caught.value.code == "cache.missing" and "Preprocess" in caught.value.hint
    gone.write_bytes(kept)
    resumed = train(config)
    assert same(whole.snapshot, resumed.snapshot) and whole.losses == resumed.losses


def test_a_dead_data_worker(home, tmp_path, cache, whole):
    """It is named, and the run goes on without it to the very same end."""
    others = set(threading.enumerate())

    def kill():
        """End the thread that loads batches, from outside and while it has nothing to do."""
        (thread,) = [t for t in threading.enumerate() if t not in others and t.name.startswith("load-batches")]
        time.sleep(0.1)
        ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident), ctypes.py_object(SystemExit))

    config = settings(home, tmp_path / "run", cache, data={"num_dataloader_workers": 1})
    done = train(config, lambda live: at_step(live, 2, kill))
    (warning,) = done.events(WarningEvent)
    assert warning.code == "data.worker" and "load-batches_0" in warning.message and "main process" in warning.hint
    assert same(whole.snapshot, done.snapshot) and whole.losses == done.losses


def test_a_data_worker_that_fails_where_the_main_process_does_too(home, tmp_path, cache, whole, monkeypatch):
    """The run ends with the clip's name and what the worker said; the steps before are kept, and it goes on from there."""
    config = settings(home, tmp_path / "run", cache)
    original, ids = Cache.get_latents, [e.id for e in Manifest.read(cache).entries]

    def broken(self, key):
        if key == Manifest.read(cache).entries[3].video:
            raise ValueError("the decoder of this disk gave up")
        return original(self, key)

    monkeypatch.setattr(Cache, "get_latents", broken)
    with pytest.raises(DataError) as caught:
        train(config)
    monkeypatch.undo()
    assert caught.value.code == "data.read" and "the decoder of this disk gave up" in caught.value.message and ids[3] in caught.value.hint
    assert left(tmp_path / "run").warnings == ["data.worker"]
    assert same(whole.snapshot, train(config).snapshot)


def test_a_damaged_cache_file(home, tmp_path, cache):
    path = Cache(cache).path(Manifest.read(cache).entries[1].video)
    path.write_bytes(path.read_bytes()[:200])
    with pytest.raises(DataError) as caught:
        train(settings(home, tmp_path / "run", cache))
    assert caught.value.code == "cache.damaged" and str(path) in caught.value.hint


def test_some_clips_without_sound(home, tmp_path, cache):
    """They count for the video alone; a mode for sound alone leaves them out or counts them not at all."""
    import dataclasses

    manifest = Manifest.read(cache)
    entries = tuple(dataclasses.replace(e, audio=None) if n < 3 else e for n, e in enumerate(manifest.entries))
    Cache(cache).write_index(dataclasses.replace(manifest, entries=entries))
    done = train(settings(home, tmp_path / "run", cache))
    assert done.warnings == ["data.some_silent"]
    assert sum(e.audio_loss is None for e in done.steps.values()) == 3 and all(e.video_loss is not None for e in done.steps.values())
    sound = {"name": "flexible", "audio": {"is_generated": True}}
    only = train(settings(home, tmp_path / "sound", cache, training_strategy=sound))
    assert len(only.steps) == 5 and sum(e.audio_loss is not None for e in only.steps.values()) >= 2
    assert all(torch.isfinite(t).all() for t in only.snapshot["weights"].values())


# -- previews --


def previews(home, out, *, sound=False, **fields):
    """Two steps with dropout and a preview before, between and after them, as cheap as can be."""
    plain = {f"{m}_{kind}": value for m in ("video", "audio") for kind, value in (("cfg_scale", 1), ("stg_scale", 0), ("modality_guidance_scale", 1))}
    samples = [{"prompt": "a red block", **fields}]
    validation = {"samples": samples, "video_dims": [32, 32, 9], "inference_steps": 1, "interval": 1, "generate_audio": sound, **plain}
    return settings(home, out, home.cache("ltx2.3", home.clips), steps=2, validation=validation, lora={"dropout": 0.2})


@pytest.fixture(scope="module")
def plain(home, tmp_path_factory):
    """The same two steps without any preview."""
    return train(settings(home, tmp_path_factory.mktemp("plain") / "run", home.cache("ltx2.3", home.clips), steps=2, lora={"dropout": 0.2}))


def equal(done, plain):
    assert done.losses == plain.losses and same(plain.snapshot, done.snapshot)
    assert load_file(done.lora).keys() == load_file(plain.lora).keys()
    return True


def test_previews_change_nothing_and_dropout_is_for_training_alone(home, tmp_path, plain, monkeypatch):
    """A preview computed twice is the same: the adapter's dropout rests there; in the steps it acts. With sound: test_validation.py."""
    from ltx_train import validation

    original, equal_pairs = validation.denoise, []

    def twice(*args, **key):
        state = key["generator"].get_state()
        one = original(*args, **key)
        key["generator"].set_state(state)
        equal_pairs.append(torch.equal(one.video.values, original(*args, **key).video.values))
        return one

    monkeypatch.setattr(validation, "denoise", twice)
    done = train(previews(home, tmp_path / "run"))
    assert equal_pairs == [True] * 3 and equal(done, plain) and not done.warnings
    assert [(e.step, (done.run.path / e.path).is_file()) for e in done.events(SampleEvent)] == [(0, True), (1, True), (2, True)]
    without = train(settings(home, tmp_path / "without", home.cache("ltx2.3", home.clips), steps=2, lora={"dropout": 0.0}))
    assert without.losses[0] == plain.losses[0] and without.losses[1] != plain.losses[1], "B is zero at first, so dropout shows from the second step on"


@pytest.mark.parametrize("fault", ["memory", "sampling", "condition"])
def test_failed_previews_are_warnings(home, tmp_path, plain, monkeypatch, fault):
    fields = {}
    if fault == "memory":

        def full(self, latents, *rest, **key):
            raise torch.OutOfMemoryError("CUDA out of memory (simulated)")

        monkeypatch.setattr(EngineCodec, "decode_video", full)
    elif fault == "sampling":

        def broken(*args, **key):
            raise RuntimeError("a kernel failed (simulated)")

        monkeypatch.setattr("ltx_train.validation.denoise", broken)
    else:
        (tmp_path / "broken.png").write_bytes(b"\x89PNG\r\n\x1a\n half of a picture")
        fields = {"conditions": [{"type": "first_frame", "image_or_video": str(tmp_path / "broken.png")}]}
    done = train(previews(home, tmp_path / "run", **fields))
    expected = {"memory": "sample.decode_memory", "sampling": "sample.failed", "condition": "sample.condition"}[fault]
    assert equal(done, plain) and set(done.warnings) == {expected}
    kept = [p for p in done.run.path.glob("samples/step_*") if "latent" in p.name]
    assert len(kept) == (3 if fault == "memory" else 0)


def test_events_are_json_whatever_the_numbers(home, tmp_path, cache):
    """A NaN becomes null: other readers than Python's must be able to read events.jsonl."""
    import json

    done = train(settings(home, tmp_path / "run", cache, steps=2), lambda live: reached_into(live, 1, lambda self: spoil_gradient(self, 0)))

    def refuse(text):
        raise AssertionError(f"{text} in events.jsonl")

    lines = done.run.events_path.read_text(encoding="utf-8").splitlines()
    assert all(json.loads(line, parse_constant=refuse) for line in lines)
    assert len(done.events(StepEvent)) == 2
