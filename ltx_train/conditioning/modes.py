"""Training modes: the strategy section of a job, and the table of named modes as rows of conditions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Discriminator, Field, RootModel, Tag, field_validator, model_validator

from ..errors import ConfigError, DataError, nearest
from ..geometry import Grid, Latents
from ..section import Section
from .conditions import FOLDERS, FirstFrame, Keyframes, LastFrame, Media, Prefix, Suffix
from .draws import Draws, Sure
from .masks import Mask, RandomMask, SpatialCrop
from .references import Beside, KeyframeTokens, Reference
from .state import LatentState

TrainingCondition = Annotated[
    FirstFrame | LastFrame | Prefix | Suffix | Keyframes | SpatialCrop | Mask | RandomMask | Reference | KeyframeTokens,
    Field(discriminator="type"),
]


class ModalityConfig(Section):
    """How one stream takes part: generated or given, and the conditions on it, applied in order."""

    is_generated: bool = Field(description="True: noised and trained; False: given clean, no loss.")
    latents_dir: str | None = Field(None, description="Cache folder of the stream's latents (official field); None takes latents or audio_latents.")
    conditions: tuple[TrainingCondition, ...] = Field((), description="Conditions on this stream.")

    @field_validator("conditions")
    @classmethod
    def _numbered(cls, conditions: tuple[TrainingCondition, ...]) -> tuple[TrainingCondition, ...]:
        """Several references (or keyframe stills) of a stream read roles of their own: reference_video, reference_video_2, ..."""
        counts: Counter[str] = Counter()
        numbered = []
        for condition in conditions:
            counts[condition.type] += 1
            if isinstance(condition, Beside) and "number" not in condition.model_fields_set and counts[condition.type] > 1:
                condition = condition.model_copy(update={"number": counts[condition.type]})
            numbered.append(condition)
        return tuple(numbered)

    def state(self, latents: Latents, media: Media, draws: Draws, *, keyframe_marker: bool = False) -> LatentState:
        """The stream's state of a batch: frozen when given, edited by the conditions in order.

        A given stream takes references only: it has nothing left that a mask could give.
        """
        state = LatentState.of(latents, keyframe_marker=keyframe_marker)
        if not self.is_generated:
            state = state.frozen()
        for index, condition in enumerate(self.conditions):
            if self.is_generated or isinstance(condition, Beside):
                state = condition.edit(state, media, draws.child(f"{index}.{condition.type}"))
        return state

    def check(self, grid: Grid) -> None:
        """Raise ConfigError when the conditions cannot work on clips of ``grid``, each alone or all together."""
        for condition in self.conditions:
            condition.check(grid)
        if not self.is_generated:
            return
        within = [c for c in self.conditions if not isinstance(c, (Beside, Mask)) and c.applies(grid)]
        state = LatentState.blank(grid, channels=getattr(grid, "bins", 1))
        for condition in within:
            state = condition.edit(state, {}, Sure())
        if not bool(state.denoise.any()):
            names = ", ".join(c.type for c in within)
            raise ConfigError("mode.nothing_left", f"The conditions {names} together leave nothing of the clip to generate.", "Use longer clips, or fewer or shorter conditions.")


@dataclass(frozen=True)
class Streams:
    """Which streams take part: each ``generated``, ``frozen`` or ``absent``."""

    video: str
    audio: str

    def __getitem__(self, modality: str) -> str:
        return getattr(self, modality)

    @property
    def present(self) -> tuple[str, ...]:
        return tuple(m for m in ("video", "audio") if self[m] != "absent")

    @property
    def generated(self) -> tuple[str, ...]:
        return tuple(m for m in ("video", "audio") if self[m] == "generated")


class FlexibleStrategy(Section):
    """Any mode: each stream generated, given or absent, with conditions."""

    name: Literal["flexible"] = "flexible"
    video: ModalityConfig | None = Field(None, description="The video stream; None leaves it out (its weights are not loaded).")
    audio: ModalityConfig | None = Field(None, description="The sound stream; None leaves it out (its weights are not loaded).")

    @model_validator(mode="after")
    def _sensible(self) -> FlexibleStrategy:
        configs = {m: c for m in ("video", "audio") if (c := getattr(self, m)) is not None}
        if not any(c.is_generated for c in configs.values()):
            raise ValueError("nothing is generated: set is_generated: true on video or audio")
        for modality, config in configs.items():
            for condition in config.conditions:
                if modality not in condition.modalities:
                    raise ValueError(f"{modality}: the condition {condition.type} is for {' and '.join(condition.modalities)} only")
        return self

    @property
    def shared_sigma(self) -> bool:
        """One noise level for both streams unless the objective says otherwise; here each has its own."""
        return False

    def flexible(self) -> FlexibleStrategy:
        return self


class TextToVideoStrategy(Section):
    """The official trainer's older text to video strategy."""

    name: Literal["text_to_video"] = "text_to_video"
    first_frame_conditioning_p: float = Field(0.1, ge=0, le=1, description="Share of the clips whose first frame is given.")
    with_audio: bool = Field(False, description="Train sound beside the video.")
    audio_latents_dir: str = Field("audio_latents", description="Cache folder of the sound latents.")

    @property
    def shared_sigma(self) -> bool:
        return True

    def flexible(self) -> FlexibleStrategy:
        """The same training as a flexible strategy (its one noise level for both streams is :attr:`shared_sigma`)."""
        first = (FirstFrame(probability=self.first_frame_conditioning_p),) if self.first_frame_conditioning_p else ()
        audio = ModalityConfig(is_generated=True, latents_dir=self.audio_latents_dir) if self.with_audio else None
        return FlexibleStrategy(video=ModalityConfig(is_generated=True, latents_dir="latents", conditions=first), audio=audio)


