"""The parts of a training, built from its job: data, contexts, transformer with adapters, optimizer, validator."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from .checks import cautions, check_loss, check_network
from .conditioning.modes import TrainingStrategySection
from .config import TrainConfig, digest
from .contexts import ContextStore
from .data.batches import Batch, Batches
from .data.dataset import make_sampler
from .data.items import TrainingDataset
from .data.sampler import BucketSampler
from .errors import ConfigError
from .held_out import HeldOut
from .models.checkpoint import Checkpoint
from .network import load_network
from .planner import has_auto, plan_here, work_of
from .preprocess import engine_codec
from .runs.events import PlanEvent
from .runs.live import LiveRun
from .runs.model_card import ModelCard
from .trained_weights import LoraResult, build_trainable, data_fingerprint, load_shards
from .training.ema import Ema
from .training.flow_matching import ModalityBalance
from .training.host_adam import HostAdamW
from .training.parallel import Parallel, keep_global_batch
from .training.snapshots import last_state
from .training.step import TrainStep
from .training.trainable import Trainable
from .training_data import TrainingData, open_data, texts_of

if TYPE_CHECKING:
    from .models.codec import EngineCodec
    from .models.transformer import LTXTransformer
    from .sampling.recipe import ValidationSection
    from .validation import PreparedSample, Validator


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
    from .validation import Validator, plan_samples

    for section in (config.logging, config.wandb, config.hub):
        section.check()
    config.optimization.require_packages()
    checkpoint = config.model.open()
    for line in cautions(config, checkpoint) if live.is_main else []:
        live.warn("config.caution", line)
    validation = config.validation if config.validation.active else None
    if validation is not None:
        plan_samples(validation, checkpoint)  # before the dataset is encoded, which takes hours
    check_network(config, checkpoint)
    data = open_data(config, checkpoint, live, parallel, validation.texts() if validation is not None else [])
    check_loss(config, data.strategy.streams().generated)
    encoded = encode_texts_and_previews(config, checkpoint, data, validation, live, parallel)
    feed = build_feed(config, data.strategy, data.dataset, encoded.contexts, live, parallel, encoded.empty)
    config = settle_memory(config, checkpoint, data.dataset, feed.batches.get(0, 0), parallel.device, live)
    with live.phase("load the model"):
        transformer = load_base(config, checkpoint, parallel, data.strategy.streams().present, live)
        trainable = build_trainable(config, data.strategy, checkpoint, transformer, data.dataset, live, parallel)
    trainable.share(parallel)
    acceleration, ema = config.acceleration, config.optimization.ema
    base = trainable.adapters.disabled if isinstance(trainable, LoraResult) else None
    balance = ModalityBalance(config.flow_matching, parallel.device)
    step = TrainStep(transformer, data.strategy, config.flow_matching, config=checkpoint.transformer, balance=balance, base=base or nullcontext)
    return Parts(
        data=feed,
        step=step,
        trainable=trainable,
        optimizer=build_optimizer(config, trainable, live),
        scaler=torch.amp.GradScaler(parallel.device.type, enabled=acceleration.dtype == torch.float16 and parallel.device.type != "cpu"),
        ema=Ema(trainable.named_parameters(), ema) if ema is not None else None,
        validator=Validator(
            validation, checkpoint, encoded.previews, encoded.contexts, encoded.codec, transformer, base=base or nullcontext,
            offload_optimizer=acceleration.offload_optimizer_during_validation,
        ) if validation is not None else None,
        identity=identity_of(config, checkpoint, data.dataset),
        together=1 if acceleration.accumulate_together == "auto" else min(acceleration.accumulate_together, feed.accumulation),
        held_out=HeldOut(data.held_out, encoded.contexts, step, parallel.device, base=base) if data.held_out is not None else None,
    )  # fmt: skip


def told_bytes(live: LiveRun, phase: str, done: int, total: int) -> None:
    """Tell how many of so many bytes are there, in whole MiB, or in KiB where there are few."""
    shift, unit = (20, "MiB") if total >= 10 << 20 else (10, "KiB")
    live.progress(phase, done >> shift, -(-total >> shift), unit=unit)


def build_optimizer(config: TrainConfig, trainable: Trainable, live: LiveRun) -> torch.optim.Optimizer:
    """The optimizer over what is trained; where its means rest in host memory, that is taken now: 8 bytes a parameter take a while."""
    optimizer = config.optimization.build_optimizer(trainable.parameters(), in_ram=config.acceleration.optimizer_in_ram == "on")
    if isinstance(optimizer, HostAdamW):
        with live.phase("optimizer state"):
            optimizer.prepare(lambda done, total: told_bytes(live, "optimizer state", done, total))
    return optimizer


@dataclass(frozen=True)
class Encoded:
    """What the encoders made before the transformer is loaded.

    previews: by validation sample; None for one left out. empty: key of the empty caption, where dropout may ask for it.
    """

    contexts: ContextStore
    previews: list[PreparedSample | None]
    codec: EngineCodec
    empty: str | None


def encode_texts_and_previews(
    config: TrainConfig, checkpoint: Checkpoint, data: TrainingData, validation: ValidationSection | None, live: LiveRun, parallel: Parallel
) -> Encoded:
    """Contexts of every caption and prompt, and the previews' media encoded; the encoders are freed again."""
    from .validation import condition_warning, encode_texts, prepare_samples, text_key

    dataset, held = data.dataset, data.held_out
    codec = engine_codec(checkpoint, config.acceleration, parallel.device)
    texts, known, empty = validation.texts() if validation is not None else [], texts_of(dataset), dataset.empty_text()
    if config.data.caption_dropouts and empty is None and checkpoint.has("text_encoder"):
        texts, empty = [*texts, ""], text_key("")  # a cache of another tool: the empty caption is encoded now
    unknown = [t for t in texts if t not in known]

    def tell(done: int, parts: int) -> None:
        live.progress("encode prompts", len(unknown) * done // parts, len(unknown), unit="prompts")
        if parallel.world == 1:
            live.stop.check()

    codec.progress = tell
    features = encode_texts(unknown, codec)
    codec.progress = None
    previews: list[PreparedSample | None] = []
    if validation is not None:
        previews = prepare_samples(validation, checkpoint, codec, lambda text: known.get(text, text_key(text)), condition_warning(live))
    codec.release()
    made = [p for p in previews if p is not None]
    apart = set(held.text_keys()) - set(dataset.text_keys()) if held is not None else set()
    wanted = {*data.strategy.streams().present, *(s for p in made for s in p.streams)}
    contexts = ContextStore(
        checkpoint, lambda key: features[key] if key in features else (held.features(key) if key in apart else dataset.features(key)),
        video="video" in wanted, audio="audio" in wanted, device=parallel.device, dtype=config.acceleration.compute_dtype(parallel.device),
    )  # fmt: skip
    with live.phase("text contexts"):
        dropped = [empty] if empty is not None and config.data.caption_dropouts else []
        needed = {key for p in made for key in (p.positive, p.negative)} | apart
        contexts.prepare([*dataset.text_keys(), *dropped, *sorted(needed)], lambda done, total: live.progress("text contexts", done, total, unit="captions"))
    return Encoded(contexts, previews, codec, empty)


def load_base(config: TrainConfig, checkpoint: Checkpoint, parallel: Parallel, streams: Sequence[str], live: LiveRun) -> LTXTransformer:
    """The transformer that is trained or adapted: in shards for full fine-tuning over several ranks, else as the memory settings say."""
    recompute = config.acceleration.checkpoints_activations(config.optimization.enable_gradient_checkpointing)
    if config.model.training_mode == "full" and parallel.world > 1:
        return load_shards(config, checkpoint, parallel, streams, recompute, live)
    return load_network(
        checkpoint, config.acceleration, parallel.device, streams=streams, live=live, recompute=recompute,
        dropout=config.lora is not None and config.lora.dropout > 0, frozen=config.model.training_mode == "lora",
        own_layers=config.lora is None or config.lora.kind in ("lora", "rslora"),
    )  # fmt: skip


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


def build_feed(
    config: TrainConfig, strategy: TrainingStrategySection, dataset: TrainingDataset, contexts: ContextStore, live: LiveRun, parallel: Parallel, empty_text: str | None = None
) -> Feed:
    """The sampler and the batches."""
    optimization = config.optimization
    sampler = make_sampler(dataset, config.data, batch_size=optimization.batch_size, accumulation=settled_accumulation(config, live, parallel), seed=config.seed)
    for group, size in sampler.small_groups.items():
        live.warn("data.small_group", f"The bucket {group} has {size} samples for a batch of {sampler.batch_size}: they repeat within a batch.")
    streams = strategy.streams().present
    batches = Batches(
        dataset, sampler, contexts, workers=config.data.num_dataloader_workers, rank=parallel.rank, world=parallel.world,
        caption_dropout=config.data.caption_dropouts, with_audio="audio" in streams, empty_text=empty_text, warn=live.warn,
    )  # fmt: skip
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


def model_card(config: TrainConfig, live: LiveRun, step: int) -> ModelCard:
    """The card of a finished run for the Hub."""
    history = live.dir.history()
    samples = tuple((live.dir.path / s.path, s.prompt) for s in history.samples.values() if s.step == step)
    checkpoint = config.model.open()
    return ModelCard(
        title=live.dir.name, base_model=checkpoint.family.base_models[0], trigger=config.data.captions.trigger or "", steps=step, samples=samples,
        rank=config.lora.rank if config.lora else None,
    )  # fmt: skip
