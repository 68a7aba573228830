"""Random networks of a measurement: each kind of filling gives the values that it says."""

import torch
from torch import nn

from ltx_train.bench.networks import DEVIATION, fill


def test_untrained_layers_begin_as_torch_begins_them_and_others_as_large_as_trained_ones():
    torch.manual_seed(0)
    for untrained in (True, False):
        module = nn.ModuleDict({"layer": nn.Linear(64, 200), "norm": nn.LayerNorm(64)})
        fill(module, torch.device("cpu"), torch.float32, untrained=untrained)
        weight = module["layer"].weight
        assert not weight.requires_grad
        assert torch.equal(module["norm"].weight, torch.ones(64))
        if untrained:
            assert weight.abs().max() <= 64**-0.5
            assert abs(weight.std() - (3 * 64) ** -0.5) < 0.002
        else:
            assert abs(weight.std() - DEVIATION) < 0.001
