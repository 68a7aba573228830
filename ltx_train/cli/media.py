"""Verbs that make a dataset: caption, split, reference, with the official scripts' flag names."""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from ..captioner.endpoint import GEMINI, HOST_KEYS, HOSTS_VARIABLE, KEY_VARIABLE, host_of
from ..config import parse_section
from ..data.listing import VIDEO_EXTENSIONS
from ..data.scenes import THRESHOLDS, SceneSection, find_scenes, split
from ..errors import ConfigError, DataError

LIBRARY = ("content", "adaptive", "threshold", "histogram", "hash")
OF_DETECTORS = {
    "luma_only": ("content", "adaptive"), "adaptive_window": ("adaptive",), "fade_bias": ("threshold",), "downscale": LIBRARY, "frame_skip": LIBRARY, "stats_file": LIBRARY,
}  # fmt: skip
"""Options of split that only some detectors know."""
CONTROLS = ("canny", "blur", "low_resolution", "grey", "depth")


def add(verbs: argparse._SubParsersAction) -> None:
    """Register the verbs."""
    _caption_arguments(verbs.add_parser("caption", help="write captions with a model that sees and hears; what a person wrote stays"))
    _split_arguments(verbs.add_parser("split", help="cut films into their scenes, each a clip with its sound"))
    _reference_arguments(verbs.add_parser("reference", help="make reference clips: canny, blur, low resolution, grey, depth"))


# -- caption ---------------------------------------------------------------------------------------------------------


def _caption_arguments(verb: argparse.ArgumentParser) -> None:
    verb.add_argument("input", help="a clip, a folder of clips, or a .csv, .json or .jsonl file")
    verb.add_argument("-o", "--output", help="result file: .json, .jsonl, .csv or .txt (default: dataset.json in the folder)")
    verb.add_argument("-c", "--captioner-type", choices=("qwen_omni", "endpoint", "gemini_flash", "local"), default="qwen_omni")
    verb.add_argument("--vllm-url", "--url", dest="url", help="the endpoint's base address (default http://127.0.0.1:8001/v1)")
    verb.add_argument("--vllm-model", "--model", dest="model", help="the model's name at the endpoint")
    verb.add_argument("--model-path", help="with -c local: a Hugging Face folder of a Qwen2.5-Omni model")
    verb.add_argument("--allow-host", action="append", default=[], metavar="HOST", help=f"send clips to this host too (or set {HOSTS_VARIABLE})")
    verb.add_argument("--enable-thinking", "--thinking", dest="thinking", action="store_true", default=None)
    verb.add_argument("--no-thinking", dest="thinking", action="store_false")
    verb.add_argument("--max-tokens", type=int)
    verb.add_argument("-i", "--instruction", help="what is asked of videos and sounds")
    verb.add_argument("--image-instruction", help="what is asked of pictures")
    verb.add_argument("-e", "--extensions", help="only files of these, such as mp4,mov,png")
    verb.add_argument("-r", "--recursive", action=argparse.BooleanOptionalAction, default=True)
    verb.add_argument("-f", "--fps", type=float, help="frames a second that are looked at (default 2)")
    verb.add_argument("--max-frames", type=int)
    verb.add_argument("--send", choices=("video", "frames"), help="send an inline mp4, or single pictures (more servers take these)")
    verb.add_argument("--skip-audio", action="store_true", help="do not listen")
    verb.add_argument("--override", action="store_true", help="write a model's captions anew (never a person's)")
    verb.add_argument("--keep-prefixes", action="store_true", help="keep openings such as 'This video shows'")
    verb.add_argument("-w", "--num-workers", type=int, default=1, help="clips captioned at a time")
    verb.add_argument("--device", help="with -c local")
    verb.add_argument("--api-key", help=argparse.SUPPRESS)
    verb.add_argument("--json", action="store_true", help="the result as JSON")
    verb.set_defaults(run=run_caption)


