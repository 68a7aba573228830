"""Text features to the context that cross attention reads: the connectors of LTX-2.x, a masked pad for LTX-Video."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..errors import CheckpointError, DataError
from ..text import TOKEN_LIMITS, Context, TextFeatures
from .blank import blank
from .weights import WeightSource, load_weights

if TYPE_CHECKING:
    from .checkpoint import Checkpoint

EPS = 1e-6
MIN_TOKENS = 1024  # of a context: the length the models were trained with
CHUNK = 8  # captions a forward


@dataclass(frozen=True)
class ConnectorConfig:
    """One connector's sizes: read from its tensors, the rotary settings from the checkpoint's config."""

    heads: int
    head_dim: int
    blocks: int
    registers: int
    gated: bool
    ff_bias: bool
    max_position: int = 4096
    theta: float = 10_000.0
    rope_type: str = "split"
    double_precision: bool = True
    norm_output: bool = True

    @property
    def dim(self) -> int:
        return self.heads * self.head_dim

    @classmethod
    def derive(cls, source: WeightSource, settings: Mapping[str, Any], stream: str) -> ConnectorConfig:
        """source: names below the connector's prefix; settings: ``config.transformer``; audio falls back to ``connector_*``."""
        registers, dim = source.info("learnable_registers").shape
        names = set(source.keys())
        gate = "transformer_1d_blocks.0.attn1.to_gate_logits.weight"
        said = lambda key, default: settings.get(f"{stream}_connector_{key}", settings.get(f"connector_{key}", default))  # noqa: E731
        heads = source.info(gate).shape[0] if gate in names else said("num_attention_heads", max(1, dim // said("attention_head_dim", 128)))
        if dim % heads:
            raise CheckpointError("connectors.heads", f"The {stream} connector's width {dim} is not a multiple of {heads} heads.", "The config belongs to another checkpoint.")
        max_position = said("positional_embedding_max_pos", [4096])
        return cls(
            heads=heads,
            head_dim=dim // heads,
            blocks=1 + max(int(n.split(".")[1]) for n in names if n.startswith("transformer_1d_blocks.")),
            registers=registers,
            gated=gate in names,
            ff_bias="transformer_1d_blocks.0.ff.net.0.proj.bias" in names,
            max_position=max_position[0] if isinstance(max_position, (list, tuple)) else max_position,
            theta=settings.get("positional_embedding_theta", 10_000.0),
            rope_type=settings.get("rope_type", "split"),
            double_precision=settings.get("frequencies_precision", "float64") == "float64",
            norm_output=said("norm_output", True),
        )


class ConnectorAttention(nn.Module):
    """Full self-attention, RMS norm over all of q and of k, rotary positions, a gate 2 * sigmoid for each head."""

    def __init__(self, config: ConnectorConfig) -> None:
        super().__init__()
        self.config = config
        self.to_q, self.to_k, self.to_v = (nn.Linear(config.dim, config.dim) for _ in range(3))
        self.q_norm, self.k_norm = (nn.RMSNorm(config.dim, eps=EPS) for _ in range(2))
        self.to_gate_logits = nn.Linear(config.dim, config.heads) if config.gated else None
        self.to_out = nn.ModuleList([nn.Linear(config.dim, config.dim)])

    def forward(self, x: Tensor, rotary: tuple[Tensor, Tensor]) -> Tensor:
        split = lambda y: y.unflatten(-1, (self.config.heads, self.config.head_dim)).transpose(1, 2)  # noqa: E731  [B, heads, n, d]
        turn = _turn_split if self.config.rope_type == "split" else _turn_interleaved
        query, key = (turn(split(y), rotary) for y in (self.q_norm(self.to_q(x)), self.k_norm(self.to_k(x))))
        out = F.scaled_dot_product_attention(query, key, split(self.to_v(x)))
        if self.to_gate_logits is not None:
            out = out * (2.0 * torch.sigmoid(self.to_gate_logits(x))).transpose(1, 2).unsqueeze(-1)
        return self.to_out[0](out.transpose(1, 2).flatten(2))


class _Gelu(nn.Module):
    def __init__(self, dim: int, wide: int, bias: bool) -> None:
        super().__init__()
        self.proj = nn.Linear(dim, wide, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        return F.gelu(self.proj(x), approximate="tanh")


class ConnectorFeedForward(nn.Module):
    """Linear x4, tanh GELU, Linear (names ``net.0.proj`` and ``net.2``)."""

    def __init__(self, config: ConnectorConfig) -> None:
        super().__init__()
        wide = 4 * config.dim
        self.net = nn.Sequential(_Gelu(config.dim, wide, config.ff_bias), nn.Identity(), nn.Linear(wide, config.dim, bias=config.ff_bias))

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)


class ConnectorBlock(nn.Module):
    """x + attention(norm(x)), x + feed-forward(norm(x)); norms without weight."""

    def __init__(self, config: ConnectorConfig) -> None:
        super().__init__()
        self.attn1 = ConnectorAttention(config)
        self.ff = ConnectorFeedForward(config)

    def forward(self, x: Tensor, rotary: tuple[Tensor, Tensor]) -> Tensor:
        x = x + self.attn1(_rms(x), rotary)
        return x + self.ff(_rms(x))


class Connector(nn.Module):
    """One stream's connector; parameter names are the checkpoint's below ``<stream>_embeddings_connector.``."""

    def __init__(self, config: ConnectorConfig) -> None:
        super().__init__()
        self.config = config
        self.learnable_registers = nn.Parameter(torch.empty(config.registers, config.dim))
        self.transformer_1d_blocks = nn.ModuleList([ConnectorBlock(config) for _ in range(config.blocks)])

    def forward(self, x: Tensor) -> Tensor:
        """x [B, n, dim], padding already replaced by registers -> [B, n, dim]."""
        rotary = connector_rotary(self.config, x.shape[1], x.device)
        for block in self.transformer_1d_blocks:
            x = block(x, rotary)
        return _rms(x) if self.config.norm_output else x

    def padded(self, features: list[Tensor], minimum: int) -> Tensor:
        """[B, S, dim]: each caption's tokens in front, register (i mod count) in every later slot i.

        S: the longest caption or ``minimum``, rounded up to whole sets of registers.
        """
        registers = self.learnable_registers
        count = registers.shape[0]
        size = math.ceil(max(minimum, *(len(f) for f in features)) / count) * count
        x = registers.repeat(size // count, 1).expand(len(features), -1, -1).clone()
        for row, tokens in enumerate(features):
            x[row, : len(tokens)] = tokens.to(x)
        return x


def connector_rotary(config: ConnectorConfig, tokens: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """cos and sin, float32: [heads, n, head_dim / 2] split, [heads, n, head_dim] interleaved.

    Angle of slot p, line k: (2 p / max_position - 1) * theta ** (k / (dim / 2 - 1)) * pi / 2, lines over all heads.
    """
    precision = torch.float64 if config.double_precision else torch.float32
    ladder = torch.linspace(0.0, 1.0, config.dim // 2, dtype=precision, device=device)
    lines = (config.theta**ladder * (math.pi / 2)).float()
    place = torch.arange(tokens, dtype=torch.float32, device=device) / config.max_position * 2 - 1
    angles = place[:, None] * lines
    if config.rope_type == "interleaved":
        angles = angles.repeat_interleave(2, dim=-1)
    angles = angles.unflatten(-1, (config.heads, -1)).transpose(0, 1)
    return angles.cos(), angles.sin()


def _turn_split(x: Tensor, rotary: tuple[Tensor, Tensor]) -> Tensor:
    cos, sin = rotary
    first, second = x.float().chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).to(x.dtype)


def _turn_interleaved(x: Tensor, rotary: tuple[Tensor, Tensor]) -> Tensor:
    cos, sin = rotary
    even, odd = x.float().unflatten(-1, (-1, 2)).unbind(-1)
    turned = torch.stack([-odd, even], dim=-1).flatten(-2)
    return (x.float() * cos + turned * sin).to(x.dtype)


def _rms(x: Tensor) -> Tensor:
    return F.rms_norm(x, (x.shape[-1],), eps=EPS)


class Connectors:
    """The frozen connectors of the streams asked for; none for LTX-Video, whose T5 features are the context.

    kind: ``t5``, ``v1`` or ``v2``. streams: ``video``, ``audio``, those loaded.
    """

    def __init__(self, kind: str, networks: Mapping[str, Connector], *, device: torch.device, dtype: torch.dtype) -> None:
        self.kind, self.networks, self.device, self.dtype = kind, dict(networks), device, dtype

    @classmethod
    def load(cls, checkpoint: Checkpoint, *, video: bool = True, audio: bool = True, device: torch.device | str, dtype: torch.dtype) -> Connectors:
        """Read the connectors of the streams asked for; device ``meta`` builds them without weights.

        Raises CheckpointError when the checkpoint has none for a stream.
        """
        device, kind = torch.device(device), checkpoint.family.feature_kind
        if kind == "t5":
            return cls(kind, {}, device=device, dtype=dtype)
        source, settings = checkpoint.source("connectors"), checkpoint.config.get("transformer", {})
        wanted = [stream for stream, asked in (("video", video), ("audio", audio)) if asked]
        networks = {stream: load_connector(source, settings, stream, device=device, dtype=dtype) for stream in wanted}
        return cls(kind, networks, device=device, dtype=dtype)

    @property
    def streams(self) -> tuple[str, ...]:
        return tuple(self.networks)

    @property
    def nbytes(self) -> int:
        return sum(p.numel() * p.element_size() for net in self.networks.values() for p in net.parameters())

    def to(self, device: torch.device | str) -> Connectors:
        """The same connectors on another device."""
        return Connectors(self.kind, {k: n.to(device) for k, n in self.networks.items()}, device=torch.device(device), dtype=self.dtype)

    @torch.no_grad()
    def contexts(self, features: list[TextFeatures], minimum: int = MIN_TOKENS) -> Context:
        """One context a caption, stacked: [B, S, D] on the connectors' device.

        S is ``minimum`` for any caption the encoder reads (LTX-Video: 256, with a mask). Results do not depend
        on the company in the batch. Raises DataError when the features are of another family or lack audio.
        """
        assert features, "no captions"
        wrong = next((f.kind for f in features if f.kind != self.kind), None)
        if wrong is not None:
            raise DataError("text.family", f"The cached text features are of kind {wrong}, this model reads {self.kind}.", "Preprocess the captions again with this checkpoint.")
        if self.kind == "t5":
            return self._masked(features)
        streams: dict[str, Tensor] = {}
        for stream, network in self.networks.items():
            tokens = [self._tokens(f, stream, network) for f in features]
            chunks = [tokens[i : i + CHUNK] for i in range(0, len(tokens), CHUNK)]
            longest = max(minimum, *(len(t) for t in tokens))
            streams[stream] = torch.cat([network(network.padded(chunk, longest)) for chunk in chunks])
        return Context(streams.get("video"), streams.get("audio"), None)

    def _tokens(self, features: TextFeatures, stream: str, network: Connector) -> Tensor:
        tokens = features.video if stream == "video" or self.kind == "v1" else features.audio
        if tokens is None:
            raise DataError("text.no_audio", "The cached text features hold no audio part, which this model's audio stream reads.", "Preprocess the captions again.")
        if tokens.shape[-1] != network.config.dim:
            raise DataError(
                "text.width",
                f"The cached {stream} text features are {tokens.shape[-1]} wide, this model's connector reads {network.config.dim}.",
                "They were made for another checkpoint: preprocess the captions again.",
            )
        return tokens.to(self.device)

    def _masked(self, features: list[TextFeatures]) -> Context:
        size = max(TOKEN_LIMITS["t5"], *(len(f.video) for f in features))
        video = torch.zeros(len(features), size, features[0].video.shape[-1], dtype=self.dtype, device=self.device)
        mask = torch.zeros(len(features), size, dtype=torch.bool, device=self.device)
        for row, item in enumerate(features):
            video[row, : len(item.video)] = item.video.to(video)
            mask[row, : len(item.video)] = True
        return Context(video, None, mask)


def load_connector(source: WeightSource, settings: Mapping[str, Any], stream: str, *, device: torch.device, dtype: torch.dtype) -> Connector:
    """One stream's connector from tensors named ``[...]<stream>_embeddings_connector.`` (video-only files: ``embeddings_connector.``)."""
    mark = f"{stream}_embeddings_connector."
    name = next((n for n in source.keys() if mark in n), None)
    if name is None and stream == "video":
        mark = "embeddings_connector."
        name = next((n for n in source.keys() if mark in n and f"audio_{mark}" not in n), None)
    if name is None:
        files = ", ".join(p.name for p in source.paths)
        raise CheckpointError("connectors.missing", f"{files[:60]} holds no {stream} text connector.", "It is in the same file as the transformer: use that file, unpruned.")
    below = source.subset(name[: name.index(mark) + len(mark)])
    config = ConnectorConfig.derive(below, settings, stream)
    with blank():
        network = Connector(config)
    if device.type != "meta":
        load_weights(network, below, dtype=dtype, device=device)
    return network.requires_grad_(False).eval()
