"""The captioning of a dataset: which clips lack a caption, workers, and a result file that stays the user's own."""

from __future__ import annotations

import hashlib
import json
import os
import queue
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Protocol

from pydantic import Discriminator, Field

from ..data.sources import TABLE_EXTENSIONS, Captions, FolderSource, Sample, TableSource
from ..data.tables import FORMATS, Table
from ..data.texts import clean_prefix
from ..errors import ConfigError, DataError
from ..section import Section
from .endpoint import Endpoint, EndpointCaptioner
from .local import LocalCaptioner

LOOK = 0.2
"""Seconds between two looks for a stop while answers are waited for."""
PATIENCE = 2.0
"""Seconds that endpoints get to answer once a stop has come."""


class Captioner(Protocol):
    """What makes captions."""

    def caption(self, path: Path, sound: Path | None = None) -> str:
        """The caption of a file (with a sound of its own). Raises DataError for this clip's faults, other LtxTrainErrors for all."""


class CaptionJob(Section):
    """Which clips get captions, from what, and where they are written."""

    input: str = Field(description="A clip, a folder of clips, or a .csv, .json or .jsonl file.")
    output: str | None = Field(None, description="Result file: .json, .jsonl, .csv, or .txt (a pair of files). None: dataset.json in the folder, or the dataset file itself.")
    captioner: Annotated[EndpointCaptioner | LocalCaptioner, Discriminator("kind")] = Field(default_factory=EndpointCaptioner, description="What writes the captions.")
    extensions: str | None = Field(None, description="Only files of these, such as mp4,mov,png; None for all that are known.")
    recursive: bool = Field(True, description="Search folders inside too.")
    override: bool = Field(False, description="Write captions anew that were written by a model; those of a person stay.")
    remove_llm_prefixes: bool = Field(True, description="Strip openings such as 'This video shows'.")
    workers: int = Field(1, ge=1, le=64, description="Clips captioned at a time (an endpoint can answer several).")
    save_every: int = Field(5, ge=1, description="Captions between two savings.")

    def result(self) -> Path:
        """The result file."""
        given = Path(self.input).expanduser()
        if self.output:
            out = Path(self.output).expanduser()
            if out.suffix.lower() not in FORMATS:
                raise ConfigError("caption.output", f"Captions cannot be written as '{out.name[:60]}'.", f"Name a file that ends in {', '.join(FORMATS)}.")
            return out
        if given.is_dir():
            return given / "dataset.json"
        return given if given.suffix.lower() in FORMATS else given.with_name(f"{given.stem}_captions.json")

    def samples(self) -> list[Sample]:
        """The clips, each with the caption that lies beside it or in its row."""
        given, captions = Path(self.input).expanduser(), Captions(missing="empty")
        if given.is_dir():
            found = FolderSource(path=str(given), recursive=self.recursive, captions=captions).samples()
        elif given.suffix.lower() in TABLE_EXTENSIONS:
            found = TableSource(path=str(given), captions=captions).samples()
        elif given.is_file():
            found = [s for s in FolderSource(path=str(given.parent), recursive=False, captions=captions).samples() if s.media == given]
            if not found:
                raise DataError("dataset.no_clip", f"{given.name} is no clip that gets a caption.", "Give a video, a picture or a sound that is none's reference or mask, a folder, or a dataset file.")
        else:
            raise DataError("dataset.missing", f"There is nothing at {given}."[:118], "Give a clip, a folder of clips, or a dataset file.")
        wanted = {f".{e.strip().lstrip('.').lower()}" for e in (self.extensions or "").split(",") if e.strip()}
        kept = [s for s in found if not wanted or (s.media is not None and s.media.suffix.lower() in wanted)]
        if found and not kept:
            there = sorted({s.media.suffix.lower() for s in found if s.media is not None})
            raise DataError("dataset.no_clip", f"No clip of {given} ends in {', '.join(sorted(wanted))}.", f"Its clips end in {', '.join(there)}.")
        return kept


@dataclass(frozen=True)
class Captioned:
    """What became of the clips: ids with a new caption, ids left as they were, and why the failed ones failed."""

    table: Path
    written: list[str] = field(default_factory=list)
    kept: list[str] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)


def caption_dataset(
    job: CaptionJob,
    *,
    allowed: frozenset[str] = frozenset(),
    captioner: Captioner | None = None,
    progress: Callable[[int, int, str], None] | None = None,
    check: Callable[[], None] = lambda: None,
) -> Captioned:
    """Write the captions that are missing; a clip that fails is named and the rest goes on.

    allowed: hosts an endpoint may have beside this machine. check: called between clips, may raise to stop. What was
    written before an error or a stop is saved. Raises DataError for a dataset that cannot be read, EndpointError when
    the endpoint fails as such.
    """
    result = _Result(job.result())
    samples = job.samples()
    done = Captioned(result.path)
    todo = [s for s in samples if _wants(job, s, result, done)]
    result.check()
    try:
        if todo:
            captioner = captioner or job.captioner.build(allowed)
            for number, (sample, answer) in enumerate(_answers(job, captioner, todo, check), 1):
                if isinstance(answer, DataError):
                    done.failed[sample.id] = answer.message
                else:
                    result.add(sample.media, clean_prefix(answer) if job.remove_llm_prefixes else answer)
                    done.written.append(sample.id)
                if number % job.save_every == 0:
                    result.save()
                if progress:
                    progress(number, len(todo), sample.id)
    finally:
        result.save(last=True)
    return done


