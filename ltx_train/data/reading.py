"""Batches read ahead by worker threads; a worker that fails or dies costs a warning, and what it owed is read by the caller."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait

from ..errors import DataError, is_out_of_memory
from .items import Item

Key = tuple[int, int]
"""Step (counted from 0) and micro-step."""
NAME = "load-batches"
PATIENCE = 1.0
"""Seconds between looks at whether the workers still live."""

Load = Callable[[int, int], list[Item]]
Warn = Callable[[str, str, str], None]


class Reader:
    """The samples of micro-steps, those that come next read meanwhile.

    load: reads one micro-step's samples, a pure function: who calls it does not matter. warn: is told (code, message, hint)
    of a worker that failed; the caller then reads that micro-step itself. After a dead worker, or one without memory, the
    caller reads all that follows. A DataError (a file that is missing or damaged) is no worker's fault and is raised.
    names: what a micro-step's samples are called, for errors.
    """

    def __init__(self, load: Load, workers: int, warn: Warn, names: Callable[[int, int], Sequence[str]]) -> None:
        self._load, self._warn, self._names = load, warn, names
        self._threads: list[threading.Thread] = []
        enlist = lambda: self._threads.append(threading.current_thread())  # noqa: E731
        self._pool = ThreadPoolExecutor(workers, thread_name_prefix=NAME, initializer=enlist) if workers else None
        self._waiting: dict[Key, Future[list[Item]]] = {}

    def get(self, upcoming: Sequence[Key]) -> list[Item]:
        """The samples of ``upcoming[0]``; the others are asked for, and what was asked for and is not among them is dropped.

        Raises DataError ``data.read`` where they cannot be read by the caller either.
        """
        wanted = upcoming[0]
        if self._pool is None:
            return self._read(wanted)
        future = self._ask(upcoming)
        if future is None or not self._arrived(future):
            return self._read(wanted)
        error = future.exception()
        if error is None or isinstance(error, DataError):
            return future.result()
        self._failed(wanted, error)
        return self._read(wanted)

    def close(self) -> None:
        """End the workers."""
        if self._pool is not None:
            self._pool.shutdown(wait=True, cancel_futures=True)

    def _ask(self, upcoming: Sequence[Key]) -> Future[list[Item]] | None:
        """What will hold the first one's samples; None where no worker could be started."""
        for key in [key for key in self._waiting if key not in upcoming]:
            self._waiting.pop(key).cancel()
        try:
            for key in upcoming:
                if key not in self._waiting:
                    self._waiting[key] = self._pool.submit(self._load, *key)
        except RuntimeError as error:  # the system gives no more threads
            self._give_up(f"No data worker could be started: {error}.", "The machine's limit of threads or memory is reached.")
            return None
        return self._waiting.pop(upcoming[0])

    def _arrived(self, future: Future[list[Item]]) -> bool:
        """Wait for a worker's answer; False when a worker has died, whose answer may never come."""
        while not wait([future], timeout=PATIENCE).done:
            dead = [thread.name for thread in self._threads if not thread.is_alive()]
            if dead:
                self._give_up(f"The data worker {dead[0]} has died.", "It gave no reason; train.log may hold one.")
                return False
        return True

    def _failed(self, key: Key, error: BaseException) -> None:
        said = f"A data worker failed at step {key[0] + 1}: {_in_words(error)}."
        if is_out_of_memory(error):
            self._give_up(said, "With num_dataloader_workers: 0 nothing is read ahead, which takes less memory.")
        else:
            self._warn("data.worker", said, f"Clips: {', '.join(self._names(*key))}. They are read again by the main process.")

    def _give_up(self, said: str, why: str) -> None:
        """Read without workers from now on."""
        self._warn("data.worker", said, f"{why} The main process reads the clips from now on.")
        self._pool.shutdown(wait=False, cancel_futures=True)
        self._pool = None
        self._waiting.clear()

    def _read(self, key: Key) -> list[Item]:
        try:
            return self._load(*key)
        except DataError:
            raise
        except Exception as error:  # decoders, disks and packages raise what they like: the clips are named
            if is_out_of_memory(error):
                raise
            hint = f"Clips: {', '.join(self._names(*key))}. What was trained is kept: check their files and the disk of the cache, then go on."
            raise DataError("data.read", f"The clips of step {key[0] + 1} cannot be read: {_in_words(error)}.", hint) from error


def _in_words(error: BaseException) -> str:
    """Class and first line of an exception."""
    text = str(error).strip().split("\n")[0]
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
