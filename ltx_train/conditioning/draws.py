"""Where a condition's chance comes from: the same interface for keyed training draws and for sampling, where all is sure."""

from __future__ import annotations

from typing import Protocol

import torch


class Draws(Protocol):
    """Random decisions of one micro-batch, made on the host so that nothing waits for the accelerator."""

    def child(self, name: str) -> Draws:
        """Independent draws for one condition of a list."""

    def happens(self, probability: float) -> list[bool]:
        """One decision a sample."""

    def happens_once(self, probability: float) -> bool:
        """One decision for the whole batch (what changes the sequence length)."""

    def generators(self) -> list[torch.Generator]:
        """One CPU generator a sample."""


class Sure:
    """Draws of sampling and checks: every condition applies; what is random is seeded by the sample's place."""

    def __init__(self, batch: int = 1, seed: int = 0) -> None:
        self._batch, self._seed = batch, seed

    def child(self, name: str) -> Sure:
        return self

    def happens(self, probability: float) -> list[bool]:
        return [True] * self._batch

    def happens_once(self, probability: float) -> bool:
        return True

    def generators(self) -> list[torch.Generator]:
        return [torch.Generator().manual_seed(self._seed + i) for i in range(self._batch)]
