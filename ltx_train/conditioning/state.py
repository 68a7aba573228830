"""LatentState: one stream's tokens and what is to be done with each; training noises it once, sampling step by step."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..geometry import AudioGrid, Grid, Latents, VideoGrid, unpatchify
from ..models.modality import Modality
from ..text import Context


def time_slices(grid: Grid) -> tuple[int, int]:
    """(number of time slices, tokens in one): latent frames of H*W tokens, or latent time steps of one token."""
    return (grid.frames, grid.tokens_per_frame) if isinstance(grid, VideoGrid) else (grid.steps, 1)


@dataclass(frozen=True)
class LatentState:
    """Tokens of one stream: the targets first (``num_target`` of them, on ``grid``), then appended references.

    clean: [B, T, C] float32, the tokens without noise. denoise: [B, T] float32, 1 = generate, 0 = keep clean.
    positions: [B, 3 or 1, T, 2] float32. loss_weight: [B, T] float32, 0 on what is given.
    keyframes: [B, T] bool, tokens that carry the 2.5 keyframe marker, or None for models without one.
    attention_mask: [B, T, T] in 0..1 or None.
    levels: the values that may occur in denoise, known without reading it, or None when they are not known.

    The one formula, with d = denoise and s = the sample's noise level:
    x = clean + d*s*(noise - clean), timestep = d*s, target = noise - clean.
    """

    clean: Tensor
    denoise: Tensor
    positions: Tensor
    loss_weight: Tensor
    num_target: int
    grid: Grid
    keyframes: Tensor | None = None
    attention_mask: Tensor | None = None
    levels: tuple[float, ...] | None = (1.0,)

    @classmethod
    def of(cls, latents: Latents, *, keyframe_marker: bool = False) -> LatentState:
        """A state that generates every token of ``latents``.

        keyframe_marker: the model has the 2.5 keyframe embedding; a video's first latent frame then carries the
        marker, in training as at inference.
        """
        tokens = latents.tokens.float()
        ones = torch.ones(tokens.shape[:2], device=tokens.device)
        keyframes = None
        if keyframe_marker and isinstance(latents.grid, VideoGrid):
            keyframes = latents.grid.first_frame(tokens.device).expand(tokens.shape[:2])
        return cls(tokens, ones, latents.positions, ones, tokens.shape[1], latents.grid, keyframes)

    @classmethod
    def blank(cls, grid: Grid, *, channels: int, batch: int = 1, device: torch.device | str = "cpu", keyframe_marker: bool = False) -> LatentState:
        """The start of sampling: nothing is known, every token of ``grid`` is generated. channels: per token."""
        if isinstance(grid, VideoGrid):
            values = torch.zeros(batch, channels, grid.frames, grid.height, grid.width, device=device)
        else:
            values = torch.zeros(batch, channels // grid.bins, grid.steps, grid.bins, device=device)
        return cls.of(Latents(values, grid), keyframe_marker=keyframe_marker)

    @property
    def batch(self) -> int:
        return self.clean.shape[0]

    @property
    def tokens(self) -> int:
        """All tokens of one sample, appended references included."""
        return self.clean.shape[1]

    @property
    def device(self) -> torch.device:
        return self.clean.device

    # ---- edits, used by the conditions ----
    def frozen(self) -> LatentState:
        """The whole stream given: no noise, timestep 0, no loss."""
        zeros = torch.zeros_like(self.denoise)
        return replace(self, denoise=zeros, loss_weight=zeros, levels=(0.0,))

    def held(self, mask: Tensor, content: Tensor | None = None) -> LatentState:
        """Target tokens where ``mask`` is true are given: denoise 0 and no loss there.

        mask: [num_target] or [B, num_target], bool or 0/1. content: [B or 1, num_target, C] clean tokens to put
        there first, or None to keep the state's own.
        """
        given = mask.to(self.clean.dtype).expand(self.batch, self.num_target)
        given = torch.nn.functional.pad(given, (0, self.tokens - self.num_target))
        clean = self.clean
        if content is not None:
            content = torch.nn.functional.pad(content.to(clean), (0, 0, 0, self.tokens - self.num_target))
            clean = torch.where(given[..., None] > 0, content, clean)
        free = 1 - given
        return replace(self, clean=clean, denoise=self.denoise * free, loss_weight=self.loss_weight * free, levels=self._with_zero())

    def appended(self, tokens: Tensor, positions: Tensor) -> LatentState:
        """Further clean tokens [B, R, C] at ``positions`` [B, n, R, 2] after all others: timestep 0, no loss, no marker."""
        rows = torch.zeros(self.batch, tokens.shape[1], device=self.device)
        join = lambda a, b, dim: torch.cat([a, b.to(a)], dim=dim)  # noqa: E731
        return replace(
            self,
            clean=join(self.clean, tokens, 1),
            denoise=join(self.denoise, rows, 1),
            loss_weight=join(self.loss_weight, rows, 1),
            positions=join(self.positions, positions, 2),
            keyframes=None if self.keyframes is None else join(self.keyframes, rows, 1),
            levels=self._with_zero(),
        )

    def _with_zero(self) -> tuple[float, ...] | None:
        return None if self.levels is None else (*self.levels, 0.0) if 0.0 not in self.levels else self.levels

    # ---- the formula ----
    def timesteps(self, sigma: Tensor) -> Tensor:
        """[B, T]: d*s, the noise level of each token. sigma: [B]."""
        return self.denoise * sigma[:, None]

    def noised(self, noise: Tensor, sigma: Tensor) -> Tensor:
        """[B, T, C]: clean + d*s*(noise - clean). noise: [B, T, C], or [B, num_target, C] for the targets alone."""
        if noise.shape[1] != self.tokens:
            assert noise.shape[1] == self.num_target, f"noise of {noise.shape[1]} tokens for {self.num_target} targets"
            noise = torch.cat([noise, self.clean[:, self.num_target :]], dim=1)
        return self.clean + self.timesteps(sigma)[..., None] * (noise - self.clean)

    def target(self, noise: Tensor) -> Tensor:
        """[B, num_target, C]: the velocity noise - clean that the model should give."""
        return noise[:, : self.num_target] - self.clean[:, : self.num_target]

    def blended(self, prediction: Tensor) -> Tensor:
        """[B, T, C]: a predicted clean latent with what is given put back: prediction*d + clean*(1-d)."""
        return self.clean + self.denoise[..., None] * (prediction - self.clean)

    def modality(self, tokens: Tensor, sigma: Tensor, context: Context) -> Modality:
        """What the transformer reads. tokens: [B, T, C] noisy; sigma: [B] of the stream, 0 for a frozen one."""
        text = context.video if isinstance(self.grid, VideoGrid) else context.audio
        assert text is not None, "the context lacks this stream's features"
        rows, index = self._compact(sigma)
        return Modality(
            tokens=tokens,
            sigma=sigma,
            timesteps=self.timesteps(sigma),
            positions=self.positions,
            context=text,
            context_mask=context.mask,
            keyframes=self.keyframes,
            attention_mask=self.attention_mask,
            timestep_rows=rows,
            row_index=index,
        )

    def _compact(self, sigma: Tensor) -> tuple[Tensor | None, Tensor | None]:
        """The timesteps' few distinct values [B, R] and each token's place among them [B, T]."""
        if self.levels is None:
            return None, None
        levels = torch.tensor(self.levels, device="cpu").to(self.device, non_blocking=True)
        rows = sigma[:, None] * levels
        if len(self.levels) == 1:
            return rows, None
        return rows, (self.denoise[..., None] - levels).abs().argmin(dim=-1)

    def targets(self, tokens: Tensor) -> Latents:
        """The target part of ``tokens`` [B, T, C] back on the grid."""
        return Latents(unpatchify(tokens[:, : self.num_target], self.grid), self.grid)


def stream_name(grid: Grid) -> str:
    """``video`` or ``audio``."""
    return "audio" if isinstance(grid, AudioGrid) else "video"
