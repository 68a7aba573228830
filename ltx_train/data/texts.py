"""Text of the user's files: any usual encoding, CSV, JSON and JSONL rows, caption cleaning."""

from __future__ import annotations

import codecs
import csv
import io
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import DataError

BOMS = (
    (codecs.BOM_UTF32_LE, "utf-32"),
    (codecs.BOM_UTF32_BE, "utf-32"),
    (codecs.BOM_UTF8, "utf-8-sig"),
    (codecs.BOM_UTF16_LE, "utf-16"),
    (codecs.BOM_UTF16_BE, "utf-16"),
)


@dataclass(frozen=True)
class Text:
    """Decoded text, the encoding it was in, and whether that was a guess."""

    value: str
    encoding: str
    guessed: bool = False


def decode_text(raw: bytes) -> Text:
    """Decode what editors save: UTF-8 with or without mark, UTF-16/32 with mark, UTF-16 without, else Windows-1252."""
    for mark, encoding in BOMS:
        if raw.startswith(mark):
            return Text(raw.decode(encoding, errors="replace").lstrip("\ufeff"), encoding)
    head = raw[:4096]
    if head.count(0) * 4 > len(head):  # every other byte of plain letters; one stray zero is none
        encoding = "utf-16-le" if head[1::2].count(0) >= head[0::2].count(0) else "utf-16-be"
        return Text(raw.decode(encoding, errors="replace"), encoding)
    try:
        return Text(raw.decode("utf-8"), "utf-8")
    except UnicodeDecodeError:
        pass  # not UTF-8: Windows' own code page of most European systems
    try:
        return Text(raw.decode("cp1252"), "cp1252", guessed=True)
    except UnicodeDecodeError:
        return Text(raw.decode("latin-1"), "latin-1", guessed=True)


def read_text(path: Path) -> Text:
    """The text of a file; see :func:`decode_text`."""
    return decode_text(path.read_bytes())


@dataclass(frozen=True)
class Row:
    """One row of a dataset file: its number (1 = first) and columns by lower-case name, or a fault."""

    number: int
    columns: Mapping[str, Any]
    fault: str = ""


def _columns(values: Mapping[Any, Any]) -> dict[str, Any]:
    return {str(k).strip().lower().lstrip("\ufeff"): v for k, v in values.items() if k is not None}


def _csv_rows(text: str) -> list[Row]:
    head = text.split("\n", 1)[0]
    delimiter = max(",;\t|", key=head.count)
    text = text.replace("\0", "")
    reader = csv.DictReader(io.StringIO(text, newline=""), delimiter=delimiter, skipinitialspace=True)
    before = csv.field_size_limit(max(csv.field_size_limit(), len(text) + 1))  # a long caption is found by the report, not refused by the reader
    try:
        _check_quotes(text, delimiter)
        return [Row(n, _columns(values)) for n, values in enumerate(reader, 1) if any(v for k, v in values.items() if k is not None)]
    finally:
        csv.field_size_limit(before)


def _check_quotes(text: str, delimiter: str) -> None:
    """Refuse a table whose last cell never ends: a quote that is not closed swallows all rows after it without a word."""
    reader, line = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter, skipinitialspace=True, strict=True), 1
    try:
        for _ in reader:
            line = reader.line_num + 1
    except csv.Error as error:
        if "end of data" in str(error):
            raise DataError("dataset.csv", f"A quote opened in line {line} of the table is never closed.", 'Close it, or write a quote inside a caption twice ("").') from error


