"""Snapshots: resumable state on disk that is whole or absent, found again by itself, and kept to a number."""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import Field
from torch import Tensor

from ..errors import RunError, size_text, utf8
from ..section import Section
from ..tensorfile import Lazy, Written, disk_error, sync_file, sync_folder, write_tensors

MANIFEST = "MANIFEST.json"
STATE = "state.json"
FORMAT = 1
_SNAPSHOT = re.compile(r"^state_step_(\d+)(\.previous)?$")
_WEIGHTS = re.compile(r"^(?:lora|model)_weights_step_(\d+)\.safetensors$")


class CheckpointsSection(Section):
    """The official ``checkpoints`` section. Ours by default saves the full state, so that a resumed run is the same run."""

    interval: int | None = Field(None, gt=0, description="Steps between snapshots; none saves at the end and on stop only.")
    keep_last_n: int = Field(1, ge=-1, description="How many of the newest are kept; 0 or -1 keeps all.")
    precision: Literal["bfloat16", "float32"] = Field("bfloat16", description="Number format of the saved LoRA or model.")
    no_resume: bool = Field(False, description="Take only the weights of model.load_checkpoint, not its step and state.")
    save_training_state: Literal["full", "minimal", "off"] = Field(
        "full", description="full: exact resume. minimal: no optimizer state, which then starts afresh. off: weights only, from the newest of which a restart goes on, less exactly."
    )

    park_minutes: float = Field(
        30.0, ge=0, le=10_080, description="After a part of a run the trainer waits so long in host memory for the next part, the GPU free; 0 ends it at once."
    )

    @property
    def dtype(self) -> torch.dtype:
        """The torch dtype of ``precision``."""
        return torch.bfloat16 if self.precision == "bfloat16" else torch.float32


class LazyTensors(Mapping[str, Tensor]):
    """The tensors of a safetensors file by name, read from the disk when asked for and not kept."""

    def __init__(self, path: Path) -> None:
        from safetensors import safe_open

        self._file = safe_open(str(path), framework="pt")
        self._names = list(self._file.keys())

    def __getitem__(self, name: str) -> Tensor:
        if name not in self._names:
            raise KeyError(name)
        return self._file.get_tensor(name)

    def rows(self, name: str, first: int, last: int) -> Tensor:
        """Rows ``first`` to ``last`` (not included) of a tensor, without reading the others."""
        return self._file.get_slice(name)[first:last]

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of a tensor, without reading it."""
        return tuple(self._file.get_slice(name).get_shape())

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


@dataclass(frozen=True)
class Snapshot:
    """A verified snapshot: its folder, its step, the JSON state; tensors are read group by group."""

    path: Path
    step: int
    state: Mapping[str, Any]
    groups: tuple[str, ...]

    def tensors(self, group: str) -> dict[str, Tensor]:
        """One group of tensors on the host. Raises RunError when the snapshot has no such group."""
        if group not in self.groups:
            raise RunError("snapshot.group", f"The snapshot {self.path.name} holds no {group}.", f"It holds: {', '.join(self.groups)}.")
        from safetensors.torch import load_file

        return load_file(self.path / f"{group}.safetensors")

    def read(self, group: str) -> LazyTensors:
        """The same group, each tensor read when asked for: a group may be larger than the host's memory."""
        if group not in self.groups:
            raise RunError("snapshot.group", f"The snapshot {self.path.name} holds no {group}.", f"It holds: {', '.join(self.groups)}.")
        return LazyTensors(self.path / f"{group}.safetensors")


def snapshot_path(run: Path, step: int) -> Path:
    """Where the snapshot of a step lives: ``<run>/checkpoints/state_step_00500``."""
    return Path(run) / "checkpoints" / f"state_step_{step:05d}"


