"""Reading ahead: workers that fail, die or cannot start cost a warning; what nobody can read ends with its clips' names."""

from __future__ import annotations

import ctypes
import threading

import pytest

from ltx_train.data import reading
from ltx_train.data.reading import Reader
from ltx_train.errors import DataError

STEPS = 6


class Source:
    """Gives [step, micro]; ``fault(step)`` is called first in a worker, ``everywhere(step)`` in any thread."""

    def __init__(self, fault=lambda step: None, everywhere=lambda step: None):
        self.fault, self.everywhere, self.readers = fault, everywhere, {}

    def __call__(self, step, micro):
        self.readers[step] = threading.current_thread().name
        if self.in_worker(step):
            self.fault(step)
        self.everywhere(step)
        return [step, micro]

    def in_worker(self, step):
        return self.readers[step].startswith(reading.NAME)


@pytest.fixture(autouse=True)
def _impatient(monkeypatch):
    monkeypatch.setattr(reading, "PATIENCE", 0.02)


def read(source, workers=2, before=lambda step, reader: None):
    """What a reader gives for each step, and the warnings it gave."""
    warnings = []
    reader = Reader(source, workers, lambda *told: warnings.append(told), lambda step, micro: [f"clip{step}"])
    try:
        found = []
        for step in range(STEPS):
            before(step, reader)
            found.append(reader.get([(n, 0) for n in range(step, step + workers + 1)]))
        return found, warnings
    finally:
        reader.close()


EXPECTED = [[step, 0] for step in range(STEPS)]


def raising(error, step):
    def fault(at):
        if at == step:
            raise error

    return fault


@pytest.mark.parametrize("workers", [0, 1, 3])
def test_in_order_without_a_word(workers):
    source = Source()
    assert read(source, workers) == (EXPECTED, [])
    assert all(source.in_worker(step) == (workers > 0) for step in range(STEPS))


def test_a_failed_worker_is_replaced_for_that_step():
    """Something passing (a network disk, say): told with step, reason and clip; the workers stay at work."""
    source = Source(raising(OSError(5, "Input/output error"), 2))
    found, ((code, message, hint),) = read(source)
    assert found == EXPECTED and code == "data.worker" and "step 3" in message and "Input/output error" in message and "clip2" in hint
    assert not source.in_worker(2) and all(source.in_worker(step) for step in (1, 3, 4, 5))


def test_a_worker_without_memory_leaves_the_reading_to_the_caller():
    source = Source(raising(MemoryError(), 3))
    found, ((code, message, hint),) = read(source, 1)
    assert found == EXPECTED and code == "data.worker" and "MemoryError" in message and "num_dataloader_workers: 0" in hint
    assert not source.in_worker(3) and not source.in_worker(5)


def killed(reader):
    """End the worker's thread from outside while it has nothing to do: as no exception of its work would."""
    (thread,), (ahead,) = reader._threads, reader._waiting.values()
    ahead.result()
    assert ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident), ctypes.py_object(SystemExit)) == 1


def test_a_dead_worker_is_named_and_waited_for_no_longer():
    source = Source()

    def before(step, reader):
        if step == 3:
            killed(reader)

    found, ((code, message, hint),) = read(source, 1, before)
    assert found == EXPECTED and code == "data.worker" and message == f"The data worker {reading.NAME}_0 has died." and "from now on" in hint
    assert not source.in_worker(5)


def test_no_thread_to_be_had(monkeypatch):
    def refused(self):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refused)
    source = Source()
    found, ((code, message, _),) = read(source)
    assert found == EXPECTED and code == "data.worker" and "can't start new thread" in message and not any(map(source.in_worker, range(STEPS)))


@pytest.mark.parametrize("workers", [0, 2])
def test_what_nobody_can_read_ends_with_its_names(workers):
    with pytest.raises(DataError) as caught:
        read(Source(everywhere=raising(KeyError("latents"), 4)), workers)
    assert caught.value.code == "data.read" and "step 5" in caught.value.message and "KeyError: 'latents'" in caught.value.message and "clip4" in caught.value.hint
    with pytest.raises(MemoryError):
        read(Source(everywhere=raising(MemoryError(), 4)), workers)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_damaged_file_is_no_workers_fault(workers):
    source = Source(everywhere=raising(DataError("cache.damaged", "The file is damaged."), 1))
    with pytest.raises(DataError, match="damaged"):
        read(source, workers)
    assert source.in_worker(1) == (workers > 0), "nobody tries it again"