def _wants(job: CaptionJob, sample: Sample, result: _Result, done: Captioned) -> bool:
    """Whether a clip gets a caption now. A text beside it goes into the result file, unless a person wrote another there."""
    refused = next((f for f in sample.findings if f.refused), None)
    if sample.media is None or refused is not None:
        done.failed[sample.id] = refused.message if refused else "no media file"
        return False
    known = result.caption(sample.media)
    own = sample.caption.strip() if not _same_file(job) else ""
    if own and (not known or result.ours(sample.media, known)):
        result.add(sample.media, own)
    elif not known or (job.override and result.ours(sample.media, known)):
        return True
    done.kept.append(sample.id)
    return False


def _same_file(job: CaptionJob) -> bool:
    """Whether captions go into the file the clips come from, so that its captions are the result's own."""
    return os.path.normcase(os.path.abspath(Path(job.input).expanduser())) == os.path.normcase(os.path.abspath(job.result()))


def _answers(job: CaptionJob, captioner: Captioner, todo: list[Sample], check: Callable[[], None]) -> Iterator[tuple[Sample, str | DataError]]:
    """Captions as they come, ``workers`` at a time; few are asked for ahead, so that a stop is quick.

    An endpoint that is still waited for when a stop or an interrupt comes is left: it may take minutes. A model of our own is not.
    """
    ended = threading.Event()
    asked: queue.SimpleQueue[Sample | None] = queue.SimpleQueue()
    told: queue.SimpleQueue[tuple[Sample, str | DataError] | BaseException] = queue.SimpleQueue()

    def work() -> None:
        while (sample := asked.get()) is not None and not ended.is_set():
            try:
                told.put((sample, captioner.caption(sample.media, sample.roles.get("audio"))))
            except DataError as error:
                told.put((sample, error))
            except BaseException as error:  # noqa: B902 - raised where the answers are taken
                told.put(error)

    threads = [threading.Thread(target=work, name="caption", daemon=True) for _ in range(min(job.workers, len(todo)))]
    for thread in threads:
        thread.start()
    rest, waiting = iter(todo), 0
    try:
        while True:
            check()
            while waiting < len(threads) and (sample := next(rest, None)) is not None:
                asked.put(sample)
                waiting += 1
            if not waiting:
                return
            try:
                found = told.get(timeout=LOOK)
            except queue.Empty:
                continue
            waiting -= 1
            if isinstance(found, BaseException):
                raise found
            yield found
    finally:
        ended.set()
        for _ in threads:
            asked.put(None)
        end = time.monotonic() + PATIENCE
        for thread in threads:
            thread.join(max(0.0, end - time.monotonic()) if isinstance(captioner, Endpoint) else None)


class _Result:
    """The result file, read again before every saving: what a person changes in it meanwhile stays.

    Which captions are a model's is kept beside it by their fingerprints; a caption without one, or with another text
    than it says, is a person's.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.table = Table.read(path)
        self.marks_path = path.with_name(f".{path.name}.written")
        try:
            marks = json.loads(self.marks_path.read_text(encoding="utf-8"))
        except (FileNotFoundError, ValueError):
            marks = None
        self.marks: dict[str, str] = marks if isinstance(marks, dict) else {}  # then every caption counts as a person's
        self.fresh: dict[Path, str] = {}

    def check(self) -> None:
        """Raise ConfigError where the file cannot be written: that is told before a model has worked for hours, not after."""
        told = "a folder of that name is there" if self.path.is_dir() else ""
        try:
            with tempfile.TemporaryFile(dir=next(p for p in self.path.absolute().parents if p.exists())):
                pass
        except OSError as error:
            told = told or str(error.strerror or error)
        if told:
            raise ConfigError("caption.output", f"Captions cannot be written to {self.path}: {told}", "Name a result file with -o (--output) in a folder that you may write to.")

    def caption(self, media: Path) -> str:
        return self.fresh.get(media) or _caption_in(self.table, media)

    def ours(self, media: Path, caption: str) -> bool:
        return self.marks.get(self.table.relative(media)) == _mark(caption)

    def add(self, media: Path, caption: str) -> None:
        self.fresh[media] = caption

    def save(self, last: bool = False) -> None:
        """Write what is new. A file that is broken just now is tried again next time; at the end captions go beside it."""
        if not self.fresh:
            return
        try:
            self.table = Table.read(self.path)
        except DataError as error:
            if last:
                self._rescue(error)
            return
        for media, caption in self.fresh.items():
            known = _caption_in(self.table, media)
            if not known or self.ours(media, known):
                self.table.set(media, {"caption": caption})
                self.marks[self.table.relative(media)] = _mark(caption)
        self.table.write()
        temporary = self.marks_path.with_name(f"{self.marks_path.name}.{os.getpid()}.tmp")
        temporary.write_text(json.dumps(self.marks, indent=1, sort_keys=True), encoding="utf-8")
        os.replace(temporary, self.marks_path)
        self.fresh = {}

    def _rescue(self, error: DataError) -> None:
        beside = Table(self.path.with_name(f"{self.path.stem}_new.jsonl"))
        for media, caption in self.fresh.items():
            beside.set(media, {"caption": caption})
        beside.write()
        raise DataError(error.code, f"{self.path.name} cannot be read any more; new captions are in {beside.path.name}."[:118], error.message) from error


def _caption_in(table: Table, media: Path) -> str:
    return str((table.get(media) or {}).get("caption") or "").strip()


def _mark(caption: str) -> str:
    return hashlib.sha256(" ".join(caption.split()).encode()).hexdigest()[:16]
