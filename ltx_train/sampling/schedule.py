"""Noise levels of sampling: the shifted schedule of the base models and the fixed lists of the distilled ones."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..errors import ConfigError

# Levels that the distilled models were trained on (ltx-pipelines; the last from the checkpoint's own metadata)
DISTILLED = (1.0, 0.99375, 0.9875, 0.98125, 0.975, 0.909375, 0.725, 0.421875, 0.0)
DISTILLED_STAGE2 = (0.909375, 0.725, 0.421875, 0.0)
DISTILLED_STAGE2_TILED = (0.625, 0.4, 0.0)
LTXV_098_DISTILLED = (1.0, 0.9937, 0.9875, 0.9812, 0.975, 0.9094, 0.725, 0.4219, 0.0)

NAMED = {"distilled": DISTILLED, "distilled_stage2": DISTILLED_STAGE2, "distilled_stage2_tiled": DISTILLED_STAGE2_TILED, "ltxv_distilled": LTXV_098_DISTILLED}


def sigma_schedule(
    steps: int, *, tokens: int = 4096, base_shift: float = 0.95, max_shift: float = 2.05, stretch: bool = True, terminal: float = 0.1
) -> tuple[float, ...]:
    """steps + 1 falling noise levels from 1 to 0 (the official LTX2 scheduler).

    linspace(1, 0), shifted by m = base_shift + (tokens - 1024) * (max_shift - base_shift) / 3072 to
    e^m / (e^m + 1/s - 1), then stretched so that the last level above 0 is ``terminal``. The official pipelines always
    use the shift of 4096 tokens, whatever the clip's length. Raises ConfigError where the shift is too strong for float64.
    """
    shift = base_shift + (tokens - 1024) * (max_shift - base_shift) / (4096 - 1024)
    levels = [1 / (1 + math.exp(-shift) * (1 / s - 1)) if shift < 700 else 1.0 for s in (1 - i / steps for i in range(steps))]
    if levels[-1] >= 1 and steps > 1 or not all(a > b for a, b in zip(levels, levels[1:])):
        raise ConfigError(
            "sampling.tokens", f"schedule_tokens {tokens}: the shift for so many tokens leaves no falling noise levels."[:118],
            "Set validation.schedule_tokens to 4096, which LTX-2 and later use at every size, or make the clip smaller.",
        )  # fmt: skip
    if stretch and steps > 1:
        scale = (1 - levels[-1]) / (1 - terminal)
        levels = [1 - (1 - s) / scale for s in levels]
    return (*levels, 0.0)


@dataclass(frozen=True)
class Schedule:
    """Noise levels and the step between them: sampler ``euler`` or ``euler_ancestral`` (with ``eta``)."""

    sigmas: tuple[float, ...]
    sampler: str = "euler"
    eta: float = 1.0

    def __post_init__(self) -> None:
        falling = all(a > b for a, b in zip(self.sigmas, self.sigmas[1:]))
        if len(self.sigmas) < 2 or not falling or not 0 < self.sigmas[0] <= 1 or self.sigmas[-1] < 0:
            raise ConfigError(
                "sampling.schedule",
                f"sigmas {list(self.sigmas[:4])}{'...' if len(self.sigmas) > 4 else ''}: no schedule of noise levels."[:118],
                "Give falling numbers in 0..1, ending with 0, such as 1.0, 0.9, 0.5, 0.0.",
            )

    @property
    def steps(self) -> int:
        return len(self.sigmas) - 1


def distilled_schedule(family: str, config: Mapping[str, Any] | None = None) -> Schedule:
    """The schedule of a distilled checkpoint of a family.

    config: the checkpoint's config sections; a list of allowed levels in it (LTX-Video 0.9.8) goes before the table.
    LTX-2.5 takes ancestral Euler steps with eta 1, the others plain Euler steps.
    """
    own = allowed_levels(config)
    if own:
        return Schedule(own)
    if family.startswith("ltxv"):
        return Schedule(LTXV_098_DISTILLED)
    return Schedule(DISTILLED, "euler_ancestral" if family == "ltx2.5" else "euler")


def allowed_levels(config: Mapping[str, Any] | None) -> tuple[float, ...] | None:
    """The noise levels that a checkpoint's metadata allows, closed with 0, or None."""
    config = config or {}
    for section in (config, config.get("scheduler") or {}, config.get("transformer") or {}):
        found = section.get("allowed_inference_steps") if isinstance(section, Mapping) else None
        if isinstance(found, Sequence) and found and all(isinstance(x, (int, float)) for x in found):
            levels = tuple(float(x) for x in found)
            return levels if levels[-1] == 0 else (*levels, 0.0)
    return None


def is_distilled(*names: str) -> bool:
    """Whether a file name or title says that the model is distilled (a distilled LoRA's file does not make the base one)."""
    return any("distill" in name.lower() and "lora" not in name.lower() for name in names)
