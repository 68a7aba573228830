"""Which samples make which batch: a pure function of seed and step, with batches inside one bucket."""

from __future__ import annotations

import hashlib
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch

from ..errors import ConfigError


@dataclass(frozen=True)
class Unit:
    """What the sampler knows of one sample: its batch group, repeats an epoch, latent tokens."""

    group: str
    repeats: int = 1
    tokens: int = 0


@dataclass(frozen=True)
class Stage:
    """From ``from_step`` on, only samples of at most ``max_tokens`` latent tokens (None: all)."""

    from_step: int
    max_tokens: int | None = None


class BucketSampler:
    """Batches of sample indices; nothing is remembered between calls, so resuming needs the step alone.

    Every group (bucket) is an endless line of its samples, shuffled anew each pass, each sample ``repeats`` times a pass;
    batches are cut from that line, so a sample comes exactly once a pass whatever the batch size, and a group smaller
    than the batch wraps around. An epoch mixes the batches of all groups. Batch number n of a step belongs to micro-step
    n // world on rank n % world: the set of a step depends on micro-steps x ranks alone.

    accumulation: micro-steps a step on each rank.
    """

    def __init__(self, units: Sequence[Unit], *, batch_size: int = 1, accumulation: int = 1, seed: int = 42, stages: Sequence[Stage] = ()) -> None:
        if not units:
            raise ConfigError("data.none", "There is no sample to train on.", "See the report: python -m ltx_train report DATASET")
        self.units, self.batch_size, self.accumulation, self.seed = tuple(units), batch_size, accumulation, seed
        ordered = sorted(stages, key=lambda s: s.from_step)
        if not ordered or ordered[0].from_step > 0:
            ordered = [Stage(0), *ordered]
        self.stages = tuple(ordered)
        self._lines = tuple(self._groups(stage) for stage in self.stages)
        for stage, lines in zip(self.stages, self._lines):
            if not lines:
                least = min(u.tokens for u in units)
                raise ConfigError("data.stage", f"No sample has at most {stage.max_tokens} tokens (from step {stage.from_step}).", f"The smallest has {least}.")
        self._order = lru_cache(maxsize=16)(self._epoch_order)
        self._pass = lru_cache(maxsize=64)(self._shuffled)

    def _groups(self, stage: Stage) -> dict[str, tuple[int, ...]]:
        groups: dict[str, list[int]] = {}
        for index, unit in enumerate(self.units):
            if stage.max_tokens is None or unit.tokens <= stage.max_tokens:
                groups.setdefault(unit.group, []).extend([index] * unit.repeats)
        return {name: tuple(groups[name]) for name in sorted(groups)}

    @property
    def small_groups(self) -> dict[str, int]:
        """Groups with fewer samples (repeats counted) than a batch: their batches repeat samples."""
        return {name: len(line) for name, line in self._lines[-1].items() if len(line) < self.batch_size}

    def epoch_samples(self) -> int:
        """Samples an epoch of the last stage, repeats counted."""
        return sum(len(line) for line in self._lines[-1].values())

    def batch_ids(self, step: int, micro: int = 0, rank: int = 0, world: int = 1) -> list[int]:
        """Indices of one micro-batch: ``batch_size`` samples of one group."""
        stage = bisect_right([s.from_step for s in self.stages], step) - 1
        number = (step - self.stages[stage].from_step) * self.accumulation * world + micro * world + rank
        epoch, offset = self._locate(stage, number)
        group, batch = self._order(stage, epoch)[offset]
        line = self._lines[stage][group]
        found = []
        for position in range(batch * self.batch_size, (batch + 1) * self.batch_size):
            found.append(self._pass(stage, group, position // len(line))[position % len(line)])
        return found

    def slots(self, step: int, micro: int = 0, rank: int = 0, world: int = 1) -> list[int]:
        """Places of the micro-batch's samples within the whole global batch: the keys of their randomness."""
        first = (micro * world + rank) * self.batch_size
        return list(range(first, first + self.batch_size))

    def dropped(self, probability: float, step: int, micro: int = 0, rank: int = 0, world: int = 1, name: str = "caption") -> list[bool]:
        """Which samples of a micro-batch lose their caption: a coin keyed by (seed, name, step, slot), independent by name."""
        return [probability > 0 and _uniform(self.seed, name, step, slot) < probability for slot in self.slots(step, micro, rank, world)]

    def _batches_before(self, stage: int, epoch: int) -> int:
        return sum(epoch * len(line) // self.batch_size for line in self._lines[stage].values())

    def _locate(self, stage: int, number: int) -> tuple[int, int]:
        """Epoch and place in it of batch ``number``: the epoch e with before(e) <= number < before(e + 1)."""
        low, high = 0, 1
        while self._batches_before(stage, high) <= number:
            low, high = high, high * 2
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self._batches_before(stage, middle) <= number else (low, middle)
        return low, number - self._batches_before(stage, low)

    def _epoch_order(self, stage: int, epoch: int) -> tuple[tuple[str, int], ...]:
        batches = []
        for name, line in self._lines[stage].items():
            first, last = epoch * len(line) // self.batch_size, (epoch + 1) * len(line) // self.batch_size
            batches += [(name, n) for n in range(first, last)]
        if len(self._lines[stage]) == 1:
            return tuple(batches)  # its line is shuffled already; a step's samples then hang on its global batch alone, however it is split
        order = torch.randperm(len(batches), generator=_generator(self.seed, "order", stage, epoch)).tolist()
        return tuple(batches[n] for n in order)

    def _shuffled(self, stage: int, group: str, turn: int) -> tuple[int, ...]:
        line = self._lines[stage][group]
        order = torch.randperm(len(line), generator=_generator(self.seed, group, stage, turn)).tolist()
        return tuple(line[n] for n in order)


def _number(*parts: object) -> int:
    return int.from_bytes(hashlib.sha256("/".join(map(str, parts)).encode()).digest()[:8], "little") >> 1


def _generator(*parts: object) -> torch.Generator:
    return torch.Generator().manual_seed(_number(*parts))


def _uniform(*parts: object) -> float:
    return _number(*parts) / 2**63
