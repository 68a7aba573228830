"""Modality: all that the transformer reads about one stream (video or audio)."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Modality:
    """One stream's input to the transformer. Sigma and timesteps are in 0..1.

    tokens: [B, T, C] noisy latents. sigma: [B], the noise level of the sample. timesteps: [B, T], per token
    (0 on clean tokens). positions: [B, 3 or 1, T, 2] float32, [start, end) in seconds, pixels, pixels.
    context: [B, S, D] text context. context_mask: [B, S] (1 = real) or None when every token counts.
    keyframes: [B, T] bool, True where the 2.5 keyframe embedding is added, or None.
    attention_mask: [B, T, T] self-attention strength in 0..1 (bias = log of it), or None.
    """

    tokens: Tensor
    sigma: Tensor
    timesteps: Tensor
    positions: Tensor
    context: Tensor
    context_mask: Tensor | None = None
    keyframes: Tensor | None = None
    attention_mask: Tensor | None = None
