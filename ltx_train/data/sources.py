"""Where clips come from: folders, dataset files, ComfyUI's lists, chains; each gives Samples."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field, InstanceOf, model_validator

from ..errors import DataError
from ..section import Section
from .columns import COLUMNS, cell, cell_path, is_file, names_media, number_in, relative_name
from .findings import Finding
from .listing import MEDIA_EXTENSIONS, Listing, Pairing, kohya_repeats, stems_of
from .texts import Text, caption_words, clean_prefix, read_rows, read_text, written_text

if TYPE_CHECKING:
    from torch import Tensor

ROLES = ("audio", "reference_video", "reference_audio", "video_mask", "audio_mask")
"""The media a sample may have beside its clip."""


@dataclass(frozen=True, eq=False)
class MemoryClip:
    """A clip that ComfyUI holds: frames [F,H,W,C] float 0..1 or uint8, waveform [channels, N] float, or either None."""

    name: str
    frames: Tensor | None = None
    fps: float = 24.0
    waveform: Tensor | None = None
    sample_rate: int = 44100


@dataclass(frozen=True)
class Sample:
    """One clip of a dataset, as the user gave it.

    id: unique and stable: the path inside the dataset, extension included. media: the video, image or sound file.
    roles: further files by :data:`ROLES`. repeats: times an epoch. weight: factor on its loss.
    buckets: a bucket set of its own dataset, or None. in_memory: a ComfyUI clip instead of a file.
    regularisation: "plain" or "prior" for a clip that keeps the model general (see :class:`DatasetSource`), else empty.
    """

    id: str
    media: Path | None
    caption: str
    roles: Mapping[str, Path] = field(default_factory=dict)
    repeats: int = 1
    weight: float = 1.0
    in_memory: MemoryClip | None = None
    findings: tuple[Finding, ...] = ()
    buckets: str | None = None
    dataset: str = ""
    regularisation: str = ""

    @property
    def refused(self) -> bool:
        return any(f.refused for f in self.findings)


class Captions(Section):
    """How captions are found and completed."""

    policy: Literal["auto", "file_name", "trigger", "empty"] = Field(
        "auto", description="auto: the caption file or column; file_name: words of the name; trigger: the trigger only; empty: no text."
    )
    missing: Literal["refuse", "file_name", "trigger", "empty"] = Field("refuse", description="What a clip without a caption gets; refuse leaves the clip out and says so.")
    trigger: str = Field("", description="Put before every caption, with a space.")
    remove_llm_prefixes: bool = Field(False, description="Strip openings such as 'This video shows'.")

    def resolve(self, written: str | None, stem: str) -> tuple[str, Finding | None]:
        """The training caption of a clip, and the finding when there is none."""
        written = written_text(written or "")
        how = self.policy
        if how == "auto":
            how = "written" if written else self.missing
        text = {"written": written, "file_name": caption_words(written_text(stem))}.get(how, "")
        if self.remove_llm_prefixes and how == "written":
            text = clean_prefix(text)
        if self.trigger and not re.match(re.escape(self.trigger) + r"(?!\w)", text):  # a trigger "cat" is not yet there in "category"
            text = f"{self.trigger} {text}".strip()
        if how == "refuse":
            return text, Finding("caption.missing", "no caption: neither a text beside the clip nor a caption column")
        if how == "trigger" and not self.trigger:
            return "", Finding("caption.missing", "the caption policy is 'trigger' and no trigger word is set")
        return text, None


class DatasetSource(Section):
    """What every source has: repeats, weight, buckets and captions of its own."""

    name: str = Field("", description="A short name in the report; the folder's or file's name when empty.")
    repeats: int = Field(1, ge=1, le=10000, description="Times an epoch each clip is seen.")
    weight: float = Field(1.0, ge=0, le=100, description="Factor on the loss of these clips.")
    regularisation: Literal["plain", "prior"] | None = Field(
        None, description="Clips of the general kind, weighed by flow_matching.regularisation_weight; prior: they train towards what the base model itself predicts."
    )
    resolution_buckets: str | None = Field(None, description="Buckets of this dataset alone, such as 768x512x49;512x512.")
    captions: Captions = Captions()

    def samples(self) -> list[Sample]:
        """The clips in a stable order; raises DataError when there is nothing to read."""
        raise AssertionError(f"{type(self).__name__} has no samples()")

    def _finish(self, sample: Sample, written: str | None, stem: str) -> Sample:
        caption, finding = self.captions.resolve(written, stem)
        return replace(
            sample,
            caption=caption,
            repeats=self.repeats * sample.repeats,
            weight=self.weight * sample.weight,
            regularisation=self.regularisation or "",
            buckets=self.resolution_buckets,
            findings=sample.findings + ((finding,) if finding else ()),
        )


class FolderSource(DatasetSource):
    """A folder, searched recursively, with captions beside the clips (.txt, .caption, .json)."""

    kind: Literal["folder"] = "folder"
    path: str = Field(description="The folder of clips.")
    recursive: bool = Field(True, description="Search folders inside too.")
    kohya_repeats: bool = Field(True, description="Folders named N_name repeat their clips N times.")
    pair_audio: bool = Field(True, description="A sound file of the same stem is the sound of a video.")
    reference_video: str | None = Field(None, description="Folder with a reference of the same stem for each clip.")
    reference_audio: str | None = Field(None, description="Folder with a reference sound of the same stem for each clip.")
    video_mask: str | None = Field(None, description="Folder with a mask of the same stem for each clip.")
    audio_mask: str | None = Field(None, description="Folder with a sound mask of the same stem for each clip.")
    audio: str | None = Field(None, description="Folder with the sound of the same stem for each clip.")

    def samples(self) -> list[Sample]:
        root = Path(self.path).expanduser()
        if not root.is_dir():
            raise DataError("dataset.missing", f"There is no folder {root}.", "Give the folder that holds the clips.")
        given = {role: Path(getattr(self, role)).expanduser() for role in ROLES if getattr(self, role)}
        folders = {role: path if path.is_absolute() or path.is_dir() else root / path for role, path in given.items()}
        listing = Listing(root, self.recursive, skip=tuple(folders.values()))
        if not listing.media:
            raise DataError("dataset.empty", f"No clip was found in {root}.", f"Known extensions: {' '.join(sorted(MEDIA_EXTENSIONS))}")
        paired = Pairing(listing, self.pair_audio)
        by_role = {role: stems_of(folder) for role, folder in folders.items()}
        repeats = kohya_repeats(root, listing.media) if self.kohya_repeats else {}
        return [self._sample(root, path, listing, paired, by_role, repeats) for path in paired.clips]

    def _sample(self, root: Path, path: Path, listing: Listing, paired: Pairing, by_role: dict[str, dict[str, Path]], repeats: dict[str, int]) -> Sample:
        relative = path.relative_to(root)
        written, findings = listing.caption(path)
        roles = dict(paired.roles.get(path, {}))
        for role, stems in by_role.items():
            match = stems.get(relative.with_suffix("").as_posix()) or stems.get(relative.stem)
            if match is None:
                findings.append(Finding("role.unpaired", f"no {role} of the stem {relative.stem}"))
            else:
                roles[role] = match
        count = repeats.get(relative.parts[0], 1) if len(relative.parts) > 1 else repeats.get("", 1)
        if count > 1:
            findings.append(Finding("repeats.folder", f"{count} repeats from the folder's name"))
        sample = Sample(relative.as_posix(), path, "", roles, count, findings=tuple(findings), dataset=self.name or root.name)
        return self._finish(sample, written, path.stem)


class TableSource(DatasetSource):
    """A CSV, JSON or JSONL file with the official columns (video or media_path, audio, caption, roles)."""

    kind: Literal["table"] = "table"
    path: str = Field(description="The dataset file; relative paths in it start at its folder.")
    columns: dict[Literal["video", "audio", "reference_video", "reference_audio", "video_mask", "audio_mask", "caption"], str] = Field(
        default_factory=dict, description="Names of columns where they are not the usual ones, such as caption: my_text."
    )

    def samples(self) -> list[Sample]:
        path = Path(self.path).expanduser()
        if not path.is_file():
            raise DataError("dataset.missing", f"There is no dataset file {path}.", "Give a .csv, .json or .jsonl file.")
        rows = read_rows(path)
        if not rows:
            raise DataError("dataset.empty", f"{path.name} holds no rows.", "A row needs a video (or media_path) and a caption.")
        self._check_columns(path, rows)
        encoding = read_text(path)
        seen: dict[str, int] = {}
        return [self._sample(path, row, encoding, seen) for row in rows]

    def _check_columns(self, path: Path, rows: list[Any]) -> None:
        known = sorted({name for row in rows for name in row.columns})
        media = {name.lower() for role in ("video", "audio") for name in (*COLUMNS[role], self.columns.get(role, "")) if name}
        if known and not media & set(known):
            shown = ", ".join(name[:30] for name in known[:6])
            raise DataError("dataset.column", f"{path.name[:60]} has no column that names the clips.", f"Call it video (or media_path), beside caption. The columns read: {shown}")
        for wanted in self.columns.values():
            if known and wanted.lower() not in known:
                raise DataError("dataset.column", f"{path.name} has no column {wanted}.", f"Its columns: {', '.join(known)}")

    def _sample(self, path: Path, row: Any, text: Text, seen: dict[str, int]) -> Sample:
        findings = [Finding("row.broken", row.fault)] if row.fault else []
        if text.guessed:
            findings.append(Finding("caption.guessed_encoding", f"{path.name} is not UTF-8; read as {text.encoding}"))
        media = cell_path(path, row.columns, "video", self.columns.get("video"))
        roles = {role: found for role in ROLES if (found := cell_path(path, row.columns, role, self.columns.get(role)))}
        if media is None:
            media = roles.pop("audio", None)  # a sound of its own
        if media is None and not row.fault:
            findings.append(Finding("row.no_media", f"row {row.number} names no media file"))
        if media is not None and not is_file(media):
            findings.append(Finding("media.missing", f"there is no file {media}"))
        findings += [Finding("role.missing", f"{role}: there is no file {file}") for role, file in roles.items() if not is_file(file)]
        name = relative_name(media, path.parent) if media else f"row {row.number}"
        seen[name] = seen.get(name, 0) + 1
        identity = name if seen[name] == 1 else f"{name}#{seen[name]}"
        columns = row.columns
        sample = Sample(
            identity,
            media,
            "",
            roles,
            max(1, int(number_in(columns.get("repeats"), 1))),
            max(0.0, number_in(columns.get("weight"), 1.0)),
            findings=tuple(findings),
            dataset=self.name or path.stem,
        )
        written = cell(columns, "caption", self.columns.get("caption"))
        return self._finish(sample, written, media.stem if media else name)


class MemorySource(DatasetSource):
    """Lists from ComfyUI's dataset nodes: one clip and one caption each (or one caption for all)."""

    kind: Literal["memory"] = "memory"
    clips: list[InstanceOf[MemoryClip]] = Field(description="The clips.")
    texts: list[str] = Field(default_factory=list, description="One caption a clip, or one for all.")

    @model_validator(mode="after")
    def _counts(self) -> MemorySource:
        if len(self.texts) > 1 and len(self.texts) != len(self.clips):
            raise ValueError(f"{len(self.texts)} captions for {len(self.clips)} clips: give one each, or one for all")
        return self

    def samples(self) -> list[Sample]:
        texts = self.texts * len(self.clips) if len(self.texts) == 1 else self.texts or [""] * len(self.clips)
        made = []
        for n, (clip, text) in enumerate(zip(self.clips, texts)):
            identity = f"{n:05d}-{clip.name}"
            made.append(self._finish(Sample(identity, None, "", in_memory=clip, dataset=self.name or "memory"), text, clip.name))
        return made


