"""Several processes as one trainer: ranks and device through accelerate's state, gradients averaged explicitly.

Accelerate's wrapped schedulers and data loaders are not used: the learning rate and the data order hang on the
global step alone, and a world of N ranks takes the step that one rank would take on N times the batch.
"""

from __future__ import annotations

import hashlib
import os
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import Field, model_validator
from torch import Tensor, nn

from ..errors import ConfigError, LtxTrainError, RunError
from ..section import Section

BUCKET_ELEMENTS = 8 << 20


class DistributedSection(Section):
    """How many processes train together, and how they meet. One process per GPU."""

    num_processes: int = Field(1, ge=1, le=4096, description="Processes in all, one per GPU, over all machines.")
    devices: str | None = Field(None, pattern=r"^[\w-]+(,[\w-]+)*$", description='GPUs to use, such as "0,1"; all visible ones if empty.')
    num_machines: int = Field(1, ge=1, description="Machines that take part.")
    machine_rank: int = Field(0, ge=0, description="This machine's number, 0 for the first.")
    main_process_ip: str | None = Field(None, description="Address of machine 0, for several machines.")
    main_process_port: int | None = Field(None, ge=1, le=65535, description="Port of machine 0; a free one is taken on a single machine.")
    launcher: Literal["auto", "accelerate", "torchrun"] = Field("auto", description="accelerate for GPUs, torchrun for CPU processes.")
    backend: Literal["auto", "nccl", "gloo"] = Field("auto", description="NCCL on Linux GPUs; gloo on Windows and CPUs.")
    timeout_minutes: float = Field(30.0, gt=0, description="How long the processes wait for one another before they give up.")

    @model_validator(mode="after")
    def _machines_fit(self) -> DistributedSection:
        if self.num_processes % self.num_machines:
            raise ValueError(f"num_processes {self.num_processes} is no multiple of num_machines {self.num_machines}; each machine runs equally many")
        if self.machine_rank >= self.num_machines:
            raise ValueError(f"machine_rank {self.machine_rank} must be below num_machines {self.num_machines}")
        if self.num_machines > 1 and (self.main_process_ip is None or self.main_process_port is None):
            raise ValueError("several machines need main_process_ip and main_process_port")
        if self.devices is not None and len(self.devices.split(",")) < self.num_processes // self.num_machines:
            raise ValueError(f"devices {self.devices!r} names fewer GPUs than the {self.num_processes // self.num_machines} processes of a machine")
        return self


@dataclass(frozen=True)
class GlobalBatch:
    """Micro-steps of an optimizer step, and what there is to say about them."""

    accumulation: int
    message: str = ""
    hint: str = ""


