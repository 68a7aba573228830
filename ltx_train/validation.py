"""Validation: prompts and media to clips on disk, during a run or for a sampling job. A failed preview never ends a run."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from .conditioning.conditions import Media
from .contact_sheet import write_contact_sheet
from .contexts import ContextStore
from .decode import Wave, decode_sound, keep_latents, write_clip
from .errors import ConfigError, DataError, LtxTrainError, StopRequested, is_out_of_memory
from .geometry import VideoGrid
from .models.checkpoint import Checkpoint
from .models.codec import EngineCodec, free_bytes
from .models.tiling import Tiling
from .models.transformer import LTXTransformer
from .room import Room, decode_needs, untouched_random
from .runs.events import SampleEvent
from .runs.live import LiveRun
from .sample_media import encode_conditions, noise_file, read_noise, reference_beside
from .sampling.denoise import Sampled, denoise
from .sampling.recipe import Recipe, ValidationSample, ValidationSection, start_states
from .sampling.sample_conditions import States
from .text import TextFeatures

if TYPE_CHECKING:
    from .training.parallel import Parallel

SMALL_TILES = Tiling(256, 64, 32, 16)
"""What the decoder is tried with once more after it ran out of memory."""

_TOGETHER_TOKENS = 2048  # without a card to ask: samples up to this run their guidance passes in one forward
_TOKEN_COPIES = 24  # of a token's width that one forward holds at its peak, feed-forward included


@dataclass(frozen=True)
class PreparedSample:
    """A sample with its condition media encoded, its recipe, and the keys of its two contexts."""

    sample: ValidationSample
    streams: tuple[str, ...]
    media: list[Media]
    recipe: Recipe
    positive: str
    negative: str


@dataclass
class Made:
    """What became of one sample: its latents, then its file, or the error that prevented it."""

    index: int
    seconds: float = 0.0
    path: Path | None = None
    error: tuple[str, str] | None = None
    sampled: Sampled | None = None
    sound: Wave | None = None


class Validator:
    """Makes the clips of a validation section with a transformer that is already loaded.

    base: context in which the transformer is the base model, for step 0. offload_optimizer: its state waits in host memory.
    """

    def __init__(
        self, section: ValidationSection, checkpoint: Checkpoint, prepared: Sequence[PreparedSample | None], contexts: ContextStore, codec: EngineCodec,
        transformer: LTXTransformer | None = None, *, base: Callable[[], AbstractContextManager[None]] = nullcontext, offload_optimizer: bool = False,
    ) -> None:  # fmt: skip
        self.section, self.checkpoint, self.prepared = section, checkpoint, tuple(prepared)
        self.contexts, self.codec, self.transformer = contexts, codec, transformer
        self.base, self.offload_optimizer = base, offload_optimizer
        self._one_by_one = False
        self._check: Callable[[], None] = lambda: None

    def run(self, step: int, live: LiveRun, parallel: Parallel | None = None, optimizer: torch.optim.Optimizer | None = None, together: bool = False) -> list[Path]:
        """Make every sample (the ranks share them); files land in ``samples/``, failures are warnings.

        All latents come first; then the frozen blocks make room for the decoder, once for all samples.
        together: the weights lie in shards over the ranks, so every rank computes every sample, and rank 0 decodes.
        """
        rank, world = (parallel.rank, parallel.world) if parallel is not None and not together else (0, 1)
        made = [Made(index) for index in range(rank, len(self.prepared), world) if self.prepared[index] is not None]
        room = Room(self.codec.device, self.transformer, optimizer if self.offload_optimizer else None)
        self._check = stop_check(live, parallel, together)
        with live.phase("validation", f"step {step}"), untouched_random():
            try:
                with room.without_optimizer():
                    with self.base() if step == 0 else nullcontext():
                        self.each(made, lambda m: self.sample(m, live))
                    if together and parallel is not None and not parallel.is_main:
                        made = []
                    with room.for_work(self.decoder_bytes(made)):
                        self.each(waiting(made), lambda m: self.decode_sound(m, step, live))  # all sounds, then all pictures:
                        self.each(waiting(made), lambda m: self.decode_clip(m, step, live))  # each decoder is loaded once
                        self.codec.release()
            except StopRequested:
                if world > 1:  # the other ranks are met below; all of them stop at the next step
                    made = [one for one in made if one.path is not None]
                else:
                    raise
            finally:
                self.codec.release()
        for one in made:
            one.sampled = one.sound = None
        results = [m for part in (parallel.gather(made) if parallel is not None else [made]) for m in part]
        for result in sorted(results, key=lambda m: m.index):
            self.tell(result, step, live)
        if live.is_main and self.section.contact_sheet:
            self.sheet(live)
        return [r.path for r in results if r.path is not None]

    def each(self, made: Sequence[Made], work: Callable[[Made], None]) -> None:
        """Do one part of every sample; whatever goes wrong, except a stop, becomes that sample's error."""
        for one in made:
            started = time.monotonic()
            try:
                work(one)
            except StopRequested:
                raise
            except LtxTrainError as error:
                one.error, one.sampled = (error.message, error.hint), None
            except Exception as error:  # a preview runs over files, codecs and drivers; none of their faults may end a training
                one.error, one.sampled = (f"{type(error).__name__}: {error}".splitlines()[0], str(error)), None
            one.seconds += time.monotonic() - started
            if one.error is not None:
                self.free()

    def tell(self, result: Made, step: int, live: LiveRun) -> None:
        prompt = self.prepared[result.index].sample.prompt
        if result.error is not None:
            live.warn("sample.failed", f"Sample {result.index + 1} of step {step} failed: {result.error[0]}"[:118], f"{result.error[1]}\nTraining goes on.")
        elif result.path is not None:
            relative = result.path.relative_to(live.dir.path).as_posix()
            live.emit(SampleEvent(step=step, path=relative, index=result.index, prompt=prompt, seconds=round(result.seconds, 3)))

    def sheet(self, live: LiveRun) -> None:
        """Draw the contact sheet anew, references beside the rows; a failure is a warning."""
        references = {i: files[0] for i, s in enumerate(self.section.samples) if (files := [p for c in s.conditions for p in c.files()])}
        try:
            write_contact_sheet(live.dir.path, live.dir.history().samples.values(), references)
        except Exception as error:  # as with the samples themselves
            live.warn("sample.sheet", f"The contact sheet could not be drawn: {error}".splitlines()[0][:118], str(error))

    # -- latents --
    def sample(self, made: Made, live: LiveRun) -> None:
        """The latents of one sample, on the host; passes that do not fit together are run one by one, now and later."""
        prepared = self.prepared[made.index]
        try:
            sampled = self.generate(prepared, live)
        except Exception as error:  # running out of memory shows as several kinds; every other goes on up
            if not is_out_of_memory(error) or self._one_by_one:
                raise
            self._one_by_one, sampled = True, None
        if sampled is None:
            self.free()
            sampled = self.generate(prepared, live)
        for stream in ("video", "audio"):
            latents = getattr(sampled, stream)
            if latents is not None and not torch.isfinite(latents.values).all():
                raise DataError(
                    "sample.not_finite", f"The {stream} latents of sample {made.index + 1} hold values that are no finite numbers.",
                    "Guidance scales or LoRA strengths that are too large do this, damaged weights too, and fp16 where bf16 is needed.",
                )  # fmt: skip
        host = lambda latents: None if latents is None else latents.to("cpu", torch.float32)  # noqa: E731
        wanted = self.section
        made.sampled = Sampled(host(sampled.video) if wanted.generate_video else None, host(sampled.audio) if wanted.generate_audio else None)

    def generate(self, prepared: PreparedSample, live: LiveRun) -> Sampled:
        """One sample through the denoising loop."""
        assert self.transformer is not None
        config, device, sample = self.transformer.config, self.codec.device, prepared.sample
        grid = self.section.video_grid(sample, self.checkpoint.video_factors)
        media = [{role: value.to(device) for role, value in m.items()} for m in prepared.media]
        states = start_states(
            sample, media, streams=prepared.streams, video_grid=grid, audio_grid=self.checkpoint.audio_grid if config.has_audio else None,
            video_channels=config.in_channels, audio_channels=config.audio_in_channels, keyframe_marker=config.keyframe_embedding, device=device,
        )  # fmt: skip
        positive = self.contexts.batch([prepared.positive])
        negative = self.contexts.batch([prepared.negative]) if prepared.recipe.needs_negative else None
        generator = torch.Generator(device).manual_seed(self.section.seed_of(sample))
        return denoise(
            self.transformer, video=states.video, audio=states.audio, positive=positive, negative=negative, schedule=prepared.recipe.schedule,
            guidance=prepared.recipe.guidance, noise=read_noise(sample, states), generator=generator, batched=self.together(states), check=self._check,
            on_step=lambda view: live.progress("validation", view.step, view.total, unit="denoising steps"),
        )  # fmt: skip

    def together(self, states: States) -> bool:
        """Whether the guidance passes of a step go in one forward: as set, or where memory allows it."""
        if self.section.guidance_passes != "auto":
            return self.section.guidance_passes == "together"
        if self._one_by_one:
            return False
        tokens = sum(s.tokens for s in (states.video, states.audio) if s is not None)
        if self.codec.device.type != "cuda":
            return tokens <= _TOGETHER_TOKENS
        return 4 * tokens * self.transformer.config.dim * _TOKEN_COPIES * self.codec.dtype.itemsize < 0.8 * free_bytes(self.codec.device)

    # -- files --
    def decoder_bytes(self, made: Sequence[Made]) -> int:
        """Bytes to make free for decoding what was sampled."""
        if self.section.decode == "later" or not any(m.sampled is not None for m in made):
            return 0
        grids = [m.sampled.video.grid for m in made if m.sampled is not None and m.sampled.video is not None]
        pixels = max((g.pixel_frames * g.height * g.width * g.factors.height * g.factors.width for g in grids), default=0)
        return decode_needs(self.checkpoint, self.codec.dtype, pixels, sound=any(m.sampled is not None and m.sampled.audio is not None for m in made))

    def target(self, made: Made, step: int, live: LiveRun) -> Path:
        return live.dir.samples / f"step_{step:06d}_{made.index + 1}"

    def decode_sound(self, made: Made, step: int, live: LiveRun) -> None:
        """The sound of one sample; its latents are kept when there is no memory for that, or they are wanted."""
        if self.section.decode == "later":
            made.path = keep_latents(self.target(made, step, live), made.sampled.video, made.sampled.audio)
            return
        try:
            made.sound = decode_sound(self.codec, made.sampled.audio)
        except Exception as error:  # running out of memory shows as several kinds; every other goes on up
            if not is_out_of_memory(error):
                raise
            self.keep(made, step, live, str(error))

    def decode_clip(self, made: Made, step: int, live: LiveRun) -> None:
        """Decode the pictures, with smaller tiles when there was not enough memory, and write the clip."""
        beside = self.beside(made, live) if made.sampled.video is not None else None
        usual = self.codec.tiling
        for tiling in (None if self.section.decode == "whole" else usual, SMALL_TILES):
            self.codec.tiling = tiling
            try:
                made.path = write_clip(self.codec, self.target(made, step, live), made.sampled.video, made.sound, beside)
                return
            except Exception as error:  # as above
                if not is_out_of_memory(error):
                    raise
                failure = str(error)
            finally:
                self.codec.tiling = usual
            self.free()
        self.keep(made, step, live, failure)

    def keep(self, made: Made, step: int, live: LiveRun, failure: str) -> None:
        """The latents as they are, for decoding later, and a warning that says so."""
        self.free()
        made.path = keep_latents(self.target(made, step, live), made.sampled.video, made.sampled.audio)
        live.warn(
            "sample.decode_memory", f"There was not enough memory to decode sample {made.index + 1}; its latents are kept.",
            f"{failure}\nDecode {made.path.name} later (python -m ltx_train decode, or LoadLatent in ComfyUI), or make validation.video_dims smaller.",
        )  # fmt: skip

    def beside(self, made: Made, live: LiveRun) -> torch.Tensor | None:
        """The reference to show at the left, where a condition asks for it."""
        sample = self.prepared[made.index].sample
        try:
            return reference_beside(sample, made.sampled.video.grid)
        except (LtxTrainError, OSError, ValueError) as error:
            live.warn("sample.reference", f"The reference of sample {made.index + 1} could not be shown beside it.", str(error))
            return None

    def free(self) -> None:
        """Drop what a failed part left on the device."""
        self.codec.release()
        if self.codec.device.type == "cuda":
            torch.cuda.empty_cache()


