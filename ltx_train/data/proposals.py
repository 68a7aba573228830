"""Automatic buckets: the shapes and lengths of a dataset's clips under a token budget."""

from __future__ import annotations

import math
from collections.abc import Sequence

from ..geometry import VideoFactors
from .buckets import Bucket
from .probe import Probe


def propose(probes: Sequence[Probe], factors: VideoFactors, token_budget: int, *, most: int = 4, max_frames: int = 121) -> tuple[Bucket, ...]:
    """Buckets for a dataset under ``token_budget`` tokens a clip: up to ``most`` shapes, as long as most clips allow.

    Frames: the longest 8n+1 that nine of ten clips have (at least two latent frames), or less when the budget
    leaves under 16x9 cells a frame (or under what the smallest clip has).
    """
    videos = [p for p in probes if p.kind == "video"]
    stills = [p for p in probes if p.kind == "image"]
    found: list[Bucket] = []
    if videos:
        lengths = sorted(p.frames for p in videos)
        usual = lengths[len(lengths) // 10]
        frames = min(max_frames, (usual - 1) // factors.time * factors.time + 1)
        least = min(144, *(p.width * p.height // (factors.width * factors.height) for p in videos), token_budget)
        while frames > factors.time + 1 and token_budget // ((frames - 1) // factors.time + 1) < least:
            frames -= factors.time
        found += _shapes(videos, factors, token_budget, max(1, frames), most)
    if stills:
        found += _shapes(stills, factors, token_budget, 1, most)
    return tuple(dict.fromkeys(found))


def _shapes(probes: Sequence[Probe], factors: VideoFactors, budget: int, frames: int, most: int) -> list[Bucket]:
    counts: dict[tuple[int, int], int] = {}
    largest: dict[tuple[int, int], tuple[int, int]] = {}
    for item in probes:
        # shapes in steps of 1/8 octave count as one
        shape = (round(8 * math.log2(item.width / item.height)), 0)
        counts[shape] = counts.get(shape, 0) + 1
        if item.width * item.height > math.prod(largest.get(shape, (0, 0))):
            largest[shape] = (item.width, item.height)
    cells = max(1, budget // ((frames - 1) // factors.time + 1))
    made = []
    for shape in sorted(counts, key=lambda s: (-counts[s], s))[:most]:
        width, height = largest[shape]
        scale = min(1.0, math.sqrt(cells * factors.width * factors.height / (width * height)))
        columns, rows = max(1, round(width * scale / factors.width)), max(1, round(height * scale / factors.height))
        while columns * rows > cells and max(columns, rows) > 1:
            columns, rows = (columns - 1, rows) if columns >= rows else (columns, rows - 1)
        made.append(Bucket(columns * factors.width, rows * factors.height, frames))
    return made
