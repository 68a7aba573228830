"""The model families as rows: how each is told apart, and what differs between them."""

from __future__ import annotations

import copy
import json
from collections.abc import Container, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from ..errors import CheckpointError

TRANSFORMER_PREFIX = "model.diffusion_model."


@dataclass(frozen=True)
class TransformerConfig:
    """Sizes and flags of one transformer, read from the checkpoint's ``config.transformer`` and its tensors.

    ``audio_*`` sizes are 0 for the video-only LTX-Video families.
    """

    num_layers: int
    num_attention_heads: int
    attention_head_dim: int
    in_channels: int
    out_channels: int
    cross_attention_dim: int
    caption_channels: int | None  # input width of caption_projection; None = no projection
    audio_num_attention_heads: int = 0
    audio_attention_head_dim: int = 0
    audio_in_channels: int = 0
    audio_out_channels: int = 0
    audio_cross_attention_dim: int = 0
    norm_eps: float = 1e-6
    qk_norm_eps: float = 1e-6
    rope_type: str = "split"  # split | interleaved
    frequencies_precision: str = "float64"  # float64 | float32: of the RoPE frequency grid
    positional_embedding_theta: float = 10000.0
    positional_embedding_max_pos: tuple[int, int, int] = (20, 2048, 2048)
    audio_positional_embedding_max_pos: int = 20
    use_middle_indices_grid: bool = True  # RoPE at the middle of a token's span; False = at its start
    timestep_scale_multiplier: float = 1000.0
    av_ca_timestep_scale_multiplier: float = 1000.0
    gated_attention: bool = False
    cross_attention_adaln: bool = False  # 9 adaLN rows instead of 6, prompt scale/shift tables
    prompt_adaln_single: bool = False  # prompt adaLN has its own MLP on sigma
    ff_bias: bool = True
    audio_ff_bias: bool = True
    keyframe_embedding: bool = False
    norm_before_cross_attention: bool = True  # False: LTX-Video feeds attn2 the un-normalised stream
    causal_positions: bool = True

    @property
    def dim(self) -> int:
        return self.num_attention_heads * self.attention_head_dim

    @property
    def audio_dim(self) -> int:
        return self.audio_num_attention_heads * self.audio_attention_head_dim

    @property
    def has_audio(self) -> bool:
        return self.audio_num_attention_heads > 0


@dataclass(frozen=True)
class SamplingDefaults:
    """The vendor's inference numbers of a family's base (not distilled) model.

    stg_blocks: blocks whose self-attention is skipped. schedule_tokens: what the schedule is shifted for; None: each sample's
    own tokens. distilled_steps: steps of its distilled model (guidance off).

    Sources. LTX-Video: the repository Lightricks/LTX-Video at 5260738. 2B: configs/ltxv-2b-0.9.5.yaml, the same as 0.9 to
    0.9.6-dev. 13B: configs/ltxv-13b-0.9.8-dev.yaml has 30 steps and most often skips block 28; its guidance changes along
    the schedule (prompt 1 to 8, STG 0 to 4, rescale 0.5 to 1) and in a second pass, which one constant cannot follow, so
    that the 2B's 3, 1 and 0.7 stand here. Shift by the sample's tokens: schedulers/rf.py; recompression 29:
    pipelines/crf_compressor.py. LTX-2, 2.3, 2.5: Lightricks/LTX-2 at 400fd31, ltx_pipelines' constants (40 steps and
    block 29, then 30 and 28; CRF 33, from 2.4 on 18); ComfyUI's own guidance nodes start from the same numbers.
    """

    steps: int
    video_cfg: float
    audio_cfg: float
    stg_scale: float
    stg_blocks: tuple[int, ...]
    modality_scale: float
    guidance_rescale: float
    image_crf: int
    schedule_tokens: int | None = 4096
    distilled_steps: int = 8


_ATTENTION = ("to_k", "to_q", "to_v", "to_out.0")


@dataclass(frozen=True)
class Family:
    """One row: a line of LTX models that share sizes, text encoder and files.

    text: the encoder (``t5``, ``gemma3``, ``gemma4``); feature_kind: what its features are (``t5``, ``v1``, ``v2``).
    features: widths of the cached features: (video,) or (video, audio).
    known: key of its production config in known_configs.json, for files without ``config`` metadata.
    base_models: where it is on the Hub, the repository of its own first.
    supplies: component -> the file that holds it, for error texts.
    """

    name: str
    title: str
    audio: bool
    text: str
    feature_kind: str
    features: tuple[int, ...]
    sampling: SamplingDefaults
    known: str
    base_models: tuple[str, ...]
    supplies: Mapping[str, str]
    target_modules: tuple[str, ...] = _ATTENTION

    @property
    def config(self) -> dict[str, Any]:
        """The production ``config`` sections: transformer, vae, and audio_vae, vocoder where the family has audio."""
        return known_config(self.known)

    @property
    def components(self) -> tuple[str, ...]:
        """Names of all parts that a complete model of this family has."""
        av = ("connectors", "text_projection", "video_vae", "audio_vae", "vocoder")
        return ("transformer", *(av if self.audio else ("video_vae",)), "text_encoder")


