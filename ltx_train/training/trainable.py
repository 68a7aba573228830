"""What a run trains, as the loop sees it: an adapter, or all weights of the transformer, whole or in shards."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..tensorfile import Lazy
from .parallel import Parallel

Groups = dict[str, Mapping[str, Tensor | Lazy]]


class Trainable:
    """The weights that a run trains. The optimizer moves ``parameters()``; everything else has a default for plain ones.

    sharded: every rank holds a part of each tensor, so that saving takes all ranks.
    """

    sharded = False

    def named_parameters(self) -> dict[str, nn.Parameter]:
        """Plain name -> what the optimizer moves (float32), in an order that depends on the model alone."""
        raise AssertionError("each kind has its own")

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Take over saved weights, strictly."""
        raise AssertionError("each kind has its own")

    def write(self, path: Path, step: int) -> int:
        """Save the result file, open it again and check it; the number of its modules."""
        raise AssertionError("each kind has its own")

    def warm_start(self, path: Path) -> str:
        """Start from the weights of a result file, ours or another tool's; what was taken, in words. Raises LtxTrainError when it does not fit."""
        raise AssertionError("each kind has its own")

    def other_origin(self, path: Path) -> list[str]:
        """What a result file says of its origin that is not so here, by name: none for a file of this very training."""
        return []

    def parameters(self) -> list[nn.Parameter]:
        return list(self.named_parameters().values())

    def state_dict(self) -> dict[str, Tensor]:
        """The trained tensors, no copies."""
        return {name: p.detach() for name, p in self.named_parameters().items()}

    def take_gradients(self) -> None:
        """After a backward pass: add what the network collected to the parameters' gradients, where they are not the same."""

    def average_gradients(self, parallel: Parallel) -> None:
        """Make every rank's gradients the mean over the ranks."""
        parallel.average_gradients(self.parameters())

    def share(self, parallel: Parallel) -> None:
        """Give every rank rank 0's values, so that all start alike."""
        parallel.share(self.parameters())

    def whole_squares(self, squares: Tensor) -> Tensor:
        """[parameters] squared gradient norms of the whole tensors, from those of this rank's parts."""
        return squares

    def publish(self) -> None:
        """Let the network compute with the parameters as they are now, where it computes with copies of them."""

    def whole(self, groups: Groups, state: dict[str, Any]) -> tuple[Groups, dict[str, Any]]:
        """What a snapshot holds: the groups and the JSON state with whole tensors, made one at a time when they are written."""
        return groups, state

    @contextmanager
    def writing(self, groups: Groups) -> Iterator[Groups]:
        """On the rank that writes: ``groups`` to be written inside. When that fails, the other ranks' part is still taken to its end."""
        yield groups

    def take_part(self, groups: Groups) -> None:
        """On the ranks that write nothing: give their parts while rank 0 writes ``groups``."""

    def own_part(self, tensors: Mapping[str, Tensor], rest: Mapping[str, Any]) -> tuple[Mapping[str, Tensor], Mapping[str, Any]]:
        """This rank's part of a whole optimizer state, as :func:`restore_optimizer` takes it."""
        return tensors, rest


@dataclass(frozen=True)
class GradientNorms:
    """total: the norm of all gradients before clipping; each: [parameters] of each tensor. On the device."""

    total: Tensor
    each: Tensor

    def not_finite(self, names: list[str]) -> list[str]:
        """Names of the parameters whose gradient holds NaN or infinity."""
        return [name for name, fine in zip(names, torch.isfinite(self.each).tolist()) if not fine]


@torch.no_grad()
def clip_gradients(trainable: Trainable, limit: float) -> GradientNorms:
    """Scale all gradients down together so that their norm is at most ``limit`` (0: never); the norms before.

    The factor is min(1, limit / (norm + 1e-6)), torch's rule. Nothing waits for the device.
    """
    parameters = trainable.parameters()
    grads = [p.grad for p in parameters if p.grad is not None]
    norms = iter(torch._foreach_norm(grads, 2.0, dtype=torch.float32)) if grads else iter(())
    zero = torch.zeros((), device=parameters[0].device)
    each = torch.stack([zero if p.grad is None else next(norms).to(zero.device) for p in parameters])
    squares = trainable.whole_squares(each.square())
    total = squares.sum().sqrt()
    if limit > 0 and grads:
        torch._foreach_mul_(grads, (limit / (total + 1e-6)).clamp(max=1.0))
    return GradientNorms(total, squares.sqrt())
