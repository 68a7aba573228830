"""Linear: the one linear layer of the transformer, holding its base weight (plain or quantised) and a LoRA."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol, runtime_checkable

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@runtime_checkable
class QuantizedWeight(Protocol):
    """A frozen [out, in] weight in fewer bits; ``memory/quantization.py`` makes them."""

    @property
    def shape(self) -> torch.Size: ...

    @property
    def device(self) -> torch.device: ...

    def dequantize(self, dtype: torch.dtype) -> Tensor:
        """The plain [out, in] weight in ``dtype``."""
        ...

    def to(self, device: torch.device | str) -> QuantizedWeight: ...


class LoraWeights(nn.Module):
    """A low-rank update scale * B A: ``A`` [rank, in] and ``B`` [out, rank] are float32 masters, scale = alpha / rank.

    A starts uniform in +-1/sqrt(in), B at zero (the LoRA paper's start as peft draws it), so the update starts at zero.
    """

    def __init__(self, in_features: int, out_features: int, rank: int, alpha: float | None = None, dropout: float = 0.0) -> None:
        super().__init__()
        assert rank > 0, f"rank {rank}"
        self.A = nn.Parameter(torch.empty(rank, in_features, dtype=torch.float32))
        self.B = nn.Parameter(torch.zeros(out_features, rank, dtype=torch.float32))
        self.scale = (rank if alpha is None else alpha) / rank
        self.dropout = dropout
        nn.init.kaiming_uniform_(self.A, a=math.sqrt(5))

    @property
    def rank(self) -> int:
        return self.A.shape[0]

    def forward(self, x: Tensor) -> Tensor:
        """[..., in] -> [..., out] in x's dtype. The scale is applied to the narrow middle."""
        down = F.linear(F.dropout(x, self.dropout, self.training), self.A.to(x.dtype))
        return F.linear(down * self.scale, self.B.to(x.dtype))

    def _apply(self, fn, recurse: bool = True):
        """Moves and ``.to(dtype)`` of the model: the masters change place, never precision."""
        return super()._apply(lambda t: moved if (moved := fn(t)).dtype == t.dtype else t.to(moved.device), recurse)

    def extra_repr(self) -> str:
        return f"rank={self.rank}, scale={self.scale:g}, dropout={self.dropout:g}"


class _QuantizedLinear(torch.autograd.Function):
    """x W^T + b with a frozen quantised W: dequantised in forward and again in backward, never kept in between."""

    @staticmethod
    def forward(ctx, x: Tensor, bias: Tensor | None, weight: QuantizedWeight) -> Tensor:
        ctx.weight = weight
        return F.linear(x, weight.dequantize(x.dtype), bias)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        dx = grad @ ctx.weight.dequantize(grad.dtype) if ctx.needs_input_grad[0] else None
        db = grad.flatten(0, -2).sum(0) if ctx.needs_input_grad[1] else None
        return dx, db, None


class Linear(nn.Linear):
    """y = x W^T + b + scale * (dropout(x) A^T) B^T.

    ``weight`` is the plain base weight, or None when ``quantized`` holds it. ``lora`` is None or a LoraWeights;
    ``lora_enabled`` False leaves it out (previews of the base model, see :func:`lora_disabled`).
    """

    def __init__(self, in_features: int, out_features: int, bias: bool = True) -> None:
        super().__init__(in_features, out_features, bias)
        self.quantized: QuantizedWeight | None = None
        self.lora: LoraWeights | None = None
        self.lora_enabled = True

    def set_quantized(self, store: QuantizedWeight) -> None:
        """Replaces the plain weight by ``store`` of the same shape."""
        assert tuple(store.shape) == (self.out_features, self.in_features), f"{tuple(store.shape)} for {self}"
        self.weight = None
        self.quantized = store

    def base_weight(self, dtype: torch.dtype) -> Tensor:
        """The base weight [out, in] in ``dtype``, dequantised where needed; without the LoRA."""
        return self.weight.to(dtype) if self.quantized is None else self.quantized.dequantize(dtype)

    def forward(self, x: Tensor) -> Tensor:
        if self.quantized is None:
            y = F.linear(x, self.weight, self.bias)
        else:
            y = _QuantizedLinear.apply(x, self.bias, self.quantized)
        if self.lora is not None and self.lora_enabled:
            y = y + self.lora(x)
        return y

    def _apply(self, fn, recurse: bool = True):
        """Module moves (``.to``, ``.cuda``) reach the quantised store too; dtype changes do not concern it."""
        super()._apply(fn, recurse)
        store = self.quantized
        if store is not None and not isinstance(store, nn.Module):
            target = fn(torch.empty(0, dtype=torch.uint8, device=store.device)).device
            if target != store.device:
                self.quantized = store.to(target)
        return self

    def extra_repr(self) -> str:
        kind = "" if self.quantized is None else f", quantized={type(self.quantized).__name__}"
        return super().extra_repr() + kind


def linears(module: nn.Module) -> Iterator[tuple[str, Linear]]:
    """(name, layer) of every :class:`Linear` below ``module``, in module order."""
    return ((name, layer) for name, layer in module.named_modules() if isinstance(layer, Linear))


@contextmanager
def lora_disabled(module: nn.Module) -> Iterator[None]:
    """Within it, every Linear below ``module`` computes its base weight only."""
    layers = [layer for _, layer in linears(module) if layer.lora_enabled]
    for layer in layers:
        layer.lora_enabled = False
    try:
        yield
    finally:
        for layer in layers:
            layer.lora_enabled = True
