"""Writers of every awkward kind of clip, still and sound: turned, mirrored, HDR, interlaced, cut off, mislabelled."""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np

from .clips import Coding, counter_frame, encode, encode_tone, tone


def plain(n: int = 25, **more: Any) -> list[np.ndarray]:
    """The first ``n`` counter frames, each uint8 [H, W, 3]."""
    return [counter_frame(k, **more) for k in range(n)]


def simple(coding: Coding, rate: Fraction | int = 24, n: int = 25, **more: Any) -> Callable[[Path], object]:
    """``n`` counter frames, coded so."""
    return lambda path: encode(path, plain(n), Fraction(rate), coding, **more)


def turned(rotation: int) -> Callable[[Path], object]:
    """Stored so that the display matrix brings it upright: the picture is turned the other way first."""

    def write(path: Path) -> object:
        return encode(path, (np.rot90(f, -rotation // 90) for f in plain()), Fraction(24), Coding(rotation=rotation))

    return write


VFR = [n * 0.02 for n in range(20)] + [0.4 + n * 0.1 for n in range(20)]
"""Twenty frames of 20 ms, then twenty of 100 ms."""


def vfr_counters(rate: Fraction | int, count: int, times: Sequence[float] = VFR) -> tuple[int, ...]:
    """The frame at each slot of ``rate``: on screen then, or the next where that is nearer and under half a slot away."""
    found = []
    for k in range(count):
        now = k / float(rate)
        shown = max(n for n, t in enumerate(times) if t <= now + 1e-9)
        following = times[shown + 1] if shown + 1 < len(times) else float("inf")
        # half way (to 0.1 ms) the earlier one stays
        found.append(shown + int(following - now <= min((following - times[shown]) / 2 - 1e-4, 0.5 / float(rate))))
    return tuple(found)


def cut(writer: Callable[[Path], object], share: float) -> Callable[[Path], object]:
    """The first ``share`` of the bytes of a file."""

    def write(path: Path) -> None:
        writer(path)
        data = path.read_bytes()
        path.write_bytes(data[: int(len(data) * share)])

    return write


def exif(orientation: int) -> Callable[[Path], object]:
    """A JPEG stored so that its EXIF orientation brings it upright."""
    undo = {1: lambda a: a, 2: np.fliplr, 3: lambda a: np.rot90(a, 2), 4: np.flipud, 5: lambda a: a.transpose(1, 0, 2), 6: lambda a: np.rot90(a, 1), 7: lambda a: np.rot90(a, 2).transpose(1, 0, 2), 8: lambda a: np.rot90(a, -1)}  # fmt: skip

    def write(path: Path) -> None:
        from PIL import Image

        image = Image.fromarray(np.ascontiguousarray(undo[orientation](counter_frame(5))))
        tags = Image.Exif()
        tags[274] = orientation
        image.save(path, quality=95, exif=tags)

    return write


def still(mode: str, **save: Any) -> Callable[[Path], object]:
    """Frame 5 as a picture of a Pillow mode, or ``half``: half of it transparent."""

    def write(path: Path) -> None:
        from PIL import Image

        image = Image.fromarray(counter_frame(5))
        if mode == "I;16":
            grey = np.asarray(image.convert("L")).astype(np.uint16) * 257
            image = Image.fromarray(grey)
        elif mode == "half":  # left half transparent
            pixels = np.dstack([np.asarray(image), np.full((96, 128), 255, np.uint8)])
            pixels[48:, :64, 3] = 0
            image = Image.fromarray(pixels)
        else:
            image = image.convert(mode) if mode != "P" else image.quantize(64)
        image.save(path, **save)

    return write


def animation(path: Path) -> None:
    from PIL import Image

    frames = [Image.fromarray(f) for f in plain(12)]
    options: dict[str, Any] = {"lossless": True} if path.suffix == ".webp" else {}
    frames[0].save(path, save_all=True, append_images=frames[1:], duration=40, loop=0, **options)


def surround(layout: str, codec: str = "aac") -> Callable[[Path], object]:
    """5.1 or 7.1 with tones in front left and front right only."""
    channels = {"5.1": 6, "7.1": 8, "mono": 1, "quad": 4}[layout]
    tones = [440.0, 660.0] + [0.0] * (channels - 2) if channels > 2 else [440.0]
    return lambda path: encode(path, plain(), Fraction(24), Coding(layout=layout, audio_codec=codec), sound=tone(25 / 24, 48000, tones), sound_rate=48000)


def with_tone(rate: int = 48000, seconds: float = 25 / 24, start: float = 0.25, **coding: Any) -> Callable[[Path], object]:
    return lambda path: encode(path, plain(), Fraction(24), Coding(**coding), sound=tone(seconds, rate, onset=start), sound_rate=rate)


def mirrored(path: Path) -> None:
    """Stored mirrored, with a display matrix that mirrors it back (as front cameras do)."""
    import av

    with av.open(str(path), "w") as container:
        video = container.add_stream("libx264", rate=24, options={"crf": "12", "preset": "ultrafast"})
        video.width, video.height, video.pix_fmt = 128, 96, "yuv420p"
        video.set_display_matrix([-(1 << 16), 0, 0, 0, 1 << 16, 0, 128 << 16, 0, 1 << 30])
        for n in range(25):
            container.mux(video.encode(av.VideoFrame.from_ndarray(np.ascontiguousarray(counter_frame(n)[:, ::-1]), "rgb24")))
        container.mux(video.encode(None))


def restarted_clock(path: Path) -> None:
    """Two transport streams one after the other: the clock starts again in the middle."""
    parts = [path.with_name(f"_{path.stem}{n}.ts") for n in range(2)]
    for n, part in enumerate(parts):
        encode(part, (counter_frame(25 * n + k) for k in range(25)), 24)
    path.write_bytes(b"".join(part.read_bytes() for part in parts))
    for part in parts:
        part.unlink()


def damaged(path: Path) -> None:
    """A sixth of the bytes in the middle overwritten: the headers are whole."""
    random = np.random.default_rng(0)
    encode(path, (np.clip(counter_frame(n).astype(int) // 2 + random.integers(0, 127, (96, 128, 3)), 0, 255).astype(np.uint8) for n in range(25)), 24)
    data = bytearray(path.read_bytes())
    start, length = len(data) // 10, len(data) // 6
    data[start : start + length] = random.bytes(length)
    path.write_bytes(bytes(data))


def song_with_cover(path: Path) -> None:
    """An MP3 with a picture in its ID3 tag, which is no video."""
    import io

    from PIL import Image

    encode(path, [], 24, Coding(audio_codec="libmp3lame"), sound=tone(2.0, 44100, onset=0.25), sound_rate=44100)
    picture = io.BytesIO()
    Image.fromarray(counter_frame(1)).save(picture, "PNG")
    body = b"\0image/png\0\3\0" + picture.getvalue()
    frame = b"APIC" + struct.pack(">I", len(body)) + b"\0\0" + body
    size = bytes((len(frame) >> shift) & 0x7F for shift in (21, 14, 7, 0))
    song = path.read_bytes()
    if song[:3] == b"ID3":  # the muxer's own tag
        song = song[10 + (song[6] << 21 | song[7] << 14 | song[8] << 7 | song[9]) :]
    path.write_bytes(b"ID3\3\0\0" + size + frame + song)


def interlaced(path: Path) -> None:
    """Each stored frame weaves two moments; the counter of both fields is the same, the block below differs."""
    coding = Coding(options={"crf": "8", "preset": "ultrafast", "x264-params": "tff=1"})
    encode(path, plain(), Fraction(24), coding)


HLG_GREY, PQ_GREY = 0.75, 0.5806888818740845
"""Signals of 203 nits reference white in HLG (75 %) and PQ (58 %), ITU-R BT.2408."""


def hdr(transfer: int, signal: float) -> Callable[[Path], object]:
    """A 10-bit HEVC clip whose lower half is neutral reference white."""

    def write(path: Path) -> object:
        frames = []
        for n in range(25):
            frame = counter_frame(n).astype(np.float32) / 255.0
            frame[:48] *= 0.75
            frame[48:] = signal
            frames.append(np.rint(frame * 65535).astype(np.uint16))
        coding = Coding("libx265", "yuv420p10le", {"crf": "8", "preset": "ultrafast", "x265-params": "log-level=none"}, tags=(9, 9, transfer, 1))
        return encode(path, frames, Fraction(24), coding, source="rgb48le")

    return write


WIDE_COLOUR = (200, 70, 40)
"""What a BT.709 display shows of the lower half of the wide-gamut clips."""

_709_TO_WIDE = {9: ((0.627404, 0.329283, 0.043313), (0.069097, 0.919540, 0.011362), (0.016391, 0.088013, 0.895595)),
                12: ((0.822462, 0.177538, 0.0), (0.033194, 0.966806, 0.0), (0.017083, 0.072397, 0.910520))}  # fmt: skip


def wide(primaries: int) -> Callable[[Path], object]:
    """A 10-bit standard-range HEVC clip in BT.2020 (9) or Display P3 (12) whose lower half is WIDE_COLOUR."""

    def write(path: Path) -> object:
        light = np.array(_709_TO_WIDE[primaries]) @ (np.array(WIDE_COLOUR) / 255) ** 2.4
        frames = []
        for n in range(25):
            frame = counter_frame(n).astype(np.float64) / 255.0
            frame[48:] = light ** (1 / 2.4)
            frames.append(np.rint(frame * 65535).astype(np.uint16))
        tags = (9, 9, 14, 1) if primaries == 9 else (1, 12, 1, 1)
        coding = Coding("libx265", "yuv444p10le", {"crf": "4", "preset": "ultrafast", "x265-params": "log-level=none"}, tags=tags)
        return encode(path, frames, Fraction(24), coding, source="rgb48le")

    return write


def alpha_video(codec: str, pixel_format: str, options: dict[str, str]) -> Callable[[Path], object]:
    """The left lower quarter is transparent."""

    def write(path: Path) -> object:
        frames = []
        for n in range(25):
            frame = np.dstack([counter_frame(n), np.full((96, 128), 255, np.uint8)])
            frame[48:, :64, 3] = 0
            frames.append(frame)
        return encode(path, frames, Fraction(24), Coding(codec, pixel_format, options), source="rgba")

    return write


def two_streams(path: Path) -> None:
    """Two sound streams: the first, which is the default, has 440/660 Hz, the second 880 Hz."""
    import av

    with av.open(str(path), "w") as container:
        video = container.add_stream("libx264", rate=24, options={"crf": "12", "preset": "ultrafast"})
        video.width, video.height, video.pix_fmt = 128, 96, "yuv420p"
        streams = [container.add_stream("aac", rate=48000, layout="stereo") for _ in range(2)]
        for n in range(25):
            container.mux(video.encode(av.VideoFrame.from_ndarray(counter_frame(n), "rgb24")))
        container.mux(video.encode(None))
        for stream, tones in zip(streams, ((440.0, 660.0), (880.0, 880.0))):
            encode_tone(container, stream, tone(25 / 24, 48000, tones), 48000, Coding())


def not_a_video(path: Path) -> None:
    """Words under any name."""
    path.write_text("this is no video at all, whatever the name says\n" * 20, encoding="utf-8")


def png_bytes(path: Path) -> None:
    """A PNG under any name."""
    from PIL import Image

    Image.fromarray(counter_frame(5)).save(path, format="PNG")


def renamed(path: Path, extension: str, coding: Coding) -> None:
    """A clip of another container than its name says."""
    made = path.with_name(f"_{path.stem}{extension}")
    encode(made, plain(), Fraction(24), coding)
    made.replace(path)
