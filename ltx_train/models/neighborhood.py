"""Exact 3D neighbourhood attention in blocks of plain SDPA: no compiler, no kernel package, no N x N scores."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

Triple = tuple[int, int, int]

_BLOCK: Triple = (4, 8, 8)  # queries of one block along (frame, row, column)


class _Axis:
    """Blocks of queries along one axis, and the keys each block can see.

    A query at q sees ``kernel`` keys from clamp(q - kernel // 2, 0, length - kernel) on: the window moves inward at
    the ends instead of shrinking (the definition of NATTEN's na3d).
    """

    def __init__(self, length: int, kernel: int, block: int, device: torch.device) -> None:
        kernel, self.block = min(kernel, length), min(block, length)
        self.reach = min(length, self.block + kernel - 1)  # keys of a block
        count = -(-length // self.block)
        self.queries = [min(i * self.block, length - self.block) for i in range(count)]  # the last one moves back
        self.keys = [min(max(q - kernel // 2, 0), length - self.reach) for q in self.queries]
        places = torch.tensor(self.queries, device=device)[:, None] + torch.arange(self.block, device=device)
        window = (places - kernel // 2).clamp(0, length - kernel)[:, :, None]
        seen = torch.tensor(self.keys, device=device)[:, None, None] + torch.arange(self.reach, device=device)
        self.mask = (seen >= window) & (seen < window + kernel)  # [blocks, queries, keys]


def neighborhood_attention(query: Tensor, key: Tensor, value: Tensor, kernel: Triple, block: Triple = _BLOCK) -> Tensor:
    """Attention of every cell to the ``kernel`` cells around it; all tensors [B, T, H, W, heads, d], query already scaled."""
    batch, frames, height, width, heads, dim = query.shape
    t, h, w = (_Axis(n, k, b, query.device) for n, k, b in zip((frames, height, width), kernel, block))
    out = torch.empty_like(value)
    columns = len(w.queries)
    for ti, (tq, tk) in enumerate(zip(t.queries, t.keys)):
        for hi, (hq, hk) in enumerate(zip(h.queries, h.keys)):
            queries = _columns(query[:, tq : tq + t.block, hq : hq + h.block], w.queries, w.block)
            keys = _columns(key[:, tk : tk + t.reach, hk : hk + h.reach], w.keys, w.reach)
            values = _columns(value[:, tk : tk + t.reach, hk : hk + h.reach], w.keys, w.reach)
            mask = (
                t.mask[ti][None, :, None, None, :, None, None]
                & h.mask[hi][None, None, :, None, None, :, None]
                & w.mask[:, None, None, :, None, None, :]
            )
            mask = mask.reshape(columns, 1, queries.shape[-2], keys.shape[-2]).repeat(batch, 1, 1, 1)
            result = F.scaled_dot_product_attention(queries, keys, values, attn_mask=mask, scale=1.0)
            result = result.view(batch, columns, heads, t.block, h.block, w.block, dim).permute(1, 0, 3, 4, 5, 2, 6)
            for column, wq in zip(result, w.queries):
                out[:, tq : tq + t.block, hq : hq + h.block, wq : wq + w.block] = column
    return out


def _columns(slab: Tensor, starts: list[int], size: int) -> Tensor:
    """[B, t, h, W, heads, d] -> [B * blocks, heads, t * h * size, d]: the slab cut along its width."""
    batch, t, h, _, heads, dim = slab.shape
    cut = torch.stack([slab[:, :, :, s : s + size] for s in starts], dim=1)
    return cut.permute(0, 1, 5, 2, 3, 4, 6).reshape(batch * len(starts), heads, t * h * size, dim)


class BlockedNeighborhoodProcessor:
    """Attention processor for diffusers' LTX2VideoVaeNeighborhoodAttention: same result, memory linear in the tokens."""

    def __call__(self, attention: torch.nn.Module, hidden: Tensor, block_mask: object = None) -> Tensor:
        query, key, value = attention.project_qkv(hidden)
        return attention.to_out[0](neighborhood_attention(query, key, value, attention.kernel_size).flatten(-2))
