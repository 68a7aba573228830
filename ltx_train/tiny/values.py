"""Random weights that behave: unit-scale activations, true filters and spectrogram tables, the same for a seed and a name."""

from __future__ import annotations

import hashlib
import math

import torch
from torch import Tensor

from ..models.mel import mel_bank

_NORMS = ("norm", "layernorm", "_ln1", "_ln2", "layer_norm1", "layer_norm2")

# Last layers: pixels and sound that seldom reach the ends of their range (measured on this file's models).
_GAINS = {
    ("video_vae", "decoder.conv_out.conv.weight"): 0.4,
    ("video_vae", "decoder.conv_out.weight"): 0.4,
    ("vocoder", "bwe_generator.conv_post.weight"): 0.002,
    ("vocoder", "vocoder.conv_post.weight"): 0.02,
    ("vocoder", "conv_post.weight"): 5.0,
}


def weights(shapes: dict[str, tuple[int, ...]], seed: int, component: str, *, dtype: torch.dtype = torch.bfloat16, keep_tables: bool = False) -> dict[str, Tensor]:
    """A value for every name. The value depends on (seed, component, name) alone, not on the other tensors.

    keep_tables: ``*scale_shift_table*`` stay float32, as in the published LTX-2 transformers.
    """
    found = {}
    for name, shape in shapes.items():
        value = _value(name, shape, _generator(seed, component, name), centre=0.0 if component == "gemma3" else 1.0)
        value = value * next((gain for (part, end), gain in _GAINS.items() if part == component and name.endswith(end)), 1.0)
        table = keep_tables and "scale_shift_table" in name
        found[name] = value if table else value.to(dtype)
    return found


def spectrogram_tables(n_fft: int, window: int, bins: int, sample_rate: int) -> dict[str, Tensor]:
    """The vocoder's ``mel_stft`` buffers: a windowed Fourier basis, its inverse, and mel triangles."""
    spectrum = torch.fft.fft(torch.eye(n_fft, dtype=torch.float64))[: n_fft // 2 + 1]
    basis = torch.cat([spectrum.real, spectrum.imag])
    hann = torch.hann_window(window, dtype=torch.float64)
    tables = {
        "mel_stft.stft_fn.forward_basis": (basis[:, :window] * hann).unsqueeze(1),
        "mel_stft.stft_fn.inverse_basis": (torch.linalg.pinv(basis).T[:, :window] * hann).unsqueeze(1),
        "mel_stft.mel_basis": mel_bank(bins, n_fft, sample_rate, 0.0, sample_rate / 2).T,
    }
    return {n: t.to(torch.bfloat16).contiguous() for n, t in tables.items()}


def low_pass(size: int = 12, cutoff: float = 0.25, half_width: float = 0.3) -> Tensor:
    """[1, 1, size]: the Kaiser-windowed sinc of BigVGAN's 2x up- and downsampling (Kaiser's beta formula)."""
    attenuation = 2.285 * (size // 2 - 1) * math.pi * 4 * half_width + 7.95
    beta = 0.1102 * (attenuation - 8.7) if attenuation > 50 else 0.5842 * (attenuation - 21) ** 0.4 + 0.07886 * (attenuation - 21)
    time = torch.arange(size) - size / 2 + 0.5
    taps = torch.kaiser_window(size, beta=beta, periodic=False) * torch.sinc(2 * cutoff * time)
    return (taps / taps.sum()).view(1, 1, size)


def _generator(seed: int, component: str, name: str) -> torch.Generator:
    digest = hashlib.sha256(f"{seed}/{component}/{name}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:7], "little"))


def _value(name: str, shape: tuple[int, ...], generator: torch.Generator, centre: float) -> Tensor:
    noise = torch.randn(shape, generator=generator)
    last = name.rpartition(".")[2]
    owner = name.split(".")[-2] if "." in name else ""
    if last == "filter":
        return low_pass(shape[-1])
    if last == "timestep_scale_multiplier":
        return torch.tensor(1000.0)
    if last.startswith("std-of-means"):
        return 0.7 + 0.6 * torch.rand(shape, generator=generator)
    if "per_channel_statistics" in name or last in ("alpha", "beta"):
        return 0.1 * noise
    if "scale_shift_table" in last or last == "keyframes_abs_pos_embedding":
        return noise / shape[-1] ** 0.5
    if last == "weight" and len(shape) == 1 or last in ("layer_scalar",) or last.startswith("per_channel_scale"):
        return (centre if owner.endswith(_NORMS) or owner == "norm" else 1.0) + 0.05 * noise
    if len(shape) < 2:
        return 0.02 * noise  # biases
    if last in ("learnable_registers",) or "embed_tokens" in name or name == "shared.weight":
        return noise * (0.3 if "embed" in name else 1.0)
    inner = shape[0] if owner.isdigit() and ".ups." in f".{name}" else shape[1]  # a transposed convolution's first axis is its input
    return noise / (inner * math.prod(shape[2:])) ** 0.5
