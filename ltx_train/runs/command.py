"""The child's argument list and environment: no shell, no reliance on cwd or PYTHONPATH, no leftovers of the host."""

from __future__ import annotations

import os
import re
import socket
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal

import psutil

from ..errors import RunError

BOOTSTRAP = Path(__file__).resolve().parents[1] / "bootstrap.py"
TOKEN_VARIABLE = "LTX_TRAIN_LOCK_TOKEN"

# what a launcher above us may have set for its own children
_LEFTOVERS = re.compile(
    r"(RANK|LOCAL_RANK|WORLD_SIZE|LOCAL_WORLD_SIZE|GROUP_RANK|GROUP_WORLD_SIZE|ROLE_\w+|NODE_RANK|MASTER_ADDR|MASTER_PORT|TORCHELASTIC_\w+|TORCH_NCCL_ASYNC_ERROR_HANDLING"
    r"|ACCELERATE_(?!LOG)\w+|FSDP_\w+|LTX_TRAIN_LOCK_TOKEN|CUBLAS_WORKSPACE_CONFIG|PYTORCH_CUDA_ALLOC_CONF|PYTORCH_ALLOC_CONF|PYTORCH_HIP_ALLOC_CONF)"
)
_ALLOCATORS = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")
_VISIBLE = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")


def worker_arguments(run: Path, kind: str, job: Path | None = None) -> list[str]:
    """What follows the interpreter: the bootstrap by absolute path and the worker's own words.

    No options: the launchers' parsers would take ``--run`` for an abbreviation of one of theirs.
    """
    return [str(BOOTSTRAP), "worker", str(run), kind, *([str(job)] if job is not None else [])]


def child_command(
    worker: Sequence[str],
    *,
    python: str | Path,
    flags: Sequence[str] = (),
    num_processes: int = 1,
    launcher: Literal["accelerate", "torchrun"] = "accelerate",
    port: int | None = None,
    num_machines: int = 1,
    machine_rank: int = 0,
    main_process_ip: str | None = None,
    launch_config: Path | None = None,
) -> list[str]:
    """The whole argument list. ``num_processes`` counts all machines, as in accelerate.

    The launchers are told ``--no_python`` so that the ranks get our interpreter flags and bootstrap too.
    ``launch_config`` keeps accelerate from reading the user's default configuration; it is written by ``write_launch_config``.
    """
    interpreter = [str(python), *flags, "-X", "utf8", "-u"]
    if num_processes == 1:
        return [*interpreter, *worker]
    if launcher == "torchrun":
        per_machine = num_processes // num_machines
        command = [*interpreter, "-m", "torch.distributed.run", "--no-python", "--nproc-per-node", str(per_machine), "--max-restarts", "0"]
        if num_machines == 1:
            command += ["--standalone"]
        else:
            command += ["--nnodes", str(num_machines), "--node-rank", str(machine_rank), "--master-addr", str(main_process_ip), "--master-port", str(port)]
        return [*command, *interpreter, *worker]
    command = [*interpreter, "-m", "accelerate.commands.launch"]
    if launch_config is not None:
        command += ["--config_file", str(launch_config)]
    command += ["--multi_gpu", "--num_processes", str(num_processes), "--num_machines", str(num_machines), "--machine_rank", str(machine_rank)]
    if main_process_ip is not None:
        command += ["--main_process_ip", main_process_ip]
    command += ["--main_process_port", str(port or free_port()), "--mixed_precision", "no", "--dynamo_backend", "no", "--max_restarts", "0", "--no_python"]
    return [*command, *interpreter, *worker]


