"""Tensor names of the 2.5 diffusion video decoder: stored parts to diffusers' names."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

_DIFFUSION_INNER = (
    (".attn.qkv.to_", ".attn.to_"),
    (".attn.proj.", ".attn.to_out.0."),
    (".attn.q_norm.", ".attn.norm_q."),
    (".attn.k_norm.", ".attn.norm_k."),
    (".t_embedder.mlp.0.", ".t_embedder.timestep_embedder.linear_1."),
    (".t_embedder.mlp.2.", ".t_embedder.timestep_embedder.linear_2."),
)
# Static gates of early files: diffusers' decoder has none, so they are folded into the rows of the layer before.
_GATES = {"gate_msa": "attn.proj", "gate_mlp": "mlp.w_down", "gate_ctx": "context_proj"}


@dataclass(frozen=True)
class Part:
    """Where a diffusers tensor comes from: a stored tensor, a third of its rows, and a gate on its rows."""

    name: str
    third: int | None = None
    gate: str | None = None


def diffusion_parts(names: Iterable[str]) -> dict[str, Part]:
    """diffusers name -> stored part, for every ``decoder.`` tensor of a 2.5 diffusion decoder.

    The published file stores q, k and v as one tensor of three thirds; ``type_emb`` and ``coarse_*`` serve training only.
    """
    names = {n for n in names if n.startswith("decoder.")}
    parts = {}
    for name in names:
        leaf = name.removeprefix("decoder.").split(".")
        if leaf[0] == "type_emb" or any(p.startswith("coarse_") for p in leaf) or leaf[-1] in _GATES:
            continue
        if leaf[-2:-1] == ["qkv"]:
            for third, which in enumerate("qkv"):
                parts[name.replace(".attn.qkv.", f".attn.to_{which}.")] = Part(name, third)
            continue
        target = name
        for old, new in _DIFFUSION_INNER:
            target = target.replace(old, new)
        parts[target] = Part(name, gate=_gate_of(name, names))
    return parts


def _gate_of(name: str, names: set[str]) -> str | None:
    for gate, layer in _GATES.items():
        block, found, _ = name.partition(f".{layer}.")
        if found and f"{block}.{gate}" in names:
            return f"{block}.{gate}"
    return None
