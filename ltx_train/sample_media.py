"""Media of a sample's conditions: read, cut to the sample, encoded by the codec into latents and masks."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from .conditioning.conditions import Media
from .data.buckets import Bucket, ClipOptions, ClipPlan, plan
from .data.findings import Finding
from .data.media import cell_means, read_clip
from .data.probe import Probe, probe
from .data.sound import read_sound
from .data.sources import Sample
from .encode import fit_steps
from .errors import DataError
from .geometry import AudioGrid, Latents, VideoFactors, VideoGrid, patchify, pool_mask, unpatchify
from .models.codec import Codec
from .models.safetensors_file import SafetensorsFile
from .sampling.denoise import Noise
from .sampling.recipe import ValidationSample
from .sampling.sample_conditions import MediaNeed, States


def encode_conditions(sample: ValidationSample, video_grid: VideoGrid, audio_grid: AudioGrid | None, codec: Codec, crf: int) -> list[Media]:
    """Latents and masks of each condition of a sample, in order, by role.

    crf: H.264 quality of the round trip that inference gives first frames; 0 for none.
    Raises DataError naming the file that is missing, damaged or too short.
    """
    found: list[Media] = []
    for condition in sample.conditions:
        sound = audio_grid.of_seconds(video_grid.seconds) if audio_grid is not None else None
        grid = sound if condition.modality == "audio" else video_grid
        found.append({need.role: encode_need(need, video_grid, audio_grid, codec, crf) for need in condition.needs(grid)})
    return found


def encode_need(need: MediaNeed, video_grid: VideoGrid, audio_grid: AudioGrid | None, codec: Codec, crf: int) -> Latents | Tensor:
    """One file as latents (batch of 1) or a mask [1, F', H', W'] / [1, T]."""
    path = need.path.expanduser()
    if not path.is_file():
        raise DataError("sample.missing", f"There is no file {path.name} for a validation sample."[:118], f"It was named as {need.path}.")
    found = probe(path)
    factors = video_grid.factors
    if need.kind in ("audio", "audio_mask"):
        assert audio_grid is not None, "sound of a model without sound"
        wave, rate = read_wave(need, found)
        steps = audio_grid.of_seconds(wave.shape[1] / rate).steps
        if need.kind == "audio_mask":
            return (F.adaptive_max_pool1d(wave.abs().amax(0)[None, None], steps)[0] > 0.5).float()
        latents = fit_steps(codec.encode_audio(wave[None], rate), steps)  # as a dataset's sounds are
        return Latents(latents, replace(audio_grid, steps=latents.shape[2]))
    frames = read_frames(need, found, video_grid.fps, factors)
    if need.kind == "video_mask":
        cells = torch.stack([cell_means(f.float().mean(-1) / 255.0, factors) for f in frames])
        return pool_mask(cells, VideoFactors(factors.time, 1, 1))[None]
    if need.recompress and crf > 0:
        frames = h264_round_trip(frames, crf)
    latents = codec.encode_video(frames[None])
    fps = video_grid.fps / need.stride if need.stride > 1 else video_grid.fps
    return Latents(latents, VideoGrid(latents.shape[2], latents.shape[3], latents.shape[4], fps, factors))


def read_frames(need: MediaNeed, found: Probe, fps: float, factors: VideoFactors) -> Tensor:
    """[F, H, W, 3] uint8 of the pictures asked for, F = time*n + 1 at most ``need.frames``; a still is held for them."""
    sample = Sample(id=need.path.name, media=need.path.expanduser(), caption="")
    if found.kind == "audio":
        raise DataError("sample.no_picture", f"{need.path.name} has no picture.", "Give a video or an image.")
    if found.kind == "image":
        frame = read_clip(_planned(sample, found, Bucket(need.width, need.height, 1), ClipOptions())).frames
        return frame.expand(need.frames, -1, -1, -1)
    options = ClipOptions(fps=fps)
    available = (found.timeline.slots(_rate(found, fps)) - 1) // need.stride + 1
    count = (min(need.frames, available) - 1) // factors.time * factors.time + 1
    piece = _planned(sample, found, Bucket(need.width, need.height, count), options)
    last = found.timeline.slots(piece.fps) - 1
    first = max(0, last - (count - 1) * need.stride) if need.from_end else 0
    start = piece.start + first / float(piece.fps)
    rate = piece.fps / need.stride
    return read_clip(replace(piece, first=first, start=start, temporal_factor=need.stride, fps=rate)).frames


def _rate(found: Probe, fps: float):
    from .data.probe import exact_rate

    return exact_rate(fps) if found.kind == "video" else found.timeline.rate


def _planned(sample: Sample, found: Probe, bucket: Bucket, options: ClipOptions) -> ClipPlan:
    made = plan(sample, found, (bucket,), options.model_copy(update={"audio": "off"}))
    if isinstance(made, Finding):
        raise DataError(made.code, f"{sample.id}: {made.message}"[:118], made.fix)
    return made[0]


def read_wave(need: MediaNeed, found: Probe) -> tuple[Tensor, int]:
    """([2, N] float32, rate) of the sound asked for."""
    sound = found.sound
    if sound is None:
        raise DataError("sample.no_sound", f"{need.path.name} has no sound.", "Give a file with sound, or leave the condition out.")
    seconds = min(need.seconds or sound.seconds, sound.seconds)
    start = sound.start + (sound.seconds - seconds if need.from_end else 0.0)
    return read_sound(need.path.expanduser(), sound, start, seconds).waveform, sound.sample_rate


def h264_round_trip(frames: Tensor, crf: int) -> Tensor:
    """[F, H, W, 3] uint8 through an H.264 encoder and back: what inference pipelines do to given pictures."""
    import av

    buffer = io.BytesIO()
    with av.open(buffer, "w", format="mp4") as container:
        stream = container.add_stream("libx264", rate=1, options={"crf": str(crf), "preset": "veryfast"})
        stream.width, stream.height, stream.pix_fmt = frames.shape[2], frames.shape[1], "yuv420p"
        for frame in frames:
            container.mux(stream.encode(av.VideoFrame.from_ndarray(frame.numpy(), "rgb24")))
        container.mux(stream.encode(None))
    buffer.seek(0)
    with av.open(buffer) as container:
        decoded = [torch.from_numpy(f.to_ndarray(format="rgb24")) for f in container.decode(video=0)]
    return torch.stack(decoded)


def read_noise(sample: ValidationSample, states: States) -> Noise | None:
    """The start noise that a sample's file gives, None without one. Raises DataError for a file that does not fit."""
    if sample.noise is None:
        return None
    made = {s: state for s in ("video", "audio") if (state := states[s]) is not None and state.levels != (0.0,)}
    file = noise_file(sample, {s: unpatchify(state.clean[:, : state.num_target], state.grid).shape for s, state in made.items()})
    found = {s: patchify(file.read(s).to(state.device, torch.float32)) for s, state in made.items()}
    return Noise(found.get("video"), found.get("audio"))


def noise_file(sample: ValidationSample, shapes: Mapping[str, Sequence[int]]) -> SafetensorsFile:
    """The file that a sample's noise comes from; its header alone is read. Raises DataError where a stream's tensor is not of its shape."""
    file = SafetensorsFile.open(Path(sample.noise).expanduser())
    for stream, shape in shapes.items():
        found = list(file.spans[stream].info.shape) if stream in file.spans else "none"
        if found != list(shape):
            raise DataError("sample.noise", f"The noise for {stream} must be {list(shape)}; the file has {found}.", f"In {sample.noise}, under the name {stream}.")
    return file


def reference_beside(sample: ValidationSample, grid: VideoGrid) -> Tensor | None:
    """Frames [F, H, W, 3] uint8 of the first reference that is to be shown beside the sample, None without one."""
    for condition in sample.conditions:
        if getattr(condition, "include_in_output", False) and condition.modality == "video":
            need = condition.needs(grid)[0]
            return read_frames(need, probe(need.path.expanduser()), grid.fps, grid.factors)
    return None
