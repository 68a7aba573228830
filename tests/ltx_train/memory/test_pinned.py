"""Host memory: touched and cleared by several threads, each process its share of the cores; page-locked as far as the driver goes."""

import os
import threading
from types import SimpleNamespace

import pytest
import torch

from ltx_train.memory import pinned
from ltx_train.memory.pinned import HostMemory, Through, clear, host_threads, in_pieces, touch


def test_every_piece_is_worked_on_once_by_several_threads(monkeypatch):
    monkeypatch.setattr(pinned, "PIECE", 10)
    monkeypatch.setattr(pinned, "host_threads", lambda: 3)
    buffers = [torch.zeros(size, dtype=torch.uint8) for size in (25, 0, 10)]
    together, seen = threading.Barrier(3), []

    def work(piece: torch.Tensor) -> None:
        seen.append(threading.current_thread().name)
        if len(seen) <= 3:
            together.wait(10)  # three at a time, or the test fails
        piece.add_(1)

    in_pieces(buffers, work)
    assert all(buffer.eq(1).all() for buffer in buffers) and len(seen) == 5 and len(set(seen)) == 3


def test_touched_pages_are_writable_and_cleared_ones_zero(monkeypatch):
    monkeypatch.setattr(pinned, "host_threads", lambda: 2)
    buffer = pinned._pages(2 * pinned.PIECE + 123)
    touch(buffer)
    buffer[-1] = 7
    buffer[: 1 << 12] = 9
    clear([buffer])
    assert not buffer.any()


def test_processes_share_the_cores(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(32)), raising=False)
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    assert host_threads() == 16
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert host_threads() == 8
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "64")
    assert host_threads() == 1
    monkeypatch.delattr(os, "sched_getaffinity")  # Windows and macOS
    monkeypatch.setattr(os, "cpu_count", lambda: None)
    assert host_threads() == 1


@pytest.fixture
def driver(monkeypatch):
    """A driver that locks buffers up to 100 bytes; the calls it got."""
    calls = []
    monkeypatch.setattr(torch.cuda, "cudart", lambda: SimpleNamespace(
        cudaHostRegister=lambda address, size, flags: calls.append(size) or (0 if size <= 100 else 1), cudaHostUnregister=lambda address: calls.append("free"),
    ))  # fmt: skip
    monkeypatch.setattr(pinned, "_forget_error", lambda: calls.append("forgotten"))
    return calls


def test_what_the_driver_refuses_stays_pageable(driver):
    memory = HostMemory(pin=True)
    assert memory.take(60).numel() == 60 and memory.pinned == 60
    assert memory.take(200).numel() == 200 and memory.take(50).numel() == 50
    assert (memory.pinned, memory.size) == (60, 310) and driver == [60, 200, "forgotten"]
    memory.close()
    assert driver[-1] == "free"


def test_no_more_than_the_limit_is_locked_and_buffers_come_back(driver):
    memory = HostMemory(pin=True, limit=100)
    first = memory.take(80)
    assert memory.take(40).numel() == 40 and driver == [80]
    memory.reuse()
    assert memory.take(80) is first and memory.size == 120
    memory.close()


def test_tensors_pass_through_one_buffer():
    memory = HostMemory(pin=False)
    through = Through(memory)
    for value in (torch.randn(3, 4), torch.randn(2, 2).to(torch.bfloat16), torch.randn(()), torch.randn(0, 3)):
        assert torch.equal(through(value), value)
    assert memory.size == 48


def test_what_is_handed_out_again_is_not_idle():
    memory = HostMemory(pin=False)
    first = memory.take(100)
    memory.take(50)
    assert memory.idle == 0
    memory.reuse()
    assert memory.idle == 150
    assert memory.take(100) is first and memory.idle == 50 and memory.size == 150
