"""What an examination found: one check after the other, and the diagnosis they come to."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Check:
    """One question and its answer. verdict: pass, warning, fail, skipped. code: permanent name of what is wrong."""

    name: str
    verdict: str
    message: str
    code: str = ""
    hint: str = ""
    numbers: Mapping[str, Any] = field(default_factory=dict)


@dataclass
class Diagnosis:
    """All checks of a model; ``healthy`` when none failed. preview: the file of the step-0 preview, if one was made."""

    model: str
    checks: list[Check] = field(default_factory=list)
    preview: Path | None = None

    @property
    def problems(self) -> list[Check]:
        return [c for c in self.checks if c.verdict == "fail"]

    @property
    def healthy(self) -> bool:
        return not self.problems

    def __getitem__(self, name: str) -> Check:
        return next(c for c in self.checks if c.name == name)

    def to_json(self) -> dict[str, Any]:
        return {
            "model": self.model, "healthy": self.healthy, "problems": [c.code for c in self.problems], "checks": [asdict(c) for c in self.checks],
            "preview": None if self.preview is None else str(self.preview),
        }  # fmt: skip