def plan_samples(section: ValidationSection, checkpoint: Checkpoint) -> list[tuple[tuple[str, ...], VideoGrid, Recipe]]:
    """Streams, grid and recipe of each sample. Raises ConfigError or DataError for settings that cannot work; reads headers alone."""
    missing = section.missing_files()
    if missing:
        raise ConfigError("validation.file", f"There is no file {missing[0].name} for a validation sample."[:118], f"Named: {', '.join(map(str, missing))}.")
    config = checkpoint.transformer
    if config is None:
        checkpoint.source("transformer")
    plans = []
    for sample in section.samples:
        streams, grid = section.streams_of(sample, has_audio=config.has_audio), section.video_grid(sample, checkpoint.video_factors)
        recipe = section.recipe(checkpoint.family, distilled=checkpoint.distilled, config=checkpoint.config, num_layers=config.num_layers, tokens=grid.tokens)
        for condition in sample.conditions:
            if condition.modality not in streams:
                raise ConfigError("sample.stream", f"{condition.type}: this sample makes no {condition.modality}.", f"Generate {condition.modality}, or leave the condition out.")
            own = checkpoint.audio_grid.of_seconds(grid.seconds) if condition.modality == "audio" else grid
            condition.check(own)
            condition.needs(own)
        if sample.noise is not None:
            sound = checkpoint.audio_grid.of_seconds(grid.seconds)
            shapes = {"video": (1, config.in_channels, grid.frames, grid.height, grid.width), "audio": (1, config.audio_in_channels // sound.bins, sound.steps, sound.bins)}
            noise_file(sample, {stream: shapes[stream] for stream in streams if stream != sample.frozen()})
        plans.append((streams, grid, recipe))
    return plans


def prepare_samples(
    section: ValidationSection, checkpoint: Checkpoint, codec: EngineCodec, key_of: Callable[[str], str], on_fault: Callable[[int, Exception], None] | None = None
) -> list[PreparedSample | None]:
    """Everything of the samples that needs a VAE encoder, done while no transformer is loaded.

    key_of: context key of a text. Raises ConfigError and DataError for what cannot work; with ``on_fault`` a sample
    whose media cannot be read or encoded is told there and left out (None), and only wrong settings raise.
    """
    plans = plan_samples(section, checkpoint)
    prepared: list[PreparedSample | None] = []
    for index, (sample, (streams, grid, recipe)) in enumerate(zip(section.samples, plans)):
        try:
            media = encode_conditions(sample, grid, checkpoint.audio_grid if checkpoint.transformer.has_audio else None, codec, recipe.image_crf)
        except Exception as error:  # whatever a user's file or its codec raises: told, and this sample is left out
            if on_fault is None or isinstance(error, StopRequested | ConfigError):
                raise
            on_fault(index, error)
            prepared.append(None)
            continue
        prepared.append(PreparedSample(sample, streams, media, recipe, key_of(sample.prompt), key_of(section.negative_of(sample))))
    codec.release()
    return prepared


def condition_warning(live: LiveRun) -> Callable[[int, Exception], None]:
    """The ``on_fault`` of a run: a warning, and the training goes on without that sample."""

    def tell(index: int, error: Exception) -> None:
        said = error.message if isinstance(error, LtxTrainError) else f"{type(error).__name__}: {error}".splitlines()[0]
        live.warn("sample.condition", f"Sample {index + 1} is left out: {said}"[:118], f"{error}\nIts condition could not be encoded. Training goes on.")

    return tell


def text_key(text: str) -> str:
    """The context key of a text that no dataset holds."""
    return f"validation:{text}"


def encode_texts(texts: Sequence[str], codec: EngineCodec) -> Mapping[str, TextFeatures]:
    """Features of texts by :func:`text_key`."""
    return {text_key(t): f for t, f in zip(texts, codec.encode_text(list(texts)))} if texts else {}


def stop_check(live: LiveRun, parallel: Parallel | None, together: bool) -> Callable[[], None]:
    """What a denoising step calls to leave when a stop was asked for; other ranks than the first look for the request themselves.

    together: all ranks compute each step with one another, so they leave at the same one.
    """
    if parallel is None or parallel.world == 1:
        return live.stop.check

    def check() -> None:
        wanted = live.stop.requested or live.dir.requested("stop")
        if parallel.any(wanted) if together else wanted:
            live.stop.request("asked by the control file")
            live.stop.check()

    return check


def waiting(made: Sequence[Made]) -> list[Made]:
    """The samples that have latents and no file yet."""
    return [m for m in made if m.sampled is not None and m.path is None]
