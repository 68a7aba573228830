"""AdamW with its state on the host: torch's own numbers, in any chunks, and a snapshot's state taken over."""

import time
from types import SimpleNamespace

import pytest
import torch

from ltx_train.errors import ConfigError
from ltx_train.parts import told_bytes
from ltx_train.training import host_adam
from ltx_train.training.host_adam import HostAdamW, _chunks
from ltx_train.training.optim import OptimizationSection, can_stay, step_unless
from ltx_train.training.optim_state import optimizer_state, restore_optimizer


def pair() -> tuple[list[torch.nn.Parameter], list[torch.nn.Parameter]]:
    torch.manual_seed(0)
    one = [torch.nn.Parameter(torch.randn(3, 4)), torch.nn.Parameter(torch.randn(7)), torch.nn.Parameter(torch.randn(2, 2))]
    return one, [torch.nn.Parameter(p.detach().clone()) for p in one]


def step(*optimizers: torch.optim.Optimizer) -> None:
    first = optimizers[0].param_groups[0]["params"]
    grads = [torch.randn(p.shape) for p in first]
    for optimizer in optimizers:
        for p, g in zip(optimizer.param_groups[0]["params"], grads):
            p.grad = g.clone()
        optimizer.step()


def assert_same(a, b) -> None:
    for x, y in zip(a, b):
        torch.testing.assert_close(x, y, rtol=1e-6, atol=1e-7)


def test_equals_torch(monkeypatch):
    monkeypatch.setattr(host_adam, "_chunks", lambda sizes: _chunks(sizes, 8))
    a, b = pair()
    plain, host = torch.optim.AdamW(a, lr=1e-2, betas=(0.9, 0.99), weight_decay=0.1), HostAdamW(b, 1e-2, (0.9, 0.99), 1e-8, 0.1)
    for _ in range(4):
        step(plain, host)
    assert len(host.chunks) == 3
    assert_same(a, b)


def flat_pair() -> tuple[list[torch.nn.Parameter], list[torch.nn.Parameter], torch.Tensor]:
    """Plain parameters, and the same as views of one tensor in another order, with the flat gradient."""
    one, other = pair()
    weights, gradient, at = torch.empty(23), torch.zeros(23), 0
    for p in (other[2], other[0], other[1]):
        place = slice(at, at + p.numel())
        weights[place] = p.detach().flatten()
        p.data, p.grad = weights[place].view(p.shape), gradient[place].view(p.shape)
        at += p.numel()
    return one, other, gradient


def test_flat_parameters_are_moved_chunk_by_chunk(monkeypatch):
    monkeypatch.setattr(host_adam, "_chunks", lambda sizes: _chunks(sizes, 12))
    one, other, _ = flat_pair()
    plain, host = torch.optim.AdamW(one, lr=1e-2, weight_decay=0.1), HostAdamW(other, 1e-2, (0.9, 0.999), 1e-8, 0.1)
    for _ in range(3):
        for p, q in zip(one, other):
            p.grad = torch.randn(p.shape)
            q.grad.copy_(p.grad)
        plain.step()
        host.step()
    assert [len(chunk.parameters) for chunk in host.chunks] == [1, 1, 1] and host.chunks[0].parameters[0] is other[2] and host._found is not None
    assert_same(one, other)
    for p, q in zip(one, other):
        assert_same([plain.state[p]["exp_avg_sq"]], [host.state[q]["exp_avg_sq"]])
        assert float(host.state[q]["step"]) == 3


def test_it_stays_after_bad_numbers():
    _, parameters, gradient = flat_pair()
    host = HostAdamW(parameters, 1e-2, (0.9, 0.999), 1e-8, 0.1)
    assert can_stay(host)
    gradient.fill_(1.0)
    step_unless(host, torch.zeros(()))
    before = [t.clone() for p in parameters for t in (p.detach(), host.state[p]["exp_avg"], host.state[p]["step"])]
    gradient.fill_(float("nan"))
    step_unless(host, torch.ones(()))
    assert all(torch.equal(a, b) for a, b in zip(before, [t for p in parameters for t in (p.detach(), host.state[p]["exp_avg"], host.state[p]["step"])]))
    gradient.fill_(1.0)
    step_unless(host, torch.zeros(()))
    assert float(host.state[parameters[0]]["step"]) == 2


def test_a_run_goes_on_wherever_the_state_rests():
    section = OptimizationSection(steps=10)
    a, b = pair()
    plain = section.build_optimizer(a)
    step(plain)
    tensors, rest = optimizer_state(plain)
    with torch.no_grad():
        for p, q in zip(a, b):
            q.copy_(p)
    host = section.build_optimizer(b, in_ram=True)
    restore_optimizer(host, {name: t.clone() for name, t in tensors.items()}, rest)
    step(plain, host)
    assert_same(a, b)
    restore_optimizer(section.build_optimizer(pair()[0]), *optimizer_state(host))


def test_only_adamw_rests_on_the_host():
    with pytest.raises(ConfigError, match="adamw only"):
        OptimizationSection(optimizer_type="adafactor").build_optimizer(pair()[0], in_ram=True)


def test_chunks():
    assert _chunks([4, 4, 4, 9, 1], 8) == [[0, 1], [2], [3], [4]]


def test_the_means_are_there_before_the_first_gradient(monkeypatch):
    monkeypatch.setattr(host_adam, "_chunks", lambda sizes: _chunks(sizes, 8))
    taken, told = [], []

    def take(size: int) -> torch.Tensor:
        taken.append(size)
        return torch.full((size,), 255, dtype=torch.uint8)  # what was there before

    a, b = pair()
    early, late = HostAdamW(a, 1e-2, (0.9, 0.99), 1e-8, 0.1, take=take), HostAdamW(b, 1e-2, (0.9, 0.99), 1e-8, 0.1)
    early.prepare(lambda done, total: told.append((done, total)))
    assert len(taken) == 6 and sum(taken) == 8 * 23 and told == [(96, 184), (152, 184), (184, 184)]
    assert all(not mean.any() for chunk in early.chunks for mean in chunk.means)
    for _ in range(2):
        step(early, late)
    assert len(taken) == 6
    for x, y in zip(a, b):
        assert torch.equal(x, y)
    _, other, _ = flat_pair()
    waits = HostAdamW(other, 1e-2, (0.9, 0.99), 1e-8, 0.1)
    waits.prepare()
    assert not waits.chunks, "their order is known from the gradients"


def test_no_more_memory_is_taken_once_there_is_none(monkeypatch):
    monkeypatch.setattr(host_adam, "_chunks", lambda sizes: [[n] for n in range(len(sizes))])
    asked = []

    def take(size: int) -> torch.Tensor:
        asked.append(size)
        time.sleep(0.01)
        raise MemoryError

    parameters = [torch.nn.Parameter(torch.zeros(2)) for _ in range(40)]
    with pytest.raises(MemoryError):
        HostAdamW(parameters, 1e-2, (0.9, 0.99), 1e-8, 0.1, take=take).prepare()
    assert len(asked) < 40


@pytest.mark.parametrize(("total", "said"), [(0, (0, 0, "KiB")), (700 << 10, (350, 700, "KiB")), (900, (0, 1, "KiB")), (3 << 30, (1536, 3072, "MiB"))])
def test_the_bytes_of_small_means_are_told_in_kib(total, said):
    """Not "0 of 0 MiB", as on a tiny model."""
    told = []
    told_bytes(SimpleNamespace(progress=lambda phase, done, total, unit: told.append((done, total, unit))), "optimizer state", total // 2, total)
    assert told == [said]
