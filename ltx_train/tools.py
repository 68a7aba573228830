"""Tool jobs: cutting films into scenes, captions, references and clips back from a cache, each in a child as a run on disk."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, ClassVar, Literal

from pydantic import Discriminator, Field

from .captioner import CaptionJob, EndpointCaptioner, LocalCaptioner, caption_dataset
from .config import Job, ModelSection
from .controls import BlurControl, CannyControl, GreyControl, LowResolutionControl, ReferenceJob, make_references
from .controls.depth import DepthControl
from .data.cache import Cache
from .data.listing import VIDEO_EXTENSIONS
from .data.manifest import Manifest
from .data.scenes import SceneSection, split
from .decode import decode_entry
from .errors import DataError, RunError
from .memory.settings import AccelerationSection
from .preprocess import engine_codec
from .run_setup import OpenedRun
from .runs.live import LiveRun
from .runs.lock import write_atomic
from .runs.run_dir import RunDir
from .section import Section

RESULT = "result.json"
CAPTIONERS: dict[str, type[Section]] = {"endpoint": EndpointCaptioner, "local": LocalCaptioner}
CONTROLS: dict[str, type[Section]] = {"canny": CannyControl, "depth": DepthControl, "blur": BlurControl, "low_resolution": LowResolutionControl, "grey": GreyControl}


class SplitTask(Section):
    """Cut films into their scenes."""

    kind: Literal["split"] = "split"
    films: list[str] = Field(min_length=1, description="Video files, or folders of them.")
    output: str = Field(description="Folder that receives the clips.")
    scenes: SceneSection = Field(default_factory=SceneSection, description="How the films are cut.")


class CaptionTask(Section):
    """Write captions of a dataset."""

    kind: Literal["caption"] = "caption"
    job: CaptionJob
    hosts: list[str] = Field(default_factory=list, description="Hosts beside this machine that clips may be sent to; set by the server's owner.")


class ReferenceTask(Section):
    """Make the references of a dataset."""

    kind: Literal["reference"] = "reference"
    job: ReferenceJob


class DecodeTask(Section):
    """Decode clips of a cache."""

    kind: Literal["decode"] = "decode"
    model: ModelSection
    index: str = Field(description="The list of the cache (its .json file).")
    first: int = Field(1, ge=1, description="The first clip, counted from 1.")
    count: int = Field(1, ge=1, le=1000, description="How many clips.")
    acceleration: AccelerationSection = Field(default_factory=AccelerationSection, description="Device and precision.")


class ToolJob(Job):
    """One task on data, with a folder for its status and log."""

    kind: ClassVar[str] = "tool"

    task: Annotated[SplitTask | CaptionTask | ReferenceTask | DecodeTask, Discriminator("kind")]
    output_dir: str = Field("outputs/tool", description="Folder of this job's status, log and result.")


@dataclass(frozen=True)
class Outcome:
    """What a tool did. output: file or folder of the result; made, kept: names; failed: name -> reason."""

    output: str
    made: list[str] = field(default_factory=list)
    kept: list[str] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)

    @classmethod
    def read(cls, run: RunDir) -> Outcome:
        """What a finished job left. Raises RunError."""
        try:
            return cls(**json.loads((run.path / RESULT).read_text(encoding="utf-8")))
        except (OSError, ValueError, TypeError) as error:
            raise RunError("tool.result", f"The job {run.name} left no result.", f"See {run.log_path}.") from error


def open_tool(job: ToolJob) -> OpenedRun:
    """The directory of a tool job, its job file written anew. Raises RunError ``run.locked`` while it is at work."""
    run = RunDir.create(job.output_dir)
    if run.live():
        raise RunError("run.locked", f"The job {run.name} is at work.", "Wait for it, or stop it.")
    job.save(run.job_path(job.kind))
    return OpenedRun(run, job)


def run(job: ToolJob, live: LiveRun) -> None:
    """Carry out a tool job. A clip that fails is named in a warning; DataError when nothing at all came of it."""
    live.set_state("running")
    with live.phase(job.task.kind):
        done = TASKS[type(job.task)](job.task, live)
    write_atomic(live.dir.path / RESULT, json.dumps(asdict(done), indent=1, ensure_ascii=False))
    for name, reason in done.failed.items():
        live.warn("tool.clip", f"{name}: {reason}"[:200])
    if done.failed and not (done.made or done.kept):
        name, reason = next(iter(done.failed.items()))
        raise DataError("tool.nothing", f"Nothing was made: {name}: {reason}"[:118], "\n".join(f"{n}: {r}" for n, r in list(done.failed.items())[1:20]))


def _teller(live: LiveRun, phase: str) -> Callable[[int, int, str], None]:
    """A progress function that also obeys a stop."""

    def tell(done: int, total: int, name: str) -> None:
        live.progress(phase, done, total, unit="clips", message=name)
        live.stop.check()

    return tell


def _split(task: SplitTask, live: LiveRun) -> Outcome:
    films, folder = _films(task.films), Path(task.output)
    done = Outcome(str(folder))
    tell = _teller(live, "split")
    for number, film in enumerate(films, 1):
        try:
            done.made.extend(path.name for path in split(film, folder, task.scenes, check=live.stop.check))
        except DataError as error:
            done.failed[film.name] = error.message
        tell(number, len(films), film.name)
    return done


def _films(given: list[str]) -> list[Path]:
    found: list[Path] = []
    for text in given:
        path = Path(text)
        found += sorted(p for p in path.iterdir() if p.suffix.lower() in VIDEO_EXTENSIONS and not p.name.startswith(".")) if path.is_dir() else [path]
    if not found:
        raise DataError("scenes.no_video", f"No video was found in {given[0]}."[:118], "Give a film, or a folder that holds some.")
    return found


def _caption(task: CaptionTask, live: LiveRun) -> Outcome:
    done = caption_dataset(task.job, allowed=frozenset(task.hosts), progress=_teller(live, "caption"), check=live.stop.check)
    return Outcome(str(done.table), done.written, done.kept, done.failed)


def _reference(task: ReferenceTask, live: LiveRun) -> Outcome:
    done = make_references(task.job, _teller(live, "reference"), check=live.stop.check)
    return Outcome(str(done.table), done.made, done.kept, done.failed)


def _decode(task: DecodeTask, live: LiveRun) -> Outcome:
    from .training.parallel import Parallel

    index = Path(task.index)
    manifest, folder = Manifest.read(index), live.dir.path / "clips"
    checkpoint = task.model.open()
    made_for = manifest.model.get("family", checkpoint.family.name)
    if made_for != checkpoint.family.name:
        raise DataError("cache.family", f"The cache was made for {made_for}; the model is {checkpoint.family.name}.", "Decode it with the model that encoded it.")
    entries = manifest.entries[task.first - 1 :][: task.count]
    if not entries:
        raise DataError("decode.none", f"The cache has {len(manifest.entries)} clips; there is no clip {task.first}.", "Choose a smaller number.")
    done, tell = Outcome(str(folder)), _teller(live, "decode")
    codec = engine_codec(checkpoint, task.acceleration, Parallel.start(device=task.acceleration.device).device)
    for number, entry in enumerate(entries, 1):
        done.made.append(decode_entry(entry, Cache(index.parent), codec, folder).name)
        tell(number, len(entries), entry.id)
    return done


TASKS: dict[type[Section], Callable[..., Outcome]] = {SplitTask: _split, CaptionTask: _caption, ReferenceTask: _reference, DecodeTask: _decode}
