"""The real launcher: ``train --num-processes 2`` against one process; on two GPUs through accelerate and NCCL, else on the CPU."""

import pytest
import torch
from safetensors.torch import load_file

from ltx_train.cli.training import with_processes
from ltx_train.run_setup import launch_job, open_training
from ltx_train.runs.events import StatisticsEvent
from tests.end_to_end.corridor import Done, train

DEVICE = "cuda" if torch.cuda.device_count() > 1 else "cpu"


def job(home, out, accumulation):
    return home.config(
        out, acceleration={"device": "auto" if DEVICE == "cuda" else "cpu", "allow_tf32": False, "compile": "off"},
        optimization={"steps": 4, "batch_size": 1, "gradient_accumulation_steps": accumulation, "optimizer_params": {"eps": 1e-4}},
    )  # fmt: skip


def launch(home, out, accumulation, accelerate=None, processes=None):
    return launch_job(open_training(with_processes(job(home, out, accumulation), accelerate, processes)))


def finished(child):
    child.wait(timeout=300).raise_for_error()
    return Done(child.run)


def test_two_launched_processes_equal_one(home, tmp_path):
    child = launch(home, tmp_path / "two", 1, "fsdp", 2)
    one = train(job(home, tmp_path / "one", 2))
    two = finished(child)
    assert two.losses == pytest.approx(one.losses, rel=1e-5 if DEVICE == "cpu" else 1e-3)
    assert two.events(StatisticsEvent)[0].processes == 2
    first, second = load_file(one.lora), load_file(two.lora)
    assert first.keys() == second.keys()
    assert max(float((first[n] - second[n]).abs().max()) for n in first) < (1e-5 if DEVICE == "cpu" else 1e-3)