def save_snapshot(directory: Path, tensors: Mapping[str, Mapping[str, Tensor | Lazy]], state: Mapping[str, Any]) -> Path:
    """Write groups of tensors and a JSON state as one snapshot folder.

    Everything goes to a temporary folder, each file is pushed to the disk, the manifest (sizes and sha256) comes last,
    then the folder takes its name: a crash at any moment leaves the older snapshots alone. Raises RunError
    ``run.disk_full`` when the disk is full; the half-written folder is removed then.
    """
    directory = Path(directory)
    assert _SNAPSHOT.match(directory.name), directory.name
    directory.parent.mkdir(parents=True, exist_ok=True)
    _remove_leftovers(directory.parent)
    temporary = directory.with_name(f".{directory.name}.tmp-{os.getpid()}")
    try:
        _require_room(directory.parent, tensors)
        temporary.mkdir()
        written = {f"{group}.safetensors": _write_group(temporary / f"{group}.safetensors", values) for group, values in tensors.items()}
        written[STATE] = _write_json(temporary / STATE, dict(state))
        files = {name: {"size": w.size, "sha256": w.sha256} for name, w in written.items()}
        _write_json(temporary / MANIFEST, {"format": FORMAT, "step": _step_of(directory), "files": files})
        sync_folder(temporary)
        _take_name(temporary, directory)
    except OSError as error:
        shutil.rmtree(temporary, ignore_errors=True)
        raise (disk_error(error, directory.parent, f"the snapshot {directory.name}") or error) from error
    return directory


def _write_group(path: Path, values: Mapping[str, Tensor | Lazy]) -> Written:
    with open(path, "wb") as file:
        written = write_tensors(file, values)
        sync_file(file)
    return written


def _write_json(path: Path, value: Any) -> Written:
    data = utf8(json.dumps(value, indent=1, ensure_ascii=False))
    with open(path, "wb") as file:
        file.write(data)
        sync_file(file)
    return Written(len(data), hashlib.sha256(data).hexdigest())


def _require_room(folder: Path, tensors: Mapping[str, Mapping[str, Tensor | Lazy]]) -> None:
    """Refuse before writing when the snapshot cannot fit: nothing is disturbed then."""
    need = sum(math.prod(t.shape) * t.dtype.itemsize for group in tensors.values() for t in group.values())
    free = shutil.disk_usage(folder).free
    if need > free:
        raise RunError(
            "run.disk_full",
            f"The disk is full: a snapshot needs {size_text(need)}, {size_text(free)} are free.",
            f"{folder} has no room left. What was saved before is untouched. Free some space, then go on; the last good snapshot is used.",
        )


def _take_name(temporary: Path, directory: Path) -> None:
    """Rename into place; an older snapshot of the same step stays readable as ``.previous`` until the new one has the name."""
    previous = directory.with_name(directory.name + ".previous")
    if directory.exists():
        if previous.exists():
            _delete(previous)
        os.replace(directory, previous)
    os.replace(temporary, directory)
    sync_folder(directory.parent)
    if previous.exists():
        _delete(previous)


def _remove_leftovers(folder: Path) -> None:
    """Temporary folders of a process that died; the run's lock says that no other one writes here."""
    for leftover in folder.glob(".state_step_*.tmp-*"):
        shutil.rmtree(leftover, ignore_errors=True)


def _delete(directory: Path) -> None:
    """Delete a snapshot so that a crash midway leaves nothing that looks whole: the manifest goes first."""
    (directory / MANIFEST).unlink(missing_ok=True)
    shutil.rmtree(directory, ignore_errors=True)


def _step_of(directory: Path) -> int:
    match = _SNAPSHOT.match(directory.name)
    assert match, directory.name
    return int(match[1])


def damage(directory: Path, quick: bool = False) -> str | None:
    """What is wrong with a snapshot folder, in words; None when it is whole. quick checks sizes only, not hashes."""
    try:
        manifest = json.loads((directory / MANIFEST).read_text(encoding="utf-8"))
        files = dict(manifest["files"])
    except FileNotFoundError:
        return f"{MANIFEST} is missing: it was not finished"
    except (OSError, ValueError, KeyError, TypeError):
        return f"{MANIFEST} is not readable"
    if manifest.get("format") != FORMAT:
        return f"its format {manifest.get('format')!r} is not known here"
    if STATE not in files:
        return f"{STATE} is missing"
    for name, entry in files.items():
        path = directory / name
        if not path.is_file():
            return f"{name} is missing"
        if path.stat().st_size != entry["size"]:
            return f"{name} has {path.stat().st_size} bytes, not {entry['size']}"
        if not quick and _sha256(path) != entry["sha256"]:
            return f"{name} is not what was written (sha256 differs)"
    return None


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def snapshots(run: Path) -> list[Path]:
    """All snapshot folders of a run, newest first, checked or not."""
    folder = Path(run) / "checkpoints"
    if not folder.is_dir():
        return []
    found = [path for path in folder.iterdir() if _SNAPSHOT.match(path.name) and path.is_dir()]
    return sorted(found, key=lambda path: (_step_of(path), not path.name.endswith(".previous")), reverse=True)


