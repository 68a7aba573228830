"""Latent geometry: grids, tokens, positions and mask pooling. Pure tensor arithmetic, no network."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

import torch
from einops import rearrange
from torch import Tensor


@dataclass(frozen=True)
class VideoFactors:
    """How many pixels one latent cell covers: (time, height, width), such as (8, 32, 32).

    causal: the first latent frame covers one pixel frame only (every LTX VAE); positions follow it
    unless the checkpoint says otherwise (LTX-Video 0.9.0 and 0.9.1).
    """

    time: int = 8
    height: int = 32
    width: int = 32
    causal_positions: bool = True

    def latent_frames(self, frames: int) -> int:
        """Latent frames of ``frames`` pixel frames; frames % time must be 1."""
        assert frames % self.time == 1 or self.time == 1, f"{frames} frames are not {self.time}n+1"
        return (frames - 1) // self.time + 1

    def pixel_frames(self, latent_frames: int) -> int:
        return (latent_frames - 1) * self.time + 1


@dataclass(frozen=True)
class VideoGrid:
    """A latent video's grid: frames x height x width cells, at a true frame rate.

    Axis order of tokens is (frame, row, column), row-major.
    """

    frames: int
    height: int
    width: int
    fps: float = 24.0
    factors: VideoFactors = VideoFactors()

    @classmethod
    def of_pixels(cls, width: int, height: int, frames: int, fps: float, factors: VideoFactors) -> VideoGrid:
        """The grid of a clip of width x height x frames pixels."""
        assert width % factors.width == 0 and height % factors.height == 0, f"{width}x{height} is off the latent grid"
        return cls(factors.latent_frames(frames), height // factors.height, width // factors.width, fps, factors)

    @property
    def tokens(self) -> int:
        return self.frames * self.height * self.width

    @property
    def tokens_per_frame(self) -> int:
        return self.height * self.width

    @property
    def pixel_frames(self) -> int:
        return self.factors.pixel_frames(self.frames)

    @property
    def seconds(self) -> float:
        return self.pixel_frames / self.fps

    def positions(self, device: torch.device | str = "cpu") -> Tensor:
        """[3, T, 2] float32: [start, end) of every token in seconds, pixel rows, pixel columns.

        Causal: latent frame 0 covers pixel frame 0, latent frame f covers 8f-7 .. 8f (official formula
        clamp(8f + 1 - 8, 0)); without it latent frame f covers 8f .. 8f+7.
        """
        edge = torch.arange(self.frames + 1, device=device, dtype=torch.float32) * self.factors.time
        if self.factors.causal_positions:
            edge = (edge + 1 - self.factors.time).clamp(min=0)
        edge = edge / self.fps
        rows = torch.arange(self.height + 1, device=device, dtype=torch.float32) * self.factors.height
        cols = torch.arange(self.width + 1, device=device, dtype=torch.float32) * self.factors.width
        spans = []
        for axis, line in enumerate((edge, rows, cols)):
            span = torch.stack([line[:-1], line[1:]], dim=-1)
            shape = [1, 1, 1, 2]
            shape[axis] = span.shape[0]
            spans.append(span.view(shape).expand(self.frames, self.height, self.width, 2).reshape(-1, 2))
        return torch.stack(spans)

    def first_frame(self, device: torch.device | str = "cpu") -> Tensor:
        """[T] bool: True on the tokens of the first latent frame."""
        return torch.arange(self.tokens, device=device) < self.tokens_per_frame


@dataclass(frozen=True)
class AudioGrid:
    """A latent sound's grid: ``steps`` latent time steps of channels x bins.

    One latent step covers ``factor`` mel frames of ``hop`` samples at ``sample_rate``
    (4 x 160 / 16000: 25 steps a second).
    """

    steps: int
    channels: int = 8
    bins: int = 16
    factor: int = 4
    hop: int = 160
    sample_rate: int = 16000

    @property
    def tokens(self) -> int:
        return self.steps

    @property
    def steps_per_second(self) -> float:
        return self.sample_rate / self.hop / self.factor

    @property
    def seconds(self) -> float:
        return self.steps / self.steps_per_second

    def of_seconds(self, seconds: float) -> AudioGrid:
        """The same layout for a duration: round(seconds * 25) steps, at least 1 (the inference rule)."""
        return replace(self, steps=max(1, round(seconds * self.steps_per_second)))

    def positions(self, device: torch.device | str = "cpu") -> Tensor:
        """[1, T, 2] float32 seconds: t_k = max(4k + 1 - 4, 0) * hop / rate, span [t_k, t_k+1)."""
        edge = torch.arange(self.steps + 1, device=device, dtype=torch.float32) * self.factor
        # multiplied before divided: the last bit matters, RoPE's highest frequencies enlarge it ten thousand times
        edge = (edge + 1 - self.factor).clamp(min=0) * self.hop / self.sample_rate
        return torch.stack([edge[:-1], edge[1:]], dim=-1).unsqueeze(0)


Grid = VideoGrid | AudioGrid


def patchify(values: Tensor) -> Tensor:
    """Latents to tokens: video [B,C,F,H,W] -> [B,F*H*W,C]; audio [B,C,T,bins] -> [B,T,C*bins] (channel, bin)."""
    if values.ndim == 5:
        return rearrange(values, "b c f h w -> b (f h w) c")
    return rearrange(values, "b c t f -> b t (c f)")


def unpatchify(tokens: Tensor, grid: Grid) -> Tensor:
    """Tokens back to latents of ``grid``: the inverse of :func:`patchify`."""
    if isinstance(grid, VideoGrid):
        return rearrange(tokens, "b (f h w) c -> b c f h w", f=grid.frames, h=grid.height, w=grid.width)
    return rearrange(tokens, "b t (c f) -> b c t f", f=grid.bins)


@dataclass(frozen=True)
class Latents:
    """Normalised latents of one modality with the grid they live on.

    values: video [B, 128, F, H, W] or audio [B, 8, T, 16].
    """

    values: Tensor
    grid: Grid

    @property
    def batch(self) -> int:
        return self.values.shape[0]

    @property
    def tokens(self) -> Tensor:
        """[B, T, C]."""
        return patchify(self.values)

    @property
    def positions(self) -> Tensor:
        """[B, 3 or 1, T, 2] float32 on the values' device: always views of one tensor a grid, not to be written to."""
        line = _positions(self.grid, self.values.device)
        return line.unsqueeze(0).expand(self.batch, *line.shape)

    def with_tokens(self, tokens: Tensor) -> Latents:
        """The same grid with other tokens [B, T, C]."""
        return Latents(unpatchify(tokens, self.grid), self.grid)

    def to(self, *args, **kwargs) -> Latents:
        return Latents(self.values.to(*args, **kwargs), self.grid)


@lru_cache(maxsize=64)
def _positions(grid: Grid, device: torch.device) -> Tensor:
    """A grid's positions, made once: what hangs on them (RoPE tables) is found again by the tensor itself."""
    with torch.inference_mode(False):
        return grid.positions(device)


def pool_mask(mask: Tensor, factors: VideoFactors) -> Tensor:
    """A pixel mask [F, H, W] in 0..1 pooled to the latent grid [F', H', W'] as the causal VAE groups pixels.

    Frame 0 alone, then groups of ``factors.time``: mean over the cell's pixels, maximum over its frames,
    above one half counts as 1 (the official rule, on the causal groups 1 + 8 + 8 instead of 8 + 8).
    """
    import torch.nn.functional as F

    cells = F.avg_pool2d(mask.float().unsqueeze(1), (factors.height, factors.width)).squeeze(1)
    rest = cells[1:]
    groups = rest.reshape(-1, factors.time, *cells.shape[1:]).amax(dim=1) if len(rest) else rest
    return (torch.cat([cells[:1], groups]) > 0.5).to(mask.dtype if mask.is_floating_point() else torch.float32)
