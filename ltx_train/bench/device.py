"""The device under measurement: which it is and its name, its clock, the memory in use, and the kernels of a step."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from ..transfer import mark

GIB = 1 << 30


def device_of(tiny: bool) -> torch.device:
    """The card in use; the processor where there is none, and for what it runs in a moment."""
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() and not tiny else torch.device("cpu")


def card_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"


def synchronise(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def now(device: torch.device) -> float | torch.cuda.Event:
    """This moment in what the device has been given to do."""
    if device.type != "cuda":
        return time.perf_counter()
    return mark(device)


def seconds_between(start: float | torch.cuda.Event, end: float | torch.cuda.Event) -> float:
    """Between two moments of :func:`now`; a device must have come past the later one."""
    return end - start if isinstance(start, float) else start.elapsed_time(end) / 1e3


def memory_in_use(device: torch.device) -> dict[str, float]:
    """device_gib: all that the card had in use at the highest point, context included. host_gib: anonymous and locked."""
    import psutil

    found = {"host_gib": round(psutil.Process().memory_info().rss / GIB, 2)}
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        outside = total - free - torch.cuda.memory_reserved(device)
        found["device_gib"] = round((outside + torch.cuda.max_memory_reserved(device)) / GIB, 2)
        found["allocated_gib"] = round(torch.cuda.max_memory_allocated(device) / GIB, 2)
    return found


def kernels(one: Callable[[], None]) -> dict[str, list[float]]:
    """Milliseconds and launches of one step by kind of kernel, and the longest kernels."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as record:
        one()
        torch.cuda.synchronize()
    kinds = (("attention", ("flash", "fmha", "cudnn", "sdpa")), ("gemm", ("gemm", "nvjet", "cutlass", "cublas", "splitK")), ("triton", ("triton",)), ("copy", ("Mem", "copy")))
    by_kind: dict[str, list[float]] = {}
    by_name: dict[str, list[float]] = {}
    for event in record.events():
        if event.device_type.name != "CUDA":
            continue
        kind = next((k for k, words in kinds if any(w in event.name for w in words)), "other")
        for table, key in ((by_kind, kind), (by_name, event.name[:90])):
            entry = table.setdefault(key, [0.0, 0])
            entry[0] += event.device_time / 1e3
            entry[1] += 1
    longest = sorted(by_name.items(), key=lambda item: -item[1][0])[:25]
    return {k: [round(v[0], 1), v[1]] for k, v in [*by_kind.items(), *longest]}
