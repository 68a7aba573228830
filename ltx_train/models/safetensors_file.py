"""One safetensors file: its header, its tensors read one at a time, and what can be wrong with it."""

from __future__ import annotations

import json
import math
import re
import struct
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from ..errors import CheckpointError, nearest

DTYPES: dict[str, torch.dtype] = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
}  # fmt: skip
if hasattr(torch, "float8_e8m0fnu"):
    DTYPES["F8_E8M0"] = torch.float8_e8m0fnu

_HEADER_LIMIT = 200_000_000


@dataclass(frozen=True)
class TensorInfo:
    """Shape and dtype of a tensor, known without reading it."""

    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True)
class _Span:
    info: TensorInfo
    begin: int  # absolute byte offsets in the file
    end: int


@dataclass(frozen=True)
class SafetensorsFile:
    """The header of one file; tensors are read from disk one by one, no handle stays open."""

    path: Path
    metadata: dict[str, str]
    spans: dict[str, _Span] = field(repr=False)

    @classmethod
    def open(cls, path: str | Path) -> SafetensorsFile:
        """Read and check the header. Raises CheckpointError for anything that is not a whole safetensors file."""
        path = checked_path(path)
        size = path.stat().st_size
        with path.open("rb") as file:
            start = file.read(512)
            length = _header_length(path, start, size)
            file.seek(8)
            raw = file.read(length)
        try:
            header = json.loads(raw)
        except (UnicodeDecodeError, json.JSONDecodeError, RecursionError):
            header = None
        if not isinstance(header, dict):
            raise CheckpointError("checkpoint.not_safetensors", f"{path.name} is not a safetensors file: its header is not readable.", _AGAIN)
        metadata = header.pop("__metadata__", None) or {}
        spans = {name: _span(path, name, entry, 8 + length) for name, entry in header.items()}
        base = 8 + length
        whole = max((s.end for s in spans.values()), default=base)
        if whole > size:
            raise CheckpointError(
                "checkpoint.truncated", f"{path.name} is cut short: {size:,} bytes of {whole:,}.", "The download or copy did not finish. " + _AGAIN
            )
        return cls(path, {str(k): str(v) for k, v in metadata.items()} if isinstance(metadata, dict) else {}, spans)

    def read(self, name: str) -> Tensor:
        """The stored tensor as it is, on the CPU."""
        span = self.spans[name]
        count = span.end - span.begin
        if count == 0:
            return torch.empty(span.info.shape, dtype=span.info.dtype)
        raw = torch.empty(count, dtype=torch.uint8)
        self.fill(name, raw)
        return raw.view(span.info.dtype).reshape(span.info.shape)

    def fill(self, name: str, buffer: Tensor, start: int = 0) -> None:
        """Read a tensor's bytes from ``start`` on into ``buffer`` [n] of bytes on the CPU; from any thread.

        Raises CheckpointError where the file ends before, or cannot be read.
        """
        into, at = memoryview(buffer.numpy()), 0
        try:
            with self.path.open("rb", buffering=0) as file:
                file.seek(self.spans[name].begin + start)
                while at < len(into) and (got := file.readinto(into[at:])):
                    at += got
        except OSError as error:
            raise CheckpointError("checkpoint.unreadable", f"{self.path.name} cannot be read: {error.strerror or error}.", f"It happened in the tensor {name}.") from error
        if at < len(into):
            raise CheckpointError("checkpoint.truncated", f"{self.path.name} ends inside the tensor {name}.", "The file changed on disk. " + _AGAIN)

    def peek(self, name: str, count: int) -> bytes:
        """The first ``count`` bytes of a tensor."""
        span = self.spans[name]
        with self.path.open("rb") as file:
            file.seek(span.begin)
            return file.read(min(count, span.end - span.begin))

    @property
    def nbytes(self) -> int:
        return sum(s.end - s.begin for s in self.spans.values())


_AGAIN = "Download the file again, whole."