class ChainSource(DatasetSource):
    """Several datasets one after the other, each with its own repeats, weight, buckets and captions."""

    kind: Literal["chain"] = "chain"
    sources: list[FolderSource | TableSource | MemorySource | ChainSource] = Field(description="The datasets.")

    def samples(self) -> list[Sample]:
        made: list[Sample] = []
        names: dict[str, int] = {}
        for source in self.sources:
            part = source.samples()
            label = part[0].dataset if part else source.name
            names[label] = names.get(label, 0) + 1
            label = label if names[label] == 1 else f"{label}~{names[label]}"
            made += [
                replace(
                    s,
                    id=f"{label}/{s.id}",
                    dataset=label,
                    repeats=s.repeats * self.repeats,
                    weight=s.weight * self.weight,
                    regularisation=s.regularisation or self.regularisation or "",
                    buckets=s.buckets or self.resolution_buckets,
                )
                for s in part
            ]
        return made


TABLE_EXTENSIONS = (".csv", ".tsv", ".json", ".jsonl")


def with_kind(source: Any) -> Any:
    """A source's mapping with ``kind`` filled in from its path, so that YAML need not say it."""
    if isinstance(source, Mapping) and "kind" not in source and isinstance(source.get("path"), str):
        return {**source, "kind": "table" if source["path"].lower().endswith(TABLE_EXTENSIONS) else "folder"}
    return source


def open_source(path: str | Path, **fields: Any) -> FolderSource | TableSource:
    """The source of a path: a dataset file, a folder that holds one (dataset.json, metadata.jsonl...), or a folder of clips."""
    path = Path(path).expanduser()
    if path.is_dir():
        names = [f"{stem}{ext}" for stem in ("dataset", "metadata") for ext in (".jsonl", ".json", ".csv")]
        for name in names:
            if (path / name).is_file() and any(names_media(path / name, row.columns) for row in read_rows(path / name)):
                return TableSource(path=str(path / name), **fields)
        return FolderSource(path=str(path), **fields)
    if not path.exists():
        raise DataError("dataset.missing", f"There is no dataset at {path}.", "Give a folder of clips, or a .csv, .json or .jsonl file.")
    if path.suffix.lower() not in TABLE_EXTENSIONS:
        raise DataError("dataset.kind", f"{path.name} is no dataset file.", "Give a folder of clips, or a .csv, .json or .jsonl file.")
    return TableSource(path=str(path), **fields)
