"""Block streaming: weights that rest in pinned host memory pass through a ring of buffers, fetched ahead of their turn."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

import torch
from torch import Tensor

from .disk import DiskBlocks
from .pinned import HostMemory

SLOTS = 3
"""Ring buffers: one in use, one ready, one filling."""


def spread(layers: int, resident: int) -> frozenset[int]:
    """Which blocks stay on the device when ``resident`` of them may: evenly spread, so that uploads are too."""
    if resident >= layers:
        return frozenset(range(layers))
    return frozenset(int((j + 0.5) * layers / resident) for j in range(resident))


class BlockStore:
    """The byte buffers of all blocks: some on the device, the others in host memory.

    ``enter(i)`` makes block i's bytes readable on the device in the fixed buffer ``at(i)`` and starts the next uploads;
    the buffer is good until the turn of another block. Uploads run on their own stream in the order of a training step,
    forward, then back; a block that comes out of order (a forward without backward) sets the order right again.
    """

    def __init__(
        self, layers: int, size: int, device: torch.device, *, resident: int | None = None, slots: int = SLOTS, on_disk: int = 0, memory: HostMemory | None = None,
        folder: Path | None = None,
    ) -> None:  # fmt: skip
        """on_disk: so many of the streamed blocks rest in a file (in ``folder``) instead of host memory."""
        self.layers, self.size, self.device = layers, size, device
        self.resident = spread(layers, layers if resident is None else resident)
        streamed = [i for i in range(layers) if i not in self.resident]
        self.device_buffers = {i: torch.empty(size, dtype=torch.uint8, device=device) for i in sorted(self.resident)}
        self.memory = memory or HostMemory(pin=device.type == "cuda")
        self.host_buffers: dict[int, Tensor] = {}
        far = [streamed[n] for n in sorted(spread(len(streamed), min(on_disk, len(streamed))))] if on_disk else []
        self.disk = DiskBlocks(far, size, memory=self.memory, folder=folder) if far else None
        self.ring = [torch.empty(size, dtype=torch.uint8, device=device) for _ in range(min(slots, len(streamed)))]
        self.home = {i: number % len(self.ring) for number, i in enumerate(streamed)}
        self.order = [*streamed, *reversed(streamed)]
        self.position = 0
        self.holds: list[int | None] = [None] * len(self.ring)
        self.ready: list[torch.cuda.Event | None] = [None] * len(self.ring)
        self.free: list[torch.cuda.Event | None] = [None] * len(self.ring)
        self.current: int | None = None
        self.uploaded = 0
        self.after_upload: Callable[[], None] | None = None  # what a measurement does behind each copy, on its stream
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" and streamed else None

    @property
    def streams(self) -> bool:
        """Whether any block rests on the host."""
        return len(self.resident) < self.layers

    def rest(self, index: int) -> Tensor:
        """Where block ``index`` rests: fill it before the first step. Host memory is taken when it is asked for, a block at a
        time, so that loading needs no second copy of the model."""
        if index in self.resident:
            return self.device_buffers[index]
        if index not in self.host_buffers:
            self.host_buffers[index] = self.disk.place(index) if self.disk is not None and index in self.disk else self.memory.take(self.size)
        return self.host_buffers[index]

    def at(self, index: int) -> Tensor:
        """Where block ``index`` stands when its turn comes: always the same buffer."""
        return self.device_buffers[index] if index in self.resident else self.ring[self.home[index]]

    def buffers(self) -> Iterable[Tensor]:
        """All buffers on the device."""
        return [*self.device_buffers.values(), *self.ring]

    def enter(self, index: int) -> Tensor:
        """Block ``index``'s bytes, readable by what is launched from now on."""
        if self.current != index:
            self.leave()
            self.current = index
            if index not in self.resident:
                self._arrive(index)
        return self.at(index)

    def leave(self) -> None:
        """What has been launched so far is the present block's last use in this turn."""
        index, self.current = self.current, None
        if index is None or index in self.resident:
            return
        if self.stream is not None:
            self.free[self.home[index]] = torch.cuda.current_stream(self.device).record_event()
        self.position += 1
        self._fetch_ahead()

    def _arrive(self, index: int) -> None:
        while self.order[self.position % len(self.order)] != index:
            self.position += 1
        if self.holds[self.home[index]] != index:
            self._fetch_ahead()
        ready = self.ready[self.home[index]]
        if ready is not None:
            torch.cuda.current_stream(self.device).wait_event(ready)

    def _fetch_ahead(self) -> None:
        """Start the uploads of the next blocks in order, as many as there are buffers; what is there is not sent again."""
        if self.disk is not None:
            coming = (self.order[(self.position + offset) % len(self.order)] for offset in range(len(self.order)))
            self.disk.ask(index for index in coming if self.holds[self.home[index]] != index)
        wanted: list[int] = []
        for offset in range(len(self.order)):
            index = self.order[(self.position + offset) % len(self.order)]
            if index not in wanted:
                wanted.append(index)
            if len(wanted) == len(self.ring):
                break
        for index in wanted:
            slot = self.home[index]
            if self.holds[slot] == index:
                continue
            self.holds[slot] = index
            self.uploaded += self.size
            if self.stream is None:
                self._copy(slot, index)
                continue
            with torch.cuda.stream(self.stream):
                if self.free[slot] is not None:
                    self.stream.wait_event(self.free[slot])
                self._copy(slot, index)
                self.ready[slot] = self.stream.record_event()
                if self.disk is not None:
                    self.disk.sending(index, self.ready[slot])

    def _copy(self, slot: int, index: int) -> None:
        near = self.disk.take(index) if self.disk is not None and index in self.disk else self.host_buffers[index]
        self.ring[slot].copy_(near, non_blocking=True)
        if self.after_upload is not None:
            self.after_upload()

    # -- CUDA graphs: uploads are recorded with the pass that needs them --
    def begin_recording(self) -> list[int | None]:
        """Fill the ring with what a pass starts with and wait for it; what stands in the ring, for :meth:`take_ring`."""
        self.leave()
        self.position = 0
        if self.ring:
            self._fetch_ahead()
        self.join()
        return list(self.holds)

    def end_recording(self, ring: list[int | None]) -> None:
        """Recorded uploads have not happened: the ring stands as it did."""
        self.holds, self.current, self.position = list(ring), None, 0
        self._forget_events()

    def take_ring(self, ring: list[int | None]) -> None:
        """Bring the ring into the state that a recording starts from, and ends in."""
        self.leave()
        self.join()
        for slot, index in enumerate(ring):
            if index is not None and self.holds[slot] != index:
                self.ring[slot].copy_(self.host_buffers[index], non_blocking=True)
        self.end_recording(ring)
        self.fork()

    def fork(self) -> None:
        """The upload stream goes on from here."""
        self._forget_events()
        if self.stream is not None:
            self.stream.wait_stream(torch.cuda.current_stream(self.device))

    def join(self) -> None:
        """All uploads so far are done for what follows."""
        if self.stream is not None:
            torch.cuda.current_stream(self.device).wait_stream(self.stream)
        self._forget_events()

    def _forget_events(self) -> None:
        self.ready, self.free = [None] * len(self.ring), [None] * len(self.ring)
