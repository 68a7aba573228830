"""The fitted set's sizes and files: an LTX-2.3 checkpoint and a Gemma 3 in the published layout, small enough to ship."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..models.families import FAMILIES, TRANSFORMER_PREFIX
from ..tensorfile import save_tensors
from .shapes import connector_shapes, gemma_shapes, projection_shapes
from .text_encoders import GEMMA3
from .tokenizers import sentencepiece_model, tokenizer_json
from .values import weights

FAMILY = FAMILIES["ltx2.3"]
MODEL_NAME = "ltx-2.3-fitted.safetensors"
TEXT_NAME = "gemma_3_fitted.safetensors"

GEMMA = GEMMA3 | {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 1, "head_dim": 64, "query_pre_attn_scalar": 64}
_TRANSFORMER = {
    "num_layers": 3, "num_attention_heads": 4, "attention_head_dim": 32, "cross_attention_dim": 128, "caption_channels": 32,
    "audio_num_attention_heads": 4, "audio_attention_head_dim": 12, "audio_cross_attention_dim": 48,
    "connector_num_attention_heads": 4, "connector_attention_head_dim": 32, "connector_num_layers": 1,
    "audio_connector_num_attention_heads": 4, "audio_connector_attention_head_dim": 12, "connector_num_learnable_registers": 32,
}  # fmt: skip
# The encoder's width is the latent's 128 (as published), so it has few layers; the decoder is narrow and does the work.
_ENCODER = (("res_x", 0), ("compress_all_res", 1), ("res_x", 0), ("compress_all_res", 1), ("res_x", 0), ("compress_all_res", 1), ("res_x", 0))
_DECODER = (("res_x", 2), ("compress_space", 2), ("res_x", 2), ("compress_time", 1), ("res_x", 1), ("compress_all", 1), ("res_x", 1), ("compress_all", 2), ("res_x", 1))


def _blocks(listed: tuple[tuple[str, int], ...]) -> list:
    return [[n, {"num_layers" if n == "res_x" else "multiplier": k}] for n, k in listed]


def fitted_config() -> dict[str, Any]:
    """The ``config`` metadata: the published one of LTX-2.3 with small numbers."""
    config = FAMILY.config
    config["transformer"] |= _TRANSFORMER
    config["vae"] |= {"encoder_blocks": _blocks(_ENCODER), "decoder_blocks": _blocks(_DECODER), "encoder_base_channels": 128, "decoder_base_channels": 12}
    config["audio_vae"]["model"]["params"]["ddconfig"] |= {"ch": 24, "ch_mult": [1, 1, 1], "num_res_blocks": 1}
    small = {"resblock_kernel_sizes": [3, 7], "resblock_dilation_sizes": [[1, 3], [1, 3]]}
    first = config["vocoder"]["vocoder"] | small | {"upsample_rates": [5, 4, 8], "upsample_kernel_sizes": [11, 8, 16], "upsample_initial_channel": 48}
    bwe = config["vocoder"]["bwe"] | small | {"upsample_rates": [6, 5, 8], "upsample_kernel_sizes": [12, 11, 16], "upsample_initial_channel": 8, "n_fft": 96, "win_size": 96}
    config["vocoder"] = {"vocoder": first, "bwe": bwe}
    return config


def text_side(config: Mapping[str, Any], seed: int) -> dict[str, Tensor]:
    """Connectors and text projection: random and left so; the transformer learns to read what they give.

    The registers are near one vector, so that cross attention tells them from words with ease.
    """
    t = config["transformer"]
    connectors = weights(connector_shapes(t), seed, "connectors", dtype=torch.float32)
    for name, value in connectors.items():
        if name.endswith("learnable_registers"):
            connectors[name] = value[:1] + 0.1 * value
    states = GEMMA["num_hidden_layers"] + 1
    projection = weights(projection_shapes("v2", states * GEMMA["hidden_size"], t["cross_attention_dim"], t["audio_cross_attention_dim"]), seed, "text_projection", dtype=torch.float32)
    return {TRANSFORMER_PREFIX + n: v for n, v in connectors.items()} | {"text_embedding_projection." + n: v for n, v in projection.items()}


def write_text_encoder(folder: Path, seed: int) -> Path:
    """The Gemma 3 in ComfyUI's single-file form, its tokenizer inside (sentencepiece, as published, and tokenizer.json)."""
    tensors = weights(gemma_shapes(GEMMA), seed, "gemma3")
    for name, content in (("spiece_model", sentencepiece_model("gemma")), ("tokenizer_json", tokenizer_json("gemma"))):
        tensors[name] = torch.frombuffer(bytearray(content), dtype=torch.uint8)
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / TEXT_NAME
    save_tensors(path, tensors, {"config": json.dumps({"text_config": GEMMA})}, what="the fitted text encoder")
    return path


def write_model(folder: Path, config: Mapping[str, Any], parts: Mapping[str, Tensor]) -> Path:
    """The unified file: bfloat16, modulation tables float32 as published. parts: tensors by their name in the file."""
    tensors = {n: v.detach().cpu().to(torch.float32 if "scale_shift_table" in n else torch.bfloat16).contiguous() for n, v in parts.items()}
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / MODEL_NAME
    save_tensors(path, tensors, {"config": json.dumps(config), "model_version": "2.3.0"}, what="the fitted model")
    return path
