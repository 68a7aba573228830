"""Text encoder files: which encoder they are, whether it is the right one, and where the tokenizer is."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import CheckpointError
from .checkpoint_parts import Part
from .families import Family
from .safetensors_file import checked_path

if TYPE_CHECKING:
    from .checkpoint import Component

_TITLES = {"t5": "T5-XXL", "gemma3": "Gemma 3 12B", "gemma4": "Gemma 4 12B-LTX", "other": "another language model"}
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "spiece.model")


def text_encoder_folder(path: str | Path) -> Path:
    """The file or the folder with the weights: a model repository's ``text_encoder`` folder when ``path`` is its root."""
    place = checked_path(path)
    if not place.is_dir():
        return place
    for folder in (place, place / "text_encoder"):
        if folder.is_dir() and any(folder.glob("*.safetensors")):
            return folder
    raise CheckpointError("checkpoint.missing_file", f"The folder {place.name} holds no .safetensors weights.", f"{place}\nGive the folder with config.json and model*.safetensors.")


def check_text_encoder(family: Family, parts: Mapping[str, Part], components: Mapping[str, Component]) -> None:
    """Refuse an encoder of another kind, size or version than the family's, naming the file that is wanted."""
    part = parts["text_encoder"]
    name = part.files[0].path.name if len(part.files) == 1 else part.files[0].path.parent.name
    wanted = family.supplies["text_encoder"]
    if part.kind != family.text:
        raise CheckpointError(
            "checkpoint.wrong_text_encoder", f"{name} is {_TITLES[part.kind]}; {family.title} needs {_TITLES[family.text]}.", f"Give {wanted}."
        )
    layers, hidden = encoder_size(part)
    expected = _expected_width(family, components)
    if expected is not None and expected != (hidden if family.text == "t5" else (layers + 1) * hidden):
        raise CheckpointError("checkpoint.wrong_text_encoder", f"{name} is a {_TITLES[part.kind].split()[0]} of another size ({layers} layers, width {hidden}).", f"Give {wanted}.")
    asked = _gemma_version(next((f.metadata["gemma_source_checkpoint"] for p in parts.values() for f in p.files if "gemma_source_checkpoint" in f.metadata), None))
    said = _gemma_version(next((f.metadata["gemma_config"] for f in part.files if "gemma_config" in f.metadata), None))
    if asked and said and asked != said:
        raise CheckpointError("checkpoint.wrong_text_encoder", f"{name} is {said}; this checkpoint was made with {asked}.", f"Give {wanted}.")
    if part.kind == "gemma4" and said is None and "text_projection" not in components:
        raise CheckpointError("checkpoint.wrong_text_encoder", f"{name} is a stock Gemma 4, without the text projection of LTX-2.5.", f"Give {wanted}.")


def encoder_size(part: Part) -> tuple[int, int]:
    """(layers, hidden width) of a text encoder, by its tensors."""
    key = ".block." if part.kind == "t5" else "layers."
    names = [n for n in part.names if key in n and "vision" not in n and "audio_tower" not in n]
    layers = 1 + max(int(n.split(key, 1)[1].split(".", 1)[0]) for n in names)
    last = ".final_layer_norm.weight" if part.kind == "t5" else ".norm.weight"  # one-dimensional, so never packed by a quantisation
    norm = next(n for n in part.names if f".{n}".endswith(last) and key not in n and "vision" not in n and "audio" not in n)
    stored = part.names[norm]
    width = next(f.spans[stored].info.shape[-1] for f in part.files if stored in f.spans)
    return layers, width


def _expected_width(family: Family, components: Mapping[str, Component]) -> int | None:
    """What the next module takes: all hidden states side by side, or the T5 width; None when it is not among the files."""
    if family.text == "t5":
        found, name = components.get("transformer"), "caption_projection.linear_1.weight"
    else:
        found = components.get("text_projection")
        name = "aggregate_embed.weight" if family.feature_kind == "v1" else "video_aggregate_embed.weight"
    return found.source.info(name).shape[1] if found is not None and name in found.source else None


def _gemma_version(raw: str | None) -> str | None:
    if not raw:
        return None
    try:
        value = json.loads(raw)
    except json.JSONDecodeError:
        return None  # free text in a repack: nothing to compare
    return value.get("gemma_version") if isinstance(value, dict) else None


def find_tokenizer(given: str | Path | None, encoder: Component | None) -> Path | None:
    """The tokenizer's folder or file: the one given, else beside the encoder; None when it is inside the encoder's file."""
    if given is not None:
        place = checked_path(given)
        if place.is_dir() and not _holds_tokenizer(place):
            raise CheckpointError("checkpoint.tokenizer", f"The folder {place.name} holds no tokenizer.", f"Wanted: one of {', '.join(_TOKENIZER_FILES)}.")
        if place.is_file() and place.suffix.lower() not in (".json", ".model"):
            raise CheckpointError("checkpoint.tokenizer", f"{place.name} is no tokenizer file.", f"Wanted: a folder with, or the file itself: {', '.join(_TOKENIZER_FILES)}.")
        return place
    if encoder is None or {"tokenizer_json", "spiece_model"} & set(encoder.source.keys()):
        return None
    first = encoder.files[0]
    folder = first.parent
    beside = [folder.parent / "tokenizer", folder] if len(encoder.files) > 1 or (folder / "config.json").exists() else []
    beside = [folder / f"{first.stem}_tokenizer", *beside, folder / "tokenizer", folder / "t5_tokenizer"]
    return next((p for p in beside if _holds_tokenizer(p)), None)


def _holds_tokenizer(folder: Path) -> bool:
    return folder.is_dir() and any((folder / n).is_file() for n in _TOKENIZER_FILES)
