"""The demo: the whole way from clips to a LoRA and sample videos on built-in tiny models, with what the LoRA taught measured."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from rich.console import Console
from torch import Tensor

from .cli.show import RunView
from .config import TrainConfig
from .data.writers import write_video
from .demo_chart import draw_curve
from .errors import ConfigError
from .models.families import FAMILIES, Family
from .run_setup import launch_job, open_training
from .runs.events import SampleEvent
from .runs.history import History
from .tiny.drawing import FPS, NEW, Scenes, caption, draw, sound
from .tiny.fitted_set import FittedSet
from .tiny.measures import look, pitch

if TYPE_CHECKING:
    from .run_setup import OpenedRun

CLIPS = 12
STEPS, NOISE_STEPS = 100, 20
"""With the fitted set; with a random model, whose pictures stay noise."""
SIZE = (64, 64, 17)
SEED = 7
_SOUND_RATE = 48000
_ONE_THREAD = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
"""Such small tensors are worked on fastest by one thread, and threads that wait for each other slow a busy machine down."""


@dataclass(frozen=True)
class Plan:
    """What the demo does: the model's files, the family it is of, the dataset, prompts for samples, steps.

    fitted: the model knows drawn clips. drawn: the dataset is our own, so that what was taught can be measured.
    """

    family: Family
    model: dict[str, Path]
    dataset: Path
    prompts: Sequence[str]
    steps: int
    fitted: bool
    drawn: bool


@dataclass(frozen=True)
class Shown:
    """What the samples of one step show, over all prompts: the mean share of yellow in the shape, and the pitches in Hz."""

    yellow: float
    pitches: list[float | None] = field(default_factory=list)

    @property
    def high(self) -> float:
        """Share of the sounds within a tenth of 1200 Hz."""
        return sum(p is not None and abs(p / 1200 - 1) < 0.1 for p in self.pitches) / max(1, len(self.pitches))


def demo(out: Path, steps: int | None = None, family: str | None = None, media: Path | None = None) -> int:
    """Run the demo into ``out``; the exit code. Raises LtxTrainError for whatever goes wrong."""
    console, started = Console(), time.monotonic()
    out = Path(out).expanduser().absolute()
    plan = make_plan(out, steps, family, media)
    opened = open_training(training_job(plan, out))
    console.print(_introduction(plan), soft_wrap=True)
    console.print(f"Job: {opened.run.job_path('train')}", soft_wrap=True)
    if opened.finished:
        console.print("This demo was run before; its results are shown again.")
    else:
        RunView().follow(launch_job(opened, extra_env=_ONE_THREAD)).raise_for_error()
    _tell(console, plan, opened, time.monotonic() - started)
    return 0


# ---- what is done


def make_plan(out: Path, steps: int | None, family: str | None, media: Path | None) -> Plan:
    """The model and the dataset, drawn or written below ``out`` where they are not given."""
    if steps is not None and steps < 1:
        raise ConfigError("demo.steps", f"--steps {steps}: a demo trains at least one.", f"Leave it out for {STEPS}.")
    given = None if media is None else Path(media).expanduser().absolute()
    prompts = _prompts(given)  # the user's folder is read before anything is written
    fitted = family is None
    row = FAMILIES["ltx2.3" if family is None else family]
    if fitted:
        files = FittedSet.at()
        model = {"model_path": files.model, "text_encoder_path": files.text_encoder}
    else:
        model = _random_model(out / "model", row.name)
    dataset = given or draw_dataset(out / "dataset")
    return Plan(row, model, dataset, prompts, steps or (STEPS if fitted else NOISE_STEPS), fitted, given is None)


def draw_dataset(folder: Path, clips: int = CLIPS) -> Path:
    """Clips of what the fitted base does not know, a yellow star with a high tone, each with its caption beside it."""
    scenes = Scenes.random(clips, torch.Generator().manual_seed(SEED), NEW)
    scenes.direction.copy_(torch.arange(clips) % 4)
    width, height, frames = SIZE
    pixels = (draw(scenes, frames, height, width) * 255).round().to(torch.uint8)
    waves = sound(scenes, frames / FPS, rate=_SOUND_RATE)
    folder.mkdir(parents=True, exist_ok=True)
    for number in range(clips):
        path = folder / f"clip_{number + 1:02d}.mp4"
        text = path.with_suffix(".txt")
        if not (path.is_file() and text.is_file()):  # a second demo finds its clips encoded
            write_video(path, pixels[number], FPS, waves[number], _SOUND_RATE, crf=8, pixel_format="yuv444p")
            text.write_text(scenes.caption(number), encoding="utf-8")
    return folder


def _random_model(folder: Path, family: str) -> dict[str, Path]:
    """A tiny checkpoint of a family in random weights, as the config's model fields."""
    from .tiny.checkpoints import write_tiny

    paths = write_tiny(folder, family)
    names = {"model": "model_path", "text_encoder": "text_encoder_path", "video_vae": "video_vae_path", "audio_vae": "audio_vae_path", "tokenizer": "tokenizer_path"}
    return {field: paths[key] for key, field in names.items() if key in paths}


def _prompts(dataset: Path | None) -> list[str]:
    """What is sampled: the new words in each direction, or the first captions of the user's folder."""
    if dataset is None:
        return [caption(*words) for words in product(*NEW)]
    from .data.sources import open_source

    captions = dict.fromkeys(sample.caption for sample in open_source(str(dataset)).samples())
    return [text for text in captions if text][:2] or [""]


