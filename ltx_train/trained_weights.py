"""What a run trains: an adapter or all weights, warm-started where asked, and what its file says of its origin."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor, nn

from .conditioning.modes import TrainingStrategySection
from .config import TrainConfig, digest
from .data.items import TrainingDataset
from .errors import ConfigError
from .lora.adapters import AdapterSet, attach
from .lora.files import base_shapes, read_lora, self_check, warm_start, write_lora
from .lora.metadata import LoraMetadata
from .memory.activations import checkpoint_activations
from .models.checkpoint import Checkpoint
from .models.families import FAMILIES
from .models.safetensors_file import SafetensorsFile
from .models.transformer import LTXTransformer
from .runs.live import LiveRun
from .training.full import FullWeights
from .training.parallel import Parallel
from .training.sharded import ShardedWeights, check_sharded, load_sharded
from .training.trainable import Trainable


@dataclass
class LoraResult(Trainable):
    """An adapter set that knows what to say about itself in its file."""

    adapters: AdapterSet
    metadata: LoraMetadata
    dtype: torch.dtype
    shapes: Mapping[str, tuple[int, int]]

    def named_parameters(self) -> dict[str, nn.Parameter]:
        return self.adapters.named_parameters()

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        self.adapters.load_state_dict(state)

    def warm_start(self, path: Path) -> str:
        """See :class:`Trainable`: a LoRA of any layout and rank; its strength is kept."""
        return warm_start(self.adapters, read_lora(path, self.shapes)).summary()

    def other_origin(self, path: Path) -> list[str]:
        """See :class:`Trainable`: base model and dataset, as the metadata have them (a changed setting makes another run already)."""
        theirs = read_lora(path, self.shapes).metadata
        return [name for name in ("base", "dataset") if getattr(theirs, name) != getattr(self.metadata, name)]

    def write(self, path: Path, step: int) -> int:
        """See :class:`Trainable`: every key is found in the base model, finite, and not zero."""
        write_lora(path, self.adapters, replace(self.metadata, steps=step), self.dtype)
        return self_check(path, self.shapes).modules


def load_shards(config: TrainConfig, checkpoint: Checkpoint, parallel: Parallel, streams: Sequence[str], recompute: bool, live: LiveRun) -> LTXTransformer:
    """The transformer in shards over the ranks, for full fine-tuning. Raises ConfigError for what cannot be trained so."""
    section = config.acceleration
    source = checkpoint.source("transformer")
    stored = any(source.format(name) is not None for name in source.keys())
    dtype = section.compute_dtype(parallel.device)
    check_sharded(config.optimization.optimizer_type, dtype, quantization=section.quantization, stored_quantised=stored)
    told = lambda done, total: live.progress("load the model", done, total, unit="weights")  # noqa: E731
    transformer = load_sharded(checkpoint, parallel, dtype=dtype, video="video" in streams, audio="audio" in streams, progress=told)
    if recompute:
        checkpoint_activations(transformer, kept=section.keep_activations_of)
    return transformer


def build_trainable(
    config: TrainConfig, strategy: TrainingStrategySection, checkpoint: Checkpoint, transformer: LTXTransformer, dataset: TrainingDataset, live: LiveRun,
    parallel: Parallel,
) -> Trainable:  # fmt: skip
    """The adapter (or all weights), warm-started where a checkpoint is given."""
    trained: Trainable
    dtype = config.checkpoints.dtype
    if config.model.training_mode == "full":
        trained = FullWeights(transformer, checkpoint, dtype) if parallel.world == 1 else ShardedWeights(transformer, checkpoint, dtype, parallel)
    else:
        shapes = base_shapes(transformer)
        adapters = attach(transformer, config.lora, seed=config.seed, streams=strategy.streams().present)
        for pattern in adapters.unmatched:
            live.warn("lora.target_unmatched", f"lora.{pattern} matches no module that is adapted.")
        trained = LoraResult(adapters, lora_metadata(config, strategy, checkpoint, dataset), dtype, shapes)
    if config.model.load_checkpoint:
        path = newest_weights(Path(config.model.load_checkpoint).expanduser())
        live.warn(f"{config.model.training_mode}.warm_start", f"Started from {path.name}: {trained.warm_start(path)}.")
        if other := other_family(path, checkpoint):
            live.warn("lora.other_family", other, "Its numbers mean something else here: start afresh, or from a LoRA of this family, unless this is meant.")
    return trained


def other_family(path: Path, checkpoint: Checkpoint) -> str | None:
    """What is to be said of a result file to start from that was trained on a model of another family; None where that is not known."""
    theirs = LoraMetadata.of(SafetensorsFile.open(path).metadata).family
    if not theirs or theirs == checkpoint.family.name:
        return None
    return f"{path.name} was trained on {FAMILIES[theirs].title if theirs in FAMILIES else theirs}, not on {checkpoint.family.title}."


def newest_weights(path: Path) -> Path:
    """The file itself, or the ``*step_N.safetensors`` with the highest N below a folder (the official rule)."""
    if path.is_file():
        return path
    found = {p: int(p.stem.rsplit("step_", 1)[-1]) for p in path.rglob("*step_*.safetensors") if p.stem.rsplit("step_", 1)[-1].isdigit()} if path.is_dir() else {}
    if not found:
        raise ConfigError("model.load_checkpoint", f"There are no weights to start from at {path}."[:118], "Give a .safetensors file, or a folder with *_step_N.safetensors files.")
    return max(found, key=found.__getitem__)


def lora_metadata(config: TrainConfig, strategy: TrainingStrategySection, checkpoint: Checkpoint, dataset: TrainingDataset) -> LoraMetadata:
    """What the file says of its origin, the reference factors of the data among it."""
    item = dataset.item(0)
    grids = {m: latents.grid for m in ("video", "audio") if (latents := getattr(item, m)) is not None}
    media = {name: value.grid for name, value in item.roles.items() if hasattr(value, "grid")}
    factors = strategy.lora_metadata(grids, media)
    number = lambda name: float(factors[name]) if name in factors else None  # noqa: E731
    return LoraMetadata(
        family=checkpoint.family.name,
        model_version=checkpoint.model_version or "",
        mode=strategy.name,
        trigger=config.data.captions.trigger or "",
        base=checkpoint.fingerprint_of("transformer"),
        dataset=data_fingerprint(dataset),
        config=digest(config.identity()),
        reference_spatial=number("reference_downscale_factor"),
        reference_temporal=number("reference_temporal_scale_factor"),
    )


def data_fingerprint(dataset: TrainingDataset) -> str:
    """16 hex digits over what the dataset is: the cache keys of every entry, or the official files' names."""
    manifest = getattr(dataset, "manifest", None)
    if manifest is not None:
        return digest([[e.id, e.text, e.video, e.audio, dict(e.roles), e.repeats, e.weight, e.regularisation] for e in manifest.entries])
    return digest([len(dataset), *dataset.text_keys()])
