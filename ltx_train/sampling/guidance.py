"""Guidance: classifier-free, spatio-temporal (STG), modality guidance and rescale, each stream with its own scales."""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import Tensor

from ..errors import ConfigError


@dataclass(frozen=True)
class Guidance:
    """One stream's scales; cfg 1, stg 0, modality 1 and rescale 0 do nothing, and their passes are not run.

    cfg_star: project the unguided prediction onto the guided one before classifier-free guidance (CFG-Zero*).
    """

    cfg: float = 1.0
    stg: float = 0.0
    modality: float = 1.0
    rescale: float = 0.0
    cfg_star: bool = False

    @property
    def neutral(self) -> bool:
        return self.cfg == 1 and self.stg == 0 and self.modality == 1

    def combine(self, cond: Tensor, text: Tensor | None = None, perturbed: Tensor | None = None, isolated: Tensor | None = None) -> Tensor:
        """The guided clean prediction, in float32 (official formula):

        p = c + (cfg - 1)(c - text) + stg (c - perturbed) + (modality - 1)(c - isolated), then
        p * (rescale * std(c) / std(p) + 1 - rescale) with the deviations over the whole tensor, given tokens included.

        text: with the negative prompt; perturbed: with self-attention skipped; isolated: without the other stream.
        """
        c = cond.float()
        p = c
        if text is not None and self.cfg != 1:
            p = p + (self.cfg - 1) * (c - (self._projected(c, text.float()) if self.cfg_star else text.float()))
        if perturbed is not None and self.stg != 0:
            p = p + self.stg * (c - perturbed.float())
        if isolated is not None and self.modality != 1:
            p = p + (self.modality - 1) * (c - isolated.float())
        if self.rescale and not self.neutral:
            p = p * (self.rescale * c.std() / p.std() + 1 - self.rescale)
        return p

    @staticmethod
    def _projected(cond: Tensor, text: Tensor) -> Tensor:
        """The unguided prediction scaled by <c, u> / <u, u>, for each sample."""
        c, u = cond.flatten(1), text.flatten(1)
        scale = (c * u).sum(1) / (u.square().sum(1) + 1e-8)
        return text * scale.view(-1, *[1] * (text.ndim - 1))


@dataclass(frozen=True)
class StreamGuidance:
    """Guidance of both streams. stg_blocks: blocks whose self-attention STG skips, None for all."""

    video: Guidance = Guidance()
    audio: Guidance = Guidance()
    stg_blocks: tuple[int, ...] | None = None

    def __getitem__(self, modality: str) -> Guidance:
        return getattr(self, modality)

    def settled(self, generated: tuple[str, ...], present: tuple[str, ...]) -> StreamGuidance:
        """With neutral scales where they mean nothing: modality guidance without the other stream, all of a frozen stream."""
        sides = {}
        for modality in ("video", "audio"):
            own = self[modality]
            if modality not in generated:
                own = Guidance()
            elif len(present) < 2:
                own = replace(own, modality=1.0)
            sides[modality] = own
        return replace(self, **sides)

    def blocks(self, num_layers: int) -> tuple[int, ...]:
        """The STG blocks of a model; ConfigError for one that it does not have."""
        chosen = tuple(range(num_layers)) if self.stg_blocks is None else self.stg_blocks
        wrong = [b for b in chosen if not 0 <= b < num_layers]
        if wrong:
            raise ConfigError("sampling.stg_blocks", f"stg_blocks: the model has no block {wrong[0]}.", f"It has blocks 0 to {num_layers - 1}.")
        return chosen
