"""The corpus: every awkward kind of clip by name, with what must be read from each; and the synthetic clips of tests and demo."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path

import numpy as np

from .awkward import (
    HLG_GREY,
    PQ_GREY,
    VFR,
    WIDE_COLOUR,
    alpha_video,
    animation,
    cut,
    damaged,
    exif,
    hdr,
    interlaced,
    mirrored,
    not_a_video,
    plain,
    png_bytes,
    renamed,
    restarted_clock,
    simple,
    song_with_cover,
    still,
    surround,
    turned,
    two_streams,
    vfr_counters,
    wide,
    with_tone,
)
from .clips import (
    LEFT,
    RIGHT,
    Coding,
    corner_colours,
    counter_clip,
    counter_frame,
    dataset,
    encode,
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


FIRST9 = tuple(range(9))


def _kinds_video() -> list[Kind]:
    tagged = {"crf": "8", "preset": "ultrafast"}
    e = Expected
    return [
        Kind("plain.mp4", simple(Coding()), e(notes=("audio.none",), counters=FIRST9)),
        Kind("fractional.mp4", simple(Coding(), Fraction(24000, 1001)), e(counters=FIRST9, fps=24000 / 1001)),
        Kind("ntsc.mkv", simple(Coding(), Fraction(30000, 1001)), e(counters=FIRST9, fps=30000 / 1001)),
        Kind("turned90.mp4", turned(90), e(notes=("media.rotated",), counters=FIRST9)),
        Kind("turned180.mp4", turned(180), e(notes=("media.rotated",), counters=FIRST9)),
        Kind("turned270.mov", turned(270), e(notes=("media.rotated",), counters=FIRST9)),
        Kind("turned90.mkv", turned(90), e(notes=("media.rotated",), counters=FIRST9)),
        Kind("mirrored.mp4", mirrored, e(notes=("media.rotated",), counters=FIRST9)),
        Kind("restarted.ts", restarted_clock, e(notes=("media.timestamps",), counters=FIRST9)),
        Kind("variable.mp4", lambda p: encode(p, plain(40), Fraction(50), times=VFR), e(notes=("media.variable_rate",), counters=vfr_counters(Fraction(431, 25), 9), fps=17.24)),
        Kind("variable.mkv", lambda p: encode(p, plain(40), Fraction(50), times=VFR), e(notes=("media.variable_rate",), counters=vfr_counters(Fraction(431, 25), 9), fps=17.24)),
        Kind("interlaced.mp4", interlaced, e(notes=("media.interlaced",), counters=FIRST9)),
        Kind("wide_pixels.mp4", lambda p: encode(p, plain(width=64), Fraction(24), Coding(sample_aspect=Fraction(2))), e(notes=("media.sample_aspect",), counters=FIRST9)),
        Kind("odd.mkv", lambda p: encode(p, plain(width=127, height=95), Fraction(24), Coding(pixel_format="yuv444p")), e(counters=FIRST9, shape=(127, 95))),
        Kind("bt601.mp4", simple(Coding(tags=(6, 6, 6, 1), options=tagged)), e(counters=FIRST9)),
        Kind("full_range.mp4", simple(Coding(tags=(1, 1, 1, 2), options=tagged)), e(counters=FIRST9)),
        Kind("ten_bit.mp4", simple(Coding("libx265", "yuv420p10le", {"crf": "8", "preset": "ultrafast", "x265-params": "log-level=none"})), e(counters=FIRST9)),
        Kind("twelve_bit.mkv", simple(Coding("libx265", "yuv422p12le", {"crf": "8", "preset": "ultrafast", "x265-params": "log-level=none"})), e(counters=FIRST9)),
        Kind("hlg.mp4", hdr(18, HLG_GREY), e(notes=("media.hdr",), counters=FIRST9, left=(228, 228, 228), right=(228, 228, 228))),
        Kind("pq.mkv", hdr(16, PQ_GREY), e(notes=("media.hdr",), counters=FIRST9, left=(228, 228, 228), right=(228, 228, 228))),
        Kind("bt2020_sdr.mp4", wide(9), e(notes=("media.wide_gamut",), counters=FIRST9, left=WIDE_COLOUR, right=WIDE_COLOUR)),
        Kind("display_p3.mp4", wide(12), e(notes=("media.wide_gamut",), counters=FIRST9, left=WIDE_COLOUR, right=WIDE_COLOUR)),
        Kind("vp9.webm", simple(Coding("libvpx-vp9", options={"crf": "10", "b": "0", "cpu-used": "8"})), e(counters=FIRST9)),
        Kind("vp9_alpha.webm", alpha_video("libvpx-vp9", "yuva420p", {"crf": "10", "b": "0", "cpu-used": "8"}), e(notes=("media.alpha",), counters=FIRST9, left=(0, 0, 0))),
        Kind("prores_alpha.mov", alpha_video("prores_ks", "yuva444p10le", {"profile": "4444"}), e(notes=("media.alpha",), counters=FIRST9, left=(0, 0, 0))),
        Kind("animation_alpha.mov", alpha_video("qtrle", "argb", {}), e(notes=("media.alpha",), counters=FIRST9, left=(0, 0, 0))),
        Kind("prores.mov", simple(Coding("prores_ks", "yuv422p10le", {})), e(counters=FIRST9)),
        Kind("av1.mp4", simple(Coding("libsvtav1", "yuv420p", {"crf": "20", "preset": "12"})), e(counters=FIRST9)),
        Kind("hevc.mp4", simple(Coding("libx265", options={"crf": "12", "preset": "ultrafast", "x265-params": "log-level=none"})), e(counters=FIRST9)),
        Kind("ffv1.mkv", simple(Coding("ffv1", "bgr0", {})), e(counters=FIRST9, tolerance=2)),
        Kind("mpeg4.avi", simple(Coding("mpeg4", options={"b": "4000000"}, tags=(6, 6, 6, 1))), e(counters=FIRST9)),
        Kind("mjpeg.avi", simple(Coding("mjpeg", "yuvj420p", {"q:v": "2"}, tags=(5, 1, 1, 2))), e(counters=FIRST9)),
        Kind("transport.ts", simple(Coding()), e(counters=FIRST9)),
        Kind("fragmented.mp4", simple(Coding(container={"movflags": "frag_keyframe+empty_moov"})), e(counters=FIRST9)),
        Kind("animated.gif", animation, e(counters=FIRST9, fps=25, tolerance=25)),
        Kind("animated.webp", animation, e(counters=FIRST9, fps=25, tolerance=3)),
        Kind("animated.png", animation, e(counters=FIRST9, fps=25, tolerance=1)),
    ]


def _kinds_sound() -> list[Kind]:
    e = Expected
    both = (440.0, 660.0)
    return [
        Kind("stereo.mp4", with_tone(), e(counters=FIRST9, tones=both, onset=0.25)),
        Kind("rate_44100.mov", with_tone(44100), e(counters=FIRST9, tones=both, onset=0.25)),
        Kind("rate_22050.mp4", with_tone(22050), e(counters=FIRST9, tones=both, onset=0.25)),
        Kind("opus.webm", with_tone(codec="libvpx-vp9", options={"crf": "20", "b": "0", "cpu-used": "8"}, audio_codec="libopus", audio_format="flt"), e(counters=FIRST9, tones=both, onset=0.25)),
        # the muxer drops a frame, and AVI has no place for the 1,105 samples that an MP3 encoder adds in front
        Kind("gap.avi", with_tone(codec="mpeg4", options={"b": "4000000"}, tags=(6, 6, 6, 1), audio_codec="libmp3lame"), e(notes=("media.variable_rate",), counters=(0, *range(8)), tones=both, onset=0.273)),
        Kind("pcm.mov", with_tone(audio_codec="pcm_s16le", audio_format="s16"), e(counters=FIRST9, tones=both, onset=0.25)),
        Kind("mono.mp4", surround("mono"), e(counters=FIRST9, tones=(440.0, 440.0))),
        Kind("surround51.mp4", surround("5.1"), e(counters=FIRST9, tones=both)),
        Kind("surround71.mkv", surround("7.1", "pcm_s16le"), e(counters=FIRST9, tones=both)),
        Kind("short_sound.mp4", with_tone(seconds=0.5, start=0.1), e(notes=("audio.short",), counters=FIRST9, tones=both, onset=0.1)),
        Kind("long_sound.mp4", with_tone(seconds=4.0), e(counters=FIRST9, tones=both, onset=0.25)),
        Kind("two_sounds.mkv", two_streams, e(notes=("media.streams",), counters=FIRST9, tones=both)),
        Kind("late_sound.mkv", lambda p: encode(p, plain(), 24, sound=tone(0.7, 48000), sound_start=0.25), e(counters=FIRST9, tones=both, onset=0.25)),
        Kind("silent.mp4", lambda p: encode(p, plain(), 24, sound=tone(25 / 24, 48000, (0.0, 0.0))), e(notes=("audio.silent",), counters=FIRST9, tones=(0.0, 0.0))),
        Kind("rate_96000.mkv", with_tone(96000, audio_codec="flac", audio_format="s16"), e(counters=FIRST9, tones=both, onset=0.25)),
        Kind("cover.mp3", song_with_cover, e(left=None, right=None, tones=both, onset=0.25)),
        Kind("alone.wav", lambda p: write_pcm(p, tone(2.0, 44100, onset=0.25), 44100), e(left=None, right=None, tones=both, onset=0.25)),
        Kind("alone_mono.flac", lambda p: encode(p, [], Fraction(24), Coding(audio_codec="flac", layout="mono", audio_format="s16"), sound=tone(2.0, 32000, [440.0], 0.25), sound_rate=32000), e(left=None, right=None, tones=(440.0, 440.0), onset=0.25)),
        Kind("alone.mp3", lambda p: encode(p, [], Fraction(24), Coding(audio_codec="libmp3lame"), sound=tone(2.0, 44100, onset=0.25), sound_rate=44100), e(left=None, right=None, tones=both, onset=0.25)),
    ]  # fmt: skip


def _kinds_still() -> list[Kind]:
    e = Expected
    five = (5,)
    return [
        *[Kind(f"exif{n}.jpg", exif(n), e(notes=("media.rotated",) if n > 1 else (), counters=five)) for n in range(1, 9)],
        Kind("palette.png", still("P"), e(counters=five, tolerance=16)),
        Kind("grey.png", still("L"), e(notes=("media.grey",), counters=five, left=None, right=None)),
        Kind("grey16.png", still("I;16"), e(notes=("media.grey",), counters=five, left=None, right=None)),
        Kind("half.png", still("half"), e(notes=("media.alpha",), counters=five, left=(0, 0, 0), tolerance=1)),
        Kind("cmyk.jpg", still("CMYK", quality=95), e(counters=five)),
        Kind("still.webp", still("RGB", lossless=True), e(counters=five, tolerance=1)),
        Kind("still.bmp", still("RGB"), e(counters=five, tolerance=1)),
        Kind("still.tif", still("RGB"), e(counters=five, tolerance=1)),
        Kind("still.avif", still("RGB", quality=90), e(counters=five)),
    ]


def _kinds_broken() -> list[Kind]:
    e = Expected
    return [
        Kind("empty.mp4", lambda p: p.write_bytes(b""), e(refused="media.empty")),
        Kind("text.mp4", not_a_video, e(refused="media.unreadable")),
        Kind("noise.mkv", lambda p: p.write_bytes(np.random.default_rng(3).bytes(5000)), e(refused="media.unreadable")),
        Kind("cut.mp4", cut(simple(Coding()), 0.6), e(refused="media.unreadable")),
        Kind("cut_faststart.mp4", cut(simple(Coding(container={"movflags": "+faststart"})), 0.7), e(refused="media.truncated")),
        Kind("cut.mkv", cut(simple(Coding(), n=120), 0.4), e(refused="media.truncated")),
        Kind("damaged.mp4", damaged, e(refused="media.decode")),
        Kind("cut.png", cut(still("RGB"), 0.5), e(refused="media.truncated")),
        Kind("cut.jpg", cut(exif(1), 0.4), e(refused="media.truncated")),
        Kind("short.mp4", simple(Coding(), n=5), e(refused="bucket.too_short")),
        Kind("really_png.jpg", png_bytes, e(counters=(5,), tolerance=1)),
        Kind("really_mp4.png", lambda p: renamed(p, ".mp4", Coding()), e(notes=("media.extension",), counters=FIRST9)),
        Kind("really_wav.mp4", lambda p: write_pcm(p, tone(2.0, 44100, onset=0.25), 44100), e(left=None, right=None, tones=(440.0, 660.0), onset=0.25)),
        Kind("really_webm.mp4", lambda p: renamed(p, ".webm", Coding("libvpx-vp9", options={"crf": "20", "b": "0", "cpu-used": "8"})), e(counters=FIRST9)),
    ]


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
