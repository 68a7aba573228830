"""Scene splitting: where a long film cuts, and each scene as a clip of its own, written elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any, Literal

import numpy as np
from pydantic import Field
from torch import Tensor

from ..errors import ConfigError, DataError, MissingPackage
from ..section import Section
from .buckets import Bucket, ClipOptions, ClipPlan, Placement
from .cache import READER, digest, file_fingerprint
from .colour import rgb
from .decode import decoded, pictures
from .probe import Probe, probe
from .sound import read_sound
from .sources import Sample
from .writers import Record, write_video

THRESHOLDS = {"simple": 27.0, "content": 27.0, "adaptive": 3.0, "threshold": 12.0, "histogram": 0.2, "hash": 0.35}
RECORD = ".scenes.json"
"""In a folder of clips: which film, and which part of it, each clip is."""


class SceneSection(Section):
    """How a film is cut into scenes."""

    detector: Literal["simple", "content", "adaptive", "threshold", "histogram", "hash"] = Field(
        "simple", description="simple: our own comparison of neighbouring frames; the others are PySceneDetect's and need that package."
    )
    threshold: float | None = Field(None, gt=0, description="Sensitivity; None takes the detector's usual value. Lower cuts more.")
    min_seconds: float = Field(0.6, gt=0, description="Shorter scenes are joined to the one before.")
    filter_shorter_than: float = Field(0.0, ge=0, description="Scenes shorter than this many seconds are left out.")
    max_scenes: int | None = Field(None, ge=1, description="At most this many scenes.")
    max_seconds: float | None = Field(None, gt=0, description="Longer scenes are cut into equal parts of at most this length.")
    skip_start: float = Field(0.0, ge=0, description="Leave out so many seconds at the beginning.")
    skip_end: float = Field(0.0, ge=0, description="Leave out so many seconds at the end.")
    duration: float | None = Field(None, gt=0, description="Look at so many seconds only, from skip_start on.")
    luma_only: bool = Field(False, description="PySceneDetect's content and adaptive detectors: compare brightness alone.")
    adaptive_window: int = Field(2, ge=1, le=100, description="PySceneDetect's adaptive detector: frames on each side that are averaged.")
    fade_bias: float = Field(0.0, ge=-1, le=1, description="PySceneDetect's threshold detector: where in a fade the cut lies, -1 at its beginning, 1 at its end.")
    downscale: int | None = Field(None, ge=1, le=64, description="PySceneDetect: look at pictures so many times smaller; None chooses by size.")
    frame_skip: int = Field(0, ge=0, le=100, description="PySceneDetect: frames left out between two that are looked at; quicker, less exact.")
    stats_file: str | None = Field(None, description="PySceneDetect: write the numbers of every frame into this CSV, to choose a threshold by.")
    crf: int = Field(14, ge=0, le=40, description="Quality of the written clips; lower is better.")


@dataclass(frozen=True)
class Scene:
    """One scene: [start, end) in seconds from the first frame of the film."""

    start: float
    end: float

    @property
    def seconds(self) -> float:
        return self.end - self.start


def find_scenes(path: Path, section: SceneSection | None = None, progress: Callable[[float], None] | None = None) -> list[Scene]:
    """The scenes of a video in order. Raises MissingPackage for PySceneDetect's detectors without it, MediaError for bad files."""
    section = section or SceneSection()
    found = probe(path)
    if found.kind != "video":
        raise DataError("scenes.no_video", f"{path.name} is {found.kind}, not a video that could be cut.", "Give a video file.")
    _check(section, path, found)
    cuts = _simple_cuts(found, section, progress) if section.detector == "simple" else _library_cuts(path, found, section)
    begin, end = section.skip_start, found.timeline.seconds - section.skip_end
    end = end if section.duration is None else min(end, begin + section.duration)
    if end - begin < 1 / found.fps:
        raise DataError("scenes.nothing_left", f"{path.name} has {found.timeline.seconds:.2f} s: nothing is left after skipping."[:118], "Lower skip_start and skip_end.")
    edges = [begin, *(c for c in cuts if begin < c < end), end]
    kept = [edges[0]]
    for edge in edges[1:-1]:
        if edge - kept[-1] >= section.min_seconds and edges[-1] - edge >= section.min_seconds:
            kept.append(edge)
    scenes = [part for a, b in zip(kept, [*kept[1:], edges[-1]]) for part in _parts(Scene(a, b), section.max_seconds)]
    longest = max(s.seconds for s in scenes)
    scenes = [s for s in scenes if s.seconds >= section.filter_shorter_than]
    if not scenes:
        raise DataError(
            "scenes.nothing_left", f"No scene of {path.name} has {section.filter_shorter_than:g} s; its longest has {longest:.2f} s.",
            "Lower filter_shorter_than, or raise max_seconds where that cuts the scenes.",
        )  # fmt: skip
    return scenes[: section.max_scenes] if section.max_scenes else scenes


