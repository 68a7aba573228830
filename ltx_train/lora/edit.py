"""Work on finished LoRAs: merge into a checkpoint, change the rank, extract from two models, take a modality out, convert."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from ..errors import CheckpointError, ConfigError, LtxTrainError
from ..models.safetensors_file import SafetensorsFile
from ..tensorfile import Lazy, save_tensors
from .files import LoraFile, write_modules
from .layouts import LAYOUTS
from .lowrank import decompose, low_rank, rank_for
from .metadata import LoraMetadata
from .module import LoraModule
from .targets import stream_of

Progress = Callable[[int, int], None]
_PREFIXES = ("model.diffusion_model.", "diffusion_model.", "")


@dataclass(frozen=True)
class Resized:
    """A LoRA at other ranks and the relative error that each module paid."""

    lora: LoraFile
    errors: Mapping[str, float]


def resize(lora: LoraFile, rank: int | None = None, *, energy: float | None = None) -> Resized:
    """Give every module at most ``rank``, or the least rank that keeps a share ``energy`` (0..1] of its squared norm, or both.

    Raises ConfigError when neither is given, LtxTrainError ``lora.kind`` for a module that is no plain LoRA.
    """
    if (rank is None or rank < 1) and (energy is None or not 0 < energy <= 1):
        raise ConfigError("lora.resize", f"Resizing needs a rank of at least 1{'' if rank is None else f', not {rank}'}.", "Give --rank, or the share of the energy to keep (above 0, at most 1).")
    modules, errors = {}, {}
    for name, module in lora.modules.items():
        if module.kind != "lora":
            raise LtxTrainError("lora.kind", f"{name[-50:]} is of kind {module.kind}: only plain LoRA can be resized.", "Merge it, then extract a LoRA from the result.")
        folded = module.folded()
        a, b = folded.tensors["lora_A"], folded.tensors["lora_B"]
        wanted = min(x for x in (rank, a.shape[0], rank_for(a, b, energy) if energy is not None else None) if x is not None)
        small_a, small_b, errors[name] = low_rank(a, b, wanted)
        modules[name] = replace(folded, tensors={**folded.tensors, "lora_A": small_a, "lora_B": small_b}, alpha=float(small_a.shape[0]))
    top = max(m.rank or 0 for m in modules.values())
    return Resized(replace(lora, modules=modules, metadata=replace(lora.metadata, rank=top, alpha=float(top))), errors)


def strip(lora: LoraFile, keep: Iterable[str]) -> LoraFile:
    """Keep the modules of some of ``video``, ``audio``, ``cross`` (or ``cross_modal``, its target group). Raises LtxTrainError when nothing is left."""
    keep = {name.removesuffix("_modal") for name in keep}
    unknown = keep - {"video", "audio", "cross"}
    if unknown or not keep:
        raise ConfigError("lora.strip", f"Unknown modality {', '.join(sorted(unknown)) or 'none'}; known: video, audio, cross.")
    modules = {name: module for name, module in lora.modules.items() if stream_of(name) in keep}
    if not modules:
        raise LtxTrainError("lora.empty", f"The LoRA has no module of {', '.join(sorted(keep))}.", "Nothing would be left.")
    return replace(lora, modules=modules)


def convert(lora: LoraFile, path: Path, layout: str = "comfyui", dtype: torch.dtype = torch.bfloat16) -> Path:
    """Write a LoRA in a layout (comfyui, diffusers, peft, kohya, plain), its strength kept."""
    if layout not in LAYOUTS:
        raise ConfigError("lora.layout", f"Unknown LoRA layout {layout!r}; known: {', '.join(LAYOUTS)}.")
    return write_modules(path, lora.modules, lora.metadata, dtype, layout)


def _prefix_of(file: SafetensorsFile, names: Iterable[str]) -> str:
    """What stands before module names in a checkpoint. Raises LtxTrainError when none of the LoRA's modules is in it."""
    names = list(names)
    best = max(_PREFIXES, key=lambda p: sum(f"{p}{n}.weight" in file.spans for n in names))
    missing = [n for n in names if f"{best}{n}.weight" not in file.spans]
    if missing:
        raise LtxTrainError(
            "lora.key_unknown", f"{file.path.name[:40]} has no weight {missing[0][-60:]}.", f"{len(missing)} of {len(names)} modules are not in it: it is another model or another part."
        )
    return best


def _refuse_quantised(file: SafetensorsFile, stored: Iterable[str]) -> None:
    plain = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
    for name in stored:
        layer = name.removesuffix(".weight")
        scaled = any(f"{layer}.{s}" in file.spans for s in ("weight_scale", "scale_weight", "comfy_quant"))
        if file.spans[name].info.dtype not in plain or scaled:
            raise CheckpointError(
                "lora.merge_quantised", f"{file.path.name[:60]} is quantised: a LoRA cannot be merged into it.",
                f"{layer} is stored as {file.spans[name].info.dtype}. Merge into the bf16 file of the same model, and quantise the result.",
            )  # fmt: skip


