"""The tensor lists of published checkpoints (tests/data/checkpoints), expanded to one entry a tensor."""

from __future__ import annotations

import json
import re
from functools import cache
from pathlib import Path

from ltx_train.models.families import TRANSFORMER_PREFIX, Family, TransformerConfig, detect_family, parse_config, transformer_config

DATA = Path(__file__).parent / "data" / "checkpoints"


def _numbers(group: str) -> list[str]:
    found: list[str] = []
    for item in group.split(","):
        first, _, last = item.partition("-")
        found += [str(n) for n in range(int(first), int(last or first) + 1)]
    return found


@cache
def table(name: str) -> dict[str, tuple[tuple[int, ...], str, str]]:
    """Tensor name -> (shape, safetensors dtype, component) of one list; ``{0-47}`` in a name stands for all its blocks."""
    entries: dict[str, tuple[tuple[int, ...], str, str]] = {}
    for line in (DATA / f"{name}.tensors.tsv").read_text(encoding="utf-8").splitlines()[1:]:
        pattern, shape, dtype, component = line.split("\t")
        size = json.loads(shape)
        size = tuple(64 if isinstance(n, str) else n for n in size)  # "n bytes": a stored file
        names = [pattern]
        while "{" in names[0]:
            names = [re.sub(r"\{[^}]*\}", n, p, count=1) for p in names for n in _numbers(re.search(r"\{([^}]*)\}", p).group(1))]
        for entry in names:
            entries[(component + "|" if entry in entries else "") + entry] = (size, dtype, component)
    return entries


def shapes(name: str, *components: str) -> dict[str, tuple[int, ...]]:
    """Tensor name -> shape of the given components (by prefix of the component's name), or of all."""
    return {n.rpartition("|")[2]: s for n, (s, _, c) in table(name).items() if not components or c.startswith(components)}


def detect(tensors: dict[str, tuple[int, ...]], metadata: dict | None = None) -> tuple[Family, TransformerConfig]:
    """Family and config of these tensors, with or without the transformer's prefix, in a file of this metadata."""
    bare = {n.removeprefix(TRANSFORMER_PREFIX): s for n, s in tensors.items() if n.startswith(TRANSFORMER_PREFIX)} or tensors
    family = detect_family(bare)
    return family, transformer_config(family, bare, parse_config(metadata).get("transformer") or {})


def write_hollow(path: Path, entries: dict[str, tuple[tuple[int, ...], str]], metadata: dict[str, str] | None = None) -> Path:
    """A safetensors file of full size on paper and a few kilobytes on disk: a real header, then a hole (a sparse file)."""
    width = {"F32": 4, "BF16": 2, "F16": 2, "U8": 1, "I8": 1, "F8_E4M3": 1}
    header: dict[str, object] = {"__metadata__": metadata} if metadata else {}
    offset = 0
    for name, (shape, dtype) in entries.items():
        size = width[dtype]
        for n in shape:
            size *= n
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [offset, offset + size]}
        offset += size
    raw = json.dumps(header).encode()
    with path.open("wb") as file:
        file.write(len(raw).to_bytes(8, "little") + raw)
        file.truncate(8 + len(raw) + offset)
    return path
