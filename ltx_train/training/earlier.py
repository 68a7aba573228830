"""The state beside another run's weights: what ``model.load_checkpoint`` goes on from, ours or the official trainer's."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import ConfigError
from .snapshots import OfficialState, Snapshot, damage, load_snapshot, read_official_state


@dataclass(frozen=True)
class Earlier:
    """Where another run stood. snapshot: our whole state. official: the official trainer's step and settings. One is None."""

    step: int
    snapshot: Snapshot | None = None
    official: OfficialState | None = None

    def differs(self, identity: Mapping[str, str], settings: Mapping[str, Any]) -> list[str]:
        """Names of what was set otherwise there and keeps its step and optimizer from meaning anything here.

        identity: our digests by part. settings: optimizer_type, scheduler_type, training_mode, lora_rank, which is
        what the official state tells of itself.
        """
        if self.snapshot is not None:
            theirs = self.snapshot.state["identity"]
            return [name for name in ("base", "lora", "training_strategy") if theirs.get(name) != identity.get(name)]
        known = self.official.fingerprint
        return [name for name, value in settings.items() if name in known and known[name] != value]

    def leaves(self, steps: int, weights: str) -> None:
        """Raise ConfigError when a training of so many steps in all has none left to do from here."""
        if self.step >= steps:
            raise ConfigError(
                "optimization.steps", f"optimization.steps is {steps}, and {weights} is at step {self.step} already.",
                "Raise optimization.steps above it, or set checkpoints.no_resume: true to start again from its weights.",
            )  # fmt: skip


def beside(weights: Path) -> Earlier | None:
    """The state that belongs to a ``*_step_N.safetensors`` file, in its folder; None when there is none that is whole.

    Raises RunError for an official state that cannot be read.
    """
    number = weights.stem.rsplit("step_", 1)[-1]
    if "step_" not in weights.stem or not number.isdigit():
        return None
    ours = weights.parent / f"state_step_{int(number):05d}"
    if ours.is_dir() and damage(ours) is None:
        snapshot = load_snapshot(ours)
        return Earlier(snapshot.step, snapshot)
    official = weights.parent / f"training_state_step_{int(number):05d}.pt"
    if official.is_file():
        state = read_official_state(official)
        return Earlier(state.step, official=state)
    return None
