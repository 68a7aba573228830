"""Learning-rate schedules as pure functions of the global step, with the official names and defaults."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import ClassVar

from pydantic import Field

from ..section import Section

# Each schedule below is the closed form of the torch scheduler named in its docstring. As a function of the step it needs
# no state: resuming, raising the number of steps and reading the curve in a planner all come down to calling it.


class Schedule(Section):
    """One schedule's parameters; ``lr`` gives the rate before warm-up. ``None`` horizons are derived from the run's steps."""

    name: ClassVar[str]

    def lr(self, base: float, step: int, steps: int) -> float:
        """The learning rate at ``step`` (0 = first update) of ``steps``."""
        raise AssertionError("each schedule has its own")


class Constant(Schedule):
    """The same rate all along."""

    name: ClassVar[str] = "constant"

    def lr(self, base: float, step: int, steps: int) -> float:
        return base


class Linear(Schedule):
    """From start_factor to end_factor of the rate in a straight line (torch LinearLR)."""

    name: ClassVar[str] = "linear"
    start_factor: float = Field(1.0, gt=0, le=1, description="Fraction of the learning rate at the first step.")
    end_factor: float = Field(0.1, ge=0, le=1, description="Fraction of the learning rate at the last step.")
    total_iters: int | None = Field(None, ge=1, description="Steps the line takes; by default all.")

    def lr(self, base: float, step: int, steps: int) -> float:
        done = min(step, self.total_iters or steps) / (self.total_iters or steps)
        return base * (self.start_factor + (self.end_factor - self.start_factor) * done)


class Cosine(Schedule):
    """Half a cosine down to eta_min (torch CosineAnnealingLR)."""

    name: ClassVar[str] = "cosine"
    T_max: int | None = Field(None, ge=1, description="Steps of the half wave; by default all.")
    eta_min: float = Field(0.0, ge=0, description="Lowest learning rate.")

    def lr(self, base: float, step: int, steps: int) -> float:
        return self.eta_min + (base - self.eta_min) * (1 + math.cos(math.pi * step / (self.T_max or steps))) / 2


class CosineWithRestarts(Schedule):
    """Cosines that start again at the full rate (torch CosineAnnealingWarmRestarts)."""

    name: ClassVar[str] = "cosine_with_restarts"
    T_0: int | None = Field(None, ge=1, description="Steps to the first restart; by default a quarter of all.")
    T_mult: int = Field(1, ge=1, description="Factor by which each further cycle is longer.")
    eta_min: float = Field(5e-5, ge=0, description="Lowest learning rate.")

    def lr(self, base: float, step: int, steps: int) -> float:
        cycle = self.T_0 or max(1, steps // 4)
        while step >= cycle and self.T_mult > 1:
            step, cycle = step - cycle, cycle * self.T_mult
        return self.eta_min + (base - self.eta_min) * (1 + math.cos(math.pi * (step % cycle) / cycle)) / 2


class Polynomial(Schedule):
    """A power of what is left (torch PolynomialLR); 0 at the end."""

    name: ClassVar[str] = "polynomial"
    total_iters: int | None = Field(None, ge=1, description="Steps until the rate is 0; by default all.")
    power: float = Field(1.0, gt=0, description="1 is a straight line, 2 falls faster at first.")

    def lr(self, base: float, step: int, steps: int) -> float:
        return base * (1 - min(step, self.total_iters or steps) / (self.total_iters or steps)) ** self.power


class Step(Schedule):
    """Multiplied by gamma every step_size steps (torch StepLR)."""

    name: ClassVar[str] = "step"
    step_size: int | None = Field(None, ge=1, description="Steps between drops; by default half of all.")
    gamma: float = Field(0.1, gt=0, le=1, description="Factor of each drop.")

    def lr(self, base: float, step: int, steps: int) -> float:
        return base * self.gamma ** (step // (self.step_size or max(1, steps // 2)))


SCHEDULES: dict[str, type[Schedule]] = {kind.name: kind for kind in (Constant, Linear, Cosine, CosineWithRestarts, Polynomial, Step)}
"""The official schedule names and ours; a new schedule is one class and its place here."""


@dataclass(frozen=True)
class LearningRate:
    """``lr_at(step)``: warm-up in a straight line, then the schedule over the steps that are left.

    steps: optimizer steps of the whole run. When a run is extended its schedule is laid anew over the new
    total, so the rate at the step of resuming may jump up; constant stays as it was.
    """

    base: float
    steps: int
    schedule: Schedule = field(default_factory=Constant)
    warmup_steps: int = 0

    def lr_at(self, step: int) -> float:
        """The rate of the update that takes global step ``step`` to ``step + 1``; never 0 while warming up."""
        if step < self.warmup_steps:
            return self.base * (step + 1) / (self.warmup_steps + 1)
        return self.schedule.lr(self.base, step - self.warmup_steps, max(1, self.steps - self.warmup_steps))