def _check(section: SceneSection, path: Path, found: Probe) -> None:
    """Raise ConfigError for what cannot be, before a long film is looked at."""
    if section.stats_file and section.detector == "simple":
        raise ConfigError("scenes.stats", "stats_file needs one of PySceneDetect's detectors; this one is simple.", "Choose content, adaptive, threshold, histogram or hash.")
    if section.stats_file and section.frame_skip:
        raise ConfigError("scenes.stats", f"stats_file tells of every frame; frame_skip {section.frame_skip} leaves some out.", "Leave one of the two out.")
    if section.stats_file and Path(section.stats_file).expanduser().is_dir():
        raise ConfigError("scenes.stats", f"stats_file {section.stats_file} is a folder.", "Name a .csv file.")
    if section.max_seconds is not None and section.max_seconds * found.fps < 1:
        raise ConfigError("scenes.max_seconds", f"max_seconds {section.max_seconds:g} is less than a frame of {path.name} ({1 / found.fps:.3f} s).", "Clips for training mostly have 2 to 10 seconds.")


def _parts(scene: Scene, most: float | None) -> list[Scene]:
    count = 1 if most is None else max(1, int(np.ceil(scene.seconds / most - 1e-6)))
    step = scene.seconds / count
    return [Scene(scene.start + n * step, scene.start + (n + 1) * step) for n in range(count)]


def _simple_cuts(found: Probe, section: SceneSection, progress: Callable[[float], None] | None) -> list[float]:
    """Cuts where the mean change of hue, saturation and brightness (0..255) of a small picture passes the threshold."""
    limit = section.threshold or THRESHOLDS["simple"]
    last, cuts = None, []
    for seconds, small in _small_frames(found):
        colour = _hsv(small)
        if last is not None:
            change = np.abs(colour - last)
            change[..., 0] = np.minimum(change[..., 0], 255 - change[..., 0])  # hue is a circle
            if change.mean() > limit:
                cuts.append(seconds - found.timeline.start)
        last = colour
        if progress:
            progress(min(1.0, (seconds - found.timeline.start) / max(found.timeline.seconds, 1e-6)))
    return cuts


