"""`train --check`: all that can be known about a training before a model is loaded, in lines for people."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import torch

from .config import TrainConfig
from .data.dataset import open_dataset
from .data.report import Report, usable_or_raise
from .encode import Target
from .errors import CheckpointError, ConfigError, DataError, RunError
from .geometry import AudioGrid, Grid, VideoGrid
from .lora.adapters import target_linears
from .lora.files import read_lora
from .lora.targets import select, without_effect
from .memory.capability import Facts, capability
from .memory.quantization import QUANTIZERS
from .models.checkpoint import Checkpoint
from .models.transformer import LTXTransformer, load_transformer, transformer_source
from .models.weights import check_weights
from .network import check_combination
from .preprocess import report_on
from .run_setup import find_run
from .trained_weights import newest_weights, other_family
from .training.parallel import single_device
from .training_data import check_family, check_prior, check_roles, check_sizes
from .validation import plan_samples


def check_config(config: TrainConfig) -> list[str]:
    """What was found, one line each; the first thing that cannot work is raised as its own LtxTrainError.

    Reads headers of model files and clips; loads, decodes and writes nothing.
    """
    checkpoint = config.model.open()
    lines = [f"model: {checkpoint.family.title}, {', '.join(p.name for p in checkpoint.files)}"]
    lines += check_packages(config)
    lines += check_data(config, checkpoint)
    check_components(config, checkpoint)
    lines += check_network(config, checkpoint)
    lines += check_previews(config, checkpoint)
    return [*lines, *config.optimization.findings(), check_run(config)]


def check_packages(config: TrainConfig) -> list[str]:
    """Packages and devices that the settings ask for; what falls back is said."""
    for section in (config.logging, config.wandb, config.hub):
        section.check()
    config.optimization.require_packages()
    device = single_device(config.acceleration.device)
    verdict = capability(config.acceleration.quantization, Facts.here(device))
    if verdict.action == "refuse":
        raise ConfigError("quantization.refused", f"quantization {config.acceleration.quantization} cannot work here.", verdict.reason)
    used = verdict.instead if verdict.action == "fallback" else config.acceleration.quantization
    caution = QUANTIZERS[used].caution if used is not None else ""
    replaced = [f"quantization: {used} instead, {verdict.reason}"] if verdict.action == "fallback" else []
    return [f"device: {device}", *replaced, *([f"quantization: {caution}"] if caution else [])]


def check_data(config: TrainConfig, checkpoint: Checkpoint) -> list[str]:
    """The dataset's report, or the cache that is given; the mode is checked against every size there is."""
    strategy, section = config.training_strategy, config.data
    streams = strategy.streams()
    sound_may_go = streams.audio == "absent" or streams.video == streams.audio == "generated"  # it is left out where there is none
    if not sound_may_go and not checkpoint.family.audio:
        raise ConfigError("mode.no_audio_model", f"{checkpoint.family.title} has no sound; the strategy needs it.", "Use LTX-2, 2.3 or 2.5, or another mode.")
    audio = checkpoint.audio_grid if checkpoint.family.audio else None
    if not section.all_sources():
        dataset = open_dataset(section.data_root(), factors=checkpoint.video_factors, audio_grid=audio, index=section.index, directories=strategy.directories())
        check_family(dataset, checkpoint)
        check_roles(strategy, dataset)
        check_prior(config, dataset)
        if dataset.audio_coverage() == 0 and not sound_may_go:
            strategy.check_sound(len(dataset), len(dataset))
        absent = dataset.missing() if hasattr(dataset, "missing") else []
        if absent:
            raise DataError("cache.missing", f"The cache lacks {len(absent)} entries that its index names.", "Preprocess the dataset again; what is there is kept.")
        check_sizes(strategy, dataset)
        return [f"data: {len(dataset)} encoded clips, {dataset.audio_coverage():.0%} with sound"]
    wants_sound = streams.audio != "absent" and checkpoint.family.audio
    report = report_on(section, Target.of(checkpoint), strategy.required_roles(), with_audio=wants_sound)
    usable_or_raise(report)
    for grids in _grids(report, checkpoint, audio if wants_sound else None):
        strategy.check(grids)
    sounding = sum(p.sound is not None for p in report.plans)
    if not sound_may_go:
        strategy.check_sound(len(report.plans), len(report.plans) - sounding)
    silent = [] if wants_sound or strategy.streams().audio == "absent" else [f"{checkpoint.family.title} has no sound: only video is trained"]
    return _said(config, report, sounding) + silent


def _grids(report: Report, checkpoint: Checkpoint, audio: AudioGrid | None) -> list[dict[str, Grid]]:
    """The latent grids of each bucket that clips go to, by stream."""
    kinds = {(p.bucket, p.seconds if p.bucket is None else 0.0): p for p in report.plans}
    found: list[dict[str, Grid]] = []
    for piece in kinds.values():
        grids: dict[str, Grid] = {}
        if piece.bucket is not None:
            grids["video"] = VideoGrid.of_pixels(piece.bucket.width, piece.bucket.height, piece.bucket.frames, float(piece.fps), checkpoint.video_factors)
        if audio is not None and piece.sound is not None:
            grids["audio"] = audio.of_seconds(piece.seconds)
        found.append(grids)
    return found


