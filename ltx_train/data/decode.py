"""Decoding video frame by frame: the pictures on screen at given times, upright, scaled and cropped into a bucket."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from .buckets import Bucket, ClipPlan, Placement
from .colour import composite, hdr_to_rgb, rgb, rgba, wide_to_rgb
from .container import opened
from .findings import MediaError
from .orientation import Orientation
from .probe import Probe
from .sources import MemoryClip
from .stills import Timed, animation_frames, read_still, upright

SEEK_FROM = 2.0  # seconds: nearer starts are decoded from the beginning, which no broken index can spoil
MISSING = 3.5  # frames of a steady clip without one decoded: damage, not a pause
SHRINKS = 1.5
TIE = 1e-4  # seconds: half way between two frames the earlier one stays


@dataclass(frozen=True)
class Picture:
    """One frame in its bucket: pixels [H, W, 3] uint8, alpha [H, W] uint8 or None."""

    pixels: Tensor
    alpha: Tensor | None = None


def wanted_times(plan: ClipPlan) -> list[float]:
    """Seconds of each frame of the plan on the file's clock."""
    rate = float(plan.timeline_rate)
    return [plan.start + (slot - plan.first) / rate for slot in plan.slots()]


def pictures(plan: ClipPlan, *, placement: Placement | None = None, threads: int = 0) -> Iterator[Picture]:
    """The plan's frames in order, one in memory at a time. A frame shown twice is converted once.

    Raises MediaError media.short when the file ends before the plan, media.decode when it is damaged.
    """
    place = placement or plan.placement
    last, made = None, None
    for frame in chosen(plan, threads=threads):
        if made is None or frame is not last:
            last, made = frame, to_bucket(frame, plan, place)
        yield made


def chosen(plan: ClipPlan, *, threads: int = 0) -> Iterator[Any]:
    """The raw frames of the plan: av frames, or uint8 arrays of stills, animations and ComfyUI clips."""
    if isinstance(plan.media, MemoryClip):
        yield from _memory_frames(plan)
    elif plan.probe.kind == "image" or plan.probe.animated:
        if plan.probe.kind == "image":
            still = read_still(plan.media)
            yield from (still for _ in range(plan.frames))
        else:
            yield from _pick(plan, animation_frames(plan.media), _end(plan))
    else:
        yield from _video_frames(plan, threads)


def _memory_frames(plan: ClipPlan) -> Iterator[np.ndarray]:
    frames, rate = plan.media.frames, float(plan.probe.timeline.rate)
    early = min(0.5 / float(plan.timeline_rate), 0.5 / rate - TIE)
    for seconds in wanted_times(plan):
        index = min(int((seconds + early) * rate + 1e-6), len(frames) - 1)
        frame = frames[index].detach().cpu()
        yield (frame if frame.dtype == torch.uint8 else (frame.float() * 255).round().clamp(0, 255).to(torch.uint8)).numpy()


def _end(plan: ClipPlan) -> float:
    return plan.probe.timeline.start + plan.probe.timeline.seconds


def _video_frames(plan: ClipPlan, threads: int) -> Iterator[Any]:
    far = plan.probe.timeline.ordered and plan.start - plan.probe.timeline.start > SEEK_FROM
    if far:
        found = _pick(plan, decoded(plan.probe, plan.start, threads), _end(plan), strict=True)
        first = next(found, None)
        if first is not None:
            yield first
            yield from found
            return
    yield from _pick(plan, decoded(plan.probe, None, threads), _end(plan))


def _pick(plan: ClipPlan, frames: Iterator[Timed], end: float, strict: bool = False) -> Iterator[Any]:
    """What is on screen at each wanted time: the last frame that began before it, or the next one where that is nearer
    in time and less than half a slot away (clocks are rounded and jitter).

    strict: give nothing when the first frame decoded is later than the first wanted (a seek that landed too far).
    """
    times = wanted_times(plan)
    slack = 0.5 / float(plan.timeline_rate)
    line = plan.probe.timeline
    lost = MISSING / float(line.rate) if line.constant and line.ordered else float("inf")
    current, at, seen = None, 0, 0.0
    for item in frames:
        if strict and current is None and item.seconds > times[0] + slack:
            return
        early = slack if current is None else min(slack, (item.seconds - seen) / 2 - TIE)
        while at < len(times) and item.seconds > times[at] + early:
            if times[at] - seen > lost and current is not None:
                raise MediaError("media.decode", f"{plan.sample.id}: frames are missing from {seen:.2f} s on: damaged there.")
            yield current if current is not None else item.frame
            at += 1
        if at == len(times):
            return
        current, seen = item.frame, item.seconds
    limit = end if not line.constant else min(end, seen + 1.0 / float(line.rate))
    while at < len(times) and current is not None and (plan.hold or times[at] < limit + slack):
        yield current
        at += 1
    if at < len(times):
        raise MediaError("media.short", f"{plan.sample.id} gave {at} of {len(times)} frames before it ended.")


