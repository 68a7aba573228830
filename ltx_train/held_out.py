"""Held-out numbers: the loss on clips that are never trained on, at fixed noise and noise levels, with the base model's beside it."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from math import ceil
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from .contexts import ContextStore
from .data.batches import collate
from .data.items import Item, TrainingDataset
from .data.sampler import Unit
from .errors import StopRequested
from .runs.events import HeldOutEvent
from .sampling.denoise import evaluating
from .text import TextFeatures
from .training.step import TrainStep

if TYPE_CHECKING:
    from .runs.live import LiveRun
    from .training.parallel import Parallel

SIGMAS = (0.1, 0.3, 0.5, 0.7, 0.9)
"""Noise levels that every held-out clip is measured at."""
MOST_CLIPS = 16
SEED = 2025
TURNED = 0.01
"""By how much of its lowest value the loss must have risen, twice in a row, before it counts as turned."""


class Portion:
    """Some samples of a dataset, as a dataset. Sources that have a manifest keep one, of these samples alone."""

    def __init__(self, whole: TrainingDataset, indices: Sequence[int]) -> None:
        self.whole, self.indices = whole, tuple(indices)
        self.audio_grid = whole.audio_grid
        manifest = getattr(whole, "manifest", None)
        if manifest is not None:
            self.manifest = replace(manifest, entries=type(manifest.entries)(manifest.entries[i] for i in self.indices))

    def __len__(self) -> int:
        return len(self.indices)

    def units(self) -> list[Unit]:
        units = self.whole.units()
        return [units[i] for i in self.indices]

    def item(self, index: int) -> Item:
        return self.whole.item(self.indices[index])

    def features(self, key: str) -> TextFeatures:
        return self.whole.features(key)

    def text_keys(self) -> list[str]:
        keys = [e.text for e in self.manifest.entries] if hasattr(self, "manifest") else [self.whole.text_keys()[i] for i in self.indices]
        return list(dict.fromkeys(keys))

    def empty_text(self) -> str | None:
        return self.whole.empty_text()

    def audio_coverage(self) -> float:
        """Share of these samples that have sound; of the whole where it is not known singly."""
        if not hasattr(self, "manifest"):
            return self.whole.audio_coverage()
        return sum(e.audio is not None for e in self.manifest.entries) / max(1, len(self))

    def has_prior(self) -> bool:
        return hasattr(self, "manifest") and any(e.regularisation == "prior" for e in self.manifest.entries)


def split(dataset: TrainingDataset, share: float) -> tuple[list[int], list[int]]:
    """(indices to train on, indices held out): ``share`` of the files, at least one, never all; by their names alone.

    All pieces of a file fall on one side, whatever the bucket; regularisation clips are always trained on.
    """
    entries = getattr(getattr(dataset, "manifest", None), "entries", None)
    if entries is None:
        names: list[str | None] = list(dataset.text_keys())
    else:
        names = [None if e.regularisation else f"{e.dataset}/{Path(e.path).name}" for e in entries]
    files = sorted({n for n in names if n is not None}, key=lambda n: hashlib.sha256(n.encode()).digest())
    count = min(max(1, round(share * len(files))), len(files) - 1) if share > 0 else 0
    chosen = set(files[: max(0, count)])
    held = [i for i, n in enumerate(names) if n in chosen]
    return [i for i in range(len(names)) if i not in set(held)], held


@dataclass
class Line:
    """Held-out losses so far, for telling when they turn. total: the sum of both streams' means."""

    points: list[tuple[int, float]] = field(default_factory=list)
    told: bool = False

    def add(self, step: int, total: float) -> int | None:
        """Take one point in; the step of the lowest when the loss has turned, told once."""
        self.points = [p for p in self.points if p[0] < step] + [(step, total)]
        best_step, best = min(self.points, key=lambda p: p[1])
        after = [value for at, value in self.points if at > best_step]
        turned = len(after) >= 2 and all(value > best * (1 + TURNED) for value in after[-2:])
        if not turned:
            self.told = False
        elif not self.told:
            self.told = True
            return best_step
        return None


