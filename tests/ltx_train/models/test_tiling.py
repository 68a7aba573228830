"""Tiles: where they lie, that their weights sum to 1, and that local work joins to what it is untiled."""

from itertools import product

import pytest
import torch
import torch.nn.functional as F

from ltx_train.errors import ConfigError
from ltx_train.geometry import VideoFactors
from ltx_train.models.tiling import (
    Span,
    Tiling,
    causal_encode_spans,
    cuts,
    over_space,
    over_time,
    spatial_spans,
    temporal_decode_spans,
    tile_cells,
)


@pytest.mark.parametrize(
    "length, size, overlap, minimum",
    [(n, s, o, m) for n, s, o, m in product((1, 7, 8, 9, 23, 40), (0, 2, 8, 11), (0, 1, 4), (1, 5)) if 2 * o <= s],
)
def test_cuts_cover_everything_with_at_most_two_tiles_a_cell(length: int, size: int, overlap: int, minimum: int) -> None:
    tiles = cuts(length, size, overlap, minimum)
    count = torch.zeros(length, dtype=torch.int)
    for start, stop in tiles:
        assert 0 <= start < stop <= length
        count[start:stop] += 1
    assert count.min() == 1 and count.max() <= 2
    for (_, stop), (following, _) in zip(tiles, tiles[1:]):
        assert stop - following == overlap
    assert len(tiles) == 1 or min(stop - start for start, stop in tiles) >= minimum


@pytest.mark.parametrize("scale", [1, 8, 32])
def test_weights_sum_to_one(scale: int) -> None:
    for spans, length in (
        (spatial_spans(23, 8, 3, scale), 23 * scale),
        (temporal_decode_spans(23, 8, 3, scale), 22 * scale + 1),
        (temporal_decode_spans(23, 8, 3, scale, first_alone=False), 22 * scale + 1),
    ):
        total = torch.zeros(length)
        for span in spans:
            total[span.out : span.out + len(span.weight)] += span.weight
        assert torch.allclose(total, torch.ones(length), atol=1e-6)


def test_outer_quarter_of_an_overlap_counts_nothing() -> None:
    first, second = spatial_spans(12, 8, 4, 4)
    assert (first.weight[-4:] == 0).all() and (first.weight[-5] > 0)
    assert (second.weight[:4] == 0).all() and (second.weight[4] > 0)


def local_decode(latents: torch.Tensor, first_alone: bool) -> torch.Tensor:
    """A decoder that looks at one cell at a time: 8 frames a latent frame, 1 of the first, 4 pixels a side."""
    pixels = F.interpolate(latents, scale_factor=(8, 4, 4), mode="nearest")
    return pixels[:, :, 7:] if first_alone else pixels


@pytest.mark.parametrize("tiles", [(0, 0, 4, 2), (4, 2, 0, 0), (5, 1, 6, 1), (6, 3, 8, 4)])
def test_local_decode_joins_exactly(tiles) -> None:
    space, overlap, time, late = tiles
    latents = torch.randn(2, 3, 11, 9, 7, generator=torch.Generator().manual_seed(0))
    whole = local_decode(latents, True)
    rows, columns = spatial_spans(9, space, overlap, 4), spatial_spans(7, space, overlap, 4)
    for first_alone in (True, False):

        def run(t: Span, r: Span, c: Span, first_alone: bool = first_alone) -> torch.Tensor:
            return local_decode(latents[:, :, t.start : t.stop, r.start : r.stop, c.start : c.stop], first_alone or t.start == 0)

        times = temporal_decode_spans(11, time, late, 8, first_alone=first_alone)
        chunks = list(over_time(times, lambda t: over_space(rows, columns, lambda r, c: run(t, r, c))))
        assert len(chunks) == len(times)
        assert torch.allclose(torch.cat(chunks, dim=2), whole, atol=1e-6)


def test_causal_encode_drops_what_a_tile_could_not_see() -> None:
    """A causal encoder with one latent frame of memory is joined exactly with an overlap of two."""
    spans = causal_encode_spans(17, 6, 2)
    line = torch.arange(17.0)
    memory = line + F.pad(line, (1, 0))[:-1] * 100

    def run(span: Span) -> torch.Tensor:
        part = line[span.start : span.stop]
        return (part + F.pad(part, (1, 0))[:-1] * 100).view(1, 1, -1, 1, 1)

    assert torch.equal(torch.cat(list(over_time(spans, run)), dim=2).flatten(), memory)
    assert spans[0].skip == 0 and all(s.skip == 2 for s in spans[1:])


def test_tile_cells_round_to_whole_cells() -> None:
    factors = VideoFactors()
    assert tile_cells(Tiling(512, 128, 64, 24), factors) == (16, 4, 8, 3)
    assert tile_cells(Tiling(40, 20, 8, 4), factors) == (2, 1, 2, 1)
    assert tile_cells(Tiling(0, 0, 0, 0), factors) == tile_cells(None, factors) == (0, 0, 0, 0)


@pytest.mark.parametrize("sizes", [(512, 300, 64, 24), (512, 128, 32, 24), (-32, 0, 64, 24)])
def test_overlaps_beyond_half_a_tile_are_refused(sizes) -> None:
    with pytest.raises(ConfigError):
        Tiling(*sizes)


def test_chooser_fits_the_memory_and_takes_the_most() -> None:
    per_pixel = 200.0
    assert Tiling.for_memory(10**12, 1920, 1088, 121, per_pixel) is None
    before = None
    for gib in (24, 8, 4, 2, 1):
        tiling = Tiling.for_memory(gib << 30, 1920, 1088, 121, per_pixel)
        area = 1920 * 1088 if not tiling.size else min(tiling.size, 1920) * min(tiling.size, 1088)
        work = area * min(tiling.frames, 121) * per_pixel
        assert work <= gib << 30
        assert before is None or work <= before
        before = work
    assert Tiling.for_memory(1 << 20, 1920, 1088, 121, per_pixel) == Tiling(256, 64, 32, 16)
