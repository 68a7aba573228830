"""Compiled blocks: one graph for every block and token count, keeping as many activations as a budget allows."""

from __future__ import annotations

import os
from pathlib import Path

import torch
from torch import Tensor

from ..models.transformer import BlockOutput
from .keeping import use_in_partitioner

GRAPHS = 64
"""Variants of the block that may be compiled: with and without gradients, batch sizes, skipped parts."""


def _block(block, video, audio, video_inputs, audio_inputs, keep) -> BlockOutput:
    return block(video, audio, video_inputs, audio_inputs, keep)


class CompiledBlock:
    """Runs a block through torch.compile. budget: see ``EngineSettings``; 0 recomputes all but what nothing needs."""

    def __init__(self, budget: float, backend: str = "inductor") -> None:
        import torch._functorch.config as partition
        from torch._dynamo import config

        for name in ("recompile_limit", "accumulated_recompile_limit", "cache_size_limit", "accumulated_cache_size_limit"):
            if hasattr(config, name):
                setattr(config, name, max(GRAPHS, getattr(config, name)))
        partition.activation_memory_budget = budget
        use_in_partitioner(partition)
        self.function = torch.compile(_block, fullgraph=True, backend=backend)

    def __call__(self, block, index, video, audio, video_inputs, audio_inputs, keep) -> BlockOutput:
        for tensor, inputs in ((video, video_inputs), (audio, audio_inputs)):
            if tensor is not None:
                for part in (tensor, inputs.row_index, *(inputs.rope or ()), *(inputs.cross_rope or ())):
                    _any_length(part)
        return self.function(block, video, audio, video_inputs, audio_inputs, keep)


def _any_length(tensor: Tensor | None) -> None:
    """Tell the compiler that axis 1, the tokens, may have any length. A single token stays what it is; once a tensor is enough."""
    if tensor is not None and tensor.ndim > 1 and tensor.shape[1] > 1 and 1 not in getattr(tensor, "_dynamo_dynamic_indices", ()):
        torch._dynamo.mark_dynamic(tensor, 1)


def keep_compiled_code(folder: Path | None = None) -> None:
    """Keep what Inductor and Triton compile between runs, in the user's cache, unless the environment says where."""
    folder = folder or Path(os.environ.get("XDG_CACHE_HOME") or os.environ.get("LOCALAPPDATA") or Path.home() / ".cache") / "ltx_train" / "compiled"
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(folder))
    os.environ.setdefault("TRITON_CACHE_DIR", str(folder / "triton"))
