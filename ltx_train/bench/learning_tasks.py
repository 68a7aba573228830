"""What the learning bench teaches: a task for each of five modes, its drawn clips with what tells them, and the same told wrongly."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..conditioning.modes import MODES, Mode
from ..data.writers import write_png, write_video, write_wav
from ..tiny.drawing import COLOURS, DIRECTIONS, FPS, SHAPES, TONES, Scenes, draw, sound

SIZE = (64, 64, 17)
"""Width, height, frames."""
_RATE = 48000


@dataclass(frozen=True)
class Margins:
    """What a task must show. fall: share of the held-out loss that is gone. following: share of samples that show all that was asked.

    control: the most of that for a training whose clips were told wrongly. apart: how many times the trained model's held-out
    loss the control's is at least, at the highest noise level: there what a clip is told decides, not its kind.
    """

    fall: float
    following: float
    control: float
    apart: float


@dataclass(frozen=True)
class Task:
    """One mode's task on clips of a yellow star (or of other colours), which the fitted base does not know.

    row: the named mode whose conditions and target modules are trained. told_by: what says the clip's kind, and what the
    control exchanges between clips: caption, reference or sound. asked: what a sample is looked at for. colours, tones: of
    the clips; where a sound tells the colour they go together. caption: with {colour}, {direction}, {tone}.
    """

    row: str
    told_by: str
    asked: tuple[str, ...]
    caption: str
    margins: Margins
    steps: int
    colours: tuple[str, ...] = ("yellow",)
    directions: tuple[str, ...] = tuple(DIRECTIONS)
    tones: tuple[str, ...] = ("high",)
    clips: int = 24
    held_out: int = 8
    batch_size: int = 4
    learning_rate: float = 6e-3
    rank: int = 16
    cfg: float = 1.0

    @property
    def mode(self) -> Mode:
        return MODES[self.row]

    @property
    def stream(self) -> str:
        """The stream that samples are looked at or listened to for."""
        return "audio" if self.asked == ("tone",) else "video"

    @property
    def chance(self) -> float:
        """Share of samples that show what was asked when what tells it says nothing."""
        kinds = len({tuple(kind[name] for name in self.asked) for kind in self.kinds()})
        return 1 / kinds

    def kinds(self) -> list[dict[str, str]]:
        """Every kind of clip, by colour, direction and tone."""
        pairs = list(zip(self.colours, self.tones)) if self.told_by == "sound" else [(c, t) for c in self.colours for t in self.tones]
        return [{"colour": c, "direction": d, "tone": t} for c, t in pairs for d in self.directions]


TASKS: dict[str, Task] = {
    "t2v": Task("t2v_audio", "caption", ("colour", "direction"), "a {colour} star moves {direction}, a {tone} tone", Margins(0.3, 0.75, 0.5, 1.5), 64, learning_rate=8e-3, cfg=2.0),
    "i2v": Task("i2v_audio", "caption", ("colour", "direction"), "a {colour} star moves {direction}, a {tone} tone", Margins(0.3, 0.75, 0.5, 1.3), 56, learning_rate=8e-3, cfg=2.0),
    "v2v": Task("v2v", "reference", ("colour", "direction"), "a star", Margins(0.5, 0.75, 0.5, 1.5), 60),
    "a2v": Task(
        "a2v", "sound", ("colour",), "a star moves {direction}", Margins(0.3, 0.75, 0.65, 1.2), 110, ("blue", "yellow"), ("right",), ("low", "high"), clips=12, learning_rate=8e-3,
    ),
    "t2a": Task("t2a", "caption", ("tone",), "a white star moves up, a {tone} tone", Margins(0.3, 0.9, 0.65, 1.02), 100, directions=("up",), tones=("low", "high"), learning_rate=1e-2, cfg=2.0),
}  # fmt: skip


@dataclass(frozen=True)
class Clip:
    """A clip on disk: its kind, its caption, its file, and files that tell its kind beside it by role."""

    kind: dict[str, str]
    caption: str
    media: Path
    roles: dict[str, Path]
    first_frame: Path | None

    def row(self) -> dict[str, str]:
        """Its line in a dataset's table."""
        return {"video": str(self.media), "caption": self.caption, **{role: str(path) for role, path in self.roles.items()}}


