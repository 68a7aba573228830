"""Latents to files for looking (mp4 with sound, png, wav), latents kept for later, and clips back from a cache."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor

from .data.cache import Cache
from .data.manifest import ManifestEntry
from .data.writers import write_png, write_video, write_wav
from .errors import DataError
from .geometry import AudioGrid, Grid, Latents, VideoFactors, VideoGrid
from .models.codec import Codec
from .models.safetensors_file import SafetensorsFile
from .tensorfile import save_tensors

KEPT = ".latent"
"""Suffix of kept latents: ``name.video.latent`` and ``name.audio.latent``, as ComfyUI's LoadLatent reads them."""


@dataclass(frozen=True)
class Wave:
    """A decoded sound: samples [2, N] float32 on the host, and their rate."""

    samples: Tensor
    rate: int


def decode_sound(codec: Codec, audio: Latents | None) -> Wave | None:
    """The sound of audio latents (batch of 1)."""
    if audio is None:
        return None
    samples, rate = codec.decode_audio(audio.values)
    return Wave(samples[0].float().cpu(), rate)


def write_latents(codec: Codec, target: Path, video: Latents | None, audio: Latents | None) -> Path:
    """Decode latents of one clip (batch of 1) and write them as ``target`` with the fitting suffix; the file."""
    return write_clip(codec, target, video, decode_sound(codec, audio))


def write_clip(codec: Codec, target: Path, video: Latents | None, sound: Wave | None, beside: Tensor | None = None) -> Path:
    """Decode the pictures of one clip (batch of 1) and write them with a sound that is decoded already; the file.

    beside: frames [F, H, W, 3] uint8 of a reference to show at the left, held where they are fewer.
    """
    wave, rate = (sound.samples, sound.rate) if sound is not None else (None, 0)
    if video is None:
        return Path(write_wav(named(target, ".wav"), wave, rate))
    frames = codec.decode_video(video.values)[0].cpu()
    if beside is not None:
        frames = side_by_side(beside, frames)
    if frames.shape[0] == 1:
        return Path(write_png(named(target, ".png"), frames[0]))
    return Path(write_video(named(target, ".mp4"), frames, video.grid.fps, wave, rate or None))


def named(target: Path, suffix: str) -> Path:
    """``target`` with something added to its name (which may hold dots)."""
    return target.with_name(target.name + suffix)


def side_by_side(reference: Tensor, frames: Tensor, gap: int = 8) -> Tensor:
    """[F, H, W, 3] uint8 with the reference at the left, scaled to the height, its last frame held; a white line between."""
    height = frames.shape[1]
    if reference.shape[1] != height:
        width = max(2, round(reference.shape[2] * height / reference.shape[1] / 2) * 2)
        scaled = torch.nn.functional.interpolate(reference.movedim(-1, 1).float(), (height, width), mode="bilinear", antialias=True)
        reference = scaled.round().clamp(0, 255).to(torch.uint8).movedim(1, -1)
    steps = torch.linspace(0, len(frames) - 1, len(reference)).round().long() if len(reference) > 1 else torch.zeros(1, dtype=torch.long)
    order = torch.searchsorted(steps, torch.arange(len(frames)), right=True) - 1  # a reference of a lower rate keeps its timing
    line = torch.full((len(frames), height, gap, 3), 255, dtype=torch.uint8)
    return torch.cat([reference[order], line, frames], dim=2)


def keep_latents(target: Path, video: Latents | None, audio: Latents | None) -> Path:
    """Write latents as they are, a file a stream, for :func:`decode_kept` or ComfyUI's LoadLatent; the first file."""
    paths = []
    for stream, latents in (("video", video), ("audio", audio)):
        if latents is not None:
            path = named(target, f".{stream}{KEPT}")
            tensors = {"latent_tensor": latents.values.float().contiguous(), "latent_format_version_0": torch.zeros(1)}
            save_tensors(path, tensors, {"ltx_train": json.dumps({"stream": stream, "grid": asdict(latents.grid)})}, what="the latents of a sample")
            paths.append(path)
    assert paths, "a sample has a stream"
    return paths[0]


def read_kept(path: Path) -> Latents:
    """The latents of a kept file. Raises DataError for a file that is none of ours."""
    source = SafetensorsFile.open(path)
    text = source.metadata.get("ltx_train")
    if text is None or "latent_tensor" not in source.spans:
        raise DataError("decode.no_latents", f"{path.name} holds no kept latents of a sample."[:118], "Kept latents end in .video.latent or .audio.latent.")
    said = json.loads(text)
    return Latents(source.read("latent_tensor"), _grid(said["stream"], said["grid"]))


def _grid(stream: str, said: dict) -> Grid:
    return VideoGrid(**{**said, "factors": VideoFactors(**said["factors"])}) if stream == "video" else AudioGrid(**said)


def kept_samples(folder: Path) -> dict[str, dict[str, Path]]:
    """Kept latents below a folder (or one file): sample name -> stream -> file."""
    files = [folder] if folder.is_file() else sorted(folder.rglob(f"*{KEPT}"))
    found: dict[str, dict[str, Path]] = {}
    for path in files:
        name, _, stream = path.name.removesuffix(KEPT).rpartition(".")
        if stream in ("video", "audio"):
            found.setdefault(name, {})[stream] = path
            other = path.with_name(f"{name}.{'audio' if stream == 'video' else 'video'}{KEPT}")
            if other.is_file():
                found[name].setdefault("audio" if stream == "video" else "video", other)
    return found


def decode_kept(where: Path, codec: Codec, folder: Path) -> Iterator[Path]:
    """Decode the latents that previews kept at ``where`` (a file, a run or its samples) into ``folder``; the files."""
    found = kept_samples(where)
    if not found:
        raise DataError("decode.none", f"There are no kept latents at {where}."[:118], "Give a run, its samples folder or a .latent file.")
    folder.mkdir(parents=True, exist_ok=True)
    for name, streams in found.items():
        latents = {stream: read_kept(path) for stream, path in streams.items()}
        yield write_latents(codec, folder / name, latents.get("video"), latents.get("audio"))


def decode_entry(entry: ManifestEntry, cache: Cache, codec: Codec, folder: Path) -> Path:
    """A cached clip back as a file in ``folder``."""
    folder.mkdir(parents=True, exist_ok=True)
    name = re.sub(r"[^\w.-]+", "_", entry.id)
    video = cache.get_latents(entry.video) if entry.video else None
    audio = cache.get_latents(entry.audio) if entry.audio else None
    return write_latents(codec, folder / name, video, audio)
