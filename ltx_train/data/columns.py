"""The columns of dataset files: what each may be called, and what a row says in them (paths, captions, numbers)."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .listing import CAPTION_NAMES

COLUMNS: dict[str, tuple[str, ...]] = {
    "video": ("video", "media_path", "video_path", "media", "path", "file_path", "file", "file_name", "filename", "image", "image_path"),
    "audio": ("audio", "audio_path"),
    "reference_video": ("reference_video", "ref_media_path", "reference_path", "reference", "reference_image", "control_path", "control"),
    "reference_audio": ("reference_audio", "ref_audio_path"),
    "video_mask": ("video_mask", "mask_path", "mask"),
    "audio_mask": ("audio_mask",),
    "caption": CAPTION_NAMES,
}
"""Column names of each role, the official one first."""


def cell(columns: Mapping[str, Any], role: str, override: str | None = None) -> str | None:
    """The text of a role's column, or of the one named ``override``; None where the row has none."""
    for name in (override.lower(),) if override else COLUMNS[role]:
        value = columns.get(name)
        if isinstance(value, list):
            value = ", ".join(str(v) for v in value)
        if value is not None and str(value).strip():
            return str(value).strip()
    return None


def cell_path(table: Path, columns: Mapping[str, Any], role: str, override: str | None = None) -> Path | None:
    """The file that a row of ``table`` names for a role; relative paths start at the table's folder."""
    value = cell(columns, role, override)
    if value is None:
        return None
    path = Path(os.path.expanduser(value))
    found = path if path.is_absolute() else table.parent / path
    if "\\" in value and not is_file(found):  # written on Windows, read elsewhere
        found = table.parent / value.replace("\\", "/")
    return found


def names_media(table: Path, columns: Mapping[str, Any]) -> bool:
    """Whether a row names a clip or a sound."""
    return any(cell_path(table, columns, role) for role in ("video", "audio"))


def number_in(value: Any, default: float) -> float:
    """The finite number of a cell, or ``default``."""
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        return default
    return number if math.isfinite(number) else default


def is_file(path: Path) -> bool:
    """Whether a file is there; whatever a cell holds, this raises nothing."""
    try:
        return path.is_file()
    except (OSError, ValueError):  # longer than the disk allows, or with a zero inside
        return False


def relative_name(path: Path, root: Path) -> str:
    """A file's name from a folder, with forward slashes; its whole path from another drive of Windows."""
    try:
        return Path(os.path.relpath(path, root)).as_posix()
    except ValueError:
        return path.as_posix()
