"""Optimizers: the table, the official section, exact resume of every kind, EMA and finished weights."""

from __future__ import annotations

import builtins
import json
import math

import pytest
import torch
from pydantic import ValidationError

from ltx_train.errors import ConfigError, MissingPackage, RunError
from ltx_train.training.ema import Ema, EmaSection, finished_weights
from ltx_train.training.optim import OPTIMIZERS, OptimizationSection, can_stay, set_learning_rate, step_unless
from ltx_train.training.optim_state import optimizer_on_host, optimizer_state, restore_optimizer
from ltx_train.training.snapshots import load_snapshot, save_snapshot

KINDS = sorted(OPTIMIZERS)
pytestmark = pytest.mark.filterwarnings("ignore:Paged optimizers are not supported on CPU")


def parameters(dtype=torch.float32) -> list[torch.nn.Parameter]:
    """One that 8-bit optimizers quantise (>= 4096 elements), a small one, a zero one such as lora_B."""
    g = torch.Generator().manual_seed(0)
    return [torch.nn.Parameter(t.to(dtype)) for t in (torch.randn(64, 80, generator=g), torch.randn(5, 3, generator=g), torch.zeros(16, 2))]


def section(kind: str, **fields) -> OptimizationSection:
    return OptimizationSection(optimizer_type=kind, steps=40, warmup_steps=3, **fields)


def train(params, optimizer, plan, start: int, stop: int) -> None:
    for step in range(start, stop):
        g = torch.Generator().manual_seed(step)
        for p in params:
            p.grad = (0.1 * torch.randn(p.shape, generator=g) + p.detach().float()).to(p.dtype)
        set_learning_rate(optimizer, plan.lr_at(step))
        optimizer.step()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("kind", KINDS)
def test_resume_is_bitwise(kind, dtype, tmp_path):
    """6 steps against 3 steps, a snapshot on disk, a fresh optimizer, 3 steps."""
    plan = section(kind)
    whole = parameters(dtype)
    train(whole, plan.build_optimizer(whole), plan, 0, 6)
    half = parameters(dtype)
    optimizer = plan.build_optimizer(half)
    train(half, optimizer, plan, 0, 3)
    tensors, rest = optimizer_state(optimizer)
    weights = {str(i): p.detach() for i, p in enumerate(half)}
    path = save_snapshot(tmp_path / "checkpoints" / "state_step_00003", {"optimizer": tensors, "weights": weights}, {"optimizer": rest})

    snapshot = load_snapshot(path)
    resumed = [torch.nn.Parameter(snapshot.tensors("weights")[str(i)]) for i in range(3)]
    fresh = plan.build_optimizer(resumed)
    restore_optimizer(fresh, snapshot.tensors("optimizer"), snapshot.state["optimizer"])
    again, _ = optimizer_state(fresh)
    assert set(again) == set(tensors) and all(torch.equal(again[k], tensors[k]) and again[k].dtype == tensors[k].dtype for k in tensors)
    train(resumed, fresh, plan, 3, 6)
    for a, b in zip(whole, resumed):
        assert torch.equal(a, b)
    assert any(not torch.equal(a, b) for a, b in zip(half, resumed))


@pytest.mark.parametrize("kind", KINDS)
def test_state_matters(kind):
    """The control: without the saved state the next steps differ, so the test above can fail."""
    plan = section(kind)
    whole, cut = parameters(), parameters()
    train(whole, plan.build_optimizer(whole), plan, 0, 6)
    train(cut, plan.build_optimizer(cut), plan, 0, 3)
    train(cut, plan.build_optimizer(cut), plan, 3, 6)
    assert any(not torch.equal(a, b) for a, b in zip(whole, cut))


def test_adamw_is_torchs_and_official_defaults():
    plan = OptimizationSection()
    dump = plan.model_dump()
    official = {
        "learning_rate": 5e-4, "steps": 3000, "batch_size": 2, "gradient_accumulation_steps": 1, "max_grad_norm": 1.0, "optimizer_type": "adamw",
        "scheduler_type": "linear", "scheduler_params": {}, "enable_gradient_checkpointing": False,
    }  # fmt: skip
    assert {k: dump[k] for k in official} == official  # official_trainer.md 1.4
    ours, theirs = parameters(), parameters()
    reference = torch.optim.AdamW(theirs, lr=1e-3)
    plan = OptimizationSection(learning_rate=1e-3, scheduler_type="constant")
    optimizer = plan.build_optimizer(ours)
    train(ours, optimizer, plan, 0, 4)
    for step in range(4):
        g = torch.Generator().manual_seed(step)
        for p in theirs:
            p.grad = 0.1 * torch.randn(p.shape, generator=g) + p.detach()
        reference.step()
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs))


@pytest.mark.parametrize("kind", KINDS)
def test_round_trip_and_every_parameter_is_settable(kind):
    fields = OPTIMIZERS[kind].model_fields
    params = {name: 0.123 for name in ("weight_decay", "eps") if name in fields and not isinstance(fields[name].default, tuple)}
    plan = section(kind, optimizer_params=params)
    assert OptimizationSection.model_validate(json.loads(plan.model_dump_json())) == plan
    group = plan.build_optimizer(parameters()).param_groups[0]
    assert all(group[name] == 0.123 for name in params)


