"""The jobs: TrainConfig (the official trainer's YAML and ours), PreprocessJob, SampleJob; YAML in and out."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Hashable
from pathlib import Path
from typing import Any, ClassVar, Literal, get_args

import yaml
from pydantic import BaseModel, Field, ValidationError, model_validator

from .conditioning.modes import TrainingStrategySection
from .data.dataset import DataSection
from .data.sources import ROLES
from .data.texts import read_text
from .errors import ConfigError, nearest
from .lora.adapters import LoraSection
from .memory.settings import AccelerationSection
from .runs.lock import write_atomic
from .runs.publish import HubSection, LoggingSection, WandbSection
from .sampling.recipe import ValidationSection
from .section import Section
from .training.flow_matching import FlowMatchingSection
from .training.optim import OptimizationSection
from .training.parallel import DistributedSection
from .training.snapshots import CheckpointsSection


class ModelSection(Section):
    """Which files hold the model, and whether a LoRA or the whole model is trained."""

    model_path: str = Field(description="The LTX checkpoint: a unified file or a split transformer file (.safetensors).")
    text_encoder_path: str | None = Field(None, description="T5 or Gemma: a Hugging Face folder, a packed file, or ComfyUI's single file.")
    video_vae_path: str | None = Field(None, description="The video VAE file of a split pack.")
    audio_vae_path: str | None = Field(None, description="The audio VAE (and vocoder) file of a split pack.")
    tokenizer_path: str | None = Field(None, description="The tokenizer, where the text encoder file holds none (T5).")
    training_mode: Literal["lora", "full"] = Field("lora", description="Train a LoRA, or all weights of the transformer.")
    load_checkpoint: str | None = Field(None, description="Start from this LoRA or model file, or from the newest in this folder.")

    @model_validator(mode="after")
    def _no_urls(self) -> ModelSection:
        if not self.model_path.strip():
            raise ValueError("model_path is empty: give the LTX checkpoint (.safetensors)")
        for name in ("model_path", "text_encoder_path", "video_vae_path", "audio_vae_path", "tokenizer_path", "load_checkpoint"):
            value = getattr(self, name)
            if value and "://" in value:
                raise ValueError(f"{name} is a URL ({value}); only files on this machine can be used: download it first")
        return self

    def paths(self) -> list[Path]:
        """The files given, as paths with ~ expanded, the model first."""
        given = (self.model_path, self.text_encoder_path, self.video_vae_path, self.audio_vae_path)
        return [Path(p).expanduser() for p in given if p]

    def open(self):
        """The :class:`Checkpoint` these files make."""
        from .models.checkpoint import Checkpoint

        path = lambda p: Path(p).expanduser() if p else None  # noqa: E731
        return Checkpoint.open(
            path(self.model_path),
            text_encoder=path(self.text_encoder_path),
            video_vae=path(self.video_vae_path),
            audio_vae=path(self.audio_vae_path),
            tokenizer=path(self.tokenizer_path),
        )


class Job(Section):
    """What the three jobs share: a kind, a YAML form, a fingerprint."""

    kind: ClassVar[str]

    @classmethod
    def load(cls, path: str | Path) -> Any:
        """Read a job from a YAML file; every fault is one :class:`ConfigError` naming the field and the nearest known one."""
        path = Path(path).expanduser()
        if path.is_dir():
            raise ConfigError("config.missing", f"{path} is a folder, not a config file.", "Give the .yaml file itself; a run is gone on with by `resume RUN`.")
        if not path.is_file():
            raise ConfigError("config.missing", f"There is no config file {path}", "Give the path of a .yaml file.")
        data = read_yaml(path)
        if not isinstance(data, dict):
            raise ConfigError("config.yaml", f"{path.name} holds no mapping of sections.", "The first level are names such as model:, data:.")
        return cls.parse(data)

    @classmethod
    def parse(cls, data: dict[str, Any]) -> Any:
        """The job of a plain mapping, with faults as :class:`ConfigError`."""
        try:
            return cls.model_validate(data)
        except ValidationError as error:
            raise explain(error, cls) from error

    def resolved(self, beside: Path | None = None) -> Any:
        """The same job with every path absolute: the child works in another folder than the user.

        Relative ones start at the current folder, as the official trainer's do; what is not there is looked for beside
        the config (``beside`` is its folder).
        """
        data = self.model_dump(mode="json")
        for holder, names in _path_fields(data):
            for name in names:
                if isinstance(holder.get(name), str) and holder[name]:
                    holder[name] = _absolute(holder[name], beside)
        for source in data.get("data", {}).get("sources", ()):
            for role in ROLES:  # folders of roles may also be meant inside the source's own folder
                if isinstance(source.get(role), str) and Path(source[role]).expanduser().is_dir():
                    source[role] = _absolute(source[role], None)
        return self if data == self.model_dump(mode="json") else type(self).parse(data)

    def to_yaml(self) -> str:
        """YAML that :meth:`load` reads back to an equal job."""
        return yaml.safe_dump(self.model_dump(mode="json"), sort_keys=False, allow_unicode=True)

    def save(self, path: str | Path) -> None:
        """Write the YAML at once or not at all."""
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(path, self.to_yaml())

    def fingerprint(self) -> str:
        """16 hex digits over all fields."""
        return digest(self.model_dump(mode="json"))


class TrainConfig(Job):
    """A training job: the official ``LtxTrainerConfig`` with our additions."""

    kind: ClassVar[str] = "train"

    model: ModelSection
    lora: LoraSection | None = Field(None, description="The adapter; required when model.training_mode is lora.")
    training_strategy: TrainingStrategySection = Field(default_factory=lambda: TrainingStrategySection.model_validate({}))
    optimization: OptimizationSection = OptimizationSection()
    acceleration: AccelerationSection = AccelerationSection()
    data: DataSection
    validation: ValidationSection = ValidationSection()
    checkpoints: CheckpointsSection = CheckpointsSection()
    hub: HubSection = HubSection()
    flow_matching: FlowMatchingSection = FlowMatchingSection()
    wandb: WandbSection = WandbSection()
    distributed: DistributedSection = DistributedSection()
    logging: LoggingSection = LoggingSection()
    seed: int = Field(42, description="Seed of noise, sigmas, data order and adapter initialisation.")
    output_dir: str = Field("outputs", description="Folder of the run: its config, checkpoints, samples and logs.")

    @model_validator(mode="after")
    def _cross_checks(self) -> TrainConfig:
        if self.model.training_mode == "lora" and self.lora is None:
            raise ValueError("lora: the section is required when model.training_mode is lora")
        if self.model.training_mode == "full" and self.acceleration.quantization:
            raise ValueError("acceleration.quantization: a quantised base cannot be fully fine-tuned; remove it or train a LoRA")
        if self.acceleration.optimizer_in_ram == "on" and not self.optimization.rests_in_ram:
            raise ValueError("acceleration.optimizer_in_ram: on goes with optimizer_type adamw (without amsgrad); set it to off, or take a paged_ optimizer with off")
        if said := self.flow_matching.nothing_counts(self.training_strategy.streams().generated):
            raise ValueError(f"flow_matching: {said}")
        return self

    def identity(self) -> dict[str, Any]:
        """The fields that make two runs the same training (DESIGN: identity of a run)."""
        data = self.model_dump(mode="json")
        optimization = data["optimization"]
        return {
            "model": {k: v for k, v in data["model"].items() if k != "load_checkpoint"},
            "warm_start": data["model"]["load_checkpoint"],
            "data": {k: v for k, v in data["data"].items() if k not in DataSection.free_fields()},
            "training_strategy": data["training_strategy"],
            "lora": data["lora"],
            "flow_matching": data["flow_matching"],
            "optimization": {k: v for k, v in optimization.items() if k not in ("steps", "enable_gradient_checkpointing")},
            "quantization": data["acceleration"]["quantization"],
            "seed": self.seed,
        }

    def official_identity(self) -> dict[str, Any]:
        """What the official trainer's state tells of its settings, as this job has them."""
        optimization = self.optimization
        told = {"optimizer_type": optimization.optimizer_type, "scheduler_type": optimization.scheduler_type, "training_mode": self.model.training_mode}
        return {**told, "lora_rank": self.lora.rank if self.lora else None}

    def extendable(self) -> dict[str, Any]:
        """Fields that may grow: the number of steps (the schedule is then laid over the new total)."""
        return {"steps": self.optimization.steps}


