"""Log-mel spectrograms and resampling in plain torch: what the audio VAE reads."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from ..errors import DataError

_LINEAR_HZ = 200.0 / 3  # Slaney's scale: 66.7 Hz a mel below 1 kHz,
_BREAK_HZ = 1000.0
_LOG_STEP = math.log(6.4) / 27.0  # and 27 mels a factor of 6.4 above it


def _to_mel(hz: Tensor) -> Tensor:
    above = _BREAK_HZ / _LINEAR_HZ + torch.log(hz.clamp(min=_BREAK_HZ) / _BREAK_HZ) / _LOG_STEP
    return torch.where(hz < _BREAK_HZ, hz / _LINEAR_HZ, above)


def _to_hz(mel: Tensor) -> Tensor:
    knee = _BREAK_HZ / _LINEAR_HZ
    return torch.where(mel < knee, mel * _LINEAR_HZ, _BREAK_HZ * torch.exp((mel - knee).clamp(min=0) * _LOG_STEP))


def mel_bank(bins: int, n_fft: int, sample_rate: int, low: float, high: float) -> Tensor:
    """[n_fft // 2 + 1, bins] float32 triangles on Slaney's mel scale, each of area 2 / bandwidth (Auditory Toolbox)."""
    edges = torch.tensor([low, high], dtype=torch.float64)
    first, last = _to_mel(edges).tolist()
    corners = _to_hz(torch.linspace(first, last, bins + 2, dtype=torch.float64))
    frequencies = torch.linspace(0, sample_rate / 2, n_fft // 2 + 1, dtype=torch.float64)
    slopes = corners[None, :] - frequencies[:, None]
    widths = corners.diff()
    rising, falling = -slopes[:, :-2] / widths[:-1], slopes[:, 2:] / widths[1:]
    bank = torch.minimum(rising, falling).clamp(min=0)
    return (bank * (2.0 / (corners[2:] - corners[:-2]))).float()


@dataclass(frozen=True)
class MelSettings:
    """The spectrogram of ``config.audio_vae.preprocessing``: sizes in samples, frequencies in Hz."""

    sample_rate: int = 16000
    n_fft: int = 1024
    window: int = 1024
    hop: int = 160
    bins: int = 64
    low: float = 0.0
    high: float = 8000.0

    @classmethod
    def of(cls, config: Mapping) -> MelSettings:
        """Read ``config.audio_vae``."""
        stft, mel = config["preprocessing"]["stft"], config["preprocessing"]["mel"]
        rate = config["model"]["params"].get("sampling_rate", 16000)
        return cls(
            sample_rate=rate,
            n_fft=stft["filter_length"],
            window=stft.get("win_length", stft["filter_length"]),
            hop=stft["hop_length"],
            bins=mel["n_mel_channels"],
            low=float(mel.get("mel_fmin") or 0.0),
            high=float(mel.get("mel_fmax") or rate / 2),
        )


def log_mel(waveform: Tensor, settings: MelSettings) -> Tensor:
    """Waveform [B, C, N] at ``settings.sample_rate`` -> [B, C, N // hop + 1, bins]: log of mel magnitudes, at least 1e-5.

    Hann window, centred frames, reflected ends. Raises DataError when the sound is shorter than half a window.
    """
    if waveform.shape[-1] <= settings.n_fft // 2:
        raise DataError(
            "audio.too_short",
            f"A sound of {waveform.shape[-1]} samples at {settings.sample_rate} Hz is too short to encode.",
            f"It needs more than {settings.n_fft // 2} samples ({settings.n_fft / 2 / settings.sample_rate * 1000:.0f} ms).",
        )
    window = torch.hann_window(settings.window, device=waveform.device, dtype=waveform.dtype)
    spectrum = torch.stft(
        waveform.flatten(0, -2), settings.n_fft, settings.hop, settings.window, window, center=True, pad_mode="reflect", return_complex=True
    )
    bank = mel_bank(settings.bins, settings.n_fft, settings.sample_rate, settings.low, settings.high).to(waveform)
    mel = spectrum.abs().transpose(-1, -2) @ bank
    return mel.clamp(min=1e-5).log().unflatten(0, waveform.shape[:-1])


_ZEROS = 64  # zero crossings of the sinc on each side
_ROLLOFF = 0.95  # of the lower Nyquist frequency
_BETA = 12.0  # Kaiser window: stop band near -118 dB


def resample(waveform: Tensor, source_rate: int, target_rate: int, *, block: int = 1 << 15) -> Tensor:
    """Waveform [..., N] -> [..., ceil(N * target / source)] by Kaiser-windowed sinc interpolation, polyphase.

    y(n) = sum_k x(k) * c * sinc(c * (t_n - k)) * w((t_n - k) / span), t_n = n * source / target,
    c = rolloff * min(1, target / source). Outside the signal counts as silence.
    """
    if source_rate <= 0 or target_rate <= 0:
        raise DataError(
            "audio.sample_rate",
            f"A sample rate of {min(source_rate, target_rate)} Hz cannot be used.",
            "It must be above 0; the file may be damaged.",
        )
    if source_rate == target_rate:
        return waveform
    shared = math.gcd(source_rate, target_rate)
    step, phases = source_rate // shared, target_rate // shared
    table, half = _phase_table(step, phases)
    table = table.to(waveform)
    length = -(-waveform.shape[-1] * phases // step)
    padded = torch.nn.functional.pad(waveform, (half, half + step))
    windows = padded.unfold(-1, table.shape[1], 1)
    parts = []
    for start in range(0, length, block):
        n = torch.arange(start, min(start + block, length), device=waveform.device)
        base = torch.div(n * step, phases, rounding_mode="floor")
        parts.append((windows[..., base, :] * table[n % phases]).sum(-1))
    return torch.cat(parts, dim=-1)


def _phase_table(step: int, phases: int) -> tuple[Tensor, int]:
    """[phases, taps] float64 filters, and how many samples before floor(t_n) the first tap lies."""
    cutoff = _ROLLOFF * min(1.0, phases / step)
    span = _ZEROS / cutoff
    half = math.ceil(span)
    offset = torch.arange(phases, dtype=torch.float64) * step % phases / phases
    distance = offset[:, None] + half - torch.arange(2 * half + 2, dtype=torch.float64)[None, :]
    inside = (1 - (distance / span) ** 2).clamp(min=0)
    window = torch.special.i0(_BETA * inside.sqrt()) / torch.special.i0(torch.tensor(_BETA, dtype=torch.float64))
    table = cutoff * torch.sinc(cutoff * distance) * window * (inside > 0)
    return table / table.sum(dim=1, keepdim=True), half  # a constant stays the same constant at every phase
