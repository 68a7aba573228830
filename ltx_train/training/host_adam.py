"""AdamW whose running means rest in page-locked host memory and pass over the card in chunks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn

CHUNK = 1 << 25
"""Numbers that are on the card at once, of each running mean; two chunks are in flight."""
_MEANS = ("exp_avg", "exp_avg_sq")


class HostAdamW(torch.optim.Optimizer):
    """AdamW (decoupled decay, bias correction as torch's) with its state on the host: 8 bytes a parameter less on the card.

    take: gives host buffers of so many bytes (page-locked for speed). Upload, update and download of neighbouring chunks
    overlap on a CUDA device.
    """

    def __init__(self, params: Iterable[nn.Parameter], lr: float, betas: tuple[float, float], eps: float, weight_decay: float, take=None) -> None:
        super().__init__(params, dict(lr=lr, betas=tuple(betas), eps=eps, weight_decay=weight_decay))
        self.parameters = [p for group in self.param_groups for p in group["params"]]
        self.device = self.parameters[0].device
        take = take or (lambda size: torch.empty(size, dtype=torch.uint8))
        self.chunks = _chunks([p.numel() for p in self.parameters])
        sizes = [sum(self.parameters[i].numel() for i in chunk) for chunk in self.chunks]
        self.host = [[take(4 * size).view(torch.float32).zero_() for _ in _MEANS] for size in sizes]
        self._views = {}
        for chunk, means in zip(self.chunks, self.host):
            for name, flat in zip(_MEANS, means):
                for index, part in zip(chunk, flat.split([self.parameters[i].numel() for i in chunk])):
                    self._views[index, name] = part.view(self.parameters[index].shape)
        cuda = self.device.type == "cuda"
        self.streams = [torch.cuda.Stream(self.device) for _ in range(2)] if cuda else []
        self.buffers = [[torch.empty(max(sizes), device=self.device) for _ in _MEANS] for _ in range(min(2, len(sizes)))] if cuda else []

    @torch.no_grad()
    def step(self, closure=None) -> None:
        """One update of every parameter; all must have gradients."""
        self._take_over()
        up, down = self.streams or (None, None)
        current = torch.cuda.current_stream(self.device) if self.streams else None
        returned: list[torch.cuda.Event | None] = [None, None]
        for number, (chunk, means) in enumerate(zip(self.chunks, self.host)):
            if not self.streams:
                self._update(chunk, means)
                continue
            side, size = number % len(self.buffers), means[0].numel()
            on_card = [buffer[:size] for buffer in self.buffers[side]]
            with torch.cuda.stream(up):
                if returned[side] is not None:
                    up.wait_event(returned[side])
                for into, mean in zip(on_card, means):
                    into.copy_(mean, non_blocking=True)
            current.wait_stream(up)
            self._update(chunk, on_card)
            down.wait_stream(current)
            with torch.cuda.stream(down):
                for mean, value in zip(means, on_card):
                    mean.copy_(value, non_blocking=True)
                returned[side] = down.record_event()
        if self.streams:
            current.wait_stream(down)
            up.wait_stream(down)

    def _update(self, chunk: Sequence[int], means: Sequence[Tensor]) -> None:
        group = self.param_groups[0]
        parameters = [self.parameters[i] for i in chunk]
        shapes = [p.numel() for p in parameters]
        first, second = ([part.view(p.shape) for part, p in zip(mean.split(shapes), parameters)] for mean in means)
        steps = [self.state[p]["step"] for p in parameters]
        torch._foreach_add_(steps, 1.0)
        count = float(steps[0])
        beta1, beta2 = group["betas"]
        grads = [p.grad for p in parameters]
        torch._foreach_mul_(parameters, 1 - group["lr"] * group["weight_decay"])
        torch._foreach_lerp_(first, grads, 1 - beta1)
        torch._foreach_mul_(second, beta2)
        torch._foreach_addcmul_(second, grads, grads, 1 - beta2)
        root = torch._foreach_sqrt(second)
        torch._foreach_div_(root, (1 - beta2**count) ** 0.5)
        torch._foreach_add_(root, group["eps"])
        torch._foreach_addcdiv_(parameters, first, root, -group["lr"] / (1 - beta1**count))

    def _take_over(self) -> None:
        """Zeros at the start; what a snapshot restored goes into our own buffers."""
        for index, parameter in enumerate(self.parameters):
            state = self.state[parameter]
            state.setdefault("step", torch.zeros((), device="cpu"))
            for name in _MEANS:
                view = self._views[index, name]
                if state.get(name) is not view:
                    if name in state:
                        view.copy_(state[name])
                    state[name] = view


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