class VideoToVideoStrategy(Section):
    """The official trainer's older IC-LoRA strategy."""

    name: Literal["video_to_video"] = "video_to_video"
    first_frame_conditioning_p: float = Field(0.1, ge=0, le=1, description="Share of the clips whose first frame is given.")
    reference_latents_dir: str = Field("reference_latents", description="Cache folder of the reference latents.")

    @property
    def shared_sigma(self) -> bool:
        return True

    def flexible(self) -> FlexibleStrategy:
        first = (FirstFrame(probability=self.first_frame_conditioning_p),) if self.first_frame_conditioning_p else ()
        return FlexibleStrategy(
            video=ModalityConfig(is_generated=True, latents_dir="latents", conditions=(*first, Reference(latents_dir=self.reference_latents_dir)))
        )


Strategy = FlexibleStrategy | TextToVideoStrategy | VideoToVideoStrategy


def _name_of(value: Any) -> str:
    """The strategy's name; a mapping without one is the older text_to_video, as the official trainer reads it."""
    return value.get("name", "text_to_video") if isinstance(value, Mapping) else getattr(value, "name", "flexible")


class TrainingStrategySection(
    RootModel[
        Annotated[
            Annotated[FlexibleStrategy, Tag("flexible")]
            | Annotated[TextToVideoStrategy, Tag("text_to_video")]
            | Annotated[VideoToVideoStrategy, Tag("video_to_video")],
            Discriminator(
                _name_of,
                custom_error_type="strategy_name",
                custom_error_message="training_strategy.name must be flexible, text_to_video or video_to_video",
            ),
        ]
    ]
):
    """The job's ``training_strategy``: told apart by ``name``; read through :meth:`flexible` in every form."""

    model_config = ConfigDict(frozen=True)

    @property
    def name(self) -> str:
        return self.root.name

    @property
    def shared_sigma(self) -> bool:
        """The older strategies draw one noise level for both streams."""
        return self.root.shared_sigma

    @property
    def video(self) -> ModalityConfig | None:
        return self.root.flexible().video

    @property
    def audio(self) -> ModalityConfig | None:
        return self.root.flexible().audio

    def flexible(self) -> FlexibleStrategy:
        return self.root.flexible()

    def modalities(self) -> dict[str, ModalityConfig]:
        """The streams that take part, by name, video first."""
        plain = self.root.flexible()
        return {m: c for m in ("video", "audio") if (c := getattr(plain, m)) is not None}

    def streams(self) -> Streams:
        configs = self.modalities()
        kind = lambda m: "absent" if m not in configs else "generated" if configs[m].is_generated else "frozen"  # noqa: E731
        return Streams(kind("video"), kind("audio"))

    def required_roles(self) -> frozenset[str]:
        """What every sample needs: the streams (video, audio) and the media beside them (reference_video, video_mask, ...)."""
        return frozenset(self.directories())

    def directories(self) -> dict[str, str]:
        """Every role that is needed (:meth:`required_roles`) with its folder in the official cache layout."""
        found: dict[str, str] = {}
        for modality, config in self.modalities().items():
            found[modality] = config.latents_dir or FOLDERS[modality]
            for condition in config.conditions:
                found.update(condition.folders(modality))
        return found

    def without_audio(self) -> TrainingStrategySection:
        """The same strategy for the video stream alone; the video must be generated."""
        return TrainingStrategySection(FlexibleStrategy(video=self.video))

    def check(self, grids: Mapping[str, Grid]) -> None:
        """Raise ConfigError for nonsense on clips of these grids (by stream)."""
        for modality, config in self.modalities().items():
            if modality in grids:
                config.check(grids[modality])

    def check_sound(self, clips: int, silent: int) -> None:
        """Raise DataError when sound is to be generated from clips without any."""
        if self.streams().audio != "absent" and clips and silent == clips:
            raise DataError(
                "mode.silent_clips",
                f"The strategy uses sound, but none of the {clips} clips has any.",
                "Add sound (an audio column or clips with a sound track), or leave audio out of training_strategy.",
            )

    def lora_metadata(self, grids: Mapping[str, Grid], media: Mapping[str, Grid]) -> dict[str, str]:
        """What the LoRA file tells its loaders: the reference factors, from the data. Both maps hold grids of one sample."""
        found: dict[str, str] = {}
        for modality, config in self.modalities().items():
            for condition in config.conditions:
                if modality in grids:
                    found.update(condition.lora_metadata(grids[modality], media))
        return found