class PreprocessJob(Job):
    """Encode a dataset and prompts into a cache, without training."""

    kind: ClassVar[str] = "preprocess"

    model: ModelSection
    data: DataSection
    training_strategy: TrainingStrategySection | None = Field(None, description="The mode the cache is for; None caches every stream.")
    acceleration: AccelerationSection = AccelerationSection()
    prompts: list[str] = Field(default_factory=list, description="Further texts to encode, such as validation prompts.")
    with_audio: bool = Field(True, description="Encode sound where clips have it and the family knows sound.")
    overwrite: bool = Field(False, description="Encode again what is cached already.")
    seed: int = 42
    output_dir: str = Field("outputs/preprocess", description="Folder of this job's status and log.")


class SampleJob(Job):
    """Make clips from prompts with a checkpoint and LoRAs, without training."""

    kind: ClassVar[str] = "sample"

    model: ModelSection
    loras: list[LoraUse] = Field(default_factory=list, description="LoRA files with their strengths.")
    validation: ValidationSection = ValidationSection()
    acceleration: AccelerationSection = AccelerationSection()
    seed: int = 42
    output_dir: str = Field("outputs/sample", description="Folder that receives samples/.")


class LoraUse(Section):
    """A LoRA file applied at a strength."""

    path: str = Field(min_length=1)
    strength: float = Field(1.0, ge=-10, le=10)


