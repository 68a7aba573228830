"""What a file holds, from its headers: kind, upright size, rate, frames, rotation, colour, sound."""

from __future__ import annotations

from dataclasses import dataclass, replace
from fractions import Fraction
from pathlib import Path
from typing import Any, Literal

from .container import Times, default_stream, moving_streams, opened
from .findings import Finding, MediaError
from .listing import AUDIO_EXTENSIONS, IMAGE_EXTENSIONS, VIDEO_EXTENSIONS
from .orientation import Orientation, exif_orientation, frame_orientation, mp4_orientation
from .sources import MemoryClip
from .timeline import STILL_RATE, Timeline, exact_rate, timeline_of

HEIF_BRANDS = (b"heic", b"heix", b"heim", b"heis")
HDR_TRANSFERS = {16: "pq", 18: "hlg"}
WIDE_PRIMARIES = {9: "bt2020", 11: "p3", 12: "p3"}  # AVColorPrimaries


@dataclass(frozen=True)
class SoundInfo:
    """One sound stream. start: seconds of its first sample on the file's clock; seconds: its length."""

    stream: int
    sample_rate: int
    channels: int
    layout: str
    seconds: float
    start: float = 0.0
    codec: str = ""


@dataclass(frozen=True)
class Probe:
    """What one file holds.

    width, height: upright and with square pixels (what a player shows). coded_width, coded_height: as stored.
    """

    path: Path | None
    kind: Literal["video", "image", "audio"]
    size: int
    width: int = 0
    height: int = 0
    coded_width: int = 0
    coded_height: int = 0
    timeline: Timeline | None = None
    orientation: Orientation = Orientation()
    sample_aspect: Fraction = Fraction(1)
    codec: str = ""
    pixel_format: str = ""
    bits: int = 8
    transfer: str = "sdr"
    interlaced: bool = False
    alpha: bool = False
    animated: bool = False  # a GIF, WebP or APNG: decoded by Pillow
    stream: int = 0
    sound: SoundInfo | None = None
    findings: tuple[Finding, ...] = ()
    gamut: str = ""  # of a standard-range clip: wider than BT.709

    @property
    def frames(self) -> int:
        return self.timeline.frames if self.timeline else 0

    @property
    def fps(self) -> float:
        return float(self.timeline.rate) if self.timeline else 0.0

    @property
    def seconds(self) -> float:
        if self.timeline:
            return self.timeline.seconds
        return self.sound.seconds if self.sound else 0.0


def probe(source: Path | MemoryClip) -> Probe:
    """Read the headers of a file (or of a ComfyUI clip).

    Raises MediaError with a finding code when the file cannot be used at all.
    """
    if isinstance(source, MemoryClip):
        return _probe_memory(source)
    path = Path(source)
    try:
        size = path.stat().st_size
    except OSError as error:
        raise MediaError("media.missing", f"There is no readable file {path.name}: {error.strerror}.") from error
    if size == 0:
        raise MediaError("media.empty", f"{path.name} is empty.")
    try:
        with open(path, "rb") as file:
            head = file.read(64)
    except OSError as error:
        raise MediaError("media.missing", f"{path.name} cannot be read: {error.strerror}.") from error
    if head.startswith(b"version https://git-lfs"):
        raise MediaError("media.unreadable", f"{path.name} is a Git LFS pointer, not the clip: run `git lfs pull` in its folder.")
    if is_heif(head) and not _heif_readable():
        raise MediaError("media.heif", f"{path.name} is a HEIC photo, and the package pillow-heif is not installed.")
    found = _probe_still(path, size) if is_still(head) else _probe_av(path, size)
    return _with_extension(found)


def is_still(head: bytes) -> bool:
    """True for files Pillow reads: PNG, JPEG, GIF, WebP, BMP, TIFF, AVIF, JPEG 2000, and HEIC with pillow-heif."""
    if head[4:8] == b"ftyp":
        return head[8:12] in (b"avif", b"avis", b"mif1", *HEIF_BRANDS)
    starts = (b"\x89PNG\r\n", b"\xff\xd8\xff", b"GIF8", b"BM", b"II*\0", b"MM\0*", b"\0\0\0\x0cjP  ", b"P5", b"P6")
    return head.startswith(starts) or (head[:4] == b"RIFF" and head[8:12] == b"WEBP")


def is_heif(head: bytes) -> bool:
    """True for HEIC photos, also those whose first brand is the general one."""
    return head[4:8] == b"ftyp" and (head[8:12] in HEIF_BRANDS or (head[8:12] == b"mif1" and any(brand in head[16:64] for brand in HEIF_BRANDS)))


def _heif_readable() -> bool:
    """Whether Pillow reads HEIC photos of phones from now on: FFmpeg sees only one tile of them, unturned."""
    try:
        from pillow_heif import register_heif_opener
    except ImportError:
        return False
    register_heif_opener()
    return True


