"""Clipping over all gradients equals torch's; a tensor with a gradient that is not finite is named."""

import pytest
import torch
from torch import nn

from ltx_train.training.trainable import Trainable, clip_gradients


class Plain(Trainable):
    def __init__(self, parameters):
        self.own = parameters

    def named_parameters(self):
        return self.own


def parameters():
    found = {name: nn.Parameter(torch.zeros(shape)) for name, shape in (("a", (3, 4)), ("b", (5,)), ("idle", (2,)))}
    for number, name in enumerate(("a", "b")):
        found[name].grad = torch.randn(found[name].shape, generator=torch.Generator().manual_seed(number))
    return found


@pytest.mark.parametrize("limit", [0.1, 1.0, 100.0])
def test_clipping_is_torchs(limit):
    ours, theirs = parameters(), parameters()
    norms = clip_gradients(Plain(ours), limit)
    expected = nn.utils.clip_grad_norm_(theirs.values(), limit)
    torch.testing.assert_close(norms.total, expected)
    torch.testing.assert_close(norms.each, torch.stack([theirs_norm(p) for p in parameters().values()]))
    for name in ("a", "b"):
        torch.testing.assert_close(ours[name].grad, theirs[name].grad)
    assert ours["idle"].grad is None


def theirs_norm(parameter):
    return torch.zeros(()) if parameter.grad is None else parameter.grad.norm()


def test_no_limit_leaves_gradients_as_they_are():
    ours, before = parameters(), parameters()
    norms = clip_gradients(Plain(ours), 0.0)
    assert all(torch.equal(ours[n].grad, before[n].grad) for n in ("a", "b")) and norms.total > 1


def test_the_damaged_tensor_is_named():
    ours = parameters()
    ours["b"].grad[2] = float("nan")
    norms = clip_gradients(Plain(ours), 1.0)
    assert not torch.isfinite(norms.total) and norms.not_finite(list(ours)) == ["b"]
