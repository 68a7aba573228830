"""The training job: build the parts, then the loop: restore, step, save, validate, stop."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .config import TrainConfig
from .errors import ConfigError, DataError, LtxTrainError, RunError, StopRequested
from .parts import Parts, build_parts, model_card, newest_weights, per_modality
from .runs.events import LoraEvent, SampleEvent, SnapshotEvent, StatisticsEvent, StepEvent
from .runs.live import LiveRun
from .runs.publish import Publishers, push_to_hub, statistics
from .training.earlier import beside
from .training.ema import finished_weights
from .training.metrics import RunMeter, RunningMean, StepMeter, StepSummary, summarise
from .training.optim import set_learning_rate
from .training.optim_state import optimizer_state, restore_optimizer
from .training.parallel import Parallel
from .training.randomness import key_of
from .training.snapshots import load_snapshot, newest_valid, retain, save_snapshot, snapshot_path
from .training.trainable import GradientNorms, clip_gradients

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


class Trainer:
    """The loop over optimizer steps. Everything it does at a step depends on the global step alone."""

    def __init__(self, config: TrainConfig, live: LiveRun, parallel: Parallel, parts: Parts) -> None:
        self.config, self.live, self.parallel, self.parts = config, live, parallel, parts
        self.parameters = parts.trainable.parameters()
        self.step = 0
        self.mean = RunningMean()
        self.bad_steps = 0
        self.seen: list[_Seen] = []
        self.saved_at = self.lora_at = self.sampled_at = self.held_out_at = -1
        self.held_out_loss: float | None = None
        self.publishers: Publishers | None = None
        self.meter, self.started = RunMeter(), time.monotonic()
        self.dropout = config.lora is not None and config.lora.dropout > 0
        self.epoch_size = max(1, parts.data.epoch_samples)

    # -- the story --
    def train(self) -> None:
        """Restore, then step until the end or a stop; a last snapshot and LoRA are always written."""
        total = self.config.optimization.steps
        self.restore()
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
            self.save("stop")
            self.statistics()
            raise
        except DataError:
            if self.parallel.world == 1:  # several ranks cannot save together when one of them has failed
                self.save("error")
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
        """What is due after a step: snapshots, LoRA files, validation, and what control files ask for."""
        interval = self.config.checkpoints.interval
        asked = self.parallel.broadcast_object({c: self.live.take(c) for c in ("save", "sample")})
        if (interval and self.step % interval == 0) or asked["save"] is not None:
            self.save("asked" if asked["save"] is not None else "interval")
        every = self.config.validation.interval
        if (every and self.step % every == 0) or asked["sample"] is not None:
            self.validate(asked=asked["sample"] is not None)

    def finish(self) -> None:
        """The last snapshot, LoRA and preview; then the publishers are told."""
        self.save("end")
        self.validate()
        self.statistics()
        if self.publishers is not None:
            self.publishers.close()
            if self.config.hub.push_to_hub:
                card = model_card(self.config, self.live, self.step)
                address = push_to_hub(self.live.dir, self.config.hub, card, self.lora_path(self.step))
                self.live.progress("push to the Hub", 1, 1, message=address)

    # -- one optimizer step --
    def optimizer_step(self) -> None:
        """Accumulate, average over ranks, check, clip, update; then report."""
        timing = _Timing(time.monotonic())
        meter = self.accumulate(timing)
        self.parts.trainable.average_gradients(self.parallel)
        norms = self.clip()
        summary = summarise(self.add_over_ranks(meter.tensor()), self.parallel.world)
        grad_norm = float(norms.total)
        bad = self.is_bad(summary, grad_norm)
        if bad:
            self.skip(summary, norms)
        else:
            self.bad_steps = 0
            self.update()
            nan = float("nan")
            self.parts.step.balance.update(nan if summary.video_loss is None else summary.video_loss, nan if summary.audio_loss is None else summary.audio_loss)
        self.report(summary, grad_norm, timing, skipped=bad)

    def accumulate(self, timing: _Timing) -> StepMeter:
        """Forward and backward of this rank's micro-batches, gradients summed to their mean."""
        meter = StepMeter()
        self.seen.clear()
        accumulation = self.parts.data.accumulation
        for micro in range(accumulation):
            waited = time.monotonic()
            item = self.parts.data.batch(self.step, micro)
            timing.data += time.monotonic() - waited
            if self.dropout:  # its masks hang on the place in the run, so that a resumed run draws the same
                torch.manual_seed(key_of(self.config.seed, self.step, item.slots[0], "dropout"))
            out = self.parts.step(item.batch, seed=self.config.seed, step=self.step, slot=item.slots)
            self.parts.scaler.scale(out.loss / accumulation).backward()
            self.parts.trainable.take_gradients()
            rows = per_modality(out)
            meter.add(out.loss, rows)
            self.seen.append(_Seen(item.batch.ids, rows))
            timing.tokens += out.tokens
            self.live.stop.check() if self.parallel.world == 1 else None
        return meter

    def clip(self) -> GradientNorms:
        """Scale the gradients down to max_grad_norm (0: never); the norms before, still on the device."""
        self.parts.scaler.unscale_(self.parts.optimizer)
        return clip_gradients(self.parts.trainable, self.config.optimization.max_grad_norm)

    def add_over_ranks(self, values: Tensor) -> Tensor:
        if self.parallel.world == 1:
            return values
        return torch.tensor(self.parallel.sum(values.tolist()), dtype=torch.float64)

    def update(self) -> None:
        """Move the weights by one step of the optimizer at the schedule's rate."""
        set_learning_rate(self.parts.optimizer, self.config.optimization.lr_at(self.step))
        self.parts.scaler.step(self.parts.optimizer)
        self.parts.scaler.update()
        self.parts.optimizer.zero_grad(set_to_none=True)
        self.parts.trainable.publish()
        self.step += 1
        if self.parts.ema is not None:
            self.parts.ema.update(self.step)

    def is_bad(self, summary: StepSummary, grad_norm: float) -> bool:
        """Whether the loss or a gradient is not finite. fp16's scaler expects overflows and handles them itself."""
        finite = torch.isfinite(torch.tensor([summary.loss, grad_norm])).tolist()
        return not finite[0] or (not finite[1] and not self.parts.scaler.is_enabled())

    def skip(self, summary: StepSummary, norms: GradientNorms) -> None:
        """A bad step: the optimizer does not move; the samples are named; damaged weights are rolled back; too many end the run."""
        self.parts.optimizer.zero_grad(set_to_none=True)
        self.parts.scaler.update()
        self.bad_steps += 1
        what = "loss" if not math.isfinite(summary.loss) else "gradient"
        named = self.suspects(what)
        shown = f"{named[0]} and {len(named) - 1} more" if len(named) > 1 else named[0]
        self.live.warn(
            "step.not_finite",
            f"Step {self.step + 1} is skipped: its {what} is not finite (sample {shown}).",
            f"loss {summary.loss}, gradient norm {float(norms.total)}{self.damaged(norms)}; samples: {'; '.join(named)}. {self.bad_steps} of {MAX_BAD_STEPS} such steps in a row.",
        )
        if not self.weights_finite():
            self.rollback()
        if self.bad_steps >= MAX_BAD_STEPS:
            raise LtxTrainError(
                "step.diverged",
                f"{MAX_BAD_STEPS} steps in a row had a non-finite {what}; the run ends at step {self.step}.",
                "The last good snapshot is kept. Check the named samples, lower the learning rate, or use bf16 instead of fp16.",
            )
        self.step += 1

    def suspects(self, what: str) -> list[str]:
        """The samples of the step whose loss is not finite, with their noise levels; where only a gradient is not, all of them."""
        broken = [name for seen in self.seen for name in seen.broken()] if what == "loss" else []
        gathered = list(dict.fromkeys(name for part in self.parallel.gather(broken) for name in part))
        everyone = [name for part in self.parallel.gather([n for seen in self.seen for n in seen.named()]) for name in part]
        return gathered or list(dict.fromkeys(everyone))

    def damaged(self, norms: GradientNorms) -> str:
        """The tensors whose gradient is not finite, in words; nothing where that is all of them."""
        names = norms.not_finite(list(self.parts.trainable.named_parameters()))
        return "" if len(names) in (0, len(self.parameters)) else f" ({len(names)} of {len(self.parameters)} tensors, first {names[0]})"

    def weights_finite(self) -> bool:
        """Whether every trained number of every rank is finite (one wait for the device)."""
        return not self.parallel.any(not bool(torch.stack([torch.isfinite(p.detach()).all() for p in self.parameters]).all()))

    def rollback(self) -> None:
        """Take the weights and optimizer of the newest snapshot; without one the run cannot go on."""
        path = newest_valid(self.live.dir.path)
        if path is None:
            raise LtxTrainError(
                "step.weights_not_finite", "The trained weights are no longer finite and there is no snapshot to go back to.",
                "Start again with a lower learning rate, and set checkpoints.interval so that there is one next time.",
            )  # fmt: skip
        snapshot = load_snapshot(path)
        self.load_tensors(snapshot)
        self.live.warn("step.rolled_back", f"The weights of step {snapshot.step} were taken back.", "The optimizer state too; the data go on.")

    def report(self, summary: StepSummary, grad_norm: float, timing: _Timing, skipped: bool = False) -> None:
        """One step event, and the trackers."""
        total, seconds = self.config.optimization.steps, time.monotonic() - timing.started
        finite = summary.loss == summary.loss
        average = self.mean.add(summary.loss) if finite else self.mean.mean
        bins = {f"{m} {name}": value for m, rows in summary.sigma_bins.items() for name, value in rows.items() if math.isfinite(value)}
        cuda = self.parallel.device.type == "cuda"
        peak = torch.cuda.max_memory_allocated(self.parallel.device) if cuda else 0
        self.meter.add(seconds=seconds, waiting=timing.data, tokens=timing.tokens, peak=peak, skipped=skipped)
        event = StepEvent(
            step=self.step,
            total=total,
            loss=summary.loss,
            loss_average=average,
            video_loss=summary.video_loss,
            audio_loss=summary.audio_loss,
            regularisation_loss=summary.regularisation_loss,
            validation_loss=self.held_out_loss,
            sigma_loss=bins or None,
            learning_rate=self.config.optimization.lr_at(max(0, self.step - 1)),
            grad_norm=grad_norm,
            seconds=seconds,
            data_wait=timing.data,
            eta=(total - self.step) * seconds,
            tokens=timing.tokens,
            epoch=self.step * self.parts.data.global_batch / self.epoch_size,
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
            step=self.step, steps=meter.steps, minutes=(time.monotonic() - self.started) / 60, steps_per_second=rate(meter.steps),
            samples_per_second=rate(samples), tokens_per_second=rate(sum(tokens)), seconds_waiting=meter.waiting, peak_memory=max(peak) or None,
            processes=world, global_batch=self.parts.data.global_batch, samples=samples, tokens=sum(tokens), skipped=meter.skipped,
        )  # fmt: skip
        self.live.emit(event)
        if self.publishers is not None:
            self.publishers.statistics(statistics(event))

    # -- files --
    def lora_path(self, step: int):
        prefix = "lora" if self.config.model.training_mode == "lora" else "model"
        return self.live.dir.checkpoints / f"{prefix}_weights_step_{step:05d}.safetensors"

    def save(self, reason: str) -> None:
        """A snapshot to resume from, and the LoRA as a file that has been opened again and checked.

        Weights that are not finite are never saved: those of the last good snapshot are taken back first.
        """
        if not self.weights_finite():
            self.rollback()
        final = reason == "end"
        if self.live.is_main or self.parts.trainable.sharded:
            if self.saved_at != self.step and self.config.checkpoints.save_training_state != "off":
                self.save_snapshot(reason)
            if self.step > 0 and (final or self.lora_at != self.step):
                self.save_weights(final)
        if self.live.is_main:
            retain(self.live.dir.path, self.config.checkpoints.keep_last_n, weights=True)
        self.saved_at = self.lora_at = self.step
        self.parallel.barrier()

    def save_snapshot(self, reason: str) -> None:
        tensors: dict[str, dict[str, Tensor]] = {"weights": self.parts.trainable.state_dict()}
        state: dict[str, Any] = {
            "step": self.step,
            "seed": self.config.seed,
            "identity": self.parts.identity,
            "loss_mean": [self.mean.total, self.mean.weight],
            "scaler": self.parts.scaler.state_dict(),
            "balance": self.parts.step.balance.state_dict(),
            "global_batch": self.parts.data.global_batch,
        }
        if self.config.checkpoints.save_training_state == "full":
            tensors["optimizer"], state["optimizer"] = optimizer_state(self.parts.optimizer)
        if self.parts.ema is not None:
            tensors["ema"] = self.parts.ema.state_dict()
        tensors, state = self.parts.trainable.whole(tensors, state)
        if not self.live.is_main:
            self.parts.trainable.take_part(tensors)
            return
        path = save_snapshot(snapshot_path(self.live.dir.path, self.step), tensors, state)
        size = sum(f.stat().st_size for f in path.iterdir())
        self.live.emit(SnapshotEvent(step=self.step, path=f"checkpoints/{path.name}", size=size, reason=reason))

    def save_weights(self, final: bool) -> None:
        """Write the result file; before the end one that changes nothing yet (warm-up from 0) is left out and said."""
        path = self.lora_path(self.step)
        try:
            with self.finished():
                keys = self.parts.trainable.write(path, self.step)
        except LtxTrainError as error:
            path.unlink(missing_ok=True)
            if final or error.code != "lora.zero":
                raise
            self.live.warn(error.code, error.message, "Training goes on; the snapshot is saved.")
            return
        if not self.live.is_main:
            return
        self.live.emit(LoraEvent(step=self.step, path=f"checkpoints/{path.name}", size=path.stat().st_size, keys=keys, final=final))

    @contextmanager
    def finished(self) -> Iterator[None]:
        """Inside, the network computes with what is saved as the result (the EMA where there is one)."""
        with finished_weights(self.parameters, self.parts.optimizer, self.parts.ema):
            self.parts.trainable.publish()
            yield
        self.parts.trainable.publish()

    def restore(self) -> None:
        """Go on from the newest snapshot of this run that verifies; a damaged one is told and passed over."""
        damaged = lambda path, why: self.live.warn("snapshot.damaged", f"{path.name} is damaged and passed over: {why}")  # noqa: E731
        path = newest_valid(self.live.dir.path, damaged)
        if path is None:
            self.take_up()
            return
        snapshot = load_snapshot(path)
        if snapshot.state["identity"] != self.parts.identity:
            changed = [k for k, v in self.parts.identity.items() if snapshot.state["identity"].get(k) != v]
            raise RunError(
                "run.identity",
                f"The snapshot {path.name} belongs to another training: {', '.join(changed)} changed.",
                "Use another run name (or output_dir), or put the old value back. Nothing was overwritten.",
            )
        self.adopt(snapshot)
        self.saved_at = self.step
        if self.lora_path(self.step).exists():
            self.lora_at = self.step

    def adopt(self, snapshot) -> None:
        """Be where the snapshot was."""
        self.load_tensors(snapshot)
        self.step = snapshot.step
        self.mean.total, self.mean.weight = snapshot.state["loss_mean"]
        if self.parts.scaler.is_enabled():
            self.parts.scaler.load_state_dict(snapshot.state["scaler"])

    def take_up(self) -> None:
        """A new run from ``model.load_checkpoint`` goes on at that file's step where its state lies beside it (no_resume: never).

        Our own state is taken whole; of the official trainer's the step, so that the schedule goes on.
        """
        source, total = self.config.model.load_checkpoint, self.config.optimization.steps
        if not source or self.config.checkpoints.no_resume:
            return
        weights = newest_weights(Path(source).expanduser())
        earlier = beside(weights)
        if earlier is None:
            return
        optimization, lora = self.config.optimization, self.config.lora
        settings = {"optimizer_type": optimization.optimizer_type, "scheduler_type": optimization.scheduler_type, "training_mode": self.config.model.training_mode}
        changed = earlier.differs(self.parts.identity, {**settings, "lora_rank": lora.rank if lora else None})
        if changed:
            self.live.warn("resume.weights_only", f"Of {weights.name} the weights alone are taken: {', '.join(changed)} changed.", "The run starts at step 0.")
            return
        if earlier.step >= total:
            raise ConfigError(
                "optimization.steps", f"optimization.steps is {total}, and {weights.name} is at step {earlier.step} already."[:118],
                "Raise optimization.steps above it, or set checkpoints.no_resume: true to start again from its weights.",
            )  # fmt: skip
        if earlier.snapshot is not None:
            self.adopt(earlier.snapshot)
        self.step = earlier.step
        self.live.warn("resume.taken_up", f"Going on at step {self.step} of {weights.name}.", "checkpoints.no_resume: true would take its weights alone.")

    def load_tensors(self, snapshot) -> None:
        trainable = self.parts.trainable
        trainable.load_state_dict(snapshot.read("weights"))
        if "optimizer" in snapshot.groups:
            restore_optimizer(self.parts.optimizer, *trainable.own_part(snapshot.read("optimizer"), snapshot.state["optimizer"]))
        self.parts.step.balance.load_state_dict(snapshot.state["balance"])
        if self.parts.ema is not None and "ema" in snapshot.groups:
            self.parts.ema.load_state_dict(trainable.own_part(snapshot.read("ema"), {})[0])

    # -- previews --
    def hold_out(self) -> None:
        """Measure the held-out loss, once a step."""
        if self.parts.held_out is not None and self.held_out_at != self.step:
            with self.finished():
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
        with self.finished():
            made = validator.run(self.step, self.live, self.parallel, self.parts.optimizer, together=self.parts.trainable.sharded)
        if self.publishers is not None:
            for index, path in enumerate(made):
                self.publishers.sample(SampleEvent(step=self.step, path=path.name, index=index), path)
        self.parts.step.transformer.train()
        self.sampled_at = self.step
        self.parallel.barrier()