def _with_extension(found: Probe) -> Probe:
    extension = found.path.suffix.lower()
    expected = {"image": IMAGE_EXTENSIONS | {".gif"}, "audio": AUDIO_EXTENSIONS | VIDEO_EXTENSIONS, "video": VIDEO_EXTENSIONS | {".webp", ".png", ".apng", ".avif"}}[found.kind]
    if extension in expected and not (found.kind == "video" and not found.animated and extension in IMAGE_EXTENSIONS):
        return found
    message = f"{found.path.name} holds {found.codec} {found.kind}, not what {extension or 'no extension'} says"
    return replace(found, findings=(Finding("media.extension", message), *found.findings))


def _probe_memory(clip: MemoryClip) -> Probe:
    sound = None
    if clip.waveform is not None and clip.waveform.shape[-1]:
        channels, length = clip.waveform.shape[-2:] if clip.waveform.ndim > 1 else (1, clip.waveform.shape[-1])
        sound = SoundInfo(0, clip.sample_rate, channels, f"{channels} channels", length / clip.sample_rate)
    if clip.frames is None:
        if sound is None:
            raise MediaError("media.no_frames", f"{clip.name} holds neither frames nor sound.")
        return Probe(None, "audio", 0, sound=sound, codec="memory")
    count, height, width, depth = clip.frames.shape
    if count == 1:
        line = Timeline(0.0, STILL_RATE, 1, 1 / float(STILL_RATE))
    else:
        rate = exact_rate(clip.fps)
        line = Timeline(0.0, rate, count, count / float(rate))
    findings = () if depth != 4 else (Finding("media.alpha", "the picture has transparency"),)
    kind = "image" if count == 1 else "video"
    return Probe(None, kind, 0, width, height, width, height, line, codec="memory", alpha=depth == 4, sound=sound if count > 1 else None, findings=findings)


# -- stills ----------------------------------------------------------------------------------------------------------


def _probe_still(path: Path, size: int) -> Probe:
    from PIL import Image, UnidentifiedImageError

    try:
        with Image.open(path) as image:
            width, height = image.size
            orientation = exif_orientation(image)
            frames = getattr(image, "n_frames", 1) if image.format in ("GIF", "WEBP", "PNG", "AVIF") else 1
            line = _animation(image, frames) if frames > 1 else Timeline(0.0, STILL_RATE, 1, 1 / float(STILL_RATE))
            mode, kind = image.mode, image.format.lower()
            image.seek(0)
            alpha = _transparent(image)
            if not _has_end(path, image.format):
                image.load()  # a cut picture shows itself only when read
    except UnidentifiedImageError as error:
        raise MediaError("media.unreadable", f"{path.name} is no picture that can be read.") from error
    except Image.DecompressionBombError as error:
        raise MediaError("media.too_large", f"{path.name[:50]}: {str(error).split(', could')[0]}") from error
    except (OSError, SyntaxError, ValueError, EOFError) as error:
        code = "media.truncated" if "truncated" in str(error).lower() else "media.unreadable"
        raise MediaError(code, f"{path.name} cannot be read: {str(error)[:70]}") from error
    findings = _turned(orientation)
    if alpha:
        findings.append(Finding("media.alpha", "the picture has transparency"))
    if mode in ("1", "L", "LA", "I;16", "I", "F"):
        findings.append(Finding("media.grey", f"grey picture ({mode})"))
    if frames > 1 and not line.constant:
        findings.append(Finding("media.variable_rate", f"frames last different times; read at {float(line.rate):.3f} fps"))
    shown = (height, width) if orientation.swaps else (width, height)
    bits = 16 if mode.startswith("I") else 8
    return Probe(
        path, "video" if frames > 1 else "image", size, *shown, width, height, line, orientation, Fraction(1), kind, mode, bits, alpha=alpha, animated=frames > 1, findings=tuple(findings)
    )  # fmt: skip


def _has_end(path: Path, form: str) -> bool:
    """True when the file ends as its format does, so that it need not be decoded to know that it is whole."""
    mark = {"JPEG": b"\xff\xd9", "MPO": b"\xff\xd9", "PNG": b"IEND", "GIF": b"\x3b"}.get(form)
    with open(path, "rb") as file:
        size = file.seek(0, 2)
        if form == "WEBP":
            file.seek(4)
            return int.from_bytes(file.read(4), "little") + 8 <= size
        file.seek(max(0, size - 4096))
        return mark is not None and mark in file.read()


def _transparent(image: Any) -> bool:
    """True when some pixel is not opaque (many files have an alpha channel of nothing but 255)."""
    if "A" not in image.getbands() and "transparency" not in image.info:
        return False
    return image.convert("RGBA").getchannel("A").getextrema()[0] < 255


