"""The sockets between our nodes, and what travels through them: names of files and settings, never a loaded model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from comfy_api.latest import io

from ..ltx_train.config import DataSection, ModelSection
from ..ltx_train.runs.run_dir import RunDir

Model = io.Custom("LTX_MODEL")
Dataset = io.Custom("LTX_DATASET")
Cache = io.Custom("LTX_CACHE")
Run = io.Custom("LTX_RUN")
Settings = {
    name: io.Custom(f"LTX_{name.upper()}")
    for name in ("adapter", "optimizer", "objective", "validation", "memory", "checkpoints", "mode_settings", "distribution", "clips")
}
"""One socket a settings node: what it sets cannot be plugged in elsewhere."""



class _ComboType(str):
    """``COMBO``, which also counts as equal to a list of choices.

    ComfyUI's older nodes (LoraLoader among them) state a dropdown's type as its list of names, and 0.33 refuses a link
    of type COMBO into it unless the types do not differ.
    """

    __hash__ = str.__hash__
    __eq__ = str.__eq__

    def __ne__(self, other: object) -> bool:
        return not isinstance(other, list) and str.__ne__(self, other)


LoraName = io.Custom(_ComboType("COMBO"))
"""The name of a LoRA, for the dropdown of any loader."""

CATEGORY = "LTX Train"


@dataclass(frozen=True)
class LtxModel:
    """The files of one model and what their headers say.

    widths: of the text features, (video,) or (video, audio). missing: component -> the file that would supply it.
    """

    section: ModelSection
    family: str
    title: str
    audio: bool
    feature_kind: str
    widths: tuple[int, ...]
    fingerprint: str
    missing: Mapping[str, str] = field(default_factory=dict)
    summary: str = ""


@dataclass(frozen=True)
class LtxDataset:
    """One dataset or several: a data section without a cache, and the name it goes by."""

    data: DataSection
    name: str
    report: str = ""


@dataclass(frozen=True)
class LtxCache:
    """An encoded dataset: the data section that a training job carries. encoder: ``engine``, or ``comfyui`` for lent models."""

    data: DataSection
    name: str
    family: str
    encoder: str = "engine"


@dataclass(frozen=True)
class LtxRun:
    """A run on disk."""

    path: Path

    @property
    def dir(self) -> RunDir:
        return RunDir(self.path)


@dataclass(frozen=True)
class SettingsOf:
    """What a settings node says: fields of one section (and, for a mode, of its neighbours)."""

    section: str
    fields: Mapping[str, Any]