def _said(config: TrainConfig, report: Report, sounding: int) -> list[str]:
    pieces, batch = len(report.plans), config.optimization.batch_size
    lines = [f"data: {report.usable} of {report.total} clips usable, {pieces} pieces, {sounding} with sound, buckets {', '.join(map(str, report.buckets)) or 'none'}"]
    if report.usable < report.total:
        first = next(r for r in report.rows if not r.usable)
        why = next((f.message for f in first.findings if f.refused), "it fits no bucket")
        lines.append(f"left out: {first.sample.id} ({why})" + (f" and {report.total - report.usable - 1} more" if report.total - report.usable > 1 else ""))
    if batch > pieces:
        lines.append(f"batch_size {batch} is larger than the {pieces} pieces: they repeat within a batch")
    return lines + list(report.warnings)


def check_components(config: TrainConfig, checkpoint: Checkpoint) -> None:
    """Raise CheckpointError for a component that the run will need and no file holds."""
    encodes, previews = bool(config.data.all_sources()), config.validation.active
    streams = config.training_strategy.streams().present
    needed = ["transformer", *(c for c in ("connectors", "text_projection") if c in checkpoint.family.components)]
    if encodes or previews:
        needed += ["text_encoder", "video_vae"] if "video" in streams or previews else ["text_encoder"]
    if checkpoint.family.audio and ((encodes and "audio" in streams) or (previews and config.validation.generate_audio)):
        needed += ["audio_vae"] + (["vocoder"] if previews else [])
    for component in needed:
        checkpoint.source(component)
    if "text_encoder" in needed and checkpoint.family.text == "t5" and checkpoint.tokenizer_path is None:
        raise CheckpointError("checkpoint.tokenizer", "The T5 text encoder needs its tokenizer, and none was found.", "Set model.tokenizer_path to the folder with tokenizer.json or spiece.model.")


def check_network(config: TrainConfig, checkpoint: Checkpoint) -> list[str]:
    """Every tensor the network needs is in the file, the adapter finds its modules, and a warm start fits."""
    streams = [s for s in config.training_strategy.streams().present if s == "video" or checkpoint.family.audio]
    network = load_transformer(checkpoint, dtype=torch.bfloat16, device="meta", video="video" in streams, audio="audio" in streams)
    check_weights(network, transformer_source(checkpoint, network))
    check_memory(config)
    lines = check_adapter(config, network, streams) if config.lora is not None and config.model.training_mode == "lora" else []
    if config.model.load_checkpoint:
        path = newest_weights(Path(config.model.load_checkpoint).expanduser())
        lines += [f"starts from: {path.name}", *filter(None, [other_family(path, checkpoint)])]
        if config.model.training_mode == "lora":
            theirs, layers = read_lora(path).modules, target_linears(network)
            if not any(name in layers and module.shape == (layers[name].out_features, layers[name].in_features) for name, module in theirs.items()):
                raise ConfigError("lora.other_model", f"{path.name} fits no module of this model.", "It was trained on another model: leave model.load_checkpoint out.")
    return lines


def check_memory(config: TrainConfig) -> None:
    """Raise ConfigError for memory settings that do not go with what is trained."""
    lora, own_layers = config.lora, config.lora is None or config.lora.kind in ("lora", "rslora")
    check_combination(config.acceleration, frozen=config.model.training_mode == "lora", own_layers=own_layers, dropout=lora is not None and lora.dropout > 0)
    if not own_layers and config.acceleration.quantization is not None:
        raise ConfigError(
            "lora.quantized_base", f"The adapter kind {lora.kind} needs a base that is not quantised; acceleration.quantization is {config.acceleration.quantization}.",
            "Choose kind: lora or rslora, or set acceleration.quantization to none.",
        )  # fmt: skip


def check_adapter(config: TrainConfig, network: LTXTransformer, streams: Sequence[str]) -> list[str]:
    """How many modules are adapted and how large the LoRA will be; targets that match nothing are said."""
    layers = target_linears(network)
    chosen = select(layers, config.lora.target_modules, config.lora.exclude_modules, streams)
    numbers = sum(config.lora.rank_of(n) * (layers[n].in_features + layers[n].out_features) for n in chosen)
    size = f", {numbers * config.checkpoints.dtype.itemsize / 2**20:,.1f} MiB" if config.lora.kind in ("lora", "rslora") else ""
    lines = [f"adapter: {config.lora.kind} of rank {config.lora.rank} on {len(chosen)} modules{size}"]
    wide = [n for n in chosen if config.lora.rank_of(n) > min(layers[n].in_features, layers[n].out_features)]
    if wide:
        lines.append(f"lora.rank {config.lora.rank} is above the full rank of {len(wide)} modules, such as {wide[0]}: more brings nothing there")
    return lines + [f"lora.{p} matches no module that is adapted" for p in without_effect(layers, chosen, config.lora.patterns)]


def check_previews(config: TrainConfig, checkpoint: Checkpoint) -> list[str]:
    """The previews' samples, which must be possible."""
    section = config.validation
    if not section.active:
        return ["previews: none"]
    plan_samples(section, checkpoint)
    return [f"previews: {len(section.samples)} every {section.interval} steps"]


def check_run(config: TrainConfig) -> str:
    """Which directory the run will take and why; raises RunError when it cannot be written or another training is at work in it."""
    found = find_run(config)
    path = found.run.path
    parent = next(p for p in (path, *path.parents) if p.exists())
    if not parent.is_dir() or not os.access(parent, os.W_OK):
        raise RunError("run.not_writable", f"The run directory cannot be made: {path}", f"{parent} cannot be written. Set output_dir to another folder.")
    if found.verdict is None:
        wanted = Path(config.output_dir).expanduser().absolute()
        return f"run: {path}" + (f" ({wanted.name} holds another training or other files)" if path != wanted else "")
    words = {"same": "goes on, or is returned if finished", "extend": "goes on to more steps", "continue": "goes on with new side settings"}[found.verdict.relation]
    return f"run: {path} {words}"
