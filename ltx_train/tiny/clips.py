"""Synthetic clips: frames that say their number, colours, tones, and how they are coded."""

from __future__ import annotations

import wave
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np

BITS = 8
LEFT, RIGHT = (200, 40, 40), (40, 40, 200)
"""Colours of the lower half: left and right, so that turns and mirrors show."""


def counter_frame(number: int, width: int = 128, height: int = 96, left: tuple[int, int, int] = LEFT, right: tuple[int, int, int] = RIGHT) -> np.ndarray:
    """[H, W, 3] uint8: the number as 8 black or white cells along the upper half, two colours below, a moving green block.

    Read back with :func:`read_counter`, even after scaling and lossy coding.
    """
    frame = np.empty((height, width, 3), np.uint8)
    middle = height // 2
    for bit in range(BITS):
        low, high = bit * width // BITS, (bit + 1) * width // BITS
        frame[:middle, low:high] = 235 if number >> (BITS - 1 - bit) & 1 else 20
    frame[middle:, : width // 2] = left
    frame[middle:, width // 2 :] = right
    size = max(2, height // 12)
    at = number * 3 % max(1, width - size)
    frame[height - size :, at : at + size] = (30, 220, 30)
    return frame


def read_counter(frame: Any) -> int:
    """The number drawn by :func:`counter_frame`, from an upright frame of the whole picture."""
    pixels = np.asarray(frame)
    height, width = pixels.shape[:2]
    row = pixels[height // 8 : height * 3 // 8].astype(np.float32).mean(axis=(0, 2))
    number = 0
    for bit in range(BITS):
        low, high = bit * width // BITS, (bit + 1) * width // BITS
        quarter = (high - low) // 4
        number = number << 1 | int(row[low + quarter : high - quarter].mean() > 127)
    return number


def corner_colours(frame: Any) -> tuple[np.ndarray, np.ndarray]:
    """Mean colours of the lower left and lower right quarters (away from the edges)."""
    pixels = np.asarray(frame).astype(np.float32)
    height, width = pixels.shape[:2]
    band = slice(height * 5 // 8, height * 13 // 16)
    return pixels[band, width // 8 : width * 3 // 8].mean((0, 1)), pixels[band, width * 5 // 8 : width * 7 // 8].mean((0, 1))


def tone(seconds: float, rate: int, channels: Sequence[float] = (440.0, 660.0), onset: float = 0.0, amplitude: float = 0.4) -> np.ndarray:
    """[C, N] float32: one sine a channel (0 Hz is silence), silent before ``onset`` seconds."""
    times = np.arange(round(seconds * rate)) / rate
    wave_ = np.stack([amplitude * np.sin(2 * np.pi * f * times) for f in channels]).astype(np.float32)
    wave_[:, times < onset] = 0
    return wave_


def frequency(samples: Any, rate: int) -> float:
    """Hz of the strongest tone of [N] samples, to a fraction of a bin."""
    values = np.asarray(samples, np.float64)
    spectrum = np.abs(np.fft.rfft(values * np.hanning(len(values))))
    peak = int(spectrum[1:-1].argmax()) + 1
    below, at, above = np.log(spectrum[peak - 1 : peak + 2] + 1e-12)
    return (peak + 0.5 * (below - above) / (below - 2 * at + above)) * rate / len(values)


def onset(samples: Any, rate: int, level: float = 0.05) -> float:
    """Seconds of the first sample above ``level``."""
    loud = np.flatnonzero(np.abs(np.asarray(samples)) > level)
    return float(loud[0]) / rate if len(loud) else float("inf")


# -- coding ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Coding:
    """How a synthetic clip is stored: codec, pixel format, options, colour tags, rotation in degrees counter-clockwise."""

    codec: str = "libx264"
    pixel_format: str = "yuv420p"
    options: dict[str, str] = field(default_factory=lambda: {"crf": "12", "preset": "ultrafast"})
    container: dict[str, str] = field(default_factory=dict)
    rotation: int = 0
    sample_aspect: Fraction | None = None
    tags: tuple[int, int, int, int] = (1, 1, 1, 1)  # matrix, primaries, transfer, range
    audio_codec: str = "aac"
    layout: str = "stereo"
    audio_format: str = "fltp"


def encode(
    path: Path, frames: Iterable[np.ndarray], rate: Fraction | int, coding: Coding = Coding(), *, times: Sequence[float] | None = None, sound: np.ndarray | None = None, sound_rate: int = 48000, sound_start: float = 0.0, source: str = "rgb24"
) -> Path:  # fmt: skip
    """Write frames (in ``source`` format) and a sound [C, N] as ``coding`` says; ``times`` in seconds make a variable rate."""
    import av

    path.parent.mkdir(parents=True, exist_ok=True)
    rate, base = Fraction(rate), Fraction(1, 90000)
    with av.open(str(path), "w", container_options=coding.container) as container:
        video = None
        audio = container.add_stream(coding.audio_codec, rate=sound_rate, layout=coding.layout) if sound is not None else None
        for n, pixels in enumerate(frames):
            if video is None:
                video = _video_stream(container, pixels, rate, coding, base if times is not None else None)
            frame = _frame(pixels, source, coding)
            if times is not None:
                frame.pts, frame.time_base = round(times[n] / base), base
            else:
                frame.pts, frame.time_base = n, 1 / rate
            container.mux(video.encode(frame))
        if video is not None:
            container.mux(video.encode(None))
        if audio is not None:
            encode_tone(container, audio, sound, sound_rate, coding, sound_start)
    return path


def _video_stream(container: Any, pixels: np.ndarray, rate: Fraction, coding: Coding, base: Fraction | None) -> Any:
    video = container.add_stream(coding.codec, rate=rate, options=dict(coding.options))
    video.width, video.height, video.pix_fmt = pixels.shape[1], pixels.shape[0], coding.pixel_format
    context = video.codec_context
    if coding.pixel_format.startswith("yuv"):
        context.colorspace, context.color_primaries, context.color_trc, context.color_range = coding.tags
    if base is not None:
        context.time_base = base
    if coding.sample_aspect is not None:
        context.sample_aspect_ratio = coding.sample_aspect
    if coding.rotation:
        video.set_display_rotation(coding.rotation)
    return video


def _frame(pixels: np.ndarray, source: str, coding: Coding) -> Any:
    import av
    from av.video.reformatter import Interpolation

    frame = av.VideoFrame.from_ndarray(np.ascontiguousarray(pixels), source)
    if source == coding.pixel_format:
        return frame
    matrix = {1: 1, 5: 5, 6: 5, 9: 9}.get(coding.tags[0], 1)
    arguments: dict[str, Any] = {"format": coding.pixel_format, "interpolation": Interpolation.BICUBIC | Interpolation.ACCURATE_RND | Interpolation.FULL_CHR_H_INT}
    if coding.pixel_format.startswith("yuv"):
        arguments |= {"dst_colorspace": matrix, "dst_color_range": coding.tags[3], "src_color_range": 2}
    return frame.reformat(**arguments)


def encode_tone(container: Any, stream: Any, sound: np.ndarray, rate: int, coding: Coding, begin: float = 0.0) -> None:
    """Encode a sound [C, N] into a stream of an open container, its first sample at ``begin`` seconds."""
    import av

    resampler = av.AudioResampler(format=stream.codec_context.format.name if stream.codec_context.format else coding.audio_format, layout=coding.layout, rate=rate)
    for start in range(0, sound.shape[1], 1024):
        # interleaved: PyAV cannot fill more than eight planes
        frame = av.AudioFrame.from_ndarray(np.ascontiguousarray(sound[:, start : start + 1024].T.reshape(1, -1)), format="flt", layout=coding.layout)
        frame.sample_rate, frame.pts, frame.time_base = rate, start + round(begin * rate), Fraction(1, rate)
        for part in resampler.resample(frame):
            container.mux(stream.encode(part))
    for part in resampler.resample(None):
        container.mux(stream.encode(part))
    container.mux(stream.encode(None))


def counter_clip(path: Path, frames: int = 25, rate: Fraction | int = 24, *, width: int = 128, height: int = 96, sound: bool = False, first: int = 0) -> Path:
    """A plain mp4 whose frame n shows the number first + n; with a 440/660 Hz tone if asked."""
    wave_ = tone(frames / float(rate), 48000) if sound else None
    return encode(path, (counter_frame(first + n, width, height) for n in range(frames)), Fraction(rate), sound=wave_)


def write_pcm(path: Path, sound: np.ndarray, rate: int) -> Path:
    """A 16-bit WAV of [C, N]."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with wave.open(str(path), "wb") as file:
        file.setnchannels(sound.shape[0])
        file.setsampwidth(2)
        file.setframerate(rate)
        file.writeframes(np.rint(sound.clip(-1, 1) * 32767).astype("<i2").T.tobytes())
    return path


def dataset(folder: Path, clips: int = 4, *, frames: int = 25, rate: Fraction | int = 24, width: int = 128, height: int = 96, sound: bool = True) -> Path:
    """A folder of counter clips with captions: the smallest dataset that trains."""
    colours = ("red", "green", "blue", "grey", "white")
    for n in range(clips):
        counter_clip(folder / f"clip{n}.mp4", frames, rate, width=width, height=height, sound=sound, first=8 * n)
        (folder / f"clip{n}.txt").write_text(f"a {colours[n % len(colours)]} block moves over two colours, clip {n}", encoding="utf-8")
    return folder


def many_tiny_files(folder: Path, count: int) -> Path:
    """``count`` copies of one tiny clip with different captions, for measuring the report."""
    first = counter_clip(folder / "clip00000.mp4", 9, width=64, height=64)
    data = first.read_bytes()
    for n in range(count):
        (folder / f"clip{n:05d}.mp4").write_bytes(data)
        (folder / f"clip{n:05d}.txt").write_text(f"clip {n}", encoding="utf-8")
    return folder
