"""AdamW whose running means rest in page-locked host memory and pass over the card in chunks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ..memory.pinned import clear
from .flat_adam import one_tensor

CHUNK = 1 << 25
"""Numbers that are on the card at once, of each running mean; two chunks are in flight."""
TAKERS = 3
"""Buffers that are taken at a time."""
_MEANS = ("exp_avg", "exp_avg_sq")


@dataclass(frozen=True)
class _Chunk:
    """Neighbouring parameters whose means travel together. means: [numbers] each, on the host; first: where a flat layout has it."""

    parameters: tuple[nn.Parameter, ...]
    means: tuple[Tensor, Tensor]
    first: int

    @property
    def size(self) -> int:
        return self.means[0].numel()

    def views(self, flat: Tensor) -> list[Tensor]:
        """The parameters' parts of a tensor that is laid out like the means."""
        return [part.view(p.shape) for part, p in zip(flat.split([p.numel() for p in self.parameters]), self.parameters)]


class HostAdamW(torch.optim.Optimizer):
    """torch's fused AdamW with its state on the host: 8 bytes a parameter less on the card.

    take: gives host buffers of so many bytes (page-locked for speed); several threads call it. Upload, update and download
    of neighbouring chunks overlap on a CUDA device. Where parameters and gradients are views of one flat tensor each (memory/working.py), a chunk
    is one kernel. Like all fused kernels it stays where it is after bad numbers: see ``optim.step_unless``.
    """

    def __init__(self, params: Iterable[nn.Parameter], lr: float, betas: tuple[float, float], eps: float, weight_decay: float, take=None) -> None:
        super().__init__(params, dict(lr=lr, betas=tuple(betas), eps=eps, weight_decay=weight_decay))
        self.parameters = [p for group in self.param_groups for p in group["params"]]
        self.device = self.parameters[0].device
        self.take = take or (lambda size: torch.empty(size, dtype=torch.uint8))
        self.counts = torch.zeros(len(self.parameters), dtype=torch.float32, device=self.device)
        self.chunks: list[_Chunk] = []
        self._order: list[int] = []
        self._ends: tuple[int, ...] = ()
        self._found: tuple[Tensor, Tensor] | None = None
        self.streams = [torch.cuda.Stream(self.device) for _ in range(2)] if self.device.type == "cuda" else []
        self.buffers: list[list[Tensor]] = []

    @torch.no_grad()
    def step(self, closure=None) -> None:
        """One update of every parameter; all must have gradients."""
        flat = self._flat()
        self._take_over()
        bad = getattr(self, "found_inf", None)
        self.counts.add_(1.0)
        if self.streams:
            self._pass_over_the_card(flat, bad)
        else:
            for chunk in self.chunks:
                self._update(chunk, chunk.means, flat, bad)
        if bad is not None:
            self.counts.sub_(bad)

    def _pass_over_the_card(self, flat: tuple[Tensor, Tensor] | None, bad: Tensor | None) -> None:
        up, down = self.streams
        current = torch.cuda.current_stream(self.device)
        returned: list[torch.cuda.Event | None] = [None, None]
        for number, chunk in enumerate(self.chunks):
            side = number % len(self.buffers)
            on_card = [buffer[: chunk.size] for buffer in self.buffers[side]]
            with torch.cuda.stream(up):
                if returned[side] is not None:
                    up.wait_event(returned[side])
                for into, mean in zip(on_card, chunk.means):
                    into.copy_(mean, non_blocking=True)
            current.wait_stream(up)
            self._update(chunk, on_card, flat, bad)
            down.wait_stream(current)
            with torch.cuda.stream(down):
                for mean, value in zip(chunk.means, on_card):
                    mean.copy_(value, non_blocking=True)
                returned[side] = down.record_event()
        current.wait_stream(down)
        up.wait_stream(down)

    def _update(self, chunk: _Chunk, means: Sequence[Tensor], flat: tuple[Tensor, Tensor] | None, bad: Tensor | None) -> None:
        group = self.param_groups[0]
        if flat is not None:
            weights, grads, first, second = ([t] for t in (*(part[chunk.first : chunk.first + chunk.size] for part in flat), *means))
        else:
            weights, grads = list(chunk.parameters), [p.grad for p in chunk.parameters]
            first, second = (chunk.views(mean) for mean in means)
        torch._fused_adamw_(
            weights, grads, first, second, [], [self.counts[0]] * len(weights), lr=group["lr"], beta1=group["betas"][0], beta2=group["betas"][1],
            weight_decay=group["weight_decay"], eps=group["eps"], amsgrad=False, maximize=False, grad_scale=getattr(self, "grad_scale", None), found_inf=bad,
        )  # fmt: skip

    # -- where everything lies --
    def prepare(self, progress: Callable[[int, int], None] | None = None) -> None:
        """Take the means' host memory now, where the order of the parameters is known before there are gradients; else the first step does.

        progress: told the bytes that are there, and those of all means.
        """
        if not self._order and one_tensor(self.parameters) is None:
            self._lay_out(list(range(len(self.parameters))), progress)

    def _flat(self) -> tuple[Tensor, Tensor] | None:
        """(weights, gradient) [numbers] where the parameters and their gradients fill one tensor each in the same order; lays the means out alike."""
        ends = tuple(t.data_ptr() for p in (self.parameters[0], self.parameters[-1]) for t in (p, p.grad))
        if ends == self._ends:
            return self._found
        self._ends = ends
        found = [one_tensor(self.parameters), one_tensor([p.grad for p in self.parameters])]
        places = found[0][1] if all(found) and found[0][1] == found[1][1] else None
        order = list(range(len(self.parameters)))
        if places is not None:
            order.sort(key=places.__getitem__)
        if order != self._order:
            self._lay_out(order)
        self._found = None if places is None else (found[0][0], found[1][0])
        return self._found

    def _lay_out(self, order: list[int], progress: Callable[[int, int], None] | None = None) -> None:
        """Host buffers, and two chunks' room on the card, in this order of the parameters."""
        sizes = [self.parameters[index].numel() for index in order]
        parts = _chunks(sizes)
        self.chunks, first = [], 0
        with ThreadPoolExecutor(TAKERS, "means") as pool:  # pages are found for one buffer while those of another are locked
            taken = [[pool.submit(self._take, 4 * sum(sizes[n] for n in part)) for _ in _MEANS] for part in parts]
            try:
                for part, futures in zip(parts, taken):
                    means = tuple(future.result() for future in futures)
                    clear(means)
                    self.chunks.append(_Chunk(tuple(self.parameters[order[n]] for n in part), tuple(mean.view(torch.float32) for mean in means), first))
                    first += self.chunks[-1].size
                    if progress is not None:
                        progress(4 * len(_MEANS) * first, 4 * len(_MEANS) * sum(sizes))
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)  # not the rest of what there is no memory for
                raise
        self._order = order
        self._views = {(p, name): view for chunk in self.chunks for name, mean in zip(_MEANS, chunk.means) for p, view in zip(chunk.parameters, chunk.views(mean))}
        if self.streams:
            largest = max(chunk.size for chunk in self.chunks)
            self.buffers = [[torch.empty(largest, device=self.device) for _ in _MEANS] for _ in range(min(2, len(self.chunks)))]

    def _take(self, size: int) -> Tensor:
        """A host buffer, from a thread: each has a current device of its own, the first card if nobody says so."""
        with torch.cuda.device(self.device) if self.device.type == "cuda" else nullcontext():
            return self.take(size)

    def _take_over(self) -> None:
        """Zeros at the start; what a snapshot restored, or lay in another order, goes into our own buffers."""
        ends = (self.parameters[0], self.parameters[-1])
        if all(self.state[p].get(name) is self._views[p, name] for p in ends for name in _MEANS):
            return
        for number, parameter in enumerate(self.parameters):
            state, count = self.state[parameter], self.counts[number]
            if not self._counts(state.get("step"), count):
                count.fill_(float(state.get("step", 0.0)))
                state["step"] = count
            for name in _MEANS:
                view = self._views[parameter, name]
                if state.get(name) is not view:
                    if name in state:
                        view.copy_(state[name])
                    state[name] = view

    @staticmethod
    def _counts(known: Tensor | None, count: Tensor) -> bool:
        """Whether a state's step is already our own counter."""
        return known is not None and known.device == count.device and known.data_ptr() == count.data_ptr()


def _chunks(sizes: Sequence[int], limit: int = CHUNK) -> list[list[int]]:
    """Neighbouring parameters together, as many as fit into a chunk (a larger one alone)."""
    chunks: list[list[int]] = []
    used = limit
    for index, size in enumerate(sizes):
        if used + size > limit:
            chunks.append([])
            used = 0
        chunks[-1].append(index)
        used += size
    return chunks


HostAdamW.__name__ = "AdamW"  # snapshots name an optimizer by what it computes: a run goes on with its state wherever that rests
