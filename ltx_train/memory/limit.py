"""A limit on the device memory that this process takes: ``memory_limit_gb``, for a card that others use too."""

from __future__ import annotations

import torch

OUTSIDE = 1.2 * (1 << 30)
"""Bytes that the CUDA context, libraries and graphs take beside what torch's allocator counts."""


def limit_memory(device: torch.device, limit_bytes: float | None) -> None:
    """Let this process take at most so many bytes of a card, context included; None: all of it. Other devices have no such limit.

    What would go beyond it is out of memory, as on a card of that size.
    """
    if device.type != "cuda":
        return
    total = torch.cuda.get_device_properties(device).total_memory
    share = 1.0 if limit_bytes is None else min(1.0, max(limit_bytes - OUTSIDE, 0.0) / total)
    torch.cuda.set_per_process_memory_fraction(share, device)