def test_short_forms():
    group = OptimizationSection(betas=(0.8, 0.9), eps=1e-6, weight_decay=0.2).build_optimizer(parameters()).param_groups[0]
    assert (group["betas"], group["eps"], group["weight_decay"]) == ((0.8, 0.9), 1e-6, 0.2)
    with pytest.raises(ValidationError, match="adafactor has no parameter 'betas'"):
        OptimizationSection(optimizer_type="adafactor", betas=(0.9, 0.99))
    with pytest.raises(ValidationError, match="given twice"):
        OptimizationSection(eps=1e-6, optimizer_params={"eps": 1e-7})


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"optimizer_type": "adamw8bits"}, "did you mean adamw8bit"),
        ({"scheduler_type": "cosin"}, "did you mean cosine"),
        ({"optimizer_params": {"beta": 1}}, "known: betas"),
        ({"scheduler_params": {"gama": 1}}, "has no parameter 'gama'"),
        ({"scheduler_type": "step", "scheduler_params": {"step_size": 0}}, "step_size"),
        ({"warmup_steps": 10, "steps": 10}, "must be below steps"),
        ({"learning_rate": 0}, "greater than 0"),
        ({"optimizer_type": ["adamw"]}, "optimizer_type"),
        ({"betas": (-0.1, 2)}, "the optimizer adamw, betas.0: Input should be greater"),
        ({"optimizer_type": "lion8bit", "betas": (2, 3)}, "betas.0: Input should be less than 1"),
        ({"optimizer_type": "adamw_schedulefree", "betas": (0.9, 1.5)}, "betas.1: Input should be less than 1"),
        ({"optimizer_type": "prodigy", "optimizer_params": {"beta3": 5}}, "beta3: Input should be less than 1"),
        ({"optimizer_type": "adafactor", "optimizer_params": {"eps": [-1, 1e-3]}}, "eps.0"),
    ],
)
def test_nonsense_is_refused_by_name(fields, words):
    with pytest.raises(ValidationError, match=words):
        OptimizationSection(**fields)


def test_defaults_of_self_tuning_optimizers():
    plan = OptimizationSection(optimizer_type="prodigy")
    assert (plan.learning_rate, plan.scheduler_type, plan.findings()) == (1.0, "constant", [])
    assert OptimizationSection.model_validate(plan.model_dump()) == plan
    assert "near 1" in OptimizationSection(optimizer_type="prodigy", learning_rate=1e-4).findings()[0]
    assert "needs no schedule" in OptimizationSection(optimizer_type="adamw_schedulefree", scheduler_type="cosine").findings()[0]


@pytest.mark.parametrize("kind", [k for k in KINDS if OPTIMIZERS[k].package])
def test_missing_package_is_said_at_the_start(kind, monkeypatch):
    package, real = OPTIMIZERS[kind].package, builtins.__import__

    def absent(name, *args, **kwargs):
        if name.split(".")[0] == package:
            raise ImportError(name)
        return real(name, *args, **kwargs)

    import importlib

    monkeypatch.setattr(importlib, "import_module", lambda name: absent(name))
    with pytest.raises(MissingPackage) as error:
        section(kind).require_packages()
    assert f"pip install {package}" in error.value.hint and kind in error.value.message
    with pytest.raises(MissingPackage):
        section(kind).build_optimizer(parameters())


def test_nothing_to_train():
    with pytest.raises(ConfigError, match="nothing to train"):
        OptimizationSection().build_optimizer([])


def test_state_of_another_optimizer_or_adapter_is_refused():
    plan = section("adamw")
    params = parameters()
    optimizer = plan.build_optimizer(params)
    train(params, optimizer, plan, 0, 2)
    tensors, rest = optimizer_state(optimizer)
    with pytest.raises(RunError, match="AdamW, the config asks for Adafactor"):
        restore_optimizer(section("adafactor").build_optimizer(parameters()), tensors, rest)
    with pytest.raises(RunError, match="other parameters"):
        restore_optimizer(plan.build_optimizer(parameters()[:2]), tensors, rest)


def test_settings_come_from_the_config_and_progress_from_the_snapshot():
    params = parameters()
    plan = section("prodigy")
    optimizer = plan.build_optimizer(params)
    train(params, optimizer, plan, 0, 4)
    tensors, rest = optimizer_state(optimizer)
    other = section("prodigy", optimizer_params={"weight_decay": 0.3}).build_optimizer(parameters())
    restore_optimizer(other, tensors, json.loads(json.dumps(rest)))
    before, after = optimizer.param_groups[0], other.param_groups[0]
    assert after["weight_decay"] == 0.3 and after["growth_rate"] == math.inf
    assert all(after[key] == before[key] for key in ("d", "d_max", "d_numerator", "k")) and after["k"] == 4 and after["d"] > after["d0"]