SampleJob.model_rebuild()

JOBS: dict[str, type[Job]] = {cls.kind: cls for cls in (TrainConfig, PreprocessJob, SampleJob)}


def _path_fields(data: dict[str, Any]) -> list[tuple[dict[str, Any], tuple[str, ...]]]:
    """The mappings of a dumped job that hold paths, each with the names of those fields."""
    found: list[tuple[dict[str, Any], tuple[str, ...]]] = [(data, ("output_dir",))]
    found.append((data.get("model", {}), ("model_path", "text_encoder_path", "video_vae_path", "audio_vae_path", "tokenizer_path", "load_checkpoint")))
    section = data.get("data", {})
    found.append((section, ("preprocessed_data_root", "dataset", "cache_dir", "held_out_root")))
    found += [(source, ("path",)) for source in (*section.get("sources", ()), *data.get("loras", ()))]
    for sample in data.get("validation", {}).get("samples", ()):
        found.append((sample, ("noise",)))
        found += [(condition, ("image_or_video", "video", "audio", "mask", "image")) for condition in sample.get("conditions", ())]
    return found


def _absolute(text: str, beside: Path | None) -> str:
    if "://" in text:
        return text  # refused by name where it is opened
    path = Path(text)
    try:
        path = path.expanduser()
    except RuntimeError:  # the home of nobody: a name like any other
        pass
    if not path.is_absolute() and beside is not None and not path.exists() and (beside / path).exists():
        path = beside / path
    return str(path.absolute())


