"""The transformer block: attention, feed-forward, adaLN modulation and audio-video cross attention.

A block is a function of tensors only: what it does never depends on a tensor's values, so it can be compiled as one
graph with dynamic token counts, recomputed in backward, and its weights streamed in from elsewhere.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .embeddings import Rope, rotate
from .families import TransformerConfig
from .linear import Linear, project


class StreamInputs(NamedTuple):
    """All that one stream's half of every block reads beside the tokens; made once a forward.

    Modulation comes as rows of the distinct timesteps: ``rows`` [N, 6 or 9, D] and ``row_index`` [B, T] in 0..N-1,
    or ``row_index`` None where a sample has one timestep (then N = B).
    context [B, S, D]; context_bias [B, 1, 1, S] and attention_bias [B, 1, T, T] are added to attention logits.
    prompt_rows [B, 2, D]: adaLN of the prompt's MLP. cross_rows [N, 4, D], cross_gate_rows [B, 1, D] and cross_rope:
    of the audio-video cross attention, None where the other stream is absent.
    """

    context: Tensor
    rows: Tensor
    rope: Rope
    row_index: Tensor | None = None
    context_bias: Tensor | None = None
    attention_bias: Tensor | None = None
    prompt_rows: Tensor | None = None
    cross_rows: Tensor | None = None
    cross_gate_rows: Tensor | None = None
    cross_rope: Rope | None = None


class Keep(NamedTuple):
    """One block's keep masks [B] (1 = as usual, 0 = skipped); None where nothing is skipped."""

    video_self_attn: Tensor | None = None
    audio_self_attn: Tensor | None = None
    a2v_cross_attn: Tensor | None = None
    v2a_cross_attn: Tensor | None = None


def rms_norm(x: Tensor, eps: float) -> Tensor:
    """RMS norm over the last axis without a weight."""
    return F.rms_norm(x, x.shape[-1:], eps=eps)


def table_rows(table: Tensor, rows: Tensor | None, dtype: torch.dtype) -> Tensor:
    """A block's table [k, D] plus the shared adaLN rows [N, k, D], summed in float32 -> [N, k, D] in ``dtype``."""
    total = table.float().unsqueeze(0)
    return (total if rows is None else total + rows.float()).to(dtype)


def per_token(rows: Tensor, index: Tensor | None) -> Tensor:
    """Modulation of every token: [N, D] -> [B, T, D] picked by ``index``, or [N, 1, D] to broadcast."""
    return rows.unsqueeze(1) if index is None else F.embedding(index, rows)


def modulate(x: Tensor, scale: Tensor, shift: Tensor, index: Tensor | None) -> Tensor:
    """x * (1 + scale) + shift with rows [N, D] of the token's timestep."""
    return torch.addcmul(per_token(shift, index), x, per_token(1 + scale, index))


def add_gated(x: Tensor, update: Tensor, gate: Tensor, index: Tensor | None) -> Tensor:
    """x + update * gate with gate rows [N, D]."""
    return torch.addcmul(x, update, per_token(gate, index))


class Attention(nn.Module):
    """Multi-head attention with RMS-normed queries and keys (over the whole width), RoPE and an optional gate per head."""

    def __init__(
        self, query_dim: int, context_dim: int, heads: int, head_dim: int, *, eps: float, gated: bool = False, interleaved: bool = False
    ) -> None:
        super().__init__()
        inner = heads * head_dim
        self.heads, self.interleaved = heads, interleaved
        self.q_norm = nn.RMSNorm(inner, eps=eps)
        self.k_norm = nn.RMSNorm(inner, eps=eps)
        self.to_q = Linear(query_dim, inner)
        self.to_k = Linear(context_dim, inner)
        self.to_v = Linear(context_dim, inner)
        self.to_out = nn.ModuleList([Linear(inner, query_dim)])
        self.to_gate_logits = Linear(query_dim, heads) if gated else None

    def forward(
        self,
        x: Tensor,
        context: Tensor | None = None,
        *,
        bias: Tensor | None = None,
        rope: Rope | None = None,
        context_rope: Rope | None = None,
        keep: Tensor | None = None,
    ) -> Tensor:
        """x [B, T, query_dim], context [B, S, context_dim] (None: x itself) -> [B, T, query_dim].

        bias: additive, broadcast to [B, heads, T, S]. keep [B]: 0 passes the values through instead of attending
        (spatio-temporal guidance; self-attention only).
        """
        if context is None:
            query, key, value, *gate = project((self.to_q, self.to_k, self.to_v, *self._gates()), x)
        else:
            query, *gate = project((self.to_q, *self._gates()), x)
            key, value = project((self.to_k, self.to_v), context)
        query, key, value = self._split(self.q_norm(query)), self._split(self.k_norm(key)), self._split(value)
        if rope is not None:
            query = rotate(query, rope, self.interleaved)
            key = rotate(key, rope if context_rope is None else context_rope, self.interleaved)
        out = F.scaled_dot_product_attention(query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2), attn_mask=bias)
        out = out.transpose(1, 2)
        if keep is not None:
            out = torch.lerp(value, out, keep.to(out.dtype).view(-1, 1, 1, 1))
        if gate:
            out = out * (2 * torch.sigmoid(gate[0])).unsqueeze(-1)
        return self.to_out[0](out.flatten(2))

    def _gates(self) -> tuple[Linear, ...]:
        return () if self.to_gate_logits is None else (self.to_gate_logits,)

    def groups(self, own_context: bool) -> list[list[str]]:
        """Names of the linear layers that read the same input, in the order of :func:`project`."""
        gate = [] if self.to_gate_logits is None else ["to_gate_logits"]
        inputs = [["to_q", "to_k", "to_v", *gate]] if own_context else [["to_q", *gate], ["to_k", "to_v"]]
        return [*inputs, ["to_out.0"]]

    def _split(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (self.heads, -1))


