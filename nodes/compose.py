"""From what the nodes hold to the jobs that the engine carries out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..ltx_train.conditioning.modes import MODES, mode
from ..ltx_train.config import DataSection, PreprocessJob, SampleJob, TrainConfig, ValidationSection, digest
from ..ltx_train.errors import ConfigError
from ..ltx_train.launch import Child
from ..ltx_train.run_setup import OpenedRun, launch_job
from ..ltx_train.runs.lock import ProcessId
from . import paths, sockets

MODE_NAMES = tuple(MODES)
DEFAULT_NEGATIVE = ValidationSection.model_fields["negative_prompt"].default


def settled_data(dataset: sockets.LtxDataset, model: sockets.LtxModel, encoder: str = "engine", fingerprint: str = "") -> DataSection:
    """A dataset with its cache place, and an index of its own for these settings, this model and this encoder."""
    data = dataset.data
    first = Path(data.sources[0].path) if data.sources else None
    told = data.model_dump(mode="json", exclude={"index", *DataSection.free_fields()})
    index = f"{_slug(dataset.name)}-{model.family}-{digest([told, model.family, encoder, fingerprint], 8)}.json"
    return data.model_copy(update={"cache_dir": str(paths.cache_root(first)), "index": index})


def _slug(name: str) -> str:
    kept = "".join(c if c.isalnum() or c in "-_" else "_" for c in name)
    return kept[:40] or "dataset"


def preprocess_job(
    model: sockets.LtxModel,
    data: DataSection,
    *,
    mode_name: str = "",
    prompts: Sequence[str] = (),
    with_audio: bool = True,
    acceleration: Mapping[str, Any] | None = None,
) -> PreprocessJob:
    """The job that encodes a dataset; its folder is named by what it encodes."""
    return PreprocessJob.parse(
        {
            "model": model.section.model_dump(),
            "data": data.model_dump(),
            "training_strategy": mode(mode_name).strategy().model_dump() if mode_name else None,
            "acceleration": dict(acceleration or {}),
            "prompts": list(prompts),
            "with_audio": with_audio and model.audio,
            "output_dir": str(paths.jobs_root() / f"encode-{Path(data.index).stem}"),
        }
    )


def train_config(
    model: sockets.LtxModel,
    data: DataSection,
    *,
    run_name: str,
    mode_name: str,
    rank: int,
    alpha: float,
    steps: int,
    learning_rate: float,
    seed: int,
    num_processes: int = 1,
    samples: Sequence[Mapping[str, Any]] = (),
    settings: Sequence[sockets.SettingsOf | None] = (),
    warm_start: str | None = None,
) -> TrainConfig:
    """The training job of the train node's widgets and the settings nodes plugged into it.

    learning_rate: 0 leaves it to the optimizer. alpha: 0 is the rank. Raises ConfigError naming the field at fault.
    """
    chosen = mode(mode_name)
    by_section = {s.section: dict(s.fields) for s in settings if s is not None}
    strategy = by_section.pop("training_strategy", None)
    if strategy is not None:
        chosen = mode(strategy["mode"])
    lora = {"rank": rank, "alpha": alpha or rank, "target_modules": list(chosen.target_modules), **by_section.pop("lora", {})}
    optimization = {"batch_size": 1, "steps": steps, **by_section.pop("optimization", {})}
    if learning_rate:
        optimization["learning_rate"] = learning_rate
    if optimization.get("warmup_steps", 0) >= steps:
        raise ConfigError("optimizer.warmup", f"warmup_steps {optimization['warmup_steps']} must be below steps "
            f"{steps}.", "Lower the warm-up, or train longer.")
    validation = by_section.pop("validation", {})
    validation["samples"] = [*samples, *validation.get("samples", [])]
    checkpoints = {"interval": min(250, steps), "keep_last_n": 3, **by_section.pop("checkpoints", {})}
    return TrainConfig.parse(
        {
            "model": {**model.section.model_dump(), "load_checkpoint": warm_start},
            "lora": lora,
            "training_strategy": strategy["strategy"] if strategy is not None else chosen.strategy().model_dump(),
            "optimization": optimization,
            "data": data.model_dump(),
            "validation": validation,
            "checkpoints": checkpoints,
            "distributed": {**by_section.pop("distributed", {}), "num_processes": num_processes},
            **by_section,
            "seed": seed,
            "output_dir": str(paths.run_path(run_name)),
        }
    )


def sample_job(
    model: sockets.LtxModel,
    validation: Mapping[str, Any],
    loras: Sequence[tuple[str, float]],
    *,
    seed: int,
    acceleration: Mapping[str, Any] | None = None,
) -> SampleJob:
    """The job that makes clips; its folder is named by what it makes, so that the same one is found again."""
    told = {
        "model": model.section.model_dump(),
        "loras": [{"path": path, "strength": strength} for path, strength in loras],
        "validation": {**validation, "seed": seed},
        "acceleration": dict(acceleration or {}),
        "seed": seed,
    }
    stamps = [[path, Path(path).stat().st_size, Path(path).stat().st_mtime_ns] for path, _ in loras]
    return SampleJob.parse({**told, "output_dir": str(paths.jobs_root() / f"sample-{digest([told, stamps, model.fingerprint], 12)}")})


def start_child(opened: OpenedRun, steps_this_run: int = 0) -> Child:
    """Start (or attach to, or have go on) an opened run's child with the interpreter that the server's owner chose.

    steps_this_run: see :class:`Launch`; a child that waits for its next part ends with this process.
    """
    owner = ProcessId.of() if steps_this_run else None
    return launch_job(opened, engine_python=paths.Settings.read().engine_python, steps_this_run=steps_this_run, owner=owner)
