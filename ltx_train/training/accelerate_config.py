"""accelerate's configuration files as ours: what each of their fields becomes, in a table."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..errors import ConfigError
from .parallel import DistributedSection

SHIPPED = Path(__file__).resolve().parents[1] / "accelerate"
"""ddp, ddp_compile, fsdp, fsdp_compile: the official trainer's four, field by field."""

TAKEN = ("num_processes", "num_machines", "machine_rank", "main_process_ip", "main_process_port", "gpu_ids")

# accelerate's fields -> what becomes of them here; one that starts with a section's name is taken over
FIELDS: dict[str, str] = {
    **{name: f"distributed.{name}" for name in TAKEN},
    "gpu_ids": "distributed.devices",
    "distributed_type": "a LoRA: whole on every GPU, gradients averaged; full fine-tuning: FSDP2 shards",
    "mixed_precision": "left out: acceleration.mixed_precision_mode rules",
    "downcast_bf16": "left out: for TPUs",
    "use_cpu": "left out: the device is found by itself, or set in acceleration.device",
    "rdzv_backend": "left out: static on equal machines",
    "same_network": "left out: machines meet at main_process_ip",
    "compute_environment": "must be LOCAL_MACHINE",
    "main_training_function": "left out",
    "enable_cpu_affinity": "left out",
    "debug": "left out",
    "tpu_env": "left out: for TPUs",
    "tpu_use_cluster": "left out: for TPUs",
    "tpu_use_sudo": "left out: for TPUs",
    "dynamo_config.dynamo_backend": "acceleration.compile",
    "dynamo_config.dynamo_mode": "left out: blocks are compiled one by one in the default mode",
    "dynamo_config.dynamo_use_dynamic": "left out: buckets have few sizes, each is compiled",
    "dynamo_config.dynamo_use_fullgraph": "left out",
    "dynamo_config.dynamo_use_regional_compilation": "always so: blocks are compiled, not the whole",
    "fsdp_config.fsdp_version": "always 2",
    "fsdp_config.fsdp_sharding_strategy": "full fine-tuning: shards in all blocks; a LoRA: not sharded, its base is quantised or streamed instead",
    "fsdp_config.fsdp_reshard_after_forward": "always so, block by block",
    "fsdp_config.fsdp_activation_checkpointing": "optimization.enable_gradient_checkpointing",
    "fsdp_config.fsdp_auto_wrap_policy": "left out: every transformer block is a unit",
    "fsdp_config.fsdp_transformer_layer_cls_to_wrap": "left out: every transformer block is a unit",
    "fsdp_config.fsdp_backward_prefetch": "left out: FSDP2 fetches the next block by itself",
    "fsdp_config.fsdp_forward_prefetch": "left out: FSDP2 fetches the next block by itself",
    "fsdp_config.fsdp_cpu_ram_efficient_loading": "always so: a block is read, cut and forgotten",
    "fsdp_config.fsdp_offload_params": "acceleration.optimizer_in_ram (the optimizer's state; parameters stay on the GPUs)",
    "fsdp_config.fsdp_state_dict_type": "left out: files are whole, gathered tensor by tensor",
    "fsdp_config.fsdp_sync_module_states": "left out: every process reads the same file",
    "fsdp_config.fsdp_use_orig_params": "always so",
}


@dataclass(frozen=True)
class Row:
    """A field of the file, its value, and what becomes of it."""

    name: str
    value: Any
    becomes: str

    @property
    def taken(self) -> bool:
        return self.becomes.startswith(("distributed.", "acceleration.", "optimization."))


@dataclass(frozen=True)
class AcceptedAccelerate:
    """An accelerate configuration as ours: processes, other sections' fields, and a row for every field of the file."""

    section: DistributedSection
    rows: tuple[Row, ...]
    settings: dict[str, dict[str, Any]] = field(default_factory=dict)

    def applied(self, job: dict[str, Any]) -> dict[str, Any]:
        """A training job (as plain data) with this configuration in it; what the file does not say stays."""
        given = {"distributed": self.section.model_dump(mode="json", exclude_unset=True), **self.settings}
        return {**job, **{name: {**(job.get(name) or {}), **values} for name, values in given.items()}}


def find_config(name: Path | str) -> Path:
    """A file, or one of the shipped ones by its name (ddp, fsdp, ddp_compile, fsdp_compile)."""
    shipped = SHIPPED / f"{name}.yaml"
    return shipped if not Path(name).exists() and shipped.is_file() else Path(name).expanduser()


def from_accelerate(path: Path | str, num_processes: int | None = None) -> AcceptedAccelerate:
    """Read an ``accelerate config`` YAML; ``num_processes`` wins over its own. Raises ConfigError for what cannot be taken over."""
    path = find_config(path)
    fields = _read(path)
    kind = str(fields.get("distributed_type", "NO"))
    if kind not in ("NO", "MULTI_GPU", "MULTI_CPU", "FSDP") or fields.get("compute_environment", "LOCAL_MACHINE") != "LOCAL_MACHINE":
        raise ConfigError("accelerate.type", f"distributed_type {kind} of {path.name} cannot be used here.", "MULTI_GPU and FSDP on local machines can.")
    known = {name: fields[name] for name in TAKEN if name != "gpu_ids" and fields.get(name) is not None}
    if fields.get("gpu_ids") not in (None, "all"):
        known["devices"] = str(fields["gpu_ids"]).replace(" ", "")
    if kind == "NO":
        known["num_processes"] = 1
    if num_processes is not None:
        known["num_processes"] = num_processes
    flat = _flat(fields)
    rows = tuple(Row(name, value, FIELDS.get(name, "left out: unknown here")) for name, value in flat.items())
    try:
        section = DistributedSection(**known)
    except ValueError as error:
        raise ConfigError("accelerate.config", f"The fields of {path.name} do not fit together.", str(error)) from error
    return AcceptedAccelerate(section, rows, _settings(flat))


def _read(path: Path) -> dict[str, Any]:
    import yaml

    try:
        fields = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, yaml.YAMLError) as error:
        raise ConfigError("accelerate.config", f"The accelerate config cannot be read: {path}"[:118], str(error)) from error
    if not isinstance(fields, dict):
        raise ConfigError("accelerate.config", f"The accelerate config holds no fields: {path}"[:118])
    return fields


def _flat(fields: dict[str, Any]) -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in fields.items():
        inner = {f"{name}.{key}": v for key, v in value.items()} if isinstance(value, dict) else {}
        flat |= inner or {name: value}
    return flat


def _settings(flat: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """What the file turns on in other sections; what it leaves off stays as the job has it."""
    found: dict[str, dict[str, Any]] = {}
    if str(flat.get("dynamo_config.dynamo_backend", "NO")).upper() not in ("NO", "NONE"):
        found.setdefault("acceleration", {})["compile"] = "on"
    if flat.get("fsdp_config.fsdp_offload_params") is True:
        found.setdefault("acceleration", {})["optimizer_in_ram"] = "on"
    if flat.get("fsdp_config.fsdp_activation_checkpointing") is True:
        found["optimization"] = {"enable_gradient_checkpointing": True}
    return found
