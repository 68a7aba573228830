"""Weights out of safetensors files: lazy, by prefix, dequantised, and loaded strictly into modules."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor, nn

from ..errors import CheckpointError
from .safetensors_file import SafetensorsFile, TensorInfo
from .stored_quant import REFUSED_SIBLINGS, SIBLINGS, StoredQuant, check_format, layer_options, logical_shape, parse_comfy_quant

Rename = Mapping[str, str] | Callable[[str], str | None]

_FP8 = {torch.float8_e4m3fn: "float8_e4m3fn", torch.float8_e5m2: "float8_e5m2"}


class _Store:
    """The raw tensors of one or several files under their stored names, and which layers are quantised."""

    def __init__(self, files: Iterable[SafetensorsFile]) -> None:
        self.files = tuple(files)
        self.where: dict[str, SafetensorsFile] = {}
        self._confs: dict[str, dict[str, object] | None] = {}
        for file in self.files:
            for name in file.spans:
                if name in self.where:
                    raise CheckpointError(
                        "checkpoint.duplicate", f"{file.path.name} and {self.where[name].path.name} both hold {name}.", "Give each component once."
                    )
                self.where[name] = file

    def info(self, name: str) -> TensorInfo:
        return self.where[name].spans[name].info

    def read(self, name: str) -> Tensor:
        return self.where[name].read(name)

    @cached_property
    def metadata(self) -> dict[str, str]:
        merged: dict[str, str] = {}
        for file in self.files:
            merged.update(file.metadata)
        return merged

    @cached_property
    def declared(self) -> dict[str, dict[str, object]]:
        """Layer name -> its entry in ``_quantization_metadata``."""
        layers: dict[str, dict[str, object]] = {}
        for file in self.files:
            raw = file.metadata.get("_quantization_metadata")
            if raw:
                layers.update(json.loads(raw).get("layers", {}))
        return layers

    @cached_property
    def helpers(self) -> frozenset[str]:
        """Stored names that are parts of quantised weights, not weights."""
        found = set()
        for name in self.where:
            layer, _, last = name.rpartition(".")
            if last == "scaled_fp8":
                found.add(name)
            elif last in SIBLINGS + REFUSED_SIBLINGS and f"{layer}.weight" in self.where:
                found.add(name)
        return frozenset(found)

    def conf(self, name: str) -> dict[str, object] | None:
        """What is known of the quantisation of the stored weight ``name``; None for a plain tensor. Read once."""
        if name not in self._confs:
            self._confs[name] = self._conf(name)
        return self._confs[name]

    def _conf(self, name: str) -> dict[str, object] | None:
        layer, _, last = name.rpartition(".")
        if last != "weight":
            return None
        file = self.where[name].path.name
        dtype = self.info(name).dtype
        if f"{layer}.comfy_quant" in self.where:
            return parse_comfy_quant(self.read(f"{layer}.comfy_quant"), layer, file)
        if layer in self.declared:
            return self.declared[layer]
        if dtype in _FP8:  # old scaled fp8 (scale_weight), bare scalar scales, or a plain cast: all q * scale
            return {"format": _FP8[dtype]}
        helped = [s for s in SIBLINGS + REFUSED_SIBLINGS if f"{layer}.{s}" in self.where]
        if helped and dtype in (torch.int8, torch.uint8):
            return self._undeclared(layer, dtype)
        return None

    def _undeclared(self, layer: str, dtype: torch.dtype) -> dict[str, object]:
        """Scales without a declaration: nvfp4 and refused formats tell themselves by their siblings, int8 does not."""
        if dtype == torch.uint8 and f"{layer}.weight_scale_2" in self.where:
            return {"format": "nvfp4"}
        if any(f"{layer}.{s}" in self.where for s in REFUSED_SIBLINGS):
            return {"format": "asym_w4a8_int8"}
        return {"format": f"undeclared {str(dtype).removeprefix('torch.')}"}  # rotated or not cannot be seen


@dataclass(frozen=True)
class WeightSource:
    """Named tensors of one component, read when asked for; quantised ones come back as numbers.

    names: logical name -> stored name. reader: what reads a tensor by its stored name, the file itself where None.
    """

    store: _Store = field(repr=False)
    names: Mapping[str, str] = field(repr=False)
    reader: Callable[[str], Tensor] | None = field(default=None, repr=False, compare=False)

    @classmethod
    def open(cls, *paths: str | Path | SafetensorsFile) -> WeightSource:
        """All tensors of one file, or of the shards of one model."""
        return cls.of_files([p if isinstance(p, SafetensorsFile) else SafetensorsFile.open(p) for p in paths])

    @classmethod
    def of_files(cls, files: Iterable[SafetensorsFile]) -> WeightSource:
        store = _Store(files)
        return cls(store, {n: n for n in store.where if n not in store.helpers})

    @classmethod
    def of_part(cls, files: Iterable[SafetensorsFile], names: Mapping[str, str]) -> WeightSource:
        """Some tensors of ``files`` under their logical names (logical -> stored)."""
        store = _Store(files)
        return cls(store, {n: s for n, s in names.items() if s not in store.helpers})

    @property
    def metadata(self) -> dict[str, str]:
        return self.store.metadata

    @property
    def paths(self) -> tuple[Path, ...]:
        return tuple(f.path for f in self.store.files)

    def keys(self) -> list[str]:
        return list(self.names)

    def __contains__(self, name: str) -> bool:
        return name in self.names

    def __len__(self) -> int:
        return len(self.names)

    def info(self, name: str) -> TensorInfo:
        """Shape and dtype that ``get(name)`` gives: a quantised weight counts as bfloat16 of its logical shape."""
        info = self.store.info(self._stored(name))
        kind = self.format(name)
        return info if kind is None else TensorInfo(logical_shape(kind, info.shape), torch.bfloat16)

    def format(self, name: str) -> str | None:
        """The quantisation format of a tensor, None for a plain one."""
        stored = self._stored(name)
        conf = self.store.conf(stored)
        return None if conf is None else check_format(stored.rpartition(".")[0], conf, self.store.where[stored].path.name)

    def get(self, name: str, dtype: torch.dtype | None = None, device: torch.device | str = "cpu") -> Tensor:
        """The tensor, dequantised if quantised. dtype None keeps the stored one (bfloat16 for quantised).

        Integer and bool tensors keep their dtype.
        """
        quant = self.quantized(name)
        if quant is not None:  # dequantise where the result is wanted: a card does it far faster
            return quant.to(device).dequantize(dtype or torch.bfloat16)
        value = self._read(self._stored(name))
        floating = value.is_floating_point() and dtype is not None
        return value.to(device=device, dtype=dtype if floating else value.dtype)

    def quantized(self, name: str) -> StoredQuant | None:
        """The weight as stored (format and raw tensors), None for a plain tensor."""
        kind = self.format(name)
        if kind is None:
            return None
        stored = self._stored(name)
        layer = stored.rpartition(".")[0]
        weight, *siblings = self.behind(name)
        tensors = {"weight": self._read(weight)}
        for sibling in siblings:
            last = sibling.rpartition(".")[2]
            tensors[_MODERN.get(last, last)] = self._read(sibling)
        needs = {"nvfp4": ("weight_scale", "weight_scale_2"), "mxfp8": ("weight_scale",), "int8_tensorwise": ("weight_scale",)}.get(kind, ())
        absent = [n for n in needs if n not in tensors]
        if absent:
            file = self.store.where[stored].path.name
            raise CheckpointError("checkpoint.quant_format", f"{file} lacks {absent[0]} of {layer[-60:]}.", "The file is damaged: get it again, or the bf16 file.")
        return StoredQuant(kind, logical_shape(kind, tuple(tensors["weight"].shape)), tensors, layer_options(self.store.conf(stored) or {}))

    def behind(self, name: str) -> list[str]:
        """The stored tensors that getting ``name`` reads, in that order."""
        stored = self._stored(name)
        if self.format(name) is None:
            return [stored]
        layer = stored.rpartition(".")[0]
        return [stored, *(f"{layer}.{s}" for s in SIBLINGS if s != "comfy_quant" and f"{layer}.{s}" in self.store.where)]

    def read_by(self, reader: Callable[[str], Tensor]) -> WeightSource:
        """The same tensors, read by ``reader``: stored name -> the tensor as stored, on any device."""
        return replace(self, reader=reader)

    def subset(self, prefix: str) -> WeightSource:
        """The tensors under ``prefix``, which is taken off."""
        return replace(self, names={n[len(prefix) :]: s for n, s in self.names.items() if n.startswith(prefix)})

    def renamed(self, rename: Rename) -> WeightSource:
        """The same tensors under other names: a mapping (others stay), or a function (None drops the tensor)."""
        names: dict[str, str] = {}
        for name, stored in self.names.items():
            new = rename(name) if callable(rename) else rename.get(name, name)
            if new is not None:
                assert new not in names, f"two tensors renamed to {new}"
                names[new] = stored
        return replace(self, names=names)

    def sampled_digest(self, block: int = 4096, samples: int = 96) -> str:
        """Hex digest of names, shapes, dtypes, and the first ``block`` bytes of ``samples`` tensors spread over the source.

        Matrices come first: what a merge or a fine-tune changes. About 400 kB are read, however large the file.
        """
        digest = hashlib.sha256()
        names = sorted(self.names)
        for name in names:
            info = self.store.info(self.names[name])
            digest.update(f"{name}{list(info.shape)}{info.dtype}\n".encode())
        matrices = [n for n in names if len(self.store.info(self.names[n]).shape) > 1] or names
        for index in sorted({len(matrices) * i // samples for i in range(samples)}):
            stored = self.names[matrices[index]]
            digest.update(self.store.where[stored].peek(stored, block))
        return digest.hexdigest()

    def _read(self, stored: str) -> Tensor:
        return self.store.read(stored) if self.reader is None else self.reader(stored)

    def _stored(self, name: str) -> str:
        stored = self.names.get(name)
        if stored is None:
            files = ", ".join(p.name for p in self.paths)
            raise CheckpointError("checkpoint.missing_tensor", f"{files[:40]} has no tensor {name[-70:]}.", f"Files read: {files}. Is it the right file?")
        return stored


_MODERN = {"scale_weight": "weight_scale", "scale_input": "input_scale"}


def load_weights(
    module: nn.Module,
    source: WeightSource,
    *,
    dtype: torch.dtype | Callable[[str], torch.dtype | None] | None,
    device: torch.device | str,
) -> None:
    """Put every tensor of ``source`` into ``module``, one at a time, strictly; the module may be on the meta device.

    dtype: of floating tensors; None keeps the stored one; a function decides by the module's name of the tensor.
    Raises CheckpointError naming missing, unexpected and differently shaped tensors, before anything is read.
    """
    place_weights(module, source, check_weights(module, source), dtype=dtype, device=device)


def place_weights(
    module: nn.Module, source: WeightSource, names: Iterable[str], *, dtype: torch.dtype | Callable[[str], torch.dtype | None] | None, device: torch.device | str
) -> None:
    """Put the tensors ``names``, which :func:`check_weights` has told, into ``module``, one at a time; the rest as in :func:`load_weights`."""
    for name in names:
        kind = dtype(name) if callable(dtype) else dtype
        _assign(module, name, source.get(name, dtype=kind, device=device))


def _persistent_buffers(module: nn.Module) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for prefix, child in module.named_modules(remove_duplicate=False):
        for name, value in child.named_buffers(recurse=False):
            if name not in child._non_persistent_buffers_set:
                found[f"{prefix}.{name}" if prefix else name] = value
    return found


def check_weights(module: nn.Module, source: WeightSource) -> list[str]:
    """Names that :func:`load_weights` would fill, after its strict check by names and shapes; nothing is read."""
    wanted = {**dict(module.named_parameters(remove_duplicate=False)), **_persistent_buffers(module)}
    missing = [n for n in wanted if n not in source]
    extra = [n for n in source.names if n not in wanted]
    shaped = [
        f"{n}: file {list(source.info(n).shape)}, model {list(wanted[n].shape)}" for n in wanted if n in source and source.info(n).shape != tuple(wanted[n].shape)
    ]
    if not (missing or extra or shaped):
        return list(wanted)
    counts = [f"{len(v)} {k}" for k, v in (("missing", missing), ("unexpected", extra), ("of another shape", shaped)) if v]
    lines = [f"{label}: {', '.join(v[:6])}{' ...' if len(v) > 6 else ''}" for label, v in (("missing", missing), ("unexpected", extra), ("shapes", shaped)) if v]
    files = ", ".join(p.name for p in source.paths)
    lines.append("The file is damaged, cut down, or of a version that this one does not know: get the vendor's file.")
    raise CheckpointError("checkpoint.tensors", f"{files[:50]} does not fit {type(module).__name__}: {', '.join(counts)} tensors.", "\n".join(lines))


def _assign(module: nn.Module, name: str, value: Tensor) -> None:
    path, _, last = name.rpartition(".")
    owner = module.get_submodule(path)
    old = owner._parameters.get(last)
    if old is not None:
        owner._parameters[last] = nn.Parameter(value, requires_grad=old.requires_grad and value.is_floating_point())
    else:
        owner._buffers[last] = value
