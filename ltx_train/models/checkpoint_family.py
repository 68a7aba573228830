"""Which family the parts of a model are of, and whether they go together."""

from __future__ import annotations

from collections.abc import Mapping

from ..errors import CheckpointError
from .checkpoint_parts import Part, by_rank
from .families import FAMILIES, Family, detect_family

_VAES = {
    "ltxv-2b": ("0.9.0", "0.9.1", "0.9.5"), "ltxv-13b": ("0.9.5",), "ltx2": ("conv7",), "ltx2.3": ("conv9",), "ltx2.5": ("conv9", "diffusion"),
}  # fmt: skip
_BY_VAE = {"0.9.0": "ltxv-2b", "0.9.1": "ltxv-2b", "0.9.5": "ltxv-2b", "conv7": "ltx2", "conv9": "ltx2.3", "diffusion": "ltx2.5"}
_VERSIONS = ("2.5", "2.3")
"""``model_version`` begins with one of them in files of the families that say it."""


def family_of(parts: Mapping[str, Part]) -> Family:
    """The family: by the transformer, else by what the other components can tell."""
    if "transformer" in parts:
        return detect_family(parts["transformer"].shapes)
    hint = next((name for part in by_rank(parts) if (name := _by_version(part))), None)
    if hint is not None:
        return FAMILIES[hint]
    kind = parts["video_vae"].kind if "video_vae" in parts else None
    text = parts["text_encoder"].kind if "text_encoder" in parts else None
    if kind is not None:
        return FAMILIES["ltx2.5" if kind == "conv9" and text == "gemma4" else _BY_VAE[kind]]
    if "text_projection" in parts:
        return FAMILIES["ltx2" if parts["text_projection"].kind == "v1" else "ltx2.5" if text == "gemma4" else "ltx2.3"]
    if "vocoder" in parts:
        return FAMILIES["ltx2" if parts["vocoder"].kind == "plain" else "ltx2.3"]
    return FAMILIES[{"t5": "ltxv-2b", "gemma4": "ltx2.5"}.get(text or "", "ltx2.3")]


def check_one_family(family: Family, parts: Mapping[str, Part]) -> None:
    """Refuse components of another family in split files: CheckpointError ``checkpoint.mixed``."""
    vocoder = ("plain",) if family.name == "ltx2" else ("bwe",) if family.audio else ()
    allowed = {"video_vae": _VAES[family.name], "vocoder": vocoder, "text_projection": (family.feature_kind,) if family.audio else ()}
    for component, kinds in allowed.items():
        part = parts.get(component)
        if part is not None and part.kind not in kinds:
            raise _mixed(family, part)
    for component in ("audio_vae", "connectors"):
        if component in parts and not family.audio:
            raise _mixed(family, parts[component])
    for part in parts.values():
        if part.component not in ("transformer", "text_encoder") and _by_version(part) not in (None, family.name):
            raise _mixed(family, part)


def _by_version(part: Part) -> str | None:
    """The family that a part's files name in ``model_version``; None where they name none."""
    version = next((f.metadata["model_version"] for f in part.files if "model_version" in f.metadata), "")
    return next((f"ltx{number}" for number in _VERSIONS if version.startswith(number)), None)


def _mixed(family: Family, part: Part) -> CheckpointError:
    what = part.component.replace("_", " ")
    wanted = family.supplies.get(part.component, "no such file: this family makes video only")
    are = "are" if what.endswith("s") else "is"
    return CheckpointError("checkpoint.mixed", f"{part.files[0].path.name}: its {what} {are} not of {family.title}.", f"All files must be of one family. Wanted: {wanted}.")
