"""The official trainer's ``.precomputed`` folder read as it is: .pt latents, conditions, references, masks, legacy forms."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..errors import DataError
from ..geometry import AudioGrid, Latents, VideoFactors, VideoGrid, unpatchify
from ..text import TextFeatures
from .items import Item
from .sampler import Unit

FOLDERS: dict[str, tuple[str, ...]] = {
    "video": ("latents", "video_latents"),
    "audio": ("audio_latents",),
    "reference_video": ("reference_latents",),
    "reference_audio": ("reference_audio_latents",),
    "video_mask": ("video_masks",),
    "audio_mask": ("audio_masks",),
}
"""Official folder names of each role."""


def find_root(root: Path) -> Path | None:
    """The folder that holds ``conditions``: the one given or its ``.precomputed``."""
    return next((folder for folder in (root, root / ".precomputed") if (folder / "conditions").is_dir()), None)


def load_pt(path: Path) -> dict[str, Any]:
    """A .pt file's dict, read with weights_only; raises DataError when it is damaged or is something else."""
    try:
        data = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # torch raises many kinds for a damaged or malicious file
        raise DataError("precomputed.damaged", f"{path.name} cannot be read as a plain tensor file.", f"{path}: {str(error)[:200]}") from error
    if not isinstance(data, dict):
        raise DataError("precomputed.content", f"{path.name} holds {type(data).__name__}, not a dict of tensors.", str(path))
    return data


@dataclass(frozen=True)
class _Files:
    """The files of one sample by role, and its condition."""

    name: str
    condition: Path
    roles: Mapping[str, Path]


