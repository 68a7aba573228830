"""How stored pixels are turned upright: display matrices of containers and frames, EXIF."""

from __future__ import annotations

import math
import os
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Orientation:
    """How stored pixels are turned upright: mirrored left-right first, then ``degrees`` clockwise (0, 90, 180, 270)."""

    degrees: int = 0
    mirrored: bool = False

    @property
    def swaps(self) -> bool:
        """True when width and height change places."""
        return self.degrees in (90, 270)

    @property
    def upright(self) -> bool:
        return self.degrees == 0 and not self.mirrored

    @classmethod
    def of_matrix(cls, a: int, b: int, c: int, d: int) -> Orientation:
        """From a display matrix (x' = a x + c y, y' = b x + d y), to the nearest quarter turn."""
        mirrored = a * d - b * c < 0
        angle = math.degrees(math.atan2(-b, -a) if mirrored else math.atan2(b, a))
        return cls(round(angle / 90) % 4 * 90, mirrored)


def exif_orientation(image: Any) -> Orientation:
    """The orientation of EXIF tag 274: 2, 4, 5, 7 are mirrored."""
    value = image.getexif().get(274, 1)
    table = {1: (0, False), 2: (0, True), 3: (180, False), 4: (180, True), 5: (270, True), 6: (90, False), 7: (90, True), 8: (270, False)}
    return Orientation(*table.get(value, (0, False)))


def frame_orientation(frame: Any) -> Orientation:
    """The display matrix that a decoded frame carries."""
    item = frame.side_data.get("DISPLAYMATRIX")  # by name, as PyAV 19 goes through names and those before through items
    if item is None:
        return Orientation()
    a, b, _, c, d = struct.unpack("<5i", bytes(item)[:20])
    return Orientation.of_matrix(a, b, c, d)


def _boxes(file: Any, end: int, wanted: bytes) -> Iterator[int]:
    """The ends of an MP4 level's boxes of one type; the file stands at the content of each."""
    while file.tell() + 8 <= end:
        start = file.tell()
        size, kind = struct.unpack(">I4s", file.read(8))
        if size == 1:
            size = struct.unpack(">Q", file.read(8))[0]
        stop = start + size if size else end
        if size and size < 8:
            return
        if kind == wanted:
            yield min(stop, end)
        file.seek(stop)


def mp4_orientation(path: Path, track: int) -> Orientation:
    """Matrix of the track header (ISO 14496-12, tkhd) of one track."""
    with open(path, "rb") as file:
        films = _boxes(file, os.fstat(file.fileno()).st_size, b"moov")
        tracks = (end for film in films for end in _boxes(file, film, b"trak"))
        found = (_tkhd(file.read(104), track) for end in tracks for _ in _boxes(file, end, b"tkhd"))
        return next((orientation for orientation in found if orientation is not None), Orientation())


def _tkhd(data: bytes, track: int) -> Orientation | None:
    wide = data[:1] == b"\1"
    at = 4 + (16 if wide else 8)
    if len(data) < at + 4 or struct.unpack(">I", data[at : at + 4])[0] != track:
        return None
    matrix = at + 4 + 4 + (8 if wide else 4) + 8 + 8
    a, b, _, c, d = struct.unpack(">5i", data[matrix : matrix + 20])
    return Orientation.of_matrix(a, b, c, d)
