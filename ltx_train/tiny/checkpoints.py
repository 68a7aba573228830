"""Whole small models with random weights, in the files, names and metadata of the published ones."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from ..errors import ConfigError, nearest
from ..models.checkpoint import Checkpoint
from ..models.families import FAMILIES, TRANSFORMER_PREFIX, Family, detect_family, transformer_config
from ..tensorfile import save_tensors
from .shapes import audio_vae_shapes, connector_shapes, projection_shapes, video_vae_shapes, vocoder_shapes
from .text_encoders import HIDDEN_STATES, TEXT_WIDTH, write_gemma3, write_gemma4, write_t5
from .transformer_shapes import transformer_shapes
from .values import spectrogram_tables, weights

GEMMA_VERSION = "gemma4-12b-ltx-v1"

# What is small; everything else is the published config. In and out channels, latent and mel sizes stay, so that
# stock ComfyUI loads these files.
_TRANSFORMER = {"num_layers": 2, "num_attention_heads": 2, "attention_head_dim": 16, "cross_attention_dim": 32, "caption_channels": TEXT_WIDTH}
_AUDIO = {"audio_num_attention_heads": 2, "audio_attention_head_dim": 8, "audio_cross_attention_dim": 16}
_CONNECTORS_V1 = {"connector_num_attention_heads": 2, "connector_attention_head_dim": TEXT_WIDTH // 2}
_CONNECTORS_V2 = {
    "connector_num_attention_heads": 2, "connector_attention_head_dim": 16, "connector_num_layers": 2,
    "audio_connector_num_attention_heads": 2, "audio_connector_attention_head_dim": 8,
}  # fmt: skip
_VOCODER = {"resblock_kernel_sizes": [3, 7], "resblock_dilation_sizes": [[1, 3, 5], [1, 3, 5]], "upsample_initial_channel": 16}
_FIVE = ("std-of-means", "mean-of-means", "channel", "mean-of-stds", "mean-of-stds_over_std-of-means")


def write_tiny(out_dir: str | Path, family: str, seed: int = 0) -> dict[str, Path]:
    """Write a complete small model of ``family`` below ``out_dir``, in ComfyUI's folders; returns what was written.

    Keys: model (unified file, or the 2.5 transformer file), text_encoder, and by family video_vae (conv),
    video_vae_diffusion, audio_vae, text_encoder_folder (Gemma 3 as a Hugging Face folder), tokenizer (T5).
    ``open_tiny`` opens the result. Raises ConfigError for an unknown family.
    """
    if family not in FAMILIES:
        near = nearest(family, list(FAMILIES)) or list(FAMILIES)
        raise ConfigError("tiny.family", f"There is no model family '{family[:40]}'.", f"Nearest: {', '.join(near)}. Known: {', '.join(FAMILIES)}.")
    row, out = FAMILIES[family], Path(out_dir)
    config = tiny_config(row)
    if row.text == "t5":
        paths = {"model": _unified(out, row, config, seed)}
        return paths | write_t5(out / "text_encoders", seed, width=TEXT_WIDTH)
    if row.text == "gemma3":
        paths = {"model": _unified(out, row, config, seed)}
        return paths | write_gemma3(out / "text_encoders", seed)
    return _split(out, row, config, seed)


def open_tiny(paths: Mapping[str, Path]) -> Checkpoint:
    """The checkpoint that :func:`write_tiny` wrote."""
    given = {k: paths.get(k) for k in ("text_encoder", "video_vae", "audio_vae", "tokenizer")}
    return Checkpoint.open(paths["model"], **given)


def tiny_config(family: Family) -> dict[str, Any]:
    """The family's published ``config`` with small numbers."""
    config = family.config
    transformer = config["transformer"] | _TRANSFORMER
    if family.name == "ltxv-13b":
        transformer["num_layers"] = 30  # more blocks than 2B has are what tells 13B apart
    if family.audio:
        transformer |= _AUDIO | (_CONNECTORS_V1 if family.feature_kind == "v1" else _CONNECTORS_V2)
        config["audio_vae"]["model"]["params"]["ddconfig"] |= {"ch_mult": [1, 1, 1], "num_res_blocks": 0}
        config["vocoder"] = _vocoder_config(config["vocoder"])
    config["transformer"] = transformer
    config["vae"] = _vae_config(config["vae"], family)
    if "vae_diffusion" in config:
        config["vae_diffusion"] = _diffusion_config(config["vae_diffusion"], config["vae"])
    return config