def _span(path: Path, name: str, entry: object, base: int) -> _Span:
    """The place of one tensor; refuses an entry that does not say it, or says other bytes than its shape has."""
    try:
        kind, shape, (begin, end) = str(entry["dtype"]), tuple(int(n) for n in entry["shape"]), entry["data_offsets"]
        begin, end = int(begin), int(end)
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError("checkpoint.header", f"{path.name} is damaged: its header does not say where {name} lies.", _AGAIN) from error
    dtype = DTYPES.get(kind)
    if dtype is None:
        raise CheckpointError("checkpoint.dtype", f"{path.name} stores {name} as {kind}, which is not supported.", f"Known types: {', '.join(DTYPES)}.")
    if begin < 0 or end - begin != math.prod(shape) * dtype.itemsize:
        raise CheckpointError("checkpoint.header", f"{path.name} is damaged: {name} {list(shape)} {kind} cannot be {end - begin} bytes.", _AGAIN)
    return _Span(TensorInfo(shape, dtype), base + begin, base + end)


def checked_path(path: str | Path) -> Path:
    """An existing path, or a CheckpointError: a URL and a missing file each say so."""
    text = str(path)
    if re.match(r"^[A-Za-z][A-Za-z0-9+.-]+:/{1,2}[^/\\]", text):
        raise CheckpointError(
            "checkpoint.url", f"A model path must be a file on this machine, not a web address: {_short(text, 44)}",
            "Download the file first, then give its path. Nothing is downloaded on its own.",
        )  # fmt: skip
    path = Path(text).expanduser()
    if path.exists():
        return path
    near: list[str] = []
    if path.parent.is_dir():
        near = nearest(path.name, [p.name for p in path.parent.iterdir()])
    hint = f"Nearest in that folder: {', '.join(near)}." if near else ("The folder exists, the file does not." if path.parent.is_dir() else "The folder does not exist either.")
    raise CheckpointError("checkpoint.missing_file", f"Model file not found: {_short(text)}", f"{text}\n{hint}")


def _short(text: str, limit: int = 54) -> str:
    return text if len(text) <= limit else "..." + text[-limit:]


def _header_length(path: Path, start: bytes, size: int) -> int:
    """Length of the JSON header, after refusing what is not a safetensors file at all."""
    name = path.name
    if start.startswith(b"version https://git-lfs"):
        raise CheckpointError(
            "checkpoint.lfs_pointer", f"{name} is a Git LFS pointer of {size} bytes, not the model itself.",
            "Run `git lfs pull` in that repository, or download the file from its web page.",
        )  # fmt: skip
    if start.startswith(b"GGUF"):
        raise CheckpointError("checkpoint.gguf", f"{name} is a GGUF file, which cannot be trained on.", "Get the BF16 .safetensors file of the same model.")
    foreign = start[8:9] != b"{"  # else these bytes are only the header's length
    if foreign and start.startswith((b"PK\x03\x04", b"\x80\x02")):
        raise CheckpointError("checkpoint.not_safetensors", f"{name} is a pickled .pt/.ckpt file, not safetensors.", "Get the .safetensors file; pickles can run code and are not read.")
    if foreign and start.lstrip()[:1] == b"<":
        raise CheckpointError("checkpoint.not_safetensors", f"{name} is a web page, not a model file.", "The download saved an error or login page. " + _AGAIN)
    if len(start) < 9:
        raise CheckpointError("checkpoint.truncated" if size else "checkpoint.empty", f"{name} holds {size} bytes: it is no model file.", _AGAIN)
    (length,) = struct.unpack("<Q", start[:8])
    if foreign or length > _HEADER_LIMIT:
        raise CheckpointError("checkpoint.not_safetensors", f"{name} is not a safetensors file.", "Model files end in .safetensors. " + _AGAIN)
    if length + 8 > size:
        raise CheckpointError("checkpoint.truncated", f"{name} is cut short inside its header: {size:,} bytes.", "The download or copy did not finish. " + _AGAIN)
    return int(length)
