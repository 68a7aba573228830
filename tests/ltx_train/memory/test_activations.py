"""Activation checkpointing: the same numbers, fewer activations kept."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch

from ltx_train.lora.adapters import LoraSection, attach
from ltx_train.memory.activations import CheckpointedBlocks, checkpoint_activations
from ltx_train.memory.quantization import QUANTIZERS, load_quantized

_spec = importlib.util.spec_from_file_location("quantization_tests", Path(__file__).with_name("test_quantization.py"))
_tests = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(_tests)


def run(kept: int | None, dropout: float = 0.0, quantization: str | None = None, *, targets: list[str] | None = None, reentrant: bool = False):
    """(outputs, LoRA gradients, bytes saved for the backward pass)."""
    quantizer = None if quantization is None else QUANTIZERS[quantization]()
    model = load_quantized(_tests.opened("ltx2.3"), quantizer, dtype=torch.float32, device="cpu")
    adapters = attach(model, LoraSection(rank=4, dropout=dropout, **({} if targets is None else {"target_modules": targets})), seed=0)
    with torch.no_grad():
        for p in adapters.parameters():
            p.add_(0.05)
    if kept is not None:
        checkpoint_activations(model, kept=kept, dropout=dropout > 0)
    if reentrant:
        model.block_runner = CheckpointedBlocks(model.block_runner.inner, len(model.transformer_blocks), 0, dropout > 0, reentrant=True)
    model.train()
    saved: dict[int, int] = {}

    def keep(t):
        saved[t.data_ptr()] = t.nbytes
        return t

    torch.manual_seed(0)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
        v, a = model(*_tests.inputs(model))
    (v.square().sum() + a.square().sum()).backward()
    return (v.detach(), a.detach()), [p.grad for p in adapters.parameters()], sum(saved.values())


@pytest.mark.parametrize("dropout", [0.0, 0.5])
@pytest.mark.parametrize("quantization", [None, "int8"])
def test_same_numbers_and_less_kept(dropout, quantization):
    plain, recomputed = run(None, dropout, quantization), run(0, dropout, quantization)
    assert all(torch.equal(a, b) for a, b in zip(plain[0], recomputed[0]))
    assert all(torch.equal(a, b) for a, b in zip(plain[1], recomputed[1]))
    assert recomputed[2] < 0.5 * plain[2]


def test_adapters_outside_of_the_blocks_learn_the_same():
    """What they make is read by every block: with a backward pass for each block (as with inputs in RAM) none goes through another's."""
    everything = ["re:.*"]
    plain, recomputed = run(None, targets=everything), run(0, targets=everything, reentrant=True)
    assert all(torch.equal(a, b) for a, b in zip(plain[0], recomputed[0]))
    assert len(plain[1]) == len(recomputed[1]) and all(torch.allclose(a, b, rtol=1e-4, atol=1e-6) for a, b in zip(plain[1], recomputed[1]))


def test_kept_blocks_are_not_recomputed():
    layers = run(None)[2], run(1)[2], run(0)[2]
    assert layers[0] > layers[1] > layers[2]


def test_nothing_is_recomputed_without_gradients():
    calls = []

    def inner(block, index, video, *rest):
        calls.append(index)
        return video * video, None

    runner = CheckpointedBlocks(inner, layers=3)
    with torch.no_grad():
        runner(None, 0, torch.ones(1), None, None, None, None)
    assert calls == [0]
    v, _ = runner(None, 1, torch.ones(1, requires_grad=True), None, None, None, None)
    v.sum().backward()
    assert calls == [0, 1, 1]
