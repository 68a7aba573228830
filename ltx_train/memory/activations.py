"""Activation checkpointing: blocks whose activations are computed again in the backward pass instead of kept."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from ..models.transformer import BlockRunner, run_block


@dataclass(frozen=True)
class CheckpointedBlocks:
    """A block runner for ``LTXTransformer.block_runner``: keeps the inputs of the chosen blocks only.

    inner: what runs a block (plain, streamed, compiled). kept: the last so many blocks are run without recomputing, to trade
    free memory for time; the last ones, because their activations are needed first. dropout: an adapter has dropout, so
    the random state is kept to draw the same mask again. Only active where gradients are recorded.
    """

    inner: BlockRunner = run_block
    layers: int = 0
    kept: int = 0
    dropout: bool = False
    reentrant: bool = False

    def __call__(self, block, index, video, audio, video_inputs, audio_inputs, keep) -> tuple[Tensor | None, Tensor | None]:
        recompute = torch.is_grad_enabled() and index < self.layers - self.kept
        if not recompute:
            return self.inner(block, index, video, audio, video_inputs, audio_inputs, keep)
        if self.reentrant:
            return self._apart(block, index, video, audio, video_inputs, audio_inputs, keep)
        return checkpoint(self.inner, block, index, video, audio, video_inputs, audio_inputs, keep, use_reentrant=False, preserve_rng_state=self.dropout)

    def _apart(self, block, index, video, audio, video_inputs, audio_inputs, keep) -> tuple[Tensor | None, Tensor | None]:
        """A block whose backward pass is one of its own: all that may ask for a gradient stands among its arguments.

        What every block reads asks for one where an embedder or a projection outside of the blocks is adapted.
        """
        first = len(video_inputs or ())

        def run(video, audio, *parts):
            own = [None if given is None else type(given)(*values) for given, values in ((video_inputs, parts[:first]), (audio_inputs, parts[first:]))]
            return self.inner(block, index, video, audio, *own, keep)

        return checkpoint(run, video, audio, *(video_inputs or ()), *(audio_inputs or ()), use_reentrant=True, preserve_rng_state=self.dropout)


def checkpoint_activations(transformer, *, kept: int = 0, dropout: bool = False) -> None:
    """Put activation checkpointing around the transformer's present block runner."""
    transformer.block_runner = CheckpointedBlocks(transformer.block_runner, len(transformer.transformer_blocks), kept, dropout)