def run_caption(options: argparse.Namespace) -> int:
    from ..captioner import CaptionJob, caption_dataset

    if options.api_key:
        raise ConfigError("caption.key", "A key on the command line would be seen by everybody.", f"Set it in the environment variable {KEY_VARIABLE} instead.")
    captioner, hosts = captioner_section(options)
    values = {
        "input": options.input, "output": options.output, "captioner": captioner, "extensions": options.extensions, "recursive": options.recursive,
        "override": options.override, "remove_llm_prefixes": not options.keep_prefixes, "workers": options.num_workers,
    }  # fmt: skip
    job = parse_section(CaptionJob, values)
    with _Bar("captions", options.json) as bar:
        done = caption_dataset(job, allowed=frozenset(options.allow_host) | hosts, progress=bar)
    return _finish(options, Outcome(str(done.table), {"written": done.written, "kept": done.kept}, done.failed))


def captioner_section(options: argparse.Namespace) -> tuple[dict[str, Any], frozenset[str]]:
    """(the captioner's section as plain values, the host that its choice allows)."""
    kind = options.captioner_type
    shared = {
        "max_tokens": options.max_tokens, "instruction": options.instruction, "image_instruction": options.image_instruction, "fps": options.fps,
        "max_frames": options.max_frames, "sound": False if options.skip_audio else None,
    }  # fmt: skip
    if kind == "local":
        if not options.model_path:
            raise ConfigError("caption.model", "A local captioner needs --model-path.", "Give a Hugging Face folder of a Qwen2.5-Omni model.")
        values = {"kind": "local", "model_path": options.model_path, "device": options.device, **shared}
        return {k: v for k, v in values.items() if v is not None}, frozenset()
    values = {"kind": "endpoint", "url": options.url, "model": options.model, "thinking": options.thinking, "send": options.send, **shared}
    hosts: frozenset[str] = frozenset()
    if kind == "gemini_flash":
        own = {"url": GEMINI, "model": "gemini-3.5-flash", "send": "frames"}
        values = {**values, **{k: v for k, v in own.items() if values[k] is None}}
        hosts = frozenset({host_of(GEMINI)})  # chosen by name
    values = {k: v for k, v in values.items() if v is not None}
    if host_of(values.get("url", "")) in HOST_KEYS:
        values["repetition_penalty"] = None  # these services refuse what they do not know
    return values, hosts


# -- split -----------------------------------------------------------------------------------------------------------


def _split_arguments(verb: argparse.ArgumentParser) -> None:
    verb.add_argument("video", type=Path, help="a film, or a folder of films")
    verb.add_argument("output", type=Path, help="folder of the clips")
    verb.add_argument("--detector", choices=tuple(THRESHOLDS), default="simple", help="simple needs nothing; the others are PySceneDetect's")
    verb.add_argument("--threshold", type=float, help="lower cuts more; each detector has its usual value")
    verb.add_argument("--max-scenes", type=int)
    verb.add_argument("--min-scene-length", type=int, metavar="FRAMES", help="shorter scenes are joined to the one before")
    verb.add_argument("--filter-shorter-than", metavar="TIME", help="leave out scenes shorter than this, such as 5s")
    verb.add_argument("--max-length", metavar="TIME", help="cut longer scenes into equal parts of at most this")
    verb.add_argument("--skip-start", metavar="TIME")
    verb.add_argument("--skip-end", metavar="TIME")
    verb.add_argument("-d", "--duration", metavar="TIME", help="look at so much only")
    verb.add_argument("--save-images", type=int, default=0, metavar="N", help="N pictures of each scene into OUTPUT/.images, for looking")
    verb.add_argument("--stats-file", help="write the detector's numbers of every frame into this CSV")
    verb.add_argument("--luma-only", action="store_true")
    verb.add_argument("--adaptive-window", type=int)
    verb.add_argument("--fade-bias", type=float)
    verb.add_argument("--downscale", type=int)
    verb.add_argument("--frame-skip", type=int)
    verb.add_argument("--crf", type=int, help="quality of the clips; lower is better (default 14)")
    verb.add_argument("--json", action="store_true", help="the result as JSON")
    verb.set_defaults(run=run_split)


