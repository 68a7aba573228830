"""The inputs of nodes that make samples: prompts, first frames, size, and the recipe of steps and guidance."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from comfy_api.latest import io
from pydantic.fields import FieldInfo

from ..ltx_train.config import ValidationSection
from ..ltx_train.sampling.recipe import MODEL_NUMBERS
from . import paths, schema

RECIPE = ("sampler", "eta", "schedule", "cfg_star")
OWN_RECIPE, BY_HAND = "the model's own", "by hand"


def prompts_of(text: str) -> list[str]:
    """One prompt a line; empty lines are left out."""
    return [line.strip() for line in text.splitlines() if line.strip()]


def sample_of(prompt: str, first_frame: str = "") -> dict[str, Any]:
    """A validation sample as the section takes it."""
    sample: dict[str, Any] = {"prompt": prompt}
    if first_frame:
        sample["conditions"] = [{"type": "first_frame", "image_or_video": str(paths.resolve(first_frame, what="image"))}]
    return sample


def preview_size(width: int = 512, height: int = 320, frames: int = 49) -> list[io.Input]:
    """Width, height and frames of a sample."""
    return [
        io.Int.Input("width", default=width, min=32, max=4096, step=32, tooltip="Pixels, a multiple of 32."),
        io.Int.Input("height", default=height, min=32, max=4096, step=32, tooltip="Pixels, a multiple of 32."),
        io.Int.Input("frames", default=frames, min=1, max=1025, step=8, tooltip="8n + 1; 1 is a picture."),
    ]


def recipe_input() -> io.Input:
    """How a sample is made: as the model was made for, or with steps, guidance and schedule set by hand."""
    by_hand = [*model_numbers(), *schema.inputs_of(ValidationSection, RECIPE)]
    options = [io.DynamicCombo.Option(OWN_RECIPE, []), io.DynamicCombo.Option(BY_HAND, by_hand)]
    return io.DynamicCombo.Input("recipe", options=options, optional=True, tooltip="Steps, guidance and noise levels: those of the "
        "model's own recipe, or set by hand.")


def model_numbers() -> list[io.Input]:
    """Steps and guidance, each with a value that leaves it to the model's own recipe."""
    made = []
    for name in MODEL_NUMBERS:
        info: FieldInfo = ValidationSection.model_fields[name]
        common = {"tooltip": f"{info.description} Empty or -1: as the model was made for.", "optional": True}
        if name == "stg_blocks":
            made.append(io.String.Input(name, default="", **common))
        elif name == "inference_steps":
            made.append(io.Int.Input(name, default=-1, min=-1, max=1000, **common))
        elif name == "schedule_tokens":
            common["tooltip"] += " 0: none."
            made.append(io.Int.Input(name, default=-1, min=-1, max=1_000_000, **common))
        else:
            made.append(io.Float.Input(name, default=-1.0, min=-1.0, max=100.0, step=0.1, **common))
    return made


def recipe_of(widgets: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of the validation section that were set by hand."""
    given = widgets.get("recipe") or {}
    if given.get("recipe") != BY_HAND:
        return {}
    found = schema.values_of(ValidationSection, given, only=RECIPE)
    for name in MODEL_NUMBERS:
        value = given.get(name)
        if name == "stg_blocks":
            if str(value or "").strip():
                found[name] = schema.lines_of(str(value).replace(",", ";"))
        elif value is not None and value >= 0:
            found[name] = None if name == "schedule_tokens" and value == 0 else value
    return found
