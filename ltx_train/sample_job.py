"""The sampling job: a model's clips from prompts, with LoRAs applied; one process, no training."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from .contexts import ContextStore
from .errors import ConfigError, LtxTrainError
from .lora.apply import apply_loras, without_place
from .lora.files import LoraFile, read_lora
from .models.checkpoint import Checkpoint
from .models.transformer import LTXTransformer, load_transformer
from .network import load_network
from .preprocess import engine_codec
from .runs.live import LiveRun
from .sampling.recipe import ValidationSection
from .trained_weights import other_family
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
    plans = plan_samples(section, checkpoint)  # told before a text encoder is read, which takes minutes
    loras = [(read_lora(Path(use.path).expanduser()), use.strength) for use in job.loras]
    check_loras([lora for lora, _ in loras], checkpoint, {s for streams, _, _ in plans for s in streams}, live)
    transformer, validator = build_sampler(checkpoint, section, job.acceleration, device, live)
    apply_loras(transformer, loras)
    made = validator.run(0, live)
    if len(made) < len(section.samples):
        raise LtxTrainError("sample.incomplete", f"{len(section.samples) - len(made)} of {len(section.samples)} samples failed.", "The warnings above say why.")


def check_loras(loras: Sequence[LoraFile], checkpoint: Checkpoint, streams: Collection[str], live: LiveRun) -> None:
    """Refuse LoRAs that do not fit the model, and warn of those of another family, before anything is loaded.

    streams: those that are sampled. Raises LtxTrainError as :func:`without_place`.
    """
    if not loras:
        return
    whole = load_transformer(checkpoint, dtype=torch.bfloat16, device="meta")
    used = load_transformer(checkpoint, dtype=torch.bfloat16, device="meta", video="video" in streams, audio="audio" in streams)
    for lora in loras:
        assert lora.path is not None
        absent = without_place(whole, lora)
        without_place(used, lora)
        if other := other_family(lora.path, checkpoint):
            live.warn("lora.other_family", other, "It fits, but its numbers mean something else here: use a LoRA of this family, unless this is meant.")
        if absent:
            said = f"{lora.path.name[:40]}: {len(absent)} of its {len(lora.modules)} modules are not in this model."
            live.warn("lora.without_effect", said, f"They change nothing, such as {absent[0]}: the LoRA was made for another model, or for its text encoder too.")


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
