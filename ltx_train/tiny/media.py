"""A corpus of every awkward kind of clip, with what must be read from each; and the synthetic clips it is made of."""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np

from .clips import (
    LEFT,
    RIGHT,
    Coding,
    corner_colours,
    counter_clip,
    counter_frame,
    dataset,
    encode,
    encode_tone,
    frequency,
    many_tiny_files,
    onset,
    read_counter,
    tone,
    write_pcm,
)  # fmt: skip

__all__ = [
    "LEFT", "RIGHT", "Coding", "Expected", "Kind", "corner_colours", "corpus", "counter_clip", "counter_frame", "dataset", "encode", "frequency", "many_tiny_files",
    "onset", "read_counter", "tone", "vfr_counters", "write_corpus", "write_pcm",
]  # fmt: skip


@dataclass(frozen=True)
class Expected:
    """What reading a corpus file must give, at 24 frames a second and in whole pictures, or the finding that names it.

    refused: the finding that makes it unusable. notes: findings that must be there. counters: the numbers of the first
    frames read. fps: the true rate. shape: upright width x height. left, right: colours of the lower half.
    tones: Hz of the two channels (0: silent). onset: seconds. tolerance: of colours, 0..255.
    """

    refused: str = ""
    notes: tuple[str, ...] = ()
    counters: tuple[int, ...] = ()
    fps: float = 24.0
    shape: tuple[int, int] = (128, 96)
    left: tuple[int, int, int] | None = LEFT
    right: tuple[int, int, int] | None = RIGHT
    tones: tuple[float, float] | None = None
    onset: float = 0.0
    tolerance: float = 12.0


@dataclass(frozen=True)
class Kind:
    """One awkward kind: its file name, how it is written, what must be read."""

    name: str
    write: Callable[[Path], object]
    expected: Expected


def _plain(n: int = 25, **more: Any) -> list[np.ndarray]:
    return [counter_frame(k, **more) for k in range(n)]


def _simple(coding: Coding, rate: Fraction | int = 24, n: int = 25, **more: Any) -> Callable[[Path], object]:
    return lambda path: encode(path, _plain(n), Fraction(rate), coding, **more)


