"""`train --check`: all that can be known about a training before a model is loaded, in lines for people."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from .config import TrainConfig, digest
from .data.dataset import DataSection, open_dataset
from .data.report import Report, usable_or_raise
from .data.sampler import BucketSampler, Stage, Unit
from .encode import Target
from .errors import CheckpointError, ConfigError, DataError, MissingPackage, RunError
from .geometry import AudioGrid, Grid, VideoGrid
from .lora.adapters import check_start, target_linears
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
from .training.earlier import beside
from .training.full import refuse_misfit
from .training.parallel import single_device
from .training.sharded import check_sharded
from .training_data import check_family, check_prior, check_roles, check_sizes
from .validation import plan_samples


def check_config(config: TrainConfig) -> list[str]:
    """What was found, one line each; the first thing that cannot work is raised as its own LtxTrainError.

    Reads headers of model files and clips; loads, decodes and writes nothing.
    """
    checkpoint = config.model.open()
    lines = [f"model: {checkpoint.family.title}, {', '.join(p.name for p in checkpoint.files)}"]
    lines += check_packages(config)
    found = check_data(config, checkpoint)
    check_components(config, checkpoint)
    lines += [*found.lines, *check_network(config, checkpoint, sound=found.sound)]
    lines += check_previews(config, checkpoint)
    lines += [*cautions(config, checkpoint), check_run(config)]
    check_take_up(config, checkpoint)
    return lines


def cautions(config: TrainConfig, checkpoint: Checkpoint) -> list[str]:
    """Settings that work but are seldom meant; a run warns of them when it starts."""
    distilled = ["The model is a distilled one: a LoRA of it fits its own few steps only. Train on the base (dev) model where you can."] if checkpoint.distilled else []
    return [*config.optimization.findings(), *(config.lora.findings() if config.lora is not None else []), *distilled]


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


def check_streams(config: TrainConfig, checkpoint: Checkpoint) -> bool:
    """Whether sound may be left out where there is none. Raises ConfigError for a mode that needs it and a model that knows none."""
    streams = config.training_strategy.streams()
    may_go = streams.audio == "absent" or streams.video == streams.audio == "generated"
    if not may_go and not checkpoint.family.audio:
        raise ConfigError("mode.no_audio_model", f"{checkpoint.family.title} has no sound; the strategy needs it.", "Use LTX-2, 2.3 or 2.5, or another mode.")
    return may_go


@dataclass(frozen=True)
class FoundData:
    """What is to be said of the data, and whether any clip has sound."""

    lines: list[str]
    sound: bool


def check_data(config: TrainConfig, checkpoint: Checkpoint) -> FoundData:
    """The dataset's report, or the cache that is given; the mode is checked against every size there is."""
    strategy, section = config.training_strategy, config.data
    streams = strategy.streams()
    sound_may_go = check_streams(config, checkpoint)
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
        check_stages(section, dataset.units())
        check_held_out(config, checkpoint, audio)
        return FoundData([f"data: {len(dataset)} encoded clips, {dataset.audio_coverage():.0%} with sound"], dataset.audio_coverage() > 0)
    wants_sound = streams.audio != "absent" and checkpoint.family.audio
    report = report_on(section, Target.of(checkpoint), strategy.required_roles(), with_audio=wants_sound)
    usable_or_raise(report)
    found = _grids(report, checkpoint, audio if wants_sound else None)
    for grids in found:
        strategy.check(grids)
    check_stages(section, [Unit("", tokens=grids.get("video", grids.get("audio")).tokens) for grids in found if grids])
    check_held_out(config, checkpoint, audio)
    sounding = sum(p.sound is not None for p in report.plans)
    if not sound_may_go:
        strategy.check_sound(len(report.plans), len(report.plans) - sounding)
    silent = [] if wants_sound or strategy.streams().audio == "absent" else [f"{checkpoint.family.title} has no sound: only video is trained"]
    return FoundData(_said(config, report, sounding) + silent, sounding > 0)


def check_stages(section: DataSection, units: Sequence[Unit]) -> None:
    """Raise ConfigError for a stage of progressive resolution that no clip is small enough for."""
    if units:
        BucketSampler(units, stages=[Stage(s.from_step, s.max_tokens) for s in section.stages])


def check_held_out(config: TrainConfig, checkpoint: Checkpoint, audio: AudioGrid | None) -> None:
    """Raise DataError or ConfigError for another dataset to measure the loss on that is not there or does not fit."""
    if config.data.held_out_root:
        strategy = config.training_strategy
        root = Path(config.data.held_out_root).expanduser()
        other = open_dataset(root, factors=checkpoint.video_factors, audio_grid=audio, directories=strategy.directories())
        check_family(other, checkpoint)
        check_roles(strategy, other)
        check_sizes(strategy, other)


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
    if "text_encoder" in needed and config.acceleration.load_text_encoder_in_8bit and "bitsandbytes" not in Facts.here("cpu").packages:
        raise MissingPackage("bitsandbytes", "acceleration.load_text_encoder_in_8bit", "Or set it to false")
    if "text_encoder" in needed and checkpoint.family.text == "t5" and checkpoint.tokenizer_path is None:
        raise CheckpointError("checkpoint.tokenizer", "The T5 text encoder needs its tokenizer, and none was found.", "Set model.tokenizer_path to the folder with tokenizer.json or spiece.model.")


