"""LoRA files: written for every reader to play alike, read from any layout, checked before they count as saved."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from torch import Tensor

from ..errors import LtxTrainError, nearest
from ..models.safetensors_file import SafetensorsFile
from ..tensorfile import save_tensors
from .adapters import AdapterSet
from .layouts import Names, written_key
from .lowrank import low_rank
from .metadata import LoraMetadata
from .module import LoraModule

_PART_OF_SUFFIX = {"lora_A.weight": "lora_A", "lora_B.weight": "lora_B", "lora_magnitude_vector": "dora_scale"}


@dataclass(frozen=True)
class LoraFile:
    """A LoRA in plain terms: module name (the checkpoint's, without prefix) -> update.

    layouts: the layouts its keys were in. unknown: keys that belong to no module of the transformer.
    """

    modules: Mapping[str, LoraModule]
    metadata: LoraMetadata
    layouts: tuple[str, ...] = ()
    unknown: tuple[str, ...] = ()
    path: Path | None = None

    @property
    def kinds(self) -> tuple[str, ...]:
        return tuple(sorted({m.kind for m in self.modules.values()}))

    @property
    def ranks(self) -> tuple[int, ...]:
        return tuple(sorted({m.rank for m in self.modules.values() if m.rank is not None}))


# --- writing ---


def adapter_modules(adapters: AdapterSet) -> dict[str, LoraModule]:
    """The trained adapters as file modules, each with its scale folded in and alpha = rank."""
    made = {}
    for name, module in adapters.modules.items():
        tensors = {_PART_OF_SUFFIX.get(suffix, suffix): p.detach().to("cpu", torch.float32) for suffix, p in module.tensors.items()}
        if "dora_scale" in tensors:
            tensors["dora_scale"] = tensors["dora_scale"].reshape(-1, 1)  # [out, 1]: the norm over the inputs, in every reader
        made[name] = LoraModule.of(name, tensors, None).folded(module.scale)
    return made


def write_lora(path: Path, adapters: AdapterSet, metadata: LoraMetadata, dtype: torch.dtype = torch.bfloat16) -> Path:
    """Save trained adapters for ComfyUI and ltx-core, which reads no alpha: both then apply the trained strength.

    Keys ``diffusion_model.<module>.lora_A.weight`` / ``lora_B.weight`` / ``alpha``; alpha / rank is folded into B, ``.alpha``
    is the rank, the user's alpha stands in the metadata. Appears at once or not at all.
    Raises LtxTrainError ``lora.not_finite`` naming the module with a NaN or infinity; nothing is written then.
    """
    section = adapters.section
    metadata = replace(metadata, kind=section.kind, rank=section.rank, alpha=section.alpha, targets=tuple(section.target_modules))
    return write_modules(path, adapter_modules(adapters), metadata, dtype)


def write_modules(path: Path, modules: Mapping[str, LoraModule], metadata: LoraMetadata, dtype: torch.dtype = torch.bfloat16, layout: str = "comfyui") -> Path:
    """Save updates in a layout, folded, in ``dtype``. Raises LtxTrainError for no modules and for non-finite numbers."""
    path = Path(path)
    if not modules:
        raise LtxTrainError("lora.empty", f"The LoRA {path.name} would hold no modules.", "Nothing was left to save.")
    tensors: dict[str, Tensor] = {}
    for name, module in modules.items():
        folded = module.folded()
        # a magnitude is as large as the base's own rows: rounded to bf16 it would blur the whole weight, not the update
        kinds = {part: torch.float32 if part == "dora_scale" else dtype for part in folded.tensors}
        converted = {part: value.detach().to("cpu", kinds[part]).contiguous() for part, value in folded.tensors.items()}
        if layout == "peft" and "dora_scale" in converted:
            converted["dora_scale"] = converted["dora_scale"].reshape(-1)
        faulty = LoraModule(name, folded.kind, converted).faulty_part()
        if faulty is not None:
            raise LtxTrainError(
                "lora.not_finite", f"The LoRA is not saved: {name[-60:]} has NaN or infinite values in {faulty}.",
                "Training broke before this point. Go on from the last good snapshot, with a lower learning rate or without the module (lora.exclude_modules).",
            )  # fmt: skip
        tensors.update({written_key(name, part, layout): value for part, value in converted.items()})
        if folded.alpha is not None and layout not in ("diffusers", "peft"):  # those two take the folded B as it is
            tensors[written_key(name, "alpha", layout)] = torch.tensor(folded.alpha, dtype=torch.float32)
    save_tensors(path, tensors, metadata.to_strings(), f"the LoRA {path.name}")
    return path


# --- reading ---


def read_lora(path: Path, base_names: Iterable[str] = ()) -> LoraFile:
    """Read a LoRA of any known layout: ours, the official one, ComfyUI, diffusers, peft, kohya, unprefixed; LoRA, DoRA, LoHa, LoKr.

    base_names: module names of the model, which settle underscored names beyond the LTX grammar.
    Raises CheckpointError for a file that is no safetensors file, LtxTrainError when it holds no LoRA or a broken one.
    """
    path = Path(path)
    if path.is_dir():
        inside = ", ".join(sorted(p.name for p in path.glob("*.safetensors"))[:5])
        raise LtxTrainError("lora.is_folder", f"{path.name[:60]} is a folder, not a LoRA file.", f"Give one of its files: {inside}." if inside else "Give a .safetensors file.")
    file = SafetensorsFile.open(path)
    names = Names(base_names)
    found: dict[str, dict[str, Tensor]] = {}
    alphas: dict[str, str] = {}
    layouts: dict[str, None] = {}
    unknown = []
    for raw in file.spans:
        key = names.parse(raw)
        if key is None:
            unknown.append(raw)
            continue
        layouts[key.layout] = None
        if key.part == "alpha":
            alphas[key.module] = raw
        elif key.part in found.setdefault(key.module, {}):
            raise LtxTrainError("lora.duplicate", f"{path.name[:40]} holds {key.module[-50:]} {key.part} twice.", "Two layouts are mixed in one file.")
        else:
            found[key.module][key.part] = file.read(raw)
    if not found:
        raise LtxTrainError("lora.none", f"{path.name[:60]} holds no LoRA for an LTX transformer.", f"Its keys look like: {', '.join(unknown[:3]) or 'none'}.")
    configured = _Configured.of(file.metadata, path, layouts)
    modules = {}
    for name, tensors in found.items():
        alpha = _alpha(file.read(alphas[name]), path, name) if name in alphas else None
        module = LoraModule.of(name, {part: value.float() for part, value in tensors.items()}, alpha)
        if misfit := _flaw(module):
            raise LtxTrainError("lora.shape", f"{path.name[:30]}: {name[-50:]}: {misfit} make no update.", "The file is damaged, or of a kind that is not known.")
        if faulty := module.faulty_part():
            raise LtxTrainError("lora.not_finite", f"{path.name[:40]}: {name[-50:]} has NaN or infinite values in {faulty}.", "The file must not be used.")
        modules[name] = configured.scaled(module) if module.alpha is None else module
    return LoraFile(modules, LoraMetadata.of(file.metadata), tuple(layouts), tuple(unknown), path)


def _flaw(module: LoraModule) -> str | None:
    """Which tensors make no update, with their shapes: a factor that is no matrix, factors that do not go together, a vector of another length."""
    shapes = {part: list(value.shape) for part, value in module.tensors.items()}
    axes = {"diff": (1, 2), "diff_b": (1,), "dora_scale": (0, 1, 2)}  # a norm's difference is a vector; lengths are compared below
    flat = next((part for part, shape in shapes.items() if len(shape) not in axes.get(part, (2,))), None)
    if flat is not None:
        return f"{flat} {shapes[flat]}"
    if misfit := module.misfit():
        return misfit
    if module.kind == "loha" and (shapes["hada_w1_a"][0], shapes["hada_w1_b"][1]) != (shapes["hada_w2_a"][0], shapes["hada_w2_b"][1]):
        return f"hada_w1_b {shapes['hada_w1_b']} and hada_w2_b {shapes['hada_w2_b']}"
    short = next((part for part in ("dora_scale", "diff_b") if part in shapes and module.tensors[part].numel() != module.shape[0]), None)
    return None if short is None else f"{short} {shapes[short]}"


def _alpha(value: Tensor, path: Path, module: str) -> float:
    if value.numel() != 1 or not bool(torch.isfinite(value.float()).all()):
        said = value.item() if value.numel() == 1 else f"a tensor of {value.numel()} numbers"
        raise LtxTrainError("lora.alpha", f"{path.name[:30]}: the alpha of {module[-50:]} is {said}, not one number.", "The file is damaged.")
    return float(value.float().reshape(()))


@dataclass(frozen=True)
class _Configured:
    """peft's settings of an adapter, where a file without alpha tensors carries them: diffusers' metadata or adapter_config.json beside it."""

    settings: Mapping[str, object] = field(default_factory=dict)

    @classmethod
    def of(cls, metadata: Mapping[str, str], path: Path, layouts: Iterable[str]) -> _Configured:
        text = metadata.get("lora_adapter_metadata")
        beside = path.with_name("adapter_config.json")
        try:
            if text is None and "peft" in layouts and beside.is_file():
                text = beside.read_text(encoding="utf-8")
            settings = json.loads(text) if text else {}
        except (OSError, ValueError, RecursionError):
            settings = {}  # a damaged side file: the scale is then 1, as for a file without any
        return cls({str(k).rpartition(".")[2]: v for k, v in settings.items()} if isinstance(settings, dict) else {})

    def scaled(self, module: LoraModule) -> LoraModule:
        alpha = self.settings.get("lora_alpha", self.settings.get("alpha"))
        if not isinstance(alpha, int | float) or module.rank is None:
            return module
        patterns = self.settings.get("alpha_pattern") or {}
        own = next((v for k, v in patterns.items() if module.name == k or module.name.endswith("." + k)), alpha) if isinstance(patterns, dict) else alpha
        return replace(module, alpha=float(own) * (math.sqrt(module.rank) if self.settings.get("use_rslora") else 1.0))


# --- checking ---


@dataclass(frozen=True)
class SelfCheck:
    """What a saved LoRA was found to be. norms: module -> Frobenius norm of its update; rms: norm / sqrt(numbers changed).

    relative: norm over the base weight's, where base weights were given. untrained: modules whose update is exactly zero.
    """

    path: Path
    norms: Mapping[str, float]
    rms: Mapping[str, float]
    relative: Mapping[str, float]
    untrained: tuple[str, ...]

    @property
    def modules(self) -> int:
        return len(self.norms)

    def summary(self) -> str:
        """One line for the log."""
        values = sorted(self.rms.values())
        text = f"{self.modules} modules, update rms {values[0]:.2e} to {values[-1]:.2e} (median {values[len(values) // 2]:.2e})"
        return text + (f", {len(self.untrained)} without any change" if self.untrained else "")


def self_check(path: Path, base: Mapping[str, tuple[int, ...]] | Iterable[str], weight: Callable[[str], Tensor] | None = None) -> SelfCheck:
    """Open a saved LoRA again and make sure a loader will use all of it.

    base: module names of the base model, with [out, in] shapes where known (``base_shapes``). weight: gives a base weight
    by module name, for relative norms. Raises LtxTrainError: ``lora.not_finite``, ``lora.key_unknown``, ``lora.shape``,
    ``lora.zero`` (nothing was learned at all).
    """
    path = Path(path)
    shapes = {name.removesuffix(".weight"): tuple(shape) for name, shape in base.items()} if isinstance(base, Mapping) else dict.fromkeys(base, ())
    lora = read_lora(path, shapes)
    if lora.unknown or lora.layouts != ("comfyui",):
        raise LtxTrainError("lora.key_unknown", f"{path.name[:40]} has keys that ComfyUI would not load.", f"{', '.join(lora.unknown[:3]) or lora.layouts}")
    norms, rms, relative = {}, {}, {}
    for name, module in lora.modules.items():
        _check_module(path, name, module, shapes)
        norms[name] = module.norm() if module.kind != "dora" or weight is None else (module.apply(weight(name)) - weight(name).float()).norm().item()
        rms[name] = norms[name] / math.prod(module.shape) ** 0.5
        if weight is not None:
            relative[name] = norms[name] / max(weight(name).float().norm().item(), 1e-30)
    untrained = tuple(name for name, norm in norms.items() if norm == 0)
    if len(untrained) == len(norms):
        raise LtxTrainError("lora.zero", f"{path.name[:60]} changes nothing: every update is zero.", "No optimizer step has moved the adapter.")
    return SelfCheck(path, norms, rms, relative, untrained)


def _check_module(path: Path, name: str, module: LoraModule, shapes: Mapping[str, tuple[int, ...]]) -> None:
    if name not in shapes:
        near = nearest(name, list(shapes)) or ["nothing near"]
        raise LtxTrainError("lora.key_unknown", f"The base model has no module {name[-70:]}.", f"{path.name} would load without it. Nearest: {', '.join(near)}.")
    if shapes[name] and tuple(shapes[name]) != module.shape:
        raise LtxTrainError("lora.shape", f"{name[-60:]}: the LoRA is for {list(module.shape)}, the model has {list(shapes[name])}.", "It was trained on another model.")


def base_shapes(transformer: torch.nn.Module) -> dict[str, tuple[int, int]]:
    """Module name -> [out, in] of every linear layer, adapters looked through, as :func:`self_check` wants it."""
    return {
        name.removesuffix(".base_layer"): (module.out_features, module.in_features)
        for name, module in transformer.named_modules()
        if isinstance(module, torch.nn.Linear) and not any(part.startswith(("lora_A", "lora_B")) for part in name.split("."))
    }


# --- warm start ---


@dataclass(frozen=True)
class WarmStart:
    """What a file gave to the adapters. fitted: modules whose rank was changed to fit, with the relative error of that."""

    matched: tuple[str, ...]
    missing: tuple[str, ...]  # adapted here, not in the file: they start afresh
    unused: tuple[str, ...]  # in the file, not adapted here
    fitted: Mapping[str, float]

    def summary(self) -> str:
        """One line for the log."""
        text = f"{len(self.matched)} modules taken over, {len(self.missing)} start afresh, {len(self.unused)} of the file not used"
        return text + (f", {len(self.fitted)} fitted to another rank (largest error {max(self.fitted.values()):.1%})" if self.fitted else "")


@torch.no_grad()
def warm_start(adapters: AdapterSet, lora: LoraFile) -> WarmStart:
    """Load a LoRA into freshly attached adapters, its strength kept whatever its alpha and theirs.

    Raises LtxTrainError ``lora.no_common_module`` when no module is in both, ``lora.kind`` or ``lora.shape`` where one does not fit.
    """
    common = [name for name in adapters.names if name in lora.modules]
    if not common:
        raise LtxTrainError(
            "lora.no_common_module", "The LoRA to start from has no module that is adapted here.",
            f"It has, for example, {next(iter(lora.modules))}; adapted are {adapters.names[0]} and {len(adapters.names) - 1} more.",
        )  # fmt: skip
    fitted: dict[str, float] = {}
    for name in common:
        own, module = adapters.modules[name], lora.modules[name]
        if module.shape != own.shape:
            raise LtxTrainError("lora.shape", f"{name[-60:]}: the LoRA is for {list(module.shape)}, the model has {list(own.shape)}.", "It was trained on another model.")
        values = module.unfolded(own.scale).tensors
        if "lora_A" in values and "lora_B" in values and values["lora_A"].shape[0] != own.rank:
            values, fitted[name] = _fit_rank(values, own.tensors["lora_A.weight"], own.rank)
        wanted = {_PART_OF_SUFFIX.get(suffix, suffix): parameter for suffix, parameter in own.tensors.items()}
        fits = set(values) - {"diff_b"} == set(wanted) and all(values[part].numel() == p.numel() for part, p in wanted.items())
        if not fits:
            raise LtxTrainError(
                "lora.kind", f"{name[-50:]}: the LoRA is of kind {module.kind}, the adapter {adapters.kind}, or sizes differ.", "Choose the kind and rank of the file."
            )
        for part, parameter in wanted.items():
            parameter.copy_(values[part].reshape(parameter.shape))
    missing = tuple(name for name in adapters.names if name not in lora.modules)
    unused = tuple(name for name in lora.modules if name not in adapters.modules)
    return WarmStart(tuple(common), missing, unused, fitted)


def _fit_rank(values: Mapping[str, Tensor], start: Tensor, rank: int) -> tuple[dict[str, Tensor], float]:
    """A low-rank update at another rank: more rank keeps the start values of the new rows, with B zero there; less is the best by SVD."""
    a, b = values["lora_A"], values["lora_B"]
    if a.shape[0] < rank:
        wide = start.detach().to("cpu", torch.float32).clone()
        wide[: a.shape[0]] = a
        tall = torch.zeros(b.shape[0], rank)
        tall[:, : b.shape[1]] = b
        return {**values, "lora_A": wide, "lora_B": tall}, 0.0
    small_a, small_b, error = low_rank(a, b, rank)
    return {**values, "lora_A": small_a, "lora_B": small_b}, error
