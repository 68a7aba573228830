"""Writing clips: mp4 at the true rate with stereo sound, png, wav; each file appears at once or not at all. What they were made from."""

from __future__ import annotations

import json
import os
import wave
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .probe import exact_rate

AAC_RATES = (96000, 88200, 64000, 48000, 44100, 32000, 24000, 22050, 16000, 12000, 11025, 8000, 7350)


@contextmanager
def _appearing(path: Path) -> Iterator[Path]:
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.stem}.{os.getpid()}.tmp{path.suffix}")
    try:
        yield temporary
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def _arrays(frames: Any, even: bool = True) -> Iterator[np.ndarray]:
    for frame in frames:
        array = frame.detach().cpu().numpy() if isinstance(frame, Tensor) else np.asarray(frame)
        assert array.dtype == np.uint8 and array.ndim == 3 and array.shape[-1] == 3, "frames are uint8 [F,H,W,3]"
        pad = ((0, array.shape[0] % 2), (0, array.shape[1] % 2), (0, 0))  # 4:2:0 needs even sides
        yield np.ascontiguousarray(np.pad(array, pad, mode="edge") if even and (pad[0][1] or pad[1][1]) else array)


def write_video(
    path: str | Path, frames: Tensor | np.ndarray | Iterable[Any], fps: Fraction | float, waveform: Tensor | None = None, sample_rate: int | None = None, *, crf: int = 18, pixel_format: str = "yuv420p"
) -> Path:
    """An h264 mp4 (BT.709 limited, crf 18) of uint8 frames [F,H,W,3] at the exact rate, with AAC stereo of [C,N] if given.

    pixel_format: yuv420p, which every player knows (odd sides get a line more), or yuv444p, which keeps odd sides.
    """
    import av
    from av.video.reformatter import ColorRange, Colorspace

    path = Path(path)
    rate = fps if isinstance(fps, Fraction) else exact_rate(float(fps))
    with _appearing(path) as temporary:
        with av.open(str(temporary), "w", options={"movflags": "+faststart"}) as container:
            video = None
            sound = _sound_stream(container, sample_rate) if waveform is not None else None
            for array in _arrays(frames, even=pixel_format == "yuv420p"):
                if video is None:
                    video = container.add_stream("libx264", rate=rate, options={"crf": str(crf), "preset": "medium"})
                    video.width, video.height, video.pix_fmt = array.shape[1], array.shape[0], pixel_format
                    context = video.codec_context
                    context.colorspace = context.color_primaries = context.color_trc = context.color_range = 1
                frame = av.VideoFrame.from_ndarray(array, "rgb24").reformat(format=pixel_format, dst_colorspace=Colorspace.ITU709, dst_color_range=ColorRange.MPEG)
                frame.pts = None
                container.mux(video.encode(frame))
            assert video is not None, "a video needs at least one frame"
            container.mux(video.encode(None))
            if sound is not None:
                _encode_sound(container, sound, waveform, sample_rate)
    return path


def _sound_stream(container: Any, sample_rate: int | None) -> Any:
    assert sample_rate, "sound needs its sample rate"
    rate = sample_rate if sample_rate in AAC_RATES else 48000
    return container.add_stream("aac", rate=rate, layout="stereo", bit_rate=192000)


def _encode_sound(container: Any, stream: Any, waveform: Tensor, sample_rate: int) -> None:
    import av

    samples = two_channels(waveform)
    resampler = av.AudioResampler(format="fltp", layout="stereo", rate=stream.rate)
    for start in range(0, samples.shape[1], 1024):
        frame = av.AudioFrame.from_ndarray(np.ascontiguousarray(samples[:, start : start + 1024]), format="fltp", layout="stereo")
        frame.sample_rate, frame.pts, frame.time_base = sample_rate, start, Fraction(1, sample_rate)
        for part in resampler.resample(frame):
            container.mux(stream.encode(part))
    for part in resampler.resample(None):
        container.mux(stream.encode(part))
    container.mux(stream.encode(None))


def two_channels(waveform: Tensor) -> np.ndarray:
    """[C, N] or [N] float -> [2, N] float32 in -1..1."""
    values = torch.as_tensor(waveform).detach().float().cpu()
    values = values.reshape(1, -1) if values.ndim == 1 else values.reshape(-1, values.shape[-1])
    values = values.repeat(2, 1) if values.shape[0] == 1 else values[:2]
    return values.clamp(-1, 1).numpy()


def write_wav(path: str | Path, waveform: Tensor, sample_rate: int) -> Path:
    """A 16-bit stereo WAV of [C, N] float in -1..1."""
    path = Path(path)
    samples = np.rint(two_channels(waveform) * 32767).astype("<i2")
    with _appearing(path) as temporary, wave.open(str(temporary), "wb") as file:
        file.setnchannels(2)
        file.setsampwidth(2)
        file.setframerate(sample_rate)
        file.writeframes(samples.T.tobytes())
    return path


def write_png(path: str | Path, frame: Tensor | np.ndarray) -> Path:
    """A PNG of one uint8 frame [H,W,3]."""
    from PIL import Image

    path = Path(path)
    array = frame.detach().cpu().numpy() if isinstance(frame, Tensor) else np.asarray(frame)
    with _appearing(path) as temporary:
        Image.fromarray(np.ascontiguousarray(array)).save(temporary, format="PNG")
    return path


class Record:
    """What each file of a folder was made from, so that a second run makes only what changed; a damaged record says nothing."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            told = json.loads(path.read_text(encoding="utf-8"))
        except (FileNotFoundError, ValueError):
            told = {}
        self.keys: dict[str, str] = {k: v for k, v in told.items() if isinstance(v, str)} if isinstance(told, dict) else {}

    def get(self, target: Path) -> str | None:
        """What a file was made from; None for one that is not ours."""
        return self.keys.get(target.relative_to(self.path.parent).as_posix())

    def set(self, target: Path, key: str) -> None:
        """Note what a file was made from, on the disk at once."""
        self.keys[target.relative_to(self.path.parent).as_posix()] = key
        with _appearing(self.path) as temporary:
            temporary.write_text(json.dumps(self.keys, indent=1, sort_keys=True), encoding="utf-8")
