"""Reading clips as planned: pixels, sound, references and masks; ahead of the encoder in threads."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from ..errors import DataError
from ..geometry import VideoFactors, pool_mask
from .buckets import ClipPlan, Placement
from .decode import chosen, pictures, to_bucket
from .findings import Finding, MediaError
from .probe import Probe, probe
from .references import plan_reference
from .sound import Sound, downmix, read_sound
from .stills import read_still
from .writers import write_png, write_video, write_wav

__all__ = [
    "Clip", "Prepared", "Probe", "downmix", "fill_motion", "prepare", "probe", "read_audio_mask", "read_clip", "read_image", "read_mask",
    "read_reference_audio", "read_sound_of", "write_png", "write_video", "write_wav",
]  # fmt: skip


@dataclass(frozen=True)
class Clip:
    """A clip as read: frames [F,H,W,3] uint8, waveform [2,N] float32 at its native rate, alpha [F,H,W] uint8, each or None."""

    frames: Tensor | None
    waveform: Tensor | None
    sample_rate: int
    fps: float
    audio_present: bool
    alpha: Tensor | None = None
    notes: tuple[Finding, ...] = ()


def read_clip(plan: ClipPlan, *, threads: int = 0, sound: bool = True) -> Clip:
    """Read one planned clip; frames are decoded, turned, scaled and cropped one at a time. sound=False leaves the sound out.

    Raises MediaError with a finding code when the file is damaged.
    """
    plan = fill_motion(plan)
    frames, alpha = _read_frames(plan, threads) if plan.bucket else (None, None)
    heard = read_sound_of(plan) if sound else None
    notes = heard.notes if heard else ()
    return Clip(
        frames, heard.waveform if heard else None, heard.sample_rate if heard else 0, float(plan.fps), heard is not None, alpha if plan.options.alpha == "mask" else None, notes
    )


def _read_frames(plan: ClipPlan, threads: int) -> tuple[Tensor, Tensor | None]:
    bucket = plan.bucket
    frames = torch.empty(bucket.frames, bucket.height, bucket.width, 3, dtype=torch.uint8)
    alpha = torch.empty(bucket.frames, bucket.height, bucket.width, dtype=torch.uint8) if plan.probe.alpha else None
    count = 0
    for count, picture in enumerate(pictures(plan, threads=threads), 1):
        frames[count - 1] = picture.pixels
        if alpha is not None:
            alpha[count - 1] = picture.alpha if picture.alpha is not None else 255
    if count != bucket.frames:
        raise MediaError("media.short", f"{plan.sample.id} gave {count} of {bucket.frames} frames before it ended.")
    return frames, alpha


def read_sound_of(plan: ClipPlan) -> Sound | None:
    """The sound of a planned clip, cut to its moments; None where it has none. Raises MediaError for a damaged one."""
    source = plan.sound
    if source is None or plan.role not in ("video", "reference_audio"):
        return None
    if source is plan.media:
        start = plan.start if plan.bucket else plan.probe.sound.start + plan.start
        return read_sound(source, plan.probe.sound, start, plan.seconds)
    own = probe(source)
    if own.sound is None:
        return None
    offset = plan.start - (plan.probe.timeline.start if plan.probe.timeline else 0.0)
    return read_sound(source, own.sound, own.sound.start + offset, plan.seconds)


def read_reference_audio(plan: ClipPlan) -> Sound:
    """The reference sound of a clip, cut to the same moments."""
    path = plan.sample.roles["reference_audio"]
    own = probe(path)
    if own.sound is None:
        raise MediaError("media.no_frames", f"The reference {path.name} has no sound.")
    offset = plan.start - (plan.probe.timeline.start if plan.probe.timeline else 0.0)
    return read_sound(path, own.sound, own.sound.start + offset, plan.seconds)


def read_image(path: str | Path) -> Tensor:
    """[H, W, 3 or 4] uint8 of a picture, upright and in sRGB."""
    return torch.from_numpy(read_still(Path(path)).copy())


# -- where it moves --------------------------------------------------------------------------------------------------


def fill_motion(plan: ClipPlan, samples: int = 12) -> ClipPlan:
    """The plan with its crop laid where the clip moves most, when ``crop`` is motion; otherwise the plan itself.

    Differences of a few frames, summed over columns and rows of the scaled picture; a still keeps its middle.
    """
    place = plan.placement
    if plan.options.crop != "motion" or plan.bucket is None or plan.options.letterbox or plan.bucket.frames < 2:
        return plan
    room = (place.fit_width - plan.bucket.width, place.fit_height - plan.bucket.height)
    if room == (0, 0):
        return plan
    whole = replace(plan, bucket=replace(plan.bucket, width=place.fit_width, height=place.fit_height))
    step = max(1, plan.bucket.frames // samples)
    energy, last = None, None
    for n, frame in enumerate(chosen(plan)):
        if n % step:
            continue
        grey = to_bucket(frame, whole, Placement(place.fit_width, place.fit_height)).pixels.float().mean(-1)
        if last is not None:
            energy = (grey - last).abs() + (0 if energy is None else energy)
        last = grey
    if energy is None or float(energy.max()) < 4.0:
        return plan
    left, top = _densest(energy.sum(0), plan.bucket.width), _densest(energy.sum(1), plan.bucket.height)
    return replace(plan, placement=replace(place, left=left, top=top))


def _densest(line: Tensor, width: int) -> int:
    sums = F.pad(line.double().cumsum(0), (1, 0))
    windows = sums[width:] - sums[:-width]
    best = torch.nonzero(windows >= windows.max() * (1 - 1e-9)).flatten()
    return int(best[len(best) // 2])  # the middle of a plateau


# -- masks -----------------------------------------------------------------------------------------------------------


def read_mask(plan: ClipPlan, factors: VideoFactors) -> Tensor:
    """[F', H', W'] float32 of 0 and 1 (1 = keep) of a clip's video mask: stretched to the clip, then cropped and pooled like it."""
    path = plan.sample.roles["video_mask"]
    if path.suffix.lower() == ".pt":
        mask, shape = _mask_tensor(path), latent_shape(plan, factors)
        if tuple(mask.shape) != shape:
            raise MediaError("mask.shape", f"The mask {path.name} is {tuple(mask.shape)}; the clip's latents are {shape}.")
        return mask
    own = probe(path)
    if own.kind == "audio":
        raise MediaError("media.no_frames", f"The mask {path.name} has no picture.")
    if own.kind == "image":
        start, rate = 0.0, plan.fps
    else:
        start, rate = own.timeline.start + plan.start - plan.probe.timeline.start, plan.fps
    reading = replace(plan, media=path, probe=own, role="video_mask", start=start, fps=rate, hold=True)
    cells = [cell_means(picture.pixels.float().mean(-1) / 255.0, factors) for picture in pictures(reading)]
    return pool_mask(torch.stack(cells), VideoFactors(factors.time, 1, 1))


def latent_shape(plan: ClipPlan, factors: VideoFactors) -> tuple[int, int, int]:
    """Latent frames, rows, columns of a plan."""
    bucket = plan.bucket
    return factors.latent_frames(bucket.frames), bucket.height // factors.height, bucket.width // factors.width


def loss_mask(alpha: Tensor, factors: VideoFactors) -> Tensor:
    """[F', H', W'] of 0 and 1 from transparency [F, H, W] uint8: 1 where the picture counts."""
    cells = [cell_means(frame.float() / 255.0, factors) for frame in alpha]
    return pool_mask(torch.stack(cells), VideoFactors(factors.time, 1, 1))


def cell_means(mask: Tensor, factors: VideoFactors) -> Tensor:
    """[H, W] -> [H', W']: one frame's means over latent cells, so that no whole mask is ever in float."""
    return F.avg_pool2d(mask[None, None], (factors.height, factors.width))[0, 0]


def read_audio_mask(plan: ClipPlan, steps: int) -> Tensor:
    """[steps] float32 of 0 and 1 from a clip's audio mask: a ``.pt`` tensor, or the loudness of a sound file over each step."""
    path = plan.sample.roles["audio_mask"]
    if path.suffix.lower() == ".pt":
        values = _mask_tensor(path).reshape(-1).float()
    else:
        own = probe(path)
        if own.sound is None:
            raise MediaError("media.no_frames", f"The sound mask {path.name} has no sound.")
        offset = plan.start - (plan.probe.timeline.start if plan.probe.timeline else 0.0)
        wave = read_sound(path, own.sound, own.sound.start + offset, plan.seconds).waveform.abs().amax(0)
        values = F.adaptive_max_pool1d(wave[None, None], steps)[0, 0]
    values = F.interpolate(values[None, None], size=steps, mode="nearest")[0, 0]
    return (values > 0.5).float()


def _mask_tensor(path: Path) -> Tensor:
    """The tensor of a .pt file (or of its key ``mask``), read without running anything, as 0 and 1."""
    try:
        loaded = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # torch raises many kinds for a damaged or unsafe file
        raise MediaError("media.unreadable", f"The mask {path.name} is no plain tensor file.") from error
    if isinstance(loaded, Mapping):
        loaded = loaded.get("mask", next(iter(loaded.values()), None))
    if not isinstance(loaded, Tensor):
        raise MediaError("media.unreadable", f"The mask {path.name} holds no tensor.")
    return (loaded.float() > 0.5).float()


# -- ahead of the encoder --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Prepared:
    """A planned clip read from disk without its sounds: the pictures and their roles, or the error that names what is wrong with them."""

    plan: ClipPlan
    clip: Clip | None = None
    reference: Clip | None = None
    reference_plan: ClipPlan | None = None
    video_mask: Tensor | None = None
    error: DataError | None = None
    notes: tuple[Finding, ...] = field(default_factory=tuple)


def read_all(plan: ClipPlan, factors: VideoFactors, wanted: frozenset[str] | None = None, threads: int = 0) -> Prepared:
    """A clip's pictures with every role of theirs (or those in ``wanted``); errors are kept, not raised."""
    try:
        plan = fill_motion(plan)
        roles = {role for role in plan.sample.roles if wanted is None or role in wanted}
        clip = read_clip(plan, threads=threads, sound=False)
        reference_plan = reference = mask = None
        notes = clip.notes
        if "reference_video" in roles and plan.bucket:
            found = plan_reference(plan, probe(plan.sample.roles["reference_video"]), factors)
            if isinstance(found, Finding):
                raise MediaError(found.code, f"{plan.sample.id}: {found.message}")
            reference_plan, reference = found, read_clip(found, threads=threads, sound=False)
        if "video_mask" in roles and plan.bucket:
            mask = read_mask(plan, factors)
            if mask.unique().numel() == 1:
                notes += (Finding("mask.empty", f"every cell of the mask is {int(mask.flatten()[0])}"),)
        notes += reference_plan.notes if reference_plan else ()
        return Prepared(plan, clip, reference, reference_plan, mask, None, notes)
    except DataError as error:
        return Prepared(plan, error=error)


AHEAD_BYTES = 2 << 30
"""Pictures that wait for the encoder, at most."""


def prepare(
    batches: Sequence[Sequence[ClipPlan]], factors: VideoFactors, *, wanted: frozenset[str] | None = None, workers: int = 2, ahead: int | None = None, stop: threading.Event | None = None
) -> Iterator[list[Prepared]]:
    """The batches in order, read by ``workers`` threads at most ``ahead`` clips before they are asked for (None: every thread has one
    at hand and one in work, as far as ``AHEAD_BYTES`` go).

    Membership and order are those of ``batches``, however fast the threads are. Closing the iterator ends the threads.
    """
    queue = [item for batch in batches for item in batch]
    if workers < 1:
        for batch in batches:
            yield [read_all(item, factors, wanted) for item in batch]
        return
    if ahead is None:
        largest = max((b.width * b.height * b.frames * 3 for item in queue if (b := item.bucket) is not None), default=1)
        ahead = max(4, min(2 * workers, AHEAD_BYTES // largest))
    pending: dict[int, Future[Prepared]] = {}
    asked = 0
    threads = 1 if workers > 1 else 0

    def read(item: ClipPlan) -> Prepared:
        return read_all(item, factors, wanted, threads)

    pool = ThreadPoolExecutor(workers, thread_name_prefix="read-clips")
    try:
        at = 0
        for batch in batches:
            while asked < len(queue) and asked < at + len(batch) + ahead:
                pending[asked] = pool.submit(read, queue[asked])
                asked += 1
            ready = []
            for n in range(at, at + len(batch)):
                ready.append(pending.pop(n).result())
                if asked < len(queue):
                    pending[asked] = pool.submit(read, queue[asked])
                    asked += 1
            at += len(batch)
            yield ready
            if stop is not None and stop.is_set():
                return
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


