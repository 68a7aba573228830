"""Which attention kernel torch takes: an order of preference set once a process."""

from __future__ import annotations

import torch

# by measured speed on Hopper at 2,000 to 6,000 tokens: cuDNN 1.7 to 1.9 times flash; older cards have flash first
_ORDERS = {
    "cudnn": ("CUDNN_ATTENTION", "FLASH_ATTENTION", "EFFICIENT_ATTENTION", "MATH"),
    "flash": ("FLASH_ATTENTION", "EFFICIENT_ATTENTION", "CUDNN_ATTENTION", "MATH"),
    "efficient": ("EFFICIENT_ATTENTION", "FLASH_ATTENTION", "MATH"),
    "math": ("MATH",),
}


def prefer_attention(choice: str, device: torch.device) -> str:
    """Set the order for this process: ``auto`` is cuDNN from Hopper on, else flash. A kernel that cannot do a shape is passed over.

    Returns what comes first; ``sdpa`` leaves torch's own order.
    """
    if device.type != "cuda" or torch.version.hip is not None or choice == "sdpa":
        return "sdpa"
    if choice == "auto":
        choice = "cudnn" if torch.cuda.get_device_capability(device) >= (9, 0) else "flash"
    from torch.nn.attention import SDPBackend

    order = [getattr(SDPBackend, name) for name in _ORDERS[choice] if hasattr(SDPBackend, name)]
    wanted = {backend.name for backend in order}
    torch.backends.cuda.enable_cudnn_sdp("CUDNN_ATTENTION" in wanted)
    torch.backends.cuda.enable_flash_sdp("FLASH_ATTENTION" in wanted)
    torch.backends.cuda.enable_mem_efficient_sdp("EFFICIENT_ATTENTION" in wanted)
    torch.backends.cuda.enable_math_sdp(True)
    set_order = getattr(torch._C, "_set_sdp_priority_order", None)
    if set_order is not None:
        set_order([int(backend) for backend in order] + [int(b) for b in _rest(order)])
    return choice


def _rest(order: list) -> list:
    from torch.nn.attention import SDPBackend

    known = ("FLASH_ATTENTION", "EFFICIENT_ATTENTION", "MATH", "CUDNN_ATTENTION")
    return [b for name in known if hasattr(SDPBackend, name) and (b := getattr(SDPBackend, name)) not in order]
