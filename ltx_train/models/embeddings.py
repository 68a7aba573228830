"""What enters the transformer beside the tokens: timestep embeddings, adaLN rows, caption projection, RoPE tables."""

from __future__ import annotations

import math
from collections import OrderedDict
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .linear import Linear

TIMESTEP_WIDTH = 256


def timestep_features(timesteps: Tensor, width: int = TIMESTEP_WIDTH) -> Tensor:
    """[N] timesteps on the embedding's scale (0..1000) -> [N, width] float32: cosines, then sines.

    Frequencies 10000^(-k / (width/2)), k = 0 .. width/2 - 1 (the DDPM embedding, sines and cosines swapped).
    """
    half = width // 2
    exponent = torch.arange(half, dtype=torch.float32, device=timesteps.device) * (-math.log(10000.0) / half)
    angles = timesteps.float().unsqueeze(-1) * exponent.exp()
    return torch.cat([angles.cos(), angles.sin()], dim=-1)


class TimestepEmbedder(nn.Module):
    """features -> linear_1 -> SiLU -> linear_2."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.linear_1 = Linear(TIMESTEP_WIDTH, dim)
        self.linear_2 = Linear(dim, dim)

    def forward(self, features: Tensor) -> Tensor:
        return self.linear_2(F.silu(self.linear_1(features)))


class _Embedding(nn.Module):
    """The checkpoint's extra level of naming: ``emb.timestep_embedder``."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.timestep_embedder = TimestepEmbedder(dim)


class AdaLNSingle(nn.Module):
    """Timesteps to ``count`` modulation rows of width ``dim``, shared by all blocks (PixArt's adaLN-single)."""

    def __init__(self, dim: int, count: int) -> None:
        super().__init__()
        self.count = count
        self.emb = _Embedding(dim)
        self.linear = Linear(dim, count * dim)

    def forward(self, timesteps: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """[N] timesteps (0..1000) -> rows [N, count, dim] and the embedded timestep [N, dim], in ``dtype``."""
        embedded = self.emb.timestep_embedder(timestep_features(timesteps).to(dtype))
        return self.linear(F.silu(embedded)).unflatten(-1, (self.count, -1)), embedded


class CaptionProjection(nn.Module):
    """Text features to the stream's width: linear_1 -> GELU (tanh) -> linear_2."""

    def __init__(self, in_features: int, dim: int) -> None:
        super().__init__()
        self.linear_1 = Linear(in_features, dim)
        self.linear_2 = Linear(dim, dim)

    def forward(self, features: Tensor) -> Tensor:
        return self.linear_2(F.gelu(self.linear_1(features), approximate="tanh"))


class Rope(NamedTuple):
    """Cosines and sines [B, T, heads, head_dim / 2] float32 of one stream's rotary embedding."""

    cos: Tensor
    sin: Tensor


TABLE_BYTES = 128 << 20
"""Room for the tables that one :class:`RotaryEmbedding` keeps; the newest is kept whatever its size."""


class RotaryEmbedding:
    """Positions to rotary tables. Heads hold different frequencies: the table spans the whole width, then is cut.

    angle = theta^linspace(0, 1, n) * pi/2 * (2 p / max_pos - 1), n = width // (2 * axes) frequencies an axis, laid out
    frequency-major with the axis fastest, padded in front by rotations of zero up to width / 2.
    It holds no weights, so it is no module: the frequencies are made on the CPU (float64 everywhere) and kept by device.
    Tables are kept too, by the positions' own memory and version: a bucket's tables are made once. Comparing numbers
    instead would wait for the device.
    """

    def __init__(self, width: int, heads: int, max_pos: tuple[float, ...], *, theta: float, precision: str, middle: bool) -> None:
        assert width % (2 * heads) == 0, f"width {width} for {heads} heads"
        self.width, self.heads, self.max_pos, self.middle = width, heads, max_pos, middle
        dtype = torch.float64 if precision == "float64" else torch.float32
        exponents = torch.linspace(0.0, 1.0, width // (2 * len(max_pos)), dtype=dtype, device="cpu")
        self._frequencies = {torch.device("cpu"): (theta**exponents * math.pi / 2.0).to(torch.float32)}
        self._tables: OrderedDict[tuple, tuple[Tensor, Rope]] = OrderedDict()

    def frequencies(self, device: torch.device) -> Tensor:
        """[n] float32 on ``device``."""
        if device not in self._frequencies:
            self._frequencies[device] = self._frequencies[torch.device("cpu")].to(device)
        return self._frequencies[device]

    def __call__(self, positions: Tensor) -> Rope:
        """positions [B, axes, T, 2] (start, end) in the units of ``max_pos`` -> tables [B, T, heads, head_dim / 2]."""
        assert positions.shape[1] == len(self.max_pos), f"{tuple(positions.shape)} for {len(self.max_pos)} axes"
        key = _memory_of(positions)
        if key is None:
            return self.tables(positions)
        if key not in self._tables:
            with torch.inference_mode(False):  # a preview's tables serve training too
                self._tables[key] = (positions, self.tables(positions))  # held: its memory is nobody else's meanwhile
            while len(self._tables) > 1 and sum(rope.cos.nbytes + rope.sin.nbytes for _, rope in self._tables.values()) > TABLE_BYTES:
                self._tables.popitem(last=False)
        self._tables.move_to_end(key)
        return self._tables[key][1]

    @torch.no_grad()
    def tables(self, positions: Tensor) -> Rope:
        """See the call; always computed."""
        positions = positions.float()
        at = (positions[..., 0] + positions[..., 1]) / 2.0 if self.middle else positions[..., 0]
        fraction = torch.stack([at[:, axis] / limit for axis, limit in enumerate(self.max_pos)], dim=-1)
        angles = (fraction * 2 - 1).unsqueeze(-2) * self.frequencies(positions.device).unsqueeze(-1)  # [B, T, n, axes]
        angles = F.pad(angles.flatten(2), (self.width // 2 - angles.shape[-2] * angles.shape[-1], 0))
        angles = angles.unflatten(-1, (self.heads, -1))
        return Rope(angles.cos(), angles.sin())


def _memory_of(positions: Tensor) -> tuple | None:
    """What tells the same unchanged numbers again without reading them; None where nothing may be kept."""
    if positions.is_meta or positions.is_inference() or positions.requires_grad or torch.compiler.is_compiling():
        return None
    if positions.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        return None  # a recorded pass is given other positions later
    place = (positions.untyped_storage().data_ptr(), positions.storage_offset(), positions.shape, positions.stride())
    return (*place, positions.dtype, positions.device, positions._version)


def rotate(x: Tensor, rope: Rope, interleaved: bool) -> Tensor:
    """Rotates pairs of x [B, T, heads, d] in float32, back in x's dtype.

    split: component k is paired with k + d/2; interleaved: 2k with 2k + 1.
    """
    first, second = x.unflatten(-1, (-1, 2)).unbind(-1) if interleaved else x.chunk(2, dim=-1)
    turned = (first * rope.cos - second * rope.sin, second * rope.cos + first * rope.sin)
    out = torch.stack(turned, dim=-1).flatten(-2) if interleaved else torch.cat(turned, dim=-1)
    return out.to(x.dtype)
