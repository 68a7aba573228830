"""Which activations a compiled block keeps within its budget: those that are dearest to compute again, a byte."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

MOST_TOKENS = 3000
"""Of a pass that is recorded as a CUDA graph: above it the card is slower than the launches, and recording would only hold memory."""
HINT = 4096
"""Tokens assumed where a size is not known while compiling."""
ATTENTION = ("_scaled_dot_product_cudnn_attention", "_scaled_dot_product_flash_attention_for_cpu")
"""Kernels that torch's partitioner takes for something cheap, which it would always compute again without asking us."""


def cost_per_number(node: Any) -> float:
    """Multiplications for one number of a node's result: what computing it again costs, over what keeping it costs.

    A matrix product does one for each input feature; attention two for each key. Attention runs at a somewhat lower rate,
    which keeps it in front of products where both are equal.
    """
    name = str(node.target)
    if "scaled_dot_product" in name:
        return 2.2 * _length(node.args[1].meta["val"].shape[-2])
    shapes = [a.meta["val"].shape for a in node.args if isinstance(a, torch.fx.Node) and isinstance(a.meta.get("val"), torch.Tensor)]
    if "mm" in name and shapes:
        inner = _length(shapes[-1][-2]) if "addmm" in name else _length(shapes[0][-1])
        return inner * (0.6 if "scaled" in name else 1.0)
    return 1.0


def _length(size: int | torch.SymInt) -> int:
    if isinstance(size, int):
        return size
    hint = getattr(size.node, "hint", None)
    return int(hint) if hint is not None else HINT


def keep_dearest(memory: Sequence[float], costs: Sequence[float], limit: float) -> tuple[list[int], list[int]]:
    """(indices kept, indices computed again): the dearest first, as long as they fit; a dear one that does not fit is passed over."""
    kept, again, used = [], [], 0.0
    for index in sorted(range(len(memory)), key=lambda i: -costs[i]):
        if used + memory[index] <= limit:
            kept.append(index)
            used += memory[index]
        else:
            again.append(index)
    return kept, again


def use_in_partitioner(config: Any) -> bool:
    """Let AOTAutograd's partitioner ask us, where this torch has a place for it; else it goes by its own estimate."""
    try:
        from torch._inductor.custom_graph_pass import CustomKnapsackSolver
    except ImportError:
        return False

    class DearestFirst(CustomKnapsackSolver):
        def __call__(self, memory, joint_graph, max_memory, node_info, all_recomputable_banned_nodes):
            return keep_dearest(memory, [cost_per_number(node) for node in all_recomputable_banned_nodes], max_memory)

        def uuid(self) -> str:
            return "ltx_train dearest first 2"

    config.activation_memory_budget_solver = DearestFirst()
    _ask_about_attention()
    return True


def _ask_about_attention() -> None:
    """Put the attention kernels among those that the partitioner asks about."""
    from torch._functorch import partitioners

    known = getattr(partitioners, "get_default_op_list", None)
    if known is None or hasattr(known, "known"):
        return

    def with_attention():
        kinds = known()
        for name in ATTENTION:
            if hasattr(torch.ops.aten, name):
                kinds.compute_intensive_ops.add(getattr(torch.ops.aten, name))
        return kinds

    with_attention.known = known
    partitioners.get_default_op_list = with_attention
