"""One loaded sample, and what the loop needs of a dataset, whoever wrote it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from torch import Tensor

from ..geometry import AudioGrid, Latents
from ..text import TextFeatures
from .sampler import Unit


@dataclass(frozen=True)
class Item:
    """One loaded sample; latents have a batch of 1, masks none. regularisation: "plain", "prior" or empty."""

    id: str
    text: str
    video: Latents | None
    audio: Latents | None
    roles: Mapping[str, Latents | Tensor] = field(default_factory=dict)
    audio_steps: int = 0
    weight: float = 1.0
    regularisation: str = ""


class TrainingDataset(Protocol):
    """What the loop needs of a dataset: ours or the official folder."""

    audio_grid: AudioGrid | None

    def __len__(self) -> int: ...
    def units(self) -> list[Unit]: ...
    def item(self, index: int) -> Item: ...
    def features(self, key: str) -> TextFeatures: ...
    def text_keys(self) -> list[str]: ...
    def empty_text(self) -> str | None: ...