def draw_clips(task: Task, folder: Path, count: int, seed: int) -> list[Clip]:
    """Write ``count`` clips of the task's kinds in turn, each with what tells it. All shapes start in the middle: a first frame does not tell the way."""
    kinds = task.kinds()
    chosen = [kinds[n % len(kinds)] for n in range(count)]
    scenes = _scenes(chosen, seed)
    streams = task.mode.strategy().streams()
    width, height, frames = SIZE
    picture = lambda drawn: (draw(drawn, frames, height, width) * 255).round().to(torch.uint8)  # noqa: E731
    pixels = picture(scenes) if streams.video != "absent" else None
    waves = sound(scenes, frames / FPS, rate=_RATE) if streams.audio != "absent" else None
    white = replace(scenes, colour=torch.full_like(scenes.colour, list(COLOURS).index("white")), shape=torch.zeros_like(scenes.shape))
    references = picture(white) if task.told_by == "reference" else None
    folder.mkdir(parents=True, exist_ok=True)
    return [_write(task, folder / f"clip_{n:02d}", chosen[n], *(None if part is None else part[n] for part in (pixels, waves, references))) for n in range(count)]


def _write(task: Task, stem: Path, kind: dict[str, str], frames: Tensor | None, wave: Tensor | None, reference: Tensor | None) -> Clip:
    video: Callable[..., Any] = lambda path, pictures: write_video(path, pictures, FPS, crf=8, pixel_format="yuv444p")  # noqa: E731
    roles, first, media = {}, None, stem.with_suffix(".mp4")
    if wave is not None:
        roles["audio"] = write_wav(stem.with_suffix(".wav"), wave, _RATE)
    if reference is not None:
        roles["reference_video"] = video(stem.with_name(f"{stem.name}_reference.mp4"), reference)
    if frames is None:
        media = roles.pop("audio")
    else:
        video(media, frames)
        first = write_png(stem.with_suffix(".png"), frames[0])
    return Clip(kind, task.caption.format(**kind), media, roles, first)


def _scenes(kinds: Sequence[dict[str, str]], seed: int) -> Scenes:
    """Stars of these kinds that start in the middle, of slightly different sizes."""
    count, source = len(kinds), torch.Generator().manual_seed(seed)
    width, _, frames = SIZE
    places = lambda table, name: torch.tensor([list(table).index(kind[name]) for kind in kinds])  # noqa: E731
    radius, speed = 9 + torch.rand(count, generator=source), torch.full((count,), 1.25)
    margin = radius + 1
    along = (width / 2 - margin) / (width - 2 * margin - speed * (frames - 1))
    middle = torch.full((count,), 0.5)
    ground, onset = 0.03 + 0.06 * torch.rand(count, generator=source), 0.05 * torch.rand(count, generator=source)
    return Scenes(
        places(COLOURS, "colour"), torch.full((count,), SHAPES.index("star")), places(DIRECTIONS, "direction"), places(TONES, "tone"),
        radius, speed, ground, along, middle, onset, torch.zeros(count),
    )  # fmt: skip


def told_wrongly(task: Task, clips: Sequence[Clip], seed: int = 5) -> list[Clip]:
    """The same clips, each with what tells another one's kind: captions, references or sounds exchanged at random."""
    order = torch.randperm(len(clips), generator=torch.Generator().manual_seed(seed)).tolist()
    role = {"reference": "reference_video", "sound": "audio"}.get(task.told_by)
    if role is None:
        return [replace(clip, caption=clips[other].caption) for clip, other in zip(clips, order)]
    return [replace(clip, roles={**clip.roles, role: clips[other].roles[role]}) for clip, other in zip(clips, order)]


def write_table(path: Path, clips: Sequence[Clip]) -> Path:
    """A dataset file of the clips."""
    path.write_text("".join(json.dumps(clip.row()) + "\n" for clip in clips), encoding="utf-8")
    return path


def settings(task: Task) -> dict[str, Any]:
    """All numbers that a task's training hangs on, as plain data."""
    return {**{name: value for name, value in asdict(task).items() if name != "margins"}, "size": list(SIZE)}
