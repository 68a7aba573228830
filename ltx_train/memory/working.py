"""Working copies of LoRA weights: float32 masters stay what is trained, blocks compute with copies in their own dtype."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from ..models.linear import Linear, LinearGroup, LoraWeights


class BlockLoras:
    """The LoRAs of one block's groups: masters as views of one flat float32 tensor, copied and differentiated as a whole.

    The parameters and their ``.grad`` stay the layers' own (views), so optimizers, clipping and snapshots see nothing
    of it. Each forward makes fresh copies; their gradients are added to the masters' in float32.
    """

    def __init__(self, groups: Sequence[tuple[LinearGroup, Sequence[Linear]]], master: Tensor, gradient: Tensor | None, dtype: torch.dtype) -> None:
        """master, gradient: this block's parts [n] of the flat tensors; the present values are moved in."""
        self.dtype, self.master, self.gradient = dtype, master, gradient
        self.groups = [(group, layers) for group, layers in groups if any(layer.lora is not None for layer in layers)]
        self.loras = [layer.lora for _, layers in self.groups for layer in layers if layer.lora is not None]
        self.sizes = [size for _, layers in self.groups for size in _sizes(layers)]
        self.shapes = [shape for _, layers in self.groups for shape in _shapes(layers)]
        self._masters = self._views(master)
        self._gradients = None if gradient is None else self._views(gradient)
        self.trained = any(lora.A.requires_grad for lora in self.loras)
        self._gradient_of = [] if gradient is None else list(self._of_parameters(self._gradients))
        self._copy: Tensor | None = None
        self._adopt()

    @staticmethod
    def count(layers: Sequence[Linear]) -> int:
        """Numbers in the LoRAs of a group."""
        return sum(_sizes(layers))

    def _views(self, flat: Tensor) -> list[Tensor]:
        """The group's tensors in a flat one: each group's A [sum of ranks, in], then a B [out, rank] a layer."""
        return [part.view(shape) for part, shape in zip(flat.split(self.sizes), self.shapes)]

    def _of_parameters(self, views: Sequence[Tensor]) -> Iterator[tuple[torch.nn.Parameter, Tensor]]:
        """(parameter, its view) for every A and B."""
        rest = iter(views)
        for _, layers in self.groups:
            adapted = [layer.lora for layer in layers if layer.lora is not None]
            yield from zip((lora.A for lora in adapted), next(rest).split([lora.rank for lora in adapted]))
            for lora in adapted:
                yield lora.B, next(rest)

    @torch.no_grad()
    def _adopt(self) -> None:
        for parameter, view in self._of_parameters(self._masters):
            view.copy_(parameter)
            parameter.data = view
        self.parameters = [parameter for parameter, _ in self._of_parameters(self._masters)]

    def load(self, again: bool = False) -> None:
        """Give the groups fresh copies; where a layer's LoRA is switched off its group computes the base alone.

        again: for another pass through the block right after one, which reads the same copies; its gradients are its own.
        """
        if not self.loras:
            return
        if not again:
            self._copy = self.master.detach().to(self.dtype, copy=True)
        if self.trained and torch.is_grad_enabled():
            copies = _Copies.apply(torch.zeros((), requires_grad=True), self)
        else:
            copies = self._views(self._copy)
        rest = iter(copies)
        for group, layers in self.groups:
            down = next(rest)
            ups = tuple(None if layer.lora is None else next(rest) for layer in layers)
            on = [layer.lora is not None and layer.lora_enabled for layer in layers]
            lora = next(layer.lora for layer in layers if layer.lora is not None)
            group.dropout = lora.dropout if lora.training else 0.0
            group.down = down if any(on) else None
            group.ups = tuple(up if keep else None for up, keep in zip(ups, on))

    def unload(self) -> None:
        """Let go of the copies; what backward needs of them it holds itself."""
        self._copy = None
        for group, layers in self.groups:
            group.down, group.ups = None, (None,) * len(layers)

    @torch.no_grad()
    def accumulate(self, grads: Sequence[Tensor | None]) -> None:
        """Add the copies' gradients to the masters'."""
        fresh = self.parameters[0].grad is None
        if fresh and any(g is None for g in grads):
            self.gradient.zero_()
        views = [(view, g) for view, g in zip(self._gradients, grads) if g is not None]
        if views:
            into, values = map(list, zip(*views))
            if fresh:
                torch._foreach_copy_(into, values)
            else:
                torch._foreach_add_(into, [v.float() for v in values])
        if fresh:
            self.show_gradients()

    def show_gradients(self) -> None:
        """Let the parameters' ``.grad`` be this block's part of the flat gradient."""
        if self.trained:
            for parameter, view in self._gradient_of:
                parameter.grad = view


class _Copies(torch.autograd.Function):
    """The working copies of one block; backward hands their gradients to the masters. ``anchor`` makes autograd come by.

    The owner is held weakly: its groups hold the copies, a copy holds this node, and through that circle in C++ Python's
    collector cannot see. The engine holds the owner for as long as there is anything to train.
    """

    @staticmethod
    def forward(ctx, anchor: Tensor, owner: BlockLoras) -> tuple[Tensor, ...]:
        ctx.owner = weakref.ref(owner)
        ctx.set_materialize_grads(False)
        return tuple(owner._views(owner._copy))

    @staticmethod
    def backward(ctx, *grads: Tensor | None) -> tuple[None, None]:
        ctx.owner().accumulate(grads)
        return None, None


def _adapted(layers: Sequence[Linear]) -> list[tuple[Linear, LoraWeights]]:
    return [(layer, layer.lora) for layer in layers if layer.lora is not None]


def _shapes(layers: Sequence[Linear]) -> list[tuple[int, int]]:
    adapted = _adapted(layers)
    if not adapted:
        return []
    return [(sum(lora.rank for _, lora in adapted), adapted[0][0].in_features), *((layer.out_features, lora.rank) for layer, lora in adapted)]


def _sizes(layers: Sequence[Linear]) -> list[int]:
    return [rows * columns for rows, columns in _shapes(layers)]
