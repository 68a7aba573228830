"""The kinds of control, one class each: frames in, as many frames of the same size out, one at a time."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Annotated, Literal

import torch
import torch.nn.functional as F
from pydantic import Discriminator, Field, model_validator
from torch import Tensor

from ..section import Section
from .depth import DepthControl
from .edges import canny

_LUMA = (0.2126, 0.7152, 0.0722)  # BT.709


class CannyControl(Section):
    """White edges on black (the official trainer's reference, with its thresholds)."""

    kind: Literal["canny"] = "canny"
    low: float = Field(100.0, ge=0, le=2040, description="Edges weaker than this are dropped.")
    high: float = Field(200.0, ge=0, le=2040, description="Edges stronger than this are always kept; those between, when connected to one.")

    @model_validator(mode="after")
    def _order(self) -> CannyControl:
        if self.low > self.high:
            raise ValueError(f"low ({self.low:g}) is above high ({self.high:g}): low must not be larger")
        return self

    def apply(self, frames: Iterable[Tensor]) -> Iterator[Tensor]:
        for frame in frames:
            edges = torch.from_numpy(canny(frame.numpy(), self.low, self.high))
            yield edges[..., None].expand(-1, -1, 3)


class BlurControl(Section):
    """A Gaussian blur."""

    kind: Literal["blur"] = "blur"
    strength: float = Field(0.02, gt=0, le=0.5, description="Standard deviation as a share of the shorter side: 0.02 is 14 pixels at 720 lines.")

    def apply(self, frames: Iterable[Tensor]) -> Iterator[Tensor]:
        for frame in frames:
            yield blur(frame, self.strength * min(frame.shape[:2]))


class LowResolutionControl(Section):
    """The picture as a small one enlarged: what an upscaler gets."""

    kind: Literal["low_resolution"] = "low_resolution"
    factor: float = Field(4.0, gt=1, le=64, description="How many times smaller each side is made.")

    def apply(self, frames: Iterable[Tensor]) -> Iterator[Tensor]:
        for frame in frames:
            height, width = frame.shape[:2]
            image = frame.permute(2, 0, 1)[None]
            small = F.interpolate(image, size=(max(1, round(height / self.factor)), max(1, round(width / self.factor))), mode="bicubic", antialias=True)
            yield F.interpolate(small, size=(height, width), mode="bicubic", antialias=True)[0].permute(1, 2, 0)


class GreyControl(Section):
    """The picture without colour (BT.709 luma)."""

    kind: Literal["grey"] = "grey"

    def apply(self, frames: Iterable[Tensor]) -> Iterator[Tensor]:
        weights = torch.tensor(_LUMA)
        for frame in frames:
            yield (frame.float() @ weights).round().to(torch.uint8)[..., None].expand(-1, -1, 3)


Control = Annotated[CannyControl | BlurControl | LowResolutionControl | GreyControl | DepthControl, Discriminator("kind")]
"""Each class is settings and ``apply(frames)``: an iterable of [H, W, 3] uint8 to an iterator of the same."""


def blur(frame: Tensor, sigma: float) -> Tensor:
    """[H, W, 3] uint8 under a separable Gaussian of ``sigma`` pixels (cut at 3 sigma), borders repeated."""
    radius = max(1, round(3 * sigma))
    line = torch.exp(-0.5 * (torch.arange(-radius, radius + 1, dtype=torch.float32) / sigma) ** 2)
    line = line / line.sum()
    image = F.pad(frame.permute(2, 0, 1)[:, None].float(), (radius, radius, 0, 0), mode="replicate")
    image = F.pad(F.conv2d(image, line.view(1, 1, 1, -1)), (0, 0, radius, radius), mode="replicate")
    return F.conv2d(image, line.view(1, 1, -1, 1))[:, 0].permute(1, 2, 0).round().clamp(0, 255).to(torch.uint8)
