"""CUDA graphs of whole training passes: where thousands of small launches bind, passes are recorded once and replayed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

from ..models.modality import Modality
from ..models.transformer import BlockOutput, LTXTransformer, PassInputs, Perturbations
from .engine import BlockEngine
from .keeping import MOST_TOKENS

WARM_UP = 2
"""Passes of a size that run as they are before one is recorded: kernels are compiled and chosen in them."""
MOST_PASSES = 32
"""Passes in all recordings: groups of micro-batches of many sizes make many combinations, and each recording holds memory."""

Ring = list[int | None]


@dataclass
class _Recording:
    """The two graphs of a group of passes and the tensors they read and write, pass by pass.

    rings: what stands in the ring of streamed blocks before the forward pass, between the two, and behind the backward pass.
    """

    inputs: list[Tensor]
    forward: torch.cuda.CUDAGraph
    backward: torch.cuda.CUDAGraph
    outputs: list[Tensor]
    gradients: list[Tensor]
    rings: tuple[Ring, Ring, Ring]


class GraphedPasses:
    """Runs a transformer's training passes from recordings, one for each group of sizes; anything else runs as it is.

    A group is what goes through each block together, most often a single pass. Recorded are its forward pass and, apart,
    its backward pass with the sum of the LoRA gradients; uploads of streamed blocks are part of them. All recordings share
    one memory pool: they never run at once.
    """

    def __init__(self, transformer: LTXTransformer, engine: BlockEngine, warn: Callable[[str, str], None]) -> None:
        self.transformer, self.engine, self.warn = transformer, engine, warn
        self.recordings: dict[tuple, _Recording] = {}
        self.seen: dict[tuple, int] = {}
        self.pool = None
        s = engine.settings
        self.usable = s.compile and not s.offload and not s.dropout and engine.device.type == "cuda"

    def __call__(self, inputs: Sequence[PassInputs]) -> list[BlockOutput]:
        keys = [self._key(*one) for one in inputs]
        if None in keys:
            return self.transformer.compute_together(inputs)
        order = sorted(range(len(keys)), key=lambda n: repr(keys[n]))  # the same sizes in another order are the same recording
        key, ordered = tuple(keys[n] for n in order), [inputs[n] for n in order]
        if not self._ready(key) or (key not in self.recordings and not self._record(key, ordered)):
            return self.transformer.compute_together(inputs)
        given = [t for video, audio, _ in ordered for t in (*_tensors(video), *_tensors(audio))]
        outputs = iter(_Replay.apply(torch.zeros((), requires_grad=True), self, self.recordings[key], given))
        found = {n: tuple(None if m is None else next(outputs) for m in inputs[n][:2]) for n in order}
        return [found[n] for n in range(len(inputs))]

    def forget(self) -> None:
        """Drop all recordings: weights have moved. They are made again when their sizes come."""
        self.recordings.clear()
        self.pool = None

    def replay(self, graph: torch.cuda.CUDAGraph, before: Ring, after: Ring) -> None:
        """Run a graph, with the ring as it was recorded from; whatever runs next finds the engine as the graph leaves it."""
        store = self.engine.store
        store.take_ring(before)
        graph.replay()
        store.end_recording(after)
        store.fork()
        self.engine.forget_expansion()

    def _key(self, video: Modality | None, audio: Modality | None, perturbations: Perturbations | None) -> tuple | None:
        """The sizes of a pass, which a recording is good for; None where none can be made."""
        if not self.usable or self.engine.store.disk is not None or perturbations is not None or not torch.is_grad_enabled():
            return None
        longest = max(m.tokens.shape[0] * m.tokens.shape[1] for m in (video, audio) if m is not None)
        searched = any(m.timestep_rows is None for m in (video, audio) if m is not None)
        if longest > MOST_TOKENS or searched:
            return None
        return tuple(None if m is None else tuple((f.name, tuple(t.shape), t.dtype) for f in fields(m) if (t := getattr(m, f.name)) is not None) for m in (video, audio))

    def _ready(self, key: tuple) -> bool:
        """Whether a group is recorded or may be now."""
        self.seen[key] = self.seen.get(key, 0) + 1
        room = key in self.recordings or sum(map(len, self.recordings)) + len(key) <= MOST_PASSES
        return self.seen[key] > WARM_UP and room and self._all_in_blocks()

    def _all_in_blocks(self) -> bool:
        """Whether every trained tensor is one that the engine collects gradients for, none with dropout."""
        trained = sum(p.requires_grad for p in self.transformer.parameters())
        return trained == sum(len(loras.parameters) for loras in self.engine.loras if loras.trained) > 0

    def _record(self, key: tuple, inputs: Sequence[PassInputs]) -> bool:
        engine, store = self.engine, self.engine.store
        kept = [(p, p.grad) for loras in engine.loras for p in loras.parameters]
        before = engine.gradient.cpu() if engine.accumulated else None  # what is there is overwritten otherwise
        ring = store.begin_recording()
        for p, _ in kept:
            p.grad = None  # the first pass that comes back writes its gradients, the others add theirs
        try:
            self.recordings[key] = self._capture([(_still(video), _still(audio), None) for video, audio, _ in inputs], ring)
        except RuntimeError as error:
            self.usable = False
            self.forget()
            self.warn("graphs.off", f"CUDA graphs are not used: {str(error).splitlines()[0][:80]}")
            return False
        finally:
            store.end_recording(ring)
            engine.forget_expansion()
            if before is not None:
                engine.gradient.copy_(before)
            for p, grad in kept:
                p.grad = grad
        return True

    def _capture(self, inputs: list[PassInputs], ring: Ring) -> _Recording:
        """Record both passes of a group from inputs that stay; the ring holds ``ring``."""
        engine, store = self.engine, self.engine.store
        forward, backward = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
        torch.cuda.synchronize(engine.device)
        torch.cuda.empty_cache()
        engine.forget_expansion()
        with torch.cuda.graph(forward, pool=self.pool, capture_error_mode="thread_local"):
            store.fork()
            outputs = [o for pair in self.transformer.compute_together(inputs) for o in pair if o is not None]
            store.join()
        self.pool = self.pool or forward.pool()
        between = list(store.holds)
        engine.forget_expansion()
        gradients = [torch.zeros_like(o) for o in outputs]
        with torch.cuda.graph(backward, pool=self.pool, capture_error_mode="thread_local"):
            store.fork()
            torch.autograd.backward(outputs, gradients)
            store.join()
        still = [t for video, audio, _ in inputs for t in (*_tensors(video), *_tensors(audio))]
        return _Recording(still, forward, backward, [o.detach() for o in outputs], gradients, (ring, between, list(store.holds)))


class _Replay(torch.autograd.Function):
    """A recorded group of passes as one node of autograd."""

    @staticmethod
    def forward(ctx, anchor: Tensor, passes: GraphedPasses, recording: _Recording, given: list[Tensor]) -> tuple[Tensor, ...]:
        ctx.passes, ctx.recording = passes, recording
        torch._foreach_copy_(recording.inputs, given)
        passes.replay(recording.forward, *recording.rings[:2])
        return tuple(o.view_as(o) for o in recording.outputs)

    @staticmethod
    def backward(ctx, *grads: Tensor) -> tuple[None, None, None, None]:
        passes, engine, recording = ctx.passes, ctx.passes.engine, ctx.recording
        for static, grad in zip(recording.gradients, grads):
            static.zero_() if grad is None else static.copy_(grad)
        accumulated = engine.accumulated
        before = engine.gradient.clone() if accumulated else None
        passes.replay(recording.backward, *recording.rings[1:])
        if accumulated:
            engine.gradient.add_(before)
        else:
            for loras in engine.loras:
                loras.show_gradients()
        return None, None, None, None


def _still(modality: Modality | None) -> Modality | None:
    """A copy that stays where it is."""
    return None if modality is None else replace(modality, **{f.name: t.clone() for f in fields(modality) if (t := getattr(modality, f.name)) is not None})


def _tensors(modality: Modality | None) -> list[Tensor]:
    return [] if modality is None else [t for f in fields(modality) if (t := getattr(modality, f.name)) is not None]
