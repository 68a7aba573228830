"""Where a run's numbers and files go beside the run: CSV, TensorBoard, Weights & Biases, the Hugging Face Hub."""

from __future__ import annotations

import csv
import importlib
import importlib.util
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Protocol

from pydantic import Field, model_validator

from ..errors import MissingPackage, RunError
from ..section import Section
from .events import SampleEvent, StatisticsEvent, StepEvent
from .lock import write_atomic
from .model_card import ModelCard
from .run_dir import RunDir


class HubSection(Section):
    """Pushing the trained file to the Hugging Face Hub. The token comes from HF_TOKEN or `hf auth login`."""

    push_to_hub: bool = Field(False, description="Upload the LoRA, a model card, samples and the config when the run has finished.")
    hub_model_id: str | None = Field(None, description="The repository, such as name/my-lora; made if it is not there.")
    private: bool = Field(False, description="Make a new repository private.")

    @model_validator(mode="after")
    def _needs_an_id(self) -> HubSection:
        if self.push_to_hub and not self.hub_model_id:
            raise ValueError("hub_model_id is needed when push_to_hub is on")
        return self

    def check(self) -> None:
        """Raise at the start what would fail at the end: the package, the token."""
        if not self.push_to_hub:
            return
        _need("huggingface_hub", "hub.push_to_hub")
        from huggingface_hub import get_token

        if not get_token():
            raise RunError("hub.token", "hub.push_to_hub is on but there is no Hugging Face token.", "Set HF_TOKEN or run `hf auth login` for the user that trains.")


class WandbSection(Section):
    """Weights & Biases. The key comes from WANDB_API_KEY or `wandb login`."""

    enabled: bool = Field(False, description="Log to Weights & Biases.")
    project: str = Field("ltxv-trainer", description="Project name.")
    entity: str | None = Field(None, description="User or team.")
    tags: list[str] = Field(default_factory=list, description="Tags of the run.")
    log_validation_videos: bool = Field(True, description="Upload the validation samples too.")

    def check(self) -> None:
        if self.enabled:
            _need("wandb", "wandb.enabled", "Or turn it off: metrics.csv and TensorBoard hold the same numbers")


class LoggingSection(Section):
    """Files of numbers in the run directory."""

    csv: bool = Field(True, description="Write metrics.csv, one row a step.")
    tensorboard: bool | None = Field(None, description="Write TensorBoard files; empty: if the package is installed.")

    def check(self) -> None:
        if self.tensorboard:
            _need("tensorboard", "logging.tensorboard", module="torch.utils.tensorboard")


def _installed(package: str) -> bool:
    """Whether a package can be found; a mere folder of its name (wandb/ of earlier runs) is none."""
    try:
        found = importlib.util.find_spec(package)
    except (ImportError, ValueError):
        return False
    return found is not None and found.origin is not None


def _need(package: str, purpose: str, otherwise: str = "", *, module: str = "") -> None:
    """Raise MissingPackage where a package is not installed, RunError where it is there and does not load."""
    if not _installed(package):
        raise MissingPackage(package, purpose, otherwise)
    try:
        importlib.import_module(module or package)
    except Exception as error:  # a broken package may raise anything
        raise RunError("package.broken", f"{purpose} needs the package {package}, which is installed and does not load.", f"{type(error).__name__}: {error}") from error


class Tracker(Protocol):
    """One place that numbers go to."""

    def step(self, event: StepEvent) -> None: ...

    def sample(self, event: SampleEvent, path: Path) -> None: ...

    def statistics(self, numbers: dict[str, float]) -> None: ...

    def close(self) -> None: ...


def scalars(event: StepEvent) -> dict[str, float]:
    """The numbers of a step under the names that the official trainer logs where it has one."""
    named = {
        "train/loss": event.loss,
        "train/loss_average": event.loss_average,
        "train/video_loss": event.video_loss,
        "train/audio_loss": event.audio_loss,
        "train/regularisation_loss": event.regularisation_loss,
        "train/validation_loss": event.validation_loss,
        "train/learning_rate": event.learning_rate,
        "train/grad_norm": event.grad_norm,
        "train/step_time": event.seconds,
        "train/data_wait": event.data_wait,
        "train/peak_memory_gb": None if event.peak_memory is None else event.peak_memory / 2**30,
    }
    named |= {f"train/loss_sigma_{name}": value for name, value in (event.sigma_loss or {}).items()}
    return {name: float(value) for name, value in named.items() if value is not None}


