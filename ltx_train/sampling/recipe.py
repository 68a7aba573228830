"""The validation section: samples with their conditions, guidance and schedule, in the official fields and ours."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import Field, field_validator, model_validator

from ..conditioning.conditions import Media
from ..conditioning.state import LatentState
from ..errors import ConfigError, utf8
from ..geometry import AudioGrid, VideoFactors, VideoGrid
from ..models.families import Family
from ..section import Section
from .guidance import Guidance, StreamGuidance
from .sample_conditions import AnySampleCondition, FirstFrameSample, KeyframeSample, ReferenceSample, States
from .schedule import NAMED, Schedule, distilled_schedule, sigma_schedule

NEGATIVE_PROMPT = (
    "low quality, worst quality, blurry, out of focus, pixelated, compression artifacts, noise, grain, overexposed, underexposed, "
    "washed out, distorted, deformed face, deformed hands, extra fingers, extra limbs, asymmetric eyes, unnatural skin, watermark, "
    "text, logo, subtitles, jittery motion, flicker, frozen frame, duplicated subject, muffled sound, echo, hiss, robotic voice, "
    "off-sync sound, clipping"
)

Dims = tuple[int, int, int]
SEEDS = (-(2**63), 2**64 - 1)
"""The least and the largest seed that a generator takes."""
LARGEST = 16384
"""The largest side, and the most frames, of a sample: what no card holds, and torch's own sizes run over far beyond."""

MODEL_NUMBERS = (
    "inference_steps", "video_cfg_scale", "audio_cfg_scale", "video_stg_scale", "audio_stg_scale", "stg_blocks",
    "guidance_rescale", "video_modality_guidance_scale", "audio_modality_guidance_scale", "schedule_tokens",
)  # fmt: skip
"""Numbers that follow the model's own recipe unless they are set by hand."""


class ValidationSample(Section):
    """One clip to make while training."""

    prompt: str = Field(description="What the clip shows and sounds like.")
    conditions: tuple[AnySampleCondition, ...] = Field((), description="First frame, prefix, reference and other conditions.")
    video_dims: Dims | None = Field(None, description="Width, height, frames of this sample; None takes the section's.")
    seed: int | None = Field(None, description="Seed of this sample (0 is a seed); None takes the section's.")
    negative_prompt: str | None = Field(None, description="Negative prompt of this sample; None takes the section's.")
    noise: str | None = Field(None, description="Start noise from a safetensors file (latents named video, audio) instead of the seed.")

    @field_validator("prompt", "negative_prompt")
    @classmethod
    def _readable(cls, text: str | None) -> str | None:
        return text if text is None else readable(text)

    @field_validator("seed")
    @classmethod
    def _possible(cls, seed: int | None) -> int | None:
        return seed if seed is None else possible_seed(seed)

    @field_validator("conditions")
    @classmethod
    def _numbered(cls, conditions: tuple[AnySampleCondition, ...]) -> tuple[AnySampleCondition, ...]:
        """Several references of a stream (or keyframes) read roles of their own."""
        counts: Counter[str] = Counter()
        numbered = []
        for condition in conditions:
            if isinstance(condition, (ReferenceSample, KeyframeSample)):
                counts[key := f"{condition.type} {condition.modality}"] += 1
                if "number" not in condition.model_fields_set and counts[key] > 1:
                    condition = condition.model_copy(update={"number": counts[key]})
            numbered.append(condition)
        return tuple(numbered)

    @model_validator(mode="after")
    def _one_given_stream(self) -> ValidationSample:
        frozen = [c for c in self.conditions if c.freezes]
        if len(frozen) > 1:
            raise ValueError(f"{frozen[0].type} and {frozen[1].type} cannot be combined: one stream must be generated")
        for given in frozen:
            for other in self.conditions:
                if other is not given and other.modality == given.freezes:
                    raise ValueError(f"{other.type} cannot be combined with {given.type}: that {given.freezes} is given whole")
        return self

    def frozen(self) -> str | None:
        """The stream that is given whole, if any."""
        return next((c.freezes for c in self.conditions if c.freezes), None)


