"""What a machine can do: quantisers, precision, compiling, as pure functions of facts, with the reason in words."""

from __future__ import annotations

import importlib.util
import shutil
import sys
from dataclasses import dataclass
from typing import Literal

import torch

Action = Literal["use", "fallback", "refuse"]
_PACKAGES = ("bitsandbytes", "triton")


@dataclass(frozen=True)
class Facts:
    """One machine, as far as the choices below need it.

    device: cuda, rocm, mps, xpu or cpu. sm: NVIDIA compute capability such as 89, None elsewhere. system: linux, windows,
    darwin. packages: optional ones that can be imported. compiler: a C++ compiler is there. fsdp: weights will be sharded.
    """

    device: str = "cuda"
    sm: int | None = 90
    system: str = "linux"
    packages: frozenset[str] = frozenset(_PACKAGES)
    compiler: bool = True
    fsdp: bool = False
    float8: bool = True

    @classmethod
    def here(cls, device: torch.device | str, *, fsdp: bool = False) -> Facts:
        """The facts of this machine for a torch device."""
        device = torch.device(device)
        cuda = device.type == "cuda"
        rocm = cuda and torch.version.hip is not None
        return cls(
            device="rocm" if rocm else device.type,
            sm=_sm(device) if cuda and not rocm else None,
            system={"win32": "windows", "darwin": "darwin"}.get(sys.platform, "linux"),
            packages=frozenset(name for name in _PACKAGES if importlib.util.find_spec(name) is not None),
            compiler=any(shutil.which(name) for name in ("c++", "g++", "clang++", "cl")),
            fsdp=fsdp,
            float8=all(hasattr(torch, name) for name in ("float8_e4m3fn", "float8_e4m3fnuz")),
        )


def _sm(device: torch.device) -> int:
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor


@dataclass(frozen=True)
class Verdict:
    """use: as asked. fallback: take ``instead``. refuse: it cannot work. reason: why, in words (empty for use)."""

    action: Action
    instead: str | None = None
    reason: str = ""


_USE = Verdict("use")


def capability(quantization: str | None, facts: Facts) -> Verdict:
    """Whether a quantiser (see memory/quantization.py) works on a machine.

    Our stores need nothing but tensor arithmetic: no compiler, no kernel of a certain card. What is left are missing
    number formats, missing packages, and FSDP, which shards plain tensors only.
    """
    if quantization is None:
        return _USE
    if facts.fsdp:
        return Verdict("refuse", None, "FSDP shards plain weights and would expand quantised ones silently; use DDP with a quantised base, or FSDP without quantization")
    if quantization in ("fp8", "fp8-quanto", "fp8uz-quanto", "stored-fp8"):
        if facts.device == "mps":
            return Verdict("fallback", _eight_bit(quantization), "Apple's MPS has no 8-bit floats")
        if not facts.float8:
            return Verdict("fallback", _eight_bit(quantization), "this torch has no 8-bit floats")
    if quantization == "nf4":
        if facts.device in ("mps", "xpu"):
            return Verdict("fallback", "int4-quanto", f"bitsandbytes has no nf4 for {facts.device}")
        if facts.device == "rocm" and facts.system == "windows":
            return Verdict("fallback", "int4-quanto", "bitsandbytes has no ROCm build for Windows")
        if facts.sm is not None and facts.sm < 60:
            return Verdict("fallback", "int4-quanto", f"bitsandbytes' nf4 needs compute capability 6.0, this card has {facts.sm / 10:.1f}")
        if "bitsandbytes" not in facts.packages:
            return Verdict("fallback", "int4-quanto", "bitsandbytes is not installed (pip install bitsandbytes)")
    return _USE


def _eight_bit(quantization: str) -> str | None:
    return {"fp8": "int8", "fp8-quanto": "int8-quanto", "fp8uz-quanto": "int8-quanto"}.get(quantization)


def precision_capability(mode: str | None, facts: Facts) -> Verdict:
    """Whether a mixed_precision_mode works. bf16 before sm80 is emulated and slow: fp16 with a loss scaler instead."""
    if mode == "bf16" and facts.sm is not None and facts.sm < 80:
        return Verdict("fallback", "fp16", f"this card (compute capability {facts.sm / 10:.1f}) has no bf16; fp16 with loss scaling is used")
    if mode == "fp16" and facts.device == "cpu":
        return Verdict("fallback", "bf16", "fp16 on a CPU is slow and incomplete")
    return _USE


def compile_capability(facts: Facts) -> Verdict:
    """Whether blocks can be compiled: Triton on a CUDA or ROCm card; a CPU needs a C++ compiler and gains little."""
    if facts.device in ("mps", "xpu", "cpu"):
        return Verdict("fallback", "off", f"compiling brings nothing on {facts.device}")
    if facts.sm is not None and facts.sm < 70:
        return Verdict("fallback", "off", f"Triton needs compute capability 7.0, this card has {facts.sm / 10:.1f}")
    if "triton" not in facts.packages:
        return Verdict("fallback", "off", "Triton is not installed (on Windows: pip install triton-windows)")
    if not facts.compiler:
        return Verdict("fallback", "off", "Triton needs a C compiler at first use and there is none")
    return _USE
