"""What a step is reported as: losses averaged over micro-batches and ranks, per modality and sigma bin, with running means."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

SIGMA_EDGES = (0.0, 0.25, 0.5, 0.75, 1.0)
"""Bins of the noise level, as the official trainer reports them."""
NAMES = ("video", "audio", "regularisation")
"""What losses are averaged for; the last are clips that keep the model general, which the first two leave out."""


@dataclass
class RunningMean:
    """An exponential running mean without start-up bias: m_n = sum of decay^(n-i) x_i over the sum of the weights."""

    decay: float = 0.98
    total: float = 0.0
    weight: float = 0.0

    def add(self, value: float) -> float:
        """Take one value in; the new mean."""
        self.total = self.decay * self.total + (1 - self.decay) * value
        self.weight = self.decay * self.weight + (1 - self.decay)
        return self.mean

    @property
    def mean(self) -> float:
        return self.total / self.weight if self.weight else float("nan")


@dataclass
class StepMeter:
    """Collects one optimizer step's micro-batches on the device; nothing is synchronised.

    ``rows`` hold [loss, sigma] pairs of samples per modality; a sample without that modality is absent.
    """

    rows: dict[str, list[Tensor]] = field(default_factory=dict)
    losses: list[Tensor] = field(default_factory=list)

    def add(self, loss: Tensor, per_modality: dict[str, tuple[Tensor, Tensor, Tensor]]) -> None:
        """loss: scalar of the micro-batch; per modality: loss [B], sigma [B], counts [B] bool (False = no such loss)."""
        self.losses.append(loss.detach())
        for name, (values, sigma, counts) in per_modality.items():
            row = torch.stack([values.detach().float(), sigma.detach().float(), counts.to(values.device).float()], dim=-1)
            self.rows.setdefault(name, []).append(row)

    def tensor(self, names: tuple[str, ...] = NAMES) -> Tensor:
        """[1 + 2 * names * (1 + bins)] sums and counts: what ranks add up to agree on the step's report."""
        device = self.losses[0].device
        parts = [torch.stack(self.losses).mean().view(1)]
        for name in names:
            rows = torch.cat(self.rows[name]) if name in self.rows else torch.zeros(0, 3, device=device)
            loss, sigma, counts = rows.unbind(-1)
            keep = counts > 0
            loss = torch.where(keep, loss, torch.zeros_like(loss))
            bins = torch.stack([sigma >= edge for edge in SIGMA_EDGES[1:-1]]).sum(0)  # by plain numbers: a tensor of edges would be copied over
            per_bin = torch.zeros(len(SIGMA_EDGES) - 1, device=device).index_add_(0, bins, loss)
            in_bin = torch.zeros(len(SIGMA_EDGES) - 1, device=device).index_add_(0, bins, keep.float())
            parts += [loss.sum().view(1), keep.float().sum().view(1), per_bin, in_bin]
        return torch.cat(parts)


@dataclass
class RunMeter:
    """What the steps of one start come to: sums over its optimizer steps on this rank."""

    steps: int = 0
    skipped: int = 0
    seconds: float = 0.0
    waiting: float = 0.0
    tokens: int = 0
    peak: int = 0

    def add(self, *, seconds: float, waiting: float, tokens: int, peak: int, skipped: bool) -> None:
        """Take in one optimizer step; a skipped one took its time too."""
        self.steps += 1
        self.skipped += skipped
        self.seconds += seconds
        self.waiting += waiting
        self.tokens += tokens
        self.peak = max(self.peak, peak)


@dataclass(frozen=True)
class StepSummary:
    """One optimizer step as numbers. Per-modality losses are None where no sample had that modality."""

    loss: float
    video_loss: float | None
    audio_loss: float | None
    sigma_bins: dict[str, dict[str, float]]
    regularisation_loss: float | None = None


def summarise(values: Sequence[float], ranks: int, names: tuple[str, ...] = NAMES) -> StepSummary:
    """The summary of :meth:`StepMeter.tensor`'s numbers, added over ``ranks`` processes."""
    bins = len(SIGMA_EDGES) - 1
    modality: dict[str, float | None] = {}
    by_bin: dict[str, dict[str, float]] = {}
    offset = 1
    for name in names:
        total, count = values[offset : offset + 2]
        losses = values[offset + 2 : offset + 2 + bins]
        counts = values[offset + 2 + bins : offset + 2 + 2 * bins]
        modality[name] = total / count if count else None
        by_bin[name] = {
            f"{SIGMA_EDGES[i]:.2f}-{SIGMA_EDGES[i + 1]:.2f}": losses[i] / counts[i] for i in range(bins) if counts[i]
        }
        offset += 2 + 2 * bins
    return StepSummary(values[0] / ranks, modality.get("video"), modality.get("audio"), by_bin, modality.get("regularisation"))
