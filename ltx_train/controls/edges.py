"""Canny edges with numpy alone: Sobel gradients, thinning along the gradient, hysteresis."""

from __future__ import annotations

import numpy as np

_TAN_22 = round(0.4142135623730950488 * (1 << 15))  # tan(22.5 degrees) in fixed point, so that no rounding decides a direction
_LUMA = np.array([9798, 19235, 3735], np.int32)  # BT.601 in 1/32768


def canny(pixels: np.ndarray, low: float, high: float) -> np.ndarray:
    """[H, W, 3] uint8 -> [H, W] uint8, 255 on edges.

    J. Canny, "A Computational Approach to Edge Detection" (1986), without smoothing; gradient size |dx| + |dy| of 3x3
    Sobel kernels on the BT.601 grey picture with repeated borders. An edge is a local maximum above ``low`` along its
    gradient that is connected (8 neighbours) to one above ``high``.
    """
    across, down = sobel(grey(pixels))
    size = np.abs(across) + np.abs(down)
    ridge = thin(across, down, size) & (size > np.floor(low))
    return hysteresis(ridge, ridge & (size > np.floor(high))).astype(np.uint8) * 255


def grey(pixels: np.ndarray) -> np.ndarray:
    """[H, W, 3] uint8 -> [H, W] int32, 0..255."""
    return (pixels.astype(np.int32) @ _LUMA + (1 << 14)) >> 15


def sobel(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """[H, W] -> differences to the right and downwards, 3x3 Sobel."""
    padded = np.pad(values, 1, mode="edge")
    smooth = padded[:-2] + 2 * padded[1:-1] + padded[2:]
    across = smooth[:, 2:] - smooth[:, :-2]
    smooth = padded[:, :-2] + 2 * padded[:, 1:-1] + padded[:, 2:]
    return across, smooth[2:] - smooth[:-2]


def thin(across: np.ndarray, down: np.ndarray, size: np.ndarray) -> np.ndarray:
    """[H, W] bool: not smaller than both neighbours along the gradient, which is taken to the nearest 45 degrees."""
    x, y = np.abs(across).astype(np.int64), np.abs(down).astype(np.int64) << 15
    flat = y < x * _TAN_22
    steep = y > x * _TAN_22 + (x << 16)  # tan(67.5) = tan(22.5) + 2
    around = np.pad(size, 1)
    height, width = size.shape

    def beside(row: int, column: int) -> np.ndarray:
        return around[1 + row : 1 + row + height, 1 + column : 1 + column + width]

    level = (size > beside(0, -1)) & (size >= beside(0, 1))
    upright = (size > beside(-1, 0)) & (size >= beside(1, 0))
    falling = (size > beside(-1, -1)) & (size > beside(1, 1))
    rising = (size > beside(-1, 1)) & (size > beside(1, -1))
    slanted = np.where((across ^ down) < 0, rising, falling)
    return np.where(flat, level, np.where(steep, upright, slanted))


def hysteresis(weak: np.ndarray, strong: np.ndarray) -> np.ndarray:
    """[H, W] bool: the pixels of ``weak`` that are connected to ``strong`` through ``weak``."""
    height, width = weak.shape
    open_ = np.pad(weak & ~strong, 1).ravel()
    found = np.pad(strong, 1).ravel()
    stride = width + 2
    steps = np.array([-stride - 1, -stride, -stride + 1, -1, 1, stride - 1, stride, stride + 1])
    front = np.flatnonzero(found)
    while front.size:
        near = (front[:, None] + steps).ravel()
        front = np.unique(near[open_[near]])
        open_[front] = False
        found[front] = True
    return found.reshape(height + 2, width + 2)[1:-1, 1:-1]
