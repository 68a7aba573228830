"""What a measurement can be asked for: cases, and files for records, refused before seconds go into a network."""

from __future__ import annotations

import math
import os
import re
from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import ConfigError, nearest

if TYPE_CHECKING:
    from ..bench.step import StepCase

SMALLEST = {"steps": 1, "warmup": 0, "together": 1, "layers": 0, "slots": 1, "text_tokens": 1, "resident": -1, "cap": 0, "link": 0}


def sound(case: StepCase) -> StepCase:
    """The case, or ConfigError for one that nothing can be measured of."""
    from ..config import parse_section
    from ..lora.adapters import LoraSection
    from ..memory.settings import AccelerationSection
    from ..models.families import FAMILIES

    if case.family not in FAMILIES:
        near = nearest(case.family, list(FAMILIES))
        raise ConfigError("bench.family", f"There is no family {case.family!r:.60}.", f"{'Nearest: ' + near[0] + '. ' if near else ''}There are: {', '.join(FAMILIES)}.")
    sound_size(case.size)
    for name, least in SMALLEST.items():
        value = getattr(case, name)
        if not math.isfinite(value) or value < least:
            raise ConfigError("bench.case", f"{name}={value} is less than {least}, or no number.", f"{name} is a number from {least} on.")
    if case.optimizer not in ("device", "host"):
        raise ConfigError("bench.case", f"optimizer={case.optimizer:.60}: its state is on the device or on the host.", "Write optimizer=device or optimizer=host.")
    parse_section(LoraSection, {"rank": case.rank, "alpha": case.rank})
    config = case.config()
    widest = config.num_attention_heads * config.attention_head_dim
    if case.rank > widest:
        raise ConfigError("bench.case", f"rank={case.rank} is more than the {widest} columns that this network's layers have.", f"Give a rank from 2 to {widest}.")
    given = {"quantization": case.quantization or None, "activation_budget": case.budget, "attention": case.attention}
    parse_section(AccelerationSection, {name: value for name, value in given.items() if name in AccelerationSection.model_fields})
    return case


def sound_size(text: str) -> str:
    """WIDTHxHEIGHTxFRAMES on the latent grid, or ConfigError that names the nearest."""
    found = re.fullmatch(r"(\d{1,5})x(\d{1,5})x(\d{1,5})", text)
    if found is None:
        raise ConfigError("bench.size", f"{text:.60} is not WIDTHxHEIGHTxFRAMES.", "Write it as 960x544x89.")
    width, height, frames = (int(number) for number in found.groups())
    near = f"{max(32, 32 * round(width / 32))}x{max(32, 32 * round(height / 32))}x{max(1, 8 * round((frames - 1) / 8) + 1)}"
    if near != f"{width}x{height}x{frames}":
        raise ConfigError("bench.size", f"{text} is off the latent grid: multiples of 32 pixels and 8n+1 frames.", f"Nearest: {near}.")
    return text


def sound_out(out: Path | None) -> None:
    """Raise ConfigError for a file that no record can be kept in: that is told before measuring, not after."""
    if out is None:
        return
    place = out if out.exists() else out.absolute().parent
    if out.is_dir() or not place.exists() or not os.access(place, os.W_OK):
        why = "it is a folder" if out.is_dir() else f"there is no folder {place}" if not place.exists() else "no permission"
        raise ConfigError("bench.out", f"Records cannot be kept in {out}: {why}.", "Name a file in a folder that is there and may be written to.")
