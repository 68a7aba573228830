"""Optimizers as settings with ``build``, and the ``optimization`` section of a job."""

from __future__ import annotations

import contextlib
import importlib
import io
from collections.abc import Iterable
from typing import Annotated, Any, ClassVar

import torch
from pydantic import Field, model_validator
from torch import nn

from ..errors import ConfigError, MissingPackage, nearest
from ..section import Section, parse_parameters
from .ema import EmaSection
from .schedule import SCHEDULES, LearningRate, Schedule

Decay = Annotated[float, Field(ge=0, lt=1)]


class Optimizer(Section):
    """One optimizer's own parameters. Defaults are its library's, so the official configs train as they did."""

    name: ClassVar[str]
    package: ClassVar[str | None] = None
    default_learning_rate: ClassVar[float] = 5e-4
    default_schedule: ClassVar[str] = "linear"

    def build(self, params: list[nn.Parameter], lr: float) -> torch.optim.Optimizer:
        """The torch optimizer over ``params`` (their order is kept: snapshots count on it)."""
        raise AssertionError("each optimizer has its own")

    def package_module(self, module: str) -> Any:
        """The module of the optional package, or MissingPackage naming it."""
        try:
            return importlib.import_module(module)
        except ImportError as error:
            raise MissingPackage(self.package or module, f"The optimizer {self.name}", "Or choose adamw") from error


class AdamW(Optimizer):
    """AdamW of torch; on CUDA its fused kernel."""

    name: ClassVar[str] = "adamw"
    betas: tuple[Decay, Decay] = Field((0.9, 0.999), description="Decay of the running mean and of the running square.")
    eps: float = Field(1e-8, gt=0, description="Added to the denominator.")
    weight_decay: float = Field(0.01, ge=0, description="Decoupled weight decay.")
    amsgrad: bool = Field(False, description="Keep the largest running square.")

    def build(self, params: list[nn.Parameter], lr: float) -> torch.optim.Optimizer:
        fused = all(p.device.type == "cuda" and p.is_floating_point() for p in params)
        if fused and not any(hasattr(p, "device_mesh") for p in params):  # shards are no plain tensors
            from .flat_adam import FlatAdamW

            return FlatAdamW(params, lr=lr, betas=self.betas, eps=self.eps, weight_decay=self.weight_decay, amsgrad=self.amsgrad)
        return torch.optim.AdamW(params, lr=lr, betas=self.betas, eps=self.eps, weight_decay=self.weight_decay, amsgrad=self.amsgrad, fused=fused or None)


class Adafactor(Optimizer):
    """Adafactor of torch: the running square as a row and a column, almost no state."""

    name: ClassVar[str] = "adafactor"
    beta2_decay: float = Field(-0.8, le=0, description="Power of the step in the decay of the running square.")
    eps: tuple[Annotated[float, Field(ge=0)] | None, Annotated[float, Field(ge=0)]] = Field((None, 1e-3), description="Added to the square; least parameter scale of a step.")
    d: float = Field(1.0, ge=1, description="Clipping threshold of an update's root mean square.")
    weight_decay: float = Field(0.0, ge=0, description="Decoupled weight decay.")

    def build(self, params: list[nn.Parameter], lr: float) -> torch.optim.Optimizer:
        kind = getattr(torch.optim, "Adafactor", None)
        if kind is None:
            raise MissingPackage("torch>=2.5", "The optimizer adafactor", "Or choose adamw")
        return kind(params, lr=lr, beta2_decay=self.beta2_decay, eps=self.eps, d=self.d, weight_decay=self.weight_decay)


class BitsAndBytes(Optimizer):
    """Base of the bitsandbytes family: 8-bit state, or state in pages that move to RAM when the card is full."""

    package: ClassVar[str] = "bitsandbytes"
    class_name: ClassVar[str]
    min_8bit_size: int = Field(4096, ge=1, description="Tensors with fewer elements keep 32-bit state.")

    def build(self, params: list[nn.Parameter], lr: float) -> torch.optim.Optimizer:
        kind = getattr(self.package_module("bitsandbytes.optim"), self.class_name)
        settings = self.model_dump(exclude_none=True)
        return kind(params, lr=lr, **{k: tuple(v) if isinstance(v, list) else v for k, v in settings.items()})


