"""A run's directory: its paths, status, control files, log, and names."""

from __future__ import annotations

import json
import os
import re
import shutil
import time
from pathlib import Path
from typing import Any, Literal, get_args

from ..errors import RunError
from ..section import Section
from .event_log import EventBatch, read_events
from .history import History
from .lock import ProcessId, RunLock, write_atomic

State = Literal["queued", "preparing", "running", "parked", "stopping", "stopped", "finished", "failed", "lost"]
Kind = Literal["preprocess", "train", "sample", "tool"]
LIVE_STATES = ("queued", "preparing", "running", "parked", "stopping")
CONTROLS = ("stop", "save", "sample", "go_on")
_RESERVED = {"con", "prn", "aux", "nul", *(f"com{n}" for n in range(1, 10)), *(f"lpt{n}" for n in range(1, 10))}


class Status(Section):
    """What status.json says. Times are Unix seconds; ``created`` is the create time of ``pid``, ``ticks`` see :class:`ProcessId`.

    part: the step at which the part in hand ends; None where the run goes to its end.
    """

    v: int = 1
    state: State = "queued"
    kind: Kind = "train"
    phase: str = ""
    step: int = 0
    total: int | None = None
    part: int | None = None
    loss: float | None = None
    pid: int | None = None
    created: float | None = None
    ticks: float | None = None
    host: str = ""
    attempt: int = 0
    notch: int = 0
    started: float = 0.0
    heartbeat: float = 0.0
    ended: float | None = None
    exit_code: int | None = None
    error: str = ""
    error_code: str = ""
    hint: str = ""

    @property
    def live(self) -> bool:
        return self.state in LIVE_STATES

    @property
    def part_done(self) -> bool:
        """Whether the part that was asked for is trained and saved: parked, or ended in good order since."""
        return self.state in ("parked", "stopped") and self.part is not None and self.step >= self.part

    @property
    def process(self) -> ProcessId | None:
        return None if self.pid is None or self.created is None else ProcessId(self.pid, self.created, self.host, self.ticks)