class HeldOut:
    """Measures the held-out loss of a transformer while it is trained.

    step: the run's own loss. base: context in which the transformer is the base model; None where that is gone after
    the first step (full fine-tuning), whose first measure then is the base model's.
    """

    def __init__(self, dataset: TrainingDataset, contexts: ContextStore, step: TrainStep, device: torch.device, *, base: Callable[[], AbstractContextManager[None]] | None) -> None:
        self.dataset, self.contexts, self.step, self.device, self.base = dataset, contexts, step, device, base
        self.count = min(len(dataset), MOST_CLIPS)
        self.line = Line()
        self._base: dict[str, float] | None = None

    def resume(self, events: Sequence[object], step: int) -> None:
        """Take over what an earlier start of this run measured, up to the step it goes on from."""
        for event in events:
            if isinstance(event, HeldOutEvent) and event.step <= step:
                self.line.add(event.step, event.total)
                if self.base is None and event.base:
                    self._base = dict(event.base)

    def run(self, step: int, live: LiveRun, parallel: Parallel | None = None) -> HeldOutEvent | None:
        """Measure, say it, and hint when the loss has turned; None and a warning when it could not be measured.

        The training's state and random numbers are left as they are.
        """
        try:
            return self._run(step, live, parallel)
        except StopRequested:
            raise
        except Exception as error:  # as with previews: a measure must not end a training
            live.warn("held_out.failed", f"The held-out loss of step {step} could not be measured: {error}".splitlines()[0][:118], f"{error}\nTraining goes on.")
            return None

    def _run(self, step: int, live: LiveRun, parallel: Parallel | None) -> HeldOutEvent:
        with live.phase("held-out loss", f"step {step}"), evaluating(self.step.transformer):
            now = self.measure(parallel)
            if self._base is None:
                with nullcontext() if self.base is None else self.base():
                    self._base = now if self.base is None else self.measure(parallel)
        means = {m: now[m] for m in ("video", "audio") if m in now}
        event = HeldOutEvent(step=step, total=sum(means.values()), losses=now, base=self._base, clips=self.count)
        live.emit(event)
        lowest = self.line.add(step, event.total)
        if lowest is not None:
            live.warn(
                "held_out.turned", f"The held-out loss has risen since step {lowest}: the training begins to learn its clips by heart.",
                f"Lowest {min(v for _, v in self.line.points):.4f} at step {lowest}, now {event.total:.4f}. Compare previews of that step with later ones; "
                "fewer steps, a lower rank or learning rate, or more clips help.",
            )  # fmt: skip
        return event

    @torch.no_grad()
    def measure(self, parallel: Parallel | None = None) -> dict[str, float]:
        """Mean losses by stream (``video``, ``audio``) and by stream and noise level (``video 0.3``), over all ranks.

        Noise hangs on clip and level alone, so that two measures differ by the weights and nothing else. Every rank
        runs the same number of forwards; what it runs twice counts once.
        """
        rank, world = (parallel.rank, parallel.world) if parallel is not None else (0, 1)
        names = [f"{m} {s:g}" for m in ("video", "audio") for s in SIGMAS]
        sums, counts = dict.fromkeys(names, 0.0), dict.fromkeys(names, 0.0)
        for turn in range(ceil(self.count / world)):
            index = turn * world + rank
            item = self.dataset.item(index % self.count)
            batch = collate([replace(item, regularisation="")], self.contexts.batch([item.text]), self.dataset.audio_grid).to(self.device)
            for level, sigma in enumerate(SIGMAS):
                out = self.step(batch, seed=SEED, step=level, slot=index % self.count, sigma=sigma)
                for stream in ("video", "audio") if index < self.count else ():
                    loss, known = getattr(out, f"{stream}_loss"), getattr(out, f"{stream}_counts")
                    if loss is not None and bool(known[0]):
                        sums[f"{stream} {sigma:g}"] += float(loss[0])
                        counts[f"{stream} {sigma:g}"] += 1
        if parallel is not None and world > 1:
            added = parallel.sum([*sums.values(), *counts.values()])
            sums, counts = dict(zip(names, added[: len(names)])), dict(zip(names, added[len(names) :]))
        found = {n: sums[n] / counts[n] for n in names if counts[n]}
        for stream in ("video", "audio"):
            rows = [v for n, v in found.items() if n.startswith(f"{stream} ")]
            if rows:
                found[stream] = sum(rows) / len(rows)
        return found