def animation_times(image: Any, frames: int) -> list[float]:
    """Start of each frame in seconds, and the end; browsers show frames of 10 ms or less for 100 ms."""
    times = [0.0]
    for n in range(frames):
        image.seek(n)
        if image.format == "WEBP":
            image.load()  # the duration is known only once decoded
        milliseconds = float(image.info.get("duration", 100) or 100)
        times.append(times[-1] + (0.1 if milliseconds <= 10 else milliseconds / 1000))
    return times


def _animation(image: Any, frames: int) -> Timeline:
    return timeline_of(animation_times(image, frames), None)


# -- everything PyAV opens -------------------------------------------------------------------------------------------


def _probe_av(path: Path, size: int) -> Probe:
    with opened(path) as container:
        pictures = moving_streams(container)
        sounds = [s for s in container.streams.audio if s.codec_context is not None and s.codec_context.sample_rate]
        if not pictures and not sounds:
            raise MediaError("media.no_frames", f"{path.name} holds no picture and no sound.")
        findings: list[Finding] = []
        if len(pictures) > 1 or len(sounds) > 1:
            findings.append(Finding("media.streams", f"{len(pictures)} video and {len(sounds)} audio streams"))
        video, audio = default_stream(pictures), default_stream(sounds)
        times = Times.read(path, container, video, audio, size)
        sound = _sound(container, audio, times) if audio is not None else None
        if video is None:
            return Probe(path, "audio", size, sound=sound, codec=sound.codec, findings=tuple(findings))
        return _picture(path, size, container, video, sound, times, findings)


def _picture(path: Path, size: int, container: Any, video: Any, sound: SoundInfo | None, times: Times, findings: list[Finding]) -> Probe:
    context = video.codec_context
    line = times.timeline
    orientation = _orientation(path, container, video)
    aspect = Fraction(video.sample_aspect_ratio or context.sample_aspect_ratio or 1)
    aspect = aspect if Fraction(1, 10) < aspect < 10 else Fraction(1)
    width, height = context.width, context.height
    shown = (max(1, round(width * aspect)), height)
    transfer = HDR_TRANSFERS.get(int(context.color_trc or 0), "sdr")
    gamut = WIDE_PRIMARIES.get(int(context.color_primaries or 0), "") if transfer == "sdr" else ""
    alpha = bool(context.format and any(c.is_alpha for c in context.format.components)) or video.metadata.get("alpha_mode") == "1"
    bits = context.format.components[0].bits if context.format else 8
    interlaced = str(getattr(context, "field_order", "")).lower() not in ("", "unknown", "progressive", "0", "1", "none")
    findings += _turned(orientation)
    if aspect != 1:
        findings.append(Finding("media.sample_aspect", f"pixels are {aspect.numerator}:{aspect.denominator}"))
    if not line.ordered:
        findings.append(Finding("media.timestamps", "timestamps run backwards or are missing"))
    elif not line.constant:
        findings.append(Finding("media.variable_rate", f"frame times vary; read at {float(line.rate):.3f} fps"))
    if interlaced:
        findings.append(Finding("media.interlaced", "interlaced picture"))
    if transfer != "sdr":
        findings.append(Finding("media.hdr", f"{transfer.upper()} high dynamic range"))
    if gamut and not alpha:
        findings.append(Finding("media.wide_gamut", f"{gamut.upper()} colours in standard range"))
    if alpha:
        findings.append(Finding("media.alpha", "the picture has transparency"))
    shown = shown[::-1] if orientation.swaps else shown
    return Probe(
        path, "video", size, *shown, width, height, line, orientation, aspect, context.name, context.pix_fmt or "", bits, transfer, interlaced, alpha, False, video.index,
        sound, tuple(findings), gamut,
    )  # fmt: skip


def _turned(orientation: Orientation) -> list[Finding]:
    if orientation.upright:
        return []
    return [Finding("media.rotated", f"stored turned by {orientation.degrees} degrees" + (", mirrored" if orientation.mirrored else ""))]


def _sound(container: Any, audio: Any, times: Times) -> SoundInfo:
    context = audio.codec_context
    seconds = float(audio.duration * audio.time_base) if audio.duration else times.sound_seconds
    if not seconds and container.duration:
        seconds = container.duration / 1e6
    start = float(audio.start_time * audio.time_base) if audio.start_time is not None else 0.0
    return SoundInfo(audio.index, context.sample_rate, context.layout.nb_channels, context.layout.name, seconds, start, context.name)


def _orientation(path: Path, container: Any, video: Any) -> Orientation:
    if "mp4" in container.format.name:
        return mp4_orientation(path, video.id)
    if "matroska" in container.format.name:
        return _first_frame_orientation(path, video.index)
    return Orientation()


def _first_frame_orientation(path: Path, index: int) -> Orientation:
    import av

    with opened(path) as container:
        try:
            for frame in container.decode(container.streams[index]):
                return frame_orientation(frame)
        except av.error.FFmpegError:
            pass  # a damaged start is named when the clip is read
    return Orientation()