def training_job(plan: Plan, out: Path) -> TrainConfig:
    """The job, as a user would write it."""
    streams = {"video": {"is_generated": True}} | ({"audio": {"is_generated": True}} if plan.family.audio else {})
    interval = max(1, plan.steps)
    config: dict[str, Any] = {
        "model": {name: str(path) for name, path in plan.model.items()},
        "lora": {"rank": 16, "alpha": 16},
        "training_strategy": {"name": "flexible", **streams},
        "optimization": {"steps": plan.steps, "batch_size": 4, "learning_rate": 4e-3 if plan.fitted else 1e-3, "scheduler_type": "cosine", "warmup_steps": min(10, plan.steps // 4)},
        "acceleration": {"mixed_precision_mode": "no"},
        "data": {"dataset": str(plan.dataset), "resolution_buckets": "x".join(map(str, SIZE)), "cache_dir": str(out / "cache")},
        "validation": {
            "samples": [{"prompt": p} for p in plan.prompts], "video_dims": list(SIZE), "frame_rate": FPS, "inference_steps": 12, "interval": interval, "seed": SEED,
            "negative_prompt": "", "video_cfg_scale": 2.5, "audio_cfg_scale": 2.5, "video_stg_scale": 0.0, "audio_stg_scale": 0.0, "guidance_rescale": 0.0,
            "video_modality_guidance_scale": 1.0, "audio_modality_guidance_scale": 1.0,
        },
        "seed": SEED,
        "output_dir": str(out / "run"),
    }  # fmt: skip
    return TrainConfig.parse(config)


# ---- what is told


def _introduction(plan: Plan) -> str:
    what = f"{CLIPS} drawn clips" if plan.drawn else f"the clips of {plan.dataset}"
    if plan.fitted:
        return (
            f"Training a LoRA for {plan.steps} steps on {what}. The model is the fitted set: a toy of 8 MB in LTX-2.3's layout that has learned to draw"
            " coloured shapes that move, with a tone. It is not LTX-2.3 and knows nothing else."
        )
    return f"Training a LoRA for {plan.steps} steps on {what}. The model is a tiny {plan.family.title} in random weights: its pictures and sounds are noise; only the way is shown."


def _tell(console: Console, plan: Plan, opened: OpenedRun, seconds: float) -> None:
    """The results: files, loss, and what the LoRA taught."""
    run, history = opened.run, opened.run.history()
    show = lambda text: console.print(text, soft_wrap=True, highlight=False, markup=False)  # noqa: E731
    show("")
    for lora in (event for event in history.loras.values() if event.final):
        show(f"LoRA: {run.path / lora.path} ({lora.size or 0:,} bytes, {lora.keys} modules)")
    losses = {step: event.loss for step, event in history.steps.items() if event.loss is not None}
    if losses:
        show(f"Loss curve: {draw_curve(run.path / 'loss.png', losses, title='Training loss')}")
    for when, events in zip(("first", "last"), ends(history)):
        for event in events:
            show(f"Sample at the {when} step ({event.step}): {run.path / event.path}")
    if losses:
        first, last = first_and_last(losses)
        show(f"Loss: {first:.4f} at first, {last:.4f} at last (means of {share(losses)} steps each)")
    if plan.fitted and plan.drawn:
        for line in _taught(*(measure(run.path, events) for events in ends(history))):
            show(line)
    show(f"Done in {seconds:.0f} s.")


def _taught(before: Shown, after: Shown) -> list[str]:
    heard = lambda shown: ", ".join("silence" if p is None else f"{p:.0f}" for p in shown.pitches)  # noqa: E731
    return [
        "The base knows red, green, blue and white shapes and tones of 300 and 600 Hz. The clips taught a yellow star and a tone of 1200 Hz.",
        f"Yellow share of the moving shape: {before.yellow:.0%} before, {after.yellow:.0%} after.",
        f"Pitches in Hz: {heard(before)} before; {heard(after)} after.",
    ]


def share(losses: dict[int, float]) -> int:
    """How many steps at each end are averaged."""
    return max(1, len(losses) // 8)


def first_and_last(losses: dict[int, float]) -> tuple[float, float]:
    """Mean losses of the first and the last eighth of the steps: single steps vary with the noise level they draw."""
    values, count = [losses[step] for step in sorted(losses)], share(losses)
    return sum(values[:count]) / count, sum(values[-count:]) / count


def ends(history: History) -> tuple[list[SampleEvent], list[SampleEvent]]:
    """The samples of the first and of the last step that has some."""
    steps = sorted({event.step for event in history.samples.values()})
    chosen = (steps[0], steps[-1]) if steps else (None, None)
    first, last = (sorted((e for e in history.samples.values() if e.step == step), key=lambda e: e.index) for step in chosen)
    return first, last


def measure(folder: Path, events: Sequence[SampleEvent]) -> Shown:
    """Look at and listen to sample files below ``folder``."""
    seen, heard = [], []
    for event in events:
        frames, wave, rate = read_back(folder / event.path)
        seen.append(look(frames).shares["yellow"])
        heard.append(None if wave is None else pitch(wave, rate))
    return Shown(sum(seen) / max(1, len(seen)), heard)


def read_back(path: Path) -> tuple[Tensor, Tensor | None, int]:
    """Frames [F, H, W, 3] uint8 and sound [C, N] float with its rate, of a video that a run has written."""
    import av

    with av.open(str(path)) as container:
        frames = [torch.from_numpy(frame.to_ndarray(format="rgb24")) for frame in container.decode(video=0)]
    with av.open(str(path)) as container:
        if not container.streams.audio:
            return torch.stack(frames), None, 0
        rate = container.streams.audio[0].rate
        parts = [torch.from_numpy(frame.to_ndarray()).float() for frame in container.decode(audio=0)]
    return torch.stack(frames), torch.cat(parts, dim=1), rate
