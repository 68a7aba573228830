"""Making references of a dataset: each clip streamed through a control into a folder of its own, and a dataset file that pairs them."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch
from pydantic import Field
from torch import Tensor

from ..data.cache import READER, digest, file_fingerprint
from ..data.decode import pictures
from ..data.findings import MediaError
from ..data.listing import MEDIA_EXTENSIONS
from ..data.probe import Probe, probe
from ..data.scenes import Scene, scene_plan
from ..data.sources import Captions, Sample, open_source
from ..data.stills import read_still
from ..data.tables import Table
from ..data.writers import Record, write_png, write_video
from ..errors import ConfigError, DataError
from ..section import Section
from .kinds import CannyControl, Control

RECORD = "references.json"
NO_FOLDER = MEDIA_EXTENSIONS | frozenset(".txt .tsv .xlsx .xls .ods .parquet .yaml .yml .safetensors".split())
"""Endings that nobody gives a folder."""
SAVE_EVERY = 20


class ReferenceJob(Section):
    """Which clips get which reference, and where it goes."""

    dataset: str = Field(description="Folder of clips, or a .csv, .json or .jsonl file.")
    output: str | None = Field(
        None, description="Folder of the references, or a dataset file (the references then go into a folder beside it). None: .ltx_references inside the dataset's folder."
    )
    control: Control = Field(default_factory=CannyControl, description="What is made of each clip.")
    override: bool = Field(False, description="Make references anew that are there already.")
    crf: int = Field(12, ge=0, le=40, description="Quality of the written clips; lower is better.")

    def places(self) -> tuple[Path, Path]:
        """(folder of the references, dataset file that pairs them)."""
        if self.output is None:
            given = Path(self.dataset).expanduser()
            folder = (given if given.is_dir() else given.parent) / ".ltx_references" / self.control.kind
            return folder, folder / "dataset.jsonl"
        out = Path(self.output).expanduser()
        if out.suffix.lower() in (".json", ".jsonl", ".csv"):
            return out.parent / f"{out.stem}_{self.control.kind}", out
        return out, out / "dataset.jsonl"


@dataclass(frozen=True)
class References:
    """What became of the clips: ids made, ids kept from before, and why the failed ones failed."""

    table: Path
    folder: Path
    made: list[str] = field(default_factory=list)
    kept: list[str] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)


def make_references(
    job: ReferenceJob, progress: Callable[[int, int, str], None] | None = None, *, check: Callable[[], None] = lambda: None
) -> References:
    """Make the references of a dataset; one clip that fails is named and the rest goes on. Media of the user are only read.

    check: called for every frame, may raise to stop. Raises DataError when the dataset cannot be read, ConfigError for bad settings.
    """
    folder, path = job.places()
    _check_output(job, path)
    table = Table.read(path)
    samples = [s for s in open_source(job.dataset, captions=Captions(missing="empty")).samples() if s.media is None or not _inside(s.media, folder)]
    if folder.is_dir() and any(folder.iterdir()) and not (folder / RECORD).is_file():
        raise ConfigError("reference.folder", f"The folder {folder.name} holds other files.", "Give a new or empty folder, so that nothing of yours is mixed with references.")
    done = References(path, folder)
    record = Record(folder / RECORD)
    names = _Names()
    try:
        for number, sample in enumerate(samples, 1):
            try:
                target = folder / names.of(sample)
                _one(job, sample, target, record, done, check)
                table.set(sample.media, _columns(table, sample, target))
            except DataError as error:
                done.failed[sample.id] = error.message
            if number % SAVE_EVERY == 0:
                table.write()
            if progress:
                progress(number, len(samples), sample.id)
    finally:
        if table.rows:
            table.write()
    return done


def _check_output(job: ReferenceJob, table: Path) -> None:
    """Raise ConfigError for an output that is meant as a file and is none that pairs clips, before anything is made."""
    out = Path(job.output or "").expanduser()
    if job.output and out.suffix.lower() in NO_FOLDER and not out.is_dir():
        raise ConfigError("reference.output", f"References cannot be paired in '{out.name[:60]}'.", "Name a folder, or a file that ends in .json, .jsonl or .csv.")
    if table.is_dir():
        raise ConfigError("reference.output", f"The dataset file {table} is a folder.", "Name a file that ends in .json, .jsonl or .csv, or a folder whose dataset.jsonl is none.")


def _inside(media: Path, folder: Path) -> bool:
    return media.absolute().is_relative_to(folder.absolute())


def _one(job: ReferenceJob, sample: Sample, target: Path, record: Record, done: References, check: Callable[[], None]) -> None:
    refused = next((f for f in sample.findings if f.refused), None)
    if sample.media is None or refused is not None:
        raise DataError(refused.code if refused else "row.no_media", refused.message if refused else "no media file")
    try:
        key = digest([READER, file_fingerprint(sample.media), job.control.model_dump(mode="json"), job.crf])
    except OSError as error:  # a link to nothing, no permission: this clip's fault alone
        raise MediaError("media.unreadable", f"{sample.media.name} cannot be read: {error.strerror or error}") from error
    if not job.override and record.get(target) == key and target.is_file():
        done.kept.append(sample.id)
        return
    write_reference(sample.media, target, job.control, crf=job.crf, check=check)
    record.set(target, key)
    done.made.append(sample.id)


def write_reference(media: Path, target: Path, control: Control, *, crf: int = 12, check: Callable[[], None] = lambda: None) -> None:
    """Write the reference of one video or picture: same size, same rate, as many frames; one frame in memory at a time."""
    found = probe(media)
    refusal = next((f for f in found.findings if f.refused), None)
    if refusal is not None:
        raise MediaError(refusal.code, f"{media.name}: {refusal.message}")
    if found.kind == "audio":
        raise MediaError("media.no_frames", f"{media.name} is sound alone: there is no picture to make a reference of.")
    if found.kind == "image":
        pixels = torch.from_numpy(read_still(media)[..., :3].copy())
        write_png(target, next(iter(control.apply([pixels]))))
        return
    odd = found.width % 2 or found.height % 2  # only whole colour samples keep an odd size
    write_video(target, control.apply(_frames(found, check)), found.timeline.rate, crf=crf, pixel_format="yuv444p" if odd else "yuv420p")


def _frames(found: Probe, check: Callable[[], None]) -> Iterator[Tensor]:
    for picture in pictures(scene_plan(found, Scene(0.0, found.timeline.seconds))):
        check()
        yield picture.pixels


def _columns(table: Table, sample: Sample, target: Path) -> dict[str, object]:
    """The columns of a sample's row; what a row of the user says already is left to it."""
    known = table.get(sample.media) or {}
    values: dict[str, object] = {"reference_video": table.relative(target)}
    fresh: dict[str, object] = {"caption": sample.caption}
    fresh |= {role: table.relative(path) for role, path in sample.roles.items() if role != "reference_video"}
    fresh |= {name: value for name, value, usual in (("repeats", sample.repeats, 1), ("weight", sample.weight, 1.0)) if value != usual}
    return {**{k: v for k, v in fresh.items() if not known.get(k)}, **values}


class _Names:
    """File names of references: the clip's path inside the dataset; the extension is added to it where two clips would share one."""

    def __init__(self) -> None:
        self.taken: set[str] = set()

    def of(self, sample: Sample) -> Path:
        inside = Path(sample.id.split("#")[0])
        if inside.is_absolute() or ".." in inside.parts:  # outside the dataset's folder
            inside = Path(f"{digest(str(inside.parent))[:8]}_{inside.name}")
        still = sample.media is not None and _is_still(sample)
        suffix = ".png" if still else ".mp4"
        for name in (inside.with_suffix(suffix), inside.with_name(inside.name + suffix), inside.with_name(f"{inside.stem}_{digest(sample.id)[:8]}{suffix}")):
            key = os.path.normcase(str(name.with_suffix("")))
            if key not in self.taken:
                self.taken.add(key)
                return name
        raise DataError("reference.name", f"{sample.id} is in the dataset twice.", "Remove one of the rows.")


def _is_still(sample: Sample) -> bool:
    try:
        return probe(sample.media).kind == "image"
    except MediaError:
        return False  # it fails later, with its name
