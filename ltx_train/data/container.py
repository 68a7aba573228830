"""Opening a container with FFmpeg's errors named: its streams, when its frames are, whether the file is whole."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .findings import MediaError
from .timeline import Timeline, packet_timeline, timeline_of

if TYPE_CHECKING:
    import av


@contextmanager
def opened(path: Path) -> Iterator[av.container.InputContainer]:
    """An open container; FFmpeg's errors become MediaError."""
    import av

    # tags may be in any encoding; the file itself must still open. PyAV 19 opens such files by itself and has no such setting.
    tags = {"metadata_errors": "replace"} if int(av.__version__.partition(".")[0]) < 19 else {}
    try:
        container = av.open(os.path.abspath(path), **tags)  # FFmpeg takes a plain name such as "file:a.mp4" for a protocol
    except (av.error.FFmpegError, ValueError, UnicodeError) as error:
        raise MediaError("media.unreadable", f"{path.name} cannot be opened: {_words(error)}.") from error
    try:
        yield container
    finally:
        container.close()


def _words(error: Exception) -> str:
    return str(getattr(error, "strerror", None) or error).split(":")[0][:60]


def moving_streams(container: Any) -> list[Any]:
    """Video streams that move (cover art of a song is none)."""
    from av.stream import Disposition

    return [s for s in container.streams.video if not s.disposition & Disposition.attached_pic and s.codec_context is not None and s.codec_context.width]


def default_stream(streams: list[Any]) -> Any | None:
    """The stream a player takes: the one marked default, else the first."""
    from av.stream import Disposition

    marked = [s for s in streams if s.disposition & Disposition.default]
    return (marked or streams or [None])[0]


@dataclass(frozen=True)
class Times:
    """Time of the frames: from the index of the file where it has one, else from its packets (read, not decoded)."""

    timeline: Timeline | None
    sound_seconds: float

    @classmethod
    def read(cls, path: Path, container: Any, video: Any, audio: Any, size: int) -> Times:
        indexed = {"mov", "mp4", "avi"} & set(container.format.name.split(","))
        if indexed and all(s is None or s.frames or s.duration for s in (video, audio)):
            entries = getattr(video, "index_entries", None) if video is not None else None
            for stream in (video, audio):
                _check_whole(path, stream, size)
            if video is None:
                return cls(None, 0.0)
            if video.frames and entries is not None and len(entries) * 2 > video.frames:
                base = video.time_base
                times = [float(e.timestamp * base) for e in entries if not getattr(e, "is_discard", False)]
                line = timeline_of([*times, times[0] + float(video.duration * base)] if video.duration and times else times, video.average_rate)
                start = float(video.start_time * base) if video.start_time is not None else 0.0
                return cls(replace(line, start=start), 0.0)
            if video.frames and video.average_rate:  # an older PyAV does not show the index
                rate = Fraction(video.average_rate)
                start = float(video.start_time * video.time_base) if video.start_time is not None else 0.0
                nominal = video.guessed_rate in (None, video.average_rate)
                return cls(Timeline(start, rate, video.frames, video.frames / float(rate), nominal), 0.0)
        return cls._from_packets(path, container, video, audio)

    @classmethod
    def _from_packets(cls, path: Path, container: Any, video: Any, audio: Any) -> Times:
        import av

        wanted = [s for s in (video, audio) if s is not None]
        pictures: list[float | None] = []
        last, heard, first_sound = 0.0, 0.0, None
        try:
            for packet in container.demux(wanted):
                if packet.size == 0:
                    continue
                stamp = packet.pts if packet.pts is not None else packet.dts
                seconds = None if stamp is None else float(stamp * packet.time_base)
                if packet.stream is video:
                    pictures.append(seconds)
                    last = float((packet.duration or 0) * packet.time_base)
                elif seconds is not None:
                    first_sound = seconds if first_sound is None else first_sound
                    heard = max(heard, seconds + float((packet.duration or 0) * packet.time_base))
        except av.error.FFmpegError as error:
            if not pictures:
                raise MediaError("media.truncated", f"{path.name} cannot be read to its end: {_words(error)}.") from error
        sound_seconds = max(0.0, heard - (first_sound or 0.0))
        if video is None:
            return cls(None, sound_seconds)
        if not pictures:
            raise MediaError("media.no_frames", f"{path.name} holds a video stream without a picture.")
        line = packet_timeline(pictures, last, video.average_rate or video.guessed_rate)
        _check_length(path, container, max(line.start + line.seconds, heard))
        return cls(line, sound_seconds)


def _check_whole(path: Path, stream: Any, size: int) -> None:
    entries = getattr(stream, "index_entries", None) if stream is not None else None
    if entries is not None and len(entries):
        end = max(e.pos + e.size for e in entries)
        if end > size:
            raise MediaError("media.truncated", f"{path.name} has {size:,} bytes of at least {end:,}: it is cut off.")


def _check_length(path: Path, container: Any, end: float) -> None:
    """Matroska states its length: far less than that means that the file is cut off."""
    if container.duration and "matroska" in container.format.name:
        stated = container.duration / 1e6
        if end < stated - max(0.5, 0.02 * stated):
            raise MediaError("media.truncated", f"{path.name} ends after {end:.1f} of {stated:.1f} seconds: it is cut off.")
