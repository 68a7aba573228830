"""Does training teach what the clips say? Each mode trained through the product's own path on drawn clips, beside a control told wrongly."""

from __future__ import annotations

import hashlib
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .. import trainer
from ..config import PreprocessJob, TrainConfig, digest
from ..held_out import SIGMAS
from ..preprocess import run as preprocess
from ..runs.events import HeldOutEvent, SampleEvent, StepEvent
from ..runs.live import LiveRun
from ..runs.run_dir import RunDir
from ..tiny.drawing import FPS
from ..tiny.fitted_set import FittedSet
from ..tiny.measures import look, pitch, tone
from .learning_tasks import SIZE, TASKS, Clip, Task, draw_clips, settings, told_wrongly, write_table

BUCKET = "x".join(map(str, SIZE))
SEED = 7


@dataclass(frozen=True)
class Learned:
    """What one training did, before and after: the held-out loss, that of the stream looked at at the highest noise level, and the
    share of samples that show what was asked (None where none was made before)."""

    loss: tuple[float, float]
    high: tuple[float, float]
    following: tuple[float | None, float]
    by_word: dict[str, float]
    seconds_per_step: float

    @property
    def fall(self) -> float:
        return 1 - self.loss[1] / self.loss[0]


def measure(name: str, task: Task | None = None, folder: Path | None = None) -> dict[str, Any]:
    """One mode's record: the training, and its control. folder: where clips and runs stay; None: nowhere."""
    task = task or TASKS[name]
    started = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="ltx-learning-") as scratch, _one_thread():
        place = Path(folder or scratch) / name
        clips, held = draw_clips(task, place / "clips", task.clips, 1), draw_clips(task, place / "held", task.held_out, 2)
        _cache_held_out(task, place, held)
        _train(task, place, "right", clips, held)
        _train(task, place, "wrong", told_wrongly(task, clips), held)
        return make_record(name, task, place, held, time.perf_counter() - started)


def make_record(name: str, task: Task, place: Path, held: Sequence[Clip], seconds: float) -> dict[str, Any]:
    """What the two runs below ``place`` show."""
    right, wrong = (learned(RunDir(place / run), task, held) for run in ("right", "wrong"))
    record = {
        "bench": "learning", "mode": name, "row": task.row, "told_by": task.told_by, "asked": list(task.asked), "steps": task.steps,
        "held_out": _rounded(*right.loss), "fall": round(right.fall, 3), "control_fall": round(wrong.fall, 3),
        "high_noise": _rounded(*right.high), "control_high_noise": round(wrong.high[1], 4), "following": _rounded(*right.following), "by_word": right.by_word,
        "control": round(wrong.following[1], 3), "control_by_word": wrong.by_word, "samples": task.held_out, "chance": round(task.chance, 3),
        "seconds_per_step": round(right.seconds_per_step, 3), "seconds": round(seconds, 1), "made_with": fingerprint(name, task),
    }  # fmt: skip
    return {**record, "passed": not shortfalls(record, task)}


def shortfalls(record: dict[str, Any], task: Task) -> list[str]:
    """What a record lacks of its task's margins, in words; empty when all are met."""
    margins, found = task.margins, []
    if record["fall"] < margins.fall:
        found.append(f"the held-out loss fell by {record['fall']:.0%}, not by {margins.fall:.0%}")
    if record["following"][1] < margins.following:
        found.append(f"{record['following'][1]:.0%} of the samples show what was asked, not {margins.following:.0%}")
    if record["following"][0] > margins.control:
        found.append(f"the untrained model shows it in {record['following'][0]:.0%} already")
    if record["control"] > margins.control:
        found.append(f"the control shows it in {record['control']:.0%}, above {margins.control:.0%}")
    if record["control_high_noise"] < margins.apart * record["high_noise"][1]:
        found.append(f"the control's loss at high noise is {record['control_high_noise']:.3f}, not {margins.apart:g} times {record['high_noise'][1]:.3f}")
    return found


