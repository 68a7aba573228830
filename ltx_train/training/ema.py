"""A running average of the trained weights, and which weights are saved and sampled from."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from pydantic import Field
from torch import Tensor, nn

from ..errors import RunError
from ..section import Section


class EmaSection(Section):
    """Exponential moving average of the trained weights."""

    decay: float = Field(0.999, gt=0, lt=1, description="Share of the old average kept each step; 0.999 looks back about 1000 steps.")
    warmup: bool = Field(True, description="Average over fewer steps at first: decay is at most (1 + step) / (10 + step).")

    def decay_at(self, step: int) -> float:
        """The decay of the update that ends at global step ``step`` (1 = after the first update)."""
        return min(self.decay, (1 + step) / (10 + step)) if self.warmup else self.decay


class Ema:
    """The average in float32, beside the parameters on their device; a pure function of the weights seen."""

    def __init__(self, parameters: Mapping[str, nn.Parameter], section: EmaSection) -> None:
        self.section = section
        self.parameters = dict(parameters)
        self.average = {name: p.detach().float().clone() for name, p in self.parameters.items()}

    @torch.no_grad()
    def update(self, step: int) -> None:
        """Take in the weights after the update that ended at global step ``step``."""
        now = [p.detach().float() for p in self.parameters.values()]
        torch._foreach_lerp_(list(self.average.values()), now, 1 - self.section.decay_at(step))

    def state_dict(self) -> dict[str, Tensor]:
        return dict(self.average)

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Take over a saved average. Raises RunError when its names are not ours."""
        if set(state) != set(self.average):
            odd = sorted(set(state) ^ set(self.average))
            raise RunError("snapshot.ema", f"The saved average does not fit this adapter: {odd[0]}.", f"{len(odd)} names differ.")
        for name, value in state.items():
            self.average[name].copy_(value)


@contextmanager
def finished_weights(parameters: list[nn.Parameter], optimizer: torch.optim.Optimizer, ema: Ema | None = None) -> Iterator[None]:
    """Inside, the parameters hold what is to be saved as a result and sampled from; afterwards they are bit for bit as before.

    That is the EMA where there is one, else the average of a schedule-free optimizer, else the weights themselves.
    Snapshots are taken outside of it.
    """
    schedule_free = hasattr(optimizer, "eval") and hasattr(optimizer, "train")
    if ema is None and not schedule_free:
        yield
        return
    kept = [p.detach().clone() for p in parameters]
    try:
        if ema is not None:
            with torch.no_grad():
                for name, parameter in ema.parameters.items():
                    parameter.copy_(ema.average[name])
        else:
            optimizer.eval()
        yield
    finally:
        with torch.no_grad():
            for parameter, value in zip(parameters, kept):
                parameter.copy_(value)
        if schedule_free:
            for group in optimizer.param_groups:  # its own train() would compute the weights back, not bit for bit
                group["train_mode"] = True
