"""The parts of a training, built from its job: data, contexts, transformer with adapters, optimizer, validator."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .conditioning.modes import TrainingStrategySection
from .config import TrainConfig, digest
from .contexts import ContextStore
from .data.dataset import Batch, Batches, TrainingDataset, open_dataset
from .data.sampler import BucketSampler, Stage
from .errors import ConfigError, DataError
from .held_out import HeldOut, Portion, split
from .models.checkpoint import Checkpoint
from .network import load_network
from .planner import has_auto, plan_here, work_of
from .preprocess import engine_codec, ensure
from .runs.events import PlanEvent
from .runs.live import LiveRun
from .runs.model_card import ModelCard
from .trained_weights import LoraResult, build_trainable, data_fingerprint, load_shards
from .training.ema import Ema
from .training.flow_matching import ModalityBalance
from .training.parallel import Parallel, keep_global_batch
from .training.snapshots import last_state
from .training.step import StepOutput, TrainStep
from .training.trainable import Trainable

if TYPE_CHECKING:
    from .validation import Validator


@dataclass(frozen=True)
class FedBatch:
    """A batch on the device and the slots (places in the whole global batch) of its samples."""

    batch: Batch
    slots: list[int]


class Feed:
    """Batches of this rank by (step, micro-step), on the device."""

    def __init__(self, batches: Batches, sampler: BucketSampler, parallel: Parallel) -> None:
        self.batches, self.sampler, self.parallel = batches, sampler, parallel

    @property
    def epoch_samples(self) -> int:
        return self.sampler.epoch_samples()

    @property
    def accumulation(self) -> int:
        """Micro-steps of one optimizer step."""
        return self.sampler.accumulation

    @property
    def global_batch(self) -> int:
        """Samples of one optimizer step over all ranks."""
        return self.sampler.batch_size * self.sampler.accumulation * self.parallel.world

    def batch(self, step: int, micro: int) -> FedBatch:
        batch = self.batches.get(step, micro)
        slots = self.sampler.slots(step, micro, self.parallel.rank, self.parallel.world)
        return FedBatch(batch.to(self.parallel.device), slots)

    def close(self) -> None:
        """End the loading threads."""
        self.batches.close()


@dataclass
class Parts:
    """What the loop works with."""

    data: Feed
    step: TrainStep
    trainable: Trainable
    optimizer: torch.optim.Optimizer
    scaler: torch.amp.GradScaler
    ema: Ema | None
    validator: Validator | None
    identity: dict[str, str]
    held_out: HeldOut | None = None
    together: int = 1  # micro-steps that go through each block together


def build_parts(config: TrainConfig, live: LiveRun, parallel: Parallel) -> Parts:
    """Build everything in the order that keeps one large model in memory at a time.

    Text encoder and VAEs (preprocessing), then the connectors (contexts), then the transformer.
    """
    from .validation import Validator, condition_warning, encode_texts, prepare_samples, text_key

    for section in (config.logging, config.wandb, config.hub):
        section.check()
    config.optimization.require_packages()
    checkpoint = config.model.open()
    strategy = config.training_strategy
    validation = config.validation if config.validation.active else None
    texts = validation.texts() if validation is not None else []
    root = ensure(config, checkpoint, live, parallel, texts)
    dataset = open_dataset(
        root, factors=checkpoint.video_factors, audio_grid=checkpoint.audio_grid if checkpoint.family.audio else None,
        index=config.data.index, directories=strategy.directories(),
    )  # fmt: skip
    check_family(dataset, checkpoint)
    dataset, held = hold_out(config, strategy, checkpoint, dataset, live)
    check_prior(config, dataset)
    strategy = settle_sound(strategy, dataset, checkpoint, live)
    streams = strategy.streams().present
    codec = engine_codec(checkpoint, config.acceleration, parallel.device)
    known = texts_of(dataset)
    empty = dataset.empty_text()
    if config.data.caption_dropouts and empty is None and checkpoint.has("text_encoder"):
        texts, empty = [*texts, ""], text_key("")  # a cache of another tool: the empty caption is encoded now
    features = encode_texts([t for t in texts if t not in known], codec)
    prepared = prepare_samples(validation, checkpoint, codec, lambda text: known.get(text, text_key(text)), condition_warning(live)) if validation is not None else []
    codec.release()
    apart = set(held.text_keys()) - set(dataset.text_keys()) if held is not None else set()
    needed = {key for p in prepared if p is not None for key in (p.positive, p.negative)}
    wanted = set(streams) | {s for p in prepared if p is not None for s in p.streams}
    contexts = ContextStore(
        checkpoint, lambda key: features[key] if key in features else (held.features(key) if key in apart else dataset.features(key)), video="video" in wanted, audio="audio" in wanted,
        device=parallel.device, dtype=config.acceleration.compute_dtype(parallel.device),
    )  # fmt: skip
    with live.phase("text contexts"):
        dropped = [empty] if empty is not None and config.data.caption_dropouts else []
        contexts.prepare([*dataset.text_keys(), *dropped, *sorted(needed | apart)], lambda done, total: live.progress("text contexts", done, total, unit="captions"))
    feed = build_feed(config, strategy, dataset, contexts, live, parallel, empty)
    config = settle_memory(config, checkpoint, dataset, feed.batches.get(0, 0), parallel.device, live)
    with live.phase("load the model"):
        recompute = config.acceleration.checkpoints_activations(config.optimization.enable_gradient_checkpointing)
        if config.model.training_mode == "full" and parallel.world > 1:
            transformer = load_shards(config, checkpoint, parallel, streams, recompute)
        else:
            dropout = config.lora is not None and config.lora.dropout > 0
            transformer = load_network(
                checkpoint, config.acceleration, parallel.device, streams=streams, live=live, dropout=dropout, recompute=recompute,
                frozen=config.model.training_mode == "lora", own_layers=config.lora is None or config.lora.kind in ("lora", "rslora"),
            )  # fmt: skip
        trainable = build_trainable(config, strategy, checkpoint, transformer, dataset, live, parallel)
    trainable.share(parallel)
    balance = ModalityBalance(config.flow_matching, parallel.device)
    ema = config.optimization.ema
    base = trainable.adapters.disabled if isinstance(trainable, LoraResult) else nullcontext
    step = TrainStep(transformer, strategy, config.flow_matching, config=checkpoint.transformer, balance=balance, base=base)
    return Parts(
        data=feed,
        step=step,
        trainable=trainable,
        optimizer=config.optimization.build_optimizer(trainable.parameters(), in_ram=config.acceleration.optimizer_in_ram == "on"),
        scaler=torch.amp.GradScaler(parallel.device.type, enabled=config.acceleration.dtype == torch.float16 and parallel.device.type != "cpu"),
        ema=Ema(trainable.named_parameters(), ema) if ema is not None else None,
        validator=Validator(
            validation, checkpoint, prepared, contexts, codec, transformer, base=base, offload_optimizer=config.acceleration.offload_optimizer_during_validation
        ) if validation is not None else None,
        identity=identity_of(config, checkpoint, dataset),
        together=1 if config.acceleration.accumulate_together == "auto" else min(config.acceleration.accumulate_together, feed.accumulation),
        held_out=HeldOut(held, contexts, step, parallel.device, base=base if isinstance(trainable, LoraResult) else None) if held is not None else None,
    )


def settle_memory(config: TrainConfig, checkpoint: Checkpoint, dataset: TrainingDataset, first: Batch, device: torch.device, live: LiveRun) -> TrainConfig:
    """The job with every ``auto`` of its acceleration section decided for the largest clip and the memory that is free.

    first: any batch, for its sound and references beside the video. Raises ConfigError ``plan.too_large`` with what would fit.
    """
    streams = {m: sum(part.grid.tokens for part in (getattr(first, m), first.roles.get(f"reference_{m}")) if part is not None) for m in ("video", "audio")}
    own = (first.video or first.audio).grid.tokens
    larger = max(unit.tokens for unit in dataset.units()) / max(1, own)
    work = work_of(config, checkpoint.transformer, video_tokens=int(streams["video"] * larger), audio_tokens=int(streams["audio"] * larger))
    try:
        plan = plan_here(config, work, device)
    except ConfigError as error:
        if has_auto(config.acceleration):
            raise
        live.warn(error.code, f"{error.message} It is tried as it is set.", error.hint)
        return config
    if plan is None:
        return config
    live.emit(PlanEvent(message=plan.why, settings=plan.settings()))
    return config.model_copy(update={"acceleration": plan.section})


def hold_out(
    config: TrainConfig, strategy: TrainingStrategySection, checkpoint: Checkpoint, dataset: TrainingDataset, live: LiveRun
) -> tuple[TrainingDataset, TrainingDataset | None]:
    """(what is trained on, what the held-out loss is measured on or None): another dataset, or a share of this one."""
    section = config.data
    if section.held_out_root:
        other = open_dataset(
            Path(section.held_out_root), factors=checkpoint.video_factors, audio_grid=checkpoint.audio_grid if checkpoint.family.audio else None,
            directories=strategy.directories(),
        )  # fmt: skip
        check_family(other, checkpoint)
        return dataset, other
    if section.held_out_share == 0:
        return dataset, None
    trained, held = split(dataset, section.held_out_share)
    if not held:
        live.warn("held_out.too_few", "There are too few clips to keep any out of training.", "data.held_out_share needs at least two files.")
        return dataset, None
    return Portion(dataset, trained), Portion(dataset, held)


def check_family(dataset: TrainingDataset, checkpoint: Checkpoint) -> None:
    """Refuse a cache that another family's model made."""
    manifest = getattr(dataset, "manifest", None)
    made_for = manifest.model.get("family") if manifest is not None else None
    if made_for and made_for != checkpoint.family.name:
        raise DataError(
            "cache.family", f"The cache was made for {made_for}; the model is {checkpoint.family.name}.",
            "Their latents and text features differ: preprocess the dataset again with this model.",
        )  # fmt: skip


