"""Uploads held back to the rate of a slower link, to measure here what streaming costs on another machine."""

from __future__ import annotations

import time

import torch

from ..memory.streaming import BlockStore

CYCLES = 50_000_000


def hold_back(store: BlockStore, gigabytes: float, device: torch.device) -> None:
    """Let each upload take as long as it would at so many GB/s (0: as fast as it goes)."""
    if not gigabytes or not store.streams:
        return
    wanted = store.size / (gigabytes * 1e9)
    if device.type != "cuda":
        store.after_upload = lambda: time.sleep(wanted)
        return
    missing = wanted - _seconds(lambda: store.ring[0].copy_(next(iter(store.host_buffers.values())), non_blocking=True), device)
    store.holds[0] = None  # another block stood there
    rate = CYCLES / _seconds(lambda: torch.cuda._sleep(CYCLES), device)
    if missing > 0:
        store.after_upload = lambda: torch.cuda._sleep(int(missing * rate))


def _seconds(work, device: torch.device) -> float:
    """The shorter of two runs on the device."""
    found = []
    for _ in range(2):
        torch.cuda.synchronize(device)
        started = time.perf_counter()
        work()
        torch.cuda.synchronize(device)
        found.append(time.perf_counter() - started)
    return min(found)