# ---- the table of named modes ----
ATTENTION = ("to_k", "to_q", "to_v", "to_out.0")
_VIDEO = tuple(f"{a}.{m}" for a in ("attn1", "attn2") for m in ATTENTION)
_AUDIO = tuple(f"{a}.{m}" for a in ("audio_attn1", "audio_attn2") for m in ATTENTION)
_VIDEO_FF = ("ff.net.0.proj", "ff.net.2")
_AUDIO_FF = ("audio_ff.net.0.proj", "audio_ff.net.2")
_V2A = tuple(f"video_to_audio_attn.{m}" for m in ATTENTION)


@dataclass(frozen=True)
class Mode:
    """One named mode: conditions of each stream as plain data, and where to start with the numbers."""

    name: str
    title: str
    summary: str
    video: dict[str, Any] | None
    audio: dict[str, Any] | None
    target_modules: tuple[str, ...] = ATTENTION
    rank: int = 32
    learning_rate: float = 1e-4
    steps: int = 2000

    def strategy(self) -> TrainingStrategySection:
        return TrainingStrategySection.model_validate({"name": "flexible", "video": self.video, "audio": self.audio})


def _made(*conditions: dict[str, Any]) -> dict[str, Any]:
    return {"is_generated": True, "conditions": list(conditions)}


def _on(kind: str, **fields: Any) -> dict[str, Any]:
    return {"type": kind, **fields}


_GIVEN = {"is_generated": False}