def write_launch_config(path: Path, *, num_processes: int, num_machines: int = 1, machine_rank: int = 0) -> Path:
    """A neutral accelerate configuration: placement only; precision, sharding and schedules are the trainer's own."""
    lines = [
        "compute_environment: LOCAL_MACHINE",
        "distributed_type: MULTI_GPU",
        "downcast_bf16: 'no'",
        "gpu_ids: all",
        f"machine_rank: {machine_rank}",
        "main_training_function: main",
        "mixed_precision: 'no'",
        f"num_machines: {num_machines}",
        f"num_processes: {num_processes}",
        "rdzv_backend: static",
        "same_network: true",
        "use_cpu: false",
    ]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def free_port() -> int:
    """A TCP port of this machine that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def check_port(port: int, host: str = "127.0.0.1") -> None:
    """Raise RunError ``distributed.port`` if the rendezvous port cannot be listened on here."""
    with socket.socket() as probe:
        try:
            probe.bind((host, port))
        except OSError as error:
            raise RunError(
                "distributed.port",
                f"Port {port} for the processes' meeting cannot be used on {host}.",
                f"Another program has it or a firewall blocks it ({error.strerror}). Set main_process_port to another one, or leave it out on a single machine.",
            ) from error


def child_environment(
    base: Mapping[str, str] | None = None,
    *,
    first: Mapping[str, str] | None = None,
    num_processes: int = 1,
    devices: str | None = None,
    other_python: bool = False,
    network: bool = False,
    extra: Mapping[str, str] | None = None,
    platform: str = sys.platform,
) -> dict[str, str]:
    """The child's environment, rebuilt from ``base`` (ours by default).

    first: the environment our process was started with, where the system tells; the host may have changed
        CUDA_VISIBLE_DEVICES since (ComfyUI does). devices: such as "0,1", wins over everything.
    other_python: the interpreter is not ours, so our PYTHONHOME and PYTHONPATH would mislead it.
    network: allow Hugging Face downloads and pushes; otherwise a file that is missing is an error at once.
    """
    base = dict(os.environ if base is None else base)
    env = {name: value for name, value in base.items() if not _LEFTOVERS.fullmatch(name.upper())}
    allocator = next((base[name] for name in _ALLOCATORS if base.get(name)), "")
    if allocator and "cudaMallocAsync" not in allocator:
        env["PYTORCH_CUDA_ALLOC_CONF"] = allocator  # the user's own, not ComfyUI's
    elif platform.startswith("linux"):
        env["PYTORCH_CUDA_ALLOC_CONF"] = "expandable_segments:True"
    for name in _VISIBLE:
        _restore_devices(env, name, first or {}, num_processes)
    if devices is not None:
        env["CUDA_VISIBLE_DEVICES"] = devices
    if other_python:
        for name in ("PYTHONHOME", "PYTHONPATH", "PYTHONSTARTUP", "VIRTUAL_ENV", "__PYVENV_LAUNCHER__"):
            env.pop(name, None)
    if platform == "win32":
        env["USE_LIBUV"] = "0"  # torch for Windows is built without libuv
    env |= {"PYTHONUNBUFFERED": "1", "PYTHONIOENCODING": "utf-8", "PYTHONFAULTHANDLER": "1", "TOKENIZERS_PARALLELISM": "false"}
    env |= {"HF_HUB_DISABLE_TELEMETRY": "1", "DISABLE_TELEMETRY": "1", "DO_NOT_TRACK": "1"}
    for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_DATASETS_OFFLINE"):
        if network:
            env.pop(name, None)
        else:
            env[name] = "1"
    return env | dict(extra or {})


def _restore_devices(env: dict[str, str], name: str, first: Mapping[str, str], num_processes: int) -> None:
    """Keep the host's choice of devices when it is enough for the processes, else go back to how it was at the start."""
    if name not in env or len([entry for entry in env[name].split(",") if entry.strip()]) >= num_processes:
        return
    if num_processes == 1:
        return  # empty on purpose: no device
    if first.get(name) and first[name] != env[name]:
        env[name] = first[name]
    else:
        del env[name]


def first_environment() -> dict[str, str]:
    """The variables that this process was started with; empty where the system does not tell (Windows shows the present ones)."""
    if sys.platform == "win32":
        return {}
    try:
        return psutil.Process().environ()
    except (psutil.Error, OSError):
        return {}
