"""Modality: all that the transformer reads about one stream (video or audio)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Modality:
    """One stream's input to the transformer. Sigma and timesteps are in 0..1.

    tokens: [B, T, C] noisy latents. sigma: [B], the noise level of the sample. timesteps: [B, T], per token
    (0 on clean tokens). positions: [B, 3 or 1, T, 2] float32, [start, end) in seconds, pixels, pixels.
    context: [B, S, D] text context. context_mask: [B, S] (1 = real) or None when every token counts.
    keyframes: [B, T] bool, True where the 2.5 keyframe embedding is added, or None.
    attention_mask: [B, T, T] self-attention strength in 0..1 (bias = log of it), or None.

    timestep_rows [B, R] and row_index [B, T] (int64, 0..R-1) are the same timesteps in compact form:
    ``timesteps[b, t] == timestep_rows[b, row_index[b, t]]``. Who builds timesteps as denoise * sigma knows the few
    distinct values and spares the transformer from looking for them (which waits for the accelerator). With R = 1
    row_index may be None. Absent, the transformer finds them itself.
    """

    tokens: Tensor
    sigma: Tensor
    timesteps: Tensor
    positions: Tensor
    context: Tensor
    context_mask: Tensor | None = None
    keyframes: Tensor | None = None
    attention_mask: Tensor | None = None
    timestep_rows: Tensor | None = None
    row_index: Tensor | None = None

    def distinct_timesteps(self) -> tuple[Tensor, Tensor | None]:
        """The distinct timesteps [N] of the batch and [B, T] the number of each token's one.

        The index is None where each sample has one timestep; then N = B.
        """
        rows, index = self.timestep_rows, self.row_index
        if rows is None:
            return _find_distinct(self.timesteps)
        batch, count = rows.shape
        if count == 1:
            return rows[:, 0], None
        assert index is not None, f"{count} timestep rows need row_index"
        return rows.flatten(), index + count * torch.arange(batch, device=index.device).unsqueeze(1)


def _find_distinct(timesteps: Tensor) -> tuple[Tensor, Tensor | None]:
    first = timesteps[:, :1]
    if bool((timesteps == first).all()):
        return first.squeeze(1), None
    return torch.unique(timesteps, return_inverse=True)
