"""Gemma 3 and Gemma 4 text decoders as plain torch: sizes from tensor shapes, one layer as a module, the shared tables.

Written out here instead of taken from a library because the trainer runs one layer at a time (a 12B model on a
12 GiB card), needs every layer's hidden state once, and must not ask for a newer library than ComfyUI ships.
The tests hold it to transformers' Gemma3TextModel and Gemma4UnifiedTextModel.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Shapes = Mapping[str, tuple[int, ...]]


@dataclass(frozen=True)
class GemmaLayerSpec:
    """One decoder layer's sizes. sliding: attends to the last ``window`` tokens only; has_value: False = V is K's projection."""

    heads: int
    kv_heads: int
    head_dim: int
    sliding: bool
    has_value: bool


@dataclass(frozen=True)
class GemmaConfig:
    """A Gemma text model. kind: ``gemma3`` or ``gemma4``."""

    kind: str
    vocab: int
    hidden: int
    intermediate: int
    layers: tuple[GemmaLayerSpec, ...]
    window: int = 1024
    eps: float = 1e-6
    scaling: float | None = None  # of the attention scores; None = head_dim ** -0.5
    sliding_theta: float = 10_000.0
    full_theta: float = 1_000_000.0
    full_factor: float = 1.0  # positions are divided by it (Gemma 3: linear scaling, 8)
    full_rotary: float = 1.0  # share of the angles that turn (Gemma 4: 0.25)

    @classmethod
    def derive(cls, kind: str, shapes: Shapes, settings: Mapping) -> GemmaConfig:
        """Sizes from tensor shapes (canonical names), the rest from ``settings`` (a ``text_config``) or the 12B constants.

        Head sizes always come from the tensors: configs name them differently between library versions.
        """
        vocab, hidden = shapes["embed_tokens.weight"]
        count = 1 + max(int(name.split(".")[1]) for name in shapes if name.startswith("layers."))
        kinds = _layer_kinds(kind, shapes, settings, count)
        layers = tuple(_layer_spec(shapes, f"layers.{i}.self_attn.", sliding) for i, sliding in enumerate(kinds))
        ropes = settings.get("rope_parameters") or {}
        full, local = ropes.get("full_attention") or {}, ropes.get("sliding_attention") or {}
        common = {
            "kind": kind,
            "vocab": vocab,
            "hidden": hidden,
            "intermediate": shapes["layers.0.mlp.gate_proj.weight"][0],
            "layers": layers,
            "window": settings.get("sliding_window") or 1024,
            "eps": settings.get("rms_norm_eps", 1e-6),
            "sliding_theta": local.get("rope_theta", settings.get("rope_local_base_freq", 10_000.0)),
            "full_theta": full.get("rope_theta", settings.get("rope_theta", 1_000_000.0)),
        }
        if kind == "gemma4":
            return cls(**common, scaling=1.0, full_rotary=full.get("partial_rotary_factor", 0.25))
        scalar = settings.get("query_pre_attn_scalar") or layers[0].head_dim
        factor = full.get("factor", 1.0) if full else (settings.get("rope_scaling") or {}).get("factor", 1.0)
        return cls(**common, scaling=scalar**-0.5, full_factor=factor if settings else 8.0)

    @property
    def states(self) -> int:
        """Hidden states a caption gives: the embedding and one a layer."""
        return len(self.layers) + 1


def _layer_kinds(kind: str, shapes: Shapes, settings: Mapping, count: int) -> list[bool]:
    """True = sliding, for every layer."""
    types = settings.get("layer_types")
    if types and len(types) == count:
        return [name == "sliding_attention" for name in types]
    if kind == "gemma4" and any(f"layers.{i}.self_attn.v_proj.weight" not in shapes for i in range(count)):
        return [f"layers.{i}.self_attn.v_proj.weight" in shapes for i in range(count)]
    pattern = settings.get("sliding_window_pattern") or settings.get("_sliding_window_pattern") or 6
    return [(i + 1) % pattern != 0 for i in range(count)]


def _layer_spec(shapes: Shapes, prefix: str, sliding: bool) -> GemmaLayerSpec:
    head_dim = shapes[f"{prefix}q_norm.weight"][0]
    heads, kv_heads = (shapes[f"{prefix}{name}.weight"][0] // head_dim for name in ("q_proj", "k_proj"))
    return GemmaLayerSpec(heads, kv_heads, head_dim, sliding, f"{prefix}v_proj.weight" in shapes)


class GemmaNorm(nn.Module):
    """RMS norm in float32; Gemma 3 stores weight - 1, Gemma 4 the weight itself, ``weight=False`` has none."""

    def __init__(self, dim: int, eps: float, *, offset: float, weight: bool = True) -> None:
        super().__init__()
        self.eps, self.offset = eps, offset
        self.weight = nn.Parameter(torch.empty(dim), requires_grad=False) if weight else None

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        if self.weight is not None:
            wide = wide * (self.weight.float() + self.offset)
        return wide.type_as(x)


@dataclass(frozen=True)
class GemmaTables:
    """What all layers of one forward share: rotary tables [B, 1, n, head_dim] and a mask [n, n], by layer kind.

    A mask of None means plain causal attention. Batches are padded on the right, where causal attention
    never looks, so no padding mask exists.
    """

    sliding: tuple[Tensor, Tensor]
    full: tuple[Tensor, Tensor]
    sliding_mask: Tensor | None


def gemma_tables(config: GemmaConfig, starts: Tensor, tokens: int, device: torch.device | str, dtype: torch.dtype) -> GemmaTables:
    """Rotary tables for positions starts..starts+tokens-1 and the sliding mask (key > query - window) where it cuts something.

    starts: [B], the position of each row's first token. Only distances matter to the model, but tables rounded
    to bfloat16 differ by place; the official encoder pads on the left, so a caption ends at the last position.
    """
    place = torch.arange(tokens, device=device)
    position = starts.to(device)[:, None, None] + place
    mask = None
    if tokens > config.window:
        distance = place[:, None] - place[None, :]
        mask = (distance >= 0) & (distance < config.window)

    def table(sliding: bool) -> tuple[Tensor, Tensor]:
        dim = next((spec.head_dim for spec in config.layers if spec.sliding == sliding), 2)
        turn = position.float()[..., None] * _frequencies(config, dim, sliding).to(device)
        angles = torch.cat([turn, turn], dim=-1)
        return angles.cos().to(dtype), angles.sin().to(dtype)

    return GemmaTables(table(True), table(False), mask)


def _frequencies(config: GemmaConfig, dim: int, sliding: bool) -> Tensor:
    """[dim / 2] float32: theta ** (-2k / dim), scaled down linearly (Gemma 3) or zero past the turning share (Gemma 4)."""
    theta = config.sliding_theta if sliding else config.full_theta
    lines = 1.0 / theta ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim)
    if sliding:
        return lines
    lines[int(config.full_rotary * dim // 2) :] = 0.0
    return lines / config.full_factor


def _rotate(x: Tensor, table: tuple[Tensor, Tensor]) -> Tensor:
    """x [B, heads, n, d] turned by [B, 1, n, d] tables, first half against second half."""
    cos, sin = table
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-second, first], dim=-1) * sin


class GemmaAttention(nn.Module):
    """Causal grouped-query attention with per-head norms on q and k (Gemma 4: on v too, without weight)."""

    def __init__(self, config: GemmaConfig, spec: GemmaLayerSpec) -> None:
        super().__init__()
        self.spec = spec
        self.scaling = config.scaling if config.scaling is not None else spec.head_dim**-0.5
        offset = 1.0 if config.kind == "gemma3" else 0.0
        wide, narrow = spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim
        self.q_proj = nn.Linear(config.hidden, wide, bias=False)
        self.k_proj = nn.Linear(config.hidden, narrow, bias=False)
        self.v_proj = nn.Linear(config.hidden, narrow, bias=False) if spec.has_value else None
        self.o_proj = nn.Linear(wide, config.hidden, bias=False)
        self.q_norm = GemmaNorm(spec.head_dim, config.eps, offset=offset)
        self.k_norm = GemmaNorm(spec.head_dim, config.eps, offset=offset)
        self.v_norm = GemmaNorm(spec.head_dim, config.eps, offset=0.0, weight=False) if config.kind == "gemma4" else None

    def forward(self, x: Tensor, tables: GemmaTables) -> Tensor:
        table, mask = (tables.sliding, tables.sliding_mask) if self.spec.sliding else (tables.full, None)
        split = lambda y: y.unflatten(-1, (-1, self.spec.head_dim)).transpose(1, 2)  # noqa: E731  [B, heads, n, d]
        raw_key = split(self.k_proj(x))
        query = _rotate(self.q_norm(split(self.q_proj(x))), table)
        key = _rotate(self.k_norm(raw_key), table)
        value = raw_key if self.v_proj is None else split(self.v_proj(x))
        value = value if self.v_norm is None else self.v_norm(value)
        groups = self.spec.heads // self.spec.kv_heads
        key, value = key.repeat_interleave(groups, dim=1), value.repeat_interleave(groups, dim=1)
        out = F.scaled_dot_product_attention(query, key, value, attn_mask=mask, is_causal=mask is None, scale=self.scaling)
        return self.o_proj(out.transpose(1, 2).flatten(2))


class GemmaMLP(nn.Module):
    """down(gelu_tanh(gate(x)) * up(x))."""

    def __init__(self, config: GemmaConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden, config.intermediate, bias=False)
        self.up_proj = nn.Linear(config.hidden, config.intermediate, bias=False)
        self.down_proj = nn.Linear(config.intermediate, config.hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.gelu(self.gate_proj(x), approximate="tanh") * self.up_proj(x))


class GemmaLayer(nn.Module):
    """One decoder layer, norms before and after both halves; parameter names are the checkpoint's below ``layers.N.``."""

    def __init__(self, config: GemmaConfig, index: int) -> None:
        super().__init__()
        offset = 1.0 if config.kind == "gemma3" else 0.0
        self.self_attn = GemmaAttention(config, config.layers[index])
        self.mlp = GemmaMLP(config)
        norms = ("input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm")
        for name in norms:
            setattr(self, name, GemmaNorm(config.hidden, config.eps, offset=offset))
        self.layer_scalar = nn.Parameter(torch.empty(1), requires_grad=False) if config.kind == "gemma4" else None

    def forward(self, x: Tensor, tables: GemmaTables) -> Tensor:
        x = x + self.post_attention_layernorm(self.self_attn(self.input_layernorm(x), tables))
        x = x + self.post_feedforward_layernorm(self.mlp(self.pre_feedforward_layernorm(x)))
        return x if self.layer_scalar is None else x * self.layer_scalar