def merge(checkpoint: Path, loras: Sequence[tuple[LoraFile, float]], out: Path, *, dtype: torch.dtype | None = None, progress: Progress | None = None) -> Path:
    """Write a copy of an unquantised checkpoint with LoRAs at strengths merged into it, one tensor in memory at a time.

    All other tensors and the metadata (``config`` and the rest) are kept. Sums are in float32, rounded once to the stored
    dtype (or ``dtype`` for merged weights). Raises CheckpointError for a quantised checkpoint, LtxTrainError when a module is not in it.
    """
    file = SafetensorsFile.open(checkpoint)
    odd = next((strength for _, strength in loras if not math.isfinite(strength)), None)
    if odd is not None:
        raise ConfigError("lora.strength", f"The strength {odd} is no number that a LoRA can be merged at.", "Usual are 0.5 to 1.5; negative ones turn the effect around.")
    if Path(out).resolve() == file.path.resolve():
        raise ConfigError("lora.merge_same_file", f"The merged model must not replace {file.path.name}.", "Give another output path.")
    plan: dict[str, list[tuple[LoraModule, float]]] = {}
    for lora, strength in loras:
        prefix = _prefix_of(file, lora.modules)
        for name, module in lora.modules.items():
            stored = f"{prefix}{name}.weight"
            changes = {stored: module} if set(module.tensors) != {"diff_b"} else {}
            if "diff_b" in module.tensors and f"{prefix}{name}.bias" in file.spans:
                changes[f"{prefix}{name}.bias"] = LoraModule(name, "full", {"diff": module.tensors["diff_b"]})
            for place, change in changes.items():
                shape = file.spans[place].info.shape
                if change.shape != shape:
                    raise LtxTrainError("lora.shape", f"{name[-60:]}: the LoRA is for {list(change.shape)}, the model has {list(shape)}.", "It was trained on another model.")
                plan.setdefault(place, []).append((change, strength))
    _refuse_quantised(file, plan)
    done = [0]

    def make(name: str, kind: torch.dtype) -> Tensor:
        value = file.read(name)
        if name in plan:
            total = value.float()
            for module, strength in plan[name]:
                total = total + (module.apply(value, strength) - value.float())
            value = total.to(kind)
            if not bool(torch.isfinite(value).all()):
                strengths = ", ".join(f"{strength:g}" for _, strength in plan[name])
                raise LtxTrainError("lora.not_finite", f"The model is not saved: merged at {strengths}, {name[-60:]} is no longer finite.", "Merge at a usual strength, 0.5 to 1.5.")
        done[0] += 1
        if progress is not None:
            progress(done[0], len(file.spans))
        return value

    tensors = {}
    for name, span in file.spans.items():
        kind = dtype if dtype is not None and name in plan else span.info.dtype
        tensors[name] = Lazy(span.info.shape, kind, lambda name=name, kind=kind: make(name, kind))
    save_tensors(Path(out), tensors, file.metadata, f"the merged model {Path(out).name}")
    return Path(out)


def extract(base: Path, tuned: Path, rank: int, *, like: LoraFile | None = None, progress: Progress | None = None) -> LoraFile:
    """The LoRA of ``rank`` nearest to the difference of two checkpoints, for all block weights that differ.

    Raises CheckpointError when one is quantised, LtxTrainError ``lora.empty`` when nothing differs.
    """
    one, two = SafetensorsFile.open(base), SafetensorsFile.open(tuned)
    first, second = _weights(one), _weights(two)
    names = [n for n in first if n in second and (like is None or n in like.modules)]
    _refuse_quantised(one, [first[n] for n in names])
    _refuse_quantised(two, [second[n] for n in names])
    modules = {}
    for index, name in enumerate(names):
        difference = two.read(second[name]).float() - one.read(first[name]).float()
        if difference.abs().max() > 0:
            a, b = decompose(difference, rank)
            modules[name] = LoraModule(name, "lora", {"lora_A": a, "lora_B": b}, float(a.shape[0]))
        if progress is not None:
            progress(index + 1, len(names))
    if not modules:
        raise LtxTrainError("lora.empty", f"{two.path.name[:40]} and {one.path.name[:40]} do not differ in any common linear layer.", "There is nothing to extract.")
    return LoraFile(modules, LoraMetadata(rank=rank, alpha=float(rank), base=""), ("plain",))


def _weights(file: SafetensorsFile) -> dict[str, str]:
    """Module name -> stored name of every matrix inside the transformer's blocks."""
    found = {}
    for stored, span in file.spans.items():
        start = stored.find("transformer_blocks.")
        prefix = stored[:start] if start >= 0 else None
        if prefix in _PREFIXES and stored.endswith(".weight") and len(span.info.shape) == 2:
            found[stored[start:].removesuffix(".weight")] = stored
    return found
