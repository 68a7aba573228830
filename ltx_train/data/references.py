"""The plan of a clip's reference: the same moments and the same part of the picture, divided by the factors asked for."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from ..errors import ConfigError
from ..geometry import VideoFactors
from .buckets import Bucket, ClipOptions, ClipPlan, Placement, place
from .findings import Finding
from .probe import STILL_RATE, Probe


def check_references(buckets: Sequence[Bucket], factors: VideoFactors, options: ClipOptions) -> None:
    """Raise ConfigError when a reference's downscale or temporal factor leaves the latent grid."""
    for bucket in buckets:
        if reference_bucket(bucket, options, factors) is None:
            raise ConfigError(
                "reference.grid",
                f"A reference of {bucket} divided by {options.reference_downscale_factor} (time {options.reference_temporal_scale_factor}) is off the grid.",
                f"Both must stay multiples of {factors.width}x{factors.height} and {factors.time}n+1 frames: choose other factors or buckets.",
            )


def reference_bucket(bucket: Bucket, options: ClipOptions, factors: VideoFactors) -> Bucket | None:
    """The bucket of a reference, or None when the factors do not divide it onto the grid."""
    down, time = options.reference_downscale_factor, options.reference_temporal_scale_factor
    if bucket.width % (down * factors.width) or bucket.height % (down * factors.height) or (bucket.frames - 1) % time:
        return None
    frames = (bucket.frames - 1) // time + 1
    return None if (frames - 1) % factors.time else Bucket(bucket.width // down, bucket.height // down, frames)


def plan_reference(clip: ClipPlan, probe: Probe, factors: VideoFactors) -> ClipPlan | Finding:
    """The plan of a clip's reference video or image: same moments, same part of the picture, divided by the factors."""
    path = clip.sample.roles["reference_video"]
    options = clip.options
    bucket = reference_bucket(clip.bucket, options, factors)
    if bucket is None:
        return Finding("reference.grid", f"{clip.bucket} / {options.reference_downscale_factor} / {options.reference_temporal_scale_factor} frames is off the grid")
    if probe.kind == "audio":
        return Finding("media.no_frames", f"the reference {path.name} has no picture")
    notes = []
    if probe.kind == "image":
        bucket = replace(bucket, frames=1)
        start, hold = 0.0, False
    else:
        offset = clip.start - clip.probe.timeline.start
        start, hold = probe.timeline.start + offset, True
        if probe.timeline.seconds < offset + clip.seconds - 0.5 / float(clip.fps):
            notes.append(Finding("reference.short", f"{probe.timeline.seconds:.2f} s for {offset + clip.seconds:.2f} s of clip"))
    if abs(math.log((probe.width / probe.height) / (clip.probe.width / clip.probe.height))) > 0.02:
        notes.append(Finding("reference.shape", f"{probe.width}x{probe.height} beside {clip.probe.width}x{clip.probe.height}"))
    factor = options.reference_temporal_scale_factor if bucket.frames > 1 else 1
    return replace(
        clip, media=path, probe=probe, bucket=bucket, placement=same_part(clip, probe.width, probe.height, bucket), start=start,
        fps=clip.fps / factor if bucket.frames > 1 else STILL_RATE, first=clip.first if bucket.frames > 1 else 0, role="reference_video",
        temporal_factor=factor, hold=hold, notes=tuple(notes),
    )  # fmt: skip


def same_part(clip: ClipPlan, width: int, height: int, bucket: Bucket) -> Placement:
    """The placement of another picture of width x height in ``bucket`` that shows the part that the clip's shows."""
    own = place(width, height, bucket, clip.options.model_copy(update={"crop": "centre"}), "")
    if clip.options.letterbox:
        return own
    at = clip.placement
    room = (at.fit_width - clip.bucket.width, at.fit_height - clip.bucket.height)
    left = round((own.fit_width - bucket.width) * at.left / room[0]) if room[0] else own.left
    top = round((own.fit_height - bucket.height) * at.top / room[1]) if room[1] else own.top
    return replace(own, left=left, top=top)
