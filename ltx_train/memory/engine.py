"""The block engine: runs every block of a frozen transformer from packed weights, compiled or not, whatever rests where."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ..models.linear import Linear
from ..models.transformer import BlockOutput, LTXTransformer, run_block
from .activations import CheckpointedBlocks
from .compiling import CompiledBlock
from .packing import Packing, expand_groups, group_of
from .pinned import HostMemory
from .saved import SavedTensors
from .streaming import SLOTS, BlockStore
from .working import BlockLoras


@dataclass(frozen=True)
class EngineSettings:
    """How the blocks run; chosen by ``network.py`` from the acceleration section and the plan.

    streamed: blocks whose weights rest in host memory. compile: one graph for all blocks. budget: share of the
    activations that is kept when compiled, 0 (block inputs alone) to 1; recompute: the same for blocks that are not
    compiled, all or nothing, but for the last ``kept`` ones. offload: block inputs wait in host memory. float8: multiply
    e4m3 weights as they are. pin_limit: bytes of host memory to page-lock at most. on_disk: of
    the streamed blocks, those that rest in a file.
    """

    streamed: int = 0
    slots: int = SLOTS
    compile: bool = False
    budget: float = 0.0
    recompute: bool = True
    kept: int = 0
    offload: bool = False
    float8: bool = False
    dropout: bool = False
    backend: str = "inductor"
    pin_limit: int | None = None
    on_disk: int = 0


class BlockEngine:
    """Takes a transformer's blocks one by one into their resting places, then runs them as its ``block_runner``."""

    def __init__(self, transformer: LTXTransformer, settings: EngineSettings, device: torch.device, dtype: torch.dtype, memory: HostMemory | None = None) -> None:
        self.transformer, self.settings, self.device, self.dtype = transformer, settings, device, dtype
        self.memory = memory or HostMemory(pin=device.type == "cuda", limit=settings.pin_limit)
        self.packing: Packing | None = None
        self.store: BlockStore | None = None
        self.saved: SavedTensors | None = None
        self.plain: Tensor | None = None
        self.loras: list[BlockLoras] = []
        self.gradient: Tensor | None = None
        self.passes, self.turn, self._at = 1, 0, -1
        self._linears: list[Linear] = []
        self._adapted: tuple[nn.Module | None, ...] | None = None
        self._expanded: int | None = None
        self._expand = torch.compile(expand_groups, dynamic=False) if settings.compile and settings.backend == "inductor" else expand_groups
        compiled = CompiledBlock(settings.budget, settings.backend) if settings.compile else None
        layers = len(transformer.transformer_blocks)
        if compiled is not None:
            self.run: Callable[..., BlockOutput] = compiled
        elif settings.recompute:
            self.run = CheckpointedBlocks(self._turn, layers, settings.kept, settings.dropout, reentrant=settings.offload)
        else:
            self.run = self._turn
        self.hooked = False

    # -- taking the weights --
    def take(self, index: int, block: nn.Module) -> None:
        """Move block ``index``, whose weights are loaded, to where it rests. The first one tells the layout."""
        if self.packing is None:
            self._lay_out(block)
        self.packing.take(block, self.store.rest(index), self.device)

    def _lay_out(self, block: nn.Module) -> None:
        s = self.settings
        self.packing = Packing(block, self.dtype, native=s.float8)
        size, layers = self.packing.rest_bytes, len(self.transformer.transformer_blocks)
        self.store = BlockStore(layers, size, self.device, resident=max(0, layers - s.streamed), slots=s.slots, on_disk=s.on_disk, memory=self.memory)
        if self.packing.expands:
            self.plain = torch.zeros(self.packing.plain_bytes, dtype=torch.uint8, device=self.device)
        shared = [self.plain] if self.plain is not None else self.store.buffers() if self.store.streams else []
        self.saved = SavedTensors(self.enter, shared, self.device, offload=s.offload, memory=self.memory)
        self.hooked = bool(shared) or s.offload

    @property
    def resting(self) -> frozenset[int]:
        """Addresses of the weights that rest in host memory."""
        blocks = self.transformer.transformer_blocks
        return frozenset(p.data_ptr() for index in self.store.host_buffers for p in blocks[index].parameters() if _inside(p, self.store.host_buffers[index]))

    def enter(self, index: int) -> Tensor:
        """Block ``index``'s weights in place: uploaded, and expanded where they are quantised; the buffer they stand in."""
        buffer = self.store.enter(index)
        if self.plain is None:
            return buffer
        if self._expanded != index:
            self.packing.expand(self.transformer.transformer_blocks[index], buffer, self.plain, self._expand)
            self._expanded = index
        return self.plain

    def forget_expansion(self) -> None:
        """What stands in the buffer of plain weights is not known any more."""
        self._expanded = None

    @property
    def accumulated(self) -> bool:
        """Whether the parameters hold gradients already."""
        return any(loras.parameters[0].grad is not None for loras in self.loras if loras.trained)

    # -- running --
    def expect(self, passes: int) -> None:
        """So many passes will go through each block one after another: it is entered once for all of them."""
        self.passes, self.turn, self._at = passes, 0, -1

    def __call__(self, block, index, video, audio, video_inputs, audio_inputs, keep) -> BlockOutput:
        self.turn = (self.turn + 1) % self.passes if index == self._at else 0
        self._at = index
        if index == 0:
            video, audio = self._begin(video, audio)
        self.loras[index].load(again=self.turn > 0)
        with self._hooks(index, video, audio):
            out = self._enter_and_run(block, index, video, audio, video_inputs, audio_inputs, keep)
        if self.settings.compile and self.turn == self.passes - 1:
            self.loras[index].unload()
        if index == len(self.loras) - 1 and self.turn == self.passes - 1:
            self.store.leave()
        return out

    def _hooks(self, index: int, video: Tensor | None, audio: Tensor | None) -> AbstractContextManager:
        s = self.settings
        recomputed = not s.compile and s.recompute and index < len(self.loras) - s.kept
        if not self.hooked or not torch.is_grad_enabled() or (recomputed and not s.offload):
            return nullcontext()  # a recomputed block saves its inputs alone, and enters its weights again by itself
        return self.saved.of(index, self.turn, video, audio)

    def _enter_and_run(self, block, index, *inputs) -> BlockOutput:
        if self.settings.compile:
            self.enter(index)
        return self.run(block, index, *inputs)

    def _turn(self, block, index, *inputs) -> BlockOutput:
        """A block that is not compiled: also what recomputing it does."""
        self.enter(index)
        return run_block(block, index, *inputs)

    def _begin(self, video: Tensor | None, audio: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
        """A forward pass starts. Its first inputs ask for gradients like all others, so that one graph serves every block."""
        if self.turn == 0:
            self._group_layers()
            self.saved.start()
        if not torch.is_grad_enabled() or not any(loras.trained for loras in self.loras):
            return video, audio
        return tuple(t if t is None or t.requires_grad else t.detach().requires_grad_() for t in (video, audio))

    # -- grouping layers and adapters --
    def _group_layers(self) -> None:
        """Join layers and their LoRAs into common products; again whenever adapters were put on or exchanged."""
        blocks = self.transformer.transformer_blocks
        if not self._linears:  # looked for once: a walk through all modules takes longer than launching a block
            self._linears = [layer for block in blocks for layer in block.modules() if isinstance(layer, Linear)]
        adapted = tuple(layer.lora for layer in self._linears)
        if self._adapted is not None and all(a is b for a, b in zip(self._adapted, adapted)):
            return
        self._adapted = adapted
        grouped = [self._groups_of(index, block) for index, block in enumerate(blocks)]
        counts = [sum(BlockLoras.count(layers) for _, layers in groups) for groups in grouped]
        trained = any(lora is not None and lora.A.requires_grad for lora in adapted)
        master = torch.empty(sum(counts), dtype=torch.float32, device=self.device)
        self.gradient = torch.zeros_like(master) if trained else None
        parts = zip(master.split(counts), [None] * len(counts) if self.gradient is None else self.gradient.split(counts))
        self.loras = [BlockLoras(groups, m, g, self.dtype) for groups, (m, g) in zip(grouped, parts)]

    def _groups_of(self, index: int, block: nn.Module) -> list:
        found = []
        plain = self.store.at(index) if self.plain is None else self.plain
        for packed, matrix in zip(self.packing.groups, self.packing.matrices(plain)):
            layers = [block.get_submodule(member.name) for member in packed.members]
            if not all(isinstance(layer, Linear) for layer in layers):
                continue  # an adapter kind that computes its layers itself
            group = layers[0].group or group_of(layers, self.settings.float8)
            group.lora_scales = tuple(1.0 if layer.lora is None else layer.lora.scale for layer in layers)
            group.ranks = tuple(0 if layer.lora is None else layer.lora.rank for layer in layers)
            group.weight = matrix
            layers[0].group = group
            found.append((group, layers))
        return found

    def close(self) -> None:
        """Give page-locked memory back, and the file of blocks on the disk."""
        if self.store is not None and self.store.disk is not None:
            self.store.disk.close()
        self.memory.close()


def _inside(tensor: Tensor, buffer: Tensor) -> bool:
    return buffer.data_ptr() <= tensor.data_ptr() < buffer.data_ptr() + buffer.numel()