class AdamW8bit(BitsAndBytes):
    """AdamW with 8-bit state (bitsandbytes)."""

    name: ClassVar[str] = "adamw8bit"
    class_name: ClassVar[str] = "AdamW8bit"
    betas: tuple[Decay, Decay] = Field((0.9, 0.999), description="Decay of the running mean and of the running square.")
    eps: float = Field(1e-8, gt=0, description="Added to the denominator.")
    weight_decay: float = Field(0.01, ge=0, description="Decoupled weight decay.")


class PagedAdamW(AdamW8bit):
    """AdamW with 32-bit state in pages (bitsandbytes)."""

    name: ClassVar[str] = "paged_adamw"
    class_name: ClassVar[str] = "PagedAdamW"


class PagedAdamW8bit(AdamW8bit):
    """AdamW with 8-bit state in pages (bitsandbytes)."""

    name: ClassVar[str] = "paged_adamw8bit"
    class_name: ClassVar[str] = "PagedAdamW8bit"


class Lion8bit(BitsAndBytes):
    """Lion with 8-bit state (bitsandbytes); wants about a third of AdamW's learning rate."""

    name: ClassVar[str] = "lion8bit"
    class_name: ClassVar[str] = "Lion8bit"
    default_learning_rate: ClassVar[float] = 1.5e-4
    betas: tuple[Decay, Decay] = Field((0.9, 0.99), description="Decay used for the update and for the running mean.")
    weight_decay: float = Field(0.0, ge=0, description="Decoupled weight decay.")


class PagedLion8bit(Lion8bit):
    """Lion with 8-bit state in pages (bitsandbytes)."""

    name: ClassVar[str] = "paged_lion8bit"
    class_name: ClassVar[str] = "PagedLion8bit"


class AdEMAMix8bit(BitsAndBytes):
    """AdEMAMix with 8-bit state (bitsandbytes): a second, slow running mean."""

    name: ClassVar[str] = "ademamix8bit"
    class_name: ClassVar[str] = "AdEMAMix8bit"
    betas: tuple[Decay, Decay, Decay] = Field((0.9, 0.999, 0.9999), description="Decay of the fast mean, of the square, of the slow mean.")
    alpha: float = Field(5.0, ge=0, description="Weight of the slow mean.")
    t_alpha: int | None = Field(None, ge=1, description="Steps over which alpha grows.")
    t_beta3: int | None = Field(None, ge=1, description="Steps over which the slow decay grows.")
    eps: float = Field(1e-8, gt=0, description="Added to the denominator.")
    weight_decay: float = Field(0.01, ge=0, description="Decoupled weight decay.")


class PagedAdEMAMix8bit(AdEMAMix8bit):
    """AdEMAMix with 8-bit state in pages (bitsandbytes)."""

    name: ClassVar[str] = "paged_ademamix8bit"
    class_name: ClassVar[str] = "PagedAdEMAMix8bit"


class Prodigy(Optimizer):
    """Prodigy (prodigyopt): finds the step size itself; the learning rate is a factor near 1."""

    name: ClassVar[str] = "prodigy"
    package: ClassVar[str] = "prodigyopt"
    default_learning_rate: ClassVar[float] = 1.0
    default_schedule: ClassVar[str] = "constant"
    betas: tuple[Decay, Decay] = Field((0.9, 0.999), description="Decay of the running mean and of the running square.")
    beta3: float | None = Field(None, ge=0, lt=1, description="Decay of the step-size estimate; by default the root of the second beta.")
    eps: float = Field(1e-8, gt=0, description="Added to the denominator.")
    weight_decay: float = Field(0.0, ge=0, description="Weight decay.")
    decouple: bool = Field(True, description="Decay as AdamW does.")
    use_bias_correction: bool = Field(False, description="Adam's bias correction.")
    safeguard_warmup: bool = Field(False, description="Keep warm-up out of the estimate; turn on with warm-up.")
    d0: float = Field(1e-6, gt=0, description="First estimate.")
    d_coef: float = Field(1.0, gt=0, description="Factor on the estimate: the knob to turn.")
    growth_rate: float | None = Field(None, gt=1, description="Most that the estimate may grow a step; by default unlimited.")
    slice_p: int = Field(1, ge=1, description="Use every n-th element for the estimate, to save memory.")

    def build(self, params: list[nn.Parameter], lr: float) -> torch.optim.Optimizer:
        kind = self.package_module("prodigyopt").Prodigy
        settings = self.model_dump() | {"betas": tuple(self.betas), "growth_rate": self.growth_rate or float("inf")}
        with contextlib.redirect_stdout(io.StringIO()):  # its constructor prints
            return kind(params, lr=lr, **settings)


