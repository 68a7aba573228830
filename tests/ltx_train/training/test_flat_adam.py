"""AdamW over flat tensors: torch's own numbers, its state, and its step wherever something is not flat."""

import pytest
import torch

from ltx_train.training.flat_adam import FlatAdamW
from ltx_train.training.optim import can_stay, step_unless
from ltx_train.training.optim_state import optimizer_on_host, optimizer_state, restore_optimizer

SHAPES = [(4, 6), (3, 4), (5,), (2, 7)]
ORDER = [2, 0, 3, 1]  # the parameters' order is not that of the flat tensor
SETTINGS = dict(lr=1e-2, betas=(0.9, 0.99), eps=1e-8, weight_decay=0.05)


def flat_parameters(offset=3):
    """Parameters and gradients as the engine has them: views of one tensor each."""
    g = torch.Generator().manual_seed(0)
    sizes = [torch.Size(s).numel() for s in SHAPES]
    master, gradient = torch.randn(offset + sum(sizes), generator=g), torch.zeros(offset + sum(sizes))
    cut = lambda flat: [part.view(shape) for part, shape in zip(flat[offset:].split(sizes), SHAPES)]  # noqa: E731
    params = [torch.nn.Parameter(view) for view in cut(master)]
    for p, view in zip(params, cut(master)):
        p.data = view
    grads = cut(gradient)
    return [params[n] for n in ORDER], [grads[n] for n in ORDER]


def pair():
    params, grads = flat_parameters()
    plain = [torch.nn.Parameter(p.detach().clone()) for p in params]
    return params, grads, FlatAdamW(params, **SETTINGS), plain, torch.optim.AdamW(plain, **SETTINGS, fused=True)


def gradients(params, grads, plain, step, without=()):
    g = torch.Generator().manual_seed(step)
    for n, (p, grad, q) in enumerate(zip(params, grads, plain)):
        grad.copy_(torch.randn(grad.shape, generator=g))
        p.grad, q.grad = (None, None) if n in without else (grad, grad.clone())


def close(params, optimizer, plain, reference):
    for p, q in zip(params, plain):
        torch.testing.assert_close(p, q, rtol=1e-6, atol=1e-7)
        for name in ("step", "exp_avg", "exp_avg_sq"):
            torch.testing.assert_close(optimizer.state[p][name], reference.state[q][name], rtol=1e-6, atol=1e-7)
    return True


def test_torchs_numbers_in_one_launch(monkeypatch):
    params, grads, optimizer, plain, reference = pair()
    launched = []
    original = torch._fused_adamw_
    monkeypatch.setattr(torch, "_fused_adamw_", lambda weights, *a, **k: launched.append(len(weights)) or original(weights, *a, **k))
    for step in range(4):
        gradients(params, grads, plain, step)
        optimizer.step()
        reference.step()
        assert close(params, optimizer, plain, reference)
    assert launched == [1, 4] * 4, "ours, then torch's"


def test_bad_numbers_move_nothing():
    params, grads, optimizer, plain, reference = pair()
    assert can_stay(optimizer)
    for step, bad in enumerate((0.0, 1.0, 0.0)):
        gradients(params, grads, plain, step)
        if bad:
            grads[0].fill_(float("nan"))
        else:
            reference.step()
        step_unless(optimizer, torch.tensor(bad))
        assert close(params, optimizer, plain, reference)


def test_a_parameter_without_gradient_is_left_alone():
    """torch's step from then on: the counts are no longer the same."""
    params, grads, optimizer, plain, reference = pair()
    for step, without in enumerate(((), (1,), (), ())):
        gradients(params, grads, plain, step, without)
        optimizer.step()
        reference.step()
        assert close(params, optimizer, plain, reference)
    assert not optimizer.even


@pytest.mark.parametrize("flat_first", [True, False])
def test_snapshots_are_torchs(flat_first):
    """What one saves the other goes on from, as from its own."""
    params, grads, optimizer, plain, reference = pair()
    for step in range(2):
        gradients(params, grads, plain, step)
        optimizer.step()
        reference.step()
    tensors, rest = optimizer_state(optimizer if flat_first else reference)
    saved = {name: t.clone() for name, t in tensors.items()}
    assert set(saved) == {f"{n}.{key}" for n in range(4) for key in ("step", "exp_avg", "exp_avg_sq")} and rest["optimizer"] == "AdamW" and not rest["shared"]
    restore_optimizer(optimizer, saved, rest)
    restore_optimizer(reference, saved, rest)
    gradients(params, grads, plain, 5)
    with optimizer_on_host(optimizer):
        pass
    optimizer.step()
    reference.step()
    assert close(params, optimizer, plain, reference)


def test_weights_that_are_laid_out_anew_keep_their_means():
    """Adapters exchanged: the engine makes another flat tensor, here in another order."""
    params, grads, optimizer, plain, reference = pair()
    gradients(params, grads, plain, 0)
    optimizer.step()
    reference.step()
    master, gradient = torch.cat([p.detach().reshape(-1) for p in params]), torch.zeros(sum(p.numel() for p in params))
    sizes = [p.numel() for p in params]
    grads = [part.view(p.shape) for part, p in zip(gradient.split(sizes), params)]
    for p, part in zip(params, master.split(sizes)):
        p.data = part.view(p.shape)
    for step in (1, 2):
        gradients(params, grads, plain, step)
        optimizer.step()
        reference.step()
        assert close(params, optimizer, plain, reference)
    assert torch.equal(optimizer.means[0][: sizes[0]].view(params[0].shape), optimizer.state[params[0]]["exp_avg"])


def test_scattered_parameters_take_torchs_step():
    _, _, _, plain, reference = pair()
    other = [torch.nn.Parameter(q.detach().clone()) for q in plain]
    optimizer = FlatAdamW(other, **SETTINGS)
    for p, q in zip(other, plain):
        p.grad, q.grad = torch.ones_like(p), torch.ones_like(q)
    optimizer.step()
    reference.step()
    assert close(other, optimizer, plain, reference) and not optimizer.means
