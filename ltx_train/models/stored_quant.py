"""Quantised weights as files store them, and the exact way back to numbers (reference: ComfyUI 0.33, comfy-kitchen 0.2.31)."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ..errors import CheckpointError

SIBLINGS = ("weight_scale", "weight_scale_2", "input_scale", "pre_quant_scale", "comfy_quant", "scale_weight", "scale_input")
REFUSED_SIBLINGS = ("weight_s_rel", "weight_s_channel", "weight_codebook")
FORMATS = ("float8_e4m3fn", "float8_e5m2", "int8_tensorwise", "nvfp4", "mxfp8")

_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)


@dataclass(frozen=True)
class StoredQuant:
    """One weight as stored: its format, the raw tensors (``weight`` and siblings) and its logical shape.

    options: what the file says about the layer (``convrot``, ``convrot_groupsize``, ...).
    """

    format: str
    shape: tuple[int, ...]
    tensors: Mapping[str, Tensor]
    options: Mapping[str, object] = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        return sum(t.numel() * t.element_size() for t in self.tensors.values())

    def to(self, device: torch.device | str) -> StoredQuant:
        return StoredQuant(self.format, self.shape, {k: t.to(device) for k, t in self.tensors.items()}, self.options)

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """The weight [out, in]: computed in float32, then cast once to ``dtype``."""
        weight = _DEQUANTIZE[self.format](self)
        if "pre_quant_scale" in self.tensors:  # the layer computes (x * p) W^T, so its weight is W with columns scaled
            weight = weight * self.tensors["pre_quant_scale"].float()
        return weight.to(dtype)


def logical_shape(kind: str, stored: tuple[int, ...]) -> tuple[int, ...]:
    """Shape of the weight behind stored values: nvfp4 packs two values in a byte."""
    return (*stored[:-1], stored[-1] * 2) if kind == "nvfp4" else stored


def check_format(layer: str, conf: Mapping[str, object], file: str) -> str:
    """The format named in a layer's ``comfy_quant`` or header entry; refuses what has no exact way back here."""
    kind = conf.get("format")
    if kind not in FORMATS:
        raise CheckpointError(
            "checkpoint.quant_format", f"{file} stores {_short(layer)} as {kind}, which cannot be read exactly.",
            f"Readable: {', '.join(FORMATS)}. Get the bf16 file of the same model.",
        )  # fmt: skip
    return str(kind)


def layer_options(conf: Mapping[str, object]) -> dict[str, object]:
    """Options of a layer, from its entry or the nested ``params`` older files use."""
    params = conf.get("params")
    merged = {**(params if isinstance(params, dict) else {}), **conf}
    return {k: v for k, v in merged.items() if k not in ("format", "params")}


def parse_comfy_quant(raw: Tensor, layer: str, file: str) -> dict[str, object]:
    """A layer's ``comfy_quant`` tensor: JSON as bytes."""
    try:
        conf = json.loads(bytes(raw.tolist()))
    except (UnicodeDecodeError, json.JSONDecodeError, ValueError):
        conf = None
    if not isinstance(conf, dict):
        raise CheckpointError("checkpoint.quant_format", f"{file} describes the quantisation of {_short(layer)} unreadably.", "Get the bf16 file of the same model.")
    return conf


def hadamard(size: int, device: torch.device | str = "cpu") -> Tensor:
    """The normalised regular Hadamard matrix of ``size`` = 4^k: symmetric and its own inverse, float32.

    Kronecker powers of the 4 x 4 matrix with -1 on the anti-diagonal.
    """
    assert size >= 4 and (size & (size - 1)) == 0 and size.bit_length() % 2 == 1, f"{size} is not a power of 4"
    base = torch.ones(4, 4, device=device) - 2 * torch.eye(4, device=device).flip(0)
    matrix = base
    while matrix.shape[0] < size:
        matrix = torch.kron(matrix, base)
    return matrix / size**0.5


def untile_scales(tiled: Tensor, rows: int, cols: int) -> Tensor:
    """Block scales [rows, cols] out of the 128 x 4 tile order of cuBLAS block-scaled products.

    A tile of 128 rows x 4 columns is stored as 32 x 16: row r sits at (r mod 32, 4 * (r div 32)).
    """
    high, wide = -(-rows // 128), -(-cols // 4)
    tiles = tiled.reshape(high, wide, 32, 4, 4)  # tile row, tile column, r mod 32, r div 32, column
    return tiles.permute(0, 3, 2, 1, 4).reshape(high * 128, wide * 4)[:rows, :cols]


def _fp8(q: StoredQuant) -> Tensor:
    weight = q.tensors["weight"].float()
    scale = q.tensors.get("weight_scale")
    return weight if scale is None else weight * scale.float()


def _int8(q: StoredQuant) -> Tensor:
    weight = q.tensors["weight"].float() * q.tensors["weight_scale"].float()
    if not q.options.get("convrot"):
        return weight
    size = int(q.options.get("convrot_groupsize", 256))
    turned = weight.reshape(weight.shape[0], -1, size)  # the file holds W H^T per group of inputs
    return torch.matmul(turned, hadamard(size, weight.device)).reshape(weight.shape)


def _nvfp4(q: StoredQuant) -> Tensor:
    packed = q.tensors["weight"]
    values = torch.tensor(_E2M1, device=packed.device)
    codes = torch.stack([packed >> 4, packed & 15], dim=-1).flatten(-2)  # element 2j in the high nibble
    rows, cols = codes.shape
    blocks = q.tensors["weight_scale"]
    blocks = (blocks.view(torch.float8_e4m3fn) if blocks.dtype == torch.uint8 else blocks).view(torch.uint8)
    scale = untile_scales(blocks, rows, cols // 16).contiguous().view(torch.float8_e4m3fn).float()
    scale = q.tensors["weight_scale_2"].float() * scale
    return (values[codes.int()].reshape(rows, -1, 16) * scale.unsqueeze(-1)).reshape(rows, cols)


def _mxfp8(q: StoredQuant) -> Tensor:
    weight = q.tensors["weight"].float()
    rows, cols = weight.shape
    exponents = untile_scales(q.tensors["weight_scale"].view(torch.uint8), rows, cols // 32).contiguous()
    # a power of two by its exponent bits; 0 reads as 0, as in the reference
    scale = (exponents.to(torch.int32) << 23).view(torch.float32)
    return (weight.reshape(rows, -1, 32) * scale.unsqueeze(-1)).reshape(rows, cols)


_DEQUANTIZE = {"float8_e4m3fn": _fp8, "float8_e5m2": _fp8, "int8_tensorwise": _int8, "nvfp4": _nvfp4, "mxfp8": _mxfp8}


def _short(name: str, limit: int = 48) -> str:
    return name if len(name) <= limit else "..." + name[-limit:]
