"""Autotune: which settings train a job fastest on this machine, found by trying a few of them, one change at a time."""

from __future__ import annotations

import shutil
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import yaml

from .config import TrainConfig
from .environment import shell_line
from .errors import LtxTrainError, OutOfMemory, RunError
from .run_setup import OpenedRun, launch_job
from .runs.events import StepEvent, WarningEvent
from .runs.exits import OUT_OF_MEMORY
from .runs.run_dir import RunDir

STEPS = 50
"""Steps of a trial, the official number: the first ones compile and warm up, the others are timed."""
MOST_CHANGES = 5
FASTER = 0.99
"""A change is kept where a sample takes at most this share of the time: less is noise."""
LOG = "autotune.log"
LARGE_CARD = 79e9
"""Bytes of a card from which keeping all activations is tried (the official rule: 80 GB)."""

Changes = dict[str, object]
"""Dotted field -> value, such as ``optimization.batch_size``."""


@dataclass(frozen=True)
class Change:
    """One thing to try. fields: what differs from the best so far; ladder: once a rung of one is not kept, the rest are passed over."""

    title: str
    fields: Changes
    ladder: str = ""


@dataclass(frozen=True)
class Measured:
    """What a trial gave. seconds: of one sample, median after warm-up; None where it failed, as ``why`` says. peak: bytes of the card.

    rate: seconds a token, which trials are compared by: another batch size draws other clips.
    """

    seconds: float | None
    why: str = ""
    hint: str = ""
    rate: float | None = None
    peak: int | None = None
    notes: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        return self.seconds is not None


Measure = Callable[[TrainConfig, Path], Measured]


@dataclass
class Tuned:
    """The outcome: the best job, the changes that led to it, and the log's lines."""

    config: TrainConfig
    kept: Changes = field(default_factory=dict)
    lines: list[str] = field(default_factory=list)

    def yaml(self) -> str:
        """The changed fields as lines for the config; empty where nothing was faster."""
        nested: dict[str, dict[str, object]] = {}
        for name, value in self.kept.items():
            section, _, key = name.partition(".")
            nested.setdefault(section, {})[key] = value
        return yaml.safe_dump(nested, sort_keys=False) if nested else ""


def changed(config: TrainConfig, fields: Changes) -> TrainConfig:
    """The job with other values of dotted fields."""
    data = config.model_dump(mode="json")
    for name, value in fields.items():
        holder, _, key = name.rpartition(".")
        data[holder][key] = value
    return TrainConfig.parse(data)


