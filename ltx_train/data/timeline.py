"""Frames in time: rates as fractions, and the timeline that a list of frame starts makes."""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction

STILL_RATE = Fraction(24)
STANDARD_RATES = tuple(Fraction(n, d) for n, d in ((24000, 1001), (24, 1), (25, 1), (30000, 1001), (30, 1), (48, 1), (50, 1), (60000, 1001), (60, 1), (120, 1)))


@dataclass(frozen=True)
class Timeline:
    """Frames in time. start: seconds of the first frame; rate: frames a second at which they are read.

    constant: every frame sits on its slot, so slot k is frame k. ordered: timestamps can be trusted.
    """

    start: float
    rate: Fraction
    frames: int
    seconds: float
    constant: bool = True
    ordered: bool = True

    def slots(self, rate: Fraction) -> int:
        """Frames available when read at another rate."""
        return self.frames if rate == self.rate else max(1, math.floor(self.seconds * float(rate) + 0.01))


def exact_rate(fps: float) -> Fraction:
    """The fraction a decimal rate stands for: 29.97 -> 30000/1001."""
    for rate in STANDARD_RATES:
        if abs(float(rate) - fps) < 2e-3:
            return rate
    return Fraction(fps).limit_denominator(100000)


def packet_timeline(pictures: list[float | None], last: float, header_rate: Fraction | None) -> Timeline:
    """Packets come in decoding order: a jump back of more than a second, or a missing time, means a broken clock."""
    known = [t for t in pictures if t is not None]
    broken = len(known) < len(pictures) or any(later < earlier - 1.0 for earlier, later in zip(known, known[1:])) or len(set(known)) < len(known)
    if broken:
        rate = Fraction(header_rate or 25)
        return Timeline(known[0] if known else 0.0, rate, len(pictures), len(pictures) / float(rate), True, False)
    ordered = sorted(known)
    step = last or (float(1 / header_rate) if header_rate else 0.04)
    return timeline_of([*ordered, ordered[-1] + step], header_rate)


def timeline_of(times: list[float], header_rate: Fraction | None) -> Timeline:
    """The timeline of frame starts in order, followed by the end of the last frame."""
    frames = max(1, len(times) - 1)
    seconds = max(times[-1] - times[0], 1e-6)
    mean = frames / seconds
    for rate in filter(None, (header_rate, exact_rate(mean), _rounded(mean))):
        slack = max(0.0015, 0.3 / float(rate))
        if all(abs(t - times[0] - n / float(rate)) <= slack for n, t in enumerate(times[:-1])):
            return Timeline(times[0], Fraction(rate), frames, frames / float(rate), True)
    near = min(STANDARD_RATES, key=lambda r: abs(float(r) - mean))
    rate = near if abs(float(near) - mean) < 0.02 * mean else _rounded(mean)
    if header_rate and 0.9 * header_rate <= mean <= header_rate and all(abs(n - round(n)) < 0.3 for n in ((t - times[0]) * float(header_rate) for t in times)):
        rate = Fraction(header_rate)  # a steady clock with some frames dropped
    return Timeline(times[0], rate, max(1, math.floor(seconds * float(rate) + 0.01)), seconds, False)


def _rounded(mean: float) -> Fraction:
    return Fraction(round(mean * 100), 100) if mean >= 0.01 else Fraction(1, 100)
