"""Host memory that a card can copy from by itself: page-locked buffers of exactly the size asked for."""

from __future__ import annotations

import mmap
import os
import threading
import weakref
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import torch
from torch import Tensor

PIECE = 1 << 23
"""Bytes that a thread touches or clears at a time; smaller buffers are not worth a second thread."""
PAGE = 4096
THREADS = 16


class HostMemory:
    """Buffers in host memory, page-locked as far as the system and ``limit`` allow.

    torch's own pinned allocator rounds to powers of two; here each buffer's pages are registered as they are. Where the
    system refuses more, or past ``limit`` bytes, buffers stay pageable: copies from them work, only slower.
    ``pinned`` and ``size`` count bytes. A fresh buffer's pages are there before they are locked: several threads touch them,
    where the driver would have the system find and clear one page after another (1 to 2 GB/s in a virtual machine).
    """

    def __init__(self, *, pin: bool, limit: int | None = None) -> None:
        self.pin, self.limit = pin, limit
        self.pinned = self.size = 0
        self._guard = threading.Lock()
        self._taken: list[Tensor] = []
        self._free: dict[int, list[Tensor]] = {}
        self._registered: list[tuple[int, Tensor]] = []
        self._finalizer = weakref.finalize(self, _unregister, self._registered)

    def take(self, size: int) -> Tensor:
        """A buffer [size] of bytes; from any thread whose current device is the one that copies."""
        with self._guard:
            free = self._free.get(size)
            if free:
                self._taken.append(free.pop())
                return self._taken[-1]
            self.size += size
            lock = self.pin and bool(size) and (self.limit is None or self.pinned + size <= self.limit)
            self.pinned += size if lock else 0
        buffer = _pages(size)
        if lock:
            touch(buffer)
            done = int(torch.cuda.cudart().cudaHostRegister(buffer.data_ptr(), size, 0)) == 0
            with self._guard:
                if done:
                    self._registered.append((buffer.data_ptr(), buffer))
                else:
                    self.pinned -= size
                    self.pin = False
                    _forget_error()
        with self._guard:
            self._taken.append(buffer)
        return buffer

    def reuse(self) -> None:
        """Nothing taken so far is in use any more: hand the same buffers out again."""
        for buffer in self._taken:
            self._free.setdefault(buffer.numel(), []).append(buffer)
        self._taken.clear()

    @property
    def idle(self) -> int:
        """Bytes that wait to be handed out again."""
        return sum(size * len(buffers) for size, buffers in self._free.items())

    def close(self) -> None:
        """Unlock the pages; the memory goes back when its last user does."""
        self._taken.clear()
        self._free.clear()
        self._finalizer()


class Through:
    """Moves one tensor after another to the host through the same page-locked buffer: each is gone when the next one comes."""

    def __init__(self, memory: HostMemory) -> None:
        self.memory = memory
        self.buffer = torch.empty(0, dtype=torch.uint8)

    def __call__(self, value: Tensor) -> Tensor:
        if value.nbytes > self.buffer.numel():
            self.buffer = self.memory.take(value.nbytes)
        return self.buffer[: value.nbytes].view(value.dtype).view(value.shape).copy_(value)


def _pages(size: int) -> Tensor:
    """Memory [size] that starts with a page of its own, and whose storage does: torch asks there whether it is page-locked."""
    if not size:
        return torch.empty(0, dtype=torch.uint8)
    private = {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS} if hasattr(mmap, "MAP_ANONYMOUS") else {}
    pages = mmap.mmap(-1, size, **private)
    if size >= PIECE and hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # a kernel without huge pages
            pages.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(pages, dtype=torch.uint8)


def touch(buffer: Tensor) -> None:
    """Have the system give every page of a fresh buffer [bytes] now, on several threads. Its numbers are lost."""
    in_pieces([buffer], lambda piece: piece[::PAGE].zero_())


def clear(buffers: Iterable[Tensor]) -> None:
    """Zeros in host buffers [bytes], on several threads."""
    in_pieces(buffers, Tensor.zero_)


def in_pieces(buffers: Iterable[Tensor], work: Callable[[Tensor], object]) -> None:
    """``work`` on pieces of the buffers. torch's own threads do not serve: launchers of several processes leave each one."""
    pieces = [piece for buffer in buffers for piece in buffer.split(PIECE)]
    threads = min(host_threads(), len(pieces))
    if threads < 2:
        for piece in pieces:
            work(piece)
        return
    with ThreadPoolExecutor(threads, "host memory") as pool:
        list(pool.map(work, pieces))


def host_threads() -> int:
    """Threads of this process for work on host memory: its share of the cores that the processes of this machine may use."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(THREADS, cores // max(1, int(os.environ.get("LOCAL_WORLD_SIZE", "1")))))


def _forget_error() -> None:
    """A refused registration leaves an error behind that the next launch would report as its own."""
    try:
        torch.zeros(1, device="cuda")
    except RuntimeError:
        pass


def _unregister(registered: list[tuple[int, Tensor]]) -> None:
    for address, _ in registered:  # before the memory is freed: a freed range that is still registered cannot be registered again
        torch.cuda.cudart().cudaHostUnregister(address)
    registered.clear()
