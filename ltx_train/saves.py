"""What a training leaves on disk and goes on from: snapshots and result files written, restored, and taken back."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .config import TrainConfig
from .errors import LtxTrainError, RunError
from .parts import Parts
from .runs.events import LoraEvent, SnapshotEvent
from .runs.live import LiveRun
from .trained_weights import newest_weights
from .training.earlier import beside
from .training.ema import finished_weights
from .training.metrics import RunningMean
from .training.optim_state import optimizer_state, restore_optimizer
from .training.parallel import Parallel
from .training.snapshots import load_snapshot, newest_valid, retain, save_snapshot, snapshot_path

if TYPE_CHECKING:
    from .training.snapshots import Snapshot


class Saves:
    """Saves a training as one rank of it, and restores it. Every rank takes part; rank 0 writes."""

    def __init__(self, config: TrainConfig, live: LiveRun, parallel: Parallel, parts: Parts) -> None:
        self.config, self.live, self.parallel, self.parts = config, live, parallel, parts
        self.parameters = parts.trainable.parameters()
        self.saved_at = self.lora_at = -1

    # -- writing --
    def lora_path(self, step: int) -> Path:
        """Where the result file of a step lies."""
        prefix = "lora" if self.config.model.training_mode == "lora" else "model"
        return self.live.dir.checkpoints / f"{prefix}_weights_step_{step:05d}.safetensors"

    def save(self, step: int, mean: RunningMean, reason: str) -> None:
        """A snapshot to resume from, and the LoRA as a file that has been opened again and checked.

        Weights that are not finite are never saved: those of the last good snapshot are taken back first.
        """
        if not self.weights_finite():
            self.rollback()
        final = reason == "end"
        takes_part = self.live.is_main or self.parts.trainable.sharded
        if self.saved_at != step and self.config.checkpoints.save_training_state != "off":
            with self.together():
                self.save_snapshot(step, mean, reason) if takes_part else None
        with self.together():
            if takes_part and step > 0 and (final or self.lora_at != step):
                self.save_weights(step, final)
            if self.live.is_main:
                retain(self.live.dir.path, self.config.checkpoints.keep_last_n, weights=True)
        self.saved_at = self.lora_at = step

    @contextmanager
    def together(self) -> Iterator[None]:
        """All ranks leave it at the same time. Where one could not write (a full disk), every rank ends with its error instead of waiting for it."""
        failure: LtxTrainError | OSError | None = None
        try:
            yield
        except (LtxTrainError, OSError) as error:
            failure = error
        told = self.parallel.gather(None if failure is None else (getattr(failure, "code", "run.save"), getattr(failure, "message", str(failure)), getattr(failure, "hint", "")))
        if failure is not None:
            raise failure
        for rank, said in enumerate(told):
            if said is not None:
                raise RunError(said[0], said[1], f"On rank {rank}. {said[2]}")

    def save_snapshot(self, step: int, mean: RunningMean, reason: str) -> None:
        tensors: dict[str, dict[str, Tensor]] = {"weights": self.parts.trainable.state_dict()}
        state: dict[str, Any] = {
            "step": step,
            "seed": self.config.seed,
            "identity": self.parts.identity,
            "loss_mean": [mean.total, mean.weight],
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
        with self.parts.trainable.writing(tensors) as groups:
            path = save_snapshot(snapshot_path(self.live.dir.path, step), groups, state)
        size = sum(f.stat().st_size for f in path.iterdir())
        self.live.emit(SnapshotEvent(step=step, path=f"checkpoints/{path.name}", size=size, reason=reason))

    def save_weights(self, step: int, final: bool) -> None:
        """Write the result file; before the end one that changes nothing yet (warm-up from 0) is left out and said."""
        path = self.lora_path(step)
        try:
            with self.finished():
                keys = self.parts.trainable.write(path, step)
        except LtxTrainError as error:
            path.unlink(missing_ok=True)
            if final or error.code != "lora.zero":
                raise
            self.live.warn(error.code, error.message, "Training goes on; the snapshot is saved.")
            return
        if not self.live.is_main:
            return
        self.live.emit(LoraEvent(step=step, path=f"checkpoints/{path.name}", size=path.stat().st_size, keys=keys, final=final))

    @contextmanager
    def finished(self) -> Iterator[None]:
        """Inside, the network computes with what is saved as the result (the EMA where there is one)."""
        with finished_weights(self.parameters, self.parts.optimizer, self.parts.ema):
            self.parts.trainable.publish()
            yield
        self.parts.trainable.publish()

    # -- going on --
    def restore(self, mean: RunningMean) -> int:
        """Go on from the newest snapshot of this run that verifies (a damaged one is told and passed over), else from its newest weights. The step."""
        damaged = lambda path, why: self.live.warn("snapshot.damaged", f"{path.name} is damaged and passed over: {why}")  # noqa: E731
        path = newest_valid(self.live.dir.path, damaged)
        if path is None:
            return self.own_weights() or self.take_up(mean)
        snapshot = load_snapshot(path)
        if snapshot.state["identity"] != self.parts.identity:
            changed = [k for k, v in self.parts.identity.items() if snapshot.state["identity"].get(k) != v]
            raise self.other_training(path, changed)
        self.adopt(snapshot, mean)
        self.saved_at = snapshot.step
        if self.lora_path(snapshot.step).exists():
            self.lora_at = snapshot.step
        return snapshot.step

    def adopt(self, snapshot: Snapshot, mean: RunningMean) -> None:
        """Be where the snapshot was."""
        self.load_tensors(snapshot)
        mean.total, mean.weight = snapshot.state["loss_mean"]
        if self.parts.scaler.is_enabled():
            self.parts.scaler.load_state_dict(snapshot.state["scaler"])

    def own_weights(self) -> int:
        """Without a snapshot (``save_training_state: off``): go on from the newest weights this run has written. The step; 0 for none.

        The optimizer and the average start afresh; data, noise and schedule go on at that step.
        """
        folder, pattern = self.live.dir.checkpoints, self.lora_path(0).name.replace("00000", "*")
        steps = {int(path.stem.rpartition("_")[2]): path for path in folder.glob(pattern) if path.stem.rpartition("_")[2].isdigit()}
        if not steps or self.config.checkpoints.no_resume:
            return 0
        step = max(steps)
        path = steps[step]
        changed = self.parts.trainable.other_origin(path)
        if changed:
            raise self.other_training(path, changed)
        taken = self.parts.trainable.warm_start(path)
        if self.parts.ema is not None:
            self.parts.ema.load_state_dict(self.parts.trainable.state_dict())
        self.live.warn(
            "resume.own_weights", f"Going on at step {step} from {path.name}: the run has no snapshot.",
            f"{taken}. The optimizer starts afresh, so this is not bit for bit the run without a pause. checkpoints.save_training_state: full keeps snapshots.",
        )  # fmt: skip
        self.lora_at = step
        return step

    def other_training(self, path: Path, changed: list[str]) -> RunError:
        """The error of a snapshot or result file in the run's folder that another training left."""
        return RunError(
            "run.identity", f"{path.name} belongs to another training: {', '.join(changed)} changed.",
            "Use another run name (or output_dir), or put the old value back. Nothing was overwritten.",
        )  # fmt: skip

    def take_up(self, mean: RunningMean) -> int:
        """A new run from ``model.load_checkpoint`` goes on at that file's step where its state lies beside it (no_resume: never).

        Our own state is taken whole; of the official trainer's the step, so that the schedule goes on.
        """
        source, total = self.config.model.load_checkpoint, self.config.optimization.steps
        if not source or self.config.checkpoints.no_resume:
            return 0
        weights = newest_weights(Path(source).expanduser())
        earlier = beside(weights)
        if earlier is None:
            return 0
        changed = earlier.differs(self.parts.identity, self.config.official_identity())
        if changed:
            self.live.warn("resume.weights_only", f"Of {weights.name} the weights alone are taken: {', '.join(changed)} changed.", "The run starts at step 0.")
            return 0
        earlier.leaves(total, weights.name)
        if earlier.snapshot is not None:
            self.adopt(earlier.snapshot, mean)
        self.live.warn("resume.taken_up", f"Going on at step {earlier.step} of {weights.name}.", "checkpoints.no_resume: true would take its weights alone.")
        return earlier.step

    def load_tensors(self, snapshot: Snapshot) -> None:
        trainable = self.parts.trainable
        trainable.load_state_dict(snapshot.read("weights"))
        if "optimizer" in snapshot.groups:
            restore_optimizer(self.parts.optimizer, *trainable.own_part(snapshot.read("optimizer"), snapshot.state["optimizer"]))
        self.parts.step.balance.load_state_dict(snapshot.state["balance"])
        if self.parts.ema is not None and "ema" in snapshot.groups:
            self.parts.ema.load_state_dict(trainable.own_part(snapshot.read("ema"), {})[0])

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
