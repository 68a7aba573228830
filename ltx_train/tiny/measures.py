"""What a drawn or generated clip shows: its shape's colour, form and way, and its tone's pitch. Works on pixels and samples alone."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .drawing import COLOURS, DIRECTIONS, SHAPES, TONES, _distance

_BRIGHT = 0.28  # grounds lie below 0.1, every colour has a channel above 0.75


@dataclass(frozen=True)
class Seen:
    """What a picture shows. colour, shape, direction: the nearest known words, None where no shape is seen.

    shares: colour -> share of the shape's pixels nearest to it. way: (x, y) pixels travelled. area: pixels a frame.
    """

    colour: str | None
    shape: str | None
    direction: str | None
    shares: dict[str, float]
    way: tuple[float, float]
    area: float


def look(frames: Tensor) -> Seen:
    """Describe frames [F, H, W, 3] uint8."""
    pixels = frames.float() / 255
    mask = pixels.amax(-1) > _BRIGHT
    area = mask.float().sum() / len(mask)
    if area < 8:
        return Seen(None, None, None, dict.fromkeys(COLOURS, 0.0), (0.0, 0.0), float(area))
    palette = torch.tensor(list(COLOURS.values()))
    hue = lambda colours: colours / colours.amax(-1, keepdim=True)  # noqa: E731 - edges are darker, their hue stays
    nearest = torch.cdist(hue(pixels[mask]), hue(palette)).argmin(-1)
    shares = {name: float((nearest == i).float().mean()) for i, name in enumerate(COLOURS)}
    centres = [_centre(m) for m in mask if m.sum() >= 8]
    way = (centres[-1][0] - centres[0][0], centres[-1][1] - centres[0][1])
    direction = max(DIRECTIONS, key=lambda d: DIRECTIONS[d][0] * way[0] + DIRECTIONS[d][1] * way[1]) if max(map(abs, way)) > 3 else None
    return Seen(max(shares, key=shares.__getitem__), _form(mask), direction, shares, way, float(area))


def _centre(mask: Tensor) -> tuple[float, float]:
    rows, columns = torch.nonzero(mask, as_tuple=True)
    return float(columns.float().mean()) + 0.5, float(rows.float().mean()) + 0.5


def _form(mask: Tensor) -> str:
    """The known shape that covers the masks [F, H, W] best, by intersection over union at its best place and size."""
    score = dict.fromkeys(SHAPES, 0.0)
    for one in mask[:: max(1, len(mask) // 5)]:
        if one.sum() < 8:
            continue
        x, y = _centre(one)
        row, column = torch.arange(one.shape[0]) + 0.5, torch.arange(one.shape[1]) + 0.5
        radii = torch.linspace(5, 16, 23).view(-1, 1, 1)
        for number, name in enumerate(SHAPES):
            drawn = _distance(column.view(1, 1, -1) - x, row.view(1, -1, 1) - y, radii, torch.tensor(number)) < 0
            both, either = (drawn & one).sum((-1, -2)), (drawn | one).sum((-1, -2))
            score[name] += float((both / either).max())
    return max(score, key=score.__getitem__)


def pitch(waveform: Tensor, rate: int) -> float | None:
    """The strongest frequency in Hz of a sound [C, N]; None when it is all but silent."""
    mono = waveform.float().mean(0)
    loud = mono.abs() > 0.25 * mono.abs().max()
    if mono.abs().max() < 0.02:
        return None
    first, last = int(loud.nonzero()[0]), int(loud.nonzero()[-1]) + 1
    part = mono[first:last] * torch.hann_window(last - first)
    size = 1 << 17
    spectrum = torch.fft.rfft(part, n=max(size, len(part))).abs()
    return float(spectrum.argmax()) * rate / max(size, len(part))


def tone(hertz: float | None) -> str | None:
    """The known tone within a tenth of a pitch, or None."""
    near = [name for name, known in TONES.items() if hertz is not None and abs(hertz / known - 1) < 0.1]
    return near[0] if near else None


def psnr(one: Tensor, other: Tensor) -> float:
    """Peak signal to noise ratio in dB of two uint8 pictures of one shape."""
    error = (one.float() - other.float()).square().mean() / 255**2
    return float(-10 * torch.log10(error.clamp(min=1e-10)))


def snr(reference: Tensor, other: Tensor) -> float:
    """Signal to noise ratio in dB, over all samples."""
    return float(10 * torch.log10(reference.square().sum() / (reference - other).square().sum().clamp(min=1e-20)))
