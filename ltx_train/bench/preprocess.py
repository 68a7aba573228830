"""How fast clips reach the encoder, and how busy it is, beside the official scripts' way on the same files."""

from __future__ import annotations

import json
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

from ..data.buckets import Bucket, ClipOptions, ClipPlan, check, parse_buckets, plan
from ..data.findings import Finding
from ..data.media import prepare
from ..data.probe import probe
from ..data.sources import Captions, FolderSource
from ..errors import ConfigError, DataError
from ..geometry import VideoFactors
from ..memory.settings import DEVICES
from ..section import Section
from ..tiny.media import Coding, encode
from ..training.parallel import single_device

Encode = Callable[[Tensor], object]
"""uint8 [B, F, H, W, 3] to whatever; returns when the work is done."""


class PreprocessBench(Section):
    """Settings of the measurement."""

    media: str | None = Field(None, description="Folder of clips; None makes 1080p clips with grain that move.")
    resolution_bucket: str = Field("768x448x49", description="WIDTHxHEIGHTxFRAMES that all clips are brought to.")
    clips: int = Field(8, ge=1, le=10000, description="Clips that are read; a folder's are repeated as often as needed.")
    workers: int = Field(0, ge=0, le=64, description="Threads that read ahead; 0 is one a core.")
    batch_size: int = Field(1, ge=1, le=64, description="Clips encoded together.")
    model_path: str | None = Field(None, description="Encode with this checkpoint's video VAE.")
    video_vae_path: str | None = Field(None, description="The video VAE file of a split pack.")
    full_size_vae: str | None = Field(None, description="Encode with a video VAE of this family's full size in random weights; no model file is needed.")
    encode_seconds: float | None = Field(None, gt=0, description="Play an encoder of this speed instead, which leaves the processor free as a GPU does.")
    device: str = Field("auto", description="Where the encoder runs.", pattern=DEVICES)
    official: bool = Field(True, description="Measure the official scripts' way too.")

    def check(self) -> None:
        """Raise ConfigError for settings that contradict, before clips are drawn and a model is written."""
        from ..models.families import FAMILIES

        if len(parse_buckets(self.resolution_bucket)) != 1:
            raise ConfigError("bench.bucket", f"resolution_bucket {self.resolution_bucket:.60} names several; one is measured.", "Give one, such as 768x448x49.")
        encoders = [name for name in ("full_size_vae", "model_path", "encode_seconds") if getattr(self, name)]
        if len(encoders) > 1:
            raise ConfigError("bench.encoder", f"{' and '.join(encoders)} each name the encoder.", "Give one of them.")
        if self.video_vae_path and not self.model_path:
            raise ConfigError("bench.encoder", "video_vae_path belongs to a model.", "Give model_path too, or full_size_vae for random weights.")
        if self.full_size_vae and self.full_size_vae not in FAMILIES:
            raise ConfigError("bench.family", f"There is no family {self.full_size_vae!r:.60}.", f"There are: {', '.join(FAMILIES)}.")
        single_device(self.device)

    def run(self) -> Iterator[dict[str, Any]]:
        """One row a way as soon as it is measured, then the row of their ratios."""
        self.check()
        with tempfile.TemporaryDirectory(prefix="ltx-bench-") as folder:
            encoder, factors = self._encoder(Path(folder))
            plans = self.plans(Path(self.media).expanduser() if self.media else draw_clips(Path(folder) / "clips", self.bucket.frames), factors)
            if encoder is not None and not self.encode_seconds:
                encoder(torch.zeros(self.batch_size, self.bucket.frames, self.bucket.height, self.bucket.width, 3, dtype=torch.uint8))  # loads and warms up
            ours = measure("ours", self._ours(plans, factors), encoder, len(plans))
            yield self._row(ours, plans, self.threads)
            if not self.official:
                return
            theirs = measure("official", map(official_way, plans), encoder, len(plans))
            yield self._row(theirs, plans, 0)
        yield {
            "bench": "preprocess", "way": "ratio", "clips_per_second": round(theirs.seconds / ours.seconds, 2),
            "cpu_seconds_per_clip": round(theirs.cpu_seconds / max(ours.cpu_seconds, 1e-9), 2),
        }  # fmt: skip

    @property
    def bucket(self) -> Bucket:
        return parse_buckets(self.resolution_bucket)[0]

    @property
    def threads(self) -> int:
        return self.workers or os.cpu_count() or 1

    def plans(self, folder: Path, factors: VideoFactors) -> list[ClipPlan]:
        """Plans of ``clips`` clips in the one bucket; raises DataError when no clip of the folder fits."""
        check([self.bucket], factors)
        found: list[ClipPlan] = []
        for sample in FolderSource(path=str(folder), captions=Captions(missing="empty")).samples():
            try:
                planned = plan(sample, probe(sample.media), [self.bucket], ClipOptions(audio="off"))
            except DataError:
                continue
            found += [] if isinstance(planned, Finding) else planned
        if not found:
            raise DataError("bench.media", f"No clip in {folder} has the {self.bucket.frames} frames of {self.bucket}."[:118], "Give longer clips, or a smaller bucket.")
        return [found[n % len(found)] for n in range(self.clips)]

    def _ours(self, plans: list[ClipPlan], factors: VideoFactors) -> Iterator[Tensor]:
        batches = [plans[n : n + self.batch_size] for n in range(0, len(plans), self.batch_size)]
        with closing(prepare(batches, factors, workers=self.threads)) as reading:
            for ready in reading:
                for item in ready:
                    if item.error is not None:
                        raise item.error
                yield torch.stack([item.clip.frames for item in ready])

    def _encoder(self, folder: Path) -> tuple[Encode | None, VideoFactors]:
        if self.full_size_vae:
            return _vae(*full_size_vae(folder / "model", self.full_size_vae), self.device)
        if self.model_path:
            return _vae(self.model_path, self.video_vae_path, self.device)
        if self.encode_seconds:
            return (lambda frames: time.sleep(self.encode_seconds * len(frames))), VideoFactors()
        return None, VideoFactors()

    def _row(self, found: Measured, plans: list[ClipPlan], workers: int) -> dict[str, Any]:
        first = plans[0].probe
        source = f"{first.coded_width}x{first.coded_height} {first.codec} {first.pixel_format}"
        row = {"bench": "preprocess", "way": found.way, "source": source, "bucket": str(self.bucket), "clips": found.clips, "workers": workers}
        row |= {"seconds": round(found.seconds, 3), "cpu_seconds": round(found.cpu_seconds, 3), "clips_per_second": round(found.clips / found.seconds, 3)}
        row["cpu_seconds_per_clip"] = round(found.cpu_seconds / found.clips, 3)
        if found.encoding is not None:
            row |= {"encode_seconds": round(found.encoding, 3), "encoder_busy": round(found.encoding / found.seconds, 4)}
        return row