class PrecomputedDataset:
    """Samples that have a condition and every wanted role; sound may be missing (it counts for the video loss alone).

    directories: role -> folder name where a config names its own; with it, exactly these roles are read.
    """

    def __init__(self, root: Path, *, factors: VideoFactors, audio_grid: AudioGrid | None = None, directories: Mapping[str, str] | None = None) -> None:
        self.root, self.factors = root, factors
        self.folders = self._folders(directories)
        self.skipped: list[str] = []
        self._files = self._match()
        if not self._files:
            raise DataError("precomputed.empty", f"No sample in {root} has all of: conditions, {', '.join(self.folders)}.", "Paths must agree: latents/a.pt with conditions/a.pt.")
        self.audio_grid = (audio_grid or AudioGrid(1)) if "audio" in self.folders else None
        self._units: list[Unit] | None = None
        self._usual_steps: dict[tuple[int, float], int] = {}
        self._conditions = {f.name: f.condition for f in self._files}

    def _folders(self, directories: Mapping[str, str] | None) -> dict[str, Path]:
        if directories is not None:
            found = {role: self.root / name for role, name in directories.items()}
            for role, folder in found.items():
                if not folder.is_dir():
                    raise DataError("precomputed.folder", f"The {role} folder {folder.name} is missing in {self.root}.", "Preprocess that role, or correct the name.")
            return found
        return {role: next(self.root / n for n in names if (self.root / n).is_dir()) for role, names in FOLDERS.items() if any((self.root / n).is_dir() for n in names)}

    def _match(self) -> list[_Files]:
        found = []
        conditions = self.root / "conditions"
        primary = next((self.folders[role] for role in ("video", "audio") if role in self.folders), conditions)
        for path in sorted(primary.rglob("*.pt")):
            relative = path.relative_to(primary)
            roles = {role: match for role, folder in self.folders.items() if (match := _same(folder, relative)) is not None}
            condition = _same(conditions, relative)
            needed = set(self.folders) - ({"audio"} if "video" in self.folders else set())
            if condition is None or not needed <= set(roles):
                self.skipped.append(relative.as_posix())
                continue
            found.append(_Files(relative.with_suffix("").as_posix(), condition, roles))
        return found

    def __len__(self) -> int:
        return len(self._files)

    def units(self) -> list[Unit]:
        """Groups by latent shape and rate: each file is read once for it."""
        if self._units is None:
            for files in self._files:
                if {"video", "audio"} <= set(files.roles):
                    grid, steps = self._video(files.roles["video"]).grid, self._audio(files.roles["audio"]).grid.steps
                    self._usual_steps.setdefault((grid.frames, grid.fps), steps)
            self._units = [self._unit(self.item(n)) for n in range(len(self))]
        return self._units

    def _steps(self, grid: VideoGrid) -> int:
        """Sound steps that a silent clip would have: those of others as long, so that they may share a batch."""
        if self.audio_grid is None or grid.frames == 1:
            return 0
        return self._usual_steps.get((grid.frames, grid.fps)) or self.audio_grid.of_seconds(grid.seconds).steps

    @staticmethod
    def _unit(item: Item) -> Unit:
        shape = "x".join(map(str, item.video.values.shape[2:])) + f"@{item.video.grid.fps:g}" if item.video else "sound"
        roles = "+".join(f"{n}{tuple((v.values if isinstance(v, Latents) else v).shape)}" for n, v in sorted(item.roles.items()))
        tokens = item.video.grid.tokens if item.video else item.audio_steps
        return Unit(f"{shape}/{item.audio_steps}/{roles}", 1, tokens)

    def item(self, index: int) -> Item:
        files = self._files[index]
        video = self._video(files.roles["video"]) if "video" in files.roles else None
        audio = self._audio(files.roles["audio"]) if "audio" in files.roles else None
        roles: dict[str, Latents | Tensor] = {}
        for role, path in files.roles.items():
            if role == "reference_video":
                roles[role] = self._video(path)
            elif role == "reference_audio":
                roles[role] = self._audio(path)
            elif role.endswith("mask"):
                roles[role] = load_pt(path)["mask"].float()
        steps = audio.grid.steps if audio else self._steps(video.grid) if video else 0
        return Item(files.name, files.name, video, audio, roles, steps)

    def _video(self, path: Path) -> Latents:
        data = load_pt(path)
        values = data["latents"].float()
        frames, height, width = (int(data[k]) for k in ("num_frames", "height", "width"))
        fps = float(data.get("fps") or 24.0)
        if frames == 1:
            fps = 24.0  # stored as 1.0; inference and we give a still 24
        grid = VideoGrid(frames, height, width, fps, self.factors)
        if values.ndim == 2:  # legacy: [F*H*W, C]
            values = unpatchify(values.unsqueeze(0), grid)[0]
        if tuple(values.shape[1:]) != (frames, height, width):
            raise DataError("precomputed.shape", f"{path.name}: latents {tuple(values.shape)} do not fit {frames}x{height}x{width}.", str(path))
        return Latents(values.unsqueeze(0), grid)

    def _audio(self, path: Path) -> Latents:
        data = load_pt(path)
        values = data["latents"].float()
        base = self.audio_grid or AudioGrid(1)
        if values.ndim == 2:  # legacy: [T, C*bins]
            bins = int(data.get("frequency_bins", base.bins))
            values = unpatchify(values.unsqueeze(0), replace(base, bins=bins))[0]
        return Latents(values.unsqueeze(0), replace(base, steps=values.shape[1], channels=values.shape[0], bins=values.shape[2]))

    def features(self, key: str) -> TextFeatures:
        """Features of the valid tokens; V2 has 4096 + 2048 channels, V1 the same tensor twice, legacy one tensor for both."""
        path = self._conditions[key]
        data = load_pt(path)
        mask = data.get("prompt_attention_mask")
        valid = None if mask is None else mask.reshape(-1).bool()
        video = data.get("video_prompt_embeds", data.get("prompt_embeds"))
        audio = data.get("audio_prompt_embeds")
        if video is None:
            raise DataError("precomputed.caption", f"{path.name} holds no prompt embeddings.", f"{path}: keys {sorted(data)}")
        take = lambda t: t.reshape(-1, t.shape[-1]) if valid is None else t.reshape(-1, t.shape[-1])[valid]  # noqa: E731
        if audio is not None and audio.shape[-1] != video.shape[-1]:
            return TextFeatures("v2", take(video), take(audio))
        return TextFeatures("t5" if audio is None and video.shape[-1] == 4096 else "v1", take(video))

    def text_keys(self) -> list[str]:
        return [f.name for f in self._files]

    def empty_text(self) -> str | None:
        return None

    def audio_coverage(self) -> float:
        """Share of samples that have sound."""
        return sum("audio" in f.roles for f in self._files) / len(self._files)


def _same(folder: Path, relative: Path) -> Path | None:
    """The file of the same relative path, or of the legacy names latent_X / condition_X."""
    names = [relative.name]
    if relative.stem.startswith("latent_"):
        names.append(relative.name.replace("latent_", "condition_", 1))
    return next((p for n in names if (p := folder / relative.parent / n).is_file()), None)
