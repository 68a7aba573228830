"""What a captioning model is given of a clip: some frames at a small size, and its sound as 16 kHz mono."""

from __future__ import annotations

import base64
import io
import math
import wave
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from ..data.buckets import Bucket, ClipOptions, ClipPlan, Placement
from ..data.decode import pictures
from ..data.findings import MediaError
from ..data.probe import Probe, probe
from ..data.sound import read_sound
from ..data.sources import Sample
from ..models.mel import resample

SOUND_RATE = 16000


@dataclass(frozen=True)
class Excerpt:
    """frames: [F, H, W, 3] uint8 or None, ``fps`` of them a second; sound: [N] float32 at 16 kHz or None."""

    kind: Literal["video", "image", "audio"]
    frames: Tensor | None
    fps: float
    sound: Tensor | None


def read_excerpt(path: Path, *, fps: float, most: int, side: int, with_sound: bool, sound: Path | None = None, multiple: int = 2, sound_seconds: float = 300.0) -> Excerpt:
    """Frames of a clip at ``fps`` a second (fewer when that would be more than ``most``), the longer side at most ``side``.

    multiple: sides are multiples of it. sound: a sound file of its own. Raises MediaError naming what is wrong with a file.
    """
    found = probe(path)
    refusal = next((f for f in found.findings if f.refused), None)
    if refusal is not None:
        raise MediaError(refusal.code, f"{path.name}: {refusal.message}")
    heard = _sound(sound or path, found if sound is None else probe(sound), sound_seconds) if with_sound else None
    if found.kind == "audio":
        if heard is None:
            raise MediaError("media.no_frames", f"{path.name} holds no picture, and sound is not sent.")
        return Excerpt("audio", None, 0.0, heard)
    plan = sampling(path, found, fps, most, side, multiple)
    frames = torch.stack([picture.pixels for picture in pictures(plan)])
    return Excerpt("image" if found.kind == "image" else "video", frames, float(plan.fps), heard if found.kind == "video" else None)


def sampling(path: Path, found: Probe, fps: float, most: int, side: int, multiple: int = 2) -> ClipPlan:
    """The plan of evenly spaced frames, each at the middle of its share of the clip."""
    scale = min(1.0, side / max(found.width, found.height))
    width, height = (max(multiple, round(v * scale / multiple) * multiple) for v in (found.width, found.height))
    seconds = found.timeline.seconds
    count = 1 if found.kind == "image" else max(1, min(most, found.frames, math.floor(seconds * fps + 1e-6)))
    rate = Fraction(24) if found.kind == "image" else Fraction(count / seconds).limit_denominator(100000)
    start = found.timeline.start + (0.5 / float(rate) if count > 1 else 0.5 * (seconds - 1 / found.fps))
    start = min(start, found.timeline.start + max(0.0, seconds - 1 / found.fps))
    return ClipPlan(
        Sample(path.name, path, ""), path, found, Bucket(width, height, count), Placement(width, height), 0, 1, rate, start, seconds, ClipOptions(), hold=True
    )


def _sound(path: Path, found: Probe, longest: float) -> Tensor | None:
    if found.sound is None:
        return None
    heard = read_sound(path, found.sound, found.sound.start, min(found.sound.seconds, longest))
    return resample(heard.waveform.mean(0), heard.sample_rate, SOUND_RATE)


def jpegs(frames: Tensor, quality: int = 90) -> Iterator[bytes]:
    """Each frame of [F, H, W, 3] as a JPEG."""
    from PIL import Image

    for frame in frames:
        out = io.BytesIO()
        Image.fromarray(np.ascontiguousarray(frame.numpy())).save(out, "JPEG", quality=quality)
        yield out.getvalue()


def wav(sound: Tensor) -> bytes:
    """A 16-bit mono WAV of [N] at 16 kHz."""
    out = io.BytesIO()
    with wave.open(out, "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(SOUND_RATE)
        file.writeframes((sound.clamp(-1, 1) * 32767).round().to(torch.int16).numpy().astype("<i2").tobytes())
    return out.getvalue()


def mp4(frames: Tensor, fps: float) -> bytes:
    """A silent mp4 at a constant rate, which every server decodes: the file as it was may be turned, of variable rate or rare."""
    import tempfile

    from ..data.writers import write_video

    with tempfile.TemporaryDirectory() as folder:
        return write_video(Path(folder) / "clip.mp4", frames, Fraction(fps).limit_denominator(1000), crf=23).read_bytes()


def data_url(kind: str, content: bytes) -> str:
    """``data:<kind>;base64,...``"""
    return f"data:{kind};base64,{base64.b64encode(content).decode()}"