def run_split(options: argparse.Namespace) -> int:
    films = _films(options.video)
    if options.save_images < 0:
        raise ConfigError("scenes.images", f"--save-images {options.save_images}: there are no fewer than 0 pictures.", "Give how many pictures of each scene you want to look at.")
    if options.stats_file and len(films) > 1:
        raise ConfigError("scenes.stats", f"--stats-file is for one film; {options.video} holds {len(films)}: each would write over the one before.", "Give one film.")
    written: dict[str, list[str]] = {}
    failed: dict[str, str] = {}
    with _Bar("films", options.json) as bar:
        for number, film in enumerate(films, 1):
            try:
                written[film.name] = [str(p) for p in _split_one(film, options)]
            except DataError as error:
                if len(films) == 1:
                    raise
                failed[film.name] = error.message
            bar(number, len(films), film.name)
    return _finish(options, Outcome(str(options.output), {"clips": [p for each in written.values() for p in each]}, failed))


def _films(given: Path) -> list[Path]:
    if given.is_dir():
        found = sorted(p for p in given.iterdir() if p.suffix.lower() in VIDEO_EXTENSIONS and p.is_file() and not p.name.startswith("."))
        if not found:
            raise DataError("scenes.no_video", f"No video was found in {given}."[:118], "Give a film, or a folder that holds some.")
        return found
    if not given.is_file():
        raise DataError("scenes.no_video", f"There is no film {given}."[:118], "Give a film, or a folder that holds some.")
    return [given]


def _split_one(film: Path, options: argparse.Namespace) -> list[Path]:
    section = scene_section(options, film)
    clips = split(film, options.output, section)
    if options.save_images > 0:
        _save_images(film, section, clips, options.output / ".images", options.save_images)
    return clips


def scene_section(options: argparse.Namespace, film: Path) -> SceneSection:
    """The scene section of the command line's options; lengths in frames are the film's own."""
    from ..data.probe import probe

    names = ("detector", "threshold", "max_scenes", "stats_file", "adaptive_window", "fade_bias", "downscale", "frame_skip", "crf")
    values: dict[str, Any] = {name: getattr(options, name) for name in names}
    times = {"filter_shorter_than": "filter_shorter_than", "max_length": "max_seconds", "skip_start": "skip_start", "skip_end": "skip_end", "duration": "duration"}
    values |= {field: seconds(getattr(options, name)) for name, field in times.items() if getattr(options, name) is not None}
    values["luma_only"] = options.luma_only
    for name, detectors in OF_DETECTORS.items():
        if values.get(name) and options.detector not in detectors:
            raise ConfigError("scenes.option", f"--{name.replace('_', '-')} does nothing with the detector {options.detector}.", f"It is for --detector {' or '.join(detectors)}.")
    if options.min_scene_length is not None:
        found = probe(film)
        values["min_seconds"] = options.min_scene_length / found.fps if found.fps else None
    return parse_section(SceneSection, {k: v for k, v in values.items() if v is not None})


def seconds(text: str) -> float:
    """``5``, ``5s``, ``2.5s``, ``500ms`` or ``00:01:02.5`` in seconds."""
    given = text.strip().lower()
    if match := re.fullmatch(r"(\d+(?:\.\d+)?)\s*(ms|s)?", given):
        return float(match[1]) / (1000 if match[2] == "ms" else 1)
    if match := re.fullmatch(r"(?:(\d+):)?(\d{1,2}):(\d{1,2}(?:\.\d+)?)", given):
        return int(match[1] or 0) * 3600 + int(match[2]) * 60 + float(match[3])
    raise ConfigError("time", f"'{text[:40]}' is no time.", "Write it as 5s, 2.5, 500ms or 00:01:30.")