def _unified(file: str, encoder: str) -> dict[str, str]:
    parts = ("transformer", "connectors", "text_projection", "video_vae", "audio_vae", "vocoder")
    return {**{p: file for p in parts}, "text_encoder": encoder}


_T5 = "a T5-XXL v1.1 encoder: t5xxl_fp16.safetensors (ComfyUI models/text_encoders), with a T5 tokenizer folder"
_GEMMA3 = "Gemma 3 12B: the folder gemma-3-12b-it-qat-q4_0-unquantized, or gemma_3_12B_it.safetensors (ComfyUI)"
_GEMMA4 = "gemma4-12b-with-proj-ltx-2.5-bf16.safetensors (ComfyUI models/text_encoders)"
_LTX25 = {
    "transformer": "ltx-2.5-22b-dev-transformer-bf16.safetensors (ComfyUI models/diffusion_models)",
    "connectors": "ltx-2.5-22b-dev-transformer-bf16.safetensors (ComfyUI models/diffusion_models)",
    "text_projection": _GEMMA4,
    "text_encoder": _GEMMA4,
    "video_vae": "ltx-2.5-video-vae-conv-bf16.safetensors or ltx-2.5-video-vae-bf16.safetensors (ComfyUI models/vae)",
    "audio_vae": "ltx-2.5-audio-vae-bf16.safetensors (ComfyUI models/vae)",
    "vocoder": "ltx-2.5-audio-vae-bf16.safetensors (ComfyUI models/vae)",
}

FAMILIES: dict[str, Family] = {
    f.name: f
    for f in (
        Family(
            "ltxv-2b", "LTX-Video 2B (0.9.0 to 0.9.8)", False, "t5", "t5", (4096,),
            SamplingDefaults(40, 3.0, 1.0, 1.0, (19,), 1.0, 0.7, 29, schedule_tokens=None), "ltxv-2b-0.9.5", ("Lightricks/LTX-Video",),
            _unified("ltxv-2b-0.9.6-dev-04-25.safetensors or another full ltxv-2b file", _T5),
        ),
        Family(
            "ltxv-13b", "LTX-Video 13B (0.9.7, 0.9.8)", False, "t5", "t5", (4096,),
            SamplingDefaults(30, 3.0, 1.0, 1.0, (28,), 1.0, 0.7, 29, schedule_tokens=None), "ltxv-13b", ("Lightricks/LTX-Video-0.9.8-13B", "Lightricks/LTX-Video"),
            _unified("ltxv-13b-0.9.8-dev.safetensors or another full ltxv-13b file", _T5),
        ),
        Family(
            "ltx2", "LTX-2 19B", True, "gemma3", "v1", (3840,),
            SamplingDefaults(40, 3.0, 7.0, 1.0, (29,), 3.0, 0.7, 33), "ltx2", ("Lightricks/LTX-2",),
            _unified("ltx-2-19b-dev.safetensors", _GEMMA3),
        ),
        Family(
            "ltx2.3", "LTX-2.3 22B", True, "gemma3", "v2", (4096, 2048),
            SamplingDefaults(30, 3.0, 7.0, 1.0, (28,), 3.0, 0.7, 33), "ltx2.3", ("Lightricks/LTX-2.3",),
            _unified("ltx-2.3-22b-dev.safetensors", _GEMMA3),
        ),
        Family(
            "ltx2.5", "LTX-2.5 22B", True, "gemma4", "v2", (4096, 2048),
            SamplingDefaults(30, 3.0, 7.0, 1.0, (28,), 3.0, 0.7, 18), "ltx2.5", ("Lightricks/LTX-2.5",),
            _LTX25,
        ),
    )
}  # fmt: skip


@lru_cache(maxsize=1)
def _known_configs() -> dict[str, dict[str, Any]]:
    return json.loads((Path(__file__).parent / "known_configs.json").read_text(encoding="utf-8"))


def known_config(key: str) -> dict[str, Any]:
    """A copy of a production config (``ltxv-2b-0.9.0``, ``ltx2.3``, ...), as published files carry it."""
    return copy.deepcopy(_known_configs()[key])


_MARK = "adaln_single.emb.timestep_embedder.linear_1.bias"


def is_transformer(names: Container[str]) -> bool:
    """Whether bare tensor names (no ``model.diffusion_model.``) are those of an LTX transformer."""
    return _MARK in names


