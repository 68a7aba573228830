"""Host memory that a card can copy from by itself: page-locked buffers of exactly the size asked for."""

from __future__ import annotations

import mmap
import weakref

import torch
from torch import Tensor


class HostMemory:
    """Buffers in host memory, page-locked as far as the system and ``limit`` allow.

    torch's own pinned allocator rounds to powers of two; here each buffer's pages are registered as they are. Where the
    system refuses more, or past ``limit`` bytes, buffers stay pageable: copies from them work, only slower.
    ``pinned`` and ``size`` count bytes.
    """

    def __init__(self, *, pin: bool, limit: int | None = None) -> None:
        self.pin, self.limit = pin, limit
        self.pinned = self.size = 0
        self._taken: list[Tensor] = []
        self._free: dict[int, list[Tensor]] = {}
        self._registered: list[tuple[int, Tensor]] = []
        self._finalizer = weakref.finalize(self, _unregister, self._registered)

    def take(self, size: int) -> Tensor:
        """A buffer [size] of bytes."""
        if self._free.get(size):
            self._taken.append(self._free[size].pop())
            return self._taken[-1]
        buffer = _pages(size)
        self.size += size
        if self.pin and size and (self.limit is None or self.pinned + size <= self.limit):
            if int(torch.cuda.cudart().cudaHostRegister(buffer.data_ptr(), size, 0)) == 0:
                self._registered.append((buffer.data_ptr(), buffer))
                self.pinned += size
            else:
                self.pin = False
                _forget_error()
        self._taken.append(buffer)
        return buffer

    def reuse(self) -> None:
        """Nothing taken so far is in use any more: hand the same buffers out again."""
        for buffer in self._taken:
            self._free.setdefault(buffer.numel(), []).append(buffer)
        self._taken.clear()

    def close(self) -> None:
        """Unlock the pages; the memory goes back when its last user does."""
        self._taken.clear()
        self._free.clear()
        self._finalizer()


def _pages(size: int) -> Tensor:
    """Memory [size] that starts with a page of its own, and whose storage does: torch asks there whether it is page-locked."""
    if not size:
        return torch.empty(0, dtype=torch.uint8)
    private = {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS} if hasattr(mmap, "MAP_ANONYMOUS") else {}
    return torch.frombuffer(mmap.mmap(-1, size, **private), dtype=torch.uint8)


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