@dataclass(frozen=True)
class Measured:
    """seconds: on the clock for all clips; cpu_seconds: of all threads; encoding: seconds inside the encoder, or None without one."""

    way: str
    clips: int
    seconds: float
    cpu_seconds: float
    encoding: float | None


def measure(way: str, batches: Iterator[Tensor], encoder: Encode | None, clips: int) -> Measured:
    """Take all batches to their end, encoding each when there is an encoder."""
    encoding, started, cpu = 0.0, time.perf_counter(), time.process_time()
    for frames in batches:
        if encoder is not None:
            begun = time.perf_counter()
            encoder(frames)
            encoding += time.perf_counter() - begun
    return Measured(way, clips, time.perf_counter() - started, time.process_time() - cpu, encoding if encoder is not None else None)


def official_way(piece: ClipPlan) -> Tensor:
    """A clip as the official scripts bring it to the encoder: all its frames to RGB at full size, the whole clip to float32,
    each frame by antialiased bicubic on the CPU, the middle cut out, -1..1. Returned as uint8 [1, F, H, W, 3] of the same values."""
    import av

    bucket, place = piece.bucket, piece.placement
    frames = []
    with av.open(str(piece.media)) as container:
        for frame in container.decode(video=0):
            frames.append(torch.from_numpy(frame.to_ndarray(format="rgb24")))
            if len(frames) == bucket.frames:
                break
    clip = torch.stack(frames).permute(0, 3, 1, 2).float() / 255.0
    size = (place.fit_height, place.fit_width)
    small = torch.stack([F.interpolate(frame[None], size=size, mode="bicubic", antialias=True, align_corners=False)[0] for frame in clip])
    small = small[..., place.top : place.top + bucket.height, place.left : place.left + bucket.width] * 2.0 - 1.0
    return ((small.clamp(-1, 1) + 1.0) * 127.5).round().to(torch.uint8).permute(0, 2, 3, 1)[None]


def draw_clips(folder: Path, frames: int, count: int = 2) -> Path:
    """``count`` 1080p clips of ``frames`` frames at 24 a second: a soft picture that drifts, with grain, h264 as cameras and editors make it."""
    random = np.random.default_rng(0)
    for number in range(count):
        coarse = torch.from_numpy(random.integers(0, 256, (1, 3, 34, 60)).astype(np.float32))
        wide = F.interpolate(coarse, size=(1080 + 2 * frames, 1920 + 4 * frames), mode="bicubic")[0].permute(1, 2, 0).clamp(0, 255)
        picture = wide.to(torch.uint8).numpy()
        grain = random.integers(0, 16, (1080 + 64, 1920 + 64, 1), dtype=np.uint8)
        coding = Coding(options={"crf": "21", "preset": "veryfast"})
        encode(folder / f"clip{number}.mp4", _drift(picture, grain, frames), Fraction(24), coding)
    return folder


def _drift(picture: np.ndarray, grain: np.ndarray, frames: int) -> Iterator[np.ndarray]:
    for n in range(frames):
        part = picture[2 * n : 2 * n + 1080, 4 * n : 4 * n + 1920]
        moved = grain[n * 17 % 64 : n * 17 % 64 + 1080, n * 29 % 64 : n * 29 % 64 + 1920]
        yield np.minimum(part, 239) + moved


def full_size_vae(folder: Path, family: str) -> tuple[Path, Path]:
    """(a small model of the family, a video VAE of its published size in random weights) in ``folder``."""
    from ..models.families import FAMILIES
    from ..tensorfile import save_tensors
    from ..tiny.checkpoints import write_tiny
    from ..tiny.shapes import video_vae_shapes
    from ..tiny.values import weights

    model = write_tiny(folder, family)["model"]
    config = FAMILIES[family].config["vae"]
    file = folder / "video_vae.safetensors"
    save_tensors(file, weights(video_vae_shapes(config), 0, "video_vae"), {"config": json.dumps({"vae": config})}, what="a video VAE")
    return model, file


def _vae(model: str | Path, vae: str | Path | None, device: str) -> tuple[Encode, VideoFactors]:
    """The checkpoint's own video VAE, on a GPU in bfloat16; each call waits for the GPU."""
    from ..models.checkpoint import Checkpoint
    from ..models.codec import EngineCodec

    checkpoint = Checkpoint.open(Path(model).expanduser(), video_vae=Path(vae).expanduser() if vae else None)
    place = single_device(device)
    codec = EngineCodec(checkpoint, device=place, dtype=torch.float32 if place.type == "cpu" else torch.bfloat16)
    return codec.encode_video, checkpoint.video_factors