def _save_images(film: Path, section: SceneSection, clips: list[Path], folder: Path, count: int) -> None:
    """``count`` pictures of each scene, evenly spaced, in a hidden folder, so that no dataset takes them for stills."""
    from ..data.decode import pictures
    from ..data.probe import probe
    from ..data.scenes import scene_plan
    from ..data.writers import write_png

    found = probe(film)
    for clip, scene in zip(clips, find_scenes(film, section)):
        plan = scene_plan(found, scene)
        wanted = {round((n + 0.5) * plan.frames / count - 0.5): n + 1 for n in range(min(count, plan.frames))}
        for at, picture in enumerate(pictures(plan)):
            if at in wanted:
                write_png(folder / f"{clip.stem}-{wanted[at]:02d}.png", picture.pixels)


# -- reference -------------------------------------------------------------------------------------------------------


def _reference_arguments(verb: argparse.ArgumentParser) -> None:
    verb.add_argument("dataset", help="folder of clips, or a .csv, .json or .jsonl file")
    verb.add_argument("-o", "--output", help="folder of the references, or a dataset file that gets the reference_video column")
    verb.add_argument("--type", choices=CONTROLS, default="canny")
    verb.add_argument("--low", type=float, help="canny: weaker edges are dropped (default 100)")
    verb.add_argument("--high", type=float, help="canny: stronger edges are always kept (default 200)")
    verb.add_argument("--strength", type=float, help="blur: deviation as a share of the shorter side (default 0.02)")
    verb.add_argument("--factor", type=float, help="low_resolution: how many times smaller (default 4)")
    verb.add_argument("--model-path", help="depth: a Hugging Face folder of a depth-estimation model")
    verb.add_argument("--device", help="depth: where the model runs")
    verb.add_argument("--override", action="store_true", help="make anew what is there")
    verb.add_argument("--batch-size", type=int, help="taken and not needed: frames are streamed one by one")
    verb.add_argument("--json", action="store_true", help="the result as JSON")
    verb.set_defaults(run=run_reference)


def run_reference(options: argparse.Namespace) -> int:
    from ..controls import ReferenceJob, make_references

    control = {"kind": options.type} | {n: v for n in ("low", "high", "strength", "factor", "model_path", "device") if (v := getattr(options, n)) is not None}
    job = parse_section(ReferenceJob, {"dataset": options.dataset, "output": options.output, "control": control, "override": options.override})
    with _Bar("references", options.json) as bar:
        done = make_references(job, bar)
    return _finish(options, Outcome(str(done.table), {"made": done.made, "kept": done.kept}, done.failed))


# -- shared ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Outcome:
    """What a verb did: the place of the result, ids by what became of them, and reasons of those that failed."""

    output: str
    lists: dict[str, list[str]]
    failed: dict[str, str]


def _finish(options: argparse.Namespace, outcome: Outcome) -> int:
    """Say what was done; exit code 2 when nothing was."""
    good = any(outcome.lists.values())
    if options.json:
        print(json.dumps({"output": outcome.output, **outcome.lists, "failed": outcome.failed}, ensure_ascii=False))  # noqa: T201 - for machines
        return 0 if good else 2
    console = Console()
    for name, message in outcome.failed.items():
        console.print(f"! {name}: {message}", style="yellow", markup=False)
    counts = ", ".join(f"{len(items)} {name}" for name, items in outcome.lists.items())
    console.print(f"{counts}, {len(outcome.failed)} failed: {outcome.output}", markup=False, highlight=False)
    return 0 if good else 2


class _Bar:
    """A progress bar for people; nothing for machines and pipes."""

    def __init__(self, what: str, quiet: bool) -> None:
        console = Console(stderr=True)
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[note]}"), TimeRemainingColumn())
        self.progress = Progress(*columns, console=console, transient=True, disable=quiet or not console.is_terminal)
        self.task = self.progress.add_task(what, total=None, note="")

    def __enter__(self) -> Callable[[int, int, str], None]:
        self.progress.start()
        return lambda done, total, note: self.progress.update(self.task, completed=done, total=total, note=note)

    def __exit__(self, *_: object) -> None:
        self.progress.stop()
