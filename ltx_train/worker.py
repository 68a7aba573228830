"""The child: opens the run, takes its lock, does the job, and turns every end into an event and an exit code."""

from __future__ import annotations

import argparse
import faulthandler
import importlib
import json
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from .errors import LtxTrainError, OutOfMemory, RunError, StopRequested, explain_os_error, is_out_of_memory
from .runs.command import TOKEN_VARIABLE
from .runs.events import ErrorEvent, JobEvent
from .runs.exits import CRASH, OK, OUT_OF_MEMORY, STOPPED, USER_ERROR
from .runs.live import LiveRun
from .runs.lock import ProcessId
from .runs.run_dir import Kind, RunDir

# kind -> (class in config or another module, module whose run(job, run) does it)
JOBS: dict[str, tuple[str, str]] = {
    "preprocess": ("PreprocessJob", "preprocess"),
    "train": ("TrainConfig", "trainer"),
    "sample": ("SampleJob", "sample_job"),
    "tool": ("tools.ToolJob", "tools"),
}
FAILURE_MARK = "LTX_TRAIN_FAILURE "


def main(argv: list[str] | None = None) -> int:
    """Entry of the child process; returns the exit code."""
    parser = argparse.ArgumentParser(prog="worker")
    parser.add_argument("run", type=Path, help="the run directory")
    parser.add_argument("kind", choices=sorted(JOBS))
    parser.add_argument("job", type=Path, nargs="?", help="the job file, if it is not the run's own")
    options = parser.parse_args(argv)
    faulthandler.enable()
    directory = RunDir(options.run)
    job_path = options.job or directory.job_path(options.kind)
    rank = int(os.environ.get("RANK", "0"))
    if rank == 0:
        return run_main_rank(directory, options.kind, lambda run: do_job(run, options.kind, job_path))
    return run_other_rank(directory, rank, lambda run: do_job(run, options.kind, job_path))


def do_job(run: LiveRun, kind: Kind, job_path: Path) -> None:
    """Load the job and pass it to the function of its kind."""
    job_class, module = JOBS[kind]
    home, _, name = job_class.rpartition(".")
    job = getattr(importlib.import_module(f".{home or 'config'}", __package__), name).load(job_path)
    importlib.import_module(f".{module}", __package__).run(job, run)


def run_main_rank(directory: RunDir, kind: Kind, work: Callable[[LiveRun], None]) -> int:
    """Rank 0: owns the run directory while ``work(run)`` goes on; returns the exit code."""
    token = os.environ.pop(TOKEN_VARIABLE, None)
    owner = ProcessId.of()
    assert owner is not None
    try:
        token = directory.lock.take(owner, token)
    except RunError as error:
        _say(f"{error}")
        return error.exit_code
    try:
        with LiveRun(directory, world=_world(), token=token) as run, stop_signals(run):
            _open(run, kind, owner)
            return _guarded(run, work)
    finally:
        directory.lock.release(token)


def _open(run: LiveRun, kind: Kind, owner: ProcessId) -> None:
    status = run.status
    run.emit(JobEvent(kind=kind, name=run.dir.name, pid=owner.pid, host=owner.host, attempt=status.attempt, num_processes=run.world, version=_version()))
    fresh: dict[str, Any] = {"kind": kind, "pid": owner.pid, "created": owner.created, "ticks": owner.ticks, "host": owner.host, "started": time.time()}
    run.set_state("preparing", **fresh, phase="", ended=None, exit_code=None, error="", error_code="", hint="")


def _guarded(run: LiveRun, work: Callable[[LiveRun], None]) -> int:
    """Do the work and report how it ended, as well as a full disk allows."""
    try:
        work(run)
    except BaseException as error:  # noqa: B902 - every end must be told, an interrupt and SystemExit too
        failure = rank_failure(run.dir) if _may_come_from_a_peer(error, run) else None
        event, code = (failure, failure.exit_code) if failure is not None else describe(error)
        if code in (CRASH, OUT_OF_MEMORY):
            traceback.print_exception(error)
    else:
        event, code = None, OK
    try:
        if code == STOPPED:
            run.set_state("stopped", run.stop.reason, exit_code=code, ended=time.time())
        elif event is None:
            run.set_state("finished", exit_code=code, ended=time.time())
        else:
            _say(f"{event.message}\n{event.hint}".rstrip())
            run.emit(event)
            run.set_state("failed", event.code, exit_code=code, ended=time.time(), error=event.message, error_code=event.code, hint=event.hint)
    except OSError as error:
        _say(f"The end of the run could not be written: {error}")
    return code


def _may_come_from_a_peer(error: BaseException, run: LiveRun) -> bool:
    """A lost peer shows as some exception of a collective, or as the launcher's SIGTERM."""
    if isinstance(error, StopRequested):
        return run.stop.reason == "by SIGTERM"
    return not isinstance(error, LtxTrainError)


def run_other_rank(directory: RunDir, rank: int, work: Callable[[LiveRun], None]) -> int:
    """A rank that helps rank 0: writes its own log alone, and leaves if rank 0 dies without it."""
    log = open(directory.rank_log(rank), "w", encoding="utf-8", errors="backslashreplace", buffering=1)
    sys.stdout = sys.stderr = log
    faulthandler.enable(log)
    with LiveRun(directory, rank=rank, world=_world()) as run, stop_signals(run):
        _leave_with(directory)
        try:
            work(run)
        except BaseException as error:  # noqa: B902 - as above
            event, code = describe(error, rank)
            if event is not None:
                traceback.print_exception(error)
                log.write(FAILURE_MARK + event.model_dump_json(exclude_defaults=True) + "\n")
            return code
    return OK


