"""Reading ahead: threads fetch the next tensors of a file while those before them are converted and put where they belong."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import torch
from torch import Tensor

from .safetensors_file import SafetensorsFile
from .weights import WeightSource

AHEAD = 1 << 30
"""Bytes in host memory at most that are read and not yet used."""
PIECE = 16 << 20
"""Bytes that a thread reads at once: large tensors are shared out among all threads."""
SMALL = 1 << 18
"""Bytes up to which a tensor is read when it is asked for: that takes less time than to have a thread do it."""
THREADS = 8
"""More of them read no faster, neither from the page cache nor from a fast disk."""


@dataclass(frozen=True)
class _Part:
    """A stretch of a stored tensor's bytes."""

    file: SafetensorsFile
    name: str
    start: int
    size: int


@dataclass(frozen=True)
class _Asked:
    """A part that is read, or will be, into ``buffer`` [size]; staged: which of the pieces that is."""

    part: _Part
    buffer: Tensor
    done: Future
    staged: Tensor | None = None


class ReadAhead:
    """While entered, a source for one thread, whose tensors others read ahead in the order in which they will be asked for.

    names: that order. What is asked for in another one is read when it is asked for. staging: gives page-locked memory
    [n] for uploads to ``device``, a CUDA card: all but small tensors then come back on the card already, copied there on
    the current stream while the host goes on. That stream is enough: uploads are several times as fast as any disk.
    Without staging all tensors come back in host memory, on whichever device they are wanted.
    An error of reading is raised where its tensor is asked for. Leaving waits for the threads: a piece or two each.
    """

    def __init__(self, source: WeightSource, names: Iterable[str], *, device: torch.device | str = "cpu", staging: Callable[[int], Tensor] | None = None) -> None:
        self.source, self.device = source, torch.device(device)
        stored = dict.fromkeys(s for name in names for s in source.behind(name))
        files = source.store.where
        self._parts = deque(part for name in stored for part in _parts_of(files[name], name))
        self._waiting = {part.name for part in self._parts}  # no part of them is asked for yet
        self._asked: dict[str, deque[_Asked]] = {}
        self._whole: dict[str, Tensor] = {}
        self._held = 0  # bytes asked for in memory of their own, until somebody has waited for them
        self._staging, self._pieces = staging is not None, deque[tuple[Tensor, torch.cuda.Event | None]]()
        if staging is not None:
            count = min(AHEAD // PIECE, len(self._parts))
            self._pieces.extend((piece, None) for piece in staging(count * PIECE).split(PIECE))
        card = None if self.device.type != "cuda" else torch.cuda.current_device() if self.device.index is None else self.device.index
        self._threads = ThreadPoolExecutor(min(THREADS, _cores()), "reads ahead", _begin, (card,))

    def __enter__(self) -> WeightSource:
        return self.source.read_by(self.read)

    def __exit__(self, *error) -> None:
        self._threads.shutdown(wait=True, cancel_futures=True)
        if self._staging and self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()  # the pieces are read by copies until then

    def read(self, name: str) -> Tensor:
        """The stored tensor ``name`` as it is: on the device if it came through staging, else on the CPU."""
        self._ask()
        file = self.source.store.where[name]
        if name not in self._asked:
            if name in self._waiting:  # out of its turn
                self._waiting.remove(name)
                self._parts = deque(part for part in self._parts if part.name != name)
            return file.read(name)
        span = file.spans[name]
        left = span.end - span.begin
        whole = self._whole[name] if name in self._whole else torch.empty(left, dtype=torch.uint8, device=self.device)
        asked = self._asked[name]
        while left:
            one = asked.popleft()  # there is one: the rest of this tensor stands first in line, and room for it was made below
            one.done.result()
            self._take(one, whole)
            left -= one.part.size
            self._ask()
        del self._asked[name]
        self._whole.pop(name, None)
        return whole.view(span.info.dtype).reshape(span.info.shape)

    def _take(self, one: _Asked, whole: Tensor) -> None:
        """Bring a part that is read to its place, and make room for another."""
        if one.staged is None:
            self._held -= one.part.size
            return
        whole[one.part.start : one.part.start + one.part.size].copy_(one.buffer, non_blocking=True)
        sent = torch.cuda.current_stream(self.device).record_event() if self.device.type == "cuda" else None
        self._pieces.append((one.staged, sent))

    def _ask(self) -> None:
        """Have the next parts read, as many as there is room for."""
        while self._parts:
            part, staged, event = self._parts[0], None, None
            if self._staging:
                if not self._pieces:
                    return
                staged, event = self._pieces.popleft()
                buffer = staged[: part.size]
            else:
                if self._held and self._held + part.size > AHEAD:
                    return
                self._held += part.size
                buffer = self._place(part)
            self._parts.popleft()
            self._waiting.discard(part.name)
            done = self._threads.submit(_read, part, buffer, event)
            self._asked.setdefault(part.name, deque()).append(_Asked(part, buffer, done, staged))

    def _place(self, part: _Part) -> Tensor:
        """The part's bytes in the memory that its tensor is given as a whole."""
        if part.name not in self._whole:
            span = part.file.spans[part.name]
            self._whole[part.name] = torch.empty(span.end - span.begin, dtype=torch.uint8)
        return self._whole[part.name][part.start : part.start + part.size]


def _parts_of(file: SafetensorsFile, name: str) -> list[_Part]:
    size = file.spans[name].end - file.spans[name].begin
    return [_Part(file, name, start, min(PIECE, size - start)) for start in range(0, size, PIECE)] if size > SMALL else []


def _begin(card: int | None) -> None:
    """The first thing in each thread: to wait for a copy must not wake another card, where it would take memory."""
    if card is not None:
        torch.cuda.set_device(card)


def _read(part: _Part, buffer: Tensor, sent: torch.cuda.Event | None) -> None:
    """Runs in a thread. sent: the copy that must be over before the buffer is written."""
    if sent is not None:
        sent.synchronize()
    part.file.fill(part.name, buffer, part.start)


def _cores() -> int:
    """Processor cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
