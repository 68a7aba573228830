"""The sampling job: a model's clips from prompts, with LoRAs applied; one process, no training."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from .contexts import ContextStore
from .errors import ConfigError, LtxTrainError
from .lora.apply import apply_loras
from .lora.files import read_lora
from .models.checkpoint import Checkpoint
from .models.transformer import LTXTransformer
from .network import load_network
from .preprocess import engine_codec
from .runs.live import LiveRun
from .sampling.recipe import ValidationSection
from .validation import Validator, encode_texts, plan_samples, prepare_samples, text_key

if TYPE_CHECKING:
    from .config import SampleJob
    from .memory.settings import AccelerationSection


def run(job: SampleJob, live: LiveRun) -> None:
    """Carry out a sampling job: one process, no training."""
    from .training.parallel import Parallel

    device = Parallel.start(device=job.acceleration.device).device
    section = job.validation
    if not section.samples:
        raise ConfigError("sample.none", "The job names no sample.", "Give at least one prompt (validation.samples, or --prompt).")
    live.set_state("running")
    checkpoint = job.model.open()
    plan_samples(section, checkpoint)  # told before a text encoder is read, which takes minutes
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
