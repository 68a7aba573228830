"""The data of a training: preprocessed where needed, opened, checked against model and mode, a share held out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from .conditioning.modes import TrainingStrategySection
from .config import TrainConfig
from .data.dataset import open_dataset
from .data.items import TrainingDataset
from .errors import ConfigError, DataError
from .held_out import Portion, split
from .models.checkpoint import Checkpoint
from .preprocess import ensure
from .runs.live import LiveRun
from .training.parallel import Parallel


@dataclass(frozen=True)
class TrainingData:
    """What is trained on, and how.

    held_out: what the held-out loss is measured on, if anything. strategy: the job's, as the data allow it.
    """

    dataset: TrainingDataset
    held_out: TrainingDataset | None
    strategy: TrainingStrategySection


def open_data(config: TrainConfig, checkpoint: Checkpoint, live: LiveRun, parallel: Parallel, texts: Sequence[str]) -> TrainingData:
    """The data, preprocessed now where that is due (with the features of ``texts``). Raises DataError or ConfigError for what cannot be trained on."""
    strategy = config.training_strategy
    dataset = open_dataset(
        ensure(config, checkpoint, live, parallel, texts), factors=checkpoint.video_factors,
        audio_grid=checkpoint.audio_grid if checkpoint.family.audio else None, index=config.data.index, directories=strategy.directories(),
    )  # fmt: skip
    check_family(dataset, checkpoint)
    dataset, held = hold_out(config, strategy, checkpoint, dataset, live)
    for part in (dataset, *([held] if held is not None else [])):
        check_roles(strategy, part)
    check_prior(config, dataset)
    strategy = settle_sound(strategy, dataset, checkpoint, live)
    for part in (dataset, *([held] if held is not None else [])):
        check_sizes(strategy, part)
    return TrainingData(dataset, held, strategy)


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


def check_roles(strategy: TrainingStrategySection, dataset: TrainingDataset) -> None:
    """Refuse a cache of ours whose clips lack a reference or mask that the strategy needs (the official layout's reader passes over such samples)."""
    manifest = getattr(dataset, "manifest", None)
    if manifest is None:
        return
    for role, folder in strategy.directories().items():
        lacking = [e.id for e in manifest.entries if role not in e.roles]
        if lacking and role not in ("video", "audio"):
            raise DataError(
                "data.role_missing", f"{len(lacking)} of {len(manifest.entries)} encoded clips have no {role}, which training_strategy needs.",
                f"The first is {lacking[0]}. Give the dataset a column or folder {role} and encode it again, or take that condition ({folder}) out.",
            )  # fmt: skip


def check_sizes(strategy: TrainingStrategySection, dataset: TrainingDataset) -> None:
    """Refuse a mode that cannot work on some size that the clips have: of each, one clip is looked at (one with sound where there is one).

    A clip that is given as a whole would cost nothing and teach nothing, at whatever step it comes.
    """
    entries = getattr(getattr(dataset, "manifest", None), "entries", None)
    found: dict[str, int] = {}
    for index, unit in enumerate(dataset.units()):
        if unit.group not in found or (entries is not None and entries[index].audio and not entries[found[unit.group]].audio):
            found[unit.group] = index
    for index in found.values():
        item = dataset.item(index)
        try:
            strategy.check({m: latents.grid for m in strategy.streams().present if (latents := getattr(item, m)) is not None})
        except ConfigError as error:
            raise ConfigError(error.code, error.message, f"{error.hint} Such a clip is {item.id}.".strip()) from error


def check_prior(config: TrainConfig, dataset: TrainingDataset) -> None:
    """Refuse clips that train towards the base model's prediction where the base model itself is changed, or where there are no others."""
    manifest = getattr(dataset, "manifest", None)
    if manifest is not None and all(e.regularisation == "prior" for e in manifest.entries):
        raise ConfigError("data.only_prior", "Every clip is there for prior preservation: there is nothing to learn.", "Add a source without regularisation: prior.")
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
