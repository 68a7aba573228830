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

    @property
    def skipped(self) -> list[Check]:
        """What could not be examined."""
        return [c for c in self.checks if c.verdict == "skipped"]

    def summary(self) -> str:
        """The outcome in one line, with what was not examined."""
        if not self.healthy:
            return f"{self.model}: {len(self.problems)} of {len(self.checks)} checks failed; the first names the cause."
        if not self.skipped:
            return f"{self.model}: nothing is wrong."
        names = dict.fromkeys(c.name.removeprefix("files: ").replace("vae", "VAE") for c in self.skipped)
        return f"{self.model}: nothing is wrong with what was examined; not examined: {', '.join(names)}."

    def __getitem__(self, name: str) -> Check:
        return next(c for c in self.checks if c.name == name)

    def to_json(self) -> dict[str, Any]:
        return {
            "model": self.model, "healthy": self.healthy, "problems": [c.code for c in self.problems], "checks": [asdict(c) for c in self.checks],
            "skipped": [c.name for c in self.skipped], "preview": None if self.preview is None else str(self.preview),
        }  # fmt: skip
