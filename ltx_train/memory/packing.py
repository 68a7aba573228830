"""Packing: a block's weights in one flat buffer, in the order in which they are multiplied, with official names as views."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields, is_dataclass, replace

import torch
from torch import Tensor

from ..models.blocks import TransformerBlock
from ..models.linear import Linear, LinearGroup
from .stores import AsStored, GroupScaled, RowScaled

ALIGN = 512
"""Bytes that every tensor in a flat buffer starts at a multiple of: what uploads and matrix products like."""


@dataclass(frozen=True)
class Piece:
    """One tensor inside a flat byte buffer."""

    start: int
    dtype: torch.dtype
    shape: tuple[int, ...]

    def view(self, buffer: Tensor) -> Tensor:
        """The tensor, as a view of the bytes [n] of ``buffer``."""
        size = math.prod(self.shape) * self.dtype.itemsize
        return buffer[self.start : self.start + size].view(self.dtype).view(self.shape)


class Pieces:
    """Places for tensors in a flat byte buffer."""

    def __init__(self) -> None:
        self.size = 0

    def add(self, dtype: torch.dtype, shape: tuple[int, ...]) -> Piece:
        piece = Piece(self.size, dtype, tuple(shape))
        self.size += -(-math.prod(shape) * dtype.itemsize // ALIGN) * ALIGN
        return piece


@dataclass(frozen=True)
class Member:
    """One layer of a block: its name, its rows [first, first + out) in its group's matrix."""

    name: str
    first: int
    out: int


@dataclass(frozen=True)
class Group:
    """Layers that read the same input, and where their common matrix [out, in] stands in a buffer of plain weights."""

    members: tuple[Member, ...]
    piece: Piece


