"""The fitted set: a small LTX-2.3 style model that knows drawn clips, shipped with the package, and how well it does."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ..models.checkpoint import Checkpoint
from .fitted_layout import MODEL_NAME, TEXT_NAME

FOLDER = Path(__file__).parent / "fitted"


@dataclass(frozen=True)
class FittedSet:
    """The files of a fitted set."""

    model: Path
    text_encoder: Path

    @classmethod
    def at(cls, folder: Path = FOLDER) -> FittedSet:
        """The set in a folder; by default the one in the package."""
        return cls(folder / MODEL_NAME, folder / TEXT_NAME)

    def open(self) -> Checkpoint:
        return Checkpoint.open(self.model, text_encoder=self.text_encoder)

    @property
    def size(self) -> int:
        """Bytes of both files."""
        return self.model.stat().st_size + self.text_encoder.stat().st_size
