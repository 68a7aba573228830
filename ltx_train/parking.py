"""Parking: between two parts of a run the child waits for the next one, its weights in host memory, the card free, nothing unloaded."""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import psutil
import torch
from torch import Tensor, nn

from .errors import StopRequested, size_text
from .room import HOST_RESERVE, Parked
from .runs.live import LiveRun
from .runs.lock import ProcessId

if TYPE_CHECKING:
    from .parts import Parts
    from .training.parallel import Parallel

MOVED = ("cuda", "xpu")
"""Kinds of devices that have a memory of their own to be freed."""
POLL = 0.2
"""Seconds between two looks for the next part."""

_OWNERS = (nn.Module, torch.optim.Optimizer, torch.amp.GradScaler)
_PACKAGES = (__name__.split(".")[0], "bitsandbytes", "peft")


@dataclass(frozen=True)
class Asked:
    """A part as the ``go_on`` control names it: so many steps (0: all), or up to a step; owner: the process that wants it."""

    steps: int = 0
    until: int | None = None
    owner: ProcessId | None = None

    @classmethod
    def read(cls, details: dict[str, Any] | None) -> Asked:
        """Of a control file's details; what is missing or damaged counts as not said."""
        details = details or {}
        number = lambda name: details[name] if isinstance(details.get(name), int) and details[name] > 0 else 0  # noqa: E731
        try:
            owner = ProcessId(**details["owner"])
        except (KeyError, TypeError):
            owner = None
        return cls(number("steps"), number("until") or None, owner)

    def end(self, step: int, total: int) -> int | None:
        """The step at which the part ends that begins at ``step``; None where that is the run's own end."""
        until = self.until if self.until is not None else step + self.steps if self.steps else total
        return max(until, step + 1) if until < total else None


class Parking:
    """Ends the parts of a run. All ranks go through it together; rank 0 hears what is asked.

    minutes: how long a parked run waits (0: not at all). A run that does not go on ends as a stopped one, from whose
    snapshot the next start goes on bit for bit: also where weights lie in shards, or the host has no room for them.
    """

    def __init__(self, live: LiveRun, parallel: Parallel, parts: Parts, minutes: float) -> None:
        self.live, self.parallel, self.parts, self.minutes = live, parallel, parts, minutes
        self.part = Asked()
        self.until: int | None = None
        self.waited = 0.0
        self.left = False

    def begin(self, step: int, total: int, asked: dict[str, Any] | None = None) -> None:
        """A part begins at ``step``: the one given, or the one that the start asked for."""
        details = asked if asked is not None else self.parallel.broadcast_object(self.live.take("go_on"))
        self.part = Asked.read(details)
        self.until = self.part.end(step, total)
        self.live.set(part=self.until)

    def due(self, step: int) -> bool:
        """Whether the part ends here."""
        return self.until is not None and step >= self.until

    def wait(self, step: int, total: int) -> None:
        """Free the card and wait; on return the next part has begun. Everything must be saved.

        Raises StopRequested when the run is to end here: asked to stop, its owner gone, or nobody came in time.
        """
        lot = Lot(self.parallel.device, self.parts)
        why_not = self._why_not(lot)
        if why_not:
            self._leave(f"step {step}: the part is done; {why_not}")
        started = time.monotonic()
        lot.leave_device()
        away = f"; {size_text(lot.size)} wait in host memory, {size_text(lot.rest())} stay on the card" if lot.moves else ""
        self.live.set_state("parked", f"step {step} of {total}{away}")
        asked = self._next_part()
        self.waited += time.monotonic() - started
        self.begin(step, total, asked)  # known before memory can run out
        self.live.set_state("running", "the next part")
        lot.come_back()

    def _why_not(self, lot: Lot) -> str:
        """Why this run ends instead of waiting, the same on every rank; nothing where it can wait."""
        if self.minutes == 0:
            return "park_minutes is 0"
        if self.parts.trainable.sharded:
            return "weights in shards over several processes do not wait"
        if self.parallel.any(not lot.fits()):
            return "host memory has no room for its weights"
        return ""

    def _next_part(self) -> dict[str, Any]:
        deadline = time.monotonic() + 60 * self.minutes
        while True:
            kind, what = self.parallel.broadcast_object(self._word(deadline) if self.live.is_main else None)
            if kind == "go on":
                return what
            if kind == "end":
                self._leave(what)
            time.sleep(POLL)

    def _word(self, deadline: float) -> tuple[str, Any]:
        """What rank 0 has to say: go on, end, or wait."""
        if self.live.stop.requested:
            return "end", self.live.stop.reason
        asked = self.live.take("go_on")
        if asked is not None:
            return "go on", asked
        if self.part.owner is not None and self.part.owner.here and not self.part.owner.alive():
            return "end", "the program that it was training for has gone"
        if time.monotonic() > deadline:
            return "end", f"nobody asked it to go on for {self.minutes:g} minutes"
        return "wait", None

    def _leave(self, reason: str) -> None:
        self.left = True
        if self.live.is_main:
            self.live.request_stop(reason)
        self.live.stop.request(reason)
        raise StopRequested(f"The run ended between two parts ({reason}).")


