"""The contact sheet: one picture of a run's previews, a row a prompt and a column a step, with the reference at the left."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from .decode import KEPT
from .runs.events import SampleEvent
from .tensorfile import atomic_file

if TYPE_CHECKING:
    from PIL.Image import Image
    from PIL.ImageDraw import ImageDraw
    from PIL.ImageFont import FreeTypeFont, ImageFont

NAME = "contact_sheet.png"
CELL = 224
"""Pixels that a thumbnail's longer side takes."""
MOST_STEPS = 8
"""Columns at most: the first, the last, and those between spread evenly."""

_GAP, _HEAD, _TEXT = 10, 34, 240
_PAPER, _INK, _FAINT, _LINE = (250, 250, 248), (28, 28, 30), (120, 120, 124), (214, 214, 210)
_WAVE = (52, 101, 164)


@dataclass(frozen=True)
class Sheet:
    """What a sheet shows. files: (step, row) -> preview. prompts and references by row."""

    title: str
    steps: tuple[int, ...]
    prompts: Mapping[int, str]
    files: Mapping[tuple[int, int], Path]
    references: Mapping[int, Path]


def write_contact_sheet(run: Path, events: Iterable[SampleEvent], references: Mapping[int, Path] | None = None) -> Path | None:
    """Draw the sheet of a run's samples to ``samples/contact_sheet.png``; None when there is no sample.

    references: by sample, a picture or clip to show beside its row.
    """
    files: dict[tuple[int, int], Path] = {}
    prompts: dict[int, str] = {}
    for event in events:
        files[event.step, event.index] = run / event.path
        prompts[event.index] = event.prompt
    if not files:
        return None
    shown = {row: path for row, path in (references or {}).items() if row in prompts}
    sheet = Sheet(run.name, chosen_steps({step for step, _ in files}), dict(sorted(prompts.items())), files, shown)
    path = run / "samples" / NAME
    with atomic_file(path, "the contact sheet") as file:
        draw(sheet).save(file, format="PNG", optimize=True)
    return path


def chosen_steps(steps: Iterable[int], most: int = MOST_STEPS) -> tuple[int, ...]:
    """At most ``most`` of the steps, the first and last among them, evenly spread."""
    found = sorted(steps)
    if len(found) <= most:
        return tuple(found)
    return tuple(found[round(i * (len(found) - 1) / (most - 1))] for i in range(most))


def draw(sheet: Sheet) -> Image:
    """The picture of a sheet."""
    from PIL import Image, ImageDraw

    columns = [("reference", None)] * bool(sheet.references) + [("step 0 (base model)" if s == 0 else f"step {s}", s) for s in sheet.steps]
    cells = {(row, i): _cell(sheet, row, step) for row in sheet.prompts for i, (_, step) in enumerate(columns)}
    heights = {row: max([90, *(c.height for i in range(len(columns)) if (c := cells[row, i]) is not None)]) for row in sheet.prompts}
    width = _TEXT + len(columns) * (CELL + _GAP) + _GAP
    height = 2 * _HEAD + sum(h + 2 * _GAP for h in heights.values()) + _GAP
    canvas = Image.new("RGB", (width, height), _PAPER)
    pen = ImageDraw.Draw(canvas)
    pen.text((_GAP, 8), sheet.title, fill=_INK, font=_font(18))
    for i, (label, _) in enumerate(columns):
        pen.text((_TEXT + i * (CELL + _GAP) + 2, _HEAD + 8), label, fill=_INK, font=_font(15))
    top = 2 * _HEAD
    for number, (row, prompt) in enumerate(sheet.prompts.items()):
        pen.line([(0, top), (width, top)], fill=_LINE)
        _prompt(pen, number + 1, prompt, top + _GAP, heights[row])
        for i, (_, step) in enumerate(columns):
            left, cell = _TEXT + i * (CELL + _GAP), cells[row, i]
            if cell is None and step is None:
                continue  # this prompt has no reference
            if cell is None:
                pen.text((left + 2, top + _GAP), "no sample", fill=_FAINT, font=_font(13))
            else:
                canvas.paste(cell, (left, top + _GAP))
        top += heights[row] + 2 * _GAP
    return canvas


MOST_LETTERS = 500
"""Of a prompt, more than a row has room for: measuring them takes time."""


