"""One module's update as a file holds it: its tensors, its scale, the weight change it means."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..errors import LtxTrainError

_NEEDS: dict[str, tuple[frozenset[str], ...]] = {
    "dora": (frozenset({"lora_A", "lora_B", "dora_scale"}),),
    "lora": (frozenset({"lora_A", "lora_B"}),),
    "loha": (frozenset({"hada_w1_a", "hada_w1_b", "hada_w2_a", "hada_w2_b"}),),
    "lokr": tuple(
        frozenset(one + two) for one in (("lokr_w1",), ("lokr_w1_a", "lokr_w1_b")) for two in (("lokr_w2",), ("lokr_w2_a", "lokr_w2_b"))
    ),
    "full": (frozenset({"diff"}), frozenset({"diff_b"})),
}


@dataclass(frozen=True)
class LoraModule:
    """A module's update: tensors by canonical part in float32, and the file's alpha (None: scale 1, as every reader takes it).

    kind: lora, dora, loha, lokr, or full (a plain difference ``diff`` [out, in]). ``diff_b`` [out] may go with any.
    """

    name: str
    kind: str
    tensors: Mapping[str, Tensor]
    alpha: float | None = None

    @classmethod
    def of(cls, name: str, tensors: Mapping[str, Tensor], alpha: float | None) -> LoraModule:
        """Tell the kind from the parts. Raises LtxTrainError ``lora.incomplete`` when parts are missing or make no known kind."""
        parts = frozenset(tensors) - {"diff_b"}
        for kind, sets in _NEEDS.items():
            if parts in sets:
                return cls(name, kind, tensors, alpha)
        if not parts and "diff_b" in tensors:
            return cls(name, "full", tensors, None)
        raise LtxTrainError(
            "lora.incomplete", f"The LoRA's module {name[-60:]} is incomplete: {', '.join(sorted(parts)) or 'only alpha'}.",
            "Known sets: lora_A+lora_B (lora_down+lora_up), with dora_scale, hada_w1_a/b+hada_w2_a/b, lokr_w1+lokr_w2 or their factors, diff.",
        )  # fmt: skip

    @property
    def rank(self) -> int | None:
        """The rank that alpha is divided by; None where the kind has none."""
        for part, axis in (("lora_A", 0), ("hada_w1_b", 0), ("lokr_w1_b", 0), ("lokr_w2_b", 0)):
            if part in self.tensors:
                return self.tensors[part].shape[axis]
        return None

    @property
    def scale(self) -> float:
        """The factor on the product of the factors at strength 1: alpha / rank, 1 where either is missing (ComfyUI's rule)."""
        return 1.0 if self.alpha is None or self.rank is None else self.alpha / self.rank

    @property
    def shape(self) -> tuple[int, ...]:
        """[out, in] of the weight that is changed; [out] when only a bias is."""
        t = self.tensors
        if "lora_A" in t:
            return (t["lora_B"].shape[0], t["lora_A"].shape[1])
        if "hada_w1_a" in t:
            return (t["hada_w1_a"].shape[0], t["hada_w1_b"].shape[1])
        if self.kind == "lokr":
            (a, c), (b, d) = self._kron_shapes()
            return (a * b, c * d)
        return tuple((t["diff"] if "diff" in t else t["diff_b"]).shape)

    def _kron_shapes(self) -> tuple[tuple[int, int], tuple[int, int]]:
        pair = []
        for part in ("lokr_w1", "lokr_w2"):
            t = self.tensors
            whole = tuple(t[part].shape) if part in t else (t[part + "_a"].shape[0], t[part + "_b"].shape[1])
            pair.append(whole)
        return pair[0], pair[1]

    def product(self) -> Tensor:
        """The update [out, in] in float32 with its scale, without DoRA's renormalisation."""
        t = {part: value.float() for part, value in self.tensors.items()}
        if "lora_A" in t:
            return self.scale * (t["lora_B"] @ t["lora_A"])
        if self.kind == "loha":
            return self.scale * ((t["hada_w1_a"] @ t["hada_w1_b"]) * (t["hada_w2_a"] @ t["hada_w2_b"]))
        if self.kind == "lokr":
            one = t["lokr_w1"] if "lokr_w1" in t else t["lokr_w1_a"] @ t["lokr_w1_b"]
            two = t["lokr_w2"] if "lokr_w2" in t else t["lokr_w2_a"] @ t["lokr_w2_b"]
            return self.scale * torch.kron(one, two)
        assert "diff" in t, f"{self.name} changes only a bias"
        return t["diff"]

    def apply(self, weight: Tensor, strength: float = 1.0) -> Tensor:
        """The base weight [out, in] with this update at a strength, float32.

        DoRA (paper, eq. 5): magnitude * (W + s B A) / norm over the input axis; the strength moves along the whole change.
        """
        base = weight.float()
        if self.kind != "dora":
            return base + strength * self.product()
        changed = base + self.product()
        magnitude = self.tensors["dora_scale"].float().reshape(-1, 1)
        changed = changed * (magnitude / changed.norm(dim=1, keepdim=True))
        return base + strength * (changed - base)

    def norm(self) -> float:
        """Frobenius norm of the update without building it where it is low-rank: |BA|^2 = <B^T B, A A^T>."""
        if "lora_A" in self.tensors:
            a, b = self.tensors["lora_A"].double(), self.tensors["lora_B"].double()
            return abs(self.scale) * max(0.0, ((b.T @ b) * (a @ a.T)).sum().item()) ** 0.5
        if "diff" not in self.tensors and "diff_b" in self.tensors and self.kind == "full":
            return self.tensors["diff_b"].float().norm().item()
        if self.kind == "lokr":  # norm of a Kronecker product is the product of the norms
            one = LoraModule("", "full", {"diff": self._factor("lokr_w1")}).norm()
            return abs(self.scale) * one * self._factor("lokr_w2").norm().item()
        return self.product().norm().item()

    def _factor(self, part: str) -> Tensor:
        t = self.tensors
        return t[part].float() if part in t else t[part + "_a"].float() @ t[part + "_b"].float()

    def folded(self, scale: float | None = None) -> LoraModule:
        """The same update with its scale inside the tensors and alpha = rank, so that readers with and without alpha agree.

        ``scale`` replaces the module's own factor (the trainer's, when its tensors come straight from training).
        """
        factor = self.scale if scale is None else scale
        part = next((p for p in ("lora_B", "hada_w1_a", "lokr_w1", "lokr_w1_a") if p in self.tensors), None)
        if part is None:
            return replace(self, alpha=None)
        tensors = {**self.tensors, part: self.tensors[part].float() * factor}
        return replace(self, tensors=tensors, alpha=None if self.rank is None else float(self.rank))

    def unfolded(self, scale: float) -> LoraModule:
        """The update as a trainer with factor ``scale`` holds it: folded tensors divided by it."""
        return self.folded(self.scale / scale)

    def misfit(self) -> str | None:
        """Which factors cannot be multiplied, with their shapes; None when all can."""
        t = self.tensors
        for first, second in (("lora_B", "lora_A"), *((f"{stem}_a", f"{stem}_b") for stem in ("hada_w1", "hada_w2", "lokr_w1", "lokr_w2"))):
            if first in t and second in t:
                left, right = t[first].shape, t[second].shape
                if len(left) != 2 or len(right) != 2 or left[1] != right[0] or not left[1]:
                    return f"{first} {list(left)} and {second} {list(right)}"
        return None

    def faulty_part(self) -> str | None:
        """The first part with a NaN or an infinity."""
        return next((part for part, value in self.tensors.items() if not torch.isfinite(value.float()).all()), None)
