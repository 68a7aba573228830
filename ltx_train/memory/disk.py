"""Blocks that rest in a file: for machines whose RAM does not hold the model, read ahead by a thread of its own."""

from __future__ import annotations

import os
import shutil
import tempfile
import weakref
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from ..errors import ConfigError
from .pinned import HostMemory

AHEAD = 4
"""Blocks in host memory at once: being read, waiting, being uploaded."""


@dataclass
class _Slot:
    """A host buffer, the block it holds or will hold, and what must be over before it is written and read."""

    buffer: Tensor
    index: int | None = None
    reading: Future | None = None
    sent: torch.cuda.Event | None = None


class _Reader:
    """The file, for the thread that reads it. It does not know the blocks: their last reference would be dropped in that thread, which cannot wait for itself."""

    def __init__(self, path: Path, size: int) -> None:
        self.path, self.size, self.file, self.done = path, size, path.open("rb", buffering=0), 0

    def fill(self, slot: _Slot, number: int) -> None:
        """Read the file's block of that number into the slot, once the upload from there is over."""
        if slot.sent is not None:
            slot.sent.synchronize()
            slot.sent = None
        view, start = memoryview(slot.buffer.numpy()), 0
        self.file.seek(number * self.size)
        while start < self.size:
            count = self.file.readinto(view[start:])
            if not count:
                raise OSError(f"{self.path.name} ends early, at {start} of {self.size} bytes of its block {number}")
            start += count
        self.done += self.size


class DiskBlocks:
    """Byte buffers of blocks in one file, of which ``ahead`` at a time are read into (page-locked) host memory.

    ``place(i)`` is block i's bytes as a memory-mapped tensor: what is written there is in the file, and is no memory that
    the system cannot take back. ``take(i)`` gives them in host memory, in the order told to ``ask``.
    Raises ConfigError ``memory.disk`` where the disk has no room.
    """

    def __init__(self, indices: Iterable[int], size: int, *, memory: HostMemory, folder: Path | None = None, ahead: int = AHEAD) -> None:
        order = list(indices)
        self.size, self.memory = size, memory
        folder = folder or blocks_folder()
        folder.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(folder).free
        if free < size * len(order):
            raise ConfigError(
                "memory.disk", f"{len(order)} blocks on the disk need {size * len(order) / 1e9:.1f} GB; {free / 1e9:.1f} GB are free.",
                f"Free some space in {folder}, set XDG_CACHE_HOME to another disk, or lower acceleration.blocks_on_disk.",
            )  # fmt: skip
        handle, name = tempfile.mkstemp(prefix="blocks_", suffix=".bin", dir=folder)
        os.truncate(handle, size * len(order))
        os.close(handle)
        self.path, self.places = Path(name), {index: number for number, index in enumerate(order)}
        self.reader = _Reader(self.path, size)
        self.mapped = torch.from_file(name, shared=True, size=size * len(order), dtype=torch.uint8)
        self.slots = [_Slot(memory.take(size)) for _ in range(min(ahead, len(order)))]
        self.thread = ThreadPoolExecutor(1, thread_name_prefix="blocks from disk")
        self._end = weakref.finalize(self, _remove, self.thread, self.reader)

    def __contains__(self, index: int) -> bool:
        return index in self.places

    def place(self, index: int) -> Tensor:
        """Block ``index``'s bytes [size] in the file."""
        start = self.places[index] * self.size
        return self.mapped[start : start + self.size]

    def ask(self, order: Iterable[int]) -> None:
        """Start reading the first blocks of ``order`` that there are buffers for; what is there is not read again."""
        wanted = list(dict.fromkeys(index for index in order if index in self.places))[: len(self.slots)]
        held = {slot.index for slot in self.slots}
        free = [slot for slot in self.slots if slot.index not in wanted]
        for index in wanted:
            if index not in held:
                slot = free.pop(0)
                slot.index, slot.reading = index, self.thread.submit(self.reader.fill, slot, self.places[index])

    def take(self, index: int) -> Tensor:
        """Block ``index``'s bytes in host memory; waits until they are read. They stay until another block needs the buffer."""
        slot = self._slot(index)
        if slot is None:
            self.ask([index])
            slot = self._slot(index)
        assert slot is not None and slot.reading is not None
        slot.reading.result()
        return slot.buffer

    def sending(self, index: int, event: torch.cuda.Event | None) -> None:
        """An upload from block ``index``'s buffer is under way, and over with ``event``."""
        slot = self._slot(index)
        if slot is not None:
            slot.sent = event

    def _slot(self, index: int) -> _Slot | None:
        return next((slot for slot in self.slots if slot.index == index), None)

    def close(self) -> None:
        """Remove the file."""
        self._end()


def blocks_folder() -> Path:
    """Where such files go: the user's cache, which is on a disk (a temporary folder may be in RAM)."""
    base = os.environ.get("XDG_CACHE_HOME") or os.environ.get("LOCALAPPDATA") or Path.home() / ".cache"
    return Path(base) / "ltx_train" / "blocks"


def _remove(thread: ThreadPoolExecutor, reader: _Reader) -> None:
    thread.shutdown(wait=True, cancel_futures=True)
    reader.file.close()
    try:
        reader.path.unlink(missing_ok=True)
    except OSError:
        pass  # Windows keeps a mapped file until the last tensor on it has gone