def _prompt(pen: ImageDraw, number: int, prompt: str, top: int, height: int) -> None:
    """The row's number and prompt, wrapped and cut to the row's height."""
    words = " ".join(prompt[:MOST_LETTERS].split())
    lines = _wrapped(f"{number}. {words or '(empty prompt)'}", _font(14), _TEXT - 3 * _GAP)
    room = max(1, height // 18)
    if len(lines) > room:
        lines = [*lines[: room - 1], lines[room - 1][:-3] + "..."]
    for i, line in enumerate(lines):
        pen.text((_GAP, top + 18 * i), line, fill=_INK, font=_font(14))


def _wrapped(text: str, font: FreeTypeFont | ImageFont, width: int) -> list[str]:
    """Lines of at most ``width`` pixels, broken at spaces, or inside a word (or a script without spaces) that is longer."""
    lines, line = [], ""
    for word in text.replace("\n", " ").split(" "):
        longer = f"{line} {word}" if line else word
        if font.getlength(longer) <= width:
            line = longer
            continue
        if line:
            lines.append(line)
        while font.getlength(word) > width:
            cut = max(1, next(n for n in range(len(word), 0, -1) if font.getlength(word[:n]) <= width or n == 1))
            lines.append(word[:cut])
            word = word[cut:]
        line = word
    return [*lines, line]


def _cell(sheet: Sheet, row: int, step: int | None) -> Image | None:
    """The thumbnail of a preview (or of the row's reference), None where there is none."""
    path = sheet.references.get(row) if step is None else sheet.files.get((step, row))
    if path is None:
        return None
    try:
        return thumbnail(path)
    except (OSError, ValueError) as error:
        return _card("not readable", str(error)[:60])


def thumbnail(path: Path) -> Image:
    """A picture, the middle frame of a clip, the shape of a sound, or a card that says latents were kept."""
    from PIL import Image, ImageOps

    if path.name.endswith(KEPT):
        return _card("latents kept", "not decoded yet")
    if path.suffix.lower() in (".mp4", ".mov", ".mkv", ".webm", ".avi", ".m4v", ".gif"):
        picture = Image.fromarray(middle_frame(path))
    elif path.suffix.lower() in (".wav", ".flac", ".mp3", ".ogg", ".m4a"):
        return _sound(path)
    else:
        with Image.open(path) as opened:
            picture = ImageOps.exif_transpose(opened).convert("RGB")
    scale = CELL / max(picture.size)
    return picture.resize((max(1, round(picture.width * scale)), max(1, round(picture.height * scale))), Image.Resampling.LANCZOS)


def middle_frame(path: Path) -> np.ndarray:
    """The frame [H, W, 3] uint8 in the middle of a clip. Raises ValueError for one without pictures."""
    import av

    with av.open(str(path)) as clip:
        if not clip.streams.video:
            raise ValueError("no picture")
        stream = clip.streams.video[0]
        count = stream.frames or sum(1 for _ in clip.decode(stream))
        clip.seek(0)
        for index, frame in enumerate(clip.decode(stream)):
            if index >= (count - 1) // 2:
                return frame.to_ndarray(format="rgb24")
    raise ValueError("no frame")


def _sound(path: Path) -> Image:
    """The envelope of a sound."""
    import av
    from PIL import Image, ImageDraw

    with av.open(str(path)) as clip:
        resampler = av.AudioResampler(format="fltp", layout="mono", rate=8000)
        parts = [f.to_ndarray()[0] for frame in clip.decode(audio=0) for f in resampler.resample(frame)]
    wave = np.abs(np.concatenate(parts)) if parts else np.zeros(1)
    picture = Image.new("RGB", (CELL, CELL // 2), (255, 255, 255))
    pen = ImageDraw.Draw(picture)
    middle, loudest = CELL // 4, max(float(wave.max()), 1e-4)
    for x, part in enumerate(np.array_split(wave, CELL)):
        tall = max(1, round(float(part.max()) / loudest * (middle - 4))) if len(part) else 1
        pen.line([(x, middle - tall), (x, middle + tall)], fill=_WAVE)
    return picture


def _card(head: str, below: str) -> Image:
    from PIL import Image, ImageDraw

    card = Image.new("RGB", (CELL, CELL // 2), (236, 236, 232))
    pen = ImageDraw.Draw(card)
    pen.text((12, 30), head, fill=_INK, font=_font(16))
    pen.text((12, 56), "\n".join(textwrap.wrap(below, 30)), fill=_FAINT, font=_font(12))
    return card


def _font(size: int) -> FreeTypeFont | ImageFont:
    """A font that knows the writing systems of prompts where the machine has one, else Pillow's own."""
    from PIL import ImageFont

    for name in ("NotoSansCJK-Regular.ttc", "DejaVuSans.ttf", "arial.ttf", "Arial.ttf"):
        try:
            return ImageFont.truetype(name, size)
        except OSError:
            continue
    try:
        return ImageFont.load_default(size)
    except TypeError:  # Pillow before 10.1 has one size
        return ImageFont.load_default()
