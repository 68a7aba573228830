"""Errors a user can act on: what is wrong with which value, what is allowed, what to do."""

from __future__ import annotations


class LtxTrainError(Exception):
    """An error for the person at the keyboard.

    code: a permanent name such as ``checkpoint.truncated``, for tests and translations.
    message: one line under 120 characters: what is wrong with which value.
    hint: what is allowed, and what to do; may be long.
    """

    exit_code = 2

    def __init__(self, code: str, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return f"{self.message}\n{self.hint}" if self.hint else self.message


class ConfigError(LtxTrainError):
    """A field of a job has a value that cannot work."""


class CheckpointError(LtxTrainError):
    """A model file is missing, damaged, of another family, or lacks a component."""


class DataError(LtxTrainError):
    """A dataset, a clip or a cache entry cannot be used."""


class RunError(LtxTrainError):
    """A run directory cannot be used: locked, of another identity, or damaged."""


class MissingPackage(LtxTrainError):
    """An optional package is needed for what was asked and is not installed."""

    def __init__(self, package: str, purpose: str, otherwise: str = "") -> None:
        hint = f"Install it into the environment that trains: pip install {package}"
        super().__init__("package.missing", f"{purpose} needs the package {package}, which is not installed.", f"{hint}. {otherwise}".rstrip(". ") + ".")
        self.package = package


class StopRequested(LtxTrainError):
    """The user asked the run to stop; raised at the next safe point."""

    exit_code = 3

    def __init__(self, message: str = "The run was asked to stop.") -> None:
        super().__init__("run.stopped", message)


class OutOfMemory(LtxTrainError):
    """The accelerator or the host ran out of memory; the parent may start again one notch down."""

    exit_code = 4


def nearest(name: str, known: list[str] | tuple[str, ...], limit: int = 3) -> list[str]:
    """The known names most like ``name``, best first, for error hints."""
    import difflib

    return difflib.get_close_matches(name, known, n=limit, cutoff=0.5)
