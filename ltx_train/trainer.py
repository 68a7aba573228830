"""The training job: build the parts, then the loop: restore, step, save, validate, stop."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass

import torch
from torch import Tensor

from .config import TrainConfig
from .errors import DataError, LtxTrainError, StopRequested
from .parking import Parking
from .parts import FedBatch, Parts, build_parts, model_card, per_modality
from .runs.events import SampleEvent, StatisticsEvent, StepEvent
from .runs.live import LiveRun
from .runs.publish import Publishers, push_to_hub, statistics
from .saves import Saves
from .training.metrics import RunMeter, RunningMean, StepMeter, StepSummary, summarise
from .training.optim import can_stay, set_learning_rate, step_unless
from .training.parallel import Parallel
from .training.randomness import key_of
from .training.step import StepOutput
from .training.trainable import GradientNorms, clip_gradients
from .transfer import Reading

AHEAD = ("cuda",)
"""Kinds of devices that compute while the host goes on."""
MAX_BAD_STEPS = 5
"""So many steps with a non-finite loss or gradient in a row end the run, with the last good snapshot kept."""


def run(config: TrainConfig, live: LiveRun) -> None:
    """Carry out a training job as one rank of the run's processes."""
    parallel = Parallel.start(config.distributed, device=config.acceleration.device)
    try:
        for line in parallel.preflight(live.dir.path):
            live.warn("distributed.clocks", line)
        parts = build_parts(config, live, parallel)
        try:
            Trainer(config, live, parallel, parts).train()
        finally:
            parts.data.close()
    finally:
        parallel.close()


@dataclass
class _Timing:
    """The step in hand: its seconds, the part of them spent waiting for data, its tokens on this rank."""

    started: float
    data: float = 0.0
    tokens: int = 0


@dataclass(frozen=True)
class _Seen:
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
class _Made:
    """A step whose numbers are on their way to the host: the global step it ends at, and what a report or a warning needs."""

    step: int
    reading: Reading
    norms: GradientNorms
    seen: list[_Seen]
    timing: _Timing