MODES: dict[str, Mode] = {
    mode.name: mode
    for mode in (
        Mode("t2v", "Text to video", "Video from text; images too. Sound is left out.", _made(), None),
        Mode("t2v_audio", "Text to video with sound", "Video and sound from text.", _made(), _made()),
        Mode("images", "Style or character from images", "Still images or clips; attention and feed-forward layers of the video stream learn.", _made(), None, (*ATTENTION, *_VIDEO_FF)),
        Mode("i2v", "Image to video", "The first frame is given in half of the clips.", _made(_on("first_frame", probability=0.5)), None),
        Mode("i2v_audio", "Image to video with sound", "The first frame is given in half of the clips; sound is generated.", _made(_on("first_frame", probability=0.5)), _made()),
        Mode("first_last", "First and last frame to video", "Both ends are given, the middle is generated.", _made(_on("first_frame"), _on("last_frame")), None),
        Mode("keyframes", "Keyframes to video", "One to three frames anywhere are given.", _made(_on("keyframes", count=[1, 3])), None),
        Mode("extend", "Extend a video", "The first 8 latent frames are given.", _made(_on("prefix", temporal_boundary=8)), None),
        Mode("extend_any", "Extend from any length", "A beginning of random length is given.", _made(_on("prefix", temporal_boundary=1, temporal_boundary_max=4)), None),
        Mode("suffix", "Extend a video backwards", "The last 8 latent frames are given.", _made(_on("suffix", temporal_boundary=8)), None),
        Mode("inpaint", "Inpaint", "A mask of the dataset says what is given.", _made(_on("mask")), None, _VIDEO),
        Mode("inpaint_random", "Inpaint, random masks", "A new box to fill for each clip; no masks needed.", _made(_on("random_mask")), None, _VIDEO),
        Mode("outpaint", "Outpaint", "A rectangle is given, its surroundings are generated.", _made(_on("spatial_crop", spatial_region=[0, 0, 288, 576])), None, _VIDEO),
        Mode("outpaint_random", "Outpaint, random boxes", "A random box is given in each clip.", _made(_on("random_mask", generate="outside", share=[0.3, 0.7])), None, _VIDEO),
        Mode("v2v", "Video to video (IC-LoRA)", "A reference video (depth, pose, edges, any pair) steers the clip.", _made(_on("reference"), _on("first_frame", probability=0.2)), None, (*_VIDEO, *_VIDEO_FF), 32, 2e-4, 3000),
        Mode("a2v", "Sound to video", "The sound is given, the video generated.", _made(), _GIVEN),
        Mode("v2a", "Video to sound (foley)", "The video is given, the sound generated.", _GIVEN, _made(), (*_AUDIO, *_AUDIO_FF, *_V2A)),
        Mode("t2a", "Text to sound", "Sound from text; only the sound stream's weights are loaded.", None, _made(), (*_AUDIO, *_AUDIO_FF), 32, 2e-4, 3000),
        Mode("audio_extend", "Extend a sound", "The first 8 latent steps (0.3 s) are given.", None, _made(_on("prefix", temporal_boundary=8)), (*_AUDIO, *_AUDIO_FF), 32, 2e-4, 3000),
        Mode("audio_suffix", "Extend a sound backwards", "The last 8 latent steps are given.", None, _made(_on("suffix", temporal_boundary=8)), (*_AUDIO, *_AUDIO_FF), 32, 2e-4, 3000),
        Mode("audio_inpaint", "Inpaint a sound", "A mask of the dataset says what is given.", None, _made(_on("mask")), (*_AUDIO, *_AUDIO_FF), 32, 2e-4, 3000),
        Mode("audio_inpaint_random", "Inpaint a sound, random gaps", "A gap of random length to fill in each sound.", None, _made(_on("random_mask")), (*_AUDIO, *_AUDIO_FF), 32, 2e-4, 3000),
        Mode("a2a", "Sound to sound (IC-LoRA)", "A reference sound steers the sound.", None, _made(_on("reference")), (*_AUDIO, *_AUDIO_FF), 32, 2e-4, 3000),
        Mode("voice", "Voice from a reference sound", "A reference voice lies before the clip, at negative times (dubbing).", _made(), _made(_on("reference", placement="before", probability=0.9)), ATTENTION, 32, 2e-4, 3000),
        Mode("av2av", "Video and sound to video and sound (IC-LoRA)", "A reference video and a reference sound steer the clip.", _made(_on("reference")), _made(_on("reference")), ATTENTION, 32, 2e-4, 3000),
    )
}  # fmt: skip


def mode(name: str) -> Mode:
    """The row of a named mode; ConfigError with the nearest names for an unknown one."""
    if name not in MODES:
        near = nearest(name, list(MODES)) or list(MODES)
        raise ConfigError("mode.unknown", f"There is no mode {name!r}.", f"Nearest: {', '.join(near)}.")
    return MODES[name]