def check_prior(config: TrainConfig, dataset: TrainingDataset) -> None:
    """Refuse clips that train towards the base model's prediction where the base model itself is changed."""
    if config.model.training_mode == "full" and getattr(dataset, "has_prior", bool)():
        raise ConfigError(
            "full.prior", "Prior preservation needs the base model, which full fine-tuning changes.",
            "Set regularisation: plain for that source, or train a LoRA.",
        )  # fmt: skip


def settle_sound(strategy: TrainingStrategySection, dataset: TrainingDataset, checkpoint: Checkpoint, live: LiveRun) -> TrainingStrategySection:
    """The strategy as this data and model allow: sound beside video is left out where no clip has any (said once).

    Raises ConfigError or DataError where sound is what the mode is for.
    """
    streams = strategy.streams()
    if streams.audio == "absent":
        return strategy
    if not checkpoint.family.audio:
        if streams.video == "generated" and streams.audio == "generated":
            live.warn("mode.no_audio_model", f"{checkpoint.family.title} has no sound: only video is trained.")
            return strategy.without_audio()
        raise ConfigError("mode.no_audio_model", f"{checkpoint.family.title} has no sound; the strategy needs it.", "Use LTX-2, 2.3 or 2.5, or another mode.")
    coverage = dataset.audio_coverage()
    if coverage == 0:
        if streams.video == "generated" and streams.audio == "generated":
            live.warn("data.no_sound", "No clip has sound: only the video stream is trained, and no sound module is adapted.")
            return strategy.without_audio()
        strategy.check_sound(len(dataset), len(dataset))
    elif coverage < 1:
        silent = round(len(dataset) * (1 - coverage))
        live.warn("data.some_silent", f"{silent} of {len(dataset)} clips have no sound; they count for the video loss only.")
    return strategy