def detect_family(shapes: Mapping[str, tuple[int, ...]]) -> Family:
    """The family of a transformer by its bare tensor names and shape relations alone."""
    if not is_transformer(shapes):
        raise CheckpointError("checkpoint.family", "This is no LTX model: its tensors are not those of an LTX transformer.", "Known: " + ", ".join(FAMILIES) + ".")
    width = shapes["adaln_single.linear.weight"][1]
    layers = _layers(shapes)
    if "audio_adaln_single.linear.weight" not in shapes:
        return FAMILIES["ltxv-13b" if layers > 28 or width > 2048 else "ltxv-2b"]
    if "caption_projection.linear_1.weight" in shapes or shapes["adaln_single.linear.weight"][0] == 6 * width:
        return FAMILIES["ltx2"]
    bare_ff = "transformer_blocks.0.ff.net.0.proj.bias" not in shapes
    return FAMILIES["ltx2.5" if bare_ff or "keyframes_abs_pos_embedding" in shapes else "ltx2.3"]


def parse_config(metadata: Mapping[str, Any] | None) -> dict[str, Any]:
    """The ``config`` of a file's metadata as a dict; {} when it is absent or unreadable."""
    raw = (metadata or {}).get("config")
    if isinstance(raw, str):
        try:
            raw = json.loads(raw)
        except json.JSONDecodeError:
            return {}  # repacks keep broken metadata; the tensors and the family's row tell the rest
    return raw if isinstance(raw, dict) else {}


def transformer_config(family: Family, shapes: Mapping[str, tuple[int, ...]], said: Mapping[str, Any]) -> TransformerConfig:
    """Sizes and flags from bare tensor shapes; numbers that no tensor tells from ``said``, else from the family's row."""
    known = family.config["transformer"]
    merged = {**known, **{k: v for k, v in said.items() if v is not None}}
    width = shapes["patchify_proj.weight"][0]
    heads = _heads(shapes, "transformer_blocks.0.attn1", width, merged.get("num_attention_heads"))
    caption = shapes.get("caption_projection.linear_1.weight")
    # a config that is there but silent on causal positions means the old, non-causal ones (0.9.0, 0.9.1)
    causal = said.get("causal_temporal_positioning", family.audio) if said else known.get("causal_temporal_positioning", True)
    common = dict(
        num_layers=_layers(shapes),
        num_attention_heads=heads,
        attention_head_dim=width // heads,
        in_channels=shapes["patchify_proj.weight"][1],
        out_channels=shapes["proj_out.weight"][0],
        cross_attention_dim=shapes["transformer_blocks.0.attn2.to_k.weight"][1],
        caption_channels=caption[1] if caption else None,
        norm_eps=float(merged["norm_eps"]),
        positional_embedding_theta=float(merged["positional_embedding_theta"]),
        positional_embedding_max_pos=tuple(merged["positional_embedding_max_pos"]),
        timestep_scale_multiplier=float(merged["timestep_scale_multiplier"]),
        ff_bias="transformer_blocks.0.ff.net.0.proj.bias" in shapes,
        causal_positions=bool(causal),
    )
    if not family.audio:
        return TransformerConfig(
            **common, qk_norm_eps=1e-5, rope_type="interleaved", frequencies_precision="float32", use_middle_indices_grid=False, norm_before_cross_attention=False
        )  # fmt: skip
    audio_width = shapes["audio_patchify_proj.weight"][0]
    audio_heads = _heads(shapes, "transformer_blocks.0.audio_attn1", audio_width, merged.get("audio_num_attention_heads", heads))
    return TransformerConfig(
        **common,
        audio_num_attention_heads=audio_heads,
        audio_attention_head_dim=audio_width // audio_heads,
        audio_in_channels=shapes["audio_patchify_proj.weight"][1],
        audio_out_channels=shapes["audio_proj_out.weight"][0],
        audio_cross_attention_dim=shapes["transformer_blocks.0.audio_attn2.to_k.weight"][1],
        qk_norm_eps=float(merged["norm_eps"]),
        rope_type=str(merged["rope_type"]),
        frequencies_precision=str(merged["frequencies_precision"]),
        audio_positional_embedding_max_pos=int(merged["audio_positional_embedding_max_pos"][0]),
        use_middle_indices_grid=bool(merged["use_middle_indices_grid"]),
        av_ca_timestep_scale_multiplier=float(merged["av_ca_timestep_scale_multiplier"]),
        gated_attention="transformer_blocks.0.attn1.to_gate_logits.weight" in shapes,
        cross_attention_adaln=shapes["transformer_blocks.0.scale_shift_table"][0] == 9,
        prompt_adaln_single="prompt_adaln_single.linear.weight" in shapes,
        audio_ff_bias="transformer_blocks.0.audio_ff.net.0.proj.bias" in shapes,
        keyframe_embedding="keyframes_abs_pos_embedding" in shapes,
    )


def _layers(shapes: Mapping[str, tuple[int, ...]]) -> int:
    return 1 + max((int(n.split(".")[1]) for n in shapes if n.startswith("transformer_blocks.")), default=-1)


def _heads(shapes: Mapping[str, tuple[int, ...]], attention: str, width: int, said: int | None) -> int:
    """Attention heads: the gate has one row a head; else what the config says, if it divides the width."""
    gate = shapes.get(f"{attention}.to_gate_logits.weight")
    if gate:
        return gate[0]
    return int(said) if said and width % int(said) == 0 else 32