def decoded(probe: Probe, start: float | None, threads: int = 0) -> Iterator[Timed]:
    """Frames of a video file with repaired times, deinterlaced where needed; from a keyframe before ``start`` if given."""
    import av

    with opened(probe.path) as container:
        stream = container.streams[probe.stream]
        stream.thread_type = "AUTO"
        if threads:
            stream.codec_context.thread_count = threads
        if start is not None:
            container.seek(int(start / stream.time_base), stream=stream, backward=True)
        frames = _alpha_frames(container, stream) if probe.alpha and stream.codec_context.name in ("vp8", "vp9", "libvpx-vp9") else container.decode(stream)
        step, last = 1.0 / float(probe.timeline.rate), None
        try:
            for frame in _deinterlaced(frames, stream, probe.interlaced):
                seconds = None if frame.pts is None else float(frame.pts * frame.time_base)
                if seconds is None or not probe.timeline.ordered or (last is not None and seconds <= last):
                    seconds = probe.timeline.start if last is None else last + step
                last = seconds
                if frame.is_corrupt:
                    raise MediaError("media.decode", f"{probe.path.name}: the picture at {seconds:.2f} s is damaged.")
                yield Timed(seconds, frame)
        except av.error.FFmpegError as error:
            if isinstance(error, av.error.EOFError):
                return
            raise MediaError("media.decode", f"{probe.path.name}: decoding stopped: {str(error)[:60]}") from error


def _alpha_frames(container: Any, stream: Any) -> Iterator[Any]:
    """VP8/VP9 with transparency: only libvpx's own decoder gives the alpha plane."""
    import av

    name = "libvpx-vp9" if "vp9" in stream.codec_context.name else "libvpx"
    decoder = av.CodecContext.create(name, "r")
    for packet in container.demux(stream):
        for frame in decoder.decode(packet if packet.size else None):
            if frame.time_base is None:
                frame.time_base = stream.time_base
            yield frame


def _deinterlaced(frames: Iterator[Any], stream: Any, interlaced: bool) -> Iterator[Any]:
    """Frames through bwdif when the file or the first frame says interlaced; progressive frames pass it untouched."""
    import av

    graph = None
    for frame in frames:
        if graph is None:
            if not (interlaced or frame.interlaced_frame):
                yield frame
                yield from frames
                return
            graph = _bwdif(stream, frame)
        graph.push(frame)
        yield from _pull(graph)
    if graph is not None:
        try:
            graph.push(None)
        except av.error.EOFError:
            return
        yield from _pull(graph)


def _bwdif(stream: Any, frame: Any) -> Any:
    import av.filter

    graph = av.filter.Graph()
    source = graph.add_buffer(template=stream, width=frame.width, height=frame.height, format=frame.format, time_base=frame.time_base or stream.time_base)
    filtered = graph.add("bwdif", "mode=send_frame:deint=interlaced")
    sink = graph.add("buffersink")
    source.link_to(filtered)
    filtered.link_to(sink)
    graph.configure()
    return graph


def _pull(graph: Any) -> Iterator[Any]:
    import av

    while True:
        try:
            yield graph.pull()
        except (av.error.BlockingIOError, av.error.EOFError):
            return


# -- into the bucket -------------------------------------------------------------------------------------------------


def to_bucket(frame: Any, plan: ClipPlan, place: Placement) -> Picture:
    """One raw frame upright, square-pixelled, scaled and cropped: uint8 [bucket height, bucket width, 3]."""
    probe, options = plan.probe, plan.options
    turn = probe.orientation
    size = (place.fit_width, place.fit_height) if not turn.swaps else (place.fit_height, place.fit_width)
    alpha = None
    if isinstance(frame, np.ndarray):
        pixels, turn, size = frame, Orientation(), (place.fit_width, place.fit_height)  # stills come upright
    elif probe.transfer != "sdr":
        pixels = hdr_to_rgb(frame, probe.transfer, *size)
    elif probe.gamut and not probe.alpha:
        pixels = wide_to_rgb(frame, probe.gamut, *size)
    elif probe.alpha:
        pixels = rgba(frame)
    else:
        pixels = rgb(frame, *size) if shrinks(frame, size) else rgb(frame)
    if pixels.shape[-1] == 4:
        alpha = _fit(resize(pixels[..., 3:], size), turn, place, plan.bucket, (0,))[..., 0]
        pixels = composite(pixels, options.alpha_colour)
    return Picture(_fit(resize(pixels, size), turn, place, plan.bucket, options.alpha_colour), alpha)


def shrinks(frame: Any, size: tuple[int, int]) -> bool:
    """Whether a YUV frame gets so much smaller that swscale scales (bicubic, a = -0.6) and converts it at once.

    Half the work of RGB at full size; on 4:2:0 video 0.3 to 0.6 levels from exact arithmetic on average, where the usual quick
    conversion to RGB alone is 1.3 to 2.4 off.
    """
    return not frame.format.is_rgb and frame.width >= SHRINKS * size[0] and frame.height >= SHRINKS * size[1]


def resize(pixels: np.ndarray, size: tuple[int, int]) -> Tensor:
    """[H, W, C] uint8 -> [height, width, C] uint8 by antialiased bicubic (a = -0.5), as the official trainer's, in integers."""
    if pixels.shape[1::-1] == size:
        return torch.from_numpy(np.ascontiguousarray(pixels))
    image = torch.from_numpy(np.ascontiguousarray(pixels)).permute(2, 0, 1).unsqueeze(0)  # channels last in memory: the quick kernel
    return F.interpolate(image, size=(size[1], size[0]), mode="bicubic", antialias=True).squeeze(0).permute(1, 2, 0)


def _fit(image: Tensor, turn: Orientation, place: Placement, bucket: Bucket, border: Sequence[int]) -> Tensor:
    image = upright(image, turn)
    if place.left >= 0 and place.top >= 0:
        return image[place.top : place.top + bucket.height, place.left : place.left + bucket.width].contiguous()
    canvas = torch.empty(bucket.height, bucket.width, image.shape[-1], dtype=torch.uint8)
    canvas[:] = torch.tensor(list(border), dtype=torch.uint8)
    top, left = max(0, -place.top), max(0, -place.left)
    canvas[top : top + image.shape[0], left : left + image.shape[1]] = image
    return canvas
