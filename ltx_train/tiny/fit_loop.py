"""One optimizer loop for everything that is fitted: cosine rate, and on CUDA whole steps replayed as graphs."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

log = logging.getLogger(__name__)

_WARM_UP = 100
_EAGER = 3  # steps before a graph is captured: they allocate, and choose kernels


class Loop:
    """Runs ``steps`` optimizer steps; each takes one of ``losses`` (functions without arguments that draw their own batch).

    On CUDA every loss is captured with its backward pass and the update, and replayed: these networks are so small that
    launching their kernels would take most of the time. order: which loss each step takes, by its place. limit: seconds
    after which it ends early, the rate falling with the time.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], losses: Sequence[Callable[[], Tensor]], order: Sequence[int], *, steps: int, rate: float, decay: float = 0.0, limit: float | None = None) -> None:
        self.parameters, self.losses, self.order, self.steps, self.peak, self.limit = list(parameters), list(losses), list(order), steps, rate, limit
        self.cuda = self.parameters[0].is_cuda
        start = torch.tensor(rate, device="cuda") if self.cuda else rate
        self.optimizer = torch.optim.AdamW(self.parameters, lr=start, betas=(0.9, 0.99), weight_decay=decay, capturable=self.cuda)
        self.graphs: list[tuple[torch.cuda.CUDAGraph, Tensor] | None] = [None] * len(self.losses)
        self.calls = [0] * len(self.losses)

    def rate(self, step: int, done: float) -> float:
        """Linear warm-up, then a cosine to a hundredth of the peak over the share ``done``."""
        grown = min(1.0, (step + 1) / _WARM_UP)
        return self.peak * grown * (0.01 + 0.99 * 0.5 * (1 + math.cos(math.pi * min(1.0, done))))

    def run(self, name: str, report: int = 500) -> None:
        started, done = time.monotonic(), 0.0
        for step in range(self.steps):
            self._set_rate(self.rate(step, done))
            loss = self._step(self.order[step % len(self.order)])
            if step % report == 0 or step == self.steps - 1:
                log.info("%s %d of %d: %.5f", name, step, self.steps, float(loss))
            done = (step + 1) / self.steps
            if self.limit is not None and step % 20 == 19:
                float(loss)  # waits, so that the clock counts work done
                done = max(done, (time.monotonic() - started) / self.limit)
                if done >= 1:
                    log.info("%s ended at %d of %d: %.5f", name, step, self.steps, float(loss))
                    break

    def _set_rate(self, rate: float) -> None:
        for group in self.optimizer.param_groups:
            if self.cuda:
                group["lr"].fill_(rate)
            else:
                group["lr"] = rate

    def _step(self, which: int) -> Tensor:
        self.calls[which] += 1
        if not self.cuda:
            return self._whole(which)
        if self.calls[which] <= _EAGER:
            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                loss = self._whole(which)
            torch.cuda.current_stream().wait_stream(stream)
            return loss
        if self.graphs[which] is None:
            graph = torch.cuda.CUDAGraph()
            self.optimizer.zero_grad(set_to_none=True)
            with torch.cuda.graph(graph):
                loss = self._whole(which)
            self.graphs[which] = (graph, loss)
        graph, loss = self.graphs[which]
        graph.replay()
        return loss

    def _whole(self, which: int) -> Tensor:
        self.optimizer.zero_grad(set_to_none=True)
        loss = self.losses[which]()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.parameters, 1.0)
        self.optimizer.step()
        return loss.detach()


def pick(pool: Sequence[Tensor], count: int) -> list[Tensor]:
    """The same ``count`` random rows of each tensor, from torch's own generator of that device."""
    rows = torch.randint(len(pool[0]), (count,), device=pool[0].device)
    return [t[rows] for t in pool]