class GeluProjection(nn.Module):
    """proj, then GELU in its tanh form."""

    def __init__(self, dim: int, inner: int, bias: bool) -> None:
        super().__init__()
        self.proj = Linear(dim, inner, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        return F.gelu(self.proj(x), approximate="tanh")


class FeedForward(nn.Module):
    """dim -> 4 dim -> dim; ``net.1`` (a dropout of 0 in the checkpoints' code) only keeps the numbering."""

    def __init__(self, dim: int, bias: bool) -> None:
        super().__init__()
        self.net = nn.ModuleList([GeluProjection(dim, 4 * dim, bias), nn.Identity(), Linear(4 * dim, dim, bias=bias)])

    def forward(self, x: Tensor) -> Tensor:
        return self.net[2](self.net[0](x))


def modulation_table(rows: int, dim: int) -> nn.Parameter:
    """Learned shifts, scales and gates [rows, dim], to which a timestep's are added."""
    table = torch.empty(rows, dim)
    return nn.Parameter(table if table.is_meta else torch.randn(rows, dim) / dim**0.5)


class TransformerBlock(nn.Module):
    """One block of both streams, or of the one asked for. Parameter names are the checkpoint's.

    Order of each stream: self-attention, text attention, audio-video cross attention (both directions read the
    states before either is updated), feed-forward. Table rows: 0-2 shift, scale, gate of self-attention; 3-5 of the
    feed-forward; 6-8 of text attention's queries. Cross tables: a2v scale, shift, v2a scale, shift, gate.
    """

    def __init__(self, config: TransformerConfig, *, video: bool, audio: bool) -> None:
        super().__init__()
        self.config = config
        if video:
            self._add_stream("", config.dim, config.cross_attention_dim, config.num_attention_heads, config.attention_head_dim, config.ff_bias)
        if audio:
            heads, head_dim = config.audio_num_attention_heads, config.audio_attention_head_dim
            self._add_stream("audio_", config.audio_dim, config.audio_cross_attention_dim, heads, head_dim, config.audio_ff_bias)
        if video and audio:
            self.audio_to_video_attn = self._attention(config.dim, config.audio_dim, heads, head_dim)
            self.video_to_audio_attn = self._attention(config.audio_dim, config.dim, heads, head_dim)
            self.scale_shift_table_a2v_ca_video = modulation_table(5, config.dim)
            self.scale_shift_table_a2v_ca_audio = modulation_table(5, config.audio_dim)

    def _attention(self, dim: int, context_dim: int, heads: int, head_dim: int) -> Attention:
        c = self.config
        return Attention(
            dim, context_dim, heads, head_dim, eps=c.qk_norm_eps, gated=c.gated_attention, interleaved=c.rope_type == "interleaved"
        )

    def _add_stream(self, prefix: str, dim: int, context_dim: int, heads: int, head_dim: int, ff_bias: bool) -> None:
        adaln = self.config.cross_attention_adaln
        self.add_module(f"{prefix}attn1", self._attention(dim, dim, heads, head_dim))
        self.add_module(f"{prefix}attn2", self._attention(dim, context_dim, heads, head_dim))
        self.add_module(f"{prefix}ff", FeedForward(dim, ff_bias))
        self.register_parameter(f"{prefix}scale_shift_table", modulation_table(9 if adaln else 6, dim))
        if adaln:
            self.register_parameter(f"{prefix}prompt_scale_shift_table", modulation_table(2, dim))

    def groups(self) -> list[list[str]]:
        """Names of all linear layers of the block, those that read the same input together."""
        found: list[list[str]] = []
        for name, child in self.named_children():
            if isinstance(child, Attention):
                found += [[f"{name}.{layer}" for layer in group] for group in child.groups(name.endswith("attn1"))]
            elif isinstance(child, FeedForward):
                found += [[f"{name}.net.0.proj"], [f"{name}.net.2"]]
        return found

    def forward(
        self,
        video: Tensor | None,
        audio: Tensor | None,
        video_inputs: StreamInputs | None = None,
        audio_inputs: StreamInputs | None = None,
        keep: Keep | None = None,
    ) -> tuple[Tensor | None, Tensor | None]:
        """video [B, T, D], audio [B, Ta, Da] -> the same after this block. A stream left out is None, with its inputs."""
        keep = keep or Keep()
        if video is not None:
            video_rows = table_rows(self.scale_shift_table, video_inputs.rows, video.dtype)
            video = self._attend("", video, video_inputs, video_rows, keep.video_self_attn)
        if audio is not None:
            audio_rows = table_rows(self.audio_scale_shift_table, audio_inputs.rows, audio.dtype)
            audio = self._attend("audio_", audio, audio_inputs, audio_rows, keep.audio_self_attn)
        if video is not None and audio is not None:
            video, audio = self._cross(video, audio, video_inputs, audio_inputs, keep)
        if video is not None:
            video = self._feed_forward(self.ff, video, video_inputs, video_rows)
        if audio is not None:
            audio = self._feed_forward(self.audio_ff, audio, audio_inputs, audio_rows)
        return video, audio

    def _attend(self, prefix: str, x: Tensor, inputs: StreamInputs, rows: Tensor, keep: Tensor | None) -> Tensor:
        """Self-attention, then text attention."""
        c, index = self.config, inputs.row_index
        attn1, attn2 = getattr(self, f"{prefix}attn1"), getattr(self, f"{prefix}attn2")
        queries = modulate(rms_norm(x, c.norm_eps), rows[:, 1], rows[:, 0], index)
        x = add_gated(x, attn1(queries, bias=inputs.attention_bias, rope=inputs.rope, keep=keep), rows[:, 2], index)

        queries = rms_norm(x, c.norm_eps) if c.norm_before_cross_attention else x
        if not c.cross_attention_adaln:
            return x + attn2(queries, inputs.context, bias=inputs.context_bias)
        prompt = table_rows(getattr(self, f"{prefix}prompt_scale_shift_table"), inputs.prompt_rows, x.dtype)
        queries = modulate(queries, rows[:, 7], rows[:, 6], index)
        context = modulate(inputs.context, prompt[:, 1], prompt[:, 0], None)
        return add_gated(x, attn2(queries, context, bias=inputs.context_bias), rows[:, 8], index)

    def _cross(self, video: Tensor, audio: Tensor, v: StreamInputs, a: StreamInputs, keep: Keep) -> tuple[Tensor, Tensor]:
        """Audio-to-video and video-to-audio attention. Each stream's scale and shift follow its own timesteps, its gate
        the other stream's sigma (``cross_gate_rows``)."""
        eps, dtype = self.config.norm_eps, video.dtype
        v_table, a_table = self.scale_shift_table_a2v_ca_video, self.scale_shift_table_a2v_ca_audio
        v_rows, a_rows = table_rows(v_table[:4], v.cross_rows, dtype), table_rows(a_table[:4], a.cross_rows, dtype)
        v_gate, a_gate = table_rows(v_table[4:], v.cross_gate_rows, dtype)[:, 0], table_rows(a_table[4:], a.cross_gate_rows, dtype)[:, 0]
        if keep.a2v_cross_attn is not None:
            v_gate = v_gate * keep.a2v_cross_attn.to(dtype).unsqueeze(-1)
        if keep.v2a_cross_attn is not None:
            a_gate = a_gate * keep.v2a_cross_attn.to(dtype).unsqueeze(-1)
        v_normed, a_normed = rms_norm(video, eps), rms_norm(audio, eps)
        to_video = self.audio_to_video_attn(
            modulate(v_normed, v_rows[:, 0], v_rows[:, 1], v.row_index),
            modulate(a_normed, a_rows[:, 0], a_rows[:, 1], a.row_index),
            rope=v.cross_rope,
            context_rope=a.cross_rope,
        )
        to_audio = self.video_to_audio_attn(
            modulate(a_normed, a_rows[:, 2], a_rows[:, 3], a.row_index),
            modulate(v_normed, v_rows[:, 2], v_rows[:, 3], v.row_index),
            rope=a.cross_rope,
            context_rope=v.cross_rope,
        )
        return add_gated(video, to_video, v_gate, None), add_gated(audio, to_audio, a_gate, None)

    def _feed_forward(self, ff: FeedForward, x: Tensor, inputs: StreamInputs, rows: Tensor) -> Tensor:
        hidden = modulate(rms_norm(x, self.config.norm_eps), rows[:, 4], rows[:, 3], inputs.row_index)
        return add_gated(x, ff(hidden), rows[:, 5], inputs.row_index)
