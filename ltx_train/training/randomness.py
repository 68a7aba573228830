"""Keyed randomness: a draw depends on (seed, step, slot, modality) alone, so resumes and other process counts agree."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch


def key_of(*parts: object) -> int:
    """A 63-bit number from a tuple of names and numbers (BLAKE2b)."""
    text = "\x1f".join(str(part) for part in parts)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1


def keyed_generator(seed: int, step: int, slot: int, modality: str, purpose: str = "noise", device: torch.device | str = "cpu") -> torch.Generator:
    """A generator of one sample's draws.

    slot: the sample's index in the whole global batch of the step (rank, micro-step and position folded in).
    device: where the generator draws; equal keys give equal numbers on one kind of device, not across kinds.
    """
    return torch.Generator(device).manual_seed(key_of(seed, step, slot, modality, purpose))


class KeyedDraws:
    """:class:`~ltx_train.conditioning.draws.Draws` of a training micro-batch.

    Decisions for a whole batch hang on the step alone: every rank and micro-step then has equal sequence lengths,
    and the numbers do not depend on how the global batch is split.
    """

    def __init__(self, seed: int, step: int, slots: Sequence[int], modality: str, name: str = "") -> None:
        self._seed, self._step, self._slots, self._modality, self._name = seed, step, tuple(slots), modality, name

    def child(self, name: str) -> KeyedDraws:
        return KeyedDraws(self._seed, self._step, self._slots, self._modality, f"{self._name}/{name}")

    def happens(self, probability: float) -> list[bool]:
        return [_unit(self._seed, self._step, slot, self._modality, self._name, "happens") < probability for slot in self._slots]

    def happens_once(self, probability: float) -> bool:
        return _unit(self._seed, self._step, "batch", self._modality, self._name, "happens") < probability

    def generators(self) -> list[torch.Generator]:
        return [keyed_generator(self._seed, self._step, slot, self._modality, f"{self._name}/values") for slot in self._slots]


def _unit(*parts: object) -> float:
    """A number in [0, 1) from a key: probability 1 always happens, probability 0 never."""
    return (key_of(*parts) >> 10) / 2**53
