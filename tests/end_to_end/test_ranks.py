"""N ranks are one rank with N times the batch: the LoRA, the reported losses, and going on with another number."""

import time

import pytest

from ltx_train.runs.events import ProgressEvent
from ltx_train.runs.run_dir import RunDir
from ltx_train.training.snapshots import newest_valid
from tests.end_to_end.corridor import Done, finish, fork, furthest, train

# the sums of ranks are grouped otherwise than one rank's: AdamW's first steps are signs, a larger eps keeps rounding small
OPTIMIZATION = {"steps": 4, "batch_size": 1, "learning_rate": 1e-3, "optimizer_params": {"eps": 1e-3}, "scheduler_type": "cosine", "warmup_steps": 1}


def settings(home, out, *, batch, accumulation=1, steps=4, **more):
    data = {"preprocessed_data_root": str(home.cache("ltx2.3", home.clips, caption_dropout=0.5)), "caption_dropout": 0.3}
    strategy = {"name": "flexible", "video": {"is_generated": True, "conditions": [{"type": "first_frame", "probability": 0.5}]}, "audio": {"is_generated": True}}
    optimization = {**OPTIMIZATION, "batch_size": batch, "gradient_accumulation_steps": accumulation, "steps": steps}
    return home.config(out, optimization=optimization, data=data, training_strategy=strategy, **more)


@pytest.fixture(scope="module")
def alone(home, tmp_path_factory):
    """One rank with all four samples of a step in one batch."""
    return train(settings(home, tmp_path_factory.mktemp("alone") / "run", batch=4))


def agree(done, alone):
    """Weights to 1e-5; every reported number of every step alike."""
    assert furthest(done.snapshot, alone.snapshot) < 1e-5
    assert list(done.steps) == list(alone.steps)
    for step, event in done.steps.items():
        other = alone.steps[step]
        for name in ("loss", "video_loss", "audio_loss", "loss_average", "grad_norm", "learning_rate", "epoch"):
            assert getattr(event, name) == pytest.approx(getattr(other, name), rel=2e-5), (step, name)
        assert event.sigma_loss == pytest.approx(other.sigma_loss, rel=2e-5)
    return True


@pytest.mark.parametrize(("ranks", "batch", "accumulation"), [(1, 2, 2), (2, 2, 1), (2, 1, 2), (4, 1, 1)])
def test_ranks_are_a_larger_batch(home, tmp_path, alone, ranks, batch, accumulation):
    config = settings(home, tmp_path / "run", batch=batch, accumulation=accumulation)
    assert agree(finish(fork(config, ranks), config), alone)


def test_going_on_with_another_number_of_ranks(home, tmp_path, alone):
    """Two ranks, then one, then four: the process count is free, the samples of each step stay."""
    path = tmp_path / "run"
    # the schedule is laid over the steps: a constant one can be gone on with
    constant = {"scheduler_type": "constant", "warmup_steps": 0}
    whole = train(settings_with(home, tmp_path / "whole", constant, batch=4, steps=4))
    first = settings_with(home, path, constant, batch=1, accumulation=2, steps=2)
    finish(fork(first, 2), first)
    second = settings_with(home, path, constant, batch=1, accumulation=2, steps=3)
    done = finish(fork(second, 1), second)
    assert "distributed.global_batch" in done.warnings
    third = settings_with(home, path, constant, batch=1, accumulation=2, steps=4)
    done = finish(fork(third, 4), third)
    assert furthest(done.snapshot, whole.snapshot) < 1e-5
    assert done.losses == pytest.approx(whole.losses, rel=2e-5)


def settings_with(home, out, fields, **size):
    config = settings(home, out, **size)
    return config.model_copy(update={"optimization": config.optimization.model_copy(update=fields)})


def test_a_stop_amid_previews_ends_every_rank(home, tmp_path):
    """The ranks make one preview each when the stop comes: both leave at once, and a snapshot is there."""
    validation = {"samples": [{"prompt": "one"}, {"prompt": "two"}], "video_dims": [64, 64, 17], "inference_steps": 1000, "interval": 2, "skip_initial_validation": True}
    config = settings(home, tmp_path / "run", batch=1, validation=validation)
    ranks, run = fork(config, 2), RunDir(tmp_path / "run")
    end = time.monotonic() + 120
    while not any(p.phase == "validation" for p in Done(run).events(ProgressEvent)) and time.monotonic() < end:
        time.sleep(0.1)
    run.request("stop")
    for rank in ranks:
        rank.join(60)
    assert [r.exitcode for r in ranks] == [3, 3], run.tail(40)
    assert run.read_status().state == "stopped" and newest_valid(run.path).name == "state_step_00002"
    assert "sample.failed" not in Done(run).warnings