def _small_frames(found: Probe, side: int = 64) -> Iterator[tuple[float, np.ndarray]]:
    step = max(1, max(found.coded_width, found.coded_height) // side)
    if found.animated:
        from .stills import animation_frames

        for item in animation_frames(found.path):
            yield item.seconds, item.frame[::step, ::step, :3]
        return
    for item in decoded(found, None):
        yield item.seconds, rgb(item.frame)[::step, ::step]


def _hsv(pixels: np.ndarray) -> np.ndarray:
    """[H, W, 3] uint8 RGB -> float32 hue, saturation, value, each 0..255."""
    values = pixels.astype(np.float32)
    top, low = values.max(-1), values.min(-1)
    span = np.maximum(top - low, 1e-6)
    red, green, blue = np.moveaxis(values, -1, 0)
    hue = np.where(top == red, (green - blue) / span, np.where(top == green, 2 + (blue - red) / span, 4 + (red - green) / span)) % 6
    hue = np.where(top - low < 1, 0, hue * (255 / 6))
    return np.stack([hue, np.where(top > 0, 255 * (top - low) / np.maximum(top, 1e-6), 0), top], -1)


def _library_cuts(path: Path, found: Probe, section: SceneSection) -> list[float]:
    try:
        import scenedetect
    except ImportError as error:
        raise MissingPackage("scenedetect[pyav]", f"The {section.detector} detector", "Or use the detector 'simple', which needs nothing") from error
    name = {"content": "ContentDetector", "adaptive": "AdaptiveDetector", "threshold": "ThresholdDetector", "histogram": "HistogramDetector", "hash": "HashDetector"}[section.detector]
    limit = section.threshold or THRESHOLDS[section.detector]
    argument = "adaptive_threshold" if section.detector == "adaptive" else "threshold"
    frames = max(1, round(section.min_seconds * found.fps))
    own: dict[str, Any] = {"luma_only": section.luma_only} if section.detector in ("content", "adaptive") else {}
    own |= {"adaptive": {"window_width": section.adaptive_window}, "threshold": {"fade_bias": section.fade_bias}}.get(section.detector, {})
    manager = scenedetect.SceneManager(scenedetect.StatsManager() if section.stats_file else None)
    manager.add_detector(getattr(scenedetect, name)(**{argument: limit, "min_scene_len": frames}, **own))
    if section.downscale is not None:
        manager.auto_downscale, manager.downscale = False, section.downscale
    manager.detect_scenes(scenedetect.open_video(str(path), backend="pyav", suppress_output=True), frame_skip=section.frame_skip)
    if section.stats_file:
        manager.stats_manager.save_to_csv(csv_file=str(Path(section.stats_file).expanduser()))
    return [_seconds(start) for start, _ in manager.get_scene_list()][1:]


def _seconds(code: Any) -> float:
    """Seconds of a FrameTimecode, old and new forms."""
    return float(code.seconds if hasattr(code, "seconds") else code.get_seconds())


def split(
    path: Path, folder: Path, section: SceneSection | None = None, progress: Callable[[int, int], None] | None = None, check: Callable[[], None] = lambda: None
) -> list[Path]:
    """Write each scene as ``<stem>-scene-001.mp4`` with its sound into ``folder``; files that are there already are kept.

    Of two films of one stem the second's clips are called ``<stem>_<extension>-scene-001.mp4``. check: called for every
    frame, may raise to stop. Raises ConfigError where the folder holds other parts of the film, or another film's, by these names.
    """
    section = section or SceneSection()
    found = probe(path)
    if folder.exists() and not folder.is_dir():
        raise ConfigError("scenes.folder", f"The clips need a folder; {folder} is a file.", "Give a new folder, or one that holds clips.")
    scenes = find_scenes(path, section, lambda _: check())
    record, film = Record(folder / RECORD), file_fingerprint(path)
    stem = _stem(path, record)
    made_from = {
        folder / f"{stem}-scene-{number:03d}.mp4": f"{digest([READER, film, scene.start, scene.end, section.crf])} {path.name}" for number, scene in enumerate(scenes, 1)
    }
    if any(target.exists() and record.get(target) not in (None, key) for target, key in made_from.items()):
        raise ConfigError(
            "scenes.other", f"{folder.name} holds clips of {path.name} that were cut another way, or of another film of this name.",
            f"Nothing is written over: give another folder, or delete {stem}-scene-*.mp4 there first.",
        )  # fmt: skip
    for number, (scene, (target, key)) in enumerate(zip(scenes, made_from.items()), 1):
        if not target.exists():
            write_scene(found, scene, target, section.crf, check)
            record.set(target, key)
        if progress:
            progress(number, len(scenes))
    return list(made_from)


def _stem(path: Path, record: Record) -> str:
    """What a film's clips are called by: its stem, with the extension behind it where another film's clips have that."""
    for stem in (path.stem, f"{path.stem}_{path.suffix[1:].lower()}"):
        owners = {key.partition(" ")[2] for name, key in record.keys.items() if name.lower().startswith(f"{stem}-scene-".lower())}
        if owners <= {path.name}:
            return stem
    return path.name


def write_scene(found: Probe, scene: Scene, target: Path, crf: int = 14, check: Callable[[], None] = lambda: None) -> None:
    """One scene, upright at its own size and rate, with its sound."""
    plan = scene_plan(found, scene)
    start = found.timeline.start + scene.start
    seconds = plan.frames / float(plan.fps)
    sound = read_sound(found.path, found.sound, start, seconds) if found.sound else None
    write_video(target, _pixels(plan, check), plan.fps, sound.waveform if sound else None, sound.sample_rate if sound else None, crf=crf)


def scene_plan(found: Probe, scene: Scene) -> ClipPlan:
    """The plan that reads all frames of a scene at full size."""
    rate = found.timeline.rate
    first = round(scene.start * float(rate))
    count = max(1, min(round(scene.end * float(rate)), found.frames) - first)
    bucket = Bucket(found.width, found.height, count)
    place = Placement(found.width, found.height)
    start = found.timeline.start + first / float(rate)
    return ClipPlan(Sample(found.path.name, found.path, ""), found.path, found, bucket, place, first, 1, Fraction(rate), start, count / float(rate), ClipOptions())


def _pixels(plan: ClipPlan, check: Callable[[], None]) -> Iterator[Tensor]:
    for picture in pictures(plan):
        check()
        yield picture.pixels