class ScheduleFreeAdamW(Optimizer):
    """AdamW without a schedule (schedulefree): trains on one point, saves and samples from an average."""

    name: ClassVar[str] = "adamw_schedulefree"
    package: ClassVar[str] = "schedulefree"
    default_schedule: ClassVar[str] = "constant"
    betas: tuple[Decay, Decay] = Field((0.9, 0.999), description="Interpolation towards the average, and decay of the running square.")
    eps: float = Field(1e-8, gt=0, description="Added to the denominator.")
    weight_decay: float = Field(0.0, ge=0, description="Weight decay.")
    r: float = Field(0.0, ge=0, description="Power of the step in the average's weights.")
    weight_lr_power: float = Field(2.0, ge=0, description="Power of the learning rate in the average's weights.")

    def build(self, params: list[nn.Parameter], lr: float) -> torch.optim.Optimizer:
        kind = self.package_module("schedulefree").AdamWScheduleFree
        optimizer = kind(params, lr=lr, **self.model_dump() | {"betas": tuple(self.betas)})
        optimizer.train()
        return optimizer


OPTIMIZERS: dict[str, type[Optimizer]] = {
    kind.name: kind
    for kind in (
        AdamW, AdamW8bit, PagedAdamW, PagedAdamW8bit, Lion8bit, PagedLion8bit, AdEMAMix8bit, PagedAdEMAMix8bit,
        Adafactor, Prodigy, ScheduleFreeAdamW,
    )
}  # fmt: skip
"""The official optimizer names and ours; a new optimizer is one class and its place here."""


def _choose(name: str, table: dict[str, Any], title: str) -> Any:
    if name not in table:
        near = nearest(name, list(table))
        raise ValueError(f"{title} {name!r} is not known; " + (f"did you mean {near[0]}? " if near else "") + f"known: {', '.join(table)}")
    return table[name]


