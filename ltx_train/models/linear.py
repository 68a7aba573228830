"""Linear: the one linear layer of the transformer, holding its base weight (plain or quantised) and a LoRA."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
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


class _Float8Linear(torch.autograd.Function):
    """x W^T with a frozen W in e4m3 (float32 scale a row): x is rounded to e4m3 by row, in the forward pass and, as the
    gradient, in the backward pass. The rows' scales are folded into the gradient before it is rounded, so W^T needs none."""

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
        ctx.save_for_backward(weight, scale)
        flat = x.flatten(0, -2)
        return _float8_product(flat, weight.t(), scale.view(1, -1)).view(*x.shape[:-1], weight.shape[0])

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor | None, None, None]:
        if not ctx.needs_input_grad[0]:
            return None, None, None
        weight, scale = ctx.saved_tensors
        flat = grad.flatten(0, -2).float() * scale.view(1, -1)
        ones = scale.new_ones(1, weight.shape[1])
        dx = _float8_product(flat, weight.t().contiguous().t(), ones, grad.dtype)
        return dx.view(*grad.shape[:-1], weight.shape[1]), None, None


def _float8_product(x: Tensor, weight: Tensor, scale: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """x [T, in] rounded to e4m3 by row, times weight [in, out] in e4m3 with ``scale`` [1, out]."""
    top = torch.finfo(torch.float8_e4m3fn).max
    rows = (x.abs().amax(1, keepdim=True).float() / top).clamp(min=1e-12)
    small = (x.float() / rows).to(torch.float8_e4m3fn)
    if x.device.type == "cpu":  # no kernel there: the same numbers by hand
        return ((small.float() @ weight.float()) * rows * scale).to(dtype or x.dtype)
    return torch._scaled_mm(small, weight, rows, scale.contiguous(), out_dtype=dtype or x.dtype, use_fast_accum=True)


class LinearGroup:
    """Linears that read the same input, computed as one matrix product; made by ``memory/packing.py``.

    weight: [sum of outs, in], the layers' rows one under another, in the dtype of the computation or in e4m3 with
    ``scale`` [sum of outs, 1]. bias: [sum of outs] or None. The tensors are exchanged, never the object:
    ``down`` [sum of ranks, in] and ``ups`` (a layer each: [out, rank] or None) are working copies of the layers' LoRAs.
    """

    def __init__(self, sizes: Sequence[int], scales: Sequence[float], ranks: Sequence[int]) -> None:
        self.sizes, self.lora_scales, self.ranks, self.dropout = tuple(sizes), tuple(scales), tuple(ranks), 0.0
        self.weight: Tensor | None = None
        self.scale: Tensor | None = None
        self.bias: Tensor | None = None
        self.down: Tensor | None = None
        self.ups: tuple[Tensor | None, ...] = (None,) * len(self.sizes)

    def __call__(self, x: Tensor) -> list[Tensor]:
        """[..., in] -> each layer's output [..., out]."""
        # compiled, bias and LoRA are added where the result is read; a bias inside the product would be copied out first
        late = self.bias is not None and (self.scale is not None or torch.compiler.is_compiling())
        if self.scale is None:
            y = F.linear(x, self.weight, None if late else self.bias)
        else:
            y = _Float8Linear.apply(x, self.weight, self.scale)
        parts = [y] if len(self.sizes) == 1 else list(y.split(self.sizes, dim=-1))
        if self.down is not None:
            parts = [part if up is None else part + up for part, up in zip(parts, self._updates(x))]
        if late:
            bias = [self.bias] if len(self.sizes) == 1 else self.bias.split(self.sizes)
            parts = [part + b for part, b in zip(parts, bias)]
        return parts

    def _updates(self, x: Tensor) -> list[Tensor | None]:
        downs = self.down.split(self.ranks)
        if self.dropout == 0 and len(downs) > 1:
            narrow = F.linear(x, self.down).split(self.ranks, dim=-1)
        else:  # each layer drops its own inputs
            narrow = [F.linear(F.dropout(x, self.dropout, self.dropout > 0), down) for down in downs]
        scaled = [n if s == 1 else n * s for n, s in zip(narrow, self.lora_scales)]
        return [None if up is None else F.linear(n, up) for n, up in zip(scaled, self.ups)]


def project(layers: Sequence[Linear], x: Tensor) -> list[Tensor]:
    """Outputs of layers that all read ``x``: those grouped with the first in one product, the others one by one."""
    group = getattr(layers[0], "group", None)
    done = [] if group is None else group(x)
    return done + [layer(x) for layer in layers[len(done) :]]


class Linear(nn.Linear):
    """y = x W^T + b + scale * (dropout(x) A^T) B^T.

    ``weight`` is the plain base weight, or None when ``quantized`` holds it. ``lora`` is None or a LoraWeights;
    ``lora_enabled`` False leaves it out (previews of the base model, see :func:`lora_disabled`). ``group``, where set,
    computes this layer and those after it that read the same input. ``place``, where set, is the device it computes on
    while its weight rests elsewhere.
    """

    def __init__(self, in_features: int, out_features: int, bias: bool = True) -> None:
        super().__init__(in_features, out_features, bias)
        self.quantized: QuantizedWeight | None = None
        self.lora: LoraWeights | None = None
        self.lora_enabled = True
        self.group: LinearGroup | None = None
        self.place: torch.device | None = None

    def set_quantized(self, store: QuantizedWeight) -> None:
        """Replaces the plain weight by ``store`` of the same shape."""
        assert tuple(store.shape) == (self.out_features, self.in_features), f"{tuple(store.shape)} for {self}"
        self.weight = None
        self.quantized = store

    @property
    def device(self) -> torch.device:
        """Where the layer computes, and an adapter belongs."""
        return self.place or (self.weight.device if self.weight is not None else self.quantized.device)

    def base_weight(self, dtype: torch.dtype) -> Tensor:
        """The base weight [out, in] in ``dtype``, dequantised where needed; without the LoRA."""
        return self.weight.to(dtype) if self.quantized is None else self.quantized.dequantize(dtype)

    def forward(self, x: Tensor) -> Tensor:
        if self.group is not None:
            return self.group(x)[0]
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
