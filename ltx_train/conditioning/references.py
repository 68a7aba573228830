"""Conditions beside the clip: reference videos, reference sounds and keyframe images as appended clean tokens."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from ..errors import ConfigError, DataError
from ..geometry import AudioGrid, Grid, Latents, VideoGrid
from .conditions import FOLDERS, Condition, Media, required
from .draws import Draws
from .state import LatentState, stream_name


class Beside(Condition):
    """A condition with media of its own beside the clip; a stream may have several, numbered in their order."""

    latents_dir: str | None = Field(None, description="Folder of this media in the official cache layout; None is the usual one.")
    number: int = Field(1, ge=1, description="Which of several: 2 reads the role reference_video_2 (or keyframe_2). Counted by itself when left out.")

    def base_role(self, modality: str) -> str:
        raise AssertionError(f"{type(self).__name__} has no role")

    def role(self, modality: str) -> str:
        return self.base_role(modality) + (f"_{self.number}" if self.number > 1 else "")

    def folders(self, modality: str) -> dict[str, str]:
        role = self.role(modality)
        usual = FOLDERS[self.base_role(modality)] + role.removeprefix(self.base_role(modality))
        return {role: self.latents_dir or usual}


class Reference(Beside):
    """A reference video or sound (IC-LoRA): its tokens are appended with timestep 0, read by full attention.

    Video positions are the reference's own grid, rows and columns times the spatial factor; with a temporal factor
    S != 1 its times are moved to max(0, t - (S - 1) / fps). Factors left out are derived from the two grids.
    ``probability`` is drawn once a batch, since it changes the length of the sequence: below 1 it is reference dropout.
    """

    type: Literal["reference"] = "reference"
    downscale_factor: int | None = Field(None, ge=1, description="How many times smaller the reference's sides are; None derives it from the data.")
    temporal_scale_factor: int | None = Field(None, ge=1, description="The reference keeps every n-th frame; None derives it from the data.")
    placement: Literal["over", "before"] = Field(
        "over", description="Sound only: at the clip's own times (official), or before it at negative times (dubbing)."
    )

    def base_role(self, modality: str) -> str:
        return f"reference_{modality}"

    def check(self, grid: Grid) -> None:
        if isinstance(grid, VideoGrid) and self.placement == "before":
            raise ConfigError("condition.placement", "reference: placement before is for sound, not for video", "Use placement over.")

    def edit(self, state: LatentState, media: Media, draws: Draws) -> LatentState:
        role = self.role(stream_name(state.grid))
        reference = required(media, role, "reference")
        if not draws.happens_once(self.probability):
            return state
        assert isinstance(reference, Latents), f"{role} holds no latents"
        tokens = reference.tokens.expand(state.batch, -1, -1)
        line = self.positions(state.grid, reference.grid, state.device)
        return state.appended(tokens, line.expand(state.batch, *line.shape))

    def positions(self, target: Grid, reference: Grid, device: torch.device | str = "cpu") -> Tensor:
        """[n, R, 2]: where the reference's tokens lie in the clip's time and pixels."""
        if isinstance(reference, AudioGrid):
            line = reference.positions(device)
            # its end lies one latent step (0.04 s) before the clip's start, as inference lays it
            return line - (line[0, -1, 1] + 1 / reference.steps_per_second) if self.placement == "before" else line
        scale, stride = self.factors(target, reference)
        if stride != 1:
            reference = replace(reference, fps=target.fps / stride)
        line = reference.positions(device)
        time = line[:1]
        if stride != 1:
            # rounded to float32 as the official code does; on the CPU, so that nothing waits for the accelerator
            time = (time - float((stride - 1) * torch.tensor(1 / target.fps))).clamp(min=0)
        return torch.cat([time, line[1:] * scale])

    def factors(self, target: VideoGrid, reference: VideoGrid) -> tuple[int, int]:
        """(spatial, temporal) factors: as given, else the ratios of the grids, which must be whole."""
        scale, stride = self.downscale_factor, self.temporal_scale_factor
        if scale is None:
            scale = max(target.height // max(reference.height, 1), 1)
            if reference.height * scale != target.height or reference.width * scale != target.width:
                raise DataError(
                    "reference.size",
                    f"reference: {_size(reference)} is no whole fraction of its clip's {_size(target)}",
                    "Make both sides of the reference the clip's divided by one whole number, or set downscale_factor.",
                )
        if stride is None:
            stride = 1
            if reference.frames > 1 and target.frames > 1:
                stride = max((target.frames - 1) // (reference.frames - 1), 1)
                if (reference.frames - 1) * stride != target.frames - 1:
                    raise DataError(
                        "reference.length",
                        f"reference: {reference.pixel_frames} frames are no whole fraction of its clip's {target.pixel_frames}",
                        "Make the reference as long as the clip, or keep every n-th frame of it, or set temporal_scale_factor.",
                    )
        return scale, stride

    def lora_metadata(self, grid: Grid, media: Mapping[str, Grid]) -> dict[str, str]:
        reference = media.get(self.role(stream_name(grid)))
        if not isinstance(grid, VideoGrid) or not isinstance(reference, VideoGrid):
            return {}
        scale, stride = self.factors(grid, reference)
        return {
            "reference_downscale_factor": str(scale),
            "reference_spatial_scale_factor": str(scale),
            "reference_temporal_scale_factor": str(stride),
        }


class KeyframeTokens(Beside):
    """A still at a pixel frame of the clip, as appended tokens over [t, t+1) / fps (inference's keyframe guide)."""

    modalities: ClassVar[tuple[str, ...]] = ("video",)
    type: Literal["keyframe_tokens"] = "keyframe_tokens"
    frame: int = Field(-1, description="Pixel frame of the still; negative ones count from the end.")

    def base_role(self, modality: str) -> str:
        return "keyframe"

    def check(self, grid: Grid) -> None:
        total = grid.pixel_frames
        if not -total <= self.frame < total:
            raise ConfigError("condition.out_of_range", f"keyframe_tokens: frame {self.frame} of a clip of {total}", f"Allowed: {-total} to {total - 1}.")

    def edit(self, state: LatentState, media: Media, draws: Draws) -> LatentState:
        still = required(media, self.role("video"), "keyframe_tokens")
        if not draws.happens_once(self.probability):
            return state
        assert isinstance(still, Latents), "the keyframe role holds no latents"
        grid = state.grid
        if (still.grid.frames, still.grid.height, still.grid.width) != (1, grid.height, grid.width):
            raise DataError("keyframe.size", f"keyframe_tokens: {_size(still.grid)} is not a still of {_size(grid)}", "Give stills of the clip's own size.")
        line = still.grid.positions(state.device)
        start = self.frame % grid.pixel_frames
        line[0, :, 0], line[0, :, 1] = start / grid.fps, (start + 1) / grid.fps
        return state.appended(still.tokens.expand(state.batch, -1, -1), line.expand(state.batch, *line.shape))


def _size(grid: VideoGrid) -> str:
    return f"{grid.width * grid.factors.width}x{grid.height * grid.factors.height}x{grid.pixel_frames}"
