"""Contexts of the distinct captions: the connectors run once, before the loop, and leave the device."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch

from .errors import ConfigError
from .models.checkpoint import Checkpoint
from .text import Context, TextFeatures


class ContextStore:
    """Text contexts by caption key, computed once and kept in host memory within a budget.

    What the budget cannot hold is computed when asked for, with the connectors kept on the device: the same
    numbers, some milliseconds a step.

    load_features: reads the cached :class:`TextFeatures` of a key.
    video, audio: which streams' contexts are wanted.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        load_features: Callable[[str], TextFeatures],
        *,
        video: bool,
        audio: bool,
        device: torch.device | str,
        dtype: torch.dtype,
        budget_bytes: int = 4 << 30,
    ) -> None:
        self._checkpoint, self._load = checkpoint, load_features
        self._video, self._audio = video, audio
        self._device, self._dtype, self._budget = device, dtype, budget_bytes
        self._kept: dict[str, Context] = {}
        self._connectors = None

    def prepare(self, keys: Iterable[str], progress: Callable[[int, int], None] | None = None) -> None:
        """Compute the contexts of all keys that the budget holds, then free the connectors if that was all."""
        distinct = list(dict.fromkeys(keys))
        used = 0
        for done, key in enumerate(distinct):
            context = self._compute([key]).to("cpu")
            used += sum(t.numel() * t.element_size() for t in (context.video, context.audio) if t is not None)
            if used > self._budget:
                return  # the rest per step
            self._kept[key] = context
            if progress:
                progress(done + 1, len(distinct))
        self._connectors = None

    def leave(self) -> None:
        """Take the connectors off the device, if they are there; they are loaded again when a caption needs them."""
        self._connectors = None

    def batch(self, keys: Sequence[str]) -> Context:
        """The contexts of several captions stacked along the batch, on the device."""
        parts = [self._kept[k].to(self._device) if k in self._kept else self._compute([k]) for k in keys]
        join = lambda name: None if getattr(parts[0], name) is None else torch.cat([getattr(p, name) for p in parts])  # noqa: E731
        return Context(join("video"), join("audio"), join("mask"))

    @torch.no_grad()
    def _compute(self, keys: Sequence[str]) -> Context:
        if self._connectors is None:
            from .models.connectors import Connectors

            self._connectors = Connectors.load(
                self._checkpoint, video=self._video, audio=self._audio, device=self._device, dtype=self._dtype
            )
        features = [self._load(k) for k in keys]
        kind = self._checkpoint.family.feature_kind
        for key, feature in zip(keys, features):
            if feature.kind != kind:
                raise ConfigError(
                    "cache.family",
                    f"The cached caption {key[:12]} has {feature.kind} features; {self._checkpoint.family.title} reads {kind}.",
                    "The cache was made for another model family: preprocess the dataset again with this model.",
                )
        return self._connectors.contexts(features).to(dtype=self._dtype)
