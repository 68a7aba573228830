"""Validation: prompts and media to clips on disk, in a run or as a job of its own. A failed preview never ends a run."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from .conditioning.conditions import Media
from .contexts import ContextStore
from .decode import write_latents
from .errors import ConfigError, LtxTrainError, StopRequested
from .geometry import Latents
from .lora.apply import apply_loras
from .lora.files import read_lora
from .models.checkpoint import Checkpoint
from .models.codec import EngineCodec
from .models.transformer import LTXTransformer
from .network import load_network
from .preprocess import engine_codec
from .runs.events import SampleEvent
from .runs.live import LiveRun
from .sample_media import encode_conditions
from .sampling.denoise import Sampled, denoise
from .sampling.recipe import Recipe, ValidationSample, ValidationSection, start_states
from .tensorfile import save_tensors
from .text import TextFeatures

if TYPE_CHECKING:
    from .config import SampleJob
    from .memory.settings import AccelerationSection
    from .training.parallel import Parallel


@dataclass(frozen=True)
class PreparedSample:
    """A sample with its condition media encoded, its recipe, and the keys of its two contexts."""

    sample: ValidationSample
    streams: tuple[str, ...]
    media: list[Media]
    recipe: Recipe
    positive: str
    negative: str


@dataclass(frozen=True)
class Made:
    """What became of one sample: its file, or the error that prevented it."""

    index: int
    path: Path | None
    seconds: float
    error: tuple[str, str] | None = None


class Validator:
    """Makes the clips of a validation section with a transformer that is already loaded."""

    def __init__(
        self, section: ValidationSection, checkpoint: Checkpoint, prepared: Sequence[PreparedSample], contexts: ContextStore, codec: EngineCodec, transformer: LTXTransformer | None = None
    ) -> None:
        self.section, self.checkpoint, self.prepared = section, checkpoint, tuple(prepared)
        self.contexts, self.codec, self.transformer = contexts, codec, transformer

    def run(self, step: int, live: LiveRun, parallel: Parallel | None = None) -> list[Path]:
        """Make every sample (the ranks share them); files land in ``samples/``, failures are warnings."""
        rank, world = (parallel.rank, parallel.world) if parallel is not None else (0, 1)
        made: list[Made] = []
        with live.phase("validation", f"step {step}"), _forked_random():
            for index in range(rank, len(self.prepared), world):
                made.append(self.attempt(index, step, live))
        self.codec.release()
        results = [m for part in (parallel.gather(made) if parallel is not None else [made]) for m in part]
        for result in sorted(results, key=lambda m: m.index):
            self.tell(result, step, live)
        return [r.path for r in results if r.path is not None]

    def tell(self, result: Made, step: int, live: LiveRun) -> None:
        prompt = self.prepared[result.index].sample.prompt
        if result.error is not None:
            live.warn("sample.failed", f"Sample {result.index + 1} of step {step} failed: {result.error[0]}"[:118], f"{result.error[1]}\nTraining goes on.")
        elif result.path is not None:
            relative = result.path.relative_to(live.dir.path).as_posix()
            live.emit(SampleEvent(step=step, path=relative, index=result.index, prompt=prompt, seconds=round(result.seconds, 3)))

    def attempt(self, index: int, step: int, live: LiveRun) -> Made:
        """One sample; whatever goes wrong, except a stop, becomes the result's error."""
        started = time.monotonic()
        target = live.dir.samples / f"step_{step:06d}_{index + 1}"
        try:
            sampled = self.generate(self.prepared[index], live)
            path = self.write(sampled, target, live)
        except StopRequested:
            raise
        except LtxTrainError as error:
            return Made(index, None, 0.0, (error.message, error.hint))
        except (RuntimeError, ValueError, OSError, MemoryError) as error:
            _free(self.codec.device)
            return Made(index, None, 0.0, (f"{type(error).__name__}: {error}".splitlines()[0], str(error)))
        return Made(index, path, time.monotonic() - started)

    def generate(self, prepared: PreparedSample, live: LiveRun) -> Sampled:
        """The latents of one sample."""
        assert self.transformer is not None
        config, device = self.transformer.config, self.codec.device
        grid = self.section.video_grid(prepared.sample, self.checkpoint.video_factors)
        template = self.checkpoint.audio_grid
        media = [{role: value.to(device) for role, value in m.items()} for m in prepared.media]
        states = start_states(
            prepared.sample, media, streams=prepared.streams, video_grid=grid, audio_grid=template if config.has_audio else None,
            video_channels=config.in_channels, audio_channels=config.audio_in_channels, keyframe_marker=config.keyframe_embedding, device=device,
        )  # fmt: skip
        positive = self.contexts.batch([prepared.positive])
        negative = self.contexts.batch([prepared.negative]) if prepared.recipe.needs_negative else None
        generator = torch.Generator(device).manual_seed(self.section.seed_of(prepared.sample))
        return denoise(
            self.transformer, video=states.video, audio=states.audio, positive=positive, negative=negative, schedule=prepared.recipe.schedule,
            guidance=prepared.recipe.guidance, generator=generator, batched=self.batches_passes(states), check=live.stop.check,
            on_step=lambda view: live.progress("validation", view.step, view.total, unit="denoising steps"),
        )  # fmt: skip

    def batches_passes(self, states) -> bool:
        """Whether the guidance passes of a step go in one forward: as set, or when the sample is small."""
        if self.section.guidance_passes != "auto":
            return self.section.guidance_passes == "together"
        tokens = sum(s.tokens for s in (states.video, states.audio) if s is not None)
        return tokens <= 2048

    def write(self, sampled: Sampled, target: Path, live: LiveRun) -> Path:
        """Decode and write; when the decoder cannot run, the latents are kept for decoding later."""
        video = _host(sampled.video) if self.section.generate_video else None
        audio = _host(sampled.audio) if self.section.generate_audio else None
        if self.section.decode != "later":
            try:
                return write_latents(self.codec, target, video, audio)
            except (torch.OutOfMemoryError, MemoryError) as error:
                _free(self.codec.device)
                live.warn("sample.decode_memory", "There was not enough memory to decode a sample; its latents are kept.", f"{error}\nSet validation.video_dims smaller.")
        tensors = {name: latents.values for name, latents in (("video", video), ("audio", audio)) if latents is not None}
        path = target.with_name(target.name + ".latents.safetensors")
        save_tensors(path, {k: v.float() for k, v in tensors.items()}, what="the latents of a sample")
        return path


