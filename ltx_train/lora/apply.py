"""Applying finished LoRAs to a loaded transformer for sampling, at strengths, several at once."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from ..errors import LtxTrainError
from ..models.linear import Linear, LoraWeights
from .files import LoraFile
from .module import LoraModule


@torch.no_grad()
def apply_loras(transformer: nn.Module, loras: Sequence[tuple[LoraFile, float]]) -> int:
    """Add LoRAs at their strengths to a transformer without adapters; the number of changed modules.

    Low-rank updates stay beside the weight (so that a quantised base is not touched); other kinds are added to the weight.
    Raises LtxTrainError as :func:`without_place`, or for a kind that a quantised base cannot take.
    """
    layers = {name: layer for name, layer in transformer.named_modules() if isinstance(layer, Linear)}
    low_rank: dict[str, list[tuple[LoraModule, float]]] = {}
    changed: set[str] = set()
    for lora, strength in loras:
        absent = set(without_place(transformer, lora))  # told before, or of a stream that is not loaded
        for name, module in lora.modules.items():
            if name in absent:
                continue
            changed.add(name)
            if module.kind == "lora" and "diff_b" not in module.tensors:
                low_rank.setdefault(name, []).append((module, strength))
            else:
                _add_to_weight(name, layers[name], module, strength)
    for name, parts in low_rank.items():
        _add_beside(layers[name], parts)
    return len(changed)


def without_place(transformer: nn.Module, lora: LoraFile) -> list[str]:
    """The LoRA's modules that the transformer (on any device, also meta) lacks.

    Raises LtxTrainError ``lora.other_model`` when that is all of them, ``lora.shape`` when one is of another size here.
    """
    layers = {name: layer for name, layer in transformer.named_modules() if isinstance(layer, Linear)}
    called = lora.path.name[:40] if lora.path else "The LoRA"
    absent = [name for name in lora.modules if name not in layers]
    if len(absent) == len(lora.modules):
        raise LtxTrainError(
            "lora.other_model", f"{called} changes no module of what is sampled here.",
            f"Its first module is {absent[0]}: it was trained on another model, or on sound (or video) alone, which is not made here.",
        )  # fmt: skip
    for name, module in lora.modules.items():
        if name not in layers:
            continue
        whole = (layers[name].out_features, layers[name].in_features)
        if module.shape != (whole if set(module.tensors) != {"diff_b"} else whole[:1]):
            raise LtxTrainError("lora.shape", f"{called} does not fit: {name[-40:]} is {list(module.shape)}, in the model {list(whole)}.", "It was trained on another model.")
    return absent


def _add_to_weight(name: str, layer: Linear, module: LoraModule, strength: float) -> None:
    if layer.weight is None:
        raise LtxTrainError(
            "lora.quantised_base", f"{name[-50:]}: a {module.kind} LoRA cannot be applied to a quantised weight.",
            "Set acceleration.quantization to none and keep_stored_quantization to false.",
        )  # fmt: skip
    if {"diff", "lora_A", "hada_w1_a", "lokr_w1", "lokr_w1_a"} & set(module.tensors):
        cpu = layer.weight.detach().float().cpu()
        layer.weight.copy_(module.apply(cpu, strength).to(layer.weight))
    if "diff_b" in module.tensors and layer.bias is not None:
        layer.bias.add_(strength * module.tensors["diff_b"].to(layer.bias))


def _add_beside(layer: Linear, parts: Sequence[tuple[LoraModule, float]]) -> None:
    """Several low-rank updates as one: their A stacked, their B side by side with scale and strength inside."""
    a = torch.cat([m.tensors["lora_A"].float() for m, _ in parts])
    b = torch.cat([m.scale * strength * m.tensors["lora_B"].float() for m, strength in parts], dim=1)
    lora = LoraWeights(layer.in_features, layer.out_features, a.shape[0])
    lora.A.copy_(a)
    lora.B.copy_(b)
    layer.lora = lora.to(layer.device).requires_grad_(False).eval()
