"""Copies between host and device that nobody waits for: uploads from page-locked memory, numbers on their way back."""

from __future__ import annotations

import torch
from torch import Tensor


def upload(tensor: Tensor | None, device: torch.device | str, dtype: torch.dtype | None = None) -> Tensor | None:
    """``tensor`` on ``device`` (in ``dtype``, where given) without waiting for what the device is doing; None stays None.

    A plain ``.to(device)`` from pageable memory stops the host until the device has caught up.
    """
    if tensor is None:
        return None
    kind = torch.device(device).type
    if tensor.device.type == "cpu" and kind == "cuda" and not tensor.is_pinned():
        tensor = locked(tensor)  # torch's host allocator keeps it until the copy is through
    return tensor.to(device=device, dtype=dtype or tensor.dtype, non_blocking=kind == "cuda")  # elsewhere it is not sure to have arrived when it is read


def locked(tensor: Tensor) -> Tensor:
    """The tensor in page-locked memory, or as it is where the system has none left (streamed blocks may hold all): then its copy waits."""
    try:
        return tensor.pin_memory()
    except RuntimeError:
        return tensor


def mark(device: torch.device) -> torch.cuda.Event:
    """A mark after all the work that a CUDA device has been given so far, with the time at which it is passed."""
    event = torch.cuda.Event(enable_timing=True)
    event.record(torch.cuda.current_stream(device))
    return event


class Reading:
    """Numbers of a device tensor on their way to the host: asked for now, read later."""

    def __init__(self, values: Tensor) -> None:
        """values: [n], detached; what is launched later does not change what is read."""
        self._event: torch.cuda.Event | None = None
        if values.device.type != "cuda":
            self._host = values.detach().clone()
            return
        self._host = locked(torch.empty(values.shape, dtype=values.dtype))
        self._host.copy_(values.detach(), non_blocking=True)
        self._event = mark(values.device)

    def get(self) -> list[float]:
        """The numbers; waits until they have arrived, not for what was launched after them."""
        if self._event is not None:
            self._event.synchronize()
        return self._host.tolist()

    def seconds_since(self, begun: torch.cuda.Event) -> float:
        """Seconds from a :func:`mark` to these numbers, as the device passed both; they must have been read."""
        assert self._event is not None, "numbers of the host have no place among a device's work"
        return begun.elapsed_time(self._event) / 1000
