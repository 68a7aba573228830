"""Random networks of full size, made block by block on the device: no file is needed to measure a step."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from ..memory.engine import BlockEngine, EngineSettings
from ..memory.pinned import HostMemory
from ..memory.quantization import QUANTIZERS, is_excluded
from ..models.blank import blank
from ..models.families import FAMILIES, TransformerConfig, transformer_config
from ..models.linear import linears
from ..models.transformer import LTXTransformer, keeps_float32
from ..tiny.transformer_shapes import transformer_shapes

DEVIATION = 0.02
"""Standard deviation of the random weights, about that of trained ones."""


@lru_cache(maxsize=8)
def full_config(family: str) -> TransformerConfig:
    """The production transformer of a family."""
    row = FAMILIES[family]
    return transformer_config(row, transformer_shapes(row.config["transformer"], row), {})


def empty_transformer(config: TransformerConfig, *, audio: bool) -> LTXTransformer:
    """The transformer without values, frozen."""
    with blank():
        return LTXTransformer(config, audio=audio and config.has_audio).requires_grad_(False).eval()


def fill(module: nn.Module, device: torch.device, dtype: torch.dtype, skip: tuple[str, ...] = (), *, untrained: bool = False) -> None:
    """Give every parameter below ``module`` random values on the device; norms get ones.

    untrained: linear layers begin as torch begins them, uniform up to 1 / sqrt(inputs), instead of normal with ``DEVIATION``.
    """
    for name, parameter in list(module.named_parameters()):
        if name.startswith(skip):
            continue
        kind = torch.float32 if keeps_float32(name) else dtype
        value = torch.empty(parameter.shape, device=device, dtype=kind)
        owner = module.get_submodule(name.rpartition(".")[0])
        if "norm" in name.rpartition(".")[0]:
            value.fill_(1.0)
        elif untrained and isinstance(owner, nn.Linear):
            value.uniform_(-(owner.in_features**-0.5), owner.in_features**-0.5)
        else:
            value.normal_(std=DEVIATION)
        setattr(owner, name.rpartition(".")[2], nn.Parameter(value, requires_grad=False))


def fast_transformer(
    config: TransformerConfig, settings: EngineSettings, *, quantization: str | None, audio: bool, device: torch.device, dtype: torch.dtype, memory: HostMemory | None = None
) -> LTXTransformer:
    """The product's way: each block made, quantised and taken by the engine, which then runs the blocks."""
    model = empty_transformer(config, audio=audio)
    fill(model, device, dtype, skip=("transformer_blocks.",))
    engine = BlockEngine(model, settings, device, dtype, memory)
    quantizer = None if quantization is None else QUANTIZERS[quantization]()
    for index, block in enumerate(model.transformer_blocks):
        fill(block, device, dtype)
        for name, layer in linears(block):
            if quantizer is not None and not is_excluded(name):
                layer.set_quantized(quantizer.quantize(layer.weight.detach()))
        engine.take(index, block)
    model.block_runner = engine
    return model


def plain_transformer(config: TransformerConfig, *, audio: bool, device: torch.device, dtype: torch.dtype) -> LTXTransformer:
    """The plain way, as the official trainer does it: each block recomputed by torch's checkpoint, nothing compiled."""
    model = empty_transformer(config, audio=audio)
    fill(model, device, dtype)
    model.block_runner = lambda block, index, *inputs: checkpoint(block, *inputs, use_reentrant=False)
    return model


def plain_adapter(model: LTXTransformer, rank: int, targets: tuple[str, ...]) -> list[nn.Parameter]:
    """peft's own LoRA modules on the plain network."""
    import peft

    peft.inject_adapter_in_model(peft.LoraConfig(r=rank, lora_alpha=rank, target_modules=list(targets)), model)
    parameters = [p for name, p in model.named_parameters() if "lora_" in name]
    for p in parameters:
        p.data = p.data.float()
        p.requires_grad_(True)
    return parameters


def per_token(model: LTXTransformer) -> Callable:
    """Calls the network with a timestep a token, so that adaLN runs on every token."""
    from dataclasses import replace

    def whole(modality):
        if modality is None:
            return None
        count = modality.timesteps.shape[1]
        index = torch.arange(count, device=modality.timesteps.device).expand(modality.timesteps.shape)
        return replace(modality, timestep_rows=modality.timesteps, row_index=index)

    return lambda video, audio, perturbations=None: model(whole(video), whole(audio), perturbations)
