"""Sound of a file: decoded by PyAV, cut by timestamps, down to two channels with the official weights."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .container import opened
from .findings import Finding, MediaError
from .probe import SoundInfo
from .sources import MemoryClip

SILENCE = 1e-4
LOUDEST = 1000.0  # full scale is 1; float files of some programs go a little beyond
JUMP = 0.04  # seconds: smaller differences between a timestamp and the samples so far are rounding of the container's clock


@dataclass(frozen=True)
class Sound:
    """waveform: [2, N] float32; notes: what had to be filled."""

    waveform: Tensor
    sample_rate: int
    notes: tuple[Finding, ...] = ()


def downmix(waveform: Tensor) -> Tensor:
    """[C, N] -> [2, N] with the official weights: mono doubled; 5.1 L + .707 (C + Ls), over 2.414; 7.1 over 3.121; else the mean.

    Channel order FL FR FC LFE (BL BR (SL SR)); the low-frequency channel is left out.
    """
    channels = waveform.shape[0]
    if channels == 1:
        return waveform.repeat(2, 1)
    if channels == 2:
        return waveform
    if channels == 6:
        left, right, centre, _, back_left, back_right = waveform
        return torch.stack([left + 0.707 * (centre + back_left), right + 0.707 * (centre + back_right)]) / 2.414
    if channels == 8:
        left, right, centre, _, back_left, back_right, side_left, side_right = waveform
        return torch.stack([left + 0.707 * (centre + side_left + back_left), right + 0.707 * (centre + side_right + back_right)]) / 3.121
    return waveform.mean(0, keepdim=True).repeat(2, 1)


def read_sound(source: Path | MemoryClip, info: SoundInfo, start: float, seconds: float) -> Sound:
    """``seconds`` of sound from ``start`` on the file's clock, silence where there is none; native rate.

    Raises MediaError audio.decode when the stream cannot be decoded, audio.values when it holds no sound.
    """
    length = round(seconds * info.sample_rate)
    if isinstance(source, MemoryClip):
        whole = source.waveform.detach().float().cpu()
        whole = whole.reshape(-1, whole.shape[-1])
        begin = max(0, round(start * info.sample_rate))
        piece = whole[:, begin : begin + length]
        return _finish(downmix(torch.nn.functional.pad(piece, (0, length - piece.shape[1]))), info, piece.shape[1], source.name)
    out, filled, cursor = None, 0, None
    for block in _blocks(source, info, start):
        at = round((block.seconds - start) * info.sample_rate)
        if cursor is not None and abs(at - cursor) <= JUMP * info.sample_rate:
            at = cursor
        cursor = at + block.samples.shape[1]
        out = np.zeros((block.samples.shape[0], length), np.float32) if out is None else out
        low, high = max(at, 0), min(cursor, length)
        if high > low:
            out[:, low:high] = block.samples[: out.shape[0], low - at : high - at]
            filled = max(filled, high)
        if cursor >= length:
            break
    if out is None:
        out = np.zeros((2, length), np.float32)
    return _finish(downmix(torch.from_numpy(out)), info, filled, source.name)


def _finish(waveform: Tensor, info: SoundInfo, filled: int, name: str) -> Sound:
    peak = float(waveform.abs().max()) if waveform.numel() else 0.0
    if not peak <= LOUDEST:  # also where it is no number
        raise MediaError("audio.values", f"{name}: the sound has samples of {peak:g}, where 1 is full scale.")
    missing = waveform.shape[1] - filled
    short = missing > 0.1 * info.sample_rate
    notes = (Finding("audio.short", f"the last {missing / info.sample_rate:.2f} s are silence"),) if short else ()
    if peak < SILENCE:
        notes += (Finding("audio.silent", "no sample above -80 dB"),)
    return Sound(waveform.contiguous(), info.sample_rate, notes)


@dataclass(frozen=True)
class _Block:
    seconds: float
    samples: np.ndarray  # [C, n] float32


def _blocks(path: Path, info: SoundInfo, start: float) -> Iterator[_Block]:
    import av

    with opened(path) as container:
        stream = container.streams[info.stream]
        if start - info.start > 3.0:
            # a second earlier: codecs need some frames to settle
            container.seek(max(0, int((start - 1.0) / stream.time_base)), stream=stream, backward=True)
        resampler, clock = None, None
        try:
            for frame in container.decode(stream):
                resampler = resampler or av.AudioResampler(format="flt", layout=frame.layout, rate=frame.sample_rate)
                seconds = clock if frame.pts is None else float(frame.pts * frame.time_base)
                seconds = info.start if seconds is None else seconds
                for part in _planar(resampler, frame):
                    yield _Block(seconds, part)
                    seconds += part.shape[1] / info.sample_rate
                clock = seconds
        except av.error.EOFError:
            return
        except (av.error.FFmpegError, ValueError) as error:
            raise MediaError("audio.decode", f"{path.name}: the sound cannot be decoded: {str(error)[:60]}") from error


def _planar(resampler: Any, frame: Any) -> Iterator[np.ndarray]:
    frame.pts = None  # the times are ours
    for part in resampler.resample(frame):
        # interleaved, because PyAV reads past the planes of 8 channels
        yield part.to_ndarray().reshape(-1, len(part.layout.channels)).T