def test_on_host_leaves_everything_as_it_was():
    plan = section("adamw")
    params = parameters()
    optimizer = plan.build_optimizer(params)
    train(params, optimizer, plan, 0, 2)
    before = {k: v.clone() for k, v in optimizer_state(optimizer)[0].items()}
    with optimizer_on_host(optimizer):
        pass
    after = optimizer_state(optimizer)[0]
    assert set(after) == set(before) and all(torch.equal(after[k], before[k]) for k in before)


def test_ema_closed_form_and_resume():
    """Reference: average_n = sum over the weights seen of (1 - d) d^(n-i) w_i, plus d^n w_0."""
    p = torch.nn.Parameter(torch.tensor([2.0]))
    ema = Ema({"w": p}, EmaSection(decay=0.75, warmup=False))
    seen = [1.0, -3.0, 4.0]
    for step, value in enumerate(seen, 1):
        p.data.fill_(value)
        ema.update(step)
    expected = 0.75**3 * 2.0 + sum(0.25 * 0.75 ** (3 - i) * w for i, w in enumerate(seen, 1))
    assert ema.state_dict()["w"].item() == pytest.approx(expected, rel=1e-6)
    again = Ema({"w": torch.nn.Parameter(torch.zeros(1))}, EmaSection())
    again.load_state_dict(ema.state_dict())
    assert torch.equal(again.state_dict()["w"], ema.state_dict()["w"])
    with pytest.raises(RunError, match="does not fit"):
        again.load_state_dict({"v": torch.zeros(1)})
    assert EmaSection(decay=0.999).decay_at(1) == pytest.approx(2 / 11) and EmaSection(decay=0.5).decay_at(10**6) == 0.5


@pytest.mark.parametrize("kind", ["adamw", "adamw_schedulefree"])
@pytest.mark.parametrize("with_ema", [False, True])
def test_finished_weights_leave_training_bit_for_bit(kind, with_ema):
    plan = section(kind)
    looked, left = parameters(), parameters()
    optimizer, other = plan.build_optimizer(looked), plan.build_optimizer(left)
    train(looked, optimizer, plan, 0, 4)
    train(left, other, plan, 0, 4)
    ema = Ema({str(i): p for i, p in enumerate(looked)}, EmaSection()) if with_ema else None
    if ema is not None:
        ema.average["0"].fill_(5.0)
    with finished_weights(looked, optimizer, ema):
        differ = not torch.equal(looked[0], left[0])
        assert differ == (with_ema or kind == "adamw_schedulefree")
        if with_ema:
            assert (looked[0] == 5.0).all()
    train(looked, optimizer, plan, 4, 6)
    train(left, other, plan, 4, 6)
    assert all(torch.equal(a, b) for a, b in zip(looked, left))


@pytest.mark.parametrize("first", [False, True])
def test_a_state_on_the_host_and_one_on_the_card_go_on_from_one_another(first):
    section = OptimizationSection(optimizer_type="adamw", learning_rate=1e-2, steps=10)

    def steps(parameters, optimizer, count, start=0):
        for n in range(start, start + count):
            for i, p in enumerate(parameters):
                p.grad = torch.randn(p.shape, generator=torch.Generator().manual_seed(100 * n + i))
            optimizer.step()

    def fresh():
        return [torch.nn.Parameter(torch.ones(3, 4)), torch.nn.Parameter(torch.ones(5))]

    whole = fresh()
    steps(whole, section.build_optimizer(whole), 4)
    parameters = fresh()
    before = section.build_optimizer(parameters, in_ram=first)
    steps(parameters, before, 2)
    after = section.build_optimizer(parameters, in_ram=not first)
    restore_optimizer(after, *optimizer_state(before))
    steps(parameters, after, 2, start=2)
    for p, expected in zip(parameters, whole):
        torch.testing.assert_close(p, expected)


def test_the_fused_optimizer_stays_where_it_is_when_told_on_the_device():
    """Bad numbers move neither weights nor running means nor the step count; good ones do what a plain step does."""

    def some():
        g = torch.Generator().manual_seed(1)
        params = [torch.nn.Parameter(torch.randn(5, 3, generator=g)) for _ in range(3)]
        return params, torch.optim.AdamW(params, lr=1e-2, fused=True)

    params, optimizer = some()
    plain, reference = some()
    assert can_stay(optimizer) and not can_stay(torch.optim.AdamW(plain, fused=False)) and not can_stay(torch.optim.SGD(plain))
    for n, bad in enumerate([0.0, 1.0, 0.0]):
        for p, q in zip(params, plain):
            q.grad = torch.full_like(q, n + 1.0)
            p.grad = torch.full_like(p, float("nan")) if bad else q.grad.clone()
        step_unless(optimizer, torch.tensor(bad))
        if not bad:
            reference.step()
        for p, q in zip(params, plain):
            assert torch.equal(p, q)
            assert all(torch.equal(optimizer.state[p][k], reference.state[q][k]) for k in ("step", "exp_avg", "exp_avg_sq"))
    assert not hasattr(optimizer, "found_inf")