def texts_of(dataset: TrainingDataset) -> Mapping[str, str]:
    """Text -> key of the texts whose features the cache holds."""
    manifest = getattr(dataset, "manifest", None)
    return manifest.texts if manifest is not None else {}


def build_feed(
    config: TrainConfig, strategy: TrainingStrategySection, dataset: TrainingDataset, contexts: ContextStore, live: LiveRun, parallel: Parallel, empty_text: str | None = None
) -> Feed:
    """The sampler and the batches; the mode is checked against the first clip's size."""
    optimization = config.optimization
    stages = [Stage(s.from_step, s.max_tokens) for s in config.data.stages]
    sampler = BucketSampler(
        dataset.units(), batch_size=optimization.batch_size, accumulation=settled_accumulation(config, live, parallel), seed=config.seed, stages=stages
    )
    for group, size in sampler.small_groups.items():
        live.warn("data.small_group", f"The bucket {group} has {size} samples for a batch of {sampler.batch_size}: they repeat within a batch.")
    streams = strategy.streams().present
    batches = Batches(
        dataset, sampler, contexts, workers=config.data.num_dataloader_workers, rank=parallel.rank, world=parallel.world,
        caption_dropout=config.data.caption_dropouts, with_audio="audio" in streams, empty_text=empty_text, warn=live.warn,
    )  # fmt: skip
    first = batches.get(0, 0)
    grids = {m: latents.grid for m in streams if (latents := getattr(first, m)) is not None}
    strategy.check(grids)
    return Feed(batches, sampler, parallel)


def settled_accumulation(config: TrainConfig, live: LiveRun, parallel: Parallel) -> int:
    """Micro-steps of an optimizer step: as set, or what keeps the global batch of a run that another number of processes began."""
    known = last_state(live.dir.path) if parallel.is_main else None
    before = parallel.broadcast_object(None if known is None else known["global_batch"])
    section = config.optimization
    settled = keep_global_batch(section.gradient_accumulation_steps, section.batch_size, parallel.world, before)
    if settled.message:
        live.warn("distributed.global_batch", settled.message, settled.hint)
    return settled.accumulation


def identity_of(config: TrainConfig, checkpoint: Checkpoint, dataset: TrainingDataset) -> dict[str, str]:
    """What a snapshot must share with a job to be gone on from: a digest for each part of the identity."""
    parts: dict[str, Any] = {name: digest(value) for name, value in config.identity().items() if name not in ("model", "data")}
    return {**parts, "base": checkpoint.fingerprint_of("transformer"), "dataset": data_fingerprint(dataset)}


def per_modality(out: StepOutput) -> dict[str, tuple[Tensor, Tensor, Tensor]]:
    """Loss, sigma and counts [B] of each stream that has a loss, as :class:`StepMeter` takes them."""
    return out.per_modality()


def model_card(config: TrainConfig, live: LiveRun, step: int) -> ModelCard:
    """The card of a finished run for the Hub."""
    history = live.dir.history()
    samples = tuple((live.dir.path / s.path, s.prompt) for s in history.samples.values() if s.step == step)
    checkpoint = config.model.open()
    return ModelCard(
        title=live.dir.name, base_model=checkpoint.family.title, trigger=config.data.captions.trigger or "", steps=step, samples=samples,
        rank=config.lora.rank if config.lora else None,
    )  # fmt: skip
