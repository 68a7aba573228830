"""Writing safetensors files tensor by tensor, hashed on the way, and files that appear at once or not at all."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import struct
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import torch
from torch import Tensor

from .errors import LtxTrainError, RunError

DTYPE_NAMES: dict[torch.dtype, str] = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
"""What safetensors calls each dtype."""


@dataclass(frozen=True)
class Lazy:
    """A tensor that is made only when its turn to be written comes, so that a file larger than memory can be written."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    make: Callable[[], Tensor]


@dataclass(frozen=True)
class Written:
    """What was written: bytes and the sha256 of the whole file, in hex (empty where none was asked for)."""

    size: int
    sha256: str


class _Hashing:
    def __init__(self, file: BinaryIO, checksum: bool) -> None:
        self.file, self.hash, self.size = file, hashlib.sha256() if checksum else None, 0

    def write(self, data: bytes | memoryview) -> None:
        self.file.write(data)
        if self.hash is not None:
            self.hash.update(data)
        self.size += len(data)


def tensor_bytes(tensor: Tensor) -> memoryview:
    """The tensor's raw little-endian bytes, copied to the host where it is not there already."""
    flat = tensor.detach().to("cpu").contiguous().reshape(-1)
    return memoryview(flat.view(torch.uint8).numpy()) if flat.numel() else memoryview(b"")


def writing_order(tensors: Mapping[str, Tensor | Lazy]) -> list[str]:
    """The order that tensors are made and written in: wide dtypes first, which keeps all aligned, then by name."""
    return sorted(tensors, key=lambda name: (-tensors[name].dtype.itemsize, name))


def write_tensors(file: BinaryIO, tensors: Mapping[str, Tensor | Lazy], metadata: Mapping[str, str] | None = None, *, checksum: bool = True) -> Written:
    """Write the safetensors layout to an open file, one tensor in memory at a time; checksum: see :class:`Written`."""
    header: dict[str, object] = {"__metadata__": dict(metadata)} if metadata else {}
    order = writing_order(tensors)
    offset = 0
    for name in order:
        size = tensors[name].dtype.itemsize
        for length in tensors[name].shape:
            size *= length
        header[name] = {"dtype": DTYPE_NAMES[tensors[name].dtype], "shape": list(tensors[name].shape), "data_offsets": [offset, offset + size]}
        offset += size
    text = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    out = _Hashing(file, checksum)
    out.write(struct.pack("<Q", len(text)) + text)
    for name in order:
        entry = tensors[name]
        tensor = entry.make() if isinstance(entry, Lazy) else entry
        assert tuple(tensor.shape) == tuple(entry.shape) and tensor.dtype == entry.dtype, name
        out.write(tensor_bytes(tensor))
    return Written(out.size, "" if out.hash is None else out.hash.hexdigest())


def sync_folder(folder: Path) -> None:
    """Make a rename inside the folder survive a power cut, where the system can."""
    if os.name == "nt":
        return  # Windows cannot open a folder for this
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_file(file: BinaryIO) -> None:
    """Push what was written to the disk itself."""
    file.flush()
    os.fsync(file.fileno())


def disk_error(error: OSError, path: Path, what: str) -> LtxTrainError | None:
    """The error to raise for a full disk or quota while writing ``what``, or None when it is something else."""
    if error.errno not in (errno.ENOSPC, errno.EFBIG, getattr(errno, "EDQUOT", errno.ENOSPC)):
        return None
    return RunError(
        "run.disk_full",
        f"The disk is full: {what} could not be written.",
        f"{path} has no room left. What was saved before is untouched. Free some space, then go on; the last good snapshot is used.",
    )


@contextmanager
def atomic_file(path: Path, what: str = "the file") -> Iterator[BinaryIO]:
    """A binary file that takes its name only when all of it is on the disk; on any error nothing is left.

    Raises RunError ``run.disk_full`` when the disk is full.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.tmp-{os.getpid()}")
    try:
        with open(temporary, "wb") as file:
            yield file
            sync_file(file)
        os.replace(temporary, path)
        sync_folder(path.parent)
    except BaseException as error:  # an interrupt too: half a file must not stay
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
        clear = disk_error(error, path.parent, what) if isinstance(error, OSError) else None
        if clear is not None:
            raise clear from error
        raise


def save_tensors(path: Path, tensors: Mapping[str, Tensor | Lazy], metadata: Mapping[str, str] | None = None, what: str = "the file") -> Written:
    """Write a safetensors file that appears at once or not at all."""
    with atomic_file(path, what) as file:
        return write_tensors(file, tensors, metadata)