def proposals(config: TrainConfig, *, card_bytes: float | None) -> Iterator[Change]:
    """What may be faster, in the official order; resolution, rank, precision of the text encoder and the objective are never touched.

    card_bytes: memory of the (smallest) card, None without one. Each is for the job as given; :func:`autotune` lays it over the best.
    """
    optimization, acceleration = config.optimization, config.acceleration
    if acceleration.quantization is not None and not acceleration.float8_products:
        yield Change("no quantization", {"acceleration.quantization": None})
    if optimization.optimizer_type in ("adamw8bit", "paged_adamw", "paged_adamw8bit"):
        kept = {k: v for k, v in optimization.optimizer_params.items() if k in ("betas", "eps", "weight_decay")}
        yield Change("optimizer adamw", {"optimization.optimizer_type": "adamw", "optimization.optimizer_params": kept})
    samples = optimization.batch_size * optimization.gradient_accumulation_steps
    for factor in (2, 4):
        batch = optimization.batch_size * factor
        if batch <= 4 and samples % batch == 0:  # the samples of a step stay as many
            fields: Changes = {"optimization.batch_size": batch, "optimization.gradient_accumulation_steps": samples // batch}
            yield Change(f"batch_size {batch}", fields, ladder="batch")
    recomputes = acceleration.checkpoints_activations(optimization.enable_gradient_checkpointing)
    if recomputes and card_bytes is not None and card_bytes >= LARGE_CARD and acceleration.activation_budget != "auto":
        yield Change("activation_budget 0.5", {"acceleration.activation_budget": 0.5})


def trial(config: TrainConfig, place: Path, steps: int, *, sample: bool) -> TrainConfig:
    """The job cut down to a trial: so many steps, nothing saved but the end, one preview where ``sample`` says so."""
    data = config.model_dump(mode="json")
    data["optimization"].update(steps=steps, warmup_steps=0, scheduler_type="constant", scheduler_params={})
    data["checkpoints"].update(interval=None, save_training_state="off", no_resume=True)
    data["hub"], data["wandb"], data["logging"] = {}, {}, {"csv": False, "tensorboard": False}
    data["data"].update(held_out_share=0.0, held_out_root=None, stages=[])
    validation = data["validation"]
    validation.update(interval=steps, skip_initial_validation=True, samples=validation["samples"][:1] if sample else [])
    data["output_dir"] = str(place)
    return TrainConfig.parse(data)


def measure(config: TrainConfig, place: Path) -> Measured:
    """Carry out a trial in a child of its own, as a run is; running out of memory is an answer, not an error.

    What an earlier tuning left at ``place`` goes first: its steps are not this one's. An interrupt ends the child too.
    """
    run = new_place(place)
    config.save(run.job_path("train"))
    child = launch_job(OpenedRun(run, config), lower_plan=None)
    try:
        outcome = child.wait()
    except BaseException:  # the child would train on by itself: it survives whoever started it
        child.stop(deadline=0.0)
        raise
    finally:
        shutil.rmtree(run.checkpoints, ignore_errors=True)  # steps that train nothing of worth
    history = run.history()
    if not outcome.ok:
        if outcome.exit_code == OUT_OF_MEMORY:
            return Measured(None, "out of memory", outcome.hint)
        if outcome.error is not None and outcome.exit_code == 2:
            return Measured(None, outcome.message, outcome.hint)
        return Measured(None, f"failed: {outcome.message}", f"{outcome.hint}\nSee {run.log_path}.".strip())
    return of_run(config, list(history.steps.values()), history.warnings, bool(history.samples))


def new_place(place: Path) -> RunDir:
    """A new directory for a trial, in the place of an earlier one. Raises RunError where somebody's files are, or a process is at work."""
    run = RunDir(place)
    if run.live():
        raise RunError("run.locked", f"The trial {run.name} is at work: another autotune runs there.", f"Wait for it, stop it (`python -m ltx_train {shell_line(['stop', str(run.path)])}`), or give another --folder.")
    if run.path.is_dir() and any(run.path.iterdir()):
        if not run.job_path("train").is_file():
            raise RunError("autotune.folder", f"The folder {run.path} holds other files than a trial.", "Give another --folder.")
        shutil.rmtree(run.path)
    return RunDir.create(run.path)


def of_run(config: TrainConfig, steps: list[StepEvent], warnings: list[WarningEvent], sampled: bool) -> Measured:
    """What a finished trial says: seconds a sample without the first fifth of its steps, and what speaks against it."""
    if any(step.loss is None for step in steps) or any(w.code == "step.not_finite" for w in warnings):
        return Measured(None, "a loss or gradient was not finite")
    warm = max(1, len(steps) // 5) if len(steps) > 1 else 0
    counted = [step for step in steps[warm:] if step.seconds and step.tokens]
    if not counted:
        return Measured(None, "no step was timed")
    samples = config.optimization.batch_size * config.optimization.gradient_accumulation_steps * max(1, config.distributed.num_processes)
    peak = max(step.peak_memory or 0 for step in steps)
    notes = [w.message for w in warnings if w.code in ("data.no_sound", "step.not_finite") or w.code.startswith("sample")]
    if config.validation.active and not sampled:
        notes.append("the preview was not rendered")
    seconds = statistics.median(step.seconds for step in counted) / samples
    rate = statistics.median(step.seconds / step.tokens for step in counted)
    return Measured(seconds, rate=rate, peak=peak or None, notes=tuple(notes))


def autotune(
    config: TrainConfig, folder: Path, *, steps: int = STEPS, card_bytes: float | None = None, measure: Measure = measure,
    say: Callable[[str], None] | None = None, log: Path | None = None,
) -> Tuned:  # fmt: skip
    """Try at most five changes on a job, each alone on top of the best so far; keep those that are faster.

    folder: where the trials' runs go. log: file that the lines are appended to as they come. Raises what the sanity run
    (the job as it is, with one preview) failed of: a job that does not run cannot be tuned.
    """
    tuned = Tuned(config)

    def tell(line: str) -> None:
        tuned.lines.append(line)
        if say is not None:
            say(line)
        if log is not None:
            with log.open("a", encoding="utf-8") as file:
                file.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')}  {line}\n")

    def begin(what: str) -> None:
        if say is not None:
            say(f"{what}: {steps} steps ...")

    begin("the job as it is")
    first = measure(trial(config, folder / "0_sanity", steps, sample=True), folder / "0_sanity")
    tell(f"sanity run, {steps} steps: {in_words(first)}")
    if not first.ok:
        kind = OutOfMemory if first.why == "out of memory" else RunError
        hint = f"{first.hint}\nMend that first (`train CONFIG --check`, `plan CONFIG`); then tune.".strip()
        raise kind("autotune.sanity", f"The job as it is does not run: {first.why}", hint)
    best, ended = first, set[str]()
    tried = 0
    for change in proposals(config, card_bytes=card_bytes):
        if tried == MOST_CHANGES:
            break
        if change.ladder in ended:
            tell(f"{change.title}: passed over, the step before it was no faster")
            continue
        tried += 1
        place = folder / f"{tried}_{change.title.replace(' ', '_')}"
        begin(change.title)
        try:
            found = measure(trial(changed(tuned.config, change.fields), place, steps, sample=False), place)
        except LtxTrainError as error:  # a combination that is refused by name
            found = Measured(None, error.message)
        keep = found.ok and found.rate <= best.rate * FASTER
        tell(f"{change.title}: {in_words(found)}, {'kept' if keep else 'not kept'}")
        if keep:
            tuned.config, best = changed(tuned.config, change.fields), found
            tuned.kept.update(change.fields)
        elif change.ladder:
            ended.add(change.ladder)
    gain = first.rate / best.rate
    tell(f"result: {best.seconds:.3f} s a sample, {gain:.2f} times as fast as given" if tuned.kept else "result: the job as it is was the fastest")
    return tuned


def in_words(found: Measured) -> str:
    """One trial in words."""
    if not found.ok:
        return found.why
    peak = f", at most {found.peak / (1 << 30):.1f} GiB" if found.peak else ""
    return f"{found.seconds:.3f} s a sample{peak}" + "".join(f"; {note}" for note in found.notes)
