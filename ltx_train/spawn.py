"""A child's process: with which command and environment it is started, detached, and how it is ended with all below it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Literal

import psutil

from .errors import RunError
from .runs.command import (
    TOKEN_VARIABLE,
    check_port,
    child_command,
    child_environment,
    first_environment,
    free_port,
    worker_arguments,
    write_launch_config,
)
from .runs.lock import ProcessId
from .runs.run_dir import Kind, RunDir

# edits the saved job to need less memory and says how in one line; None when nothing is left to lower
LowerPlan = Callable[[RunDir, int], "str | None"]


@dataclass(frozen=True)
class Launch:
    """How to start a child: everything beside the run itself.

    steps_this_run: a part of so many steps, after which the child parks (0: all steps). until: the part ends at this step
    instead. owner: the process whose end also ends a parked child; None: it waits as long as the job says.
    """

    kind: Kind = "train"
    job: Path | None = None
    num_processes: int = 1
    num_machines: int = 1
    machine_rank: int = 0
    main_process_ip: str | None = None
    main_process_port: int | None = None
    launcher: Literal["auto", "accelerate", "torchrun"] = "auto"
    engine_python: Path | str | None = None
    python_flags: tuple[str, ...] = ()
    devices: str | None = None
    network: bool = False
    extra_env: Mapping[str, str] = field(default_factory=dict)
    lower_plan: LowerPlan | None = None
    steps_this_run: int = 0
    until: int | None = None
    owner: ProcessId | None = None

    def ask(self, run: RunDir) -> None:
        """Tell the child which part to train: one that starts, or one that is parked."""
        run.request("go_on", steps=self.steps_this_run, until=self.until, owner=None if self.owner is None else asdict(self.owner))

    @property
    def python(self) -> Path:
        """The interpreter: the one set as engine python, else our own."""
        return Path(self.engine_python).expanduser().absolute() if self.engine_python else Path(sys.executable)


def build_command(run: RunDir, launch: Launch) -> list[str]:
    """The argument list of a child; for several processes accelerate's neutral configuration is written into the run."""
    several = launch.num_processes > 1
    launcher = launch.launcher if launch.launcher != "auto" else _launcher() if several else "torchrun"
    port = launch.main_process_port
    if several and launch.num_machines > 1 and (port is None or launch.main_process_ip is None):
        raise RunError("distributed.meeting", "Several machines need main_process_ip and main_process_port.", "Give the address of machine 0 and a port that its firewall lets through.")
    if several and port is not None and launch.machine_rank == 0:
        check_port(port)
    config = None
    if several and launcher == "accelerate":
        config = write_launch_config(
            run.path / "accelerate.yaml", num_processes=launch.num_processes, num_machines=launch.num_machines, machine_rank=launch.machine_rank
        )
    return child_command(
        worker_arguments(run.path, launch.kind, launch.job),
        python=launch.python,
        flags=launch.python_flags,
        num_processes=launch.num_processes,
        launcher=launcher,
        port=port or (free_port() if several else None),
        num_machines=launch.num_machines,
        machine_rank=launch.machine_rank,
        main_process_ip=launch.main_process_ip,
        launch_config=config,
    )


def _launcher() -> Literal["accelerate", "torchrun"]:
    """accelerate with accelerators; on the CPU it starts one process only, so torchrun."""
    import torch

    return "accelerate" if torch.cuda.is_available() else "torchrun"


def spawn(run: RunDir, launch: Launch, token: str) -> subprocess.Popen:
    """A detached process with its output in the log: it outlives us and gets none of our signals."""
    if not launch.python.exists():
        raise RunError("engine.python", f"The engine python is not there: {launch.python}", "Set another one, or none to use the python that runs this.")
    env = child_environment(
        first=first_environment(),
        num_processes=max(1, launch.num_processes // launch.num_machines),
        devices=launch.devices,
        other_python=launch.engine_python is not None and not _same_file(launch.python, Path(sys.executable)),
        network=launch.network,
        extra={**launch.extra_env, TOKEN_VARIABLE: token},
    )
    with open(run.log_path, "ab") as log:
        return _popen(build_command(run, launch), stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, env=env, cwd=run.path)


def _popen(command: Sequence[str], **arguments: object) -> subprocess.Popen:
    if sys.platform != "win32":
        return subprocess.Popen(command, start_new_session=True, **arguments)  # type: ignore[call-overload]
    flags = subprocess.CREATE_NEW_PROCESS_GROUP | subprocess.CREATE_NO_WINDOW
    try:
        # out of a job object that ends all its members with ComfyUI (the desktop app has one)
        return subprocess.Popen(command, creationflags=flags | subprocess.CREATE_BREAKAWAY_FROM_JOB, **arguments)
    except PermissionError:
        return subprocess.Popen(command, creationflags=flags, **arguments)


def kill_tree(roots: Sequence[psutil.Process], timeout: float = 5.0, *, unwaited: int | None = None) -> None:
    """Kill the processes and all below them, and wait until they have gone (but for the pid ``unwaited``)."""
    doomed: dict[int, psutil.Process] = {}
    for root in roots:
        try:
            doomed |= {process.pid: process for process in (*root.children(recursive=True), root)}
        except psutil.NoSuchProcess:
            continue
    for process in doomed.values():
        try:
            process.kill()
        except psutil.NoSuchProcess:
            continue
    psutil.wait_procs([process for pid, process in doomed.items() if pid != unwaited], timeout=timeout)


def _same_file(one: Path, other: Path) -> bool:
    try:
        # not samefile: a venv's python is a link to its base, yet another environment
        return os.path.normcase(one.absolute()) == os.path.normcase(other.absolute())
    except OSError:
        return False