def _turned(rotation: int, mirrored: bool = False) -> Callable[[Path], object]:
    """Stored so that the display matrix brings it upright: the picture is turned the other way first."""

    def write(path: Path) -> object:
        return encode(path, (np.rot90(f, -rotation // 90) for f in _plain()), Fraction(24), Coding(rotation=rotation))

    return write


FIRST9 = tuple(range(9))
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


def _cut(writer: Callable[[Path], object], share: float) -> Callable[[Path], object]:
    def write(path: Path) -> None:
        writer(path)
        data = path.read_bytes()
        path.write_bytes(data[: int(len(data) * share)])

    return write


def _exif(orientation: int) -> Callable[[Path], object]:
    """A JPEG stored so that its EXIF orientation brings it upright."""
    undo = {1: lambda a: a, 2: np.fliplr, 3: lambda a: np.rot90(a, 2), 4: np.flipud, 5: lambda a: a.transpose(1, 0, 2), 6: lambda a: np.rot90(a, 1), 7: lambda a: np.rot90(a, 2).transpose(1, 0, 2), 8: lambda a: np.rot90(a, -1)}  # fmt: skip

    def write(path: Path) -> None:
        from PIL import Image

        image = Image.fromarray(np.ascontiguousarray(undo[orientation](counter_frame(5))))
        exif = Image.Exif()
        exif[274] = orientation
        image.save(path, quality=95, exif=exif)

    return write


def _still(mode: str, **save: Any) -> Callable[[Path], object]:
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


def _animation(path: Path) -> None:
    from PIL import Image

    frames = [Image.fromarray(f) for f in _plain(12)]
    options: dict[str, Any] = {"lossless": True} if path.suffix == ".webp" else {}
    frames[0].save(path, save_all=True, append_images=frames[1:], duration=40, loop=0, **options)


def _surround(layout: str, codec: str = "aac") -> Callable[[Path], object]:
    """5.1 or 7.1 with tones in front left and front right only."""
    channels = {"5.1": 6, "7.1": 8, "mono": 1, "quad": 4}[layout]
    tones = [440.0, 660.0] + [0.0] * (channels - 2) if channels > 2 else [440.0]
    return lambda path: encode(path, _plain(), Fraction(24), Coding(layout=layout, audio_codec=codec), sound=tone(25 / 24, 48000, tones), sound_rate=48000)


def _with_tone(rate: int = 48000, seconds: float = 25 / 24, start: float = 0.25, **coding: Any) -> Callable[[Path], object]:
    return lambda path: encode(path, _plain(), Fraction(24), Coding(**coding), sound=tone(seconds, rate, onset=start), sound_rate=rate)


def _mirrored(path: Path) -> None:
    """Stored mirrored, with a display matrix that mirrors it back (as front cameras do)."""
    import av

    with av.open(str(path), "w") as container:
        video = container.add_stream("libx264", rate=24, options={"crf": "12", "preset": "ultrafast"})
        video.width, video.height, video.pix_fmt = 128, 96, "yuv420p"
        video.set_display_matrix([-(1 << 16), 0, 0, 0, 1 << 16, 0, 128 << 16, 0, 1 << 30])
        for n in range(25):
            container.mux(video.encode(av.VideoFrame.from_ndarray(np.ascontiguousarray(counter_frame(n)[:, ::-1]), "rgb24")))
        container.mux(video.encode(None))


def _restarted_clock(path: Path) -> None:
    """Two transport streams one after the other: the clock starts again in the middle."""
    parts = [path.with_name(f"_{path.stem}{n}.ts") for n in range(2)]
    for n, part in enumerate(parts):
        encode(part, (counter_frame(25 * n + k) for k in range(25)), 24)
    path.write_bytes(b"".join(part.read_bytes() for part in parts))
    for part in parts:
        part.unlink()


def _damaged(path: Path) -> None:
    """A sixth of the bytes in the middle overwritten: the headers are whole."""
    random = np.random.default_rng(0)
    encode(path, (np.clip(counter_frame(n).astype(int) // 2 + random.integers(0, 127, (96, 128, 3)), 0, 255).astype(np.uint8) for n in range(25)), 24)
    data = bytearray(path.read_bytes())
    start, length = len(data) // 10, len(data) // 6
    data[start : start + length] = random.bytes(length)
    path.write_bytes(bytes(data))


def _song_with_cover(path: Path) -> None:
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


def _interlaced(path: Path) -> None:
    """Each stored frame weaves two moments; the counter of both fields is the same, the block below differs."""
    coding = Coding(options={"crf": "8", "preset": "ultrafast", "x264-params": "tff=1"})
    encode(path, _plain(), Fraction(24), coding)


HLG_GREY, PQ_GREY = 0.75, 0.5806888818740845
"""Signals of 203 nits reference white in HLG (75 %) and PQ (58 %), ITU-R BT.2408."""


def _hdr(transfer: int, signal: float) -> Callable[[Path], object]:
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


def _wide(primaries: int) -> Callable[[Path], object]:
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


def _alpha_video(codec: str, pixel_format: str, options: dict[str, str]) -> Callable[[Path], object]:
    """The left lower quarter is transparent."""

    def write(path: Path) -> object:
        frames = []
        for n in range(25):
            frame = np.dstack([counter_frame(n), np.full((96, 128), 255, np.uint8)])
            frame[48:, :64, 3] = 0
            frames.append(frame)
        return encode(path, frames, Fraction(24), Coding(codec, pixel_format, options), source="rgba")

    return write


def _two_streams(path: Path) -> None:
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


def _text(path: Path) -> None:
    path.write_text("this is no video at all, whatever the name says\n" * 20, encoding="utf-8")


def _kinds_video() -> list[Kind]:
    tagged = {"crf": "8", "preset": "ultrafast"}
    e = Expected
    return [
        Kind("plain.mp4", _simple(Coding()), e(notes=("audio.none",), counters=FIRST9)),
        Kind("fractional.mp4", _simple(Coding(), Fraction(24000, 1001)), e(counters=FIRST9, fps=24000 / 1001)),
        Kind("ntsc.mkv", _simple(Coding(), Fraction(30000, 1001)), e(counters=FIRST9, fps=30000 / 1001)),
        Kind("turned90.mp4", _turned(90), e(notes=("media.rotated",), counters=FIRST9)),
        Kind("turned180.mp4", _turned(180), e(notes=("media.rotated",), counters=FIRST9)),
        Kind("turned270.mov", _turned(270), e(notes=("media.rotated",), counters=FIRST9)),
        Kind("turned90.mkv", _turned(90), e(notes=("media.rotated",), counters=FIRST9)),
        Kind("mirrored.mp4", _mirrored, e(notes=("media.rotated",), counters=FIRST9)),
        Kind("restarted.ts", _restarted_clock, e(notes=("media.timestamps",), counters=FIRST9)),
        Kind("variable.mp4", lambda p: encode(p, _plain(40), Fraction(50), times=VFR), e(notes=("media.variable_rate",), counters=vfr_counters(Fraction(431, 25), 9), fps=17.24)),
        Kind("variable.mkv", lambda p: encode(p, _plain(40), Fraction(50), times=VFR), e(notes=("media.variable_rate",), counters=vfr_counters(Fraction(431, 25), 9), fps=17.24)),
        Kind("interlaced.mp4", _interlaced, e(notes=("media.interlaced",), counters=FIRST9)),
        Kind("wide_pixels.mp4", lambda p: encode(p, _plain(width=64), Fraction(24), Coding(sample_aspect=Fraction(2))), e(notes=("media.sample_aspect",), counters=FIRST9)),
        Kind("odd.mkv", lambda p: encode(p, _plain(width=127, height=95), Fraction(24), Coding(pixel_format="yuv444p")), e(counters=FIRST9, shape=(127, 95))),
        Kind("bt601.mp4", _simple(Coding(tags=(6, 6, 6, 1), options=tagged)), e(counters=FIRST9)),
        Kind("full_range.mp4", _simple(Coding(tags=(1, 1, 1, 2), options=tagged)), e(counters=FIRST9)),
        Kind("ten_bit.mp4", _simple(Coding("libx265", "yuv420p10le", {"crf": "8", "preset": "ultrafast", "x265-params": "log-level=none"})), e(counters=FIRST9)),
        Kind("twelve_bit.mkv", _simple(Coding("libx265", "yuv422p12le", {"crf": "8", "preset": "ultrafast", "x265-params": "log-level=none"})), e(counters=FIRST9)),
        Kind("hlg.mp4", _hdr(18, HLG_GREY), e(notes=("media.hdr",), counters=FIRST9, left=(228, 228, 228), right=(228, 228, 228))),
        Kind("pq.mkv", _hdr(16, PQ_GREY), e(notes=("media.hdr",), counters=FIRST9, left=(228, 228, 228), right=(228, 228, 228))),
        Kind("bt2020_sdr.mp4", _wide(9), e(notes=("media.wide_gamut",), counters=FIRST9, left=WIDE_COLOUR, right=WIDE_COLOUR)),
        Kind("display_p3.mp4", _wide(12), e(notes=("media.wide_gamut",), counters=FIRST9, left=WIDE_COLOUR, right=WIDE_COLOUR)),
        Kind("vp9.webm", _simple(Coding("libvpx-vp9", options={"crf": "10", "b": "0", "cpu-used": "8"})), e(counters=FIRST9)),
        Kind("vp9_alpha.webm", _alpha_video("libvpx-vp9", "yuva420p", {"crf": "10", "b": "0", "cpu-used": "8"}), e(notes=("media.alpha",), counters=FIRST9, left=(0, 0, 0))),
        Kind("prores_alpha.mov", _alpha_video("prores_ks", "yuva444p10le", {"profile": "4444"}), e(notes=("media.alpha",), counters=FIRST9, left=(0, 0, 0))),
        Kind("animation_alpha.mov", _alpha_video("qtrle", "argb", {}), e(notes=("media.alpha",), counters=FIRST9, left=(0, 0, 0))),
        Kind("prores.mov", _simple(Coding("prores_ks", "yuv422p10le", {})), e(counters=FIRST9)),
        Kind("av1.mp4", _simple(Coding("libsvtav1", "yuv420p", {"crf": "20", "preset": "12"})), e(counters=FIRST9)),
        Kind("hevc.mp4", _simple(Coding("libx265", options={"crf": "12", "preset": "ultrafast", "x265-params": "log-level=none"})), e(counters=FIRST9)),
        Kind("ffv1.mkv", _simple(Coding("ffv1", "bgr0", {})), e(counters=FIRST9, tolerance=2)),
        Kind("mpeg4.avi", _simple(Coding("mpeg4", options={"b": "4000000"}, tags=(6, 6, 6, 1))), e(counters=FIRST9)),
        Kind("mjpeg.avi", _simple(Coding("mjpeg", "yuvj420p", {"q:v": "2"}, tags=(5, 1, 1, 2))), e(counters=FIRST9)),
        Kind("transport.ts", _simple(Coding()), e(counters=FIRST9)),
        Kind("fragmented.mp4", _simple(Coding(container={"movflags": "frag_keyframe+empty_moov"})), e(counters=FIRST9)),
        Kind("animated.gif", _animation, e(counters=FIRST9, fps=25, tolerance=25)),
        Kind("animated.webp", _animation, e(counters=FIRST9, fps=25, tolerance=3)),
        Kind("animated.png", _animation, e(counters=FIRST9, fps=25, tolerance=1)),
    ]


def _kinds_sound() -> list[Kind]:
    e = Expected
    both = (440.0, 660.0)
    return [
        Kind("stereo.mp4", _with_tone(), e(counters=FIRST9, tones=both, onset=0.25)),
        Kind("rate_44100.mov", _with_tone(44100), e(counters=FIRST9, tones=both, onset=0.25)),
        Kind("rate_22050.mp4", _with_tone(22050), e(counters=FIRST9, tones=both, onset=0.25)),
        Kind("opus.webm", _with_tone(codec="libvpx-vp9", options={"crf": "20", "b": "0", "cpu-used": "8"}, audio_codec="libopus", audio_format="flt"), e(counters=FIRST9, tones=both, onset=0.25)),
        # the muxer drops a frame, and AVI has no place for the 1,105 samples that an MP3 encoder adds in front
        Kind("gap.avi", _with_tone(codec="mpeg4", options={"b": "4000000"}, tags=(6, 6, 6, 1), audio_codec="libmp3lame"), e(notes=("media.variable_rate",), counters=(0, *range(8)), tones=both, onset=0.273)),
        Kind("pcm.mov", _with_tone(audio_codec="pcm_s16le", audio_format="s16"), e(counters=FIRST9, tones=both, onset=0.25)),
        Kind("mono.mp4", _surround("mono"), e(counters=FIRST9, tones=(440.0, 440.0))),
        Kind("surround51.mp4", _surround("5.1"), e(counters=FIRST9, tones=both)),
        Kind("surround71.mkv", _surround("7.1", "pcm_s16le"), e(counters=FIRST9, tones=both)),
        Kind("short_sound.mp4", _with_tone(seconds=0.5, start=0.1), e(notes=("audio.short",), counters=FIRST9, tones=both, onset=0.1)),
        Kind("long_sound.mp4", _with_tone(seconds=4.0), e(counters=FIRST9, tones=both, onset=0.25)),
        Kind("two_sounds.mkv", _two_streams, e(notes=("media.streams",), counters=FIRST9, tones=both)),
        Kind("late_sound.mkv", lambda p: encode(p, _plain(), 24, sound=tone(0.7, 48000), sound_start=0.25), e(counters=FIRST9, tones=both, onset=0.25)),
        Kind("silent.mp4", lambda p: encode(p, _plain(), 24, sound=tone(25 / 24, 48000, (0.0, 0.0))), e(notes=("audio.silent",), counters=FIRST9, tones=(0.0, 0.0))),
        Kind("rate_96000.mkv", _with_tone(96000, audio_codec="flac", audio_format="s16"), e(counters=FIRST9, tones=both, onset=0.25)),
        Kind("cover.mp3", _song_with_cover, e(left=None, right=None, tones=both, onset=0.25)),
        Kind("alone.wav", lambda p: write_pcm(p, tone(2.0, 44100, onset=0.25), 44100), e(left=None, right=None, tones=both, onset=0.25)),
        Kind("alone_mono.flac", lambda p: encode(p, [], Fraction(24), Coding(audio_codec="flac", layout="mono", audio_format="s16"), sound=tone(2.0, 32000, [440.0], 0.25), sound_rate=32000), e(left=None, right=None, tones=(440.0, 440.0), onset=0.25)),
        Kind("alone.mp3", lambda p: encode(p, [], Fraction(24), Coding(audio_codec="libmp3lame"), sound=tone(2.0, 44100, onset=0.25), sound_rate=44100), e(left=None, right=None, tones=both, onset=0.25)),
    ]  # fmt: skip


def _kinds_still() -> list[Kind]:
    e = Expected
    five = (5,)
    return [
        *[Kind(f"exif{n}.jpg", _exif(n), e(notes=("media.rotated",) if n > 1 else (), counters=five)) for n in range(1, 9)],
        Kind("palette.png", _still("P"), e(counters=five, tolerance=16)),
        Kind("grey.png", _still("L"), e(notes=("media.grey",), counters=five, left=None, right=None)),
        Kind("grey16.png", _still("I;16"), e(notes=("media.grey",), counters=five, left=None, right=None)),
        Kind("half.png", _still("half"), e(notes=("media.alpha",), counters=five, left=(0, 0, 0), tolerance=1)),
        Kind("cmyk.jpg", _still("CMYK", quality=95), e(counters=five)),
        Kind("still.webp", _still("RGB", lossless=True), e(counters=five, tolerance=1)),
        Kind("still.bmp", _still("RGB"), e(counters=five, tolerance=1)),
        Kind("still.tif", _still("RGB"), e(counters=five, tolerance=1)),
        Kind("still.avif", _still("RGB", quality=90), e(counters=five)),
    ]


def _kinds_broken() -> list[Kind]:
    e = Expected
    return [
        Kind("empty.mp4", lambda p: p.write_bytes(b""), e(refused="media.empty")),
        Kind("text.mp4", _text, e(refused="media.unreadable")),
        Kind("noise.mkv", lambda p: p.write_bytes(np.random.default_rng(3).bytes(5000)), e(refused="media.unreadable")),
        Kind("cut.mp4", _cut(_simple(Coding()), 0.6), e(refused="media.unreadable")),
        Kind("cut_faststart.mp4", _cut(_simple(Coding(container={"movflags": "+faststart"})), 0.7), e(refused="media.truncated")),
        Kind("cut.mkv", _cut(_simple(Coding(), n=120), 0.4), e(refused="media.truncated")),
        Kind("damaged.mp4", _damaged, e(refused="media.decode")),
        Kind("cut.png", _cut(_still("RGB"), 0.5), e(refused="media.truncated")),
        Kind("cut.jpg", _cut(_exif(1), 0.4), e(refused="media.truncated")),
        Kind("short.mp4", _simple(Coding(), n=5), e(refused="bucket.too_short")),
        Kind("really_png.jpg", lambda p: _png_bytes(p), e(counters=(5,), tolerance=1)),
        Kind("really_mp4.png", lambda p: _renamed(p, ".mp4", Coding()), e(notes=("media.extension",), counters=FIRST9)),
        Kind("really_wav.mp4", lambda p: write_pcm(p, tone(2.0, 44100, onset=0.25), 44100), e(left=None, right=None, tones=(440.0, 660.0), onset=0.25)),
        Kind("really_webm.mp4", lambda p: _renamed(p, ".webm", Coding("libvpx-vp9", options={"crf": "20", "b": "0", "cpu-used": "8"})), e(counters=FIRST9)),
    ]


def _png_bytes(path: Path) -> None:
    from PIL import Image

    Image.fromarray(counter_frame(5)).save(path, format="PNG")


def _renamed(path: Path, extension: str, coding: Coding) -> None:
    made = path.with_name(f"_{path.stem}{extension}")
    encode(made, _plain(), Fraction(24), coding)
    made.replace(path)


def corpus() -> list[Kind]:
    """Every kind, in a stable order."""
    return [*_kinds_video(), *_kinds_sound(), *_kinds_still(), *_kinds_broken()]


def write_corpus(folder: Path, names: Sequence[str] | None = None) -> dict[str, Kind]:
    """Write the corpus (or the named files) with a caption each; returns the kinds by file name."""
    import av

    folder.mkdir(parents=True, exist_ok=True)
    made = {}
    for kind in corpus():
        if names is not None and kind.name not in names:
            continue
        try:
            kind.write(folder / kind.name)
        except (av.error.FFmpegError, av.codec.codec.UnknownCodecError) as error:
            raise RuntimeError(f"this build of PyAV cannot write {kind.name}") from error
        (folder / f"{kind.name}.txt").write_text(f"the clip {kind.name}", encoding="utf-8")
        made[kind.name] = kind
    return made
