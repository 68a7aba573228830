"""Tiled VAE work: how big a tile is, where tiles lie in space and time, and how they are joined."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from ..errors import ConfigError
from ..geometry import VideoFactors

_EDGE = 2  # frames of padding that causal convolutions add; a still costs as much as three frames


@dataclass(frozen=True)
class Tiling:
    """Size and overlap of tiles: ``size`` and ``overlap`` in pixels of both sides, ``frames`` and ``frame_overlap`` in frames.

    0 for ``size`` or ``frames`` leaves that axis whole. Sizes are rounded down to whole latent cells.
    """

    size: int = 512
    overlap: int = 128
    frames: int = 64
    frame_overlap: int = 24

    def __post_init__(self) -> None:
        for size, overlap, what in ((self.size, self.overlap, "pixels"), (self.frames, self.frame_overlap, "frames")):
            if size < 0 or overlap < 0 or (size and 2 * overlap > size):
                raise ConfigError(
                    "codec.tiling",
                    f"Tiles of {size} {what} with an overlap of {overlap} cannot be joined.",
                    "The overlap is at least 0 and at most half of the tile; a size of 0 turns tiling off.",
                )

    @classmethod
    def for_memory(cls, free: int, width: int, height: int, frames: int, bytes_per_pixel: float) -> Tiling | None:
        """The largest tiles whose work fits into ``free`` bytes; None when width x height x frames fits whole.

        bytes_per_pixel: peak bytes of work for one pixel of one frame (see VideoCodec.bytes_per_pixel).
        Space stays whole as long as it can, since a seam in time is the less visible one.
        """
        pixels = free / bytes_per_pixel
        frames += _EDGE
        if width * height * frames <= pixels:
            return None
        for size in (0, 1536, 1024, 768, 512, 384, 256):
            for length in (128, 96, 64, 48):
                area = width * height if not size else min(size, width) * min(size, height)
                if area * min(length + _EDGE, frames) <= pixels:
                    return cls(size, min(128, size // 4), length, 24 if length >= 64 else 16)
        return cls(256, 64, 32, 16)


@dataclass(frozen=True)
class Span:
    """One tile along one axis: input cells [start, stop), outputs [out, out + len(weight)), and how much they count.

    skip: leading outputs of the tile that are dropped before the weight applies.
    """

    start: int
    stop: int
    out: int
    weight: Tensor
    skip: int = 0


def cuts(length: int, size: int, overlap: int, minimum: int = 1) -> list[tuple[int, int]]:
    """[start, stop) tiles of at most ``size`` over ``length`` cells, neighbours sharing ``overlap``; size 0 = one tile.

    Tiles are made about equal; no cell lies in more than two; a last one under ``minimum`` joins the one before it.
    """
    if not size or length <= max(size, minimum):
        return [(0, length)]
    size = max(size, minimum)
    assert 2 * overlap <= size, (size, overlap)
    count = -(-(length - overlap) // (size - overlap))
    size = max(2 * overlap, minimum, -(-(length - overlap) // count) + overlap)
    starts = range(0, length - overlap, size - overlap)
    tiles = [(start, min(start + size, length)) for start in starts]
    if len(tiles) > 1 and tiles[-1][1] - tiles[-1][0] < minimum:
        tiles[-2:] = [(tiles[-2][0], length)]
    return tiles


def spatial_spans(length: int, size: int, overlap: int, scale: int, minimum: int = 1) -> list[Span]:
    """Spans of a spatial axis: input in cells, output in cells * ``scale``; weights of neighbours sum to 1."""
    tiles = cuts(length, size, overlap, minimum)
    edges = [(start * scale, stop * scale) for start, stop in tiles]
    return [Span(s, e, out[0], weight) for (s, e), out, weight in zip(tiles, edges, _weights(edges))]


def causal_encode_spans(length: int, size: int, overlap: int) -> list[Span]:
    """Spans of a temporal encode over ``length`` latent frames: later tiles give only what earlier ones lack.

    The encoder looks back, never ahead: the end of a tile is right, its beginning (which reads its first frame as
    a still) is not. So nothing is blended, and the overlap is what a tile gets to look back on.
    """
    spans, done = [], 0
    for start, stop in cuts(length, size, max(1, overlap)):
        spans.append(Span(start, stop, done, torch.ones(stop - done), skip=done - start))
        done = stop
    return spans


def temporal_decode_spans(length: int, size: int, overlap: int, scale: int, minimum: int = 1, *, first_alone: bool = True) -> list[Span]:
    """Spans of a temporal decode over ``length`` latent frames; latent frame 0 makes 1 frame, others ``scale``.

    first_alone: a tile that begins later still makes 1 frame of its first latent frame, the last of that cell's
    (the conv decoders); else such a tile makes all ``scale`` (the 2.5 decoder's last stages).
    """
    tiles = cuts(length, size, max(1, overlap), minimum)
    first = lambda start: 0 if start == 0 else start * scale - (0 if first_alone else scale - 1)  # noqa: E731
    edges = [(first(start), (stop - 1) * scale + 1) for start, stop in tiles]
    return [Span(s, e, out[0], weight) for (s, e), out, weight in zip(tiles, edges, _weights(edges))]


def _weights(edges: list[tuple[int, int]]) -> list[Tensor]:
    """Weights of output intervals: ramps over the middle half of each overlap, 0 on the outer quarter of either tile.

    A tile is wrong near its border (it saw padding there instead of its neighbour), so that part counts nothing.
    """
    weights = [torch.ones(stop - start) for start, stop in edges]
    for i, ((start, stop), (following, _)) in enumerate(pairwise(edges)):
        shared = stop - following
        if shared <= 0:
            continue
        dead = shared // 4
        ramp = torch.zeros(shared)
        inner = shared - 2 * dead
        ramp[dead : dead + inner] = (torch.arange(inner) + 0.5) / inner
        ramp[dead + inner :] = 1
        weights[i][following - start :] *= 1 - ramp
        weights[i + 1][:shared] *= ramp
    return weights


def weigh(tile: Tensor, axis: int, span: Span) -> Tensor:
    """The tile's outputs of ``span`` along ``axis``, times their weight."""
    tile = tile.narrow(axis, span.skip, len(span.weight))
    if bool((span.weight == 1).all()):
        return tile
    shape = [1] * tile.ndim
    shape[axis] = -1
    return tile * span.weight.to(tile).view(shape)


def over_space(rows: list[Span], columns: list[Span], run: Callable[[Span, Span], Tensor]) -> Tensor:
    """Join ``run(row span, column span)`` [B, C, F, h, w] float32 into one [B, C, F, H, W]."""
    if len(rows) == len(columns) == 1:
        return run(rows[0], columns[0])
    canvas = None
    height, width = rows[-1].out + len(rows[-1].weight), columns[-1].out + len(columns[-1].weight)
    for row in rows:
        for column in columns:
            tile = weigh(weigh(run(row, column), 3, row), 4, column)
            if canvas is None:
                canvas = tile.new_zeros(*tile.shape[:3], height, width)
            canvas[..., row.out : row.out + tile.shape[3], column.out : column.out + tile.shape[4]] += tile
    assert canvas is not None
    return canvas


def over_time(spans: list[Span], run: Callable[[Span], Tensor]) -> Iterator[Tensor]:
    """Yield finished stretches [B, C, f, H, W] in order, so that a long clip never lies in memory as floats."""
    tail: Tensor | None = None
    for i, span in enumerate(spans):
        tile = weigh(run(span), 2, span)
        if tail is not None:
            tile[:, :, : tail.shape[2]] += tail
        last = i + 1 == len(spans)
        done = tile.shape[2] if last else spans[i + 1].out - span.out
        tail = None if last or done >= tile.shape[2] else tile[:, :, done:].clone()
        yield tile[:, :, :done]


def cells(pixels: int, factor: int) -> int:
    """Whole latent cells of a size in pixels; 0 stays 0 (whole), anything else is at least 2."""
    return 0 if not pixels else max(2, pixels // factor)


def tile_cells(tiling: Tiling | None, factors: VideoFactors) -> tuple[int, int, int, int]:
    """(space, space overlap, time, time overlap) of a tiling in latent cells; all 0 for None."""
    if tiling is None:
        return 0, 0, 0, 0
    space, time = cells(tiling.size, factors.height), cells(tiling.frames, factors.time)
    overlap, late = -(-tiling.overlap // factors.height), -(-tiling.frame_overlap // factors.time)
    return space, min(overlap, space // 2), time, min(late, time // 2)
