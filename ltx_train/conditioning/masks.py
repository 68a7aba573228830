"""Conditions within the clip over its picture: a crop, a mask of the dataset, a random mask."""

from __future__ import annotations

from typing import Literal

import torch
from pydantic import Field, model_validator
from torch import Tensor

from ..errors import ConfigError, DataError
from ..geometry import Grid, VideoGrid
from .conditions import FOLDERS, Condition, Media, required
from .draws import Draws
from .state import LatentState


class SpatialCrop(Condition):
    """A rectangle of every frame is given; what is around it is generated (outpainting)."""

    modalities = ("video",)
    type: Literal["spatial_crop"] = "spatial_crop"
    spatial_region: tuple[int, int, int, int] = Field(description="Given rectangle y1, x1, y2, x2 in pixels.")

    def check(self, grid: Grid) -> None:
        top, left, bottom, right = self.cells(grid)
        if bottom <= top or right <= left:
            raise ConfigError(
                "condition.empty_region",
                f"spatial_crop: region {list(self.spatial_region)} holds no whole latent cell",
                f"Give y1, x1, y2, x2 in pixels, multiples of {grid.factors.height} and {grid.factors.width}, inside the frame.",
            )
        if (bottom - top) * (right - left) == grid.tokens_per_frame:
            raise ConfigError(
                "condition.covers_all",
                f"spatial_crop: region {list(self.spatial_region)} covers the whole {grid.height * grid.factors.height} x {grid.width * grid.factors.width} frame",
                "Nothing would be left to generate: give a smaller region.",
            )

    def cells(self, grid: VideoGrid) -> tuple[int, int, int, int]:
        """The rectangle in latent cells: floor division by the VAE factor, clamped (official rule)."""
        top, left, bottom, right = self.spatial_region
        rows = [min(max(edge // grid.factors.height, 0), grid.height) for edge in (top, bottom)]
        cols = [min(max(edge // grid.factors.width, 0), grid.width) for edge in (left, right)]
        return rows[0], cols[0], rows[1], cols[1]

    def mask(self, state: LatentState, media: Media, draws: Draws) -> Tensor:
        return _box(state.grid, (0, state.grid.frames), self.cells(state.grid)).to(state.device, non_blocking=True)


class Mask(Condition):
    """A mask from the dataset says what is given: above one half = given (inpainting)."""

    type: Literal["mask"] = "mask"
    mask_dir: str | None = Field(None, description="Folder of the masks in the official cache layout; None is video_masks or audio_masks.")

    def role(self, modality: str) -> str:
        return f"{modality}_mask"

    def folders(self, modality: str) -> dict[str, str]:
        return {self.role(modality): self.mask_dir or FOLDERS[self.role(modality)]}

    def mask(self, state: LatentState, media: Media, draws: Draws) -> Tensor:
        modality = "video" if isinstance(state.grid, VideoGrid) else "audio"
        mask = required(media, self.role(modality), "mask").to(state.device)
        if mask[0].numel() != state.num_target:
            raise DataError(
                "condition.mask_size",
                f"mask: {list(mask.shape[1:])} does not fit the clip's {state.num_target} tokens",
                "Make masks of the same size and length as their clips and preprocess again.",
            )
        return mask.reshape(mask.shape[0], -1) > 0.5


class RandomMask(Condition):
    """A new mask for each sample: a box in space (all frames, or a span of them), for sound a span of time."""

    type: Literal["random_mask"] = "random_mask"
    generate: Literal["inside", "outside"] = Field("inside", description="Generate inside the box (inpaint) or outside of it (outpaint).")
    share: tuple[float, float] = Field((0.1, 0.6), description="Least and most share of the frame (of the time, for sound) that the box covers.")
    duration: tuple[float, float] = Field((1.0, 1.0), description="Least and most share of a video's length that the box lasts.")

    @model_validator(mode="after")
    def _shares(self) -> RandomMask:
        for name in ("share", "duration"):
            low, high = getattr(self, name)
            if not 0 < low <= high <= 1:
                raise ValueError(f"{name} {[low, high]} must be two rising shares above 0 and at most 1")
        return self

    def applies(self, grid: Grid) -> bool:
        return grid.tokens > 1

    def mask(self, state: LatentState, media: Media, draws: Draws) -> Tensor:
        boxes = torch.stack([self._one(state.grid, g) for g in draws.generators()])
        return (~boxes if self.generate == "inside" else boxes).to(state.device, non_blocking=True)

    def _one(self, grid: Grid, generator: torch.Generator) -> Tensor:
        """[tokens] bool: one box; at least one token in it and one outside."""
        draw = torch.rand(6, generator=generator).tolist()
        between = lambda span, u: span[0] + (span[1] - span[0]) * u  # noqa: E731
        share = between(self.share, draw[0])
        if not isinstance(grid, VideoGrid):
            start, length = _span(grid.steps, share, draw[1], grid.steps - 1)
            line = torch.zeros(grid.steps, dtype=torch.bool)
            line[start : start + length] = True
            return line
        aspect = 0.5 + draw[1]  # height over width, in units of the frame's own: 1/2 to 3/2
        height = min(1.0, (share * aspect) ** 0.5)
        top, rows = _span(grid.height, height, draw[2], grid.height)
        left, cols = _span(grid.width, min(1.0, share / height), draw[3], grid.width)
        first, frames = _span(grid.frames, between(self.duration, draw[4]), draw[5], grid.frames)
        if rows == grid.height and cols == grid.width and frames == grid.frames:
            if grid.width > 1:
                cols -= 1
            elif grid.height > 1:
                rows -= 1
            else:
                frames -= 1
        return _box(grid, (first, first + frames), (top, left, top + rows, left + cols))


def _span(total: int, share: float, place: float, most: int) -> tuple[int, int]:
    """(start, length) of a span covering ``share`` of ``total`` cells, 1 to ``most`` of them, at a place in 0..1."""
    length = min(max(round(total * share), 1), max(most, 1))
    return min(int(place * (total - length + 1)), total - length), length


def _box(grid: VideoGrid, frames: tuple[int, int], cells: tuple[int, int, int, int]) -> Tensor:
    """[tokens] bool: True inside frames x rows x columns."""
    box = torch.zeros(grid.frames, grid.height, grid.width, dtype=torch.bool)
    box[frames[0] : frames[1], cells[0] : cells[2], cells[1] : cells[3]] = True
    return box.flatten()