def is_file(path: Path) -> bool:
    """Whether a named file is there, ``~`` expanded; False too for a name that no disk takes."""
    try:
        return path.expanduser().is_file()
    except (OSError, ValueError, RuntimeError):  # too long, a zero byte, the home of nobody
        return False


def possible_seed(seed: int) -> int:
    """The seed; ValueError for one that no generator takes."""
    if not SEEDS[0] <= seed <= SEEDS[1]:
        raise ValueError(f"a seed is a whole number from {SEEDS[0]} to {SEEDS[1]}")
    return seed


def readable(text: str) -> str:
    """The text; ValueError for half a character (a lone surrogate), which no tokenizer reads."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise ValueError(f"character {error.start + 1} is half of one (\\u{ord(text[error.start]):04x}); write the text anew") from error
    return text


@dataclass(frozen=True)
class Recipe:
    """How samples are made with one model."""

    schedule: Schedule
    guidance: StreamGuidance
    image_crf: int

    @property
    def needs_negative(self) -> bool:
        return self.guidance.video.cfg != 1 or self.guidance.audio.cfg != 1


class ValidationSection(Section):
    """Previews: what is sampled, how and when. The official fields come first, with their defaults."""

    samples: tuple[ValidationSample, ...] = Field((), description="Clips to make. The older prompts (texts, or one text), images and reference_videos are taken too.")
    negative_prompt: str = Field(NEGATIVE_PROMPT, description="What to keep away from, where cfg is above 1.")
    video_dims: Dims = Field((960, 544, 89), description="Width, height, frames.")
    frame_rate: float = Field(24.0, ge=1, le=240, description="Frames a second.")
    seed: int = Field(42, description="Seed of all samples without their own.")
    inference_steps: int = Field(30, gt=0, le=1000, description="Denoising steps.")
    interval: int | None = Field(100, gt=0, description="Steps between previews; None: none.")
    video_cfg_scale: float = Field(3.0, ge=1, description="Prompt guidance of the video; 1 is off.")
    audio_cfg_scale: float = Field(7.0, ge=1, description="Prompt guidance of the sound; 1 is off.")
    video_stg_scale: float = Field(1.0, ge=0, description="Spatio-temporal guidance of the video; 0 is off.")
    audio_stg_scale: float = Field(1.0, ge=0, description="Spatio-temporal guidance of the sound; 0 is off.")
    stg_blocks: tuple[int, ...] | None = Field((28,), description="Blocks that STG skips; None: all.")
    guidance_rescale: float = Field(0.7, ge=0, le=1, description="Share of the guided prediction's spread that is put back.")
    video_modality_guidance_scale: float = Field(3.0, ge=1, description="How strongly the video follows the sound; 1 is off.")
    audio_modality_guidance_scale: float = Field(3.0, ge=1, description="How strongly the sound follows the video; 1 is off.")
    generate_audio: bool = Field(True, description="Make sound, where the model knows sound.")
    generate_video: bool = Field(True, description="Make video.")
    skip_initial_validation: bool = Field(False, description="No preview of the untrained model.")
    # ours
    set_by_hand: tuple[str, ...] = Field((), description="Which of the numbers above are the user's own; the others follow the model's recipe.")
    sampler: Literal["auto", "euler", "euler_ancestral"] = Field("auto", description="auto: as the model was made for.")
    eta: float = Field(1.0, ge=0, le=1, description="Share of noise that ancestral steps renew.")
    schedule: Literal["auto", "shifted", "distilled", "distilled_stage2", "distilled_stage2_tiled", "ltxv_distilled"] = Field(
        "auto", description="Noise levels; auto: the distilled list for a distilled model, else the shifted schedule."
    )
    sigmas: tuple[float, ...] | None = Field(None, description="Own noise levels, falling to 0, instead of a schedule.")
    schedule_tokens: int | None = Field(4096, ge=1, description="Tokens that the shift is for: 4096 from LTX-2 on; None: the sample's own, as LTX-Video has it.")
    cfg_star: bool = Field(False, description="CFG-Zero*: project the unguided prediction before prompt guidance.")
    guidance_passes: Literal["auto", "together", "one_by_one"] = Field("auto", description="Guidance passes in one forward (more memory) or one after the other.")
    image_crf: int | None = Field(None, ge=0, le=51, description="H.264 recompression of given first frames; None: as the model's inference; 0: none.")
    decode: Literal["auto", "whole", "later"] = Field("auto", description="auto: tiles by free memory; whole: no tiles; later: keep latents, decode by hand.")
    contact_sheet: bool = Field(True, description="One labelled picture of step x prompt.")

    @field_validator("negative_prompt")
    @classmethod
    def _readable(cls, text: str) -> str:
        return readable(text)

    @field_validator("seed")
    @classmethod
    def _possible(cls, seed: int) -> int:
        return possible_seed(seed)

    @model_validator(mode="before")
    @classmethod
    def _legacy(cls, data: Any) -> Any:
        if not isinstance(data, Mapping):
            return data
        data = _migrated(dict(data))
        data.setdefault("set_by_hand", tuple(name for name in MODEL_NUMBERS if name in data))
        return data

    @model_validator(mode="after")
    def _something_to_make(self) -> ValidationSection:
        if self.samples and not (self.generate_video or self.generate_audio):
            raise ValueError("generate_video and generate_audio are both false: there is nothing to sample")
        unknown = [name for name in self.set_by_hand if name not in MODEL_NUMBERS]
        if unknown:
            raise ValueError(f"set_by_hand: {unknown[0]} is none of {', '.join(MODEL_NUMBERS)}")
        if self.sigmas is not None and Schedule(self.sigmas).sigmas[-1] != 0:
            raise ValueError(f"sigmas: the last one is {self.sigmas[-1]:g}, which leaves noise in the clip; end with 0")
        return self

    @property
    def active(self) -> bool:
        """Whether a run makes previews by itself."""
        return bool(self.samples) and self.interval is not None

    def texts(self) -> list[str]:
        """All prompts and negative prompts, each once, in order."""
        texts = [text for s in self.samples for text in (s.prompt, self.negative_of(s))]
        return list(dict.fromkeys(texts))

    def negative_of(self, sample: ValidationSample) -> str:
        return self.negative_prompt if sample.negative_prompt is None else sample.negative_prompt

    def seed_of(self, sample: ValidationSample) -> int:
        return self.seed if sample.seed is None else sample.seed

    def missing_files(self) -> list[Path]:
        """Named condition files that do not exist."""
        named = [path for s in self.samples for c in s.conditions for path in c.files()] + [Path(s.noise) for s in self.samples if s.noise]
        return [path for path in dict.fromkeys(named) if not is_file(path)]

    def streams_of(self, sample: ValidationSample, *, has_audio: bool) -> tuple[str, ...]:
        """The streams of a sample, given or generated. has_audio: the model knows sound."""
        wanted = {"video": self.generate_video, "audio": self.generate_audio}
        frozen = sample.frozen()
        if frozen:
            wanted[frozen] = True
            wanted["audio" if frozen == "video" else "video"] = True
        if not has_audio and (frozen or not wanted["video"] or any(c.modality == "audio" for c in sample.conditions)):
            raise ConfigError("sample.no_audio_model", "A sample needs sound, which this model does not know.", "Use LTX-2, 2.3 or 2.5, or leave sound out.")
        return tuple(m for m in ("video", "audio") if wanted[m] and (m == "video" or has_audio))

    def video_grid(self, sample: ValidationSample, factors: VideoFactors) -> VideoGrid:
        """The latent grid of a sample; ConfigError for sizes that do not fit the VAE."""
        width, height, frames = sample.video_dims or self.video_dims
        if min(width, height, frames) < 1 or max(width, height, frames - 1) > LARGEST or width % factors.width or height % factors.height or frames % factors.time != 1 % factors.time:
            near = lambda value, unit, least: min(max(least, (value + unit // 2) // unit * unit), LARGEST // unit * unit)  # noqa: E731
            raise ConfigError(
                "sample.dims",
                f"video_dims {width}x{height}x{frames}: the sides must be multiples of {factors.width}, frames {factors.time}n+1, up to {LARGEST}.",
                f"Nearest: {near(width, factors.width, factors.width)}x{near(height, factors.height, factors.height)}x{near(frames - 1, factors.time, 0) + 1}.",
            )
        return VideoGrid.of_pixels(width, height, frames, 24.0 if frames == 1 else self.frame_rate, factors)

    def recipe(self, family: Family, *, distilled: bool = False, config: Mapping[str, Any] | None = None, num_layers: int | None = None, tokens: int = 4096) -> Recipe:
        """Schedule and guidance for a model: its family's numbers, or those of distilled models, where none is set by hand.

        config: the checkpoint's config sections. num_layers: its blocks. tokens: of the sample, where the shift is for them.
        Raises ConfigError for a block to skip that the model does not have.
        """
        own = self._numbers(family, distilled, num_layers)
        guidance = StreamGuidance(
            Guidance(own["video_cfg_scale"], own["video_stg_scale"], own["video_modality_guidance_scale"], own["guidance_rescale"], self.cfg_star),
            Guidance(own["audio_cfg_scale"], own["audio_stg_scale"], own["audio_modality_guidance_scale"], own["guidance_rescale"], self.cfg_star),
            own["stg_blocks"],
        )
        if num_layers is not None and (guidance.video.stg or guidance.audio.stg):
            guidance.blocks(num_layers)
        crf = family.sampling.image_crf if self.image_crf is None else self.image_crf
        shifted_for = tokens if own["schedule_tokens"] is None else own["schedule_tokens"]
        return Recipe(self._schedule(family, distilled, config, own["inference_steps"], shifted_for), guidance, crf)

    def _numbers(self, family: Family, distilled: bool, num_layers: int | None) -> dict[str, Any]:
        usual = family.sampling
        own: dict[str, Any] = dict(
            inference_steps=usual.steps,
            video_cfg_scale=usual.video_cfg,
            audio_cfg_scale=usual.audio_cfg,
            video_stg_scale=usual.stg_scale,
            audio_stg_scale=usual.stg_scale,
            stg_blocks=usual.stg_blocks,
            guidance_rescale=usual.guidance_rescale,
            video_modality_guidance_scale=usual.modality_scale,
            audio_modality_guidance_scale=usual.modality_scale,
            schedule_tokens=usual.schedule_tokens,
        )
        if distilled:
            own.update({name: 1.0 for name in own if name.endswith(("cfg_scale", "guidance_scale"))})
            own.update(video_stg_scale=0.0, audio_stg_scale=0.0, inference_steps=usual.distilled_steps)
        if num_layers is not None and any(b >= num_layers for b in own["stg_blocks"]):
            # a model of another depth (a tiny one): the same place in it
            depth = family.config["transformer"]["num_layers"]
            own["stg_blocks"] = tuple(min(b * num_layers // depth, num_layers - 1) for b in own["stg_blocks"])
        own.update({name: getattr(self, name) for name in self.set_by_hand})
        return own

    def _schedule(self, family: Family, distilled: bool, config: Mapping[str, Any] | None, steps: int, tokens: int) -> Schedule:
        sampler = "euler" if self.sampler == "auto" else self.sampler
        if self.sigmas is not None:
            return Schedule(self.sigmas, sampler, self.eta)
        kind = self.schedule
        if kind == "auto" and distilled and ("inference_steps" not in self.set_by_hand or steps == distilled_schedule(family.name, config).steps):
            found = distilled_schedule(family.name, config)
            return Schedule(found.sigmas, found.sampler if self.sampler == "auto" else sampler, self.eta)
        if kind in NAMED:
            return Schedule(NAMED[kind], sampler, self.eta)
        return Schedule(sigma_schedule(steps, tokens=tokens), sampler, self.eta)


def start_states(
    sample: ValidationSample,
    media: Sequence[Media],
    *,
    streams: Sequence[str],
    video_grid: VideoGrid,
    audio_grid: AudioGrid | None,
    video_channels: int,
    audio_channels: int = 0,
    keyframe_marker: bool = False,
    device: torch.device | str = "cpu",
) -> States:
    """The states that sampling starts from: nothing known, then every condition of the sample put in.

    media: for each condition, in order, its encoded latents and masks by role (see ``condition.needs(grid)``).
    audio_grid: a template with the checkpoint's layout. channels: of a token.
    """
    blank = dict(device=device, keyframe_marker=keyframe_marker)
    video = LatentState.blank(video_grid, channels=video_channels, **blank) if "video" in streams else None
    audio = None
    if "audio" in streams:
        assert audio_grid is not None, "sound needs the checkpoint's audio layout"
        audio = LatentState.blank(audio_grid.of_seconds(video_grid.seconds), channels=audio_channels, **blank)
    states = States(video, audio)
    for condition, encoded in zip(sample.conditions, media, strict=True):
        states = condition.apply(states, encoded)
    return states


def _migrated(data: dict[str, Any]) -> dict[str, Any]:
    """The official trainer's older fields as today's; the older names are gone from the result."""
    if (scale := data.pop("guidance_scale", None)) is not None:
        _refuse_mix("guidance_scale", ("video_cfg_scale", "audio_cfg_scale"), data)
        data.update(video_cfg_scale=scale, audio_cfg_scale=scale)
    stg, kind = data.pop("stg_scale", None), data.pop("stg_mode", None)
    if stg is not None or kind is not None:
        _refuse_mix("stg_scale", ("video_stg_scale", "audio_stg_scale"), data)
        if kind not in (None, "stg_av", "stg_v"):
            raise ValueError(f"stg_mode: {kind!r} is neither stg_av nor stg_v")
        stg = 1.0 if stg is None else stg
        data.update(video_stg_scale=stg, audio_stg_scale=0.0 if kind == "stg_v" else stg)
    prompts, images, references = (_listed(name, data.pop(name, None)) for name in ("prompts", "images", "reference_videos"))
    factor, show = data.pop("reference_downscale_factor", None) or 1, data.pop("include_reference_in_output", None) or False
    if not prompts:
        if images or references:
            raise ValueError("images and reference_videos go with prompts; use samples with conditions instead")
        return data
    if data.get("samples"):
        raise ValueError("give samples or the older prompts, not both")
    for name, files in (("images", images), ("reference_videos", references)):
        if files and len(files) != len(prompts):
            raise ValueError(f"{name}: {len(files)} files for {len(prompts)} prompts")
        for file in files or ():
            if file and not (isinstance(file, str | Path) and is_file(Path(file))):
                raise ValueError(f"{name}: there is no file {utf8(str(file)).decode()}")
    samples = []
    for index, prompt in enumerate(prompts):
        conditions: list[dict[str, Any]] = []
        if images and images[index]:
            conditions.append(FirstFrameSample(image_or_video=str(images[index])).model_dump())
        if references and references[index]:
            conditions.append({"type": "reference", "video": str(references[index]), "downscale_factor": factor, "include_in_output": show})
        samples.append({"prompt": prompt, "conditions": conditions})
    return {**data, "samples": samples}


def _listed(name: str, value: Any) -> list[Any]:
    """The older fields' values as a list: one text is a list of one."""
    if value is None or isinstance(value, str | Path):
        return [value] if value else []
    if not isinstance(value, list | tuple):
        raise ValueError(f"{name}: a list of texts, or one text, is needed, not {value!r:.40}")
    return list(value)


def _refuse_mix(old: str, new: tuple[str, ...], data: Mapping[str, Any]) -> None:
    mixed = [name for name in new if name in data]
    if mixed:
        raise ValueError(f"{old} is the older form of {' and '.join(new)}; give one form, not {old} beside {mixed[0]}")