class Packing:
    """Where everything of a block rests, the same for all blocks of a transformer.

    Weights rest as they were loaded: plain ones in the plain buffer, each quantised store's tensors in a byte buffer, to be
    expanded into the plain layout when the block's turn comes. native: e4m3 weights with a scale a row are multiplied as
    they are and never expanded. A block's layout is read off the first block; ``take`` moves the others into it.
    """

    def __init__(self, block: TransformerBlock, dtype: torch.dtype, *, native: bool = False) -> None:
        layers = {name: layer for group in block.groups() for name in group if isinstance(layer := block.get_submodule(name), Linear)}
        self.dtype, self.native = dtype, native
        self.stored: dict[str, dict[str, Piece]] = {}
        self.kept: tuple[str, ...] = ()
        rest, plain = Pieces(), Pieces()
        quantised = {name for name, layer in layers.items() if layer.quantized is not None}
        self.expands = bool(quantised) and not native
        own = {n for n in quantised if isinstance(layers[n].quantized, GroupScaled)} if self.expands else set()
        self.groups = [g for names in block.groups() for g in self._grouped([n for n in names if n in layers], layers, plain)]
        if self.expands:
            self.whole = self._whole(layers, own, rest)
            for name in sorted(quantised - own if self.whole is not None else quantised):
                self.stored[name] = {key: rest.add(t.dtype, tuple(t.shape)) for key, t in store_tensors(layers[name].quantized).items()}
            self.kept = tuple(name for name in layers if name not in quantised)
        else:
            self.whole = None
            rest = plain
        self.rest_bytes, self.plain_bytes = rest.size, plain.size

    def _grouped(self, names: list[str], layers: Mapping[str, Linear], plain: Pieces) -> list[Group]:
        """One group, or with e4m3 products two: the quantised layers and those that stay plain (gates)."""
        split = [[n for n in names if layers[n].quantized is not None], [n for n in names if layers[n].quantized is None]] if self.native else [names]
        found = []
        for part in filter(None, split):
            first, members = 0, []
            for name in part:
                members.append(Member(name, first, layers[name].out_features))
                first += layers[name].out_features
            dtype = torch.float8_e4m3fn if self.native and layers[part[0]].quantized is not None else self.dtype
            found.append(Group(tuple(members), plain.add(dtype, (first, layers[part[0]].in_features))))
        return found

    def _whole(self, layers: Mapping[str, Linear], own: set[str], rest: Pieces) -> tuple[Piece, Piece] | None:
        """Room for int8 values and scales in the very order of the plain buffer, so that one kernel expands a block."""
        size = max(g.piece.start // self.dtype.itemsize + math.prod(g.piece.shape) for g in self.groups)
        size = -(-size // 128) * 128
        regular = all(layers[n].in_features % 128 == 0 and layers[n].quantized.scale.shape[1] == layers[n].in_features // 128 for n in own)
        if not own or not regular or ALIGN // self.dtype.itemsize % 128:
            return None
        return rest.add(torch.int8, (size // 128, 128)), rest.add(torch.bfloat16, (size // 128, 1))

    def matrices(self, plain: Tensor) -> list[Tensor]:
        """Each group's weight [out, in] as a view of a plain buffer."""
        return [group.piece.view(plain) for group in self.groups]

    def view_of(self, name: str, plain: Tensor) -> Tensor:
        """One layer's weight [out, in] as a view of a plain buffer."""
        group, member = next((g, m) for g in self.groups for m in g.members if m.name == name)
        return group.piece.view(plain)[member.first : member.first + member.out]

    @torch.no_grad()
    def take(self, block: TransformerBlock, buffer: Tensor, device: torch.device) -> None:
        """Move a block's weights into ``buffer`` [rest_bytes] and point its layers there; they compute on ``device``.

        What lies between the tensors stays as it is: it is expanded too, and read by nobody.
        """
        for group in self.groups:
            for member in group.members:
                layer = block.get_submodule(member.name)
                layer.place = device
                if not self.expands:
                    self._take_plain(layer, group, member, buffer)
                elif layer.quantized is not None:
                    layer.quantized = self._take_stored(layer.quantized, group, member, buffer)

    def _take_plain(self, layer: Linear, group: Group, member: Member, buffer: Tensor) -> None:
        view = group.piece.view(buffer)[member.first : member.first + member.out]
        if layer.quantized is None:
            view.copy_(layer.weight.detach())
            layer.weight.data = view
        else:
            assert isinstance(layer.quantized, RowScaled), "e4m3 products need a scale a row"
            view.copy_(layer.quantized.data)
            layer.quantized = RowScaled(view, layer.quantized.scale)

    def _take_stored(self, store, group: Group, member: Member, buffer: Tensor):
        if member.name in self.stored:
            pieces = self.stored[member.name]
            moved = {key: pieces[key].view(buffer) for key in pieces}
        else:
            values, scales = (piece.view(buffer).view(-1) for piece in self.whole)
            start = group.piece.start // self.dtype.itemsize + member.first * group.piece.shape[1]
            size = member.out * group.piece.shape[1]
            moved = {
                "data": values[start : start + size].view(member.out, -1),
                "scale": scales[start // 128 : (start + size) // 128].view(member.out, -1),
            }
        for key, tensor in store_tensors(store).items():
            moved[key].copy_(tensor)
        return with_tensors(store, moved)

    @torch.no_grad()
    def expand(self, block: TransformerBlock, buffer: Tensor, plain: Tensor, kernel) -> None:
        """The plain weights of a block from its bytes (on the device) into ``plain``; kernel: see :func:`expand_groups`."""
        if self.whole is not None:
            values, scales = (piece.view(buffer) for piece in self.whole)
            flat = plain.view(self.dtype)[: values.numel()].view(values.shape)
            kernel(values, scales, flat)
        for name, pieces in self.stored.items():
            store = with_tensors(block.get_submodule(name).quantized, {key: piece.view(buffer) for key, piece in pieces.items()})
            self.view_of(name, plain).copy_(store.dequantize(self.dtype))
        if self.kept:
            torch._foreach_copy_([self.view_of(name, plain) for name in self.kept], [block.get_submodule(name).weight.detach() for name in self.kept])


def expand_groups(values: Tensor, scales: Tensor, out: Tensor) -> None:
    """out = values * scales, int8 [n, 128] and [n, 1], in ``out``'s dtype."""
    out.copy_(values.to(out.dtype) * scales.to(out.dtype))


def store_tensors(store) -> dict[str, Tensor]:
    """The tensors of a quantised store by field: those that move with the block."""
    if isinstance(store, AsStored):
        return dict(store.stored.tensors)
    assert is_dataclass(store), type(store)
    return {f.name: value for f in fields(store) if isinstance(value := getattr(store, f.name), Tensor)}


def with_tensors(store, tensors: Mapping[str, Tensor]):
    """The same store holding other tensors."""
    if isinstance(store, AsStored):
        return AsStored(replace(store.stored, tensors=dict(tensors)))
    return replace(store, **tensors)


def group_of(members: list[Linear], native: bool) -> LinearGroup:
    """The product of a packed group without its weight: biases merged (official ones become views), fp8 scales, LoRA shapes."""
    loras = [layer.lora for layer in members]
    group = LinearGroup(
        [layer.out_features for layer in members], [1.0 if lora is None else lora.scale for lora in loras], [0 if lora is None else lora.rank for lora in loras]
    )
    if any(layer.bias is not None for layer in members):
        group.bias = torch.cat([layer.bias.detach() for layer in members])
        for layer, view in zip(members, group.bias.split(group.sizes)):
            layer.bias.data = view
    if native and members[0].quantized is not None:
        group.scale = torch.cat([layer.quantized.scale.float() for layer in members])
    return group
