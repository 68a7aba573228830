"""AdamW in one kernel: where all parameters and all gradients are views of one flat tensor each, so are its running means."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

_MEANS = ("exp_avg", "exp_avg_sq")


class FlatAdamW(torch.optim.AdamW):
    """torch's fused AdamW, launched once instead of once for every thirty tensors, with no loop over their states.

    The engine keeps LoRA masters and their gradients in one flat tensor each (memory/working.py), of which the parameters
    and their ``.grad`` are views. Where that is not so, or a parameter has no gradient, torch's own step is taken. States
    are kept by parameter as torch keeps them (views here), so that snapshots are the same.
    """

    def __init__(self, params, **settings) -> None:
        super().__init__(params, **settings, fused=True)
        self.parameters: list[Tensor] = [p for group in self.param_groups for p in group["params"]]
        self.even = len(self.param_groups) == 1 and not settings.get("amsgrad")  # every parameter has made as many steps
        self.means: list[Tensor] = []
        self.counts: Tensor | None = None
        self._seen: tuple[int, ...] = ()
        self._flat: tuple[Tensor, Tensor] | None = None
        self._places: list[int] = []  # of the parameters in the flat tensor, now and when the means were laid out
        self._laid_out: list[int] = []

    @torch.no_grad()
    def step(self, closure=None) -> None:
        """One update; see ``optim.step_unless`` for ``found_inf``."""
        flat = self._flat_now() if self.even and closure is None else None
        if flat is None:
            self.even = self.even and all(p.grad is not None for p in self.parameters)
            super().step(closure)
            return
        weights, gradient = flat
        self._adopt(weights)
        group, bad = self.param_groups[0], getattr(self, "found_inf", None)
        self.counts.add_(1.0)
        torch._fused_adamw_(
            [weights], [gradient], [self.means[0]], [self.means[1]], [], [self.counts[0]], lr=group["lr"], beta1=group["betas"][0], beta2=group["betas"][1],
            weight_decay=group["weight_decay"], eps=group["eps"], amsgrad=False, maximize=False, grad_scale=getattr(self, "grad_scale", None), found_inf=bad,
        )  # fmt: skip
        if bad is not None:
            self.counts.sub_(bad)

    def _flat_now(self) -> tuple[Tensor, Tensor] | None:
        """(weights, gradient) [n], if the parameters and their gradients fill one tensor each in the same order."""
        ends = (self.parameters[0], self.parameters[-1])
        if any(p.grad is None for p in self.parameters):
            return None
        seen = tuple(t.data_ptr() for p in ends for t in (p, p.grad))
        if seen != self._seen:
            self._seen = seen
            found = [one_tensor(self.parameters), one_tensor([p.grad for p in self.parameters])]
            together = all(found) and found[0][1] == found[1][1]
            self._flat = (found[0][0], found[1][0]) if together else None
            self._places = found[0][1] if together else []
        return self._flat

    def _adopt(self, weights: Tensor) -> None:
        """Running means as views of flat ones, in the order of the weights; what a snapshot or a stay on the host put there is taken in."""
        first = self.state[self.parameters[0]]
        if self.means and first.get(_MEANS[0]) is self._views[0][0] and (self._laid_out is self._places or self._laid_out == self._places):
            return
        self._laid_out = self._places
        self.means = [torch.zeros_like(weights) for _ in _MEANS]
        self.counts = torch.zeros(len(self.parameters), dtype=torch.float32, device=weights.device)
        self._views = [[_like(mean, weights, p) for mean in self.means] for p in self.parameters]
        known = [self.state[p].get("step") for p in self.parameters]
        if all(step is not None for step in known):
            self.counts.copy_(torch.stack([step.to(weights.device) for step in known]))
        for number, p in enumerate(self.parameters):
            for name, view in zip(_MEANS, self._views[number]):
                if name in self.state[p]:
                    view.copy_(self.state[p][name])
                self.state[p][name] = view
            self.state[p]["step"] = self.counts[number]


def one_tensor(parts: Sequence[Tensor]) -> tuple[Tensor, list[int]] | None:
    """(the flat tensor that the parts fill without gaps, each one's place in it), or None."""
    storage = parts[0].untyped_storage()
    if any(t.untyped_storage().data_ptr() != storage.data_ptr() or not t.is_contiguous() or t.dtype != torch.float32 for t in parts):
        return None
    first = min(t.storage_offset() for t in parts)
    places = [t.storage_offset() - first for t in parts]
    end = 0
    for place, size in sorted((place, t.numel()) for place, t in zip(places, parts)):
        if place != end:
            return None
        end += size
    return parts[0].detach().as_strided((end,), (1,), first), places


def _like(flat: Tensor, weights: Tensor, parameter: Tensor) -> Tensor:
    """The view of ``flat`` that stands where ``parameter`` stands in ``weights``."""
    start = parameter.storage_offset() - weights.storage_offset()
    return flat[start : start + parameter.numel()].view(parameter.shape)


FlatAdamW.__name__ = "AdamW"  # snapshots name an optimizer by what it computes