def _vae_config(vae: dict[str, Any], family: Family) -> dict[str, Any]:
    """Same blocks, one layer each; the AV families' encoders keep 128 channels (the latent's), so most stacks are empty."""
    first = True
    encoder = []
    for name, options in vae["encoder_blocks"]:
        if name == "res_x":
            encoder.append([name, dict(options) | {"num_layers": 1 if first or not family.audio else 0}])
            first = False
        else:
            encoder.append([name, dict(options) | {"multiplier": 1}])
    decoder = [[n, dict(o) | ({"num_layers": 1} if n == "res_x" else {})] for n, o in vae["decoder_blocks"]]
    widths = {"encoder_base_channels": 128, "decoder_base_channels": 4} if family.audio else {"encoder_base_channels": 16, "decoder_base_channels": 4}
    return vae | {"encoder_blocks": encoder, "decoder_blocks": decoder} | widths


def _diffusion_config(vae: dict[str, Any], conv: dict[str, Any]) -> dict[str, Any]:
    """The diffusion VAE on the conv VAE's encoder, with kernels of 3 (a floor of 3 x 3 x 3 latents)."""
    decoder = vae["decoder"] | {
        "head_dim": 16, "stage_channels": [64, 32, 16, 16, 16], "stage_depths": [1, 1, 1, 1, 2], "stage_kernels": [[3, 3, 3]] * 5,
        "upsamples": [[[1, 2, 2], 2], [[2, 1, 1], 2], [[2, 2, 2], 1], [[2, 2, 2], 1]], "stage5_kernel": [3, 3, 3], "t_emb_dim": 32,
    }  # fmt: skip
    return vae | {"encoder": vae["encoder"] | {"blocks": conv["encoder_blocks"]}, "decoder": decoder}


def _vocoder_config(vocoder: dict[str, Any]) -> dict[str, Any]:
    """Fewer, larger steps with the same product: 240 samples a mel frame (plain), 160 and then 240 (with extension)."""
    if "bwe" not in vocoder:
        return vocoder | _VOCODER | {"upsample_rates": [6, 5, 8], "upsample_kernel_sizes": [12, 11, 16]}
    first = vocoder["vocoder"] | _VOCODER | {"upsample_rates": [5, 4, 8], "upsample_kernel_sizes": [11, 8, 16]}
    bwe = vocoder["bwe"] | _VOCODER | {"upsample_rates": [6, 5, 8], "upsample_kernel_sizes": [12, 11, 16], "n_fft": 96, "win_size": 96}
    return {"vocoder": first, "bwe": bwe}


# ---- components


