"""What model files hold, as plain data: the report behind ``inspect``."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from ..errors import CheckpointError
from .blank import blank
from .checkpoint import Checkpoint, Component
from .checkpoint_parts import find_parts, open_files
from .safetensors_file import checked_path
from .text_files import text_encoder_folder
from .transformer import LTXTransformer, transformer_source
from .weights import check_weights


def inspect_files(paths: Iterable[str | Path]) -> dict[str, Any]:
    """The report on one model given as ``paths`` (a unified file, or a split pack, text encoder included), ready for JSON.

    Keys: family, title, version, distilled, fingerprint, components {name: {kind, files, tensors, parameters, dtypes,
    quantisation, fingerprint}}, missing {name: file that supplies it}, quantisation {format: weights}, video_factors
    [time, height, width], audio_steps_per_second, transformer {layers, heads, width, audio_width...}, tokenizer, files, faults
    [what loading would refuse, in words: transformer tensors missing, left over or of another shape].
    Raises CheckpointError as :meth:`Checkpoint.open`.
    """
    models, encoders = [], []
    for path in paths:
        (encoders if is_encoder(path) else models).append(path)
    if not models and encoders:
        return describe(Checkpoint.open(text_encoder=encoders[0]))
    return describe(Checkpoint.open(*models, *encoders[1:], text_encoder=encoders[0] if encoders else None))


def is_encoder(path: str | Path) -> bool:
    """Whether a path is a text encoder: a file or folder of weights that holds nothing else but its projection."""
    place = checked_path(path)
    if place.is_dir() and not any(any(folder.glob("*.safetensors")) for folder in (place, place / "text_encoder")):
        return False  # a pack with its models in folders of kinds
    found = {p.component for p in find_parts(open_files(text_encoder_folder(path)))}
    return "text_encoder" in found and found <= {"text_encoder", "text_projection"}


def describe(checkpoint: Checkpoint) -> dict[str, Any]:
    """The report of an open checkpoint (see :func:`inspect_files`)."""
    components = {n: _component(checkpoint, c) for n, c in checkpoint.components.items()}
    quantisation: dict[str, int] = {}
    for found in components.values():
        for kind, count in found["quantisation"].items():
            quantisation[kind] = quantisation.get(kind, 0) + count
    factors, config = checkpoint.video_factors, checkpoint.transformer
    report: dict[str, Any] = {
        "family": checkpoint.family.name,
        "title": checkpoint.family.title,
        "version": checkpoint.model_version,
        "distilled": checkpoint.distilled,
        "fingerprint": checkpoint.fingerprint,
        "components": components,
        "missing": checkpoint.missing,
        "quantisation": quantisation,
        "video_factors": [factors.time, factors.height, factors.width],
        "audio_steps_per_second": checkpoint.audio_grid.steps_per_second if checkpoint.family.audio else None,
        "tokenizer": str(checkpoint.tokenizer_path) if checkpoint.tokenizer_path else None,
        "files": [str(p) for p in checkpoint.files],
        "faults": _faults(checkpoint),
    }
    if config is not None:
        report["transformer"] = {"layers": config.num_layers, "heads": config.num_attention_heads, "width": config.dim, "audio_width": config.audio_dim}
    return report


def _faults(checkpoint: Checkpoint) -> list[str]:
    """What the strict load of the transformer would refuse; nothing is read but headers."""
    if checkpoint.transformer is None:
        return []
    with blank():
        model = LTXTransformer(checkpoint.transformer)
    try:
        check_weights(model, transformer_source(checkpoint, model))
    except CheckpointError as error:
        return [f"{error.message}\n{error.hint}"]
    return []


def _component(checkpoint: Checkpoint, component: Component) -> dict[str, Any]:
    parameters, dtypes = 0, {}
    for name in component.source.keys():
        info = component.source.info(name)
        count = 1
        for n in info.shape:
            count *= n
        label = component.source.format(name) or str(info.dtype).removeprefix("torch.")
        dtypes[label] = dtypes.get(label, 0) + 1
        parameters += count if info.dtype.is_floating_point else 0
    return {
        "kind": component.kind,
        "files": [str(p) for p in component.files],
        "tensors": len(component.source),
        "parameters": parameters,
        "dtypes": dtypes,
        "quantisation": component.quantisation,
        "fingerprint": checkpoint.fingerprint_of(component.name),
    }
