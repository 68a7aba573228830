"""Text between rooms: features of a caption (cached) and the context the transformer reads."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .transfer import upload

TOKEN_LIMITS = {"t5": 256, "gemma3": 1024, "gemma4": 1024}
"""The most tokens of a caption that a text encoder reads: LTX-Video's and LTX-2's own inference."""


@dataclass(frozen=True)
class TextFeatures:
    """Features of one caption's valid tokens, before the connectors: what the cache stores.

    kind: ``t5`` (LTX-Video), ``v1`` (LTX-2: one tensor for both streams) or ``v2`` (LTX-2.3, 2.5: one each).
    video: [n, D]: T5 hidden states 4096, V1 features 3840, V2 video features 4096.
    audio: [n, Da] for ``v2`` (2048), else None (``v1`` uses ``video`` for both streams).
    """

    kind: str
    video: Tensor
    audio: Tensor | None = None


@dataclass(frozen=True)
class Context:
    """What cross attention reads, after the connectors.

    video [B, S, D] or None, audio [B, S, Da] or None.
    mask [B, S] (1 = real token), or None when every token counts (always so behind connectors with registers).
    """

    video: Tensor | None
    audio: Tensor | None
    mask: Tensor | None = None

    def to(self, device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> Context:
        """The same context moved (without waiting for the device) or cast; the mask keeps its dtype."""
        device = device or (self.audio if self.video is None else self.video).device
        return Context(upload(self.video, device, dtype), upload(self.audio, device, dtype), upload(self.mask, device))