def _prefixed(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {prefix + n: t for n, t in tensors.items()}


def _transformer(family: Family, config: Mapping[str, Any], seed: int) -> dict[str, Tensor]:
    shapes = transformer_shapes(config["transformer"], family)
    assert detect_family(shapes) is family and transformer_config(family, shapes, config["transformer"]).num_layers, family.name
    tensors = weights(shapes, seed, "transformer", keep_tables=family.audio)
    if family.audio:
        tensors |= weights(connector_shapes(config["transformer"]), seed, "connectors")
    return _prefixed(TRANSFORMER_PREFIX, tensors)


def _projection(family: Family, config: Mapping[str, Any], seed: int) -> dict[str, Tensor]:
    t = config["transformer"]
    video, audio = (TEXT_WIDTH, 0) if family.feature_kind == "v1" else (t["cross_attention_dim"], t["audio_cross_attention_dim"])
    shapes = projection_shapes(family.feature_kind, HIDDEN_STATES[family.text] * TEXT_WIDTH, video, audio)
    return _prefixed("text_embedding_projection.", weights(shapes, seed, "text_projection"))


def _video_vae(vae: Mapping[str, Any], family: Family, seed: int) -> dict[str, Tensor]:
    statistics = _FIVE[:2] if family.feature_kind == "v2" else _FIVE
    return weights(video_vae_shapes(vae, statistics), seed, "video_vae")


def _sound(config: Mapping[str, Any], seed: int) -> dict[str, Tensor]:
    tensors = _prefixed("audio_vae.", weights(audio_vae_shapes(config["audio_vae"]), seed, "audio_vae"))
    vocoder = weights(vocoder_shapes(config["vocoder"]), seed, "vocoder")
    if bwe := config["vocoder"].get("bwe"):
        vocoder |= spectrogram_tables(bwe["n_fft"], bwe["win_size"], bwe["num_mels"], bwe["input_sampling_rate"])
    return tensors | _prefixed("vocoder.", vocoder)


# ---- files


def _metadata(family: Family, config: Mapping[str, Any], *sections: str) -> dict[str, str]:
    chosen = {s: config[s] for s in sections if s in config}
    if "transformer" in chosen:
        chosen["scheduler"] = {"_class_name": "RectifiedFlowScheduler", "num_train_timesteps": 1000, "shifting": None, "base_resolution": None, "sampler": "LinearQuadratic"}
    said = {"config": json.dumps(chosen)}
    if family.feature_kind == "v2":
        said["model_version"] = family.name.removeprefix("ltx") + ".0"
    if family.text == "gemma4" and "transformer" in chosen:
        said["gemma_source_checkpoint"] = json.dumps({"ltx_version": "2.5.0", "gemma_version": GEMMA_VERSION})
    return said


def _save(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    save_tensors(path, tensors, metadata, what="a tiny model file")
    return path


def _unified(out: Path, family: Family, config: Mapping[str, Any], seed: int) -> Path:
    name = {"ltxv-2b": "ltxv-2b-0.9.5", "ltxv-13b": "ltxv-13b-0.9.8", "ltx2": "ltx-2", "ltx2.3": "ltx-2.3"}[family.name]
    tensors = _transformer(family, config, seed) | _prefixed("vae.", _video_vae(config["vae"], family, seed))
    if family.audio:
        tensors |= _projection(family, config, seed) | _sound(config, seed)
    path = out / "checkpoints" / f"{name}-tiny.safetensors"
    return _save(path, tensors, _metadata(family, config, "transformer", "vae", "audio_vae", "vocoder"))


def _split(out: Path, family: Family, config: Mapping[str, Any], seed: int) -> dict[str, Path]:
    """The 2.5 pack: transformer with connectors, two video VAEs on one encoder, sound, text encoder with projections."""
    diffusion = {"vae": config["vae_diffusion"]}
    return {
        "model": _save(
            out / "diffusion_models" / "ltx-2.5-tiny-transformer-bf16.safetensors", _transformer(family, config, seed), _metadata(family, config, "transformer")
        ),
        "video_vae": _save(out / "vae" / "ltx-2.5-tiny-video-vae-conv-bf16.safetensors", _video_vae(config["vae"], family, seed), _metadata(family, config, "vae")),
        "video_vae_diffusion": _save(
            out / "vae" / "ltx-2.5-tiny-video-vae-bf16.safetensors", _video_vae(diffusion["vae"], family, seed), _metadata(family, diffusion, "vae")
        ),
        "audio_vae": _save(out / "vae" / "ltx-2.5-tiny-audio-vae-bf16.safetensors", _sound(config, seed), _metadata(family, config, "audio_vae", "vocoder")),
        "text_encoder": write_gemma4(out / "text_encoders", seed, GEMMA_VERSION, _projection(family, config, seed)),
    }
