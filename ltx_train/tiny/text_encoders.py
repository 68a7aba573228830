"""Small text encoders in the published files: T5, Gemma 3 (ComfyUI single file and Hugging Face folder), packed Gemma 4."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..tensorfile import save_tensors
from .shapes import gemma3_tower_shapes, gemma4_tower_shapes, gemma_shapes, t5_shapes
from .tokenizers import VOCABULARY, sentencepiece_model, tokenizer_config, tokenizer_json
from .values import weights

TEXT_WIDTH = 16  # hidden size of every tiny text encoder
HIDDEN_STATES = {"gemma3": 3, "gemma4": 4}  # layers + 1

# Head size 256 and the norms' epsilon are fixed in ComfyUI's Gemma 3; width, layers and heads are what a test server shrinks.
GEMMA3 = {
    "model_type": "gemma3_text", "vocab_size": VOCABULARY, "hidden_size": TEXT_WIDTH, "intermediate_size": 32, "num_hidden_layers": 2,
    "num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": 256, "query_pre_attn_scalar": 256, "rms_norm_eps": 1e-6,
    "rope_theta": 1000000, "rope_local_base_freq": 10000, "rope_scaling": {"factor": 8.0, "rope_type": "linear"}, "sliding_window": 1024,
    "sliding_window_pattern": 6, "hidden_activation": "gelu_pytorch_tanh", "attention_bias": False, "max_position_embeddings": 131072,
    "attn_logit_softcapping": None, "final_logit_softcapping": None, "torch_dtype": "bfloat16",
}  # fmt: skip
GEMMA3_VISION = {
    "model_type": "siglip_vision_model", "hidden_size": TEXT_WIDTH, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 1,
    "image_size": 896, "patch_size": 14, "num_channels": 3, "layer_norm_eps": 1e-6, "hidden_act": "gelu_pytorch_tanh", "vision_use_head": False,
}  # fmt: skip
GEMMA4 = {
    "model_type": "gemma4_unified_text", "vocab_size": VOCABULARY, "hidden_size": TEXT_WIDTH, "intermediate_size": 32, "num_hidden_layers": 3,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"], "num_attention_heads": 2, "num_key_value_heads": 1,
    "num_global_key_value_heads": 1, "head_dim": 16, "global_head_dim": 32, "attention_k_eq_v": True, "rms_norm_eps": 1e-6,
    "hidden_activation": "gelu_pytorch_tanh", "attention_bias": False, "max_position_embeddings": 262144, "sliding_window": 1024,
    "final_logit_softcapping": 30.0, "hidden_size_per_layer_input": 0, "num_kv_shared_layers": 0, "bos_token_id": 2, "eos_token_id": 1, "pad_token_id": 0,
    "vocab_size_per_layer_input": VOCABULARY, "tie_word_embeddings": True, "use_bidirectional_attention": "vision", "enable_moe_block": False,
    "rope_parameters": {
        "full_attention": {"partial_rotary_factor": 0.25, "rope_theta": 1000000.0, "rope_type": "proportional"},
        "sliding_attention": {"rope_theta": 10000.0, "rope_type": "default"},
    },
}  # fmt: skip


def _bytes(content: bytes) -> Tensor:
    return torch.frombuffer(bytearray(content), dtype=torch.uint8)


def write_t5(folder: Path, seed: int, *, width: int) -> dict[str, Path]:
    """t5xxl_tiny.safetensors (float16, no metadata, no tokenizer inside) and the folder t5_tokenizer beside it."""
    shapes = t5_shapes(layers=2, width=width, inner=32, heads=2, head_dim=8, vocab=VOCABULARY)
    tensors = weights(shapes, seed, "t5", dtype=torch.float16)
    tensors["encoder.embed_tokens.weight"] = tensors["shared.weight"].clone()
    tokenizer = folder / "t5_tokenizer"
    tokenizer.mkdir(parents=True, exist_ok=True)
    (tokenizer / "tokenizer.json").write_bytes(tokenizer_json("t5"))
    (tokenizer / "spiece.model").write_bytes(sentencepiece_model("t5"))
    (tokenizer / "tokenizer_config.json").write_bytes(tokenizer_config("t5"))
    path = folder / "t5xxl_tiny.safetensors"
    save_tensors(path, tensors, what="a tiny text encoder")
    return {"text_encoder": path, "tokenizer": tokenizer}


def write_gemma3(folder: Path, seed: int, gemma: Mapping[str, Any] = GEMMA3) -> dict[str, Path]:
    """gemma_3_tiny.safetensors (ComfyUI's single file) and gemma-3-tiny/, the same weights as a Hugging Face folder of two shards.

    gemma: the text model's config.
    """
    text = weights(gemma_shapes(gemma), seed, "gemma3")
    towers = weights(gemma3_tower_shapes(gemma["hidden_size"], GEMMA3_VISION), seed, "gemma3")
    single = folder / "gemma_3_tiny.safetensors"
    folder.mkdir(parents=True, exist_ok=True)
    save_tensors(single, text | towers | {"spiece_model": _bytes(sentencepiece_model("gemma"))}, what="a tiny text encoder")
    place = folder / "gemma-3-tiny"
    place.mkdir(exist_ok=True)
    towers = {f"vision_tower.{n}" if n.startswith("vision_model.") else n: t for n, t in towers.items()}
    _shards(place, {f"language_model.{n}": t for n, t in text.items()} | towers)
    config = {"architectures": ["Gemma3ForConditionalGeneration"], "model_type": "gemma3", "text_config": dict(gemma), "vision_config": GEMMA3_VISION, "torch_dtype": "bfloat16"}
    config |= {"boi_token_index": 4, "eoi_token_index": 5, "image_token_index": 6, "mm_tokens_per_image": 256, "eos_token_id": [1, 106]}
    (place / "config.json").write_text(json.dumps(config, indent=1), encoding="utf-8")
    (place / "tokenizer.json").write_bytes(tokenizer_json("gemma"))
    (place / "tokenizer.model").write_bytes(sentencepiece_model("gemma"))
    (place / "tokenizer_config.json").write_bytes(tokenizer_config("gemma"))
    return {"text_encoder": single, "text_encoder_folder": place}


def _shards(place: Path, tensors: Mapping[str, Tensor]) -> None:
    names = sorted(tensors)
    halves = {"model-00001-of-00002.safetensors": names[: len(names) // 2], "model-00002-of-00002.safetensors": names[len(names) // 2 :]}
    for file, mine in halves.items():
        save_tensors(place / file, {n: tensors[n] for n in mine}, {"format": "pt"}, what="a tiny text encoder")
    index: dict[str, Any] = {"metadata": {"total_size": sum(t.nbytes for t in tensors.values())}, "weight_map": {n: f for f, mine in halves.items() for n in mine}}
    (place / "model.safetensors.index.json").write_text(json.dumps(index, indent=1), encoding="utf-8")


def write_gemma4(folder: Path, seed: int, version: str, projection: Mapping[str, Tensor]) -> Path:
    """The packed Gemma 4 of LTX-2.5: weights, text projection, tokenizer and its sidecars in one file, config in the metadata."""
    config = {
        "architectures": ["Gemma4UnifiedForConditionalGeneration"], "model_type": "gemma4_unified", "gemma_version": version, "text_config": GEMMA4,
        "vision_config": {"model_type": "gemma4_unified_vision", "mm_embed_dim": TEXT_WIDTH, "mm_posemb_size": 8, "output_proj_dims": TEXT_WIDTH, "patch_size": 2, "pooling_kernel_size": 3, "rms_norm_eps": 1e-6},
        "audio_config": {"model_type": "gemma4_unified_audio", "audio_embed_dim": 8, "rms_norm_eps": 1e-6},
        "eos_token_id": [1, 106], "tie_word_embeddings": True, "dtype": "bfloat16",
    }  # fmt: skip
    tensors = weights(gemma_shapes(GEMMA4) | gemma4_tower_shapes(config), seed, "gemma4") | dict(projection)
    assets = {
        "tokenizer_json": tokenizer_json("gemma", add_bos=False),
        "hf_asset__tokenizer_config.json": tokenizer_config("gemma"),
        "hf_asset__processor_config.json": b'{"processor_class": "Gemma4UnifiedProcessor"}',
        "hf_asset__generation_config.json": b'{"bos_token_id": 2, "eos_token_id": [1, 106], "pad_token_id": 0}',
        "hf_asset__chat_template.jinja": b"{{ messages[0]['content'] }}",
    }
    path = folder / "gemma4-tiny-with-proj-ltx-2.5-bf16.safetensors"
    folder.mkdir(parents=True, exist_ok=True)
    save_tensors(path, tensors | {n: _bytes(b) for n, b in assets.items()}, {"format": "pt", "gemma_config": json.dumps(config)}, what="a tiny text encoder")
    return path
