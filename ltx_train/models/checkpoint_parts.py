"""What a model file is: the components its tensor names show, and the refusals for files that are no LTX model."""

from __future__ import annotations

import json
import re
from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from ..errors import CheckpointError
from .families import TRANSFORMER_PREFIX, is_transformer
from .safetensors_file import SafetensorsFile, checked_path

COMPONENTS = ("transformer", "connectors", "text_projection", "video_vae", "audio_vae", "vocoder", "text_encoder")

_PROJECTION = "text_embedding_projection."
_CONNECTOR = re.compile(r"^(model\.diffusion_model\.)?((?:video_|audio_)?embeddings_connector\..+)$")
_LORA = re.compile(r"\.(lora_A|lora_B|lora_down|lora_up|lokr_w1|lokr_w2|hada_w1_a)(\.|_|$)")
_T5_MARK = "encoder.block.0.layer.0.SelfAttention.q.weight"
_GEMMA_LAYER = re.compile(r"^(.*?)layers\.0\.(?:self_attn\.q_proj|post_feedforward_layernorm)\.weight$")


@dataclass(frozen=True)
class Part:
    """One component inside files: logical name -> stored name, and its kind where a component has several.

    kind: text_encoder t5 | gemma3 | gemma4; video_vae 0.9.0 | 0.9.1 | 0.9.5 | conv7 (19B) | conv9 (2.3, 2.5) | diffusion (2.5);
    vocoder plain | bwe; text_projection v1 | v2; else "".
    """

    component: str
    files: tuple[SafetensorsFile, ...]
    names: dict[str, str] = field(repr=False)
    kind: str = ""

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Logical name -> shape as stored."""
        return {name: f.spans[stored].info.shape for f in self.files for name, stored in self.names.items() if stored in f.spans}


def by_rank(parts: Mapping[str, Part]) -> list[Part]:
    """Parts by component, in the order of ``COMPONENTS``."""
    return [parts[c] for c in COMPONENTS if c in parts]


def open_files(path: str | Path) -> list[SafetensorsFile]:
    """The safetensors file, or the files of a Hugging Face model folder (shards), that ``path`` names."""
    path = checked_path(path)
    if not path.is_dir():
        return [SafetensorsFile.open(path)]
    index = sorted(path.glob("*.safetensors.index.json"))
    if index:
        names = sorted(set(json.loads(index[0].read_text(encoding="utf-8")).get("weight_map", {}).values()))
        absent = [n for n in names if not (path / n).exists()]
        if absent:
            raise CheckpointError("checkpoint.shard", f"{path.name} lacks {len(absent)} of its {len(names)} weight files, such as {absent[0]}.", "Download the folder again, whole.")
        return [SafetensorsFile.open(path / n) for n in names]
    found = sorted(path.glob("model*.safetensors")) or sorted(path.glob("*.safetensors"))
    return [SafetensorsFile.open(p) for p in found]


def find_parts(files: Iterable[SafetensorsFile]) -> list[Part]:
    """The components in ``files`` (the shards of one model count together). Raises CheckpointError for LoRAs and strangers."""
    files = tuple(files)
    names = [n for f in files for n in f.spans]
    label = files[0].path.name if len(files) == 1 else f"{files[0].path.parent.name}/"
    _refuse(names, label)
    parts = [p for p in (_transformer(files, names), _connectors(files, names), _projection(files, names), _video_vae(files, names)) if p]
    parts += [p for p in (_prefixed("audio_vae", files, names), _prefixed("vocoder", files, names), _text_encoder(files, names)) if p]
    if not parts:
        raise CheckpointError("checkpoint.family", f"{label} is no LTX model: none of its tensors are known.", f"It starts with {', '.join(names[:3])}.")
    return parts


_PACK_FOLDERS = (".", "checkpoints", "diffusion_models", "unet", "text_encoders", "clip", "vae")


def folder_parts(folder: Path, explicit: Container[str] = ()) -> list[Part]:
    """The components of a folder that holds one model: a split pack with ComfyUI's subfolders, or all files beside each other.

    explicit: components whose file is given elsewhere, of which the folder may hold several.
    Raises CheckpointError when a component is there twice, or nothing is.
    """
    if (folder / "model_index.json").exists():
        raise CheckpointError("checkpoint.diffusers", f"{folder.name} is in the diffusers layout, which is not read.", _COMFYUI_FILE)
    found: dict[str, list[Part]] = {}
    for path in (p for sub in _PACK_FOLDERS for p in sorted((folder / sub).glob("*.safetensors"))):
        try:
            parts = find_parts([SafetensorsFile.open(path)])
        except CheckpointError as error:
            if error.code in ("checkpoint.is_lora", "checkpoint.is_other", "checkpoint.family"):
                continue  # a pack's LoRAs and upscalers lie beside its models
            raise
        for part in parts:
            found.setdefault(part.component, []).append(part)
    if not found:
        raise CheckpointError("checkpoint.is_folder", f"The folder {folder.name} holds no LTX model files.", f"Looked in it and in {', '.join(_PACK_FOLDERS[1:])}.")
    for component, parts in found.items():
        if len(parts) > 1 and component not in explicit:
            names = ", ".join(p.files[0].path.name for p in parts)
            raise CheckpointError(
                "checkpoint.duplicate", f"The folder {folder.name} holds the {component.replace('_', ' ')} {len(parts)} times.", f"{names}: give the file itself instead of the folder."
            )
    return [parts[0] for parts in found.values()]


_COMFYUI_FILE = "Get the single .safetensors file the vendor publishes for ComfyUI."


def _refuse(names: list[str], label: str) -> None:
    if not names:
        raise CheckpointError("checkpoint.empty", f"{label} holds no tensors.", "Download the file again.")
    if sum(bool(_LORA.search(n)) for n in names) * 2 > len(names):
        raise CheckpointError("checkpoint.is_lora", f"{label} is a LoRA, not a model.", "Give the LTX checkpoint it was made for here; a LoRA goes into the LoRA fields.")
    if any(n.startswith("duration_head.") for n in names):
        raise CheckpointError("checkpoint.is_other", f"{label} is a duration head (a model patch), not a model.", "Give the transformer or unified checkpoint.")
    if any(n.startswith(("upsampler.", "post_upsample_res_blocks.")) for n in names):
        raise CheckpointError("checkpoint.is_other", f"{label} is a latent upscaler, not a model.", "Give the transformer or unified checkpoint.")
    if "proj_in.weight" in names and any(n.startswith(("time_embed.", "transformer_blocks.0.attn1.norm_q")) for n in names):
        raise CheckpointError(
            "checkpoint.diffusers", f"{label} is in the diffusers layout, which is not read.", _COMFYUI_FILE
        )


def _transformer(files: tuple[SafetensorsFile, ...], names: list[str]) -> Part | None:
    bare = {n[len(TRANSFORMER_PREFIX) :]: n for n in names if n.startswith(TRANSFORMER_PREFIX)} or {n: n for n in names}
    if not is_transformer(bare):
        return None
    mine = {b: n for b, n in bare.items() if not _CONNECTOR.match(b)}
    if bare[next(iter(bare))] == next(iter(bare)):  # a bare file may hold other components beside
        mine = {b: n for b, n in mine.items() if not b.startswith((_PROJECTION, "vae.", "audio_vae.", "vocoder."))}
    return Part("transformer", files, mine)


def _connectors(files: tuple[SafetensorsFile, ...], names: list[str]) -> Part | None:
    mine = {m.group(2): n for n in names if (m := _CONNECTOR.match(n))}
    return Part("connectors", files, mine) if mine else None


def _projection(files: tuple[SafetensorsFile, ...], names: list[str]) -> Part | None:
    mine = {n[len(_PROJECTION) :]: n for n in names if n.startswith(_PROJECTION)}
    kind = "v2" if "video_aggregate_embed.weight" in mine else "v1"
    return Part("text_projection", files, mine, kind) if mine else None


def _prefixed(component: str, files: tuple[SafetensorsFile, ...], names: list[str]) -> Part | None:
    mine = {n[len(component) + 1 :]: n for n in names if n.startswith(component + ".")}
    if not mine:
        return None
    kind = "" if component != "vocoder" else "bwe" if any(n.startswith("bwe_generator.") for n in mine) else "plain"
    return Part(component, files, mine, kind)


def _video_vae(files: tuple[SafetensorsFile, ...], names: list[str]) -> Part | None:
    mine = {n[4:]: n for n in names if n.startswith("vae.")}
    if not mine:
        tops = ("encoder.", "decoder.", "per_channel_statistics.")
        mine = {n: n for n in names if n.startswith(tops)} if {"encoder.conv_in.conv.weight", "decoder.conv_in_x_t.weight", "decoder.conv_in.conv.weight"} & set(names) else {}
    return Part("video_vae", files, mine, video_vae_kind(mine)) if mine else None


def video_vae_kind(names: Iterable[str]) -> str:
    """Which video VAE the bare names are of (see :class:`Part`)."""
    names = set(names)
    if "decoder.conv_in_x_t.weight" in names:
        return "diffusion"
    plain_down = "encoder.down_blocks.1.conv.bias" in names  # a strided convolution; later VAEs have a residual .conv.conv
    if "decoder.timestep_scale_multiplier" in names or any(n.startswith("decoder.last_time_embedder.") for n in names):
        return "0.9.1" if plain_down else "0.9.5"
    if plain_down:
        return "0.9.0"
    return "conv9" if any(n.startswith("decoder.up_blocks.8.") for n in names) else "conv7"


def _text_encoder(files: tuple[SafetensorsFile, ...], names: list[str]) -> Part | None:
    mine = {n: n for n in names if not n.startswith((_PROJECTION, TRANSFORMER_PREFIX, "vae.", "audio_vae.", "vocoder."))}
    if _T5_MARK in mine:
        return Part("text_encoder", files, mine, "t5")
    prefix = next((m.group(1) for n in mine if (m := _GEMMA_LAYER.match(n))), None)
    if prefix is None or "vision" in prefix:
        return None
    layer = f"{prefix}layers.0."
    if f"{layer}layer_scalar" in mine:
        return Part("text_encoder", files, mine, "gemma4")
    if f"{layer}post_feedforward_layernorm.weight" in mine and f"{layer}self_attn.q_norm.weight" in mine:
        return Part("text_encoder", files, mine, "gemma3")
    return Part("text_encoder", files, mine, "other")