def statistics(event: StatisticsEvent) -> dict[str, float]:
    """The end's numbers under the official trainer's names, ours beside them."""
    named = {
        "total_time_minutes": event.minutes,
        "steps_per_second": event.steps_per_second,
        "samples_per_second": event.samples_per_second,
        "peak_gpu_memory_gb": None if event.peak_memory is None else event.peak_memory / 2**30,
        "num_processes": event.processes,
        "global_batch_size": event.global_batch,
        "tokens_per_second": event.tokens_per_second,
        "data_wait_seconds": event.seconds_waiting,
        "samples": event.samples,
        "skipped_steps": event.skipped,
    }
    return {name: float(value) for name, value in named.items() if value is not None}


class CsvTracker:
    """metrics.csv: the plain numbers of every step. Rows after the step that a resume starts at are dropped first."""

    COLUMNS = tuple(name for name in StepEvent.model_fields if name not in ("v", "seq", "t", "type", "total", "sigma_loss", "eta"))

    def __init__(self, path: Path, start_step: int) -> None:
        kept: list[list[str]] = []
        if path.exists():
            with open(path, newline="", encoding="utf-8") as file:
                rows = list(csv.reader(file))
            if rows and tuple(rows[0]) == self.COLUMNS:
                kept = [row for row in rows[1:] if len(row) == len(self.COLUMNS) and row[0].isdigit() and int(row[0]) <= start_step]
        lines = [",".join(self.COLUMNS), *(",".join(row) for row in kept)]
        write_atomic(path, "\n".join(lines) + "\n")
        self._file = open(path, "a", newline="", encoding="utf-8")
        self._writer = csv.writer(self._file, lineterminator="\n")

    def step(self, event: StepEvent) -> None:
        self._writer.writerow(["" if getattr(event, name) is None else getattr(event, name) for name in self.COLUMNS])
        self._file.flush()

    def sample(self, event: SampleEvent, path: Path) -> None:
        """A table holds no samples."""

    def statistics(self, numbers: dict[str, float]) -> None:
        """They stand in the events."""

    def close(self) -> None:
        self._file.close()


class TensorBoardTracker:
    """TensorBoard's files; a resume hides the steps that it repeats."""

    def __init__(self, directory: Path, start_step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(directory), purge_step=start_step + 1 if start_step else None)

    def step(self, event: StepEvent) -> None:
        for name, value in scalars(event).items():
            self._writer.add_scalar(name, value, event.step)

    def sample(self, event: SampleEvent, path: Path) -> None:
        self._writer.add_text(f"samples/{event.index}", f"{event.path}: {event.prompt}", event.step)
        if path.suffix == ".png":
            import numpy
            from PIL import Image

            with Image.open(path) as image:
                self._writer.add_image(f"samples/image_{event.index}", numpy.asarray(image.convert("RGB")), event.step, dataformats="HWC")

    def statistics(self, numbers: dict[str, float]) -> None:
        for name, value in numbers.items():
            self._writer.add_scalar(f"stats/{name}", value)

    def close(self) -> None:
        self._writer.close()


class WandbTracker:
    """A W&B run that a resumed training goes on with; its id is kept in wandb.json."""

    def __init__(self, run: RunDir, section: WandbSection, config: dict[str, Any]) -> None:
        import wandb

        self._wandb = wandb
        self._media = section.log_validation_videos
        memory = run.path / "wandb.json"
        known = json.loads(memory.read_text(encoding="utf-8")) if memory.exists() else {}
        same_place = (known.get("project"), known.get("entity")) == (section.project, section.entity)
        self._run = wandb.init(
            project=section.project,
            entity=section.entity,
            name=run.name,
            tags=list(section.tags),
            config=config,
            dir=str(run.path),
            id=known.get("id") if same_place else None,
            resume="allow",
        )
        # W&B's own step may not go back, ours does after a resume: plot over train/global_step
        self._run.define_metric("*", step_metric="train/global_step")
        write_atomic(memory, json.dumps({"id": self._run.id, "project": section.project, "entity": section.entity}))

    def step(self, event: StepEvent) -> None:
        self._run.log({**scalars(event), "train/global_step": event.step})

    def sample(self, event: SampleEvent, path: Path) -> None:
        if not self._media:
            return
        kind = {".mp4": "Video", ".png": "Image", ".wav": "Audio"}.get(path.suffix)
        if kind is not None:
            media = getattr(self._wandb, kind)(str(path), caption=event.prompt)
            self._run.log({f"validation_samples/{event.index}": media, "train/global_step": event.step})

    def statistics(self, numbers: dict[str, float]) -> None:
        self._run.summary.update({f"stats/{name}": value for name, value in numbers.items()})

    def close(self) -> None:
        self._run.finish()


