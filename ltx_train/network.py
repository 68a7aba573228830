"""The transformer as the acceleration section wants it on this machine: loaded, quantised, recomputed, streamed, compiled."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .memory.activations import checkpoint_activations
from .memory.capability import Facts
from .memory.quantization import choose, load_quantized
from .memory.settings import AccelerationSection
from .models.checkpoint import Checkpoint
from .models.transformer import LTXTransformer
from .runs.live import LiveRun


def load_network(
    checkpoint: Checkpoint,
    acceleration: AccelerationSection,
    device: torch.device,
    *,
    streams: Sequence[str],
    live: LiveRun,
    recompute: bool = False,
    dropout: bool = False,
) -> LTXTransformer:
    """Load the streams asked for. recompute: activation checkpointing. dropout: an adapter has dropout."""
    warn = lambda text: live.warn("quantization.fallback", text)  # noqa: E731
    quantizer = choose(acceleration.quantization, Facts.here(device), warn)
    transformer = load_quantized(
        checkpoint,
        quantizer,
        dtype=acceleration.compute_dtype(device),
        device=device,
        video="video" in streams,
        audio="audio" in streams,
        keep_stored=acceleration.keep_stored_quantization,
        progress=lambda done, total: live.progress("load the model", done, total, unit="weights"),
    )
    if recompute:
        checkpoint_activations(transformer, kept=acceleration.keep_activations_of, dropout=dropout)
    return transformer
