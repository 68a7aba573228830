"""Quantisers of the frozen base as settings with ``quantize``, what is left out, and loading layer by layer."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor, nn

from ..errors import CheckpointError, ConfigError, MissingPackage
from ..models.linear import Linear, QuantizedWeight, linears
from ..models.read_ahead import ReadAhead
from ..models.transformer import LTXTransformer, keeps_float32, load_transformer, transformer_source
from ..models.weights import WeightSource, check_weights, place_weights
from ..section import Section
from .capability import Facts, capability
from .pinned import HostMemory
from .stores import AsStored, GroupScaled, Nf4, PackedAffine, RowScaled, pack, quanto_group

if TYPE_CHECKING:
    from ..models.checkpoint import Checkpoint

EXCLUDED = ("*patchify_proj", "*proj_out", "*adaln*", "*timestep_embedder*", "*time_proj*", "*caption_projection*", "*norm*", "*to_gate_logits", "*connector*")
"""Modules never quantised, by their whole name: in- and output, adaLN, embedders, captions, norms, gates. They are small and sensitive."""


BLOCKS = "transformer_blocks."


class Quantizer(Section):
    """One way to hold frozen weights in fewer bits."""

    name: ClassVar[str]
    bits: ClassVar[float]  # a weight, scales included, for planning
    caution: ClassVar[str] = ""  # what to know before using it

    def quantize(self, weight: Tensor) -> QuantizedWeight:
        """A store of the plain [out, in] weight, on its device."""
        raise AssertionError("each quantiser has its own")


class Int8(Quantizer):
    """Ours: int8 with a bfloat16 scale a group of 128 inputs; a relative error of 0.65 % on normal weights, int8-quanto 0.75 %."""

    name: ClassVar[str] = "int8"
    bits: ClassVar[float] = 8.125
    group: ClassVar[int] = 128

    def quantize(self, weight: Tensor) -> QuantizedWeight:
        out, inputs = weight.shape
        group = self.group
        while inputs % group:
            group //= 2
        grouped = weight.float().view(out, -1, group)
        scale = (grouped.abs().amax(-1) / 127).clamp_min(torch.finfo(torch.bfloat16).tiny).to(torch.bfloat16)
        data = (grouped / scale.float().unsqueeze(-1)).round_().clamp_(-127, 127).to(torch.int8)
        return GroupScaled(data.view(out, inputs), scale)


class Float8(Quantizer):
    """Ours: 8-bit floats (e4m3) with a float32 scale a row."""

    name: ClassVar[str] = "fp8"
    bits: ClassVar[float] = 8.01

    def quantize(self, weight: Tensor) -> QuantizedWeight:
        wide = weight.float()
        top = torch.finfo(torch.float8_e4m3fn).max
        scale = (wide.abs().amax(1, keepdim=True) / top).clamp_min(1e-12)
        return RowScaled((wide / scale).clamp_(-top, top).to(torch.float8_e4m3fn), scale)


class _QuantoRows(Quantizer):
    """optimum-quanto's 8-bit formats, its numbers exactly: scale = row's largest / format's largest, in the weight's dtype.

    Computed here with plain tensor arithmetic: the numbers need no package, no compiler and no kernel of one kind of card.
    """

    bits: ClassVar[float] = 8.01
    number: ClassVar[torch.dtype]

    def quantize(self, weight: Tensor) -> QuantizedWeight:
        limits = torch.finfo(self.number) if self.number.is_floating_point else torch.iinfo(self.number)
        scale = weight.abs().amax(1, keepdim=True) / limits.max
        data = weight / scale
        if not self.number.is_floating_point:
            data = data.round()
        empty = scale == 0  # a row of zeros: quanto has 0 / 0 there
        return RowScaled(data.clamp(limits.min, limits.max).masked_fill(empty, 0).to(self.number), scale)


class Int8Quanto(_QuantoRows):
    """The official int8-quanto: int8, one scale a row."""

    name: ClassVar[str] = "int8-quanto"
    number: ClassVar[torch.dtype] = torch.int8


class Float8Quanto(_QuantoRows):
    """The official fp8-quanto: e4m3, one scale a row."""

    name: ClassVar[str] = "fp8-quanto"
    number: ClassVar[torch.dtype] = getattr(torch, "float8_e4m3fn", torch.int8)


class Float8uzQuanto(_QuantoRows):
    """The official fp8uz-quanto: e4m3fnuz (AMD's format), one scale a row."""

    name: ClassVar[str] = "fp8uz-quanto"
    number: ClassVar[torch.dtype] = getattr(torch, "float8_e4m3fnuz", torch.int8)


class _QuantoBits(Quantizer):
    """optimum-quanto's 4- and 2-bit formats, its numbers exactly: a scale and a shift a group of 128 inputs."""

    width: ClassVar[int]

    def quantize(self, weight: Tensor) -> QuantizedWeight:
        grouped = weight.reshape(-1, quanto_group(weight.shape[1]) or weight.shape[1])
        low, high = grouped.amin(1, keepdim=True), grouped.amax(1, keepdim=True)
        top = 2**self.width - 1
        scale, shift = (high - low) / top, -low
        values = torch.round((grouped + shift) / scale).clamp(0, top).masked_fill(scale == 0, 0).to(torch.uint8)
        return PackedAffine(pack(values, self.width), scale, shift, self.width, (weight.shape[0], weight.shape[1]))


class Int4Quanto(_QuantoBits):
    """The official int4-quanto."""

    name: ClassVar[str] = "int4-quanto"
    width: ClassVar[int] = 4
    bits: ClassVar[float] = 4.25


class Int2Quanto(_QuantoBits):
    """The official int2-quanto: a large error, for experiments."""

    name: ClassVar[str] = "int2-quanto"
    caution: ClassVar[str] = "int2-quanto harms the base: on our tiny trained model the loss stays a third higher (int4: within 2 %)."
    width: ClassVar[int] = 2
    bits: ClassVar[float] = 2.25


class NormalFloat4(Quantizer):
    """bitsandbytes nf4 with double quantisation (QLoRA)."""

    name: ClassVar[str] = "nf4"
    bits: ClassVar[float] = 4.13

    def quantize(self, weight: Tensor) -> QuantizedWeight:
        try:
            from bitsandbytes.functional import quantize_4bit
        except ImportError as error:
            raise MissingPackage("bitsandbytes", "The quantisation nf4", "Or choose int4-quanto") from error
        packed, state = quantize_4bit(weight.contiguous(), blocksize=64, quant_type="nf4", compress_statistics=True)
        return Nf4(packed, state, (weight.shape[0], weight.shape[1]))


QUANTIZERS: dict[str, type[Quantizer]] = {
    kind.name: kind for kind in (Int8, Float8, Int8Quanto, Int4Quanto, Int2Quanto, Float8Quanto, Float8uzQuanto, NormalFloat4)
}
"""The official quantisation names and ours; a new quantiser is one class and its place here."""


def is_excluded(name: str) -> bool:
    """Whether a module, by its whole name in the transformer, keeps its plain weight."""
    return any(fnmatchcase(name, pattern) for pattern in EXCLUDED)


def choose(quantization: str | None, facts: Facts, warn: Callable[[str], None] = lambda text: None) -> Quantizer | None:
    """The quantiser for a machine: as asked, or its fallback with the reason told to ``warn``.

    Raises ConfigError ``quantization.refused`` with the reason where none can work.
    """
    if quantization is None:
        return None
    verdict = capability(quantization, facts)
    if verdict.action == "refuse":
        raise ConfigError("quantization.refused", f"acceleration.quantization {quantization} cannot be used here.", verdict.reason[:1].upper() + verdict.reason[1:] + ".")
    if verdict.action == "fallback":
        assert verdict.instead is not None, quantization
        warn(f"{quantization} is replaced by {verdict.instead}: {verdict.reason}.")
        return choose(verdict.instead, facts, warn)
    return QUANTIZERS[quantization]()


def quantize_linears(model: nn.Module, quantizer: Quantizer) -> list[str]:
    """Quantise the linear layers of a loaded model in place, one at a time, exclusions left plain; the names that were."""
    done = []
    for name, layer in linears(model):
        if not is_excluded(name) and layer.quantized is None:
            layer.set_quantized(quantizer.quantize(layer.weight.detach()))
            done.append(name)
    return done


def load_quantized(
    checkpoint: Checkpoint,
    quantizer: Quantizer | None,
    *,
    dtype: torch.dtype,
    device: torch.device | str,
    video: bool = True,
    audio: bool = True,
    keep_stored: bool = True,
    progress: Callable[[int, int], None] | None = None,
    whole: Callable[[LTXTransformer, int], None] | None = None,
) -> LTXTransformer:
    """The checkpoint's transformer on ``device`` with quantised weights, one plain weight in memory at a time.

    Weights that the file holds quantised are trained on as they are (``keep_stored``), unless the quantiser is smaller.
    quantizer None with keep_stored False is load_transformer. whole: called with the model and a block's number when
    all of that block is there, before the next one is begun: who moves it away needs room for one block at a time.
    progress: told how many of how many tensors are there.
    The file is read ahead of all this (see ``models.read_ahead``), up to 1 GiB. Raises CheckpointError when its tensors do not fit.
    """
    model = load_transformer(checkpoint, dtype=dtype, device="meta", video=video, audio=audio)
    source = transformer_source(checkpoint, model)
    planned = {name: layer for name, layer in linears(model) if _stays_small(name, source, quantizer, keep_stored)}
    _check_shapes(planned, source, checkpoint)
    keys = {f"{name}.weight" for name in planned}
    for layer in planned.values():
        layer.weight = None
    plain = check_weights(model, source.renamed(lambda name: None if name in keys else name))
    kind = lambda name: torch.float32 if keeps_float32(name) else dtype  # noqa: E731
    prefixes = ["", *(f"{BLOCKS}{index}." for index in range(len(model.transformer_blocks)))]
    small = {prefix: _inside(planned, prefix) for prefix in prefixes}
    order = [key for prefix in prefixes for key in [*_inside(plain, prefix), *(f"{name}.weight" for name in small[prefix])]]
    tell = progress or (lambda done, total: None)
    done = 0
    with _read_ahead(source, order, device) as source:
        for index, prefix in enumerate(prefixes, -1):
            names = _inside(plain, prefix)
            place_weights(model, source, names, dtype=kind, device=device)
            tell(done := done + len(names), len(order))
            for name in small[prefix]:
                planned[name].set_quantized(_store(source, f"{name}.weight", quantizer, dtype, device, keep_stored))
                tell(done := done + 1, len(order))
            if prefix:
                model.get_submodule(prefix.rstrip(".")).requires_grad_(False).eval()
                if whole is not None:
                    whole(model, index)
    return model.requires_grad_(False).eval()


@contextmanager
def _read_ahead(source: WeightSource, names: list[str], device: torch.device | str) -> Iterator[WeightSource]:
    """The source read ahead; for a CUDA card through page-locked memory that is given back in the end."""
    memory = HostMemory(pin=True) if torch.device(device).type == "cuda" else None
    try:
        with ReadAhead(source, names, device=device, staging=None if memory is None else memory.take) as ahead:
            yield ahead
    finally:
        if memory is not None:
            memory.close()


def _inside(names: Iterable[str], prefix: str) -> list[str]:
    """Those of a block, or for no prefix those outside the blocks."""
    return [name for name in names if (name.startswith(prefix) if prefix else not name.startswith(BLOCKS))]


_STORED_BITS = {"float8_e4m3fn": 8, "float8_e5m2": 8, "int8_tensorwise": 8, "mxfp8": 8, "nvfp4": 4}


def _keeps(kind: str | None, quantizer: Quantizer | None, keep_stored: bool) -> bool:
    """Whether a stored format is taken as it is: it is no larger than what was asked for."""
    return kind is not None and keep_stored and (quantizer is None or _STORED_BITS[kind] <= quantizer.bits)


def _stays_small(name: str, source: WeightSource, quantizer: Quantizer | None, keep_stored: bool) -> bool:
    key = f"{name}.weight"
    if key not in source:
        return False  # the strict load names it
    return _keeps(source.format(key), quantizer, keep_stored) or (quantizer is not None and not is_excluded(name))


def _check_shapes(planned: dict[str, Linear], source: WeightSource, checkpoint: Checkpoint) -> None:
    for name, layer in planned.items():
        shape = tuple(source.info(f"{name}.weight").shape)
        if shape != (layer.out_features, layer.in_features):
            raise CheckpointError(
                "checkpoint.tensors", f"{name[-60:]}.weight: file {list(shape)}, model {[layer.out_features, layer.in_features]}.",
                f"The tensors of this {checkpoint.family.title} file do not fit its config.",
            )  # fmt: skip


def _store(source: WeightSource, key: str, quantizer: Quantizer | None, dtype: torch.dtype, device: torch.device | str, keep_stored: bool) -> QuantizedWeight:
    if _keeps(source.format(key), quantizer, keep_stored):
        stored = source.quantized(key)
        assert stored is not None, key
        return AsStored(stored.to(device))
    assert quantizer is not None, key
    return quantizer.quantize(source.get(key, dtype=dtype, device=device))


def weight_bytes(model: nn.Module) -> int:
    """Bytes of all base weights as they are held, stores included."""
    plain = sum(p.nbytes for p in model.parameters() if not p.requires_grad)
    return plain + sum(layer.quantized.nbytes for _, layer in linears(model) if layer.quantized is not None)
