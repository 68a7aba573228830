"""Schedules: the closed forms against torch's own schedulers, warm-up, the official defaults."""

from __future__ import annotations

import pytest
import torch
from torch.optim import lr_scheduler as torch_lr

from ltx_train.training.schedule import SCHEDULES, LearningRate

BASE, STEPS = 3e-4, 40

# Reference: torch.optim.lr_scheduler with the parameters that the official trainer passes (official_trainer.md 7.3).
CASES = [
    ("constant", {}, lambda o: torch_lr.ConstantLR(o, factor=1.0)),
    ("linear", {}, lambda o: torch_lr.LinearLR(o, start_factor=1.0, end_factor=0.1, total_iters=STEPS)),
    ("linear", {"start_factor": 0.5, "end_factor": 0.0, "total_iters": 17}, lambda o: torch_lr.LinearLR(o, 0.5, 0.0, 17)),
    ("cosine", {}, lambda o: torch_lr.CosineAnnealingLR(o, T_max=STEPS, eta_min=0)),
    ("cosine", {"T_max": 25, "eta_min": 1e-5}, lambda o: torch_lr.CosineAnnealingLR(o, T_max=25, eta_min=1e-5)),
    ("cosine_with_restarts", {}, lambda o: torch_lr.CosineAnnealingWarmRestarts(o, T_0=STEPS // 4, T_mult=1, eta_min=5e-5)),
    ("cosine_with_restarts", {"T_0": 5, "T_mult": 2, "eta_min": 0}, lambda o: torch_lr.CosineAnnealingWarmRestarts(o, 5, 2, 0)),
    ("polynomial", {}, lambda o: torch_lr.PolynomialLR(o, total_iters=STEPS, power=1.0)),
    ("polynomial", {"total_iters": 31, "power": 2.5}, lambda o: torch_lr.PolynomialLR(o, 31, 2.5)),
    ("step", {}, lambda o: torch_lr.StepLR(o, step_size=STEPS // 2, gamma=0.1)),
    ("step", {"step_size": 7, "gamma": 0.5}, lambda o: torch_lr.StepLR(o, 7, 0.5)),
]


def run_torch(make, steps: int, base: float = BASE) -> list[float]:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=base)
    scheduler = make(optimizer)
    rates = []
    for _ in range(steps):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return rates


@pytest.mark.parametrize(("name", "params", "make"), CASES, ids=[f"{c[0]}-{i}" for i, c in enumerate(CASES)])
def test_equal_to_torch(name, params, make):
    rate = LearningRate(BASE, STEPS, SCHEDULES[name](**params))
    assert [rate.lr_at(s) for s in range(STEPS)] == pytest.approx(run_torch(make, STEPS), rel=1e-9, abs=1e-15)


@pytest.mark.parametrize("name", SCHEDULES)
def test_warmup_equals_torch_sequential(name):
    """Reference: torch SequentialLR of a LinearLR from 1/(w+1) and the schedule over the steps that are left."""
    warmup, left = 7, 33
    makers = {
        "constant": lambda o: torch_lr.ConstantLR(o, factor=1.0), "linear": lambda o: torch_lr.LinearLR(o, 1.0, 0.1, left),
        "cosine": lambda o: torch_lr.CosineAnnealingLR(o, left), "polynomial": lambda o: torch_lr.PolynomialLR(o, left),
        "cosine_with_restarts": lambda o: torch_lr.CosineAnnealingWarmRestarts(o, left // 4, 1, 5e-5), "step": lambda o: torch_lr.StepLR(o, left // 2),
    }  # fmt: skip

    def make(optimizer):
        first = torch_lr.LinearLR(optimizer, 1 / (warmup + 1), 1.0, warmup)
        return torch_lr.SequentialLR(optimizer, [first, makers[name](optimizer)], [warmup])

    rate = LearningRate(BASE, STEPS, SCHEDULES[name](), warmup)
    assert [rate.lr_at(s) for s in range(STEPS)] == pytest.approx(run_torch(make, STEPS), rel=1e-6)
    assert rate.lr_at(0) > 0


def test_pure_function_of_the_step():
    rate = LearningRate(BASE, 1000, SCHEDULES["cosine_with_restarts"](T_mult=2))
    forward = [rate.lr_at(s) for s in range(1000)]
    assert [rate.lr_at(s) for s in reversed(range(1000))] == forward[::-1]


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("steps", [1, 2, 3])
def test_shortest_runs_are_finite(name, steps):
    rate = LearningRate(BASE, steps, SCHEDULES[name]())
    assert all(0 <= rate.lr_at(s) <= BASE for s in range(steps + 2))