def check_loss(config: TrainConfig, generated: Sequence[str]) -> None:
    """Raise ConfigError where nothing counts of the streams that are left to generate."""
    if said := config.flow_matching.nothing_counts(generated):
        raise ConfigError("mode.no_loss", f"flow_matching: {said}", f"Only {' and '.join(generated)} is trained: the clips have no sound, or the model knows none.")


def check_network(config: TrainConfig, checkpoint: Checkpoint, *, sound: bool = True) -> list[str]:
    """Every tensor the network needs is in the file, the adapter finds its modules, and a warm start fits. sound: some clip has any, or it is not known yet."""
    may_go = check_streams(config, checkpoint)
    streams = [s for s in config.training_strategy.streams().present if s == "video" or (checkpoint.family.audio and (sound or not may_go))]
    check_loss(config, [s for s in config.training_strategy.streams().generated if s in streams])
    network = load_transformer(checkpoint, dtype=torch.bfloat16, device="meta", video="video" in streams, audio="audio" in streams)
    source = transformer_source(checkpoint, network)
    check_weights(network, source)
    check_memory(config, stored=any(source.format(name) is not None for name in source.keys()))
    lines = check_adapter(config, network, streams) if config.lora is not None and config.model.training_mode == "lora" else []
    if config.model.load_checkpoint:
        path = newest_weights(Path(config.model.load_checkpoint).expanduser())
        lines += [f"starts from: {path.name}", *filter(None, [other_family(path, checkpoint)])]
        if config.model.training_mode == "full":
            refuse_misfit(path, {name: tuple(p.shape) for name, p in network.named_parameters()})
        else:
            check_warm_start(config, target_linears(network), path, streams)
    return lines


def check_warm_start(config: TrainConfig, layers: Mapping[str, nn.Linear], path: Path, streams: Sequence[str]) -> None:
    """Raise ConfigError for a LoRA file that the adapter cannot start from: of another model, of none of the modules adapted here, of another kind or rank."""
    theirs = read_lora(path, layers).modules
    if not any(name in layers and module.shape == (layers[name].out_features, layers[name].in_features) for name, module in theirs.items()):
        raise ConfigError("lora.other_model", f"{path.name} fits no module of this model.", "It was trained on another model: leave model.load_checkpoint out.")
    chosen = select(layers, config.lora.target_modules, config.lora.exclude_modules, streams)
    common = {name: theirs[name] for name in chosen if name in theirs}
    if not common:
        raise ConfigError(
            "lora.no_common_module", f"{path.name[-60:]} has no module that is adapted here.",
            f"It has, for example, {next(iter(theirs))}; adapted are {chosen[0]} and {len(chosen) - 1} more. Change lora.target_modules, or leave model.load_checkpoint out.",
        )  # fmt: skip
    check_start(config.lora, common, path.name)


def check_memory(config: TrainConfig, *, stored: bool) -> None:
    """Raise ConfigError for memory settings that do not go with what is trained. stored: the model file itself is quantised."""
    section, lora, full = config.acceleration, config.lora, config.model.training_mode == "full"
    own_layers = lora is None or lora.kind in ("lora", "rslora")
    check_combination(section, frozen=not full, own_layers=own_layers, dropout=lora is not None and lora.dropout > 0)
    if section.float8_products and ((sm := Facts.here(single_device(section.device)).sm) is None or sm < 89):
        raise ConfigError("float8.card", "float8_products needs an NVIDIA card with compute capability 8.9 or later.", "Set float8_products: false; quantization fp8 itself works.")
    if full and config.distributed.num_processes > 1:
        dtype = section.compute_dtype(single_device(section.device))
        check_sharded(config.optimization.optimizer_type, dtype, quantization=section.quantization, stored_quantised=stored)
    kept = stored and section.keep_stored_quantization
    if full and kept:
        raise ConfigError("full.quantized", "A model file that is quantised cannot be fully fine-tuned as it is.", "Use the bf16 file, set acceleration.keep_stored_quantization: false, or train a LoRA.")
    if not full and not own_layers and (section.quantization is not None or kept):
        what = f"acceleration.quantization is {section.quantization}" if section.quantization is not None else "the model file is"
        other = "set acceleration.quantization to none" if section.quantization is not None else "acceleration.keep_stored_quantization: false"
        raise ConfigError("lora.quantized_base", f"The adapter kind {lora.kind} needs a base that is not quantised; {what}.", f"Choose kind: lora or rslora, or {other}.")


def check_adapter(config: TrainConfig, network: LTXTransformer, streams: Sequence[str]) -> list[str]:
    """How many modules are adapted and how large the LoRA will be; targets that match nothing are said."""
    config.lora.package()
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


def check_take_up(config: TrainConfig, checkpoint: Checkpoint) -> None:
    """Raise ConfigError where a new run would go on from another one's state that has all its steps already."""
    source = config.model.load_checkpoint
    if not source or config.checkpoints.no_resume or find_run(config).verdict is not None:
        return
    weights = newest_weights(Path(source).expanduser())
    earlier = beside(weights)
    whole = config.identity()
    identity = {"base": checkpoint.fingerprint_of("transformer"), **{name: digest(whole[name]) for name in ("lora", "training_strategy")}}
    if earlier is not None and not earlier.differs(identity, config.official_identity()):
        earlier.leaves(config.optimization.steps, weights.name)


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
