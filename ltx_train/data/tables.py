"""Dataset files as people edit them: json, jsonl, csv or a pair of txt files, read with all their columns, written at once."""

from __future__ import annotations

import csv
import io
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..errors import ConfigError, DataError
from .columns import cell_path, relative_name
from .texts import read_rows, read_text

FORMATS = (".json", ".jsonl", ".csv", ".txt")


class Table:
    """Rows of named columns in a file; a row is found by the media file it is about, whatever way its path is written."""

    def __init__(self, path: Path, rows: list[dict[str, Any]] | None = None) -> None:
        self.path = Path(path).expanduser().absolute()
        if self.path.suffix.lower() not in FORMATS:
            raise ConfigError("table.format", f"A dataset file cannot be written as '{self.path.suffix}'.", f"Use one of {', '.join(FORMATS)}.")
        self.rows = rows if rows is not None else []
        self._index = {key: n for n, row in enumerate(self.rows) if (key := self._key_of(row))}

    @classmethod
    def read(cls, path: str | Path) -> Table:
        """The table of a file, empty where there is none; raises DataError when what is there is no dataset file."""
        path = Path(path).expanduser()
        if path.suffix.lower() == ".txt":
            return cls(path, _read_pair(path))
        if not path.is_file():
            return cls(path)
        rows = read_rows(path)
        faults = [row.fault for row in rows if row.fault] + (_surplus(path) if path.suffix.lower() == ".csv" else [])
        if faults:
            raise DataError("table.broken", f"{path.name} is damaged: {faults[0]}"[:118], "Correct that line: the file is not written over while it cannot be read whole.")
        return cls(path, [dict(row.columns) for row in rows])

    def get(self, media: Path) -> dict[str, Any] | None:
        """The row about a media file."""
        found = self._index.get(_key(media))
        return None if found is None else self.rows[found]

    def set(self, media: Path, values: Mapping[str, Any]) -> None:
        """Set columns of the row about a media file; a new row is added at the end. Other columns stay."""
        row = self.get(media)
        if row is None:
            self._index[_key(media)] = len(self.rows)
            row = {"media_path": self.relative(media)}
            self.rows.append(row)
        row.update(values)

    def relative(self, path: Path) -> str:
        """A path as it is written in this file: from its folder where that is possible, with forward slashes."""
        return relative_name(Path(path).absolute(), self.path.parent)

    def write(self) -> None:
        """Write the file (two for .txt) at once or not at all."""
        for path, text in self._texts():
            path.parent.mkdir(parents=True, exist_ok=True)
            temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
            try:
                temporary.write_text(text, encoding="utf-8", newline="")
                os.replace(temporary, path)
            finally:
                temporary.unlink(missing_ok=True)

    def _texts(self) -> list[tuple[Path, str]]:
        kind = self.path.suffix.lower()
        if kind == ".jsonl":
            return [(self.path, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in self.rows))]
        if kind == ".json":
            return [(self.path, json.dumps(self.rows, ensure_ascii=False, indent=2) + "\n")]
        if kind == ".txt":
            captions, paths = _pair(self.path)
            lines = [" ".join(str(row.get("caption", "")).split()) for row in self.rows]
            return [(captions, "".join(line + "\n" for line in lines)), (paths, "".join(f"{row['media_path']}\n" for row in self.rows))]
        columns = list(dict.fromkeys(name for row in self.rows for name in row))
        out = io.StringIO(newline="")
        delimiter = _delimiter(read_text(self.path).value) if self.path.is_file() else ","
        writer = csv.DictWriter(out, columns, restval="", delimiter=delimiter, lineterminator="\n")
        writer.writeheader()
        writer.writerows(self.rows)
        return [(self.path, out.getvalue())]

    def _key_of(self, row: Mapping[str, Any]) -> str | None:
        media = cell_path(self.path, row, "video") or cell_path(self.path, row, "audio")
        return None if media is None else _key(media)


def _key(media: Path) -> str:
    return os.path.normcase(os.path.abspath(media))


def _delimiter(text: str) -> str:
    """The one that the first line has most of (as :func:`read_rows` takes it)."""
    return max(",;\t|", key=text.split("\n", 1)[0].count)


def _surplus(path: Path) -> list[str]:
    """Rows of a CSV with more cells than columns: writing them back would lose the rest of a text with an unquoted comma."""
    text = read_text(path).value
    rows = [row for row in csv.reader(io.StringIO(text, newline=""), delimiter=_delimiter(text), skipinitialspace=True) if row]
    return [f"row {n} has more cells than columns; put a text with commas in quotes" for n, row in enumerate(rows[1:], 1) if len(row) > len(rows[0])]


def _pair(path: Path) -> tuple[Path, Path]:
    return path.with_name(f"{path.stem}_captions.txt"), path.with_name(f"{path.stem}_paths.txt")


def _read_pair(path: Path) -> list[dict[str, Any]]:
    captions, paths = _pair(path)
    if not captions.is_file() or not paths.is_file():
        return []
    first, second = (read_text(p).value.splitlines() for p in (captions, paths))
    if len(first) != len(second):
        raise DataError("table.broken", f"{captions.name} has {len(first)} lines, {paths.name} {len(second)}.", "They must have one line a clip each: correct or remove them.")
    return [{"media_path": media, "caption": caption} for caption, media in zip(first, second)]
