"""Which text encoder a file holds, its tensors under one set of names, and the words for a wrong one."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import CheckpointError
from .weights import WeightSource

TITLES = {"t5": "T5-XXL", "gemma3": "Gemma 3 12B", "gemma4": "LTX Gemma 4 12B"}
GET = {
    "t5": "LTX-Video reads t5xxl_fp16.safetensors (ComfyUI models/text_encoders), a scaled fp8 T5-XXL, or a Hugging Face folder of the T5 v1.1 XXL encoder.",
    "gemma3": "LTX-2 and 2.3 read gemma_3_12B_it.safetensors (ComfyUI models/text_encoders) or a Hugging Face folder of gemma-3-12b-it.",
    "gemma4": "LTX-2.5 reads gemma4-12b-with-proj-ltx-2.5-bf16.safetensors (ComfyUI models/text_encoders) or its int8 repack.",
}

_GEMMA_MARK = "layers.0.self_attn.q_proj.weight"
_T5_MARK = "block.0.layer.0.SelfAttention.q.weight"
_TOWERS = ("vision_", "multi_modal_projector.", "audio_", "embed_vision.", "embed_audio.", "visual.")


@dataclass(frozen=True)
class EncoderWeights:
    """The language model inside a text encoder file.

    kind: ``t5``, ``gemma3`` or ``gemma4``. source: its tensors as ``embed_tokens.weight``, ``layers.N...`` /
    ``block.N...``, ``norm.weight`` / ``final_layer_norm.weight``; towers, lm_head and tokenizer assets are left out.
    settings: the text part of the config that came with the file ({} when none did). version: ``gemma_version``.
    """

    kind: str
    source: WeightSource
    settings: Mapping[str, Any]
    version: str | None

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: tuple(self.source.info(name).shape) for name in self.source.keys()}


def read_encoder(source: WeightSource) -> EncoderWeights:
    """Find the language model by its tensor names, whatever prefix they carry.

    Raises CheckpointError when the file holds none that an LTX model reads.
    """
    names = source.keys()
    config = _config(source)
    settings = config.get("text_config") or config
    version = config.get("gemma_version")
    if prefix := _prefix(names, _T5_MARK):
        return EncoderWeights("t5", source.renamed(lambda n: _t5_name(n, prefix[0], names)), settings, None)
    gemma = _prefix(names, _GEMMA_MARK)
    if gemma and f"{gemma[0]}layers.0.self_attn.q_norm.weight" in source and f"{gemma[0]}layers.0.pre_feedforward_layernorm.weight" in source:
        kind = "gemma4" if f"{gemma[0]}layers.0.layer_scalar" in source else "gemma3"
        return EncoderWeights(kind, source.renamed(lambda n: _gemma_name(n, gemma[0])), settings, version)
    found = f"its tensors look like {names[0][:60]}" if names else "it holds no tensors"
    raise CheckpointError(
        "text_encoder.unknown", f"{_files(source)} holds no T5, Gemma 3 or Gemma 4 text model.", f"In it {found}. {' '.join(GET.values())}"
    )


def check_encoder(weights: EncoderWeights, *, wanted: str, family: str, version: str | None) -> None:
    """Refuse an encoder of another kind, or a Gemma 4 other than the one the checkpoint was trained with, by name.

    wanted: the family's encoder kind. version: the checkpoint's ``gemma_source_checkpoint.gemma_version``.
    """
    file = _files(weights.source)
    if weights.kind != wanted:
        found = {"gemma4": "Gemma 4", "gemma3": "Gemma 3", "t5": "T5"}[weights.kind]
        raise CheckpointError("text_encoder.wrong", f"{family} needs {TITLES[wanted]} for its text, but {file} is {found}.", GET[wanted])
    stated = bool(weights.settings)  # a repack without any config has nothing to compare
    if wanted == "gemma4" and version is not None and stated and weights.version != version:
        stock = f"version {weights.version}" if weights.version else "a stock Gemma 4 (no gemma_version)"
        raise CheckpointError("text_encoder.version", f"{family} needs {version} for its text, but {file} is {stock}.", GET[wanted])


def required_version(metadata: Mapping[str, Any]) -> str | None:
    """The ``gemma_version`` a checkpoint's metadata asks for, None when it says nothing."""
    stated = _parsed(metadata.get("gemma_source_checkpoint"))
    return stated.get("gemma_version") if isinstance(stated, Mapping) else None


def check_layers(weights: EncoderWeights) -> None:
    """Refuse layer tensors that no known layer has (mixture of experts, per-layer inputs), naming the first."""
    prefix = r"layers\.\d+\.|norm\.weight$|embed_tokens\.weight$" if weights.kind != "t5" else r"block\.\d+\.|final_layer_norm\.|embed_tokens\.weight$"
    strange = [name for name in weights.source.keys() if not re.match(prefix, name)]
    if strange:
        raise CheckpointError(
            "text_encoder.tensors", f"{_files(weights.source)} has text tensors no {TITLES[weights.kind]} has: {strange[0][:40]}.", GET[weights.kind]
        )


def _prefix(names: list[str], mark: str) -> tuple[str] | None:
    """The shortest prefix before a name ending in ``mark`` outside the vision and audio towers, in a 1-tuple ('' is a prefix)."""
    found = [n[: -len(mark)] for n in names if n.endswith(mark)]
    found = [p for p in found if (p == "" or p.endswith(".")) and not any(t in p for t in _TOWERS)]
    return (min(found, key=len),) if found else None


def _t5_name(name: str, prefix: str, names: list[str]) -> str | None:
    if name.startswith(prefix) and not name.startswith(f"{prefix}embed_tokens"):
        return name[len(prefix) :]
    outer = prefix.removesuffix("encoder.")
    shared = f"{outer}shared.weight"
    embedding = shared if shared in names else f"{prefix}embed_tokens.weight"
    return "embed_tokens.weight" if name == embedding else None


def _gemma_name(name: str, prefix: str) -> str | None:
    if not name.startswith(prefix):
        return None
    rest = name[len(prefix) :]
    if rest.startswith(_TOWERS) or rest.startswith(("lm_head", "language_model.", "text_embedding_projection.", "tokenizer_json", "hf_asset__", "spiece_model")):
        return None
    return rest


def _config(source: WeightSource) -> Mapping[str, Any]:
    """The encoder's config: ``gemma_config`` metadata of a packed file, or the folder's config.json."""
    packed = _parsed(source.metadata.get("gemma_config"))
    if isinstance(packed, Mapping):
        return packed
    for folder in dict.fromkeys(Path(path).parent for path in source.paths):
        file = folder / "config.json"
        sharded = len(source.paths) > 1 or source.paths[0].name.startswith(("model", "pytorch_model"))
        if sharded and file.is_file():
            content = _parsed(file.read_text(encoding="utf-8"))
            if isinstance(content, Mapping) and ("hidden_size" in content or "text_config" in content or "d_model" in content):
                return content
    return {}


def _parsed(value: Any) -> Any:
    if not isinstance(value, (str, bytes)):
        return value
    try:
        return json.loads(value)
    except ValueError:
        return value


def _files(source: WeightSource) -> str:
    paths = source.paths
    return paths[0].name[:36] if len(paths) == 1 else f"{paths[0].parent.name[:24]}/ ({len(paths)} files)"
