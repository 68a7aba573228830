"""Names and shapes of the transformer of a ``config.transformer``, by building it without weights."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..models.blank import blank
from ..models.families import Family, TransformerConfig
from ..models.transformer import LTXTransformer


def transformer_shapes(config: Mapping[str, Any], family: Family) -> dict[str, tuple[int, ...]]:
    """Bare tensor names -> shapes of the transformer that ``config`` of this family describes (both streams)."""
    c = config
    common = dict(
        num_layers=c["num_layers"], num_attention_heads=c["num_attention_heads"], attention_head_dim=c["attention_head_dim"],
        in_channels=c["in_channels"], out_channels=c["out_channels"], cross_attention_dim=c["cross_attention_dim"],
    )  # fmt: skip
    if family.feature_kind != "v2":
        common["caption_channels"] = c["caption_channels"]
    else:
        common["caption_channels"] = None
    audio = {}
    if family.audio:
        audio = dict(
            audio_num_attention_heads=c["audio_num_attention_heads"], audio_attention_head_dim=c["audio_attention_head_dim"],
            audio_in_channels=c.get("audio_in_channels", 128), audio_out_channels=c["audio_out_channels"],
            audio_cross_attention_dim=c["audio_cross_attention_dim"], gated_attention=c.get("apply_gated_attention", False),
            cross_attention_adaln=c.get("cross_attention_adaln", False), prompt_adaln_single=c.get("cross_attention_adaln", False),
            ff_bias=c.get("ff_bias", True), audio_ff_bias=c.get("audio_ff_bias", True), keyframe_embedding=c.get("use_keyframes_abs_pos_embedding", False),
        )  # fmt: skip
    with blank():
        model = LTXTransformer(TransformerConfig(**common, **audio))
    return {n: tuple(p.shape) for n, p in model.named_parameters()}
