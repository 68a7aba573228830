"""Low-rank algebra: the best update of a smaller rank, the rank that keeps a share, the factors of a matrix."""

from __future__ import annotations

import torch
from torch import Tensor

_EXACT_UP_TO = 1024  # a full SVD of [4096, 4096] takes half a minute on a CPU, the randomised one under a second


def low_rank(a: Tensor, b: Tensor, rank: int) -> tuple[Tensor, Tensor, float]:
    """The best update of ``rank`` to B A (Eckart-Young): ([rank, in], [out, rank], relative Frobenius error).

    a [r, in], b [out, r]. Works on two thin QR factors, never on [out, in]. The singular values are split evenly.
    """
    qb, rb = torch.linalg.qr(b.double())
    qa, ra = torch.linalg.qr(a.double().T)
    u, s, vh = torch.linalg.svd(rb @ ra.T)
    rank = min(rank, len(s))
    total, lost = s.square().sum(), s[rank:].square().sum()
    root = s[:rank].sqrt()
    small_b = qb @ (u[:, :rank] * root)
    small_a = (root[:, None] * vh[:rank]) @ qa.T
    return small_a.float(), small_b.float(), (lost / total).sqrt().item() if total > 0 else 0.0


def rank_for(a: Tensor, b: Tensor, energy: float) -> int:
    """The least rank that keeps a share ``energy`` of the update's squared norm."""
    _, rb = torch.linalg.qr(b.double())
    _, ra = torch.linalg.qr(a.double().T)
    kept = torch.linalg.svdvals(rb @ ra.T).square().cumsum(0)
    return 1 if kept[-1] == 0 else int((kept < energy * kept[-1]).sum().item()) + 1


def decompose(matrix: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """(A [rank, in], B [out, rank]) with B A the nearest to ``matrix`` [out, in] of that rank.

    Exact up to 1024 rows or columns; above that the randomised method of Halko et al. with fixed seed and 4 iterations.
    """
    matrix = matrix.float()
    rank = min(rank, *matrix.shape)
    if min(matrix.shape) <= _EXACT_UP_TO:
        u, s, vh = torch.linalg.svd(matrix, full_matrices=False)
    else:
        with torch.random.fork_rng(devices=[]):
            torch.random.default_generator.manual_seed(0)
            u, s, v = torch.svd_lowrank(matrix, q=min(rank + 16, *matrix.shape), niter=4)
        vh = v.T
    root = s[:rank].sqrt()
    return root[:, None] * vh[:rank], u[:, :rank] * root
