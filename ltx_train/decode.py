"""Latents to files for looking: a clip with its sound as mp4, a still as png, sound alone as wav."""

from __future__ import annotations

import re
from pathlib import Path

from .data.cache import Cache, ManifestEntry
from .data.media import write_png, write_video, write_wav
from .geometry import Latents
from .models.codec import Codec


def write_latents(codec: Codec, target: Path, video: Latents | None, audio: Latents | None) -> Path:
    """Decode latents of one clip (batch of 1) and write them as ``target`` with the fitting suffix; the file."""
    sound = codec.decode_audio(audio.values) if audio is not None else None
    wave, rate = (sound[0][0].float().cpu(), sound[1]) if sound is not None else (None, 0)
    if video is None:
        return Path(write_wav(target.with_name(target.name + ".wav"), wave, rate))
    frames = codec.decode_video(video.values)[0].cpu()
    if frames.shape[0] == 1:
        return Path(write_png(target.with_name(target.name + ".png"), frames[0]))
    return Path(write_video(target.with_name(target.name + ".mp4"), frames, video.grid.fps, wave, rate or None))


def decode_entry(entry: ManifestEntry, cache: Cache, codec: Codec, folder: Path) -> Path:
    """A cached clip back as a file in ``folder``."""
    folder.mkdir(parents=True, exist_ok=True)
    name = re.sub(r"[^\w.-]+", "_", entry.id)
    video = cache.get_latents(entry.video) if entry.video else None
    audio = cache.get_latents(entry.audio) if entry.audio else None
    return write_latents(codec, folder / name, video, audio)
