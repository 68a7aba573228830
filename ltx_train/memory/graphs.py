"""CUDA graphs of whole training passes: where thousands of small launches bind, a pass is recorded once and replayed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

from ..models.modality import Modality
from ..models.transformer import BlockOutput, LTXTransformer, Perturbations
from .engine import BlockEngine
from .keeping import MOST_TOKENS

WARM_UP = 2
"""Passes of a size that run as they are before one is recorded: kernels are compiled and chosen in them."""


@dataclass
class _Recording:
    """The two graphs of one size, the tensors they read and write, and the ring as they expect it."""

    video: Modality | None
    audio: Modality | None
    forward: torch.cuda.CUDAGraph
    backward: torch.cuda.CUDAGraph
    outputs: list[Tensor]
    gradients: list[Tensor]
    ring: list[int | None]


class GraphedPasses:
    """Runs a transformer's training passes from recordings, one a size; anything else runs as it is.

    Recorded are the forward pass and, apart, the backward pass with the LoRA gradients; uploads of streamed blocks are part
    of them. All recordings share one memory pool: they never run at once.
    """

    def __init__(self, transformer: LTXTransformer, engine: BlockEngine, warn: Callable[[str, str], None]) -> None:
        self.transformer, self.engine, self.warn = transformer, engine, warn
        self.recordings: dict[tuple, _Recording] = {}
        self.seen: dict[tuple, int] = {}
        self.pool = None
        s = engine.settings
        self.usable = s.compile and not s.offload and not s.dropout and engine.device.type == "cuda"

    def __call__(self, video: Modality | None, audio: Modality | None, perturbations: Perturbations | None) -> BlockOutput:
        key = self._key(video, audio, perturbations)
        if key is None or not self._ready(key):
            return self.transformer.compute(video, audio, perturbations)
        if key not in self.recordings and not self._record(key, video, audio):
            return self.transformer.compute(video, audio, perturbations)
        outputs = list(_Replay.apply(torch.zeros((), requires_grad=True), self, self.recordings[key], _tensors(video) + _tensors(audio)))
        return (outputs.pop(0) if video is not None else None), (outputs.pop(0) if audio is not None else None)

    def forget(self) -> None:
        """Drop all recordings: weights have moved. They are made again when their sizes come."""
        self.recordings.clear()
        self.pool = None

    def _key(self, video: Modality | None, audio: Modality | None, perturbations: Perturbations | None) -> tuple | None:
        """What a recording is good for; None where none can be made."""
        if not self.usable or self.engine.store.disk is not None or perturbations is not None or not torch.is_grad_enabled():
            return None
        longest = max(m.tokens.shape[0] * m.tokens.shape[1] for m in (video, audio) if m is not None)
        searched = any(m.timestep_rows is None for m in (video, audio) if m is not None)
        if longest > MOST_TOKENS or searched:
            return None
        return tuple(None if m is None else tuple((f.name, tuple(t.shape), t.dtype) for f in fields(m) if (t := getattr(m, f.name)) is not None) for m in (video, audio))

    def _ready(self, key: tuple) -> bool:
        self.seen[key] = self.seen.get(key, 0) + 1
        return self.seen[key] > WARM_UP and self._all_in_blocks()

    def _all_in_blocks(self) -> bool:
        """Whether every trained tensor is one that the engine collects gradients for, none with dropout."""
        trained = sum(p.requires_grad for p in self.transformer.parameters())
        return trained == sum(len(loras.parameters) for loras in self.engine.loras if loras.trained) > 0

    def _record(self, key: tuple, video: Modality | None, audio: Modality | None) -> bool:
        engine, store = self.engine, self.engine.store
        still = lambda m: None if m is None else replace(m, **{f.name: t.clone() for f in fields(m) if (t := getattr(m, f.name)) is not None})  # noqa: E731
        video, audio = still(video), still(audio)
        kept = [(p, p.grad) for loras in engine.loras for p in loras.parameters]
        before = engine.gradient.cpu() if engine.accumulated else None  # what is there is overwritten otherwise
        ring = store.begin_recording()
        for p, _ in kept:
            p.grad = None
        engine.forget_expansion()
        forward, backward = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
        try:
            torch.cuda.synchronize(engine.device)
            torch.cuda.empty_cache()
            with torch.cuda.graph(forward, pool=self.pool, capture_error_mode="thread_local"):
                store.fork()
                outputs = [o for o in self.transformer.compute(video, audio, None) if o is not None]
                store.join()
            self.pool = self.pool or forward.pool()
            gradients = [torch.zeros_like(o) for o in outputs]
            with torch.cuda.graph(backward, pool=self.pool, capture_error_mode="thread_local"):
                store.fork()
                torch.autograd.backward(outputs, gradients)
                store.join()
        except RuntimeError as error:
            self.usable = False
            self.warn("graphs.off", f"CUDA graphs are not used: {str(error).splitlines()[0][:80]}")
            return False
        finally:
            store.end_recording(ring)
            engine.forget_expansion()
            if before is not None:
                engine.gradient.copy_(before)
            for p, grad in kept:
                p.grad = grad
        self.recordings[key] = _Recording(video, audio, forward, backward, [o.detach() for o in outputs], gradients, ring)
        return True


class _Replay(torch.autograd.Function):
    """A recorded pass as one node of autograd."""

    @staticmethod
    def forward(ctx, anchor: Tensor, passes: GraphedPasses, recording: _Recording, given: list[Tensor]) -> tuple[Tensor, ...]:
        ctx.passes, ctx.recording = passes, recording
        torch._foreach_copy_(_tensors(recording.video) + _tensors(recording.audio), given)
        passes.engine.store.take_ring(recording.ring)
        recording.forward.replay()
        return tuple(o.view_as(o) for o in recording.outputs)

    @staticmethod
    def backward(ctx, *grads: Tensor) -> tuple[None, None, None, None]:
        engine, recording = ctx.passes.engine, ctx.recording
        for static, grad in zip(recording.gradients, grads):
            static.zero_() if grad is None else static.copy_(grad)
        accumulated = engine.accumulated
        before = engine.gradient.clone() if accumulated else None
        recording.backward.replay()
        engine.forget_expansion()
        if accumulated:
            engine.gradient.add_(before)
        else:
            for loras in engine.loras:
                loras.show_gradients()
        return None, None, None, None


def _tensors(modality: Modality | None) -> list[Tensor]:
    return [] if modality is None else [t for f in fields(modality) if (t := getattr(modality, f.name)) is not None]