def prepare_samples(section: ValidationSection, checkpoint: Checkpoint, codec: EngineCodec, key_of: Callable[[str], str]) -> list[PreparedSample]:
    """Everything of the samples that needs a VAE encoder, done while no transformer is loaded.

    key_of: context key of a text. Raises ConfigError and DataError for what cannot work.
    """
    missing = section.missing_files()
    if missing:
        raise ConfigError("validation.file", f"There is no file {missing[0].name} for a validation sample."[:118], f"Named: {', '.join(map(str, missing))}.")
    config = checkpoint.transformer
    if config is None:
        checkpoint.source("transformer")
    prepared = []
    for sample in section.samples:
        streams = section.streams_of(sample, has_audio=config.has_audio)
        grid = section.video_grid(sample, checkpoint.video_factors)
        recipe = section.recipe(checkpoint.family, distilled=checkpoint.distilled, config=checkpoint.config, num_layers=config.num_layers, tokens=grid.tokens)
        media = encode_conditions(sample, grid, checkpoint.audio_grid if config.has_audio else None, codec, recipe.image_crf)
        prepared.append(PreparedSample(sample, streams, media, recipe, key_of(sample.prompt), key_of(section.negative_of(sample))))
    codec.release()
    return prepared


def text_key(text: str) -> str:
    """The context key of a text that no dataset holds."""
    return f"validation:{text}"


def encode_texts(texts: Sequence[str], codec: EngineCodec) -> Mapping[str, TextFeatures]:
    """Features of texts by :func:`text_key`."""
    return {text_key(t): f for t, f in zip(texts, codec.encode_text(list(texts)))} if texts else {}


def run(job: SampleJob, live: LiveRun) -> None:
    """Carry out a sampling job: one process, no training."""
    from .training.parallel import Parallel

    device = Parallel.start(device=job.acceleration.device).device
    section = job.validation
    if not section.samples:
        raise ConfigError("sample.none", "The job names no sample.", "Give at least one prompt (validation.samples, or --prompt).")
    live.set_state("running")
    checkpoint = job.model.open()
    loras = [(read_lora(Path(use.path).expanduser()), use.strength) for use in job.loras]
    transformer, validator = build_sampler(checkpoint, section, job.acceleration, device, live)
    apply_loras(transformer, loras)
    made = validator.run(0, live)
    if len(made) < len(section.samples):
        raise LtxTrainError("sample.incomplete", f"{len(section.samples) - len(made)} of {len(section.samples)} samples failed.", "The warnings above say why.")


def build_sampler(checkpoint: Checkpoint, section: ValidationSection, acceleration: AccelerationSection, device: torch.device, live: LiveRun) -> tuple[LTXTransformer, Validator]:
    """Text encoder, VAE encoders, connectors, then the transformer: one at a time in memory."""
    codec = engine_codec(checkpoint, acceleration, device)
    with live.phase("encode text"):
        features = encode_texts(section.texts(), codec)
        codec.release()
    with live.phase("encode conditions") if any(s.conditions for s in section.samples) else nullcontext():
        prepared = prepare_samples(section, checkpoint, codec, text_key)
    streams = tuple(dict.fromkeys(s for p in prepared for s in p.streams))
    contexts = ContextStore(
        checkpoint, features.__getitem__, video="video" in streams, audio="audio" in streams, device=device, dtype=acceleration.compute_dtype(device)
    )
    contexts.prepare(features)
    with live.phase("load the model"):
        transformer = load_network(checkpoint, acceleration, device, streams=streams, live=live)
    return transformer, Validator(section, checkpoint, prepared, contexts, codec, transformer)


def _host(latents: Latents | None) -> Latents | None:
    return None if latents is None else latents.to("cpu", torch.float32)


def _free(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.empty_cache()


def _forked_random():
    """Keeps the training's random state as it was: dropout after a preview draws what it would have drawn without."""
    devices = list(range(torch.cuda.device_count())) if torch.cuda.is_available() else []
    return torch.random.fork_rng(devices=devices)