def fingerprint(name: str, task: Task | None = None) -> str:
    """16 hex digits over all that a record depends on but the code: the task, the training's settings, the fitted set."""
    task = task or TASKS[name]
    files = FittedSet.at()
    data = job(task, Path("here"), Path("here/table.jsonl"), []).model_dump(mode="json")
    weights = [hashlib.sha256(path.read_bytes()).hexdigest()[:16] for path in (files.model, files.text_encoder)]
    return digest([settings(task), weights, {k: data[k] for k in ("lora", "training_strategy", "optimization", "flow_matching", "validation", "seed")}])


# ---- the jobs


def _model() -> dict[str, str]:
    files = FittedSet.at()
    return {"model_path": str(files.model), "text_encoder_path": str(files.text_encoder)}


def job(task: Task, place: Path, table: Path, held: Sequence[Clip]) -> TrainConfig:
    """The training, as a user would write it: samples are asked for with what tells the held-out clips' kinds."""
    streams = task.mode.strategy().streams()
    return TrainConfig.parse({
        "model": _model(),
        "lora": {"rank": task.rank, "alpha": task.rank, "target_modules": list(task.mode.target_modules)},
        "training_strategy": task.mode.strategy().model_dump(mode="json"),
        "optimization": {"steps": task.steps, "batch_size": task.batch_size, "learning_rate": task.learning_rate, "scheduler_type": "cosine", "warmup_steps": 5},
        "acceleration": {"mixed_precision_mode": "no", "device": "cpu"},
        # noise levels as high as the sampler's: that is where a sample's colour, way and pitch are settled
        "flow_matching": {"timestep_sampling_params": {"min_tokens": 4096}},
        "data": {
            "dataset": str(table), "resolution_buckets": BUCKET, "cache_dir": str(place / "cache"), "index": f"{table.stem}.json",
            "held_out_root": str(place / "held_cache"),
        },
        "validation": {
            "samples": [sample(task, clip) for clip in held], "video_dims": list(SIZE), "frame_rate": FPS, "inference_steps": 8, "interval": task.steps, "seed": SEED,
            "negative_prompt": "", "video_cfg_scale": task.cfg, "audio_cfg_scale": task.cfg, "video_stg_scale": 0.0, "audio_stg_scale": 0.0, "guidance_rescale": 0.0,
            "video_modality_guidance_scale": 1.0, "audio_modality_guidance_scale": 1.0, "image_crf": 0, "contact_sheet": False,
            "generate_video": streams.video != "absent", "generate_audio": streams.audio == "generated",
            "skip_initial_validation": table.stem == "wrong",
        },
        "logging": {"tensorboard": False, "csv": False},
        "seed": SEED,
        "output_dir": str(place / table.stem),
    })  # fmt: skip


def sample(task: Task, clip: Clip) -> dict[str, Any]:
    """What asks for a clip of the kind of a held-out one: its caption, and its first frame, reference or sound where the mode takes one."""
    conditions: list[dict[str, str]] = []
    strategy = task.mode.strategy()
    if task.told_by == "reference":
        conditions = [{"type": "reference", "video": str(clip.roles["reference_video"])}]
    elif task.told_by == "sound":
        conditions = [{"type": "audio_to_video", "audio": str(clip.roles["audio"])}]
    elif strategy.video is not None and any(c.type == "first_frame" for c in strategy.video.conditions):
        conditions = [{"type": "first_frame", "image_or_video": str(clip.first_frame)}]
    return {"prompt": clip.caption, "conditions": conditions}


def _cache_held_out(task: Task, place: Path, held: Sequence[Clip]) -> None:
    data = {"dataset": str(write_table(place / "held.jsonl", held)), "resolution_buckets": BUCKET, "cache_dir": str(place / "held_cache")}
    made = PreprocessJob.parse({
        "model": _model(), "data": data, "training_strategy": task.mode.strategy().model_dump(mode="json"), "acceleration": {"mixed_precision_mode": "no", "device": "cpu"},
        "output_dir": str(place / "held_run"),
    })  # fmt: skip
    with LiveRun(RunDir.create(place / "held_run")) as live:
        preprocess(made, live)


