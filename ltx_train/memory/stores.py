"""Quantised weight stores: frozen [out, in] matrices in fewer bits, each with its way back to numbers."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from ..models.stored_quant import StoredQuant

# Each store follows models.linear.QuantizedWeight: shape, device, dequantize(dtype), to(device). Linear's autograd
# function calls dequantize in the forward and again in the backward pass, so no plain copy outlives a layer's turn.


@dataclass(frozen=True)
class _Scaled:
    """Data of the weight's own shape, and its scales."""

    data: Tensor
    scale: Tensor

    @property
    def shape(self) -> torch.Size:
        return self.data.shape

    @property
    def device(self) -> torch.device:
        return self.data.device

    @property
    def nbytes(self) -> int:
        return self.data.nbytes + self.scale.nbytes

    def to(self, device: torch.device | str) -> _Scaled:
        return replace(self, data=self.data.to(device), scale=self.scale.to(device))


@dataclass(frozen=True)
class RowScaled(_Scaled):
    """One scale a row: data [out, in] in int8 or an 8-bit float, scale [out, 1]; weight = scale * data in the scale's dtype."""

    def dequantize(self, dtype: torch.dtype) -> Tensor:
        return (self.scale * self.data.to(self.scale.dtype)).to(dtype)


@dataclass(frozen=True)
class GroupScaled(_Scaled):
    """One scale a group of inputs: data [out, in] int8, scale [out, groups] bfloat16; weight = scale * data in ``dtype``."""

    def dequantize(self, dtype: torch.dtype) -> Tensor:
        out, groups = self.scale.shape
        grouped = self.data.view(out, groups, -1).to(dtype)
        return grouped.mul_(self.scale.to(dtype).unsqueeze(-1)).view(self.shape)


@dataclass(frozen=True)
class PackedAffine:
    """2 or 4 bits: packed bytes of q in 0..2^bits-1 over rows of groups; weight = scale * q - shift a group.

    packed [ceil(n / (8 / bits)), group], scale and shift [n, 1], n = out * in / group. Byte r holds rows r, r + R, ...
    (R packed rows), the first in the lowest bits: the order optimum-quanto packs in.
    """

    packed: Tensor
    scale: Tensor
    shift: Tensor
    bits: int
    size: tuple[int, int]

    @property
    def shape(self) -> torch.Size:
        return torch.Size(self.size)

    @property
    def device(self) -> torch.device:
        return self.packed.device

    @property
    def nbytes(self) -> int:
        return self.packed.nbytes + self.scale.nbytes + self.shift.nbytes

    def unpacked(self) -> Tensor:
        """q [n, group] uint8, by arithmetic alone: shifts of bytes are not to be had on every device."""
        values = 2**self.bits
        parts = [torch.div(self.packed, values**i, rounding_mode="floor") % values for i in range(8 // self.bits)]
        return torch.cat(parts)[: self.scale.shape[0]]

    def dequantize(self, dtype: torch.dtype) -> Tensor:
        weight = self.scale * self.unpacked()
        return weight.sub_(self.shift).reshape(self.size).to(dtype)

    def to(self, device: torch.device | str) -> PackedAffine:
        return replace(self, packed=self.packed.to(device), scale=self.scale.to(device), shift=self.shift.to(device))


@dataclass(frozen=True)
class Nf4:
    """bitsandbytes nf4 with double quantisation: packed bytes and bitsandbytes' own QuantState."""

    packed: Tensor
    state: object
    size: tuple[int, int]

    @property
    def shape(self) -> torch.Size:
        return torch.Size(self.size)

    @property
    def device(self) -> torch.device:
        return self.packed.device

    @property
    def nbytes(self) -> int:
        nested = getattr(self.state, "state2", None)
        return self.packed.nbytes + self.state.absmax.nbytes + (nested.absmax.nbytes if nested is not None else 0)

    def dequantize(self, dtype: torch.dtype) -> Tensor:
        from bitsandbytes.functional import dequantize_4bit

        return dequantize_4bit(self.packed, self.state).to(dtype)

    def to(self, device: torch.device | str) -> Nf4:
        import copy

        state = copy.deepcopy(self.state)  # bitsandbytes moves its state in place
        state.to(device)
        return Nf4(self.packed.to(device), state, self.size)


@dataclass(frozen=True)
class AsStored:
    """A weight as the checkpoint file holds it (fp8-scaled, int8, nvfp4, mxfp8): trained on as it is, with the file's own numbers."""

    stored: StoredQuant

    @property
    def shape(self) -> torch.Size:
        return torch.Size(self.stored.shape)

    @property
    def device(self) -> torch.device:
        return self.stored.tensors["weight"].device

    @property
    def nbytes(self) -> int:
        return self.stored.nbytes

    def dequantize(self, dtype: torch.dtype) -> Tensor:
        return self.stored.dequantize(dtype)

    def to(self, device: torch.device | str) -> AsStored:
        return AsStored(self.stored.to(device))


def pack(values: Tensor, bits: int) -> Tensor:
    """Pack q [n, group] uint8 < 2^bits as :class:`PackedAffine` says."""
    per_byte = 8 // bits
    rows = math.ceil(values.shape[0] / per_byte)
    padded = torch.zeros(rows * per_byte, values.shape[1], dtype=torch.uint8, device=values.device)
    padded[: values.shape[0]] = values
    packed = torch.zeros(rows, values.shape[1], dtype=torch.uint8, device=values.device)
    for index, part in enumerate(padded.view(per_byte, rows, -1)):
        packed += part * 2 ** (bits * index)
    return packed


def quanto_group(inputs: int) -> int | None:
    """The group size that optimum-quanto takes for 2 and 4 bits: 128, or less in steps of 32 until it divides; None = a whole row."""
    size = 128
    if inputs <= size:
        return None
    while inputs % size and size > 32:
        size -= 32
    return size if inputs % size == 0 else None
