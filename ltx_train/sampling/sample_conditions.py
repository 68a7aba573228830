"""Conditions of a sample: the official file references, what media each needs, and the training condition it becomes."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, ClassVar, Literal

from pydantic import Field, model_validator

from ..conditioning.conditions import CONTENT, Condition, FirstFrame, Keyframes, LastFrame, Media, Prefix, Suffix
from ..conditioning.draws import Sure
from ..conditioning.masks import Mask, SpatialCrop
from ..conditioning.references import KeyframeTokens, Reference
from ..conditioning.state import LatentState, time_slices
from ..errors import DataError
from ..geometry import AudioGrid, Grid, Latents, VideoGrid
from ..section import Section

VIDEO_SUFFIXES = (".mp4", ".mov", ".mkv", ".webm", ".avi", ".m4v", ".gif")


@dataclass(frozen=True)
class MediaNeed:
    """One file to read and encode for a condition.

    role: the key under which the encoded latents (or the mask) are handed back. kind: image, video, audio, or
    video_mask, audio_mask (a mask [1, F', H', W'] or [1, T], above one half = given).
    width, height: pixels to scale and crop to. frames: pixel frames to encode at most, cut down to time*n + 1; a still
    is held for them. seconds: of sound at most. from_end: take the last ones. stride: keep every n-th frame after the
    first. recompress: an H.264 round trip first, as inference does with given first frames.
    """

    role: str
    path: Path
    kind: str
    width: int = 0
    height: int = 0
    frames: int = 1
    seconds: float | None = None
    from_end: bool = False
    stride: int = 1
    recompress: bool = False


@dataclass(frozen=True)
class States:
    """Both streams of a sample; None for one that is left out."""

    video: LatentState | None
    audio: LatentState | None

    def __getitem__(self, modality: str) -> LatentState | None:
        return getattr(self, modality)

    def with_(self, modality: str, state: LatentState) -> States:
        return replace(self, **{modality: state})


class SampleCondition(Section):
    """A condition of a validation sample; ``type`` and fields are the official ones where official has them."""

    freezes: ClassVar[str | None] = None

    @property
    def modality(self) -> str:
        """The stream that it edits."""
        return "audio" if getattr(self, "audio", None) else "video"

    def needs(self, grid: Grid) -> tuple[MediaNeed, ...]:
        """Files to read for a sample of ``grid`` (of the stream that is edited)."""
        raise AssertionError(f"{type(self).__name__} names no media")

    def condition(self, grid: Grid, media: Media) -> Condition:
        """The training condition that does the same."""
        raise AssertionError(f"{type(self).__name__} becomes no condition")

    def check(self, grid: Grid, media: Media | None = None) -> None:
        """Raise ConfigError for nonsense on a sample of ``grid``."""
        self.condition(grid, media or {}).check(grid)

    def files(self) -> tuple[Path, ...]:
        """The files named."""
        names = ("image_or_video", "video", "audio", "mask", "image")
        return tuple(Path(value) for n in names if (value := getattr(self, n, None)))

    def apply(self, states: States, media: Media) -> States:
        """The states with this condition on its stream. media: encoded latents and masks by role."""
        state = states[self.modality]
        if state is None:
            raise DataError("sample.stream", f"{self.type}: this sample makes no {self.modality}.", f"Generate {self.modality}, or leave the condition out.")
        condition = self.condition(state.grid, media)
        condition.check(state.grid)
        return states.with_(self.modality, condition.edit(state, media, Sure(state.batch)))


def _frame_need(role: str, path: str, grid: VideoGrid, frames: int = 1, **more) -> MediaNeed:
    kind = "video" if path.lower().endswith(VIDEO_SUFFIXES) else "image"
    return MediaNeed(role, Path(path), kind, grid.width * grid.factors.width, grid.height * grid.factors.height, frames, **more)


def _clip_need(role: str, path: str, grid: Grid, *, kind: str | None = None, frames: int | None = None, seconds: float | None = None, **more) -> MediaNeed:
    if isinstance(grid, VideoGrid):
        width, height = grid.width * grid.factors.width, grid.height * grid.factors.height
        return MediaNeed(role, Path(path), kind or "video", width, height, frames or grid.pixel_frames, **more)
    return MediaNeed(role, Path(path), kind or "audio", seconds=seconds or grid.seconds, **more)


class FirstFrameSample(SampleCondition):
    """A still, or the first frame of a video, as the first frame."""

    type: Literal["first_frame"] = "first_frame"
    image_or_video: str = Field(description="A still, or a video whose first frame is taken.")

    def needs(self, grid: VideoGrid) -> tuple[MediaNeed, ...]:
        return (_frame_need(CONTENT, self.image_or_video, grid, recompress=True),)

    def condition(self, grid: Grid, media: Media) -> Condition:
        return FirstFrame()


class LastFrameSample(SampleCondition):
    """A still, or the end of a video, as the last latent frame (which covers the last 8 frames; a still is held for them)."""

    type: Literal["last_frame"] = "last_frame"
    image_or_video: str = Field(description="A still, or a video whose end is taken.")

    def needs(self, grid: VideoGrid) -> tuple[MediaNeed, ...]:
        return (_frame_need(CONTENT, self.image_or_video, grid, 1 + grid.factors.time, from_end=True),)

    def condition(self, grid: Grid, media: Media) -> Condition:
        return LastFrame()


class KeyframeSample(SampleCondition):
    """A still at any frame: as appended tokens over that one frame, or in place of the latent frame that holds it."""

    type: Literal["keyframe"] = "keyframe"
    image: str = Field(description="The still.")
    frame: int = Field(-1, description="Pixel frame; negative ones count from the end.")
    how: Literal["append", "replace"] = Field("append", description="append: an extra token row; replace: overwrite the latent frame.")
    number: int = Field(1, ge=1, description="Which of several; counted by itself when left out.")

    def needs(self, grid: VideoGrid) -> tuple[MediaNeed, ...]:
        role = self._tokens().role("video") if self.how == "append" else CONTENT
        held = self.how == "replace" and self._index(grid) > 0
        return (_frame_need(role, self.image, grid, 1 + grid.factors.time if held else 1, from_end=held),)

    def condition(self, grid: VideoGrid, media: Media) -> Condition:
        return self._tokens() if self.how == "append" else _OneKeyframe(at=(self._index(grid),))

    def _tokens(self) -> KeyframeTokens:
        return KeyframeTokens(frame=self.frame, number=self.number)

    def _index(self, grid: VideoGrid) -> int:
        """Latent frame that holds the pixel frame: 0, then 1 for frames 1..8, ..."""
        KeyframeTokens(frame=self.frame).check(grid)
        return -(-(self.frame % grid.pixel_frames) // grid.factors.time)


class _OneKeyframe(Keyframes):
    """A keyframe whose content is the end of what was encoded."""

    from_end: ClassVar[bool] = True


class _EitherStream(SampleCondition):
    """Names a video or a sound, which says the stream."""

    video: str | None = Field(None, description="A video file.")
    audio: str | None = Field(None, description="A sound file, or a video file with sound.")

    @model_validator(mode="after")
    def _one(self) -> _EitherStream:
        if bool(self.video) == bool(self.audio):
            raise ValueError(f"{self.type}: give either video or audio")
        return self

    @property
    def path(self) -> str:
        return self.video or self.audio


class _RunSample(_EitherStream):
    """A beginning or an end, by frames or seconds; without either as much as the file holds."""

    num_frames: int | None = Field(None, ge=1, description="Given frames of a video.")
    duration: float | None = Field(None, gt=0, le=3600, description="Given seconds.")

    @model_validator(mode="after")
    def _units(self) -> _RunSample:
        if self.audio and self.num_frames is not None:
            raise ValueError(f"{self.type}: num_frames is for video; give duration for a sound")
        if self.num_frames is not None and self.duration is not None:
            raise ValueError(f"{self.type}: give num_frames or duration, not both")
        return self

    def length(self, grid: Grid) -> int | None:
        """Given latent slices; None when the file says it."""
        if isinstance(grid, AudioGrid):
            return None if self.duration is None else max(1, round(self.duration * grid.steps_per_second))
        frames = self.num_frames if self.duration is None else max(1, round(self.duration * grid.fps))
        return None if frames is None else self._slices(frames, grid.factors.time)

    def _slices(self, frames: int, time: int) -> int:
        raise AssertionError("a run has an end")

    def _content_slices(self, grid: Grid, media: Media) -> int:
        length = self.length(grid)
        if length is not None:
            return length
        content = media.get(CONTENT)
        return 1 if content is None else time_slices(content.grid)[0]


class PrefixSample(_RunSample):
    """The beginning of a video or sound is given. Frames of a video are 8n + 1."""

    type: Literal["prefix"] = "prefix"

    def _slices(self, frames: int, time: int) -> int:
        if self.num_frames is not None and (frames - 1) % time:
            near = (frames - 1) // time * time + 1
            raise DataError("sample.frames", f"prefix: {frames} frames are not {time}n+1.", f"Nearest: {near} or {near + time}.")
        return (frames - 1) // time + 1

    def needs(self, grid: Grid) -> tuple[MediaNeed, ...]:
        length = self.length(grid)
        frames = (length - 1) * grid.factors.time + 1 if length and isinstance(grid, VideoGrid) else None
        return (_clip_need(CONTENT, self.path, grid, frames=frames, seconds=self.duration),)

    def condition(self, grid: Grid, media: Media) -> Condition:
        return Prefix(temporal_boundary=self._content_slices(grid, media))


class SuffixSample(_RunSample):
    """The end of a video or sound is given: the last latents of the encoded file. Frames of a video are 8n."""

    type: Literal["suffix"] = "suffix"

    def _slices(self, frames: int, time: int) -> int:
        if self.num_frames is not None and frames % time:
            near = max(frames // time, 1) * time
            raise DataError("sample.frames", f"suffix: {frames} frames are not {time}n.", f"Nearest: {near} or {near + time}.")
        return max(frames // time, 1)

    def needs(self, grid: Grid) -> tuple[MediaNeed, ...]:
        return (_clip_need(CONTENT, self.path, grid, from_end=True),)

    def condition(self, grid: Grid, media: Media) -> Condition:
        return Suffix(temporal_boundary=self._content_slices(grid, media))


class SpatialCropSample(SampleCondition):
    """A rectangle of a video is given (outpainting)."""

    type: Literal["spatial_crop"] = "spatial_crop"
    video: str = Field(description="The video, as large as the sample.")
    spatial_region: tuple[int, int, int, int] = Field(description="Given rectangle y1, x1, y2, x2 in pixels.")

    def needs(self, grid: VideoGrid) -> tuple[MediaNeed, ...]:
        return (_clip_need(CONTENT, self.video, grid),)

    def condition(self, grid: Grid, media: Media) -> Condition:
        return SpatialCrop(spatial_region=self.spatial_region)


class MaskSample(_EitherStream):
    """What a mask marks is given (inpainting)."""

    type: Literal["mask"] = "mask"
    mask: str = Field(description="Mask file: white (or 1) is given.")

    def needs(self, grid: Grid) -> tuple[MediaNeed, ...]:
        role = f"{self.modality}_mask"
        return (_clip_need(CONTENT, self.path, grid), _clip_need(role, self.mask, grid, kind=role))

    def condition(self, grid: Grid, media: Media) -> Condition:
        return Mask()


class ReferenceSample(_EitherStream):
    """A reference video or sound (IC-LoRA)."""

    type: Literal["reference"] = "reference"
    downscale_factor: int = Field(1, ge=1, description="How many times smaller the reference's sides are.")
    temporal_scale_factor: int = Field(1, ge=1, description="The reference keeps every n-th frame.")
    include_in_output: bool = Field(False, description="Show the reference beside the sample.")
    placement: Literal["over", "before"] = Field("over", description="Sound only: at the sample's own times, or before it (dubbing).")
    number: int = Field(1, ge=1, description="Which of several; counted by itself when left out.")

    def needs(self, grid: Grid) -> tuple[MediaNeed, ...]:
        role = self.condition(grid, {}).role(self.modality)
        if isinstance(grid, AudioGrid):
            return (_clip_need(role, self.path, grid),)
        frames = (grid.pixel_frames - 1) // self.temporal_scale_factor + 1
        need = _clip_need(role, self.path, grid, frames=frames, stride=self.temporal_scale_factor)
        if need.width % (self.downscale_factor * grid.factors.width) or need.height % (self.downscale_factor * grid.factors.height):
            raise DataError(
                "sample.downscale",
                f"reference: a {need.width}x{need.height} sample divided by {self.downscale_factor} is off the latent grid.",
                f"Make both sides multiples of {self.downscale_factor * grid.factors.width}.",
            )
        return (replace(need, width=need.width // self.downscale_factor, height=need.height // self.downscale_factor),)

    def condition(self, grid: Grid, media: Media) -> Reference:
        return Reference(
            downscale_factor=self.downscale_factor, temporal_scale_factor=self.temporal_scale_factor, placement=self.placement, number=self.number
        )


class _Frozen(SampleCondition):
    """A whole stream is given; the other is generated to it."""

    def needs(self, grid: Grid) -> tuple[MediaNeed, ...]:
        return (_clip_need(CONTENT, self.video if self.freezes == "video" else self.audio, grid),)

    def check(self, grid: Grid, media: Media | None = None) -> None:
        """A given stream fits any sample; its length is checked when it is put in."""

    def apply(self, states: States, media: Media) -> States:
        content, state = media[CONTENT], states[self.freezes]
        assert isinstance(content, Latents) and state is not None
        if content.grid.tokens != state.grid.tokens:
            unit = "frames" if self.freezes == "video" else "s"
            have, want = (round(getattr(g, "pixel_frames", 0) or g.seconds, 2) for g in (content.grid, state.grid))
            raise DataError("sample.given_length", f"{self.type}: the given {self.freezes} has {have} {unit}, the sample {want}.", "Give media at least as long as video_dims says.")
        return states.with_(self.freezes, LatentState.of(content, keyframe_marker=state.keyframes is not None).frozen())


class VideoToAudioSample(_Frozen):
    """The video is given; sound is generated to it."""

    freezes = "video"
    type: Literal["video_to_audio"] = "video_to_audio"
    video: str = Field(description="The video.")


class AudioToVideoSample(_Frozen):
    """The sound is given; video is generated to it."""

    freezes = "audio"
    type: Literal["audio_to_video"] = "audio_to_video"
    audio: str = Field(description="The sound, or a video file with sound.")


AnySampleCondition = Annotated[
    FirstFrameSample
    | LastFrameSample
    | KeyframeSample
    | PrefixSample
    | SuffixSample
    | SpatialCropSample
    | MaskSample
    | ReferenceSample
    | VideoToAudioSample
    | AudioToVideoSample,
    Field(discriminator="type"),
]
