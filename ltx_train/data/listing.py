"""Files of a dataset folder: which are clips, captions, roles; repeats in folder names."""

from __future__ import annotations

import json
import os
from pathlib import Path

from ..errors import DataError
from .findings import Finding
from .texts import parse_json, read_text

VIDEO_EXTENSIONS = frozenset(".mp4 .m4v .mov .mkv .webm .avi .ts .mts .m2ts .mpg .mpeg .wmv .flv .3gp .3g2 .ogv .mxf .gif .vob .y4m .asf .f4v .qt .dv .divx .m2v .mpe".split())
IMAGE_EXTENSIONS = frozenset(".png .jpg .jpeg .webp .bmp .tif .tiff .avif .jfif .apng .jp2 .tga .ppm .jpe .heic .heif .hif".split())
AUDIO_EXTENSIONS = frozenset(".wav .mp3 .flac .ogg .opus .m4a .aac .wma .aif .aiff .oga .amr .mka .m4b .caf".split())
MEDIA_EXTENSIONS = VIDEO_EXTENSIONS | IMAGE_EXTENSIONS | AUDIO_EXTENSIONS
CAPTION_NAMES = ("caption", "text", "prompt", "description")
STEM_SUFFIXES = {"_reference": "reference_video", "_mask": "video_mask"}


class Listing:
    """The media and caption files below a folder; hidden folders (caches among them) are left out.

    A file of any other name counts as a clip where a caption lies beside it: what it holds is looked at later, and told.
    """

    def __init__(self, root: Path, recursive: bool, skip: tuple[Path, ...] = ()) -> None:
        self.media: list[Path] = []
        self.texts: dict[str, Path] = {}
        skipped = {s.resolve() for s in skip}
        visited: set[Path] = set()
        others: list[Path] = []
        for folder, folders, files in os.walk(root, followlinks=True):
            here = Path(folder)
            if here.resolve() in visited:  # a link back up
                folders.clear()
                continue
            visited.add(here.resolve())
            folders[:] = sorted(d for d in folders if not d.startswith(".") and d != "__MACOSX" and (here / d).resolve() not in skipped) if recursive else []
            for name in sorted(files):
                if name.startswith("."):
                    continue
                extension = os.path.splitext(name)[1].lower()
                if extension in MEDIA_EXTENSIONS:
                    self.media.append(here / name)
                elif extension in (".txt", ".caption", ".json"):
                    self.texts[str(here / name)[: -len(extension)] + extension] = here / name  # also clip.TXT of a camera or Windows
                elif extension:
                    others.append(here / name)
        stems = {os.path.splitext(path)[0] for path in self.media}
        self.media += [path for path in others if os.path.splitext(path)[0] not in stems and self._has_text(path)]

    def _has_text(self, path: Path) -> bool:
        return any(base + extension in self.texts for base in (str(path), str(path.with_suffix(""))) for extension in (".txt", ".caption"))

    def caption(self, path: Path) -> tuple[str | None, list[Finding]]:
        """The text beside a clip: ``clip.mp4.txt`` before ``clip.txt``; .txt, .caption, .json in this order."""
        for base in (str(path), str(path.with_suffix(""))):
            for extension in (".txt", ".caption", ".json"):
                file = self.texts.get(base + extension)
                if file is None:
                    continue
                text = read_text(file)
                value = _sidecar_json(text.value) if extension == ".json" else text.value.strip()
                findings = [Finding("caption.guessed_encoding", f"{file.name} is not UTF-8; read as {text.encoding}")] if text.guessed else []
                if value:
                    return value, findings
        return None, []


def _sidecar_json(text: str) -> str | None:
    try:
        data = parse_json(text)
    except json.JSONDecodeError:
        return None
    if isinstance(data, str):
        return data.strip()
    lowered = {str(k).lower(): v for k, v in data.items()} if isinstance(data, dict) else {}
    return next((str(lowered[n]).strip() for n in CAPTION_NAMES if lowered.get(n)), None)


class Pairing:
    """Which files are clips and which are roles of a clip of the same stem (name_reference.ext, name_mask.ext, name.wav)."""

    def __init__(self, listing: Listing, pair_audio: bool) -> None:
        self.roles: dict[Path, dict[str, Path]] = {}
        by_stem: dict[tuple[Path, str], list[Path]] = {}
        for path in listing.media:
            by_stem.setdefault((path.parent, path.stem), []).append(path)
        taken: set[Path] = set()
        for path in listing.media:
            for suffix, role in STEM_SUFFIXES.items():
                owners = by_stem.get((path.parent, path.stem.removesuffix(suffix))) if path.stem.endswith(suffix) else None
                self._give(owners or [], role, path, taken)
            if pair_audio and path.suffix.lower() in AUDIO_EXTENSIONS:
                owners = [p for p in by_stem[(path.parent, path.stem)] if p.suffix.lower() in VIDEO_EXTENSIONS]
                self._give(owners, "audio", path, taken)
        self.clips = [path for path in listing.media if path not in taken]

    def _give(self, owners: list[Path], role: str, path: Path, taken: set[Path]) -> None:
        for owner in owners:
            self.roles.setdefault(owner, {})[role] = path
            taken.add(path)


def stems_of(folder: Path) -> dict[str, Path]:
    if not folder.is_dir():
        raise DataError("dataset.missing", f"There is no folder {folder} to pair with.", "Give the folder that holds a file of the same stem for each clip.")
    found: dict[str, Path] = {}
    for path in sorted(p for p in folder.rglob("*") if p.suffix.lower() in MEDIA_EXTENSIONS | {".pt"} and p.is_file()):
        found.setdefault(path.relative_to(folder).with_suffix("").as_posix(), path)
        found.setdefault(path.stem, path)
    return found


def kohya_repeats(root: Path, media: list[Path]) -> dict[str, int]:
    """Repeats by first-level folder where every one with clips is named N_name (so 2024_holiday alone among others is no count)."""

    def count(name: str) -> int:
        head, _, tail = name.partition("_")
        return int(head) if head.isdecimal() and tail and 1 <= int(head) <= 500 else 0

    firsts = {parts[0] if len(parts := path.relative_to(root).parts) > 1 else "" for path in media}
    if firsts == {""}:
        return {"": count(root.name)} if count(root.name) else {}
    counts = {name: count(name) for name in firsts if name}
    return counts if counts and "" not in firsts and all(counts.values()) else {}