def newest_valid(run: Path, on_damaged: Callable[[Path, str], None] | None = None) -> Path | None:
    """The newest snapshot of a run whose manifest verifies, or None. Each damaged newer one is told to ``on_damaged``."""
    for path in snapshots(run):
        wrong = damage(path)
        if wrong is None:
            return path
        if on_damaged is not None:
            on_damaged(path, wrong)
    return None


def last_state(run: Path) -> dict[str, Any] | None:
    """The JSON state of the newest snapshot that looks whole (sizes alone are checked), or None."""
    path = next((p for p in snapshots(run) if damage(p, quick=True) is None), None)
    return None if path is None else json.loads((path / STATE).read_text(encoding="utf-8"))


def load_snapshot(directory: Path) -> Snapshot:
    """Open a snapshot after verifying it. Raises RunError ``snapshot.damaged`` saying what is wrong with it."""
    directory = Path(directory)
    wrong = damage(directory)
    if wrong is not None:
        raise RunError("snapshot.damaged", f"The snapshot {directory.name} is damaged: {wrong}."[:119], "Resume from an older one, or start the run again.")
    manifest = json.loads((directory / MANIFEST).read_text(encoding="utf-8"))
    groups = tuple(name.removesuffix(".safetensors") for name in manifest["files"] if name.endswith(".safetensors"))
    return Snapshot(directory, int(manifest["step"]), json.loads((directory / STATE).read_text(encoding="utf-8")), groups)


def retain(run: Path, keep_last_n: int, *, weights: bool = True) -> list[Path]:
    """Delete all but the newest ``keep_last_n`` snapshots and, with ``weights``, LoRA or model files; returns what went.

    0 or less keeps all. The newest snapshot that verifies is never deleted, whatever its age.
    """
    if keep_last_n <= 0:
        return []
    gone: list[Path] = []
    found = snapshots(run)
    good = next((path for path in found if damage(path, quick=True) is None), None)
    for path in found[keep_last_n:]:
        if path != good:
            _delete(path)
            gone.append(path)
    files = _weight_files(Path(run) / "checkpoints") if weights else []
    for path in files[keep_last_n:]:
        path.unlink(missing_ok=True)
        gone.append(path)
    return gone


def _weight_files(folder: Path) -> list[Path]:
    if not folder.is_dir():
        return []
    steps = {path: int(match[1]) for path in folder.iterdir() if (match := _WEIGHTS.match(path.name))}
    return sorted(steps, key=lambda path: steps[path], reverse=True)


@dataclass(frozen=True)
class OfficialState:
    """What the official trainer's ``training_state_step_*.pt`` holds that means something here."""

    step: int
    fingerprint: Mapping[str, Any]
    wandb_run_id: str | None
    has_optimizer: bool


def read_official_state(path: Path) -> OfficialState:
    """Read an official training state without running what it may carry (weights_only).

    Its optimizer moments are not taken over: its parameter order is peft's, and its noise is not keyed.
    Raises RunError when the file holds anything but plain data.
    """
    try:
        data = torch.load(path, map_location="cpu", weights_only=True)
        return OfficialState(int(data["global_step"]), dict(data.get("config_fingerprint") or {}), data.get("wandb_run_id"), "optimizer_state_dict" in data)
    except FileNotFoundError as error:
        raise RunError("snapshot.missing", f"There is no training state {Path(path).name}.", str(path)) from error
    except Exception as error:  # torch raises pickle, zip, key and runtime errors of many kinds for a bad file
        raise RunError(
            "snapshot.official_state", f"The training state {Path(path).name[:60]} cannot be read.", f"{type(error).__name__}: {error}. Set no_resume to take the weights only."
        ) from error