def _leave_with(directory: RunDir) -> None:
    """End this process soon after rank 0's was killed: it may hang in a collective for ever."""
    if _world() != int(os.environ.get("LOCAL_WORLD_SIZE", _world())):
        return  # rank 0 may be on another machine, where the collective's timeout does this

    starter = ProcessId.of(os.getppid())  # torchrun or accelerate, which ends every rank when one has died

    def watch() -> None:
        while not directory.live() and (starter is None or starter.alive()):  # rank 0 is not there yet
            time.sleep(0.5)
        gone = 0
        while gone < 5:
            time.sleep(0.5)
            gone = 0 if directory.live() else gone + 1
        sys.stderr.write("Rank 0 has gone; leaving.\n")
        os._exit(CRASH)

    threading.Thread(target=watch, name="leave with rank 0", daemon=True).start()


def rank_failure(directory: RunDir, wait: float = 1.0) -> ErrorEvent | None:
    """Why another rank of this start failed, if one did: its peers only see a lost connection or a SIGTERM."""
    world = _world()
    if world == 1:
        return None
    deadline = time.monotonic() + wait
    while time.monotonic() < deadline:
        for rank in range(1, world):
            for line in reversed(directory.tail(40, directory.rank_log(rank))):
                if line.startswith(FAILURE_MARK):
                    return ErrorEvent.model_validate(json.loads(line[len(FAILURE_MARK) :]))
        time.sleep(0.1)
    return None


def describe(error: BaseException, rank: int = 0) -> tuple[ErrorEvent | None, int]:
    """The error event and exit code of an exception; no event for a stop or a SystemExit(0)."""
    where = {} if rank == 0 else {"rank": rank}
    if isinstance(error, StopRequested | KeyboardInterrupt):
        return None, STOPPED
    if isinstance(error, SystemExit) and error.code in (None, 0):
        return None, OK
    if isinstance(error, LtxTrainError):
        return ErrorEvent(code=error.code, message=error.message, hint=error.hint, exit_code=error.exit_code, **where), error.exit_code
    if is_out_of_memory(error):
        first = str(error).strip().split("\n")[0][:300]
        shown = OutOfMemory("memory.out", "Out of memory.", first)
        return ErrorEvent(code=shown.code, message=shown.message, hint=shown.hint, exit_code=OUT_OF_MEMORY, traceback=_end_of(error), **where), OUT_OF_MEMORY
    if isinstance(error, OSError) and (shown := explain_os_error(error)) is not None:
        return ErrorEvent(code=shown.code, message=shown.message, hint=shown.hint, exit_code=USER_ERROR, **where), USER_ERROR
    if isinstance(error, RuntimeError) and "home directory" in str(error):  # Path.expanduser: "~name" of a user that is not there
        hint = "A path that begins with ~ and a name means that user's folder. Write the whole path."
        return ErrorEvent(code="file.home", message="A path begins with ~, and there is no such user here.", hint=hint, exit_code=USER_ERROR, **where), USER_ERROR
    if isinstance(error, ModuleNotFoundError) and error.name and not error.name.startswith(__package__):
        package = error.name.split(".")[0]
        hint = f"Install it into the environment that trains ({sys.executable}), or set another engine python."
        return ErrorEvent(code="package.missing", message=f"The package {package} is not installed.", hint=hint, exit_code=USER_ERROR, traceback=_end_of(error), **where), USER_ERROR
    if type(error).__module__.startswith("pydantic") and type(error).__name__ == "ValidationError":
        shown = importlib.import_module(".config", __package__).explain(error)
        return ErrorEvent(code=shown.code, message=shown.message, hint=shown.hint, exit_code=USER_ERROR, traceback=_end_of(error), **where), USER_ERROR
    message = f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else 'no message'}"[:200]
    return ErrorEvent(code="crash", message=message, hint="This is a fault of the trainer: please report it with the end of train.log.", exit_code=CRASH, traceback=_end_of(error), **where), CRASH


@contextmanager
def stop_signals(run: LiveRun) -> Iterator[None]:
    """SIGTERM, SIGINT and CTRL_BREAK ask for a stop; a second SIGINT ends at once. Restored afterwards."""
    names = [name for name in ("SIGTERM", "SIGINT", "SIGBREAK") if hasattr(signal, name)]
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def handle(number: int, frame: object) -> None:
        if run.stop.requested and number == signal.SIGINT:
            raise KeyboardInterrupt
        # not run.request_stop: the main thread may hold the very locks that it takes
        threading.Thread(target=run.request_stop, args=(f"by {signal.Signals(number).name}",), daemon=True).start()

    before = {name: signal.signal(getattr(signal, name), handle) for name in names}
    if hasattr(signal, "SIGHUP"):
        before["SIGHUP"] = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        yield
    finally:
        for name, handler in before.items():
            signal.signal(getattr(signal, name), handler)


def _world() -> int:
    return int(os.environ.get("WORLD_SIZE", "1"))


def _end_of(error: BaseException, lines: int = 30) -> str:
    return "\n".join("".join(traceback.format_exception(error)).rstrip().splitlines()[-lines:])


def _say(text: str) -> None:
    sys.stderr.write(text + "\n")
    sys.stderr.flush()


def _version() -> str:
    """Our version as pyproject.toml states it; empty when the pack was installed without that file."""
    try:
        text = (Path(__file__).resolve().parents[1] / "pyproject.toml").read_text(encoding="utf-8")
    except OSError:
        return ""
    return next((line.split('"')[1] for line in text.splitlines() if line.startswith("version = ")), "")