class Lot:
    """What of a training lies on its device, and its way to host memory and back, bit for bit, in the same tensors."""

    def __init__(self, device: torch.device, parts: Parts) -> None:
        self.device, self.parts = device, parts
        self.moves = device.type in MOVED
        self.parked: list[Parked] = []
        self.size = 0

    def storages(self) -> list[torch.UntypedStorage]:
        """The distinct storages on the device of all that the loop keeps from step to step."""
        found: dict[int, torch.UntypedStorage] = {}
        parts = self.parts
        for tensor in tensors_within(parts.step, parts.trainable, parts.optimizer, parts.scaler, parts.ema):
            storage = _storage_on(tensor, self.device)
            if storage is not None:
                found.setdefault(storage.data_ptr(), storage)
        return list(found.values())

    def fits(self) -> bool:
        """Whether host memory has room."""
        self.size = sum(s.nbytes() for s in self.storages()) if self.moves else 0
        together = self.size * int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        return not together or together + HOST_RESERVE < psutil.virtual_memory().available

    def leave_device(self) -> None:
        """Everything to host memory, one tensor after the other; the cache of freed memory goes back to the card."""
        if not self.moves:
            return
        self.parts.data.batches.contexts.leave()
        runner = getattr(self.parts.step.transformer, "pass_runner", None)
        if hasattr(runner, "forget"):
            runner.forget()  # recordings know the weights by their addresses, and hold memory themselves
        self._settle()
        self.parked = [Parked.take(storage) for storage in self.storages()]
        self._settle()

    def come_back(self) -> None:
        """Everything back to where it was."""
        while self.parked:
            self.parked[-1].give_back()
            self.parked.pop()
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)  # before another stream uploads into what has just been filled

    def rest(self) -> int:
        """Bytes of tensors that are still on the device."""
        return torch.cuda.memory_allocated(self.device) if self.device.type == "cuda" else 0

    def _settle(self) -> None:
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)  # uploads of streamed blocks run on a stream of their own
            clear = getattr(torch._C, "_cuda_clearCublasWorkspaces", None)
            if clear is not None:
                clear()
            torch.cuda.empty_cache()


def tensors_within(*roots: object) -> Iterator[Tensor]:
    """Every tensor reachable from the roots: through containers, modules, optimizers, and objects of ours and of the adapter packages."""
    seen: set[int] = set()
    kept: list[object] = []  # ids are only unique as long as their objects live
    waiting = list(roots)
    while waiting:
        one = waiting.pop()
        if id(one) in seen or isinstance(one, type):
            continue
        seen.add(id(one))
        kept.append(one)
        if isinstance(one, Tensor):
            yield one
            waiting += [one.grad] if one.is_leaf and one.grad is not None else []
            waiting += vars(one).values()  # of tensors made of other tensors
        elif isinstance(one, dict):
            waiting += [*one.keys(), *one.values()]
        elif isinstance(one, list | tuple | set | frozenset):
            waiting += one
        elif isinstance(one, _OWNERS) or type(one).__module__.split(".")[0] in _PACKAGES:
            waiting += getattr(one, "__dict__", {}).values()


def _storage_on(tensor: Tensor, device: torch.device) -> torch.UntypedStorage | None:
    """The tensor's storage if it lies on the device and can be emptied; paged ones are left to their owner."""
    try:
        storage = tensor.untyped_storage()
        there = storage.device.type == device.type and storage.nbytes() > 0 and storage.resizable() and storage.data_ptr() != 0
    except RuntimeError:  # a tensor made of others has no storage of its own
        return None
    return storage if there and not getattr(tensor, "is_paged", False) else None
