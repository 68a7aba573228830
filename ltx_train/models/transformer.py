"""The transformer of every LTX family: Modality in, velocity out, for the streams asked for."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..transfer import upload
from .blank import blank
from .blocks import Keep, StreamInputs, TransformerBlock, modulate, modulation_table, table_rows
from .embeddings import AdaLNSingle, CaptionProjection, RotaryEmbedding
from .families import TransformerConfig
from .linear import Linear
from .modality import Modality
from .weights import WeightSource, load_weights

if TYPE_CHECKING:
    from .checkpoint import Checkpoint

BlockOutput = tuple[Tensor | None, Tensor | None]


class BlockRunner(Protocol):
    """Runs block ``index``; the place for activation checkpointing, weight streaming and compiled blocks.

    One with a method ``expect(passes)`` is told before block 0 how many passes go through each block one after another.
    """

    def __call__(
        self,
        block: TransformerBlock,
        index: int,
        video: Tensor | None,
        audio: Tensor | None,
        video_inputs: StreamInputs | None,
        audio_inputs: StreamInputs | None,
        keep: Keep | None,
    ) -> BlockOutput: ...


def run_block(block, index, video, audio, video_inputs, audio_inputs, keep) -> BlockOutput:
    """The plain runner: calls the block."""
    return block(video, audio, video_inputs, audio_inputs, keep)


@dataclass(frozen=True)
class Perturbations:
    """What guidance leaves out: keep masks [blocks, B] (1 = keep, 0 = skip), None where nothing is skipped.

    A skipped self-attention passes its values through; a skipped cross attention adds nothing. Best kept on the CPU:
    blocks that skip nothing are found there without waiting for the accelerator.
    """

    skip_video_self_attn: Tensor | None = None
    skip_audio_self_attn: Tensor | None = None
    skip_a2v_cross_attn: Tensor | None = None
    skip_v2a_cross_attn: Tensor | None = None

    @classmethod
    def self_attention(cls, num_layers: int, batch: int, blocks: Iterable[int], *, video: bool = True, audio: bool = True) -> Perturbations:
        """Self-attention of ``blocks`` skipped in every sample (spatio-temporal guidance)."""
        keep = torch.ones(num_layers, batch)
        keep[list(blocks)] = 0.0
        return cls(skip_video_self_attn=keep if video else None, skip_audio_self_attn=keep if audio else None)

    @classmethod
    def isolated(cls, num_layers: int, batch: int) -> Perturbations:
        """Both cross attentions skipped everywhere (modality guidance)."""
        keep = torch.zeros(num_layers, batch)
        return cls(skip_a2v_cross_attn=keep, skip_v2a_cross_attn=keep)

    def blocks(self, num_layers: int, device: torch.device) -> list[Keep | None]:
        """The masks by block, on ``device``."""
        per_type = []
        for field in fields(self):
            mask = getattr(self, field.name)
            if mask is None:
                per_type.append([None] * num_layers)
                continue
            assert mask.shape[0] == num_layers, f"{field.name} {tuple(mask.shape)} for {num_layers} blocks"
            kept = (mask == 1).all(dim=1).tolist()
            on_device = upload(mask, device)
            per_type.append([None if whole else on_device[i] for i, whole in enumerate(kept)])
        return [None if all(m is None for m in masks) else Keep(*masks) for masks in zip(*per_type)]


@dataclass
class _Pass:
    """A forward pass between two blocks: its tokens so far, what every block reads, what the heads will."""

    video: Tensor | None
    audio: Tensor | None
    video_inputs: StreamInputs | None
    audio_inputs: StreamInputs | None
    keeps: list[Keep | None]
    heads: dict[str, tuple[Tensor, Tensor | None]]


PassInputs = tuple[Modality | None, Modality | None, Perturbations | None]
"""What one forward pass is given: video, audio, perturbations."""


class LTXTransformer(nn.Module):
    """LTX-Video, LTX-2, 2.3 and 2.5: one transformer, its differences read from ``config``.

    Module names are the checkpoint's without ``model.diffusion_model.``. ``video`` and ``audio`` say which streams are
    built; a stream that is built may still be left out of a forward. ``block_runner`` runs each block.
    """

    def __init__(self, config: TransformerConfig, *, video: bool = True, audio: bool = True) -> None:
        super().__init__()
        audio = audio and config.has_audio
        assert video or audio, "no stream asked for"
        self.config, self.has_video, self.has_audio = config, video, audio
        self.block_runner: BlockRunner = run_block
        self.pass_runner: Callable[[Sequence[PassInputs]], list[BlockOutput]] | None = None
        c = config
        if video:
            self._add_stream("", c.dim, c.in_channels, c.out_channels)
            if c.keyframe_embedding:
                self.keyframes_abs_pos_embedding = nn.Parameter(torch.zeros(1, c.dim))
            self.rope = self._rotary(c.dim, c.num_attention_heads, c.positional_embedding_max_pos)
        if audio:
            self._add_stream("audio_", c.audio_dim, c.audio_in_channels, c.audio_out_channels)
            self.audio_rope = self._rotary(c.audio_dim, c.audio_num_attention_heads, (c.audio_positional_embedding_max_pos,))
        if video and audio:
            self.av_ca_video_scale_shift_adaln_single = AdaLNSingle(c.dim, 4)
            self.av_ca_audio_scale_shift_adaln_single = AdaLNSingle(c.audio_dim, 4)
            self.av_ca_a2v_gate_adaln_single = AdaLNSingle(c.dim, 1)
            self.av_ca_v2a_gate_adaln_single = AdaLNSingle(c.audio_dim, 1)
            seconds = max(c.positional_embedding_max_pos[0], c.audio_positional_embedding_max_pos)
            self.cross_rope = self._rotary(c.audio_dim, c.audio_num_attention_heads, (seconds,))
        self.transformer_blocks = nn.ModuleList(TransformerBlock(c, video=video, audio=audio) for _ in range(c.num_layers))

    def _rotary(self, width: int, heads: int, max_pos: tuple[float, ...]) -> RotaryEmbedding:
        c = self.config
        return RotaryEmbedding(
            width, heads, max_pos, theta=c.positional_embedding_theta, precision=c.frequencies_precision, middle=c.use_middle_indices_grid
        )

    def _add_stream(self, prefix: str, dim: int, in_channels: int, out_channels: int) -> None:
        c = self.config
        self.add_module(f"{prefix}patchify_proj", Linear(in_channels, dim))
        self.add_module(f"{prefix}adaln_single", AdaLNSingle(dim, 9 if c.cross_attention_adaln else 6))
        if c.cross_attention_adaln and c.prompt_adaln_single:
            self.add_module(f"{prefix}prompt_adaln_single", AdaLNSingle(dim, 2))
        if c.caption_channels is not None:
            self.add_module(f"{prefix}caption_projection", CaptionProjection(c.caption_channels, dim))
        self.register_parameter(f"{prefix}scale_shift_table", modulation_table(2, dim))
        self.add_module(f"{prefix}proj_out", Linear(dim, out_channels))

    @property
    def dtype(self) -> torch.dtype:
        """What it computes in: the dtype of the biases (tables stay float32, weights may be quantised)."""
        return (self.patchify_proj if self.has_video else self.audio_patchify_proj).bias.dtype

    def forward(self, video: Modality | None, audio: Modality | None, perturbations: Perturbations | None = None) -> BlockOutput:
        """Velocities [B, T, C] in the transformer's dtype; None for a stream that is left out."""
        return self.passes([(video, audio, perturbations)])[0]

    def passes(self, inputs: Sequence[PassInputs]) -> list[BlockOutput]:
        """Several passes, all of them through a block before the next block: a weight that is uploaded or expanded serves all.

        Gradients are those of the passes one by one. Backward goes through the blocks in the same way, if it is run once
        for all. ``pass_runner``, where set, decides how the passes are carried out (as a recorded CUDA graph).
        """
        return self.compute_together(inputs) if self.pass_runner is None else self.pass_runner(inputs)

    def compute_together(self, inputs: Sequence[PassInputs]) -> list[BlockOutput]:
        """The passes themselves. Backward takes what was computed last first, so all passes of a block before the next block."""
        expect = getattr(self.block_runner, "expect", None)
        if expect is not None:
            expect(len(inputs))
        passes = [self._begin(*given) for given in inputs]
        for index, block in enumerate(self.transformer_blocks):
            for p in passes:
                p.video, p.audio = self.block_runner(block, index, p.video, p.audio, p.video_inputs, p.audio_inputs, p.keeps[index])
        return [self._end(p) for p in passes]

    def _begin(self, video: Modality | None, audio: Modality | None, perturbations: Perturbations | None) -> _Pass:
        """All that comes before the blocks."""
        assert video is None or self.has_video, "this transformer was built without the video stream"
        assert audio is None or self.has_audio, "this transformer was built without the audio stream"
        assert video is not None or audio is not None, "no stream given"
        v = a = v_in = a_in = None
        if video is not None:
            v_times, v_index = video.distinct_timesteps()
            v, (v_in, v_embedded) = self._patchify_video(video), self._inputs("", video, v_times, v_index)
        if audio is not None:
            a_times, a_index = audio.distinct_timesteps()
            a, (a_in, a_embedded) = self.audio_patchify_proj(audio.tokens.to(self.dtype)), self._inputs("audio_", audio, a_times, a_index)
        if video is not None and audio is not None:
            v_in = self._with_cross("video", "a2v", v_in, v_times, video.positions, gate_sigma=audio.sigma)
            a_in = self._with_cross("audio", "v2a", a_in, a_times, audio.positions, gate_sigma=video.sigma)

        layers = len(self.transformer_blocks)
        device = (a if v is None else v).device
        keeps = [None] * layers if perturbations is None else perturbations.blocks(layers, device)
        heads = {}
        if v is not None:
            heads[""] = (v_embedded, v_index)
        if a is not None:
            heads["audio_"] = (a_embedded, a_index)
        return _Pass(v, a, v_in, a_in, keeps, heads)

    def _end(self, p: _Pass) -> BlockOutput:
        """All that comes after them."""
        video = None if p.video is None else self._head("", p.video, *p.heads[""])
        audio = None if p.audio is None else self._head("audio_", p.audio, *p.heads["audio_"])
        return video, audio

    def _patchify_video(self, video: Modality) -> Tensor:
        x = self.patchify_proj(video.tokens.to(self.dtype))
        if video.keyframes is None or not self.config.keyframe_embedding:
            return x
        marker = (video.keyframes > 0).to(x.dtype).unsqueeze(-1)
        return x + marker * self.keyframes_abs_pos_embedding.to(x.dtype)

    def _inputs(self, prefix: str, modality: Modality, timesteps: Tensor, index: Tensor | None) -> tuple[StreamInputs, Tensor]:
        """The stream's block inputs without the cross attention's, and the embedded timesteps [N, D] for the head."""
        c, dtype = self.config, self.dtype
        rows, embedded = getattr(self, f"{prefix}adaln_single")(self._scaled(timesteps), dtype)
        context, prompt_rows = modality.context.to(dtype), None
        if c.caption_channels is not None:
            context = getattr(self, f"{prefix}caption_projection")(context)
        if c.cross_attention_adaln and c.prompt_adaln_single:
            prompt_rows, _ = getattr(self, f"{prefix}prompt_adaln_single")(self._scaled(modality.sigma), dtype)
        inputs = StreamInputs(
            context=context,
            rows=rows,
            rope=getattr(self, f"{prefix}rope")(modality.positions),
            row_index=index,
            context_bias=None if modality.context_mask is None else strength_bias(modality.context_mask, dtype)[:, None, None],
            attention_bias=None if modality.attention_mask is None else strength_bias(modality.attention_mask, dtype)[:, None],
            prompt_rows=prompt_rows,
        )
        return inputs, embedded

    def _with_cross(
        self, stream: str, gate: str, inputs: StreamInputs, timesteps: Tensor, positions: Tensor, gate_sigma: Tensor
    ) -> StreamInputs:
        """Adds what audio-video cross attention reads: scale and shift from the stream's own timesteps, the gate into it
        from the other stream's sigma on the cross attention's timestep scale, RoPE over time alone."""
        factor = self.config.av_ca_timestep_scale_multiplier / self.config.timestep_scale_multiplier
        rows, _ = getattr(self, f"av_ca_{stream}_scale_shift_adaln_single")(self._scaled(timesteps), self.dtype)
        gate_rows, _ = getattr(self, f"av_ca_{gate}_gate_adaln_single")(self._scaled(gate_sigma) * factor, self.dtype)
        return inputs._replace(cross_rows=rows, cross_gate_rows=gate_rows, cross_rope=self.cross_rope(positions[:, :1]))

    def _scaled(self, timesteps: Tensor) -> Tensor:
        return timesteps.float() * self.config.timestep_scale_multiplier

    def _head(self, prefix: str, x: Tensor, embedded: Tensor, index: Tensor | None) -> Tensor:
        """Layer norm, modulation by the embedded timestep (row 0 shift, row 1 scale), projection to channels."""
        rows = table_rows(getattr(self, f"{prefix}scale_shift_table"), embedded.unsqueeze(1), x.dtype)
        x = modulate(F.layer_norm(x, x.shape[-1:], eps=1e-6), rows[:, 1], rows[:, 0], index)
        return getattr(self, f"{prefix}proj_out")(x)