def _train(task: Task, place: Path, name: str, clips: Sequence[Clip], held: Sequence[Clip]) -> None:
    config = job(task, place, write_table(place / f"{name}.jsonl", clips), held)
    run = RunDir.create(Path(config.output_dir))
    config.save(run.job_path("train"))
    with LiveRun(run) as live:
        trainer.run(config, live)


# ---- what samples show


def learned(run: RunDir, task: Task, held: Sequence[Clip]) -> Learned:
    """What a run left in its events and samples."""
    events = run.events(0).events
    losses = [e for e in events if isinstance(e, HeldOutEvent)]
    seconds = sorted(e.seconds for e in events if isinstance(e, StepEvent))
    shown = {step: _shown(run, [e for e in events if isinstance(e, SampleEvent) and e.step == step], task, held) for step in (0, task.steps)}
    share = lambda rows: None if not rows else sum(all(row.values()) for row in rows) / len(held)  # noqa: E731
    after = shown[task.steps]
    by_word = {word: round(sum(row[word] for row in after) / len(held), 3) for word in task.asked}
    ends, level = (losses[0], losses[-1]), f"{task.stream} {max(SIGMAS):g}"
    return Learned(
        tuple(e.total for e in ends), tuple(e.losses[level] for e in ends), (share(shown[0]), share(after) or 0.0), by_word, seconds[len(seconds) // 2],
    )  # fmt: skip


def _shown(run: RunDir, events: Sequence[SampleEvent], task: Task, held: Sequence[Clip]) -> list[dict[str, bool]]:
    """Of every sample, whether it shows each of the words asked for."""
    return [{word: found[word] == held[event.index].kind[word] for word in task.asked} for event in events for found in (describe(run.path / event.path),)]


def describe(path: Path) -> dict[str, str | None]:
    """Colour and direction of the shape and the tone of a sample file, None for what is not seen or heard."""
    frames, wave, rate = read_media(path)
    seen = None if frames is None else look(frames)
    heard = None if wave is None else tone(pitch(wave, rate))
    # a given first frame shows the colour by itself: it is looked for in the second half
    colour = None if frames is None else look(frames[len(frames) // 2 :]).colour
    return {"colour": colour, "direction": seen.direction if seen else None, "tone": heard}


def read_media(path: Path) -> tuple[Tensor | None, Tensor | None, int]:
    """Frames [F, H, W, 3] uint8 and sound [C, N] float with its rate, of a file that a run has written; None for what it lacks."""
    import av

    def parts(kind: str, take: Any) -> tuple[list[Tensor], int]:
        with av.open(str(path)) as container:
            found = [stream for stream in container.streams if stream.type == kind]
            return ([torch.from_numpy(take(frame)) for frame in container.decode(found[0])], getattr(found[0], "rate", 0) or 0) if found else ([], 0)

    frames, _ = parts("video", lambda frame: frame.to_ndarray(format="rgb24"))
    sounds, rate = parts("audio", lambda frame: _planes(frame))
    return torch.stack(frames) if frames else None, torch.cat(sounds, dim=1) if sounds else None, int(rate)


def _planes(frame: Any) -> Any:
    """[C, N] float of a packed or planar frame."""
    values = frame.to_ndarray()
    if not frame.format.is_planar:
        values = values.reshape(-1, len(frame.layout.channels)).T
    return values.astype("float32") / (32768.0 if values.dtype.kind == "i" else 1.0)


def _rounded(*values: float | None) -> list[float | None]:
    return [None if value is None else round(value, 4) for value in values]


@contextmanager
def _one_thread() -> Iterator[None]:
    """Such small tensors are worked on fastest by one thread."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def smaller(name: str, **fields: Any) -> Task:
    """A task with other numbers, for a quick look."""
    return replace(TASKS[name], **fields)
