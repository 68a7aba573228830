"""The T5 v1.1 encoder (LTX-Video's text model) as plain torch: sizes from tensor shapes, one block as a module.

The tests hold it to transformers' T5EncoderModel.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

RELATIVE_BIAS = "block.0.layer.0.SelfAttention.relative_attention_bias.weight"
MAX_DISTANCE = 128  # of the relative position buckets, as in every T5


@dataclass(frozen=True)
class T5Config:
    """A T5 encoder's sizes."""

    vocab: int
    hidden: int
    intermediate: int
    heads: int
    head_dim: int
    blocks: int
    buckets: int
    eps: float = 1e-6

    @classmethod
    def derive(cls, shapes: Mapping[str, tuple[int, ...]]) -> T5Config:
        """Sizes from tensor shapes (canonical names: ``block.N...``, ``embed_tokens.weight``)."""
        vocab, hidden = shapes["embed_tokens.weight"]
        buckets, heads = shapes[RELATIVE_BIAS]
        blocks = 1 + max(int(name.split(".")[1]) for name in shapes if name.startswith("block."))
        inner = shapes["block.0.layer.0.SelfAttention.q.weight"][0]
        intermediate = shapes["block.0.layer.1.DenseReluDense.wi_0.weight"][0]
        return cls(vocab, hidden, intermediate, heads, inner // heads, blocks, buckets)


class T5Norm(nn.Module):
    """RMS norm, statistics in float32, the product in the weight's dtype."""

    def __init__(self, dim: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(dim), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        scale = torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * (x * scale).to(self.weight.dtype)


class _Attention(nn.Module):
    def __init__(self, config: T5Config) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        inner = config.heads * config.head_dim
        self.q, self.k, self.v = (nn.Linear(config.hidden, inner, bias=False) for _ in range(3))
        self.o = nn.Linear(inner, config.hidden, bias=False)

    def forward(self, x: Tensor, bias: Tensor) -> Tensor:
        query, key, value = (part(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for part in (self.q, self.k, self.v))
        out = F.scaled_dot_product_attention(query, key, value, attn_mask=bias, scale=1.0)
        return self.o(out.transpose(1, 2).flatten(2))


class _SelfAttentionLayer(nn.Module):
    def __init__(self, config: T5Config) -> None:
        super().__init__()
        self.SelfAttention = _Attention(config)
        self.layer_norm = T5Norm(config.hidden, config.eps)

    def forward(self, x: Tensor, bias: Tensor) -> Tensor:
        return x + self.SelfAttention(self.layer_norm(x), bias)


class _GatedFeedForward(nn.Module):
    def __init__(self, config: T5Config) -> None:
        super().__init__()
        self.wi_0 = nn.Linear(config.hidden, config.intermediate, bias=False)
        self.wi_1 = nn.Linear(config.hidden, config.intermediate, bias=False)
        self.wo = nn.Linear(config.intermediate, config.hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.wo(F.gelu(self.wi_0(x), approximate="tanh") * self.wi_1(x))


class _FeedForwardLayer(nn.Module):
    def __init__(self, config: T5Config) -> None:
        super().__init__()
        self.DenseReluDense = _GatedFeedForward(config)
        self.layer_norm = T5Norm(config.hidden, config.eps)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.DenseReluDense(self.layer_norm(x))


class T5Block(nn.Module):
    """One encoder block; parameter names are the checkpoint's below ``block.N.``."""

    def __init__(self, config: T5Config) -> None:
        super().__init__()
        self.layer = nn.ModuleList([_SelfAttentionLayer(config), _FeedForwardLayer(config)])

    def forward(self, x: Tensor, bias: Tensor) -> Tensor:
        return self.layer[1](self.layer[0](x, bias))


def t5_bias(weight: Tensor, lengths: Tensor, tokens: int) -> Tensor:
    """[B, heads, n, n] added to the scores: the relative position bias, and the lowest value on padded keys.

    weight: [buckets, heads]. Buckets are bidirectional: exact for near distances, logarithmic up to 128.
    """
    position = torch.arange(tokens, device=weight.device)
    distance = position[None, :] - position[:, None]
    half = weight.shape[0] // 2
    exact = half // 2
    far = distance.abs().clamp(min=1).float() / exact
    far = exact + (far.log() / math.log(MAX_DISTANCE / exact) * (half - exact)).long()
    bucket = torch.where(distance.abs() < exact, distance.abs(), far.clamp(max=half - 1)) + (distance > 0).long() * half
    bias = weight[bucket].permute(2, 0, 1).unsqueeze(0)
    padded = position[None, :] >= lengths.to(weight.device)[:, None]
    return bias.expand(len(lengths), -1, -1, -1).masked_fill(padded[:, None, None, :], torch.finfo(weight.dtype).min)
