"""Room for a preview: optimizer state and frozen blocks wait in host memory as far as needed; random numbers stay untouched."""

from __future__ import annotations

import gc
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import psutil
import torch
from torch import Tensor, nn

from .memory.packing import store_tensors
from .models.checkpoint import Checkpoint
from .models.codec import free_bytes
from .models.video_codec_keys import VaeLayout

HOST_RESERVE = 2 << 30
"""Bytes of host memory that parking leaves to others."""

_TILE_PIXELS = 512 * 512 * 66  # what the decoder gets room for; longer and larger clips are tiled down to it
_MARGIN = 1.25  # of the estimate of the decoder's work
_SOUND_WORK = 1 << 30


@dataclass
class Parked:
    """The bytes of one storage in host memory. Tensors and views keep pointing at the emptied storage, which is filled again."""

    storage: torch.UntypedStorage
    host: Tensor

    @classmethod
    def take(cls, storage: torch.UntypedStorage) -> Parked:
        parked = cls(storage, _bytes_of(storage).to("cpu", copy=True))
        storage.resize_(0)
        return parked

    def give_back(self) -> None:
        self.storage.resize_(self.host.numel())
        _bytes_of(self.storage).copy_(self.host)


class Room:
    """Moves what a preview does not need off the card. On other devices than CUDA it does nothing.

    free: bytes that are free on the device now. Weights and state come back bit for bit, in the same tensors.
    """

    def __init__(
        self, device: torch.device, transformer: nn.Module | None, optimizer: torch.optim.Optimizer | None = None, *, free: Callable[[], int] | None = None
    ) -> None:
        self.device, self.transformer, self.optimizer = device, transformer, optimizer
        self.free = free or (lambda: free_bytes(device))
        self.moves = device.type == "cuda"
        self._parked: list[Parked] = []

    @contextmanager
    def without_optimizer(self) -> Iterator[None]:
        """Inside, the optimizer's state is in host memory."""
        parked = []
        try:
            if self.moves and self.optimizer is not None:
                parked = [Parked.take(s) for s in _storages(_state_tensors(self.optimizer), self.device)]
                self._settle()
            yield
        finally:
            for one in parked:
                one.give_back()

    @contextmanager
    def for_work(self, needed: int) -> Iterator[None]:
        """Inside, ``needed`` bytes are free if they can be: blocks leave from the last one on, as long as the host has room."""
        try:
            self.make(needed)
            yield
        finally:
            self.restore()

    def make(self, needed: int) -> None:
        """Park blocks until ``needed`` bytes are free, or nothing more can leave."""
        if not self.moves or self.transformer is None:
            return
        self._settle()
        for tensors in reversed(_resting_places(self.transformer)):
            if self.free() >= needed:
                return
            for storage in _storages(tensors, self.device):
                if psutil.virtual_memory().available - HOST_RESERVE < storage.nbytes():
                    return
                self._parked.append(Parked.take(storage))

    def restore(self) -> None:
        """Bring the parked blocks back; the decoder must have been released."""
        if not self._parked:
            return
        self._settle()
        forget = getattr(getattr(self.transformer, "pass_runner", None), "forget", None)
        if forget is not None:
            forget()  # recordings know the weights by their old addresses
        while self._parked:
            self._parked[-1].give_back()
            self._parked.pop()

    def _settle(self) -> None:
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()


def _resting_places(transformer: nn.Module) -> list[list[Tensor]]:
    """What each block's weights rest in: an engine's buffers, or the tensors of the modules themselves."""
    store = getattr(getattr(transformer, "block_runner", None), "store", None)
    if store is not None:
        return [[buffer] for _, buffer in sorted(store.device_buffers.items())]
    return [_tensors_of(block) for block in transformer.transformer_blocks]


def _tensors_of(block: nn.Module) -> list[Tensor]:
    """Plain and quantised weights of a block; none of a block whose weights lie in shards over several ranks."""
    found = list(block.parameters())
    if any(hasattr(t, "device_mesh") for t in found):
        return []
    for module in block.modules():
        if getattr(module, "quantized", None) is not None:
            found += store_tensors(module.quantized).values()
    return found


def _storages(tensors: Iterator[Tensor] | list[Tensor], device: torch.device) -> list[torch.UntypedStorage]:
    """The distinct storages of tensors that lie on the device; paged ones are left to their owner."""
    found = {}
    for tensor in tensors:
        if tensor.device.type == device.type and not getattr(tensor, "is_paged", False) and tensor.untyped_storage().nbytes():
            found.setdefault(tensor.untyped_storage().data_ptr(), tensor.untyped_storage())
    return list(found.values())


def _bytes_of(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _state_tensors(optimizer: torch.optim.Optimizer) -> Iterator[Tensor]:
    for state in optimizer.state.values():
        for value in state.values():
            if isinstance(value, Tensor) and value.numel() > 1 and not hasattr(value, "device_mesh"):
                yield value


def decode_needs(checkpoint: Checkpoint, dtype: torch.dtype, pixels: int, *, sound: bool) -> int:
    """Bytes that decoding a sample of ``pixels`` (width x height x frames) asks for: the larger of video decoder and vocoder."""
    needs = [0]
    if pixels:
        source, layout = checkpoint.source("video_vae"), VaeLayout.of(checkpoint.config["vae"])
        weights = sum(_count(source.info(name).shape) for name in source.keys() if "decoder" in name)
        width = 13 * layout.decoder_width if layout.diffusion else 10 * layout.decoder_width
        work = width / layout.patch_size**2 * min(pixels, _TILE_PIXELS) * _MARGIN
        needs.append(int((weights + work) * dtype.itemsize))
    if sound:
        sizes = (_count(s.info(n).shape) for part in ("audio_vae", "vocoder") if checkpoint.has(part) for s in [checkpoint.source(part)] for n in s.keys())
        needs.append(4 * sum(sizes) + _SOUND_WORK)
    return max(needs)


def _count(shape: tuple[int, ...]) -> int:
    total = 1
    for size in shape:
        total *= size
    return total


@contextmanager
def untouched_random() -> Iterator[None]:
    """Keeps the training's random state as it was: what comes after draws what it would have drawn without."""
    devices = list(range(torch.cuda.device_count())) if torch.cuda.is_available() else []
    state = random.getstate()
    with torch.random.fork_rng(devices=devices):
        try:
            yield
        finally:
            random.setstate(state)
