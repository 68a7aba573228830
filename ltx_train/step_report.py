"""What the loop tells of its steps: the record of a step until its numbers are read, its event, and a start's statistics."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field

import torch
from torch import Tensor

from .config import TrainConfig
from .parts import Parts
from .runs.events import StatisticsEvent, StepEvent
from .runs.live import LiveRun
from .runs.publish import Publishers, statistics
from .training.metrics import RunMeter, RunningMean, StepSummary
from .training.parallel import Parallel
from .training.trainable import GradientNorms
from .transfer import Reading, mark


@dataclass
class StepTiming:
    """The step in hand: when it began, its seconds spent waiting for data, its tokens on this rank.

    begun: a mark among the device's work, where the host goes on before that work is done. Then a step takes from this mark to its numbers.
    """

    started: float = field(default_factory=time.monotonic)
    begun: torch.cuda.Event | None = None
    data: float = 0.0
    tokens: int = 0

    @classmethod
    def start(cls, device: torch.device, ahead: bool) -> StepTiming:
        """A step that begins now; ahead: the host does not wait for its end."""
        return cls(begun=mark(device) if ahead and device.type == "cuda" else None)

    def seconds(self, reading: Reading) -> float:
        """What the step took, its numbers read."""
        return reading.seconds_since(self.begun) if self.begun is not None else time.monotonic() - self.started


@dataclass(frozen=True)
class SeenBatch:
    """The samples of a micro-batch with their losses and noise levels, to name the one that broke a step."""

    ids: tuple[str, ...]
    rows: dict[str, tuple[Tensor, Tensor, Tensor]]

    def named(self) -> list[str]:
        """Every sample with its noise levels."""
        levels = lambda n: ", ".join(f"{m} sigma {float(sigma[n]):.3f}" for m, (_, sigma, _) in self.rows.items() if m != "regularisation")  # noqa: E731
        return [f"{name} ({levels(index)})" for index, name in enumerate(self.ids)]

    def broken(self) -> list[str]:
        """Samples whose loss is not finite, each with its noise level."""
        found = []
        for index, name in enumerate(self.ids):
            bad = [f"{m} sigma {float(sigma[index]):.3f}" for m, (loss, sigma, _) in self.rows.items() if not bool(torch.isfinite(loss[index]))]
            found += [f"{name} ({', '.join(bad)})"] if bad else []
        return found


@dataclass(frozen=True)
class MadeStep:
    """A step whose numbers are on their way to the host: the global step it ends at, and what a report or a warning needs."""

    step: int
    reading: Reading
    norms: GradientNorms
    seen: list[SeenBatch]
    timing: StepTiming


class StepReports:
    """Tells each step to the run's events and trackers, and sums this start up."""

    def __init__(self, config: TrainConfig, live: LiveRun, parallel: Parallel, parts: Parts) -> None:
        self.config, self.live, self.parallel, self.parts = config, live, parallel, parts
        self.mean, self.meter = RunningMean(), RunMeter()
        self.held_out_loss: float | None = None
        self.publishers: Publishers | None = None
        self.started = time.monotonic()
        self.epoch_size = max(1, parts.data.epoch_samples)

    def open(self, start_step: int) -> None:
        """Open the trackers, on the main rank."""
        if self.live.is_main:
            settings = self.config.model_dump(mode="json")
            self.publishers = Publishers.open(self.live.dir, logging=self.config.logging, wandb=self.config.wandb, config=settings, start_step=start_step)

    def close(self) -> None:
        """Close the trackers; again does nothing."""
        publishers, self.publishers = self.publishers, None
        if publishers is not None:
            publishers.close()

    def step(self, made: MadeStep, summary: StepSummary, grad_norm: float, skipped: bool = False) -> None:
        """One step event, and the trackers."""
        timing, device = made.timing, self.parallel.device
        total, seconds = self.config.optimization.steps, timing.seconds(made.reading)
        average = self.mean.mean if math.isnan(summary.loss) else self.mean.add(summary.loss)
        bins = {f"{m} {name}": value for m, rows in summary.sigma_bins.items() for name, value in rows.items() if math.isfinite(value)}
        peak = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0
        self.meter.add(seconds=seconds, waiting=timing.data, tokens=timing.tokens, peak=peak, skipped=skipped)
        event = StepEvent(
            step=made.step,
            total=total,
            loss=summary.loss,
            loss_average=average,
            video_loss=summary.video_loss,
            audio_loss=summary.audio_loss,
            regularisation_loss=summary.regularisation_loss,
            validation_loss=self.held_out_loss,
            sigma_loss=bins or None,
            learning_rate=self.config.optimization.lr_at(made.step - 1),
            grad_norm=grad_norm,
            seconds=seconds,
            data_wait=timing.data,
            eta=(total - made.step) * seconds,
            tokens=timing.tokens,
            epoch=made.step * self.parts.data.global_batch / self.epoch_size,
            peak_memory=peak if device.type == "cuda" else None,
        )
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        self.held_out_loss = None  # told once, with the step after it
        self.live.emit(event)
        if self.publishers is not None:
            self.publishers.step(event)
            for failure in self.publishers.take_failures():
                self.live.warn("logging.failed", failure)

    def statistics(self, step: int, parked: float) -> None:
        """What the steps of this start came to: an event, and the trackers; parked: seconds it rested. Every rank takes part."""
        meter, world = self.meter, self.parallel.world
        peak, tokens = (list(part) for part in zip(*self.parallel.gather((meter.peak, meter.tokens))))
        samples = meter.steps * self.parts.data.global_batch
        rate = lambda count: count / meter.seconds if meter.seconds else None  # noqa: E731
        event = StatisticsEvent(
            step=step, steps=meter.steps, minutes=(time.monotonic() - self.started - parked) / 60, steps_per_second=rate(meter.steps),
            samples_per_second=rate(samples), tokens_per_second=rate(sum(tokens)), seconds_waiting=meter.waiting, peak_memory=max(peak) or None,
            processes=world, global_batch=self.parts.data.global_batch, samples=samples, tokens=sum(tokens), skipped=meter.skipped,
        )  # fmt: skip
        self.live.emit(event)
        if self.publishers is not None:
            self.publishers.statistics(statistics(event))