def strength_bias(strength: Tensor, dtype: torch.dtype) -> Tensor:
    """Attention strengths 0..1 (or a 0/1 mask) as an additive bias: log, with 0 as the lowest finite number.

    Finite, so that a row masked everywhere attends evenly instead of giving NaN.
    """
    return strength.float().log().clamp(min=torch.finfo(dtype).min).to(dtype)


def transformer_source(checkpoint: Checkpoint, model: LTXTransformer) -> WeightSource:
    """The checkpoint's transformer tensors without those of a stream that ``model`` leaves out.

    What no stream of this family knows stays in, for the strict load to name.
    """
    source = checkpoint.source("transformer")
    if model.has_video and model.has_audio == model.config.has_audio:
        return source
    with blank():
        everything = set(LTXTransformer(model.config).state_dict())
    absent = everything - set(model.state_dict())
    return source.renamed(lambda name: None if name in absent else name)


def keeps_float32(name: str) -> bool:
    """Whether a parameter is stored and kept in float32: the modulation tables."""
    return "scale_shift_table" in name.rpartition(".")[2]


def load_transformer(
    checkpoint: Checkpoint, *, dtype: torch.dtype, device: torch.device | str, video: bool = True, audio: bool = True
) -> LTXTransformer:
    """The checkpoint's transformer, frozen and in eval mode, with the streams asked for; ``device="meta"`` loads nothing.

    Weights are in ``dtype`` (quantised ones dequantised), modulation tables in float32.
    Raises CheckpointError when the file has no transformer or its tensors do not fit its config.
    """
    meta = torch.device(device).type == "meta"
    if checkpoint.transformer is None:
        checkpoint.source("transformer")  # raises, saying which file would supply it
    with blank():
        model = LTXTransformer(checkpoint.transformer, video=video, audio=audio)
    kind = lambda name: torch.float32 if keeps_float32(name) else dtype  # noqa: E731
    if meta:
        for name, parameter in model.named_parameters():
            parameter.data = parameter.data.to(kind(name))
    else:
        load_weights(model, transformer_source(checkpoint, model), dtype=kind, device=device)
    return model.requires_grad_(False).eval()
