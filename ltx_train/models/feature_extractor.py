"""All hidden states of a Gemma folded into text features: normalised per layer, projected, summed as the layers go by."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from ..errors import CheckpointError
from .weights import WeightSource

EPS = 1e-6


@dataclass(frozen=True)
class Projection:
    """One projection over all layers: weight [L, out, hidden] (stored [out, hidden * L], layer fastest), bias [out] or None."""

    weight: Tensor
    bias: Tensor | None

    @property
    def width(self) -> int:
        return self.weight.shape[1]


@dataclass(frozen=True)
class FeatureExtractor:
    """``v1`` (LTX-2): range norm per caption and layer, one projection. ``v2`` (2.3, 2.5): RMS per token and layer, two projections.

    The concatenation of L layers times one matrix equals the sum of L small products, so a layer's state
    is used once and forgotten.
    """

    kind: str
    projections: dict[str, Projection]  # "video" and, for v2, "audio"

    @classmethod
    def load(
        cls, source: WeightSource, kind: str, *, hidden: int, states: int, device: torch.device | str, dtype: torch.dtype, encoder: str = "text encoder"
    ) -> FeatureExtractor:
        """Read the projection tensors (any prefix) and lay them out by layer.

        Raises CheckpointError when one is missing or made for an encoder of another size.
        """
        stems = {"video": "aggregate_embed"} if kind == "v1" else {"video": "video_aggregate_embed", "audio": "audio_aggregate_embed"}
        projections = {}
        for stream, stem in stems.items():
            prefix = next((n.removesuffix(".weight") for n in source.keys() if n.rpartition(".")[0].rpartition(".")[2] == stem and n.endswith(".weight")), None)
            if prefix is None:
                files = ", ".join(p.name for p in source.paths)
                raise CheckpointError("text_projection.missing", f"{files[:60]} lacks the text projection {stem}.", "It belongs to another LTX version.")
            out, width = source.info(f"{prefix}.weight").shape
            if width != hidden * states:
                raise CheckpointError(
                    "text_encoder.size",
                    f"{encoder} gives {states} x {hidden} numbers a token; the checkpoint's text projection reads {width}.",
                    "The encoder is of another size than the one this LTX model was trained with (12B: 49 states of 3840).",
                )
            weight = source.get(f"{prefix}.weight", dtype=dtype, device=device).view(out, hidden, states).permute(2, 0, 1).contiguous()
            bias = source.get(f"{prefix}.bias", dtype=dtype, device=device) if f"{prefix}.bias" in source else None
            projections[stream] = Projection(weight, bias)
        return cls(kind, projections)

    def begin(self, lengths: Tensor, tokens: int) -> FeatureSum:
        """Sums for one batch padded on the right to ``tokens``; lengths: [B]."""
        device = next(iter(self.projections.values())).weight.device
        sums = {name: torch.zeros(len(lengths), tokens, p.width, device=device) for name, p in self.projections.items()}
        return FeatureSum(self, lengths.to(device), sums)

    def normalised(self, state: Tensor, lengths: Tensor) -> Tensor:
        """One layer's state [B, n, hidden] normalised in float32; only the first ``lengths`` tokens of each row mean anything."""
        state = state.float()
        if self.kind == "v2":
            return state * torch.rsqrt(state.pow(2).mean(-1, keepdim=True) + EPS)
        valid = (torch.arange(state.shape[1], device=state.device) < lengths[:, None])[..., None]
        count = (lengths * state.shape[2]).view(-1, 1, 1) + EPS
        mean = state.masked_fill(~valid, 0.0).sum(dim=(1, 2), keepdim=True) / count
        low = state.masked_fill(~valid, float("inf")).amin(dim=(1, 2), keepdim=True)
        high = state.masked_fill(~valid, float("-inf")).amax(dim=(1, 2), keepdim=True)
        return (state - mean) / (high - low + EPS) * 8


@dataclass(frozen=True)
class FeatureSum:
    """Features of one batch while its layers go by; sums: stream -> [B, n, D] float32."""

    extractor: FeatureExtractor
    lengths: Tensor
    sums: dict[str, Tensor]

    def add(self, layer: int, state: Tensor) -> None:
        """Fold in hidden state number ``layer`` [B, n, hidden]."""
        normal = self.extractor.normalised(state, self.lengths)
        for stream, projection in self.extractor.projections.items():
            scale = (projection.width / state.shape[-1]) ** 0.5 if self.extractor.kind == "v2" else 1.0
            part = (normal * scale).to(projection.weight.dtype)
            self.sums[stream].add_(F.linear(part, projection.weight[layer]))

    def finish(self, dtype: torch.dtype) -> dict[str, list[Tensor]]:
        """Stream -> one [n, D] tensor of ``dtype`` on the CPU for each row, valid tokens only."""
        done: dict[str, list[Tensor]] = {}
        for stream, total in self.sums.items():
            bias = self.extractor.projections[stream].bias
            total = total if bias is None else total + bias.float()
            done[stream] = [row[:n].to("cpu", dtype).clone() for row, n in zip(total, self.lengths.tolist())]
        return done
