"""What autograd may keep of a block: weights by name, block inputs on the host, everything else as it is."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch
from torch import Tensor

from .pinned import HostMemory


@dataclass(frozen=True)
class _Weight:
    """A view of a block's weights; its bytes may be gone when it is asked for."""

    block: int
    shape: torch.Size
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype


@dataclass(frozen=True)
class _Input:
    """A block's input that rests on the host."""

    key: tuple[int, int]


class SavedTensors:
    """Saved-tensor hooks around a block's forward.

    A saved view of a shared weight buffer would hold whatever passes through that buffer later, so only block number and
    layout are kept, and ``enter`` brings the block back when backward asks: nothing of a streamed or expanded weight stays
    alive. offload: the block's inputs go to host memory meanwhile, and come back one block ahead.
    """

    def __init__(self, enter: Callable[[int], Tensor | None], buffers: list[Tensor], device: torch.device, *, offload: bool, memory: HostMemory) -> None:
        self.enter, self.device, self.offload, self.memory = enter, device, offload, memory
        self.buffers = buffers
        self.owned = self._owned()
        self.block = 0
        self.inputs: dict[int, tuple[int, torch.Size]] = {}
        self.host: dict[tuple[int, int], Tensor] = {}
        self.sent: dict[tuple[int, int], Tensor] = {}
        self.back: dict[tuple[int, int], tuple[Tensor, torch.cuda.Event | None]] = {}
        self.stream = torch.cuda.Stream(device) if offload and device.type == "cuda" else None

    def start(self) -> None:
        """A forward pass begins: nothing of the one before is needed any more."""
        self.owned = self._owned()  # a preview or a pause may have moved them
        self.sent.clear()
        self.back.clear()

    def _owned(self) -> dict[int, Tensor]:
        """The shared buffers by their present addresses."""
        return {b.untyped_storage().data_ptr(): b for b in self.buffers}

    def of(self, block: int, turn: int, *inputs: Tensor | None) -> AbstractContextManager:
        """The hooks for one block with its token inputs; turn: which of the passes that go through the block together."""
        self.block = block
        first = turn * len(inputs)
        self.inputs = {t.data_ptr(): (first + number, t.shape) for number, t in enumerate(inputs) if t is not None} if self.offload else {}
        return torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack)

    def _pack(self, tensor: Tensor) -> Tensor | _Weight | _Input:
        if tensor.untyped_storage().data_ptr() in self.owned:
            return _Weight(self.block, tensor.shape, tensor.stride(), tensor.storage_offset(), tensor.dtype)
        number, shape = self.inputs.get(tensor.data_ptr(), (0, None))
        if tensor.shape == shape:
            key = (self.block, number)
            if key not in self.sent:
                self._send(key, tensor.detach())
            return _Input(key)
        return tensor

    def _unpack(self, saved: Tensor | _Weight | _Input) -> Tensor:
        if isinstance(saved, _Weight):
            buffer = self.enter(saved.block)
            return buffer.view(saved.dtype).as_strided(saved.shape, saved.stride, saved.offset)
        if isinstance(saved, _Input):
            return self._bring(saved.key)
        return saved

    def _send(self, key: tuple[int, int], tensor: Tensor) -> None:
        size = tensor.numel() * tensor.element_size()
        if key not in self.host or self.host[key].numel() < size:
            self.host[key] = self.memory.take(size)
        into = self.host[key][:size].view(tensor.dtype).view(tensor.shape)
        if self.stream is None:
            into.copy_(tensor)
        else:
            self.stream.wait_stream(torch.cuda.current_stream(self.device))
            tensor.record_stream(self.stream)
            with torch.cuda.stream(self.stream):
                into.copy_(tensor, non_blocking=True)
        self.sent[key] = into

    def _fetch(self, key: tuple[int, int]) -> None:
        if key in self.back or key not in self.sent:
            return
        source = self.sent[key]
        if self.stream is None:
            self.back[key] = (source.to(self.device, copy=True), None)
            return
        with torch.cuda.stream(self.stream):
            tensor = torch.empty(source.shape, dtype=source.dtype, device=self.device)
            tensor.copy_(source, non_blocking=True)
            self.back[key] = (tensor, self.stream.record_event())

    def _bring(self, key: tuple[int, int]) -> Tensor:
        self._fetch(key)
        tensor, ready = self.back[key]
        if ready is not None:
            current = torch.cuda.current_stream(self.device)
            current.wait_event(ready)
            tensor.record_stream(current)
        block, number = key
        self.back.pop((block + 1, number), None)
        self._fetch((block - 1, number))
        return tensor
