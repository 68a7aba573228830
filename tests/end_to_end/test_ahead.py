"""A host that runs ahead of its device: the same run to the last bit, bad numbers included, and nothing that waits."""

import inspect
import math
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

import ltx_train
from ltx_train import trainer
from ltx_train.runs.events import StepEvent, WarningEvent
from ltx_train.training.flat_adam import FlatAdamW
from ltx_train.training.optim import AdamW
from tests.end_to_end.corridor import furthest, same, train

PACKAGE = Path(ltx_train.__file__).parent
READS = ("item", "tolist", "cpu", "numpy", "__bool__", "__float__", "__int__", "__index__", "nonzero")
# what is read on the host in a step, and lies on the host on every machine
ON_THE_HOST = {
    ("step.py", "_silent"),  # whether every sample has sound: Batch keeps it there
    ("transformer.py", "blocks"),  # which blocks' masks skip nothing: made there
    ("transfer.py", "get"),  # last step's numbers
    ("sampler.py", "_shuffled"), ("batches.py", "collate"),  # which clips, and whether any of them regularises
    ("flow_matching.py", "sample"), ("flow_matching.py", "_uniform"),  # noise levels, drawn on the host for every device
}


@pytest.fixture(autouse=True)
def fused(monkeypatch):
    """The optimizer of a card, over the engine's flat tensors; those that were built."""
    built = []

    def build(self, params, lr):
        built.append(FlatAdamW(params, lr=lr, betas=self.betas, eps=self.eps, weight_decay=self.weight_decay))
        return built[-1]

    monkeypatch.setattr(AdamW, "build", build)
    return built


@contextmanager
def nan_at(step):
    """The forward pass of one step gives NaN."""
    original = trainer.Trainer.forward

    def wrapped(self, items):
        outputs = original(self, items)
        if self.step + 1 == step:
            outputs[0].loss.data.fill_(math.nan)
            outputs[0].video_loss.fill_(math.nan)
        return outputs

    trainer.Trainer.forward = wrapped
    try:
        yield
    finally:
        trainer.Trainer.forward = original


def run(home, out, devices, monkeypatch, **sections):
    monkeypatch.setattr(trainer, "AHEAD", devices)
    config = home.config(out, optimization={"steps": 5, "batch_size": 1, "gradient_accumulation_steps": 2}, checkpoints={"interval": 4, "keep_last_n": 0}, **sections)
    return train(config, lambda live: nan_at(3))


def test_running_ahead_changes_nothing(home, tmp_path, monkeypatch, fused):
    waiting = run(home, tmp_path / "waiting", (), monkeypatch)
    ahead = run(home, tmp_path / "ahead", ("cpu",), monkeypatch)
    assert same(waiting.snapshot, ahead.snapshot)
    assert all(optimizer.means and optimizer.even for optimizer in fused), "one launch for all"
    told = lambda done, kind, *fields: [tuple(getattr(e, f) for f in fields) for e in done.events(kind)]  # noqa: E731
    fields = ("step", "loss", "loss_average", "video_loss", "audio_loss", "grad_norm", "learning_rate", "epoch", "tokens")
    assert told(waiting, StepEvent, *fields)[1:] == told(ahead, StepEvent, *fields)[1:] and len(ahead.steps) == 5
    assert told(waiting, WarningEvent, "code", "message", "hint") == told(ahead, WarningEvent, "code", "message", "hint")
    (warning,) = [e for e in ahead.events(WarningEvent) if e.code == "step.not_finite"]
    assert warning.message.startswith("Step 3 is skipped") and "sigma" in warning.hint
    assert ahead.steps[3].loss is None and ahead.steps[4].loss is not None


def test_micro_steps_together_train_the_same(home, tmp_path, monkeypatch):
    """Three micro-steps, two of them through each block together, against one after another."""
    make = lambda name, together: train(home.config(  # noqa: E731
        tmp_path / name, acceleration={"accumulate_together": together, "stream_blocks": 1},
        optimization={"steps": 2, "batch_size": 1, "gradient_accumulation_steps": 3, "optimizer_params": {"eps": 1e-4}},
    ))  # fmt: skip
    apart, together = make("apart", 1), make("together", 2)
    assert together.losses == pytest.approx(apart.losses, rel=1e-5)
    assert furthest(apart.snapshot, together.snapshot) < 1e-5
    assert [e.tokens for e in apart.events(StepEvent)] == [e.tokens for e in together.events(StepEvent)]


def test_nothing_waits_for_the_device(home, tmp_path, monkeypatch):
    """Every reading of a tensor's value in a step, by its place in our code."""
    places = set()

    def watched(name, original):
        def read(self, *args, **key):
            frame = inspect.currentframe().f_back
            while frame is not None and not frame.f_code.co_filename.startswith(str(PACKAGE)):
                frame = frame.f_back
            if frame is not None and watching[0]:
                places.add((Path(frame.f_code.co_filename).name, frame.f_code.co_name))
            return original(self, *args, **key)

        return read

    watching = [False]
    for name in READS:
        monkeypatch.setattr(torch.Tensor, name, watched(name, getattr(torch.Tensor, name)))
    step = trainer.Trainer.optimizer_step

    def watched_step(self):
        watching[0] = True
        step(self)
        watching[0] = False

    monkeypatch.setattr(trainer.Trainer, "optimizer_step", watched_step)
    monkeypatch.setattr(trainer, "AHEAD", ("cpu",))
    train(home.config(tmp_path / "run", optimization={"steps": 3, "batch_size": 1}, training_strategy={
        "name": "flexible", "video": {"is_generated": True, "conditions": [{"type": "first_frame", "probability": 0.5}]}, "audio": {"is_generated": True},
    }))  # fmt: skip
    assert ("transfer.py", "get") in places, "the watch works"
    assert places <= ON_THE_HOST, places - ON_THE_HOST
