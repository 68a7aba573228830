"""Blocked neighbourhood attention against the definition: one masked attention over all cells."""

import pytest
import torch
import torch.nn.functional as F

from ltx_train.models.diffusion_decoder import pad_to_floor
from ltx_train.models.neighborhood import neighborhood_attention


def by_definition(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, kernel) -> torch.Tensor:
    batch, *grid, heads, dim = query.shape
    axes = []
    for length, size in zip(grid, kernel):
        size = min(size, length)
        start = (torch.arange(length) - size // 2).clamp(0, length - size)[:, None]
        axes.append((torch.arange(length) >= start) & (torch.arange(length) < start + size))
    t, h, w = axes
    mask = t[:, None, None, :, None, None] & h[None, :, None, None, :, None] & w[None, None, :, None, None, :]
    mask = mask.reshape(grid[0] * grid[1] * grid[2], -1)
    flat = [x.flatten(1, 3).transpose(1, 2) for x in (query, key, value)]
    return F.scaled_dot_product_attention(*flat, attn_mask=mask, scale=1.0).transpose(1, 2).view_as(query)


@pytest.mark.parametrize(
    "shape, kernel",
    [
        ((2, 5, 9, 13, 2, 8), (3, 5, 7)),
        ((1, 3, 20, 17, 1, 8), (3, 3, 3)),
        ((1, 17, 4, 4, 2, 8), (11, 3, 4)),
        ((1, 9, 12, 12, 2, 8), (11, 11, 11)),
        ((1, 1, 2, 3, 1, 8), (3, 7, 7)),
    ],
)
def test_equal_to_the_definition(shape, kernel) -> None:
    generator = torch.Generator().manual_seed(1)
    query, key, value = (torch.randn(shape, generator=generator) for _ in range(3))
    ours = neighborhood_attention(query, key, value, kernel)
    assert torch.allclose(ours, by_definition(query, key, value, kernel), atol=2e-6)
    assert torch.allclose(neighborhood_attention(query, key, value, kernel, block=(2, 3, 5)), ours, atol=2e-6)


def test_padding_to_the_floor_repeats_the_last_frame_and_mirrors_space() -> None:
    latents = torch.arange(2 * 2 * 3.0).view(1, 1, 2, 2, 3)
    padded, top, left = pad_to_floor(latents, (3, 7, 4))
    assert padded.shape == (1, 1, 3, 7, 4) and (top, left) == (2, 0)
    assert torch.equal(padded[:, :, :2, 2:4, :3], latents) and torch.equal(padded[:, :, 2], padded[:, :, 1])
    assert padded[0, 0, 0, :, 0].tolist() == [3, 0, 0, 3, 3, 0, 0]
    same, top, left = pad_to_floor(latents, (1, 1, 1))
    assert torch.equal(same, latents) and (top, left) == (0, 0)
