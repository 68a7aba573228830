"""The training job: build the parts, then the loop: restore, step, save, validate, stop."""

from __future__ import annotations

import math
import time

import torch
from torch import Tensor

from .config import TrainConfig
from .errors import DataError, LtxTrainError, StopRequested
from .parking import Parking
from .parts import FedBatch, Parts, build_parts, model_card
from .runs.events import SampleEvent
from .runs.live import LiveRun
from .runs.publish import push_to_hub
from .saves import Saves
from .step_report import MadeStep, SeenBatch, StepReports, StepTiming
from .training.metrics import StepMeter, StepSummary, summarise
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
DIVERGED_HINT = "Check the named samples, lower the learning rate, or use bf16 instead of fp16."


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


class Trainer:
    """The loop over optimizer steps. Everything it does at a step depends on the global step alone."""

    def __init__(self, config: TrainConfig, live: LiveRun, parallel: Parallel, parts: Parts) -> None:
        self.config, self.live, self.parallel, self.parts = config, live, parallel, parts
        self.parameters = parts.trainable.parameters()
        self.step = 0
        self.bad_steps = 0
        self.seen: list[SeenBatch] = []
        self.ahead = self.may_run_ahead()
        self.made: MadeStep | None = None
        self.saves = Saves(config, live, parallel, parts)
        self.parking = Parking(live, parallel, parts, config.checkpoints.park_minutes)
        self.sampled_at = self.held_out_at = -1
        self.reports = StepReports(config, live, parallel, parts)
        self.dropout = config.lora is not None and config.lora.dropout > 0

    def may_run_ahead(self) -> bool:
        """Whether nothing of a step hangs on the numbers of the one before but what the device decides itself."""
        waits = self.parts.ema is not None or self.config.flow_matching.balance != "none" or self.parts.scaler.is_enabled() or self.parts.trainable.sharded
        return self.parallel.device.type in AHEAD and can_stay(self.parts.optimizer) and not waits

    # -- the story --
    def train(self) -> None:
        """Restore, then step until the end or a stop; a last snapshot and LoRA are always written."""
        total = self.config.optimization.steps
        self.step = self.saves.restore(self.reports.mean)
        self.parking.begin(self.step, total)
        if self.parts.held_out is not None:
            self.parts.held_out.resume(self.live.dir.events().events, self.step)
        self.reports.open(self.step)
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
                self.saves.save(self.step, self.reports.mean, "stop")
            self.reports.statistics(self.step, self.parking.waited)
            raise
        except DataError:
            self.catch_up()
            if self.parallel.world == 1:  # several ranks cannot save together when one of them has failed
                self.saves.save(self.step, self.reports.mean, "error")
            raise
        finally:
            if self.step < total:
                self.reports.close()
        try:
            self.finish()
        finally:
            self.reports.close()

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
            self.saves.save(self.step, self.reports.mean, "asked" if asked["save"] is not None else "interval")
        every = self.config.validation.interval
        if (every and self.step % every == 0) or asked["sample"] is not None:
            self.validate(asked=asked["sample"] is not None)
        if self.parking.due(self.step):
            self.saves.save(self.step, self.reports.mean, "part")
            self.parking.wait(self.step, self.config.optimization.steps)

    def judge_end(self) -> None:
        """Say that the last steps were skipped; where every step of the run was, there is nothing to save and it has failed."""
        bad, total = self.bad_steps, self.step
        if bad and bad == total:
            raise LtxTrainError("step.diverged", f"All {total} steps had a non-finite loss or gradient; nothing was learned.", DIVERGED_HINT)
        if bad:
            self.live.warn("step.last_skipped", f"The last {bad} of {total} steps were skipped: the weights saved are those from before them.", DIVERGED_HINT)

    def finish(self) -> None:
        """The last snapshot, LoRA and preview; then the publishers are told."""
        self.catch_up()
        self.judge_end()
        self.saves.save(self.step, self.reports.mean, "end")
        self.validate()
        self.reports.statistics(self.step, self.parking.waited)
        self.reports.close()
        if self.live.is_main and self.config.hub.push_to_hub:
            card = model_card(self.config, self.live, self.step)
            address = push_to_hub(self.live.dir, self.config.hub, card, self.saves.lora_path(self.step))
            self.live.progress("push to the Hub", 1, 1, message=address)

    # -- one optimizer step --
    def optimizer_step(self) -> None:
        """Accumulate, average over ranks, check, clip, update; then report.

        Ahead, nothing waits for the device: there the optimizer itself stays where it is after numbers that are not
        finite, and the host reads them a step later. Else they are read before it moves.
        """
        timing = StepTiming.start(self.parallel.device, self.ahead)
        meter = self.accumulate(timing)
        self.parts.trainable.average_gradients(self.parallel)
        norms = self.clip()
        sums = self.parallel.added(meter.tensor())
        numbers = torch.cat([sums, norms.total.to(sums).view(1)])
        made = MadeStep(self.step + 1, Reading(numbers), norms, list(self.seen), timing)
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

    def settle(self, made: MadeStep) -> None:
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
        self.reports.step(made, summary, grad_norm, skipped=bad)

    def accumulate(self, timing: StepTiming) -> StepMeter:
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
                rows = out.per_modality()
                meter.add(out.loss, rows)
                self.seen.append(SeenBatch(item.batch.ids, rows))
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

    def skip(self, made: MadeStep, summary: StepSummary, grad_norm: float) -> None:
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
                f"The last good snapshot is kept. {DIVERGED_HINT}",
            )
        if not self.ahead:
            self.step += 1

    def suspects(self, what: str, batches: list[SeenBatch]) -> list[str]:
        """The samples of the step whose loss is not finite, with their noise levels; where only a gradient is not, all of them."""
        broken = [name for seen in batches for name in seen.broken()] if what == "loss" else []
        gathered = list(dict.fromkeys(name for part in self.parallel.gather(broken) for name in part))
        everyone = [name for part in self.parallel.gather([n for seen in batches for n in seen.named()]) for name in part]
        return gathered or list(dict.fromkeys(everyone))

    def damaged(self, norms: GradientNorms) -> str:
        """The tensors whose gradient is not finite, in words; nothing where that is all of them."""
        names = norms.not_finite(list(self.parts.trainable.named_parameters()))
        return "" if len(names) in (0, len(self.parameters)) else f" ({len(names)} of {len(self.parameters)} tensors, first {names[0]})"

    # -- previews --
    def hold_out(self) -> None:
        """Measure the held-out loss, once a step."""
        if self.parts.held_out is not None and self.held_out_at != self.step:
            with self.saves.finished():
                measured = self.parts.held_out.run(self.step, self.live, None if self.parts.trainable.sharded else self.parallel)
            self.held_out_at = self.step
            self.reports.held_out_loss = None if measured is None else measured.total

    def validate(self, asked: bool = False) -> None:
        """Measure the held-out loss and sample the validation prompts; a failure is a warning and leaves everything as it was."""
        self.hold_out()
        validator = self.parts.validator
        if validator is None and asked:
            self.live.warn("sample.none", "A sample was asked for, but this run has none prepared.", "Give validation.samples (or prompts) and an interval before it starts.")
        if validator is None or (self.sampled_at == self.step and not asked):
            return
        if self.step == 0 and self.config.validation.skip_initial_validation:
            return
        self.parts.step.transformer.eval()
        with self.saves.finished():
            made = validator.run(self.step, self.live, self.parallel, self.parts.optimizer, together=self.parts.trainable.sharded)
        if self.reports.publishers is not None:
            for index, path in enumerate(made):
                self.reports.publishers.sample(SampleEvent(step=self.step, path=path.name, index=index), path)
        self.parts.step.transformer.train()
        self.sampled_at = self.step
        self.parallel.barrier()
