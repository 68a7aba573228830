"""Autotune's choices, with measurements made up: the order of changes, what is kept, what is never touched."""

from pathlib import Path

import pytest
import yaml

from ltx_train.autotune import Measured, autotune, changed, of_run, proposals, trial
from ltx_train.config import TrainConfig
from ltx_train.errors import OutOfMemory, RunError
from ltx_train.runs.events import StepEvent, WarningEvent

NEVER = ("data", "lora", "training_strategy", "flow_matching", "model", "seed")


def config(**sections):
    data = {
        "model": {"model_path": "m.safetensors"}, "lora": {"rank": 8, "alpha": 8}, "data": {"preprocessed_data_root": "c"},
        "optimization": {"optimizer_type": "adamw8bit", "batch_size": 1, "gradient_accumulation_steps": 4, "steps": 100, "warmup_steps": 10, "enable_gradient_checkpointing": True},
        "acceleration": {"quantization": "int8", "activation_budget": 0.0, "load_text_encoder_in_8bit": True},
        "validation": {"samples": [{"prompt": "a"}, {"prompt": "b"}]}, "checkpoints": {"interval": 10}, "wandb": {"enabled": True},
    }  # fmt: skip
    for name, values in sections.items():
        data[name] = {**data.get(name, {}), **values}
    return TrainConfig.parse(data)


def played(answers):
    """A measure that gives the next of ``answers`` (seconds a sample, or why it failed), and the jobs it was asked about."""
    asked = []

    def measure(job, place):
        asked.append(job)
        answer = answers[len(asked) - 1]
        return Measured(None, answer) if isinstance(answer, str) else Measured(answer, rate=answer / 100)

    return measure, asked


def test_the_official_order_and_at_most_five_changes():
    titles = [c.title for c in proposals(config(), card_bytes=80e9)]
    assert titles == ["no quantization", "optimizer adamw", "batch_size 2", "batch_size 4", "activation_budget 0.5"]
    measure, asked = played([1.0] * 9)
    tuned = autotune(config(), Path("x"), card_bytes=80e9, measure=measure)
    assert len(asked) <= 6 and tuned.kept == {} and "fastest" in tuned.lines[-1]
    assert [c.title for c in proposals(config(optimization={"optimizer_type": "adamw", "gradient_accumulation_steps": 1}, acceleration={"quantization": None}), card_bytes=None)] == []


def test_what_is_faster_is_kept_one_on_top_of_the_other(tmp_path):
    measure, asked = played([2.0, "out of memory", 1.5, 1.0, 0.995, 0.8])
    tuned = autotune(config(), tmp_path, card_bytes=80e9, measure=measure, log=tmp_path / "autotune.log")
    first, no_quant, adamw, two, four, budget = asked
    assert (first.acceleration.quantization, no_quant.acceleration.quantization, adamw.acceleration.quantization) == ("int8", None, "int8")
    assert two.optimization.optimizer_type == "adamw" and (two.optimization.batch_size, two.optimization.gradient_accumulation_steps) == (2, 2)
    assert (four.optimization.batch_size, four.optimization.gradient_accumulation_steps) == (4, 1)
    assert (budget.optimization.batch_size, budget.acceleration.activation_budget) == (2, 0.5), "batch 4 was not faster by more than noise"
    assert yaml.safe_load(tuned.yaml()) == {
        "optimization": {"optimizer_type": "adamw", "optimizer_params": {}, "batch_size": 2, "gradient_accumulation_steps": 2}, "acceleration": {"activation_budget": 0.5},
    }  # fmt: skip
    assert tuned.config == changed(config(), tuned.kept)
    log = (tmp_path / "autotune.log").read_text()
    assert "out of memory, not kept" in log and "2.50 times as fast" in log and len(log.splitlines()) == 7


def test_a_ladder_ends_where_a_rung_is_no_faster():
    measure, asked = played([1.0, 1.0, 1.0, 1.2, 1.0, 1.0])
    tuned = autotune(config(), Path("x"), card_bytes=80e9, measure=measure)
    assert not any(job.optimization.batch_size == 4 for job in asked)
    assert any("batch_size 4: passed over" in line for line in tuned.lines)


def test_what_a_user_chose_is_never_swept():
    measure, asked = played([1.0] * 9)
    autotune(config(), Path("x"), card_bytes=80e9, measure=measure)
    for job in asked:
        for name in NEVER:
            assert name == "data" or getattr(job, name) == getattr(config(), name)
        assert job.data.preprocessed_data_root == "c" and job.acceleration.load_text_encoder_in_8bit
        assert job.optimization.batch_size * job.optimization.gradient_accumulation_steps == 4, "the samples of a step stay as many"


def test_a_trial_is_short_saves_nothing_and_tells_nobody():
    job = trial(config(), Path("there"), 5, sample=True)
    assert (job.optimization.steps, job.optimization.warmup_steps, job.checkpoints.interval, job.checkpoints.save_training_state) == (5, 0, None, "off")
    assert not job.wandb.enabled and not job.hub.push_to_hub and job.output_dir == "there"
    assert len(job.validation.samples) == 1 and job.validation.active
    assert not trial(config(), Path("there"), 5, sample=False).validation.active


def test_a_job_that_does_not_run_is_not_tuned():
    with pytest.raises(OutOfMemory):
        autotune(config(), Path("x"), measure=played(["out of memory"])[0])
    with pytest.raises(RunError, match="does not run: failed"):
        autotune(config(), Path("x"), measure=played(["failed: x"])[0])


def test_what_a_run_says():
    job = trial(config(), Path("t"), 5, sample=True)
    steps = [StepEvent(step=n, total=5, loss=1.0, seconds=s, tokens=200) for n, s in enumerate((9.0, 4.0, 2.0, 4.0, 4.4), 1)]
    found = of_run(job, steps, [], True)
    assert (found.seconds, found.rate, found.notes) == (1.0, 0.02, ()), "median without the first, four samples a step"
    assert of_run(job, steps, [], False).notes == ("the preview was not rendered",)
    assert "sound" in of_run(job, steps, [WarningEvent(code="data.no_sound", message="No clip has sound")], True).notes[0]
    assert not of_run(job, steps, [WarningEvent(code="step.not_finite", message="x")], True).ok