class _YamlLoader(yaml.SafeLoader):
    """YAML as people mean it: ``off``, ``no`` and dates are words (fields that want a truth value take them), a key stands once."""

    yaml_implicit_resolvers = {
        letter: [(tag, pattern) for tag, pattern in resolvers if tag not in ("tag:yaml.org,2002:bool", "tag:yaml.org,2002:timestamp")]
        for letter, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen: dict[str, int] = {}
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.value != "<<":
                line = key.start_mark.line + 1
                if key.value in seen:
                    raise ConfigError("config.duplicate", f"{key.value} stands twice: in line {seen[key.value]} and in line {line}.", "The second would silently win: remove or join one of them.")
                seen[key.value] = line
        return super().construct_mapping(node, deep)


_YamlLoader.add_implicit_resolver("tag:yaml.org,2002:bool", re.compile(r"^(?:true|True|TRUE|false|False|FALSE)$"), list("tTfF"))


def read_yaml(path: Path) -> Any:
    """What a YAML file says, in any encoding that editors save; ConfigError names the line that is wrong."""
    try:
        text = read_text(path).value
        return yaml.load(text, Loader=_YamlLoader)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = text.splitlines()[mark.line] if mark is not None and mark.line < len(text.splitlines()) else ""
        place = f" in line {mark.line + 1}" if mark is not None else ""
        hint = f"{line.strip()[:200]}\n{error}"
        if "\t" in line[: len(line) - len(line.lstrip())] or "'\\t'" in str(error):
            hint = f"YAML is indented with spaces, not tabs.\n{line.rstrip()[:200]!r}"
        elif "\\" in line and '"' in line:
            hint = f'In "double quotes" a backslash is special: use single quotes or / in paths.\n{hint}'
        raise ConfigError("config.yaml", f"{path.name} is not readable YAML{place}: {getattr(error, 'problem', None) or 'not text'}", hint.strip()) from error
    except RecursionError as error:
        raise ConfigError("config.yaml", f"{path.name} is nested too deeply to be a config.", "Give a job's .yaml file.") from error


def digest(value: Any, length: int = 16) -> str:
    """Hex digits of the SHA-256 over a value's canonical JSON."""
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()[:length]


def known_fields(model: Any, prefix: str = "") -> list[str]:
    """Dotted paths of all fields below a section class, through lists, unions and root models (list indices left out)."""
    paths: list[str] = []
    if not (isinstance(model, type) and issubclass(model, BaseModel)):
        for part in get_args(model):
            paths += known_fields(part, prefix)
        return list(dict.fromkeys(paths))
    for name, info in model.model_fields.items():
        if name == "root":
            paths += known_fields(info.annotation, prefix)
        else:
            paths += [prefix + name, *known_fields(info.annotation, f"{prefix}{name}.")]
    return list(dict.fromkeys(paths))


def parse_section(model: type[Section], values: dict[str, Any]) -> Any:
    """A section of plain values (the command line's), with faults as :class:`ConfigError`."""
    try:
        return model.model_validate(values)
    except ValidationError as error:
        raise explain(error, model) from error


_BRANCH = re.compile(r"^(?:int|float|literal\[.*\])$")
"""What pydantic puts after a field's name for each branch of its union."""


def explain(error: ValidationError, model: type[Section] | None = None) -> ConfigError:
    """One :class:`ConfigError` for pydantic's faults: the first in the message, all in the hint."""
    known = known_fields(model) if model is not None else []
    told: dict[str, list[str]] = {}  # the branches of a union (a number, or auto) stand together as one fault
    shown: dict[str, str] = {}
    for fault in error.errors():
        path = ".".join(str(p) for p in fault["loc"] if not _BRANCH.match(str(p)))
        if fault["type"] == "extra_forbidden":
            plain = ".".join(str(p) for p in fault["loc"] if isinstance(p, str) and "[" not in p)
            near = nearest(plain, known) or [k for k in known if k.rsplit(".", 1)[-1] in nearest(path.rsplit(".", 1)[-1], [k.rsplit(".", 1)[-1] for k in known])]
            message = "there is no such field" + (f"; nearest: {', '.join(near[:3])}" if near else "")
        elif fault["type"] == "missing":
            message = "required and missing"
        else:
            message = fault["msg"].removeprefix("Value error, ")
            shown[path] = "" if isinstance(fault["input"], (dict, list)) or not path else f" (got {fault['input']!r})"
        told[path] = [*told[path], message.removeprefix("Input should be ")] if path in told else [message]
    lines = [(f"{path}: " if path else "") + ", or ".join(messages) + shown.get(path, "") for path, messages in told.items()]
    about = describe_field(model, error.errors()[0]["loc"]) if model is not None else ""
    quotes = "A word that looks like a number needs quotes in YAML." if any(f["type"] == "string_type" for f in error.errors()) else ""
    hint = "\n".join(filter(None, ("\n".join(lines) if len(lines) > 1 else "", about, quotes)))
    if not hint and model is not None:
        hint = "`python -m ltx_train fields` prints every field with what it takes."
    return ConfigError("config.invalid", lines[0], hint)


def describe_field(model: Any, loc: tuple[int | str, ...]) -> str:
    """``name: description`` of the field that a fault is at; empty where it is no field."""
    for position, name in enumerate(loc):
        for kind in _sections(model):
            info = kind.model_fields.get(name) if isinstance(name, str) else None
            if info is not None:
                if position == len(loc) - 1 or not list(_sections(info.annotation)):
                    return f"{name}: {info.description}" if info.description else ""
                model = info.annotation
                break
    return ""


def _sections(annotation: Any) -> list[type[BaseModel]]:
    """The section classes in an annotation, root models opened."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        root = annotation.model_fields.get("root")
        return _sections(root.annotation) if root is not None else [annotation]
    return [found for part in get_args(annotation) for found in _sections(part)]
