"""Conditions within the clip over its time: the base of all conditions, first and last frame, prefix, suffix, keyframes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, Literal

import torch
from pydantic import Field, model_validator
from torch import Tensor

from ..errors import ConfigError, DataError
from ..geometry import Grid, Latents, VideoGrid
from ..section import Section
from .draws import Draws
from .state import LatentState, time_slices

Media = Mapping[str, "Latents | Tensor"]
"""Media of a batch by role: latents of references and keyframes, masks [B, F', H', W'] or [B, T]."""

CONTENT = "content"
"""The role under which sampling hands a condition the latents to put in; training uses the clip's own tokens."""

FOLDERS = {
    "video": "latents",
    "audio": "audio_latents",
    "reference_video": "reference_latents",
    "reference_audio": "reference_audio_latents",
    "video_mask": "video_masks",
    "audio_mask": "audio_masks",
    "keyframe": "keyframe_latents",
}
"""Official cache folder of each role (keyframe is ours)."""


class Condition(Section):
    """One edit of a stream's state. Subclasses have a ``type`` and say which streams they suit."""

    modalities: ClassVar[tuple[str, ...]] = ("video", "audio")

    probability: float = Field(1.0, ge=0, le=1, description="Share of the samples that get this condition while training.")

    def roles(self, modality: str) -> frozenset[str]:
        """Media needed beside the clip."""
        return frozenset(self.folders(modality))

    def folders(self, modality: str) -> dict[str, str]:
        """The same roles with their folder names in the official cache layout."""
        return {}

    def check(self, grid: Grid) -> None:
        """Raise ConfigError where this cannot work on clips of ``grid``."""

    def edit(self, state: LatentState, media: Media, draws: Draws) -> LatentState:
        """The state with this condition applied, to all samples or to those that the draws choose."""
        if not self.applies(state.grid):
            return state
        applied = draws.happens(self.probability)
        if not any(applied):
            return state
        mask = self.mask(state, media, draws)
        if not all(applied):
            mask = mask & torch.tensor(applied).to(state.device, non_blocking=True)[:, None]
        content = media.get(CONTENT)
        return state.held(mask, None if content is None else self.laid_out(content, state.grid))

    def applies(self, grid: Grid) -> bool:
        """False where the condition would leave nothing to train and is therefore skipped."""
        return True

    def mask(self, state: LatentState, media: Media, draws: Draws) -> Tensor:
        """[num_target] or [B, num_target] bool: tokens that are given."""
        raise AssertionError(f"{type(self).__name__} has no mask")

    def laid_out(self, content: Latents, grid: Grid) -> Tensor:
        """[B, num_target, C]: ``content`` placed on ``grid``; whole-grid content by default."""
        _same_grid(self, content, grid)
        return content.tokens

    def lora_metadata(self, grid: Grid, media: Mapping[str, Grid]) -> dict[str, str]:
        """What a LoRA trained with this tells its loader. grid, media: of the clip and of each role."""
        return {}


class TimeCondition(Condition):
    """Whole time slices are given: latent frames of a video, latent steps of a sound.

    from_end: given content that is longer than the slices is used from its end.
    """

    from_end: ClassVar[bool] = False

    def slices(self, grid: Grid, generator: torch.Generator | None) -> list[int]:
        """Indices of the given slices; ``generator`` is there for what is random."""
        raise AssertionError(f"{type(self).__name__} has no slices")

    @property
    def random(self) -> bool:
        """Whether the slices differ from sample to sample."""
        return False

    def mask(self, state: LatentState, media: Media, draws: Draws) -> Tensor:
        if not self.random:
            return self._line(state, self.slices(state.grid, None))
        return torch.stack([self._line(state, self.slices(state.grid, g)) for g in draws.generators()])

    def laid_out(self, content: Latents, grid: Grid) -> Tensor:
        _, size = time_slices(grid)
        indices = self.slices(grid, None)
        have, have_size = time_slices(content.grid)
        if have_size != size or have < len(indices):
            raise DataError(
                "condition.content_size",
                f"{self.type}: the given media has {have} latent slices of {have_size} tokens, {len(indices)} of {size} are needed",
                "Give media at least as long as the condition, at the size of the sample.",
            )
        tokens = content.tokens
        picked = tokens[:, : len(indices) * size] if not self.from_end else tokens[:, -len(indices) * size :]
        full = tokens.new_zeros(tokens.shape[0], grid.tokens, tokens.shape[2])
        for place, index in enumerate(indices):
            full[:, index * size : (index + 1) * size] = picked[:, place * size : (place + 1) * size]
        return full

    @staticmethod
    def _line(state: LatentState, indices: list[int]) -> Tensor:
        count, size = time_slices(state.grid)
        line = torch.zeros(count, dtype=torch.bool)
        line[indices] = True
        return line.to(state.device, non_blocking=True).repeat_interleave(size, output_size=count * size)


class FirstFrame(TimeCondition):
    """The first frame is given (image to video). A one-frame clip is left alone: nothing would remain to train."""

    modalities = ("video",)
    type: Literal["first_frame"] = "first_frame"

    def applies(self, grid: Grid) -> bool:
        return time_slices(grid)[0] > 1

    def slices(self, grid: Grid, generator: torch.Generator | None) -> list[int]:
        return [0]


class LastFrame(TimeCondition):
    """The last latent frame is given (with first_frame: first and last frame to video)."""

    modalities = ("video",)
    type: Literal["last_frame"] = "last_frame"
    from_end = True

    def check(self, grid: Grid) -> None:
        _leaves_something(self, 1, grid)

    def slices(self, grid: Grid, generator: torch.Generator | None) -> list[int]:
        return [time_slices(grid)[0] - 1]


class _Run(TimeCondition):
    """A run of slices from one end, of a fixed or a random length."""

    temporal_boundary: int = Field(8, ge=1, description="Given latent frames (video) or latent time steps (sound, 25 a second).")
    temporal_boundary_max: int | None = Field(
        None, ge=1, description="Draw the length of each sample between temporal_boundary and this; None keeps it fixed."
    )

    @model_validator(mode="after")
    def _ordered(self) -> _Run:
        if self.temporal_boundary_max is not None and self.temporal_boundary_max < self.temporal_boundary:
            raise ValueError(f"temporal_boundary_max {self.temporal_boundary_max} is below temporal_boundary {self.temporal_boundary}")
        return self

    @property
    def random(self) -> bool:
        return self.temporal_boundary_max is not None and self.temporal_boundary_max > self.temporal_boundary

    def check(self, grid: Grid) -> None:
        _leaves_something(self, self.temporal_boundary_max or self.temporal_boundary, grid)

    def length(self, generator: torch.Generator | None) -> int:
        if generator is None or not self.random:
            return self.temporal_boundary
        return int(torch.randint(self.temporal_boundary, self.temporal_boundary_max + 1, (), generator=generator))


class Prefix(_Run):
    """The beginning is given (extend forwards)."""

    type: Literal["prefix"] = "prefix"

    def slices(self, grid: Grid, generator: torch.Generator | None) -> list[int]:
        return list(range(min(self.length(generator), time_slices(grid)[0])))


class Suffix(_Run):
    """The end is given (extend backwards)."""

    type: Literal["suffix"] = "suffix"
    from_end = True

    def slices(self, grid: Grid, generator: torch.Generator | None) -> list[int]:
        count = time_slices(grid)[0]
        return list(range(max(count - self.length(generator), 0), count))


class Keyframes(TimeCondition):
    """Latent frames anywhere in the clip are given: listed ones, or so many drawn for each sample."""

    modalities = ("video",)
    type: Literal["keyframes"] = "keyframes"
    at: tuple[int, ...] = Field((), description="Latent frame indices; negative ones count from the end.")
    count: tuple[int, int] | None = Field(None, description="Draw between the first and second number of frames for each sample.")

    @model_validator(mode="after")
    def _one_way(self) -> Keyframes:
        if bool(self.at) == (self.count is not None):
            raise ValueError("give either at (frame indices) or count (least and most frames to draw)")
        if self.count is not None and not 1 <= self.count[0] <= self.count[1]:
            raise ValueError(f"count {list(self.count)} must be two rising numbers from 1")
        return self

    @property
    def random(self) -> bool:
        return self.count is not None

    def check(self, grid: Grid) -> None:
        total = time_slices(grid)[0]
        for index in self.at:
            if not -total <= index < total:
                raise ConfigError("condition.out_of_range", f"keyframes: latent frame {index} of a clip of {total}", f"Allowed: {-total} to {total - 1}.")
        _leaves_something(self, self.count[1] if self.count else len({i % total for i in self.at}), grid)

    def slices(self, grid: Grid, generator: torch.Generator | None) -> list[int]:
        total = time_slices(grid)[0]
        if self.count is None:
            return [index % total for index in self.at]
        generator = generator or torch.Generator().manual_seed(0)
        least, most = self.count
        number = int(torch.randint(least, most + 1, (), generator=generator))
        return sorted(torch.randperm(total, generator=generator)[: min(number, total - 1)].tolist())


def required(media: Media, role: str, what: str) -> Latents | Tensor:
    """The media of a role, or DataError naming it."""
    if role not in media:
        raise DataError(
            "condition.media_missing",
            f"{what}: the dataset has no {role} beside its clips",
            f"Give the clips the role {role} (a column or folder of that name) and preprocess again. There is: {', '.join(sorted(media)) or 'none'}.",
        )
    return media[role]


def _leaves_something(condition: TimeCondition, given: int, grid: Grid) -> None:
    """Refuse a condition that gives every slice of the clip."""
    count, _ = time_slices(grid)
    if given < count:
        return
    unit = "latent frames" if isinstance(grid, VideoGrid) else "latent time steps"
    length = f"{grid.pixel_frames} frames" if isinstance(grid, VideoGrid) else f"{grid.seconds:.2f} s"
    raise ConfigError(
        "condition.covers_all",
        f"{condition.type}: {given} given {unit} leave nothing of a clip of {count} ({length}) to generate",
        f"Give at most {count - 1}, or use longer clips." if count > 1 else "Use clips longer than one frame, or leave the condition out.",
    )


def _same_grid(condition: Condition, content: Latents, grid: Grid) -> None:
    if content.grid.tokens != grid.tokens or time_slices(content.grid) != time_slices(grid):
        raise DataError(
            "condition.content_size",
            f"{condition.type}: the given media has {content.grid.tokens} tokens, the sample {grid.tokens}",
            "Give media of the sample's own size and length.",
        )