class Trainer:
    """The loop over optimizer steps. Everything it does at a step depends on the global step alone."""

    def __init__(self, config: TrainConfig, live: LiveRun, parallel: Parallel, parts: Parts) -> None:
        self.config, self.live, self.parallel, self.parts = config, live, parallel, parts
        self.parameters = parts.trainable.parameters()
        self.step = 0
        self.mean = RunningMean()
        self.bad_steps = 0
        self.seen: list[_Seen] = []
        self.ahead = self.may_run_ahead()
        self.made: _Made | None = None
        self.settled = 0.0
        self.saves = Saves(config, live, parallel, parts)
        self.parking = Parking(live, parallel, parts, config.checkpoints.park_minutes)
        self.sampled_at = self.held_out_at = -1
        self.held_out_loss: float | None = None
        self.publishers: Publishers | None = None
        self.meter, self.started = RunMeter(), time.monotonic()
        self.dropout = config.lora is not None and config.lora.dropout > 0
        self.epoch_size = max(1, parts.data.epoch_samples)

    def may_run_ahead(self) -> bool:
        """Whether nothing of a step hangs on the numbers of the one before but what the device decides itself."""
        waits = self.parts.ema is not None or self.config.flow_matching.balance != "none" or self.parts.scaler.is_enabled() or self.parts.trainable.sharded
        return self.parallel.device.type in AHEAD and can_stay(self.parts.optimizer) and not waits

    # -- the story --
    def train(self) -> None:
        """Restore, then step until the end or a stop; a last snapshot and LoRA are always written."""
        total = self.config.optimization.steps
        self.step = self.saves.restore(self.mean)
        self.parking.begin(self.step, total)
        if self.parts.held_out is not None:
            self.parts.held_out.resume(self.live.dir.events().events, self.step)
        if self.live.is_main:
            settings = self.config.model_dump(mode="json")
            self.publishers = Publishers.open(self.live.dir, logging=self.config.logging, wandb=self.config.wandb, config=settings, start_step=self.step)
        self.live.set_state("running", step=self.step, total=total)
        try:
            with self.live.phase("train", f"{self.step} of {total} steps done" if self.step else ""):
                self.parts.step.transformer.train()  # dropout takes part, but not in previews
                if self.step == 0:
                    self.validate()
                while self.step < total:
                    self.check_stop()
                    self.optimizer_step()
                    if self.step < total:
                        self.boundary()
        except StopRequested:
            self.catch_up()
            if not self.parking.left:  # there all is saved, and the weights are away
                self.saves.save(self.step, self.mean, "stop")
            self.statistics()
            raise
        except DataError:
            self.catch_up()
            if self.parallel.world == 1:  # several ranks cannot save together when one of them has failed
                self.saves.save(self.step, self.mean, "error")
            raise
        finally:
            if self.publishers is not None and self.step < total:
                self.publishers.close()
        self.finish()

    def check_stop(self) -> None:
        """Raise StopRequested on every rank when any was asked."""
        if self.parallel.any(self.live.stop.requested):
            self.live.stop.request("asked on another rank")
            self.live.stop.check()

    def boundary(self) -> None:
        """What is due after a step: snapshots, LoRA files, validation, what control files ask for, the pause after a part."""
        interval = self.config.checkpoints.interval
        asked = self.parallel.broadcast_object({c: self.live.take(c) for c in ("save", "sample")})
        if any(n and self.step % n == 0 for n in (interval, self.config.validation.interval)) or any(a is not None for a in asked.values()) or self.parking.due(self.step):
            self.catch_up()
        if (interval and self.step % interval == 0) or asked["save"] is not None:
            self.saves.save(self.step, self.mean, "asked" if asked["save"] is not None else "interval")
        every = self.config.validation.interval
        if (every and self.step % every == 0) or asked["sample"] is not None:
            self.validate(asked=asked["sample"] is not None)
        if self.parking.due(self.step):
            self.saves.save(self.step, self.mean, "part")
            self.parking.wait(self.step, self.config.optimization.steps)

    def finish(self) -> None:
        """The last snapshot, LoRA and preview; then the publishers are told."""
        self.catch_up()
        self.saves.save(self.step, self.mean, "end")
        self.validate()
        self.statistics()
        if self.publishers is not None:
            self.publishers.close()
            if self.config.hub.push_to_hub:
                card = model_card(self.config, self.live, self.step)
                address = push_to_hub(self.live.dir, self.config.hub, card, self.saves.lora_path(self.step))
                self.live.progress("push to the Hub", 1, 1, message=address)

    # -- one optimizer step --
    def optimizer_step(self) -> None:
        """Accumulate, average over ranks, check, clip, update; then report.

        Ahead, nothing waits for the device: there the optimizer itself stays where it is after numbers that are not
        finite, and the host reads them a step later. Else they are read before it moves.
        """
        timing = _Timing(time.monotonic())
        meter = self.accumulate(timing)
        self.parts.trainable.average_gradients(self.parallel)
        norms = self.clip()
        sums = self.parallel.added(meter.tensor())
        numbers = torch.cat([sums, norms.total.to(sums).view(1)])
        made = _Made(self.step + 1, Reading(numbers), norms, list(self.seen), timing)
        if not self.ahead:
            self.settle(made)
            return
        fine = torch.isfinite(numbers[0]) & torch.isfinite(numbers[-1])
        self.update(bad=(~fine).float())
        self.catch_up()
        self.made = made

    def catch_up(self) -> None:
        """Read and report the step that the host is ahead of, if it is; before anything is saved or shown."""
        made, self.made = self.made, None
        if made is not None:
            self.settle(made)

    def settle(self, made: _Made) -> None:
        """What the step's numbers mean: an update (unless it is made already) or a skipped step; its report."""
        *sums, grad_norm = made.reading.get()
        summary = summarise(sums, self.parallel.world)
        bad = self.is_bad(summary, grad_norm)
        if bad:
            self.skip(made, summary, grad_norm)
        else:
            self.bad_steps = 0
            if not self.ahead:
                self.update()
            if self.config.flow_matching.balance != "none":
                self.parts.step.balance.update(summary.video_loss, summary.audio_loss)
        self.report(made, summary, grad_norm, skipped=bad)

    def accumulate(self, timing: _Timing) -> StepMeter:
        """Forward and backward of this rank's micro-batches, gradients summed to their mean."""
        meter = StepMeter()
        self.seen.clear()
        accumulation, together = self.parts.data.accumulation, self.parts.together
        for first in range(0, accumulation, together):
            waited = time.monotonic()
            items = [self.parts.data.batch(self.step, micro) for micro in range(first, min(first + together, accumulation))]
            timing.data += time.monotonic() - waited
            outputs = self.forward(items)
            self.parts.scaler.scale(sum(out.loss for out in outputs) / accumulation).backward()
            self.parts.trainable.take_gradients()
            for item, out in zip(items, outputs):
                rows = per_modality(out)
                meter.add(out.loss, rows)
                self.seen.append(_Seen(item.batch.ids, rows))
                timing.tokens += out.tokens
            self.live.stop.check() if self.parallel.world == 1 else None
        return meter

    def forward(self, items: list[FedBatch]) -> list[StepOutput]:
        """The losses of a micro-batch, or of several that go through each block together."""
        seed, step = self.config.seed, self.step
        if len(items) > 1:
            return self.parts.step.together([item.batch for item in items], seed=seed, step=step, slots=[item.slots for item in items])
        if self.dropout:  # its masks hang on the place in the run, so that a resumed run draws the same
            torch.manual_seed(key_of(seed, step, items[0].slots[0], "dropout"))
        return [self.parts.step(items[0].batch, seed=seed, step=step, slot=items[0].slots)]

    def clip(self) -> GradientNorms:
        """Scale the gradients down to max_grad_norm (0: never); the norms before, still on the device."""
        self.parts.scaler.unscale_(self.parts.optimizer)
        return clip_gradients(self.parts.trainable, self.config.optimization.max_grad_norm)

    def update(self, bad: Tensor | None = None) -> None:
        """Move the weights by one step of the optimizer at the schedule's rate; bad: see :func:`step_unless`."""
        set_learning_rate(self.parts.optimizer, self.config.optimization.lr_at(self.step))
        if bad is not None:
            step_unless(self.parts.optimizer, bad)
        else:
            self.parts.scaler.step(self.parts.optimizer)
            self.parts.scaler.update()
        self.parts.optimizer.zero_grad(set_to_none=True)
        self.parts.trainable.publish()
        self.step += 1
        if self.parts.ema is not None:
            self.parts.ema.update(self.step)

    def is_bad(self, summary: StepSummary, grad_norm: float) -> bool:
        """Whether the loss or a gradient is not finite. fp16's scaler expects overflows and handles them itself."""
        return not math.isfinite(summary.loss) or (not math.isfinite(grad_norm) and not self.parts.scaler.is_enabled())

    def skip(self, made: _Made, summary: StepSummary, grad_norm: float) -> None:
        """A bad step: the optimizer does not move; the samples are named; damaged weights are rolled back; too many end the run."""
        self.parts.optimizer.zero_grad(set_to_none=True)
        self.parts.scaler.update()
        self.bad_steps += 1
        what = "loss" if not math.isfinite(summary.loss) else "gradient"
        named = self.suspects(what, made.seen)
        shown = f"{named[0]} and {len(named) - 1} more" if len(named) > 1 else named[0]
        self.live.warn(
            "step.not_finite",
            f"Step {made.step} is skipped: its {what} is not finite (sample {shown}).",
            f"loss {summary.loss}, gradient norm {grad_norm}{self.damaged(made.norms)}; samples: {'; '.join(named)}. {self.bad_steps} of {MAX_BAD_STEPS} such steps in a row.",
        )
        if not self.saves.weights_finite():
            self.saves.rollback()
        if self.bad_steps >= MAX_BAD_STEPS:
            raise LtxTrainError(
                "step.diverged",
                f"{MAX_BAD_STEPS} steps in a row had a non-finite {what}; the run ends at step {made.step - 1}.",
                "The last good snapshot is kept. Check the named samples, lower the learning rate, or use bf16 instead of fp16.",
            )
        if not self.ahead:
            self.step += 1

    def suspects(self, what: str, batches: list[_Seen]) -> list[str]:
        """The samples of the step whose loss is not finite, with their noise levels; where only a gradient is not, all of them."""
        broken = [name for seen in batches for name in seen.broken()] if what == "loss" else []
        gathered = list(dict.fromkeys(name for part in self.parallel.gather(broken) for name in part))
        everyone = [name for part in self.parallel.gather([n for seen in batches for n in seen.named()]) for name in part]
        return gathered or list(dict.fromkeys(everyone))

    def damaged(self, norms: GradientNorms) -> str:
        """The tensors whose gradient is not finite, in words; nothing where that is all of them."""
        names = norms.not_finite(list(self.parts.trainable.named_parameters()))
        return "" if len(names) in (0, len(self.parameters)) else f" ({len(names)} of {len(self.parameters)} tensors, first {names[0]})"

    def report(self, made: _Made, summary: StepSummary, grad_norm: float, skipped: bool = False) -> None:
        """One step event, and the trackers. A step that the host was ahead of took from the one before's end to its own."""
        timing, now = made.timing, time.monotonic()
        total, seconds = self.config.optimization.steps, now - max(timing.started, self.settled)
        self.settled = now
        finite = summary.loss == summary.loss
        average = self.mean.add(summary.loss) if finite else self.mean.mean
        bins = {f"{m} {name}": value for m, rows in summary.sigma_bins.items() for name, value in rows.items() if math.isfinite(value)}
        cuda = self.parallel.device.type == "cuda"
        peak = torch.cuda.max_memory_allocated(self.parallel.device) if cuda else 0
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
            peak_memory=peak if cuda else None,
        )
        if cuda:
            torch.cuda.reset_peak_memory_stats(self.parallel.device)
        self.held_out_loss = None  # told once, with the step after it
        self.live.emit(event)
        if self.publishers is not None:
            self.publishers.step(event)
            for failure in self.publishers.take_failures():
                self.live.warn("logging.failed", failure)

    def statistics(self) -> None:
        """What the steps of this start came to: an event, and the trackers. Every rank takes part."""
        meter, world = self.meter, self.parallel.world
        peak, tokens = (list(part) for part in zip(*self.parallel.gather((meter.peak, meter.tokens))))
        samples = meter.steps * self.parts.data.global_batch
        rate = lambda count: count / meter.seconds if meter.seconds else None  # noqa: E731
        event = StatisticsEvent(
            step=self.step, steps=meter.steps, minutes=(time.monotonic() - self.started - self.parking.waited) / 60, steps_per_second=rate(meter.steps),
            samples_per_second=rate(samples), tokens_per_second=rate(sum(tokens)), seconds_waiting=meter.waiting, peak_memory=max(peak) or None,
            processes=world, global_batch=self.parts.data.global_batch, samples=samples, tokens=sum(tokens), skipped=meter.skipped,
        )  # fmt: skip
        self.live.emit(event)
        if self.publishers is not None:
            self.publishers.statistics(statistics(event))

    # -- previews --
    def hold_out(self) -> None:
        """Measure the held-out loss, once a step."""
        if self.parts.held_out is not None and self.held_out_at != self.step:
            with self.saves.finished():
                measured = self.parts.held_out.run(self.step, self.live, None if self.parts.trainable.sharded else self.parallel)
            self.held_out_at = self.step
            self.held_out_loss = None if measured is None else measured.total

    def validate(self, asked: bool = False) -> None:
        """Measure the held-out loss and sample the validation prompts; a failure is a warning and leaves everything as it was."""
        self.hold_out()
        validator = self.parts.validator
        if validator is None or (self.sampled_at == self.step and not asked):
            return
        if self.step == 0 and self.config.validation.skip_initial_validation:
            return
        self.parts.step.transformer.eval()
        with self.saves.finished():
            made = validator.run(self.step, self.live, self.parallel, self.parts.optimizer, together=self.parts.trainable.sharded)
        if self.publishers is not None:
            for index, path in enumerate(made):
                self.publishers.sample(SampleEvent(step=self.step, path=path.name, index=index), path)
        self.parts.step.transformer.train()
        self.sampled_at = self.step
        self.parallel.barrier()