class RunDir:
    """One run on disk. Making the object touches nothing; ``create`` makes the folder."""

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path).expanduser().absolute()

    @classmethod
    def create(cls, path: Path | str) -> RunDir:
        """Make the directory and those inside that are always there."""
        run = cls(path)
        check_name(run.path.name)
        try:
            run.control.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise RunError("run.not_writable", f"The run directory cannot be made: {run.path}", str(error)) from error
        return run

    @classmethod
    def open(cls, path: Path | str) -> RunDir:
        """An existing run; raises RunError ``run.missing``."""
        run = cls(path)
        if not run.exists():
            raise RunError("run.missing", f"No run is at {run.path}.", "`python -m ltx_train runs` lists the runs; a run's folder holds status.json.")
        return run

    def __repr__(self) -> str:
        return f"RunDir({str(self.path)!r})"

    @property
    def name(self) -> str:
        return self.path.name

    @property
    def status_path(self) -> Path:
        return self.path / "status.json"

    @property
    def events_path(self) -> Path:
        return self.path / "events.jsonl"

    @property
    def log_path(self) -> Path:
        return self.path / "train.log"

    @property
    def control(self) -> Path:
        return self.path / "control"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def samples(self) -> Path:
        return self.path / "samples"

    @property
    def tensorboard(self) -> Path:
        return self.path / "tensorboard"

    @property
    def lock(self) -> RunLock:
        return RunLock(self.path)

    def job_path(self, kind: Kind) -> Path:
        """Where the job of this kind is saved: training_config.yaml, preprocess_config.yaml, sample_config.yaml or tool_config.yaml."""
        return self.path / ("training_config.yaml" if kind == "train" else f"{kind}_config.yaml")

    def rank_log(self, rank: int) -> Path:
        """The log of a process other than the first."""
        return self.path / f"train.rank{rank}.log"

    def has_job(self) -> bool:
        """Whether there is a job that could be started; other work, such as an examination, has events and samples only."""
        return any(self.job_path(kind).exists() for kind in get_args(Kind))

    def exists(self) -> bool:
        return self.status_path.exists() or self.has_job()

    # -- status --

    def read_status(self) -> Status:
        """The status as written, without looking whether its process lives; a missing file reads as queued, a damaged one as lost.

        A machine that lost its power may leave an empty file; the run's snapshots are none the worse, so it can be gone on with.
        """
        for attempt in range(5):
            try:
                return Status.model_validate(json.loads(self.status_path.read_text(encoding="utf-8")))
            except FileNotFoundError:
                return Status()
            except (OSError, ValueError, RecursionError) as error:
                # Windows refuses reading while the file is being replaced
                if attempt == 4 and isinstance(error, OSError):
                    raise RunError("run.status", f"The status of the run {self.name} cannot be read.", f"{self.status_path}: {error}") from error
                if attempt == 4:
                    return Status(state="lost", error="status.json is damaged.", error_code="run.status", hint="Start the run again: it goes on from its newest snapshot.")
                time.sleep(0.02)
        raise AssertionError("unreachable")

    def status(self) -> Status:
        """The status as it is: a live state whose process is gone reads as ``lost``."""
        status = self.read_status()
        if status.live and not self.live(status):
            status = self.read_status()  # it may have ended between the two looks
            if status.live and not self.live(status) and (status.pid is not None or self.status_path.exists()):
                return status.model_copy(update={"state": "lost"})
        return status

    def live(self, status: Status | None = None) -> bool:
        """Whether a process works on this run now."""
        if self.lock.held():
            return True
        process = (status or self.read_status()).process
        return process is not None and process.alive()

    def write_status(self, status: Status) -> None:
        write_atomic(self.status_path, json.dumps(status.model_dump(mode="json"), ensure_ascii=False))

    def update_status(self, **fields: Any) -> Status:
        """Change some fields; for the one process that owns the run."""
        status = Status.model_validate(self.read_status().model_dump() | fields)
        self.write_status(status)
        return status

    # -- control files --

    def request(self, control: str, **details: Any) -> None:
        """Ask the child to stop, save, sample or go on; it acknowledges with a state event within a second."""
        assert control in CONTROLS, control
        self.control.mkdir(parents=True, exist_ok=True)
        write_atomic(self.control / control, json.dumps({"t": time.time(), **details}))

    def requested(self, control: str) -> bool:
        return (self.control / control).exists()

    def take_request(self, control: str) -> dict[str, Any] | None:
        """Consume a request: its details, or None if there is none."""
        path = self.control / control
        try:
            details = json.loads(path.read_text(encoding="utf-8") or "{}")
        except FileNotFoundError:
            return None
        except (OSError, ValueError):
            details = {}  # dropped by hand, such as with `touch`
        _drop(path)
        return details if isinstance(details, dict) else {}

    def clear_requests(self) -> None:
        for control in CONTROLS:
            _drop(self.control / control)

    # -- reading --

    def events(self, offset: int = 0) -> EventBatch:
        return read_events(self.events_path, offset)

    def history(self) -> History:
        return History.rebuild(self.events().events)

    def tail(self, lines: int = 30, path: Path | None = None) -> list[str]:
        """The last lines of the log (UTF-8, damaged bytes replaced; what a progress bar overwrote left out)."""
        try:
            with open(path or self.log_path, "rb") as file:
                size = file.seek(0, os.SEEK_END)
                file.seek(max(0, size - 64 * 1024))
                text = file.read().decode("utf-8", errors="replace")
        except FileNotFoundError:
            return []
        return [line.rstrip().rsplit("\r", 1)[-1] for line in text.replace("\r\n", "\n").split("\n") if line.strip()][-lines:]


def _drop(path: Path) -> None:
    """Remove a control file, or a folder that somebody made of its name: neither may end a training."""
    try:
        path.unlink(missing_ok=True)
    except OSError:
        shutil.rmtree(path, ignore_errors=True)


def check_name(name: str) -> str:
    """A name that is a folder on every system; raises RunError ``run.name``."""
    bad = re.search(r'[<>:"/\\|?*\x00-\x1f]', name)
    stem = name.split(".")[0].lower()
    if not name or bad or name.endswith((".", " ")) or name.startswith(" ") or stem in _RESERVED or len(name) > 120:
        raise RunError(
            "run.name",
            f"{name!r:.60} cannot be the name of a run.",
            'Use letters, digits, spaces, "-", "_" and dots, at most 120 characters, with no dot or space at the end and no name that Windows reserves.',
        )
    return name


def versions_of(root: Path | str, name: str) -> list[RunDir]:
    """The runs of this name below ``root``: ``name``, ``name_002``, ..., oldest first."""
    pattern = re.compile(re.escape(name) + r"(_\d{3,})?")
    runs = [run for run in list_runs(root) if pattern.fullmatch(run.name)]
    return sorted(runs, key=lambda run: int(run.name[len(name) + 1 :] or 1))


def list_runs(root: Path | str) -> list[RunDir]:
    """The runs directly below ``root``, by name."""
    root = Path(root)
    if not root.is_dir():
        return []
    return [run for run in map(RunDir, sorted(root.iterdir())) if _is_run(run)]


def _is_run(run: RunDir) -> bool:
    try:
        return run.path.is_dir() and run.exists()
    except OSError:  # a folder that this user may not look into
        return False