class Publishers:
    """All trackers of a run; one that fails is named once and left out, training goes on."""

    def __init__(self, trackers: dict[str, Tracker], failures: Iterable[str] = ()) -> None:
        self._trackers = dict(trackers)
        self.failures: list[str] = list(failures)

    @classmethod
    def open(cls, run: RunDir, *, logging: LoggingSection, wandb: WandbSection, config: dict[str, Any], start_step: int = 0) -> Publishers:
        """On rank 0 only. Call the sections' ``check`` earlier, before anything heavy is loaded."""
        logging.check()
        wandb.check()
        trackers: dict[str, Tracker] = {}
        failures: list[str] = []

        def add(name: str, make: Callable[[], Tracker]) -> None:
            try:
                trackers[name] = make()
            except Exception as error:  # no network, no login, a broken package: the model is loaded already
                failures.append(f"{name} could not be opened and is left out: {type(error).__name__}: {error}")

        if logging.csv:
            trackers["metrics.csv"] = CsvTracker(run.path / "metrics.csv", start_step)
        if logging.tensorboard or (logging.tensorboard is None and _installed("tensorboard")):
            add("TensorBoard", lambda: TensorBoardTracker(run.tensorboard, start_step))
        if wandb.enabled:
            add("Weights & Biases", lambda: WandbTracker(run, wandb, config))
        return cls(trackers, failures)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._trackers)

    def step(self, event: StepEvent) -> None:
        self._each("step", event)

    def sample(self, event: SampleEvent, path: Path) -> None:
        self._each("sample", event, path)

    def statistics(self, numbers: dict[str, float]) -> None:
        self._each("statistics", numbers)

    def close(self) -> None:
        self._each("close")

    def take_failures(self) -> list[str]:
        """What failed since the last call, for warnings."""
        failures, self.failures = self.failures, []
        return failures

    def _each(self, method: str, *arguments: Any) -> None:
        for name, tracker in list(self._trackers.items()):
            try:
                getattr(tracker, method)(*arguments)
            except Exception as error:  # a tracker's network or disk must not end a training of hours
                del self._trackers[name]
                self.failures.append(f"{name} failed and is left out from here on: {type(error).__name__}: {error}")


def push_to_hub(run: RunDir, section: HubSection, card: ModelCard, lora: Path, *, api: Any = None) -> str:
    """Upload the LoRA, the card, its samples and the config to ``section.hub_model_id``; returns the page's address.

    ``api`` is a huggingface_hub.HfApi or one like it. Raises RunError ``hub.push`` with the Hub's own words.
    """
    assert section.hub_model_id is not None
    if api is None:
        _need("huggingface_hub", "hub.push_to_hub")
        from huggingface_hub import HfApi

        api = HfApi()
    try:
        address = api.create_repo(section.hub_model_id, exist_ok=True, private=section.private)
        with tempfile.TemporaryDirectory() as folder:
            _collect(Path(folder), run, section, card, lora)
            api.upload_folder(folder_path=folder, repo_id=section.hub_model_id, commit_message=f"{card.title}, step {card.steps or 0}")
    except Exception as error:  # the package raises its own, requests' and OS errors
        hint = f"{type(error).__name__}: {error}\nThe trained file is safe at {lora}."
        raise RunError("hub.push", f"The push to {section.hub_model_id} failed.", hint) from error
    return str(address)


def _collect(folder: Path, run: RunDir, section: HubSection, card: ModelCard, lora: Path) -> None:
    """What is uploaded, in one folder and so in one commit."""
    shutil.copyfile(lora, folder / lora.name)
    (folder / "README.md").write_text(card.text(section.hub_model_id or "", lora.name), encoding="utf-8")
    for path, _ in card.samples:
        if path.exists():
            (folder / "samples").mkdir(exist_ok=True)
            shutil.copyfile(path, folder / "samples" / path.name)
    if run.job_path("train").exists():
        (folder / "training_config.yaml").write_bytes(_without_paths(run.job_path("train")))


def _without_paths(config: Path) -> bytes:
    """The config with this machine's folders cut down to file names: what strangers need, no more."""
    import yaml

    def clean(value: Any) -> Any:
        if isinstance(value, dict):
            return {name: clean(item) for name, item in value.items()}
        if isinstance(value, list):
            return [clean(item) for item in value]
        if isinstance(value, str) and "\n" not in value and (value.startswith(("/", "~", "\\\\")) or value[1:3] in (":\\", ":/")):
            return os.path.basename(value.replace("\\", "/").rstrip("/"))
        return value

    return yaml.safe_dump(clean(yaml.safe_load(config.read_text(encoding="utf-8"))), sort_keys=False, allow_unicode=True).encode()
