"""The transformer as the acceleration section wants it on this machine: loaded, quantised, packed, streamed, compiled."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .errors import ConfigError
from .memory.activations import checkpoint_activations
from .memory.attention import prefer_attention
from .memory.capability import Facts
from .memory.compiling import keep_compiled_code
from .memory.engine import BlockEngine, EngineSettings
from .memory.graphs import GraphedPasses
from .memory.limit import limit_memory
from .memory.quantization import choose, load_quantized
from .memory.settings import AccelerationSection
from .models.checkpoint import Checkpoint
from .models.transformer import LTXTransformer
from .runs.live import LiveRun

KEEP_ALL = 0.6
"""The activation budget that stands for "recompute nothing": above it memory grows and no product is saved."""


def load_network(
    checkpoint: Checkpoint,
    acceleration: AccelerationSection,
    device: torch.device,
    *,
    streams: Sequence[str],
    live: LiveRun,
    recompute: bool = False,
    dropout: bool = False,
    frozen: bool = True,
    own_layers: bool = True,
) -> LTXTransformer:
    """Load the streams asked for.

    recompute: activation checkpointing. dropout: an adapter has dropout. frozen: the base is not trained. own_layers: the
    adapter is computed by our Linear; other kinds wrap layers and get a base that stays on the device.
    Raises ConfigError for settings that cannot go together.
    """
    check_combination(acceleration, frozen=frozen, own_layers=own_layers, dropout=dropout)
    limit_memory(device, acceleration.limit_bytes)
    facts = Facts.here(device)
    warn = lambda text: live.warn("quantization.fallback", text)  # noqa: E731
    dtype = acceleration.compute_dtype(device)
    settings = engine_settings(acceleration, facts, device, recompute=recompute, dropout=dropout, warn=live.warn) if frozen and own_layers else None
    quantizer = choose(acceleration.quantization, facts, warn)
    if quantizer is not None and quantizer.caution:
        live.warn("quantization.coarse", quantizer.caution, "It is for experiments: int4-quanto, nf4 and the 8-bit formats are within 2 %.")
    engines: list[BlockEngine] = []

    def take(model: LTXTransformer, index: int) -> None:
        if not engines:
            engines.append(BlockEngine(model, settings, device, dtype))
        engines[0].take(index, model.transformer_blocks[index])

    transformer = load_quantized(
        checkpoint,
        quantizer,
        dtype=dtype,
        device=device,
        video="video" in streams,
        audio="audio" in streams,
        keep_stored=acceleration.keep_stored_quantization,
        progress=lambda done, total: live.progress("load the model", done, total, unit="tensors"),
        whole=None if settings is None else take,  # each block goes where it rests before the next one is read
    )
    prefer_attention(acceleration.attention, device)
    if settings is not None:
        engine = engaged(transformer, engines[0], device)
        if settings.compile and device.type == "cuda" and acceleration.cuda_graphs != "off":
            transformer.pass_runner = GraphedPasses(transformer, engine, live.warn)
    elif recompute:
        checkpoint_activations(transformer, kept=acceleration.keep_activations_of, dropout=dropout)
    return transformer


def engaged(transformer: LTXTransformer, engine: BlockEngine, device: torch.device) -> BlockEngine:
    """Let the engine that has taken the blocks run them; what is not in a block goes to the device."""
    transformer.block_runner = engine
    for parameter in transformer.parameters():
        if parameter.device != device and parameter.data_ptr() not in engine.resting:
            parameter.data = parameter.data.to(device)
    return engine


def engine_settings(section: AccelerationSection, facts: Facts, device: torch.device, *, recompute: bool, dropout: bool, warn) -> EngineSettings:
    """The section in the engine's terms; what is still ``auto`` keeps everything on the device."""
    compiles, why = section.compiles(device)
    if not compiles and why and section.compile == "on":
        warn("compile.off", f"Blocks are not compiled: {why}.")
    if compiles and facts.device in ("cuda", "rocm"):
        keep_compiled_code()
    if section.float8_products and (facts.sm is None or facts.sm < 89):
        raise ConfigError("float8.card", "float8_products needs an NVIDIA card with compute capability 8.9 or later.", "Set float8_products: false; quantization fp8 itself works.")
    budget = section.activation_budget if section.activation_budget != "auto" else 0.0 if recompute else KEEP_ALL
    streamed = 0 if section.stream_blocks == "auto" else section.stream_blocks
    return EngineSettings(
        streamed=streamed,
        compile=compiles,
        budget=budget,
        recompute=recompute,
        kept=section.keep_activations_of,
        offload=section.offload_activations == "on",
        float8=section.float8_products,
        on_disk=0 if section.blocks_on_disk == "auto" else min(section.blocks_on_disk, streamed),
        dropout=dropout,
        pin_limit=None if section.pin_limit_gb is None else int(section.pin_limit_gb * 1e9),
    )


def check_combination(section: AccelerationSection, *, frozen: bool, own_layers: bool, dropout: bool = False) -> None:
    """Refuse by name, before anything is loaded, what cannot go together."""
    streams = section.stream_blocks not in ("auto", 0)
    if section.accumulate_together not in ("auto", 1):
        with_what = "LoRA training only" if not frozen else "the adapter kinds lora and rslora only" if not own_layers else "no dropout" if dropout else None
        if with_what is not None:
            raise ConfigError("memory.together", f"acceleration.accumulate_together goes with {with_what}.", "Set accumulate_together: 1, or change the other setting.")
    if not frozen and (streams or section.offload_activations == "on"):
        raise ConfigError("memory.full", "Full fine-tuning cannot stream blocks or keep their inputs in RAM.", "Set stream_blocks: 0 and offload_activations: off, or train a LoRA.")
    if section.blocks_on_disk not in ("auto", 0) and section.cuda_graphs == "on":
        raise ConfigError("memory.disk_graphs", "acceleration.blocks_on_disk goes with cuda_graphs: off.", "A recorded pass reads its uploads from fixed places in RAM.")
    if not own_layers and (streams or section.float8_products):
        name = "stream_blocks" if streams else "float8_products"
        raise ConfigError("memory.adapter", f"acceleration.{name} goes with the adapter kinds lora and rslora only.", f"Choose kind: lora, or leave {name} off.")
