"""N ranks are one rank with N times the batch: the LoRA, the reported losses, and going on with another number."""

import pytest

from ltx_train.run_setup import launch_job, open_training
from ltx_train.runs.run_dir import RunDir
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


def test_the_launcher_starts_two_ranks(home, tmp_path, alone):
    """The product's own way: run directory, torchrun, two children, one outcome."""
    config = settings(home, tmp_path / "run", batch=2, distributed={"num_processes": 2, "launcher": "torchrun"})
    child = launch_job(open_training(config), extra_env={"OMP_NUM_THREADS": "1"})
    outcome = child.wait(timeout=300)
    assert outcome.ok, (outcome, RunDir(tmp_path / "run").tail(40))
    assert agree(Done(RunDir(tmp_path / "run")), alone)
