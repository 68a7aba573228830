"""A loss curve as a picture, drawn with Pillow."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

_SIZE = (960, 480)
_BOX = (70, 40, 940, 430)  # left, top, right, bottom of the plot
_INK, _LINE, _FAINT, _PALE = (40, 40, 48), (28, 92, 200), (176, 200, 240), (226, 226, 232)


def draw_curve(path: Path, losses: Mapping[int, float], *, title: str) -> Path:
    """Write a PNG of loss by step: every step pale, a running mean strong. losses: step -> finite loss, at least one."""
    from PIL import Image, ImageDraw

    image = Image.new("RGB", _SIZE, (255, 255, 255))
    pen = ImageDraw.Draw(image)
    steps = sorted(losses)
    values = [losses[s] for s in steps]
    ticks = _ticks(min(values), max(values))
    place = _scale(steps[0], max(steps[-1], steps[0] + 1), ticks[0], ticks[-1])
    for tick in ticks:
        y = place(steps[0], tick)[1]
        pen.line((_BOX[0], y, _BOX[2], y), fill=_PALE)
        pen.text((_BOX[0] - 8, y), f"{tick:.3g}", fill=_INK, anchor="rm")
    for step in sorted({round(steps[0] + (steps[-1] - steps[0]) * i / 5) for i in range(6)}):
        pen.text((place(step, ticks[0])[0], _BOX[3] + 8), str(step), fill=_INK, anchor="mt")
    pen.text((_BOX[0], 14), title, fill=_INK)
    pen.text((_BOX[2], _BOX[3] + 26), "step", fill=_INK, anchor="rt")
    _curve(pen, [place(s, v) for s, v in zip(steps, values)], _FAINT, 1)
    _curve(pen, [place(s, v) for s, v in zip(steps, running_mean(values))], _LINE, 3)
    pen.rectangle(_BOX, outline=_INK)
    image.save(path)
    return path


def running_mean(values: Sequence[float]) -> list[float]:
    """Means over a window of a tenth of all values, centred, shorter at the ends."""
    half = max(1, len(values) // 20)
    return [sum(part) / len(part) for i in range(len(values)) if (part := values[max(0, i - half) : i + half + 1])]


def _curve(pen, points: list[tuple[float, float]], colour: tuple[int, int, int], width: int) -> None:
    if len(points) > 1:
        pen.line(points, fill=colour, width=width, joint="curve")
    else:
        x, y = points[0]
        pen.ellipse((x - 3, y - 3, x + 3, y + 3), fill=colour)


def _scale(left: float, right: float, low: float, high: float):
    def place(step: float, value: float) -> tuple[float, float]:
        x = _BOX[0] + (step - left) / (right - left) * (_BOX[2] - _BOX[0])
        return x, _BOX[3] - (value - low) / (high - low) * (_BOX[3] - _BOX[1])

    return place


def _ticks(low: float, high: float) -> list[float]:
    """Four to eight round numbers around a range."""
    span = max(high - low, 1e-3 * max(abs(high), 1e-6))
    unit = 10 ** math.floor(math.log10(span / 4))
    step = next(unit * k for k in (1, 2, 2.5, 5, 10) if span / (unit * k) <= 6)
    first, last = math.floor(low / step), math.ceil(high / step)
    return [step * i for i in range(first, max(last, first + 1) + 1)]
