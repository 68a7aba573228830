"""Room on the card for a preview: optimizer state and frozen blocks wait in host memory as far as needed, then come back."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import psutil
import torch
from torch import nn

from .models.checkpoint import Checkpoint
from .models.codec import free_bytes
from .models.video_codec_keys import VaeLayout

HOST_RESERVE = 2 << 30
"""Bytes of host memory that parking leaves to others."""

_TILE_PIXELS = 512 * 512 * 66  # what the decoder gets room for; longer and larger clips are tiled down to it
_MARGIN = 1.25  # of the estimate of the decoder's work
_SOUND_WORK = 1 << 30


class Room:
    """Moves what a preview does not need off the card. On other devices than CUDA it does nothing.

    free: bytes that are free on the device now. Weights and state come back bit for bit, in the same tensors.
    """

    def __init__(
        self, device: torch.device, transformer: nn.Module | None, optimizer: torch.optim.Optimizer | None = None, *, free: Callable[[], int] | None = None
    ) -> None:
        self.device, self.transformer, self.optimizer = device, transformer, optimizer
        self.free = free or (lambda: free_bytes(device))
        self._blocks: list[nn.Module] = []

    @contextmanager
    def without_optimizer(self) -> Iterator[None]:
        """Inside, the optimizer's state is in host memory."""
        parked = [t for t in _state_tensors(self.optimizer) if _is_on(t, self.device)] if self.device.type == "cuda" and self.optimizer else []
        try:
            for tensor in parked:
                tensor.data = tensor.data.to("cpu")
            self._settle()
            yield
        finally:
            for tensor in parked:
                tensor.data = tensor.data.to(self.device)

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
        if self.device.type != "cuda" or self.transformer is None:
            return
        self._settle()
        for block in reversed(self.transformer.transformer_blocks):
            if self.free() >= needed or psutil.virtual_memory().available - HOST_RESERVE < _bytes(block):
                return
            if block not in self._blocks and _lies_on(block, self.device):
                block.to("cpu")
                self._blocks.append(block)

    def restore(self) -> None:
        """Bring the parked blocks back; the decoder must have been released."""
        if self._blocks:
            self._settle()
        while self._blocks:
            self._blocks[-1].to(self.device)
            self._blocks.pop()

    def _settle(self) -> None:
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()


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


def _bytes(module: nn.Module) -> int:
    return sum(t.numel() * t.element_size() for t in module.parameters())


def _is_on(tensor: torch.Tensor, device: torch.device) -> bool:
    return tensor.device.type == device.type and not getattr(tensor, "is_paged", False)


def _lies_on(block: nn.Module, device: torch.device) -> bool:
    """Whether a block lies on the card as a whole; streamed and packed blocks are moved by their own keepers."""
    if any(getattr(m, "group", None) is not None for m in block.modules()):
        return False
    tensors = list(block.parameters())
    if any(hasattr(t, "device_mesh") for t in tensors):
        return False  # shards of several ranks stay where they are
    return bool(tensors) and all(_is_on(t, device) for t in tensors)


def _state_tensors(optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    for state in optimizer.state.values():
        for value in state.values():
            if isinstance(value, torch.Tensor) and value.numel() > 1:
                yield value