def _json_rows(data: Any) -> list[Row]:
    if isinstance(data, Mapping):
        lists = [v for k, v in data.items() if isinstance(v, list) and str(k).lower() in ("data", "clips", "items", "samples", "videos", "train")]
        if lists:
            data = lists[0]
        elif all(isinstance(v, (str, Mapping)) for v in data.values()) and not ({str(k).lower() for k in data} & {"caption", "video", "media_path"}):
            # {"a.mp4": "caption"} and {"a.mp4": {"caption": ...}} (kohya's metadata form)
            data = [{"media_path": k, **({"caption": v} if isinstance(v, str) else v)} for k, v in data.items()]
        else:
            data = [data]
    rows = []
    for n, item in enumerate(data if isinstance(data, list) else [], 1):
        rows.append(Row(n, _columns(item)) if isinstance(item, Mapping) else Row(n, {}, f"row {n} is {type(item).__name__}, not an object"))
    return rows


def parse_json(text: str) -> Any:
    """The value of a JSON text; every fault of it is a JSONDecodeError, a number of thousands of digits and endless nesting too."""
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        raise
    except RecursionError as error:
        raise json.JSONDecodeError("it is nested too deeply to be a dataset", text, 0) from error
    except ValueError as error:  # Python reads no number of more than 4300 digits
        raise json.JSONDecodeError("a number has too many digits", text, 0) from error


def _jsonl_rows(text: str) -> list[Row]:
    rows = []
    lines = re.split(r"\r\n|\n|\r", text)  # not splitlines(): a caption may hold U+2028, which JSON does not escape
    for n, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            item = parse_json(line)
        except json.JSONDecodeError as error:
            rows.append(Row(n, {}, f"line {n} is not JSON: {error.msg} at column {error.colno}"))
            continue
        rows.append(Row(n, _columns(item)) if isinstance(item, dict) else Row(n, {}, f"line {n} is no JSON object"))
    return rows


def read_rows(path: Path) -> list[Row]:
    """The rows of a .csv, .tsv, .json or .jsonl file in any encoding of :func:`decode_text`."""
    text = read_text(path).value
    if path.suffix.lower() in (".csv", ".tsv"):
        return _csv_rows(text)
    if path.suffix.lower() == ".json":
        try:
            return _json_rows(parse_json(text))
        except json.JSONDecodeError as error:
            if not text.strip():
                return []
            rows = _jsonl_rows(text)  # JSON lines saved under .json
            if rows and not any(row.fault for row in rows):
                return rows
            raise DataError(
                "dataset.json", f"{path.name} is not valid JSON: {error.msg} in line {error.lineno}.", "Correct that line, or save one object a line as .jsonl."
            ) from error
    return _jsonl_rows(text)


_UNSEEN = " \t\r\n\f\v\0\u00a0\u200b\u200c\u200d\u2028\u2029\u2060\ufeff"


def written_text(text: str) -> str:
    """A caption without unseen signs around it; half a character (a JSON escape cut in two) becomes U+FFFD, which can be stored."""
    return re.sub("[\ud800-\udfff]", "\ufffd", text).strip(_UNSEEN).strip()


_OPENER = r"(?:the|this|a|an)\s+(?:video|clip|image|scene|footage|animation|picture|photo|photograph|shot|film|frame)(?:\s+(?:clip|footage|sequence))?"
_VERB = r"(?:shows?|depicts?|features?|captures?|presents?|portrays?|displays?|illustrates?|begins\s+with|opens\s+with|starts\s+with|contains?|is\s+of|of)"
_PREFIX = re.compile(rf"^\s*(?:(?:in|throughout)\s+{_OPENER}\s*,\s*(?:we\s+(?:can\s+)?see\s+)?|{_OPENER}\s+{_VERB}\s+|we\s+(?:can\s+)?see\s+|here\s+is\s+)(?:that\s+)?", re.IGNORECASE)


def clean_prefix(caption: str) -> str:
    """Strip what captioning models begin with ("This video shows a cat" -> "a cat")."""
    return _PREFIX.sub("", caption, count=1)


def caption_words(stem: str) -> str:
    """A caption from a file name: separators to spaces, a trailing counter dropped."""
    words = re.sub(r"[_\-.+]+", " ", stem).strip()
    return re.sub(r"\s*\(?\d+\)?$", "", words).strip() or words
