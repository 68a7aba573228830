"""Buckets: their text form, their checks, which one a clip goes to, and the plan of every clip read from it."""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Literal

from pydantic import Field, field_validator

from ..errors import ConfigError
from ..geometry import VideoFactors
from ..section import Section
from .findings import Finding
from .probe import STILL_RATE, Probe, exact_rate
from .sources import MemoryClip, Sample


@dataclass(frozen=True, order=True)
class Bucket:
    """Pixel width x height x frames; 1 frame is a still."""

    width: int
    height: int
    frames: int

    def __str__(self) -> str:
        return f"{self.width}x{self.height}x{self.frames}"

    @property
    def aspect(self) -> float:
        return self.width / self.height

    def tokens(self, factors: VideoFactors) -> int:
        """Latent tokens of one clip."""
        return (self.width // factors.width) * (self.height // factors.height) * ((self.frames - 1) // factors.time + 1)


class ClipOptions(Section):
    """How clips are turned into bucket-sized pieces."""

    fps: float | None = Field(None, gt=0, le=240, description="Resample to this rate by timestamps; None keeps each clip's true rate.")
    crop: Literal["centre", "random", "motion"] = Field("centre", description="Which part is kept where the shape differs: the middle, a seeded random part, or where it moves.")
    letterbox: bool = Field(False, description="Fit the whole picture with black borders instead of cropping.")
    frame_selection: Literal["head", "uniform", "random", "all", "sliding"] = Field(
        "head", description="Which frames: the first; windows spread evenly; seeded random windows; all windows side by side; sliding windows."
    )
    windows: int = Field(1, ge=1, le=10000, description="Windows a clip with uniform or random selection; the most with all and sliding is not limited.")
    window_stride: int | None = Field(None, ge=1, description="Frames between the starts of sliding windows; None is half a window.")
    frame_step: int = Field(1, ge=1, le=64, description="Take every n-th frame only; the rate falls with it.")
    hdr: Literal["tone_map", "refuse"] = Field("tone_map", description="HLG and PQ clips: tone-map to standard range, or refuse.")
    alpha: Literal["composite", "mask"] = Field("composite", description="Transparency: composite on alpha_colour, or also use it as loss mask.")
    alpha_colour: tuple[int, int, int] = Field((0, 0, 0), description="Red, green, blue (0..255) behind transparent pixels.")
    audio: Literal["auto", "off"] = Field("auto", description="auto: sound where a clip has it; off: no sound at all.")
    audio_durations: str | None = Field(None, description="Seconds such as 2;4;8 that sound-only clips are cut to; None keeps up to audio_max_seconds.")
    audio_max_seconds: float = Field(20.0, gt=0, le=600, description="The longest piece taken of a sound-only clip without audio_durations.")
    reference_downscale_factor: int = Field(1, ge=1, le=16, description="References are this much smaller than the clip.")
    reference_temporal_scale_factor: int = Field(1, ge=1, le=16, description="References keep frame 0 and every n-th frame after.")
    selection_seed: int = Field(42, description="Seed of random windows and crops.")

    @field_validator("alpha_colour")
    @classmethod
    def _colour(cls, value: tuple[int, int, int]) -> tuple[int, int, int]:
        if not all(0 <= v <= 255 for v in value):
            raise ValueError(f"alpha_colour {value} has a part outside 0..255")
        return value

    @field_validator("audio_durations")
    @classmethod
    def _seconds(cls, value: str | None) -> str | None:
        for part in (value or "").split(";"):
            try:
                good = not part.strip() or 0 < float(part) < math.inf
            except ValueError:
                good = False
            if not good:
                raise ValueError(f"audio_durations {value!r} is no list of seconds; write it as 2;4;8")
        return value

    def durations(self) -> list[float]:
        """The sound lengths asked for, in seconds, rising."""
        return sorted(float(v) for v in (self.audio_durations or "").split(";") if v.strip())


@dataclass(frozen=True)
class Placement:
    """Where the upright picture goes: scaled to fit_width x fit_height, its (left, top) pixel at the bucket's corner.

    Negative left or top leave a border (letterbox).
    """

    fit_width: int
    fit_height: int
    left: int = 0
    top: int = 0


@dataclass(frozen=True)
class ClipPlan:
    """Everything that decides which pixels and samples are read of one clip.

    media: the file or ComfyUI clip read (a role's plan reads the role's file). bucket: None for sound alone.
    first: index of the first frame on the file's timeline at ``rate * stride`` frames a second.
    stride: timeline frames between two frames read. fps: the true rate of what is read, for positions.
    start: seconds of the first frame on the file's own clock. seconds: length of the piece.
    picks: a temporal factor S keeps frames 0, 1, 1+S, 1+2S... of the clip's frames; 1 keeps all.
    """

    sample: Sample
    media: Path | MemoryClip
    probe: Probe
    bucket: Bucket | None
    placement: Placement | None
    first: int
    stride: int
    fps: Fraction
    start: float
    seconds: float
    options: ClipOptions
    role: str = "video"
    temporal_factor: int = 1
    hold: bool = False  # repeat the last frame when the file ends early (references)
    notes: tuple[Finding, ...] = ()

    @property
    def id(self) -> str:
        """Unique in the dataset: the sample's id and the first frame where a clip gives several pieces."""
        return f"{self.sample.id}@{self.first}" if self.first else self.sample.id

    @property
    def frames(self) -> int:
        return self.bucket.frames if self.bucket else 0

    def slots(self) -> list[int]:
        """Timeline indices of the frames read, in order."""
        if self.temporal_factor == 1:
            return [self.first + n * self.stride for n in range(self.frames)]
        kept = [0] + [1 + n * self.temporal_factor for n in range(self.frames - 1)]
        return [self.first + n * self.stride for n in kept]

    @property
    def timeline_rate(self) -> Fraction:
        """Rate at which slots count."""
        return self.fps * self.stride * self.temporal_factor

    @property
    def sound(self) -> Path | MemoryClip | None:
        """Where the sound comes from: the audio role, the clip itself, or nothing."""
        if self.options.audio == "off" or (self.bucket is not None and self.bucket.frames == 1 and self.role == "video"):
            return None
        if "audio" in self.sample.roles and self.role == "video":
            return self.sample.roles["audio"]
        return self.media if self.probe.sound else None


# -- the text form ---------------------------------------------------------------------------------------------------

_BUCKET = re.compile(r"^\s*(\d+)\s*[xX*]\s*(\d+)(?:\s*[xX*]\s*(\d+))?\s*$")


def parse_buckets(text: str) -> tuple[Bucket, ...]:
    """``960x544x49;512x512`` -> buckets; WxH alone means one frame. Raises ConfigError naming the bad part."""
    found: list[Bucket] = []
    for part in re.split(r"[;,\n]", text):
        if not part.strip():
            continue
        match = _BUCKET.match(part)
        if not match or 0 in (int(match[1]), int(match[2]), int(match[3] or 1)):
            raise ConfigError("bucket.text", f"The bucket '{part.strip()[:40]}' is not WIDTHxHEIGHTxFRAMES.", "Write them as 960x544x49;512x512x1, separated by ';'.")
        found.append(Bucket(int(match[1]), int(match[2]), int(match[3] or 1)))
    if not found:
        raise ConfigError("bucket.text", "No resolution bucket is given.", "Write them as 960x544x49;512x512x1, separated by ';'.")
    return tuple(dict.fromkeys(found))


def check(buckets: Sequence[Bucket], factors: VideoFactors) -> None:
    """Raise ConfigError naming the first bucket off the latent grid and the nearest ones on it."""
    for bucket in buckets:
        if bucket.width % factors.width == 0 and bucket.height % factors.height == 0 and (bucket.frames - 1) % factors.time == 0:
            continue
        near = Bucket(_near(bucket.width, factors.width), _near(bucket.height, factors.height), _near(bucket.frames - 1, factors.time, 0) + 1)
        raise ConfigError(
            "bucket.grid",
            f"The bucket {bucket} is off this model's grid; the nearest is {near}.",
            f"Width must be a multiple of {factors.width}, height of {factors.height}, frames {factors.time}n+1 (1, {factors.time + 1}, {2 * factors.time + 1}...).",
        )


def _near(value: int, step: int, least: int | None = None) -> int:
    return max(step if least is None else least, round(value / step) * step)


# -- which bucket, which frames --------------------------------------------------------------------------------------


def choose(buckets: Sequence[Bucket], aspect: float, frames: int, moving: bool) -> Bucket | None:
    """The official rule: least |log aspect difference|, then most frames, then largest area, among those short enough.

    A moving clip takes a still bucket only where no longer one fits.
    """
    fitting = [b for b in buckets if b.frames <= frames]
    if moving:
        fitting = [b for b in fitting if b.frames > 1] or fitting
    return min(fitting, key=lambda b: (abs(math.log(b.aspect) - math.log(aspect)), -b.frames, -b.width * b.height), default=None)


def plan(sample: Sample, probe: Probe, buckets: Sequence[Bucket], options: ClipOptions) -> list[ClipPlan] | Finding:
    """The pieces that training reads of a clip, or the finding that says why there is none. Pure: no file is opened."""
    refusal = next((f for f in (*sample.findings, *probe.findings) if f.refused), None)
    if refusal:
        return refusal
    media = sample.in_memory if sample.in_memory is not None else sample.media
    if probe.kind == "audio":
        return _plan_sound(sample, media, probe, options)
    if probe.transfer != "sdr" and options.hdr == "refuse":
        return Finding("media.hdr_refused", f"{probe.transfer.upper()} clip")
    moving = probe.kind == "video"
    rate = _rate(probe, options)
    available = probe.timeline.slots(rate) if moving else 1
    available = (available - 1) // options.frame_step + 1
    bucket = choose(buckets, probe.width / probe.height, available, moving)
    if bucket is None:
        least = min((b.frames for b in buckets), default=0)
        if not moving:
            return Finding("bucket.no_still", f"a still, and the smallest bucket has {least} frames")
        return Finding("bucket.too_short", f"{available} frames at {float(rate):.3f} fps; the smallest bucket has {least}")
    notes = _notes(probe, bucket, available, options)
    made = []
    for first in _starts(sample, available, bucket.frames, options):
        at = first * options.frame_step
        made.append(
            ClipPlan(
                sample, media, probe, bucket, place(probe.width, probe.height, bucket, options, f"{sample.id}@{first}"), at, options.frame_step,
                rate / options.frame_step, probe.timeline.start + at / float(rate), bucket.frames / float(rate / options.frame_step), options, notes=notes,
            )  # fmt: skip
        )
    return made


def _rate(probe: Probe, options: ClipOptions) -> Fraction:
    if probe.kind == "image":
        return STILL_RATE
    return exact_rate(options.fps) if options.fps else probe.timeline.rate


def _starts(sample: Sample, available: int, frames: int, options: ClipOptions) -> list[int]:
    room = available - frames
    if options.frame_selection == "head" or room == 0:
        return [0]
    if options.frame_selection == "all":
        return list(range(0, room + 1, frames))
    if options.frame_selection == "sliding":
        return list(range(0, room + 1, options.window_stride or max(1, frames // 2)))
    if options.frame_selection == "uniform":
        count = min(options.windows, room + 1)
        return sorted({round(n * room / (count - 1)) for n in range(count)}) if count > 1 else [room // 2]
    picked: list[int] = []
    for n in range(options.windows):
        start = _dice(options.selection_seed, sample.id, n) % (room + 1)
        if start not in picked:
            picked.append(start)
    return sorted(picked)


def _dice(seed: int, name: str, n: int) -> int:
    return int.from_bytes(hashlib.sha256(f"{seed}/{name}/{n}".encode()).digest()[:8], "big")


def place(width: int, height: int, bucket: Bucket, options: ClipOptions, name: str) -> Placement:
    """The official fit: int(width * H / height) by H when too wide, else W by int(height * W / width); then the crop."""
    if options.letterbox:
        scale = min(bucket.width / width, bucket.height / height)
        fit = (max(1, round(width * scale)), max(1, round(height * scale)))
        return Placement(*fit, -((bucket.width - fit[0]) // 2), -((bucket.height - fit[1]) // 2))
    if width / height > bucket.aspect:
        fit = (max(bucket.width, width * bucket.height // height), bucket.height)
    else:
        fit = (bucket.width, max(bucket.height, height * bucket.width // width))
    room = (fit[0] - bucket.width, fit[1] - bucket.height)
    if options.crop == "random":
        return Placement(*fit, _dice(options.selection_seed, name, 1) % (room[0] + 1), _dice(options.selection_seed, name, 2) % (room[1] + 1))
    return Placement(*fit, room[0] // 2, room[1] // 2)


def _notes(probe: Probe, bucket: Bucket, available: int, options: ClipOptions) -> tuple[Finding, ...]:
    notes = []
    if probe.kind == "video" and bucket.frames == 1:
        notes.append(Finding("bucket.as_still", f"{available} frames; the bucket {bucket} takes one"))
    ratio = (probe.width / probe.height) / bucket.aspect
    if not options.letterbox and max(ratio, 1 / ratio) > 1.5:
        notes.append(Finding("bucket.crop", f"{probe.width}x{probe.height} keeps {100 / max(ratio, 1 / ratio):.0f} % in {bucket.width}x{bucket.height}"))
    if probe.width < bucket.width and probe.height < bucket.height:
        notes.append(Finding("bucket.upscaled", f"{probe.width}x{probe.height} enlarged to {bucket.width}x{bucket.height}"))
    if options.frame_selection == "head" and available > 2 * bucket.frames:
        notes.append(Finding("frames.unused", f"{bucket.frames} of {available} frames are used"))
    if probe.kind == "video" and options.fps and exact_rate(options.fps) > probe.timeline.rate * 1.02:
        notes.append(Finding("frames.repeated", f"{float(probe.timeline.rate):.3f} frames a second, read at {options.fps:g}"))
    if probe.kind == "video" and options.audio != "off":
        if probe.sound is None:
            notes.append(Finding("audio.none", "no sound"))
        elif probe.sound.seconds < probe.timeline.seconds - 0.1:
            notes.append(Finding("audio.short", f"{probe.sound.seconds:.2f} s of sound for {probe.timeline.seconds:.2f} s of picture"))
    return tuple(notes)


def _plan_sound(sample: Sample, media: Path | MemoryClip, probe: Probe, options: ClipOptions) -> list[ClipPlan] | Finding:
    """Sound alone: the longest duration asked for that fits (official), else up to audio_max_seconds."""
    length = probe.sound.seconds
    durations = options.durations()
    fitting = [d for d in durations if d <= length + 0.005]
    if durations and not fitting:
        return Finding("audio.too_short", f"{length:.2f} s; the shortest duration is {durations[0]:g} s")
    seconds = fitting[-1] if durations else min(length, options.audio_max_seconds)
    # 1/25 s is one latent step: the shortest sound there is
    if seconds < 0.04:
        return Finding("audio.too_short", f"{length:.3f} s of sound")
    return [ClipPlan(sample, media, probe, None, None, 0, 1, Fraction(25), 0.0, seconds, options)]


# -- sets ------------------------------------------------------------------------------------------------------------


def encode_batches(plans: Sequence[ClipPlan], size: int) -> list[list[ClipPlan]]:
    """Plans grouped by bucket, ``size`` at a time, in the order given: membership depends on the plans alone."""
    groups: dict[Bucket | None, list[ClipPlan]] = {}
    for item in plans:
        groups.setdefault(item.bucket, []).append(item)
    return [group[n : n + size] for group in groups.values() for n in range(0, len(group), size)]