def keep_global_batch(accumulation: int, batch_size: int, world: int, before: int | None) -> GlobalBatch:
    """The accumulation with which a run goes on as it began.

    before: samples of one optimizer step so far; None for a new run. Sample order, noise and learning rate hang on the
    step and on batch_size x accumulation x world alone, so that keeping the product keeps the training.
    """
    together = batch_size * world
    wanted = together * accumulation
    if before is None:
        if world == 1 or accumulation == 1:
            return GlobalBatch(accumulation)
        fewer = max(1, accumulation // world)
        hint = f"The learning rate is not scaled. gradient_accumulation_steps {fewer} makes a step of {together * fewer} samples, in {fewer / accumulation:.0%} of the time."
        return GlobalBatch(accumulation, f"A step is {wanted} samples: {world} processes x batch_size {batch_size} x gradient_accumulation_steps {accumulation}.", hint)
    if before == wanted:
        return GlobalBatch(accumulation)
    if before % together == 0:
        kept = before // together
        message = f"{world} processes now: gradient accumulation is {kept} instead of {accumulation}, so that a step stays {before} samples."
        return GlobalBatch(kept, message, "Data order, noise and learning rate go on as they were.")
    near = max(1, round(before / together))
    message = f"A step was {before} samples and is {together * near} from here on: {world} processes x batch_size {batch_size} do not divide {before}."
    return GlobalBatch(near, message, f"Use a number of processes that divides {before // batch_size if before % batch_size == 0 else before} to keep it; the data order changes too.")


class Parallel:
    """This process among its ranks. With a world of one every operation is free and accelerate is not imported."""

    def __init__(self, *, rank: int, world: int, local_rank: int, device: torch.device, backend: str = "") -> None:
        self.rank = rank
        self.world = world
        self.local_rank = local_rank
        self.device = device
        self.backend = backend

    @classmethod
    def start(cls, section: DistributedSection | None = None, *, device: str = "auto") -> Parallel:
        """Join the other ranks as the launcher's environment says. device: auto, cpu, cuda, cuda:1, mps.

        Raises RunError when there are fewer GPUs than ranks, or when the ranks cannot meet in time.
        """
        section = section or DistributedSection()
        world = int(os.environ.get("WORLD_SIZE", "1"))
        if world == 1:
            return cls(rank=0, world=1, local_rank=0, device=single_device(device))
        on_cpu = device == "cpu" or not torch.cuda.is_available()
        local, needed = int(os.environ.get("LOCAL_RANK", "0")), int(os.environ.get("LOCAL_WORLD_SIZE", str(world)))
        if not on_cpu and torch.cuda.device_count() < needed:
            raise RunError(
                "distributed.devices",
                f"{needed} processes need {needed} GPUs on this machine; {torch.cuda.device_count()} are visible.",
                "Lower distributed.num_processes, or name the GPUs in distributed.devices.",
            )
        backend = _backend(section.backend, on_cpu)
        _join(backend, on_cpu, section)
        if not on_cpu:
            torch.cuda.set_device(local)
        target = torch.device("cpu") if on_cpu else torch.device("cuda", local)
        return cls(rank=torch.distributed.get_rank(), world=torch.distributed.get_world_size(), local_rank=local, device=target, backend=backend)

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    def close(self) -> None:
        """Leave the group; the process may not take part again."""
        if self.world > 1 and torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()

    def barrier(self) -> None:
        if self.world > 1:
            torch.distributed.barrier(device_ids=[self.local_rank] if self.device.type == "cuda" else None)

    def sum(self, values: Sequence[float]) -> list[float]:
        """Element-wise sums over the ranks, in float64."""
        if self.world == 1:
            return [float(value) for value in values]
        total = torch.tensor([float(value) for value in values], dtype=torch.float64, device=self.device)
        torch.distributed.all_reduce(total)
        return total.tolist()

    def added(self, values: Tensor) -> Tensor:
        """[n] element-wise sums over the ranks, left on the device; the values themselves with one rank."""
        if self.world == 1:
            return values
        total = values.detach().double().to(self.device)
        torch.distributed.all_reduce(total)
        return total

    def mean(self, value: float | Tensor, weight: float = 1.0) -> float:
        """The mean of ``value`` over the ranks, each counted ``weight`` times; NaN if no rank has a weight."""
        if self.world == 1:
            return float(value)
        # a rank without weight may hold anything, NaN too
        weighted, weights = self.sum([float(value) * weight if weight else 0.0, weight])
        return weighted / weights if weights else float("nan")

    def any(self, flag: bool) -> bool:
        """Whether any rank says yes: how all ranks stop, save or give up at the same step."""
        return bool(flag) if self.world == 1 else self.sum([float(flag)])[0] > 0

    def broadcast(self, tensor: Tensor, source: int = 0) -> Tensor:
        """``tensor`` becomes the source's, in place."""
        if self.world > 1:
            torch.distributed.broadcast(tensor, source)
        return tensor

    def broadcast_object(self, value: Any, source: int = 0) -> Any:
        """The source's small picklable value, on every rank."""
        if self.world == 1:
            return value
        box = [value]
        torch.distributed.broadcast_object_list(box, source, device=self.device)
        return box[0]

    def gather(self, value: Any) -> list[Any]:
        """Every rank's small picklable value, by rank, on every rank."""
        if self.world == 1:
            return [value]
        box: list[Any] = [None] * self.world
        torch.distributed.all_gather_object(box, value)
        return box

    @torch.no_grad()
    def average_gradients(self, parameters: Iterable[nn.Parameter], weight: float = 1.0) -> None:
        """Replace each gradient by sum(weight_r * grad_r) / sum(weight_r) over the ranks r, summed in float32.

        weight: how many samples (or their summed weights) this rank's mean loss stood for. A gradient that some
        ranks lack counts as zero there; one that all lack stays None, as it would on one rank.
        """
        if self.world == 1:
            return
        parameters = [parameter for parameter in parameters if parameter.requires_grad]
        present = self.sum([float(parameter.grad is not None) for parameter in parameters] + [weight])
        weights = present.pop()
        assert weights > 0, "no rank has a sample in this step"
        shared = [parameter for parameter, count in zip(parameters, present) if count > 0]
        for bucket in _buckets(shared):
            self._average_bucket(bucket, weight, weights)

    def _average_bucket(self, bucket: list[nn.Parameter], weight: float, weights: float) -> None:
        parts = [torch.zeros(p.numel(), device=p.device) if p.grad is None else p.grad.detach().float().reshape(-1) for p in bucket]
        flat = torch.cat(parts).to(self.device).mul_(weight)
        torch.distributed.all_reduce(flat)
        flat.div_(weights)
        for parameter, part in zip(bucket, flat.split([p.numel() for p in bucket])):
            averaged = part.view_as(parameter)
            if parameter.grad is None:
                parameter.grad = averaged.to(parameter.device, parameter.dtype, copy=True)
            else:
                parameter.grad.copy_(averaged)

    @torch.no_grad()
    def share(self, parameters: Iterable[Tensor], source: int = 0) -> None:
        """Give every rank the source's values: after initialisation or a load, so that all start alike."""
        if self.world == 1:
            return
        for parameter in parameters:
            moved = parameter.detach().to(self.device)
            torch.distributed.broadcast(moved, source)
            parameter.copy_(moved)

    @torch.no_grad()
    def agree(self, parameters: Iterable[Tensor]) -> bool:
        """Whether the ranks hold bit-equal values: a drift means a broken rank or a parameter that was not averaged."""
        if self.world == 1:
            return True
        total = torch.zeros(2, dtype=torch.float64)
        for parameter in parameters:
            values = parameter.detach().double().cpu().reshape(-1)
            total += torch.stack([values.sum(), (values * torch.arange(1, values.numel() + 1, dtype=torch.float64)).sum()])
        sums = self.gather(total.tolist())
        return all(other == sums[0] for other in sums)

    def preflight(self, folder: Path | None = None) -> list[str]:
        """What is unequal between the ranks: packages and the run's folder (errors) and clocks (warnings, returned).

        Raises RunError ``distributed.unequal`` naming the package and the two versions, ``distributed.folder`` when the
        machines do not see the same snapshots.
        """
        if self.world == 1:
            return []
        ours = {**_versions(), "device": self.device.type}
        saved = sorted(path.name for path in folder.glob("checkpoints/state_step_*")) if folder is not None else []
        self.barrier()
        seen = self.gather((ours, time.time(), saved))
        for rank, (theirs, _, names) in enumerate(seen):
            if names != seen[0][2]:
                raise RunError(
                    "distributed.folder", f"Rank {rank} sees {len(names)} snapshots in the run's folder, rank 0 sees {len(seen[0][2])}.",
                    "All machines must see the same folder: use an output_dir on storage that they share.",
                )  # fmt: skip
            for name, version in theirs.items():
                if version != seen[0][0][name]:
                    raise RunError(
                        "distributed.unequal",
                        f"Rank {rank} has {name} {version}, rank 0 has {seen[0][0][name]}.",
                        "Install the same versions on all machines; otherwise the ranks compute different steps.",
                    )
        offset = max(abs(clock - seen[0][1]) for _, clock, _ in seen)
        return [f"The machines' clocks differ by {offset:.0f} s; times in the events are rank 0's."] if offset > 5 else []


def _versions() -> dict[str, str]:
    """What must be equal on all machines: python, torch, the packages that compute, and this trainer's own code."""
    from importlib import metadata

    found = {"torch": torch.__version__, "python": ".".join(map(str, sys.version_info[:2])), "cuda": str(torch.version.cuda)}
    for package in ("accelerate", "peft", "transformers", "safetensors", "bitsandbytes"):
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            found[package] = "none"
    code = hashlib.sha256()
    root = Path(__file__).resolve().parents[1]
    for path in sorted(root.rglob("*.py")):
        code.update(path.relative_to(root).as_posix().encode() + path.read_bytes())
    return {**found, "ltx_train": code.hexdigest()[:12]}


def single_device(device: str) -> torch.device:
    """The device of a lone process: the one named, which must be there, or for auto the best there is."""
    if device != "auto":
        found = torch.device(device)
        place = {"cuda": torch.cuda, "mps": torch.backends.mps, "xpu": getattr(torch, "xpu", None)}.get(found.type)
        if found.type != "cpu" and (place is None or not place.is_available()):
            raise ConfigError("device.missing", f"The device is set to {device}, and torch sees none here.", "Install the torch for your GPU (`python -m ltx_train env` says which is there), or set device: auto or cpu.")
        if found.type == "cuda" and (found.index or 0) >= torch.cuda.device_count():
            raise ConfigError("device.missing", f"The device is set to {device}; there are {torch.cuda.device_count()} GPUs here.", "They are counted from cuda:0.")
        return found
    if torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("mps") if torch.backends.mps.is_available() else torch.device("cpu")


def _backend(wanted: str, on_cpu: bool) -> str:
    """The backend string for torch: NCCL moves GPU tensors, gloo CPU ones and, on Windows, both."""
    nccl = torch.distributed.is_nccl_available()
    if wanted == "nccl" and (on_cpu or not nccl):
        raise RunError("distributed.backend", "The backend nccl needs NVIDIA GPUs and a torch with NCCL (Linux).", "Set distributed.backend to auto or gloo.")
    if on_cpu or wanted == "gloo" or not nccl:
        return "gloo"
    return "cuda:nccl,cpu:gloo"


def _join(backend: str, on_cpu: bool, section: DistributedSection) -> None:
    from accelerate import PartialState

    try:
        PartialState(cpu=on_cpu, backend=backend, timeout=timedelta(minutes=section.timeout_minutes))
    except LtxTrainError:
        raise
    except (RuntimeError, ValueError, ConnectionError) as error:
        where = f"{os.environ.get('MASTER_ADDR', '?')}:{os.environ.get('MASTER_PORT', '?')}"
        hint = f"Backend {backend}; {error}. Check the firewall, main_process_ip and main_process_port, and that all machines were started."
        raise RunError("distributed.meeting", f"The processes could not meet at {where}.", hint) from error


def _buckets(parameters: list[nn.Parameter]) -> list[list[nn.Parameter]]:
    """Neighbours together, up to 32 MB of float32: few collectives, little extra memory. The same on every rank."""
    buckets: list[list[nn.Parameter]] = []
    size = BUCKET_ELEMENTS
    for parameter in parameters:
        if size + parameter.numel() > BUCKET_ELEMENTS:
            buckets.append([])
            size = 0
        buckets[-1].append(parameter)
        size += parameter.numel()
    return buckets