class OptimizationSection(Section):
    """The official ``optimization`` section and ours: warm-up, optimizer parameters, EMA."""

    learning_rate: float = Field(5e-4, gt=0, description="Learning rate; for prodigy a factor near 1.")
    steps: int = Field(3000, gt=0, description="Optimizer steps in all, those of a resumed run included.")
    batch_size: int = Field(2, gt=0, description="Samples a device and micro-step.")
    gradient_accumulation_steps: int = Field(1, gt=0, description="Micro-steps summed into one optimizer step.")
    max_grad_norm: float = Field(1.0, ge=0, description="Gradients longer than this are scaled down; 0 turns clipping off.")
    optimizer_type: str = Field("adamw", description="The optimizer.", json_schema_extra={"enum": list(OPTIMIZERS)})
    scheduler_type: str = Field("linear", description="The learning-rate schedule.", json_schema_extra={"enum": list(SCHEDULES)})
    scheduler_params: dict[str, Any] = Field(default_factory=dict, description="Parameters of the schedule.")
    enable_gradient_checkpointing: bool = Field(False, description="Compute block activations again in the backward pass, to save memory.")
    warmup_steps: int = Field(0, ge=0, description="Steps over which the learning rate rises to its value.")
    optimizer_params: dict[str, Any] = Field(default_factory=dict, description="Parameters of the optimizer, as its class lists them.")
    betas: tuple[float, ...] | None = Field(None, description="The optimizer's betas, where it has them.")
    eps: float | None = Field(None, gt=0, description="The optimizer's eps, where it has one.")
    weight_decay: float | None = Field(None, ge=0, description="The optimizer's weight decay, where it has one.")
    ema: EmaSection | None = Field(None, description="Keep a running average of the weights and save that; off by default.")

    @model_validator(mode="before")
    @classmethod
    def _defaults_of_the_optimizer(cls, data: Any) -> Any:
        """Fields not given take the optimizer's own default (prodigy: rate 1; schedule-free: constant)."""
        name = data.get("optimizer_type", "adamw") if isinstance(data, dict) else None
        kind = OPTIMIZERS.get(name) if isinstance(name, str) else None
        if kind is None:
            return data
        own = {"learning_rate": kind.default_learning_rate, "scheduler_type": kind.default_schedule}
        return {**{k: v for k, v in own.items() if k not in data}, **data}

    @model_validator(mode="after")
    def _checks(self) -> OptimizationSection:
        self.optimizer()
        self.schedule()
        if self.warmup_steps >= self.steps:
            raise ValueError(f"warmup_steps {self.warmup_steps} must be below steps {self.steps}")
        return self

    def optimizer(self) -> Optimizer:
        """The chosen optimizer's settings: optimizer_params and the short forms betas, eps, weight_decay together."""
        kind = _choose(self.optimizer_type, OPTIMIZERS, "optimizer_type")
        values = dict(self.optimizer_params)
        for name in ("betas", "eps", "weight_decay"):
            value = getattr(self, name)
            if value is None:
                continue
            if name in values:
                raise ValueError(f"{name} is given twice, in optimization and in optimizer_params")
            values[name] = value
        return parse_parameters(kind, f"the optimizer {self.optimizer_type}", values)

    def schedule(self) -> Schedule:
        """The chosen schedule's settings."""
        return parse_parameters(_choose(self.scheduler_type, SCHEDULES, "scheduler_type"), f"the schedule {self.scheduler_type}", self.scheduler_params)

    @property
    def learning_rates(self) -> LearningRate:
        """The learning rate as a pure function of the global step."""
        return LearningRate(self.learning_rate, self.steps, self.schedule(), self.warmup_steps)

    def lr_at(self, step: int) -> float:
        """The learning rate of the update from global step ``step`` to ``step + 1``."""
        return self.learning_rates.lr_at(step)

    def build_optimizer(self, params: Iterable[nn.Parameter], *, in_ram: bool = False) -> torch.optim.Optimizer:
        """The optimizer over ``params``; in_ram: its running means rest on the host.

        Raises MissingPackage when its package is not installed, ConfigError where it cannot rest on the host.
        """
        params = list(params)
        if not params:
            raise ConfigError("optimizer.no_parameters", "There is nothing to train: no parameter was selected.", "Check lora.target_modules.")
        return self._in_ram(params) if in_ram else self.optimizer().build(params, self.lr_at(0))

    @property
    def rests_in_ram(self) -> bool:
        """Whether there is a form of the optimizer whose running means rest on the host."""
        kind = self.optimizer()
        return isinstance(kind, AdamW) and not kind.amsgrad

    def _in_ram(self, params: list[nn.Parameter]) -> torch.optim.Optimizer:
        from ..memory.pinned import HostMemory
        from .host_adam import HostAdamW

        kind = self.optimizer()
        if not self.rests_in_ram:
            raise ConfigError("optimizer.in_ram", f"optimizer_in_ram goes with adamw only, not {self.optimizer_type}.", "Choose adamw, or a paged_ optimizer with optimizer_in_ram: off.")
        memory = HostMemory(pin=params[0].device.type == "cuda")
        return HostAdamW(params, self.lr_at(0), kind.betas, kind.eps, kind.weight_decay, take=memory.take)

    def require_packages(self) -> None:
        """Raise MissingPackage at the start when the optimizer's package is not installed."""
        optimizer = self.optimizer()
        if optimizer.package is not None:
            optimizer.package_module(optimizer.package)

    def findings(self) -> list[str]:
        """Settings that work but are seldom meant, in words for the log."""
        found = []
        if self.optimizer_type == "prodigy" and self.learning_rate < 0.01:
            found.append(f"prodigy multiplies its own estimate by learning_rate {self.learning_rate:g}; near 1 is usual, this trains next to nothing.")
        if self.optimizer_type != "prodigy" and self.learning_rate > 0.01:
            found.append(f"learning_rate {self.learning_rate:g} is far above the usual 1e-5 to 1e-3.")
        if self.optimizer_type.endswith("schedulefree") and self.scheduler_type != "constant":
            found.append(f"{self.optimizer_type} needs no schedule; with {self.scheduler_type} its average weighs late steps less.")
        return found


def can_stay(optimizer: torch.optim.Optimizer) -> bool:
    """Whether :func:`step_unless` works: torch's fused kernels read on the device whether to move."""
    from .host_adam import HostAdamW

    return isinstance(optimizer, HostAdamW) or (isinstance(optimizer, torch.optim.AdamW) and all(group.get("fused") for group in optimizer.param_groups))


def step_unless(optimizer: torch.optim.Optimizer, bad: torch.Tensor) -> None:
    """One update, or none of weights, running means and step count where ``bad`` (scalar float32 on the device) is 1."""
    optimizer.grad_scale, optimizer.found_inf = None, bad  # what a GradScaler hands to them
    try:
        optimizer.step()
    finally:
        del optimizer.grad_scale, optimizer.found_inf


def set_learning_rate(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Give every parameter group the rate of the coming update."""
    for group in optimizer.param_groups:
        if isinstance(group["lr"], torch.Tensor):
            group["lr"].fill_(lr)
        else:
            group["lr"] = lr
