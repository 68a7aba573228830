"""Drawn clips: a coloured shape that moves over a dark ground, and a tone. Words, pictures, sounds and captions."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields

import torch
from torch import Tensor

COLOURS = {"red": (0.90, 0.12, 0.12), "green": (0.12, 0.78, 0.22), "blue": (0.15, 0.30, 0.95), "white": (0.92, 0.92, 0.92), "yellow": (0.95, 0.85, 0.08)}
SHAPES = ("circle", "square", "triangle", "star")
DIRECTIONS = {"right": (1.0, 0.0), "left": (-1.0, 0.0), "down": (0.0, 1.0), "up": (0.0, -1.0)}
TONES = {"low": 300, "middle": 600, "high": 1200}
"""Hz. Multiples of 100: a vocoder that reads 100 mel frames a second can then give the wave itself, not only its pitch."""

KNOWN = (("red", "green", "blue", "white"), ("circle", "square", "triangle"), tuple(DIRECTIONS), ("low", "middle"))
"""What the fitted base has been shown: colours, shapes, directions, tones."""
NEW = (("yellow",), ("star",), tuple(DIRECTIONS), ("high",))
"""What only the fitted codecs have been shown, so that a LoRA can teach it."""

FPS = 24
RATE = 16000
LOUDNESS = 0.4


def caption(colour: str, shape: str, direction: str, tone: str) -> str:
    """``a red circle moves right, a low tone``."""
    return f"a {colour} {shape} moves {direction}, a {tone} tone"


def captions(words: Sequence[Sequence[str]]) -> list[str]:
    """Captions of every combination, the last word fastest."""
    colours, shapes, directions, tones = words
    return [caption(c, s, d, t) for c in colours for s in shapes for d in directions for t in tones]


@dataclass(frozen=True)
class Scenes:
    """A batch of scenes. colour, shape, direction, tone: [B] int64 places in the tables above.

    radius, speed (pixels a frame), ground (grey 0..1), onset (seconds): [B]. along, across: [B] in 0..1, where between
    the edges the shape starts on its way, and where it stays across it. hiss: [B] loudness of a faint noise.
    """

    colour: Tensor
    shape: Tensor
    direction: Tensor
    tone: Tensor
    radius: Tensor
    speed: Tensor
    ground: Tensor
    along: Tensor
    across: Tensor
    onset: Tensor
    hiss: Tensor

    @classmethod
    def random(cls, count: int, generator: torch.Generator, words: Sequence[Sequence[str]]) -> Scenes:
        """Scenes of random words from ``words``; everything a caption does not say is random too."""
        device = generator.device
        tables = (list(COLOURS), list(SHAPES), list(DIRECTIONS), list(TONES))
        places = [torch.tensor([table.index(w) for w in chosen], device=device) for table, chosen in zip(tables, words)]
        pick = lambda p: p[torch.randint(len(p), (count,), generator=generator, device=device)]  # noqa: E731
        spread = lambda low, high: low + (high - low) * torch.rand(count, generator=generator, device=device)  # noqa: E731
        quiet = torch.rand(count, generator=generator, device=device) < 0.5
        return cls(
            *(pick(p) for p in places), radius=spread(9.0, 12.5), speed=spread(1.25, 1.75), ground=spread(0.03, 0.09), along=spread(0.0, 1.0),
            across=spread(0.0, 1.0), onset=spread(0.0, 0.25), hiss=torch.where(quiet, 0.0, 1e-4) * spread(0.2, 1.0),
        )  # fmt: skip

    def __len__(self) -> int:
        return len(self.colour)

    def __getitem__(self, rows: slice) -> Scenes:
        return Scenes(*(getattr(self, f.name)[rows] for f in fields(self)))

    def caption(self, row: int) -> str:
        tables = (list(COLOURS), list(SHAPES), list(DIRECTIONS), list(TONES))
        return caption(*(table[int(getattr(self, name)[row])] for table, name in zip(tables, ("colour", "shape", "direction", "tone"))))


def draw(scenes: Scenes, frames: int, height: int, width: int) -> Tensor:
    """[B, F, H, W, 3] float in 0..1, edges smoothed over one pixel."""
    device = scenes.radius.device
    x, y = _centres(scenes, frames, height, width)
    column = torch.arange(width, device=device) + 0.5
    row = torch.arange(height, device=device) + 0.5
    dx = column.view(1, 1, 1, -1) - x[:, :, None, None]
    dy = row.view(1, 1, -1, 1) - y[:, :, None, None]
    inside = (0.5 - _distance(dx, dy, scenes.radius.view(-1, 1, 1, 1), scenes.shape.view(-1, 1, 1, 1))).clamp(0, 1)[..., None]
    colour = torch.tensor(list(COLOURS.values()), device=device)[scenes.colour].view(-1, 1, 1, 1, 3)
    return inside * colour + (1 - inside) * scenes.ground.view(-1, 1, 1, 1, 1)


def _centres(scenes: Scenes, frames: int, height: int, width: int) -> tuple[Tensor, Tensor]:
    """Pixel positions [B, F] of the shape's centre: a straight way that stays between the edges."""
    way = torch.tensor(list(DIRECTIONS.values()), device=scenes.radius.device)[scenes.direction]
    travel = scenes.speed[:, None] * torch.arange(frames, device=way.device)
    place = []
    for axis, size in ((0, width), (1, height)):
        margin = scenes.radius + 1
        step = way[:, axis]
        room = (size - 2 * margin - travel[:, -1] * step.abs()).clamp(min=0)
        free = margin + room * torch.where(step == 0, scenes.across, scenes.along)
        start = torch.where(step < 0, size - free, free)
        place.append(start[:, None] + step[:, None] * travel)
    return place[0], place[1]


def _distance(x: Tensor, y: Tensor, radius: Tensor, shape: Tensor) -> Tensor:
    """About how many pixels a point is outside the shape (negative inside)."""
    length = (x * x + y * y + 1e-6).sqrt()
    circle = length - radius
    square = torch.maximum(x.abs(), y.abs()) - 0.88 * radius
    side = math.sqrt(3) / 2
    triangle = torch.maximum(torch.maximum(side * x - 0.5 * y, -side * x - 0.5 * y), y) - 0.6 * radius
    angle = torch.atan2(x, -y)  # 0 points up
    fold = (torch.remainder(angle * (5 / (2 * math.pi)) + 0.5, 1.0) - 0.5).abs() * 2  # 0 on a tip, 1 between two
    star = (length - radius * (1.5 - 0.85 * fold)) * 0.75
    return torch.where(shape == 0, circle, torch.where(shape == 1, square, torch.where(shape == 2, triangle, star)))


def sound(scenes: Scenes, seconds: float, *, rate: int = RATE, generator: torch.Generator | None = None) -> Tensor:
    """[B, 2, N] float: a sine that sets in at the onset within 10 ms, its phase counted from the clip's start."""
    device = scenes.onset.device
    time = torch.arange(round(seconds * rate), device=device, dtype=torch.float64) / rate
    pitch = torch.tensor(list(TONES.values()), device=device, dtype=torch.float64)[scenes.tone]
    wave = torch.sin(2 * math.pi * torch.remainder(pitch[:, None] * time, 1.0)).float()
    loud = ((time.float() - scenes.onset[:, None]) / 0.010).clamp(0, 1)
    stereo = (LOUDNESS * loud * wave)[:, None].expand(-1, 2, -1)
    if generator is None:
        return stereo.contiguous()
    return stereo + scenes.hiss[:, None, None] * torch.randn(stereo.shape, generator=generator, device=device)
