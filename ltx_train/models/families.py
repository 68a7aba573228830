"""The model families as rows: how each is told apart, and what differs between them."""

from __future__ import annotations

from dataclasses import dataclass


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
