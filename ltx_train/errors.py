"""Errors a user can act on: what is wrong with which value, what is allowed, what to do."""

from __future__ import annotations

import errno

LINE = 119
"""The most letters of a message: one line of a terminal, a node's banner, a table's cell."""


class LtxTrainError(Exception):
    """An error for the person at the keyboard.

    code: a permanent name such as ``checkpoint.truncated``, for tests and translations.
    message: one line under 120 characters: what is wrong with which value. A longer one (a long path in it) is
        shortened, and stands whole in the hint.
    hint: what is allowed, and what to do; may be long.
    """

    exit_code = 2

    def __init__(self, code: str, message: str, hint: str = "") -> None:
        whole, message = message, one_line(message)
        if message != whole and whole not in hint:
            hint = f"{whole}\n{hint}".rstrip()
        super().__init__(message)
        self.code = code
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return f"{self.message}\n{self.hint}" if self.hint else self.message


def one_line(text: str, limit: int = LINE) -> str:
    """``text`` on one line of at most ``limit`` letters: the middle of its longest word (a path) goes first, then its end."""
    text = " ".join(text.split("\n")).strip() if "\n" in text else text
    over = len(text) - limit
    if over <= 0:
        return text
    longest = max(text.split(" "), key=len)
    kept = len(longest) - over - 3
    if kept >= 16:
        return text.replace(longest, f"{longest[: kept // 3]}...{longest[-(kept - kept // 3) :]}", 1)
    return text[: limit - 3] + "..."


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


def explain_os_error(error: OSError) -> LtxTrainError | None:
    """What a refused file operation means for the user, or None for one that only our own fault can cause."""
    name = error.filename2 or error.filename  # of a rename: where it goes
    where = str(name) if name else "a file"
    said = {
        errno.ENOSPC: ("disk.full", f"The disk is full: {where}.", "Free some space and start again: a run goes on from its last snapshot."),
        errno.EACCES: ("file.permission", f"No permission to use {where}", "Give your user the right to read and write there, or choose another folder."),
        errno.EROFS: ("file.read_only", f"The disk is read-only: {where}", "Choose a folder on a disk that can be written."),
        errno.ENAMETOOLONG: ("file.name_too_long", f"The name is too long for this disk: {where}", "Use a shorter name or a folder nearer to the root of the disk."),
        errno.ENOENT: ("file.missing", f"There is no file {where}", "It was moved, renamed or removed, or its disk is away."),
        errno.EISDIR: ("file.is_folder", f"This is a folder, not a file: {where}", "Give the file itself."),
        errno.ENOTDIR: ("file.no_folder", f"This is a file, not a folder: {where}", "Give a folder, or another name."),
        errno.EEXIST: ("file.exists", f"Something else is there already: {where}", "Give another name, or move it away."),
        errno.EIO: ("disk.error", f"The disk reported an error at {where}", "The disk or network share may be failing: check it, then start again."),
        errno.EMFILE: ("file.too_many", "This process may open no more files.", "Raise the limit (ulimit -n 4096), or use fewer data workers."),
    }
    said[getattr(errno, "EDQUOT", errno.ENOSPC)] = said[errno.ENOSPC]
    said[errno.EPERM] = said[errno.EACCES]
    found = said.get(error.errno or 0)
    if found is None or (error.errno == errno.ENOENT and not error.filename):
        return None
    return LtxTrainError(*found)


_MEMORY_WORDS = (
    "out of memory",
    "not enough memory",
    "can't allocate memory",
    "cannot allocate memory",
    "cublas_status_alloc_failed",
    "cudnn_status_alloc_failed",
    "cudaerrormemoryallocation",
    "hiperroroutofmemory",
    "failed to allocate",
    "unable to allocate",
)


def size_text(count: float) -> str:
    """Bytes in words, such as 1.5 GiB or 120 KiB."""
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if abs(count) < 1024:
            return f"{count:.0f} {unit}" if unit == "bytes" or count >= 100 else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"


def utf8(json: str) -> bytes:
    """JSON or YAML text to bytes. A byte of a file name that is no UTF-8 is a lone surrogate to Python: it becomes its escape, which reads back as it was."""
    return json.encode("utf-8", "backslashreplace")


def is_out_of_memory(error: BaseException) -> bool:
    """Whether the exception, or one that it came from, says that RAM or an accelerator's memory ran out."""
    seen: BaseException | None = error
    for _ in range(10):
        if seen is None:
            return False
        if isinstance(seen, MemoryError) or type(seen).__name__ in ("OutOfMemoryError", "OutOfMemory"):
            return True
        if isinstance(seen, RuntimeError | OSError) and any(words in str(seen).lower() for words in _MEMORY_WORDS):
            return True
        seen = seen.__cause__ or seen.__context__
    return False
