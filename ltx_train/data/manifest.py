"""The manifest: what one dataset run encoded, as the list that training reads."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import DataError
from ..geometry import AudioGrid, VideoFactors, VideoGrid
from .listing import IMAGE_EXTENSIONS

if TYPE_CHECKING:
    from .buckets import ClipPlan

FORMAT = 1
KINDS = ("video", "audio", "mask", "text")
"""Kinds of cache entries, the beginnings of their keys."""


def grid_to_json(grid: VideoGrid | AudioGrid) -> dict[str, Any]:
    """A latent grid as JSON; :func:`grid_from_json` reads it."""
    return {"kind": "video" if isinstance(grid, VideoGrid) else "audio", **asdict(grid)}


def grid_from_json(data: Mapping[str, Any]) -> VideoGrid | AudioGrid:
    """The grid that :func:`grid_to_json` wrote."""
    values = {k: v for k, v in data.items() if k != "kind"}
    if data["kind"] == "audio":
        return AudioGrid(**values)
    return VideoGrid(**{**values, "factors": VideoFactors(**values["factors"])})


@dataclass(frozen=True)
class ManifestEntry:
    """One piece of training data: keys of its cache entries and what the sampler needs to know.

    audio: key, or None for no sound. audio_steps: latent steps of its sound, or those that it would have.
    roles: keys of references and masks. tokens: latent tokens of the clip.
    """

    id: str
    path: str
    caption: str
    text: str
    video: str | None = None
    audio: str | None = None
    audio_steps: int = 0
    roles: Mapping[str, str] = field(default_factory=dict)
    bucket: str = ""
    fps: float = 24.0
    seconds: float = 0.0
    tokens: int = 0
    repeats: int = 1
    weight: float = 1.0
    dataset: str = ""
    still_reference: bool = False
    regularisation: str = ""

    @property
    def group(self) -> str:
        """Entries of one group have tensors of one shape and rate, so they may share a batch."""
        return f"{self.bucket or 'sound'}@{self.fps:g}/{self.audio_steps}/{'+'.join(sorted(self.roles))}{'/still' * self.still_reference}"


def manifest_entry(
    plan: ClipPlan, *, text: str, video: str | None, audio: str | None, audio_grid: AudioGrid | None, factors: VideoFactors, roles: Mapping[str, str] | None = None
) -> ManifestEntry:
    """The manifest's line for a plan whose entries are in the cache."""
    steps = audio_grid.of_seconds(plan.seconds).steps if audio_grid is not None else 0
    still = plan.bucket is not None and plan.bucket.frames == 1
    media = plan.media
    roles = dict(roles or {})
    reference = plan.sample.roles.get("reference_video")
    still_reference = "reference_video" in roles and reference is not None and reference.suffix.lower() in IMAGE_EXTENSIONS
    return ManifestEntry(
        plan.id, str(media) if isinstance(media, Path) else media.name, plan.sample.caption, text, video, audio, 0 if still and audio is None else steps, roles,
        str(plan.bucket or ""), round(float(plan.fps), 6), round(plan.seconds, 6), plan.bucket.tokens(factors) if plan.bucket else 0,
        plan.sample.repeats, plan.sample.weight, plan.sample.dataset, still_reference, plan.sample.regularisation,
    )  # fmt: skip


def _entry(data: Mapping[str, Any]) -> ManifestEntry:
    """An index's line. Raises ValueError for keys that name no entry of a cache and for numbers that are none."""
    entry = ManifestEntry(**data)
    for key in (entry.text, entry.video, entry.audio, *entry.roles.values()):
        if key is not None and not (isinstance(key, str) and re.fullmatch(rf"(?:{'|'.join(KINDS)})-\w+", key)):
            raise ValueError(f"{str(key)[:40]!r} is no key of a cache")
    numbers = (entry.weight, entry.repeats, entry.fps, entry.seconds, entry.tokens, entry.audio_steps)
    if not all(isinstance(n, int | float) for n in numbers) or entry.repeats < 1:
        raise ValueError(f"the numbers of {entry.id!s:.40} are {numbers}")
    return entry


@dataclass(frozen=True)
class Manifest:
    """One dataset run: its entries, what was left out and why, the texts, and the model that it is for.

    texts: keys of further texts (validation prompts, "" for caption dropout). model: family name, fingerprints, factors.
    """

    entries: tuple[ManifestEntry, ...]
    model: Mapping[str, Any] = field(default_factory=dict)
    skipped: tuple[Mapping[str, Any], ...] = ()
    texts: Mapping[str, str] = field(default_factory=dict)
    audio_grid: AudioGrid | None = None

    def to_json(self) -> dict[str, Any]:
        grid = grid_to_json(self.audio_grid) if self.audio_grid else None
        return {
            "format": FORMAT, "model": dict(self.model), "texts": dict(self.texts), "audio_grid": grid, "skipped": [dict(s) for s in self.skipped],
            "entries": [asdict(e) for e in self.entries],
        }  # fmt: skip

    @classmethod
    def read(cls, path: str | Path) -> Manifest:
        """Read an ``index.json`` (or the one in a folder)."""
        path = Path(path).expanduser()
        path = path / "index.json" if path.is_dir() else path
        try:
            data = json.loads(path.read_text(encoding="utf-8"))
            grid = grid_from_json(data["audio_grid"]) if data.get("audio_grid") else None
            entries = tuple(_entry(e) for e in data["entries"])
        except FileNotFoundError as error:
            raise DataError("cache.no_index", f"There is no index.json in {path.parent}.", "Preprocess the dataset first.") from error
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise DataError("cache.index", f"{path.name} is damaged or of another version.", f"{path}: {error}. Preprocess again; encoded clips are kept.") from error
        if data.get("format") != FORMAT:
            raise DataError("cache.index", f"{path.name} has format {data.get('format')}; this version reads {FORMAT}.", "Preprocess again.")
        return cls(entries, data["model"], tuple(data["skipped"]), data["texts"], grid)
