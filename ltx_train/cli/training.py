"""Verbs that train, resume, sample, and list runs."""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path

from rich.table import Table

from ..config import JOBS, SampleJob, TrainConfig
from ..environment import shell_line
from ..errors import ConfigError, RunError
from ..launch import Outcome, attach
from ..run_setup import OpenedRun, launch_job, open_other, open_training, parked
from ..runs.run_dir import RunDir, list_runs
from .show import RunView, console, positive

PART = "train N more steps only; the trainer then waits with its weights in host memory, the GPU free, for `resume RUN` (checkpoints.park_minutes, 30)"


def add(verbs: argparse._SubParsersAction) -> None:
    """Register the verbs."""
    train = verbs.add_parser("train", help="train as a YAML config says (the official trainer's configs run unchanged)")
    train.add_argument("config", type=Path)
    train.add_argument("--check", action="store_true", help="check all that can be known before loading, then stop")
    train.add_argument("--output-dir", help="another run directory than the config's")
    train.add_argument("--accelerate-config", metavar="FILE", help="processes as an accelerate config says; or ddp, fsdp, ddp_compile, fsdp_compile")
    train.add_argument("--num-processes", type=positive, help="so many processes, one a GPU")
    train.add_argument("--steps-this-run", type=positive, metavar="N", help=PART)
    train.add_argument("--detach", action="store_true", help="start the run and return at once")
    train.add_argument("--disable-progress-bars", action="store_true", help="plain lines instead of bars")
    train.set_defaults(run=run_train)

    resume = verbs.add_parser("resume", help="go on with a run from its newest snapshot")
    resume.add_argument("run_dir", type=Path)
    resume.add_argument("--steps", type=positive, help="raise the number of steps")
    resume.add_argument("--steps-this-run", type=positive, metavar="N", help=PART)
    resume.add_argument("--num-processes", type=positive, help="go on with so many processes; the samples of a step stay as many where they divide")
    resume.set_defaults(run=run_resume)

    stop = verbs.add_parser("stop", help="ask a run to stop at its next safe point, leaving a snapshot")
    stop.add_argument("run_dir", type=Path)
    stop.add_argument("--now", action="store_true", help="end it at once: what is newer than its last snapshot is lost")
    stop.set_defaults(run=run_stop)

    sample = verbs.add_parser("sample", help="make clips with a checkpoint and LoRAs, without training")
    sample.add_argument("config", type=Path, nargs="?", help="a sample job as YAML; or use the options")
    sample.add_argument("--model-path")
    sample.add_argument("--text-encoder-path")
    sample.add_argument("--video-vae-path")
    sample.add_argument("--audio-vae-path")
    sample.add_argument("--tokenizer-path")
    sample.add_argument("--lora", action="append", default=[], metavar="FILE[:STRENGTH]", help="may be given several times")
    sample.add_argument("--prompt", action="append", default=[])
    sample.add_argument("--negative-prompt")
    sample.add_argument("--size", default="768x448x49", help="WIDTHxHEIGHTxFRAMES, such as 768x448x49, or WIDTHxHEIGHT for a still")
    sample.add_argument("--frame-rate", type=float, default=24.0)
    sample.add_argument("--steps", type=positive)
    sample.add_argument("--cfg", type=float)
    sample.add_argument("--seed", type=int, default=42)
    sample.add_argument("--out", default="outputs/sample")
    sample.set_defaults(run=run_sample)

    runs = verbs.add_parser("runs", help="list runs and their state")
    runs.add_argument("root", type=Path, nargs="?", default=Path("outputs"))
    runs.add_argument("--json", action="store_true")
    runs.set_defaults(run=run_runs)


def run_train(options: argparse.Namespace) -> int:
    config = TrainConfig.load(options.config)
    if options.output_dir:
        config = config.model_copy(update={"output_dir": options.output_dir})
    config = with_processes(config, options.accelerate_config, options.num_processes)
    config = config.resolved(options.config.absolute().parent)
    if options.check:
        return check_training(config)
    opened = open_training(config)
    return finish(opened, detach=options.detach, plain=options.disable_progress_bars, steps_this_run=options.steps_this_run or 0)


def with_processes(config: TrainConfig, accelerate: str | None, num_processes: int | None) -> TrainConfig:
    """The job with the processes that an accelerate configuration and ``--num-processes`` name; a table says what became of each field."""
    if accelerate is None and num_processes is None:
        return config
    job = config.model_dump(mode="json")
    if accelerate is None:
        return TrainConfig.parse({**job, "distributed": {**job["distributed"], "num_processes": num_processes}})
    from ..training.accelerate_config import from_accelerate

    accepted = from_accelerate(accelerate, num_processes)
    table = Table("field", "value", "becomes", title=f"{accelerate} as this trainer reads it")
    for row in accepted.rows:
        table.add_row(row.name, str(row.value), row.becomes, style=None if row.taken else "dim")
    console().print(table, soft_wrap=False)
    return TrainConfig.parse(accepted.applied(job))


def check_training(config: TrainConfig) -> int:
    """All that can be known before loading: files, family, data, packages, fit of the mode to the data."""
    from ..checks import check_config

    screen = console()
    for line in check_config(config):
        screen.print(f"- {line}")
    screen.print("The config can run.")
    return 0


def finish(opened: OpenedRun, *, detach: bool = False, plain: bool = False, steps_this_run: int = 0) -> int:
    """Start the child of an opened run and show it to its end, or to that of the part of so many steps."""
    screen = console()
    if opened.finished:
        screen.print(f"This run is finished already: {opened.run.path}")
        return 0
    if opened.run.live() and not parked(opened.run):
        screen.print("This run is at work already: following it. Changed settings count from its next start on.")
    child = launch_job(opened, steps_this_run=steps_this_run)
    if detach:
        screen.print(f"started: {opened.run.path} (process {child.pid})")
        return 0
    outcome = RunView(plain=plain).follow(child)
    outcome.raise_for_error()
    if outcome.part_done and not outcome.ok:
        return part_done(opened.run, outcome)
    final = [lora for lora in opened.run.history().loras.values() if lora.final and (opened.run.path / lora.path).is_file()]
    if final:
        screen.print(f"LoRA: {opened.run.path / max(final, key=lambda lora: lora.step).path}")
    return outcome.exit_code or 0


def part_done(run: RunDir, outcome: Outcome) -> int:
    """Say what a part left and how to go on."""
    screen = console()
    loras = [lora for lora in run.history().loras.values() if (run.path / lora.path).is_file()]
    if loras:
        screen.print(f"LoRA: {run.path / max(loras, key=lambda lora: lora.step).path}")
    screen.print(outcome.message)
    verb = lambda *words: shell_line(["python", "-m", "ltx_train", *words])  # noqa: E731
    screen.print(f"Go on: {verb('resume', str(run.path), '--steps-this-run', 'N')}" + (f"; end it: {verb('stop', str(run.path))}" if outcome.parked else ""))
    return 0


def run_resume(options: argparse.Namespace) -> int:
    run = RunDir.open(options.run_dir)
    kind = next((k for k in JOBS if run.job_path(k).is_file()), "train")
    job = JOBS[kind].load(run.job_path(kind))
    if isinstance(job, TrainConfig):
        updates: dict[str, object] = {"output_dir": str(run.path)}
        if options.steps:
            updates["optimization"] = job.optimization.model_copy(update={"steps": options.steps})
        opened = open_training(with_processes(job.model_copy(update=updates), None, options.num_processes))
        return finish(opened, steps_this_run=options.steps_this_run or 0)
    return finish(open_other(job))


def run_stop(options: argparse.Namespace) -> int:
    child = attach(RunDir.open(options.run_dir).path)
    if child is None:
        console().print("No process works on this run.")
        return 0
    if not options.now:
        console().print("Stopping at the next safe point; Ctrl-C leaves it to that, `stop --now` ends it at once.")
    status = child.stop(deadline=0.0 if options.now else float("inf"))
    console().print({"finished": "It finished by itself.", "failed": f"It failed: {status.message}"}.get(status.state, "stopped"))
    return 0


def run_sample(options: argparse.Namespace) -> int:
    if options.config:
        return finish(open_other(SampleJob.load(options.config).resolved(options.config.absolute().parent)))
    return finish(open_other(sample_job(options)))


def sample_job(options: argparse.Namespace) -> SampleJob:
    """The sample job of the command line's options."""
    if not options.model_path:
        raise ConfigError("sample.model", "sample needs a config file or --model-path.", "Give the LTX checkpoint with --model-path, and at least one --prompt.")
    if not options.prompt:
        raise ConfigError("sample.none", "sample needs at least one --prompt.", 'Give --prompt "what the clip shows"; it may be given several times.')
    found = re.fullmatch(r"([1-9]\d{0,4})x([1-9]\d{0,4})(?:x([1-9]\d{0,5}))?", options.size.strip().lower())
    if found is None:
        raise ConfigError("sample.dims", f"--size {options.size} is not WIDTHxHEIGHTxFRAMES.", "Write it as 768x448x49, or 768x448 for a still.")
    width, height, frames = (int(v or 1) for v in found.groups())
    loras = [lora_use(text) for text in options.lora]
    validation: dict[str, object] = {"samples": [{"prompt": p} for p in options.prompt], "video_dims": [width, height, frames], "frame_rate": options.frame_rate}
    validation["seed"] = options.seed
    if options.steps:
        validation["inference_steps"] = options.steps
    if options.negative_prompt is not None:
        validation["negative_prompt"] = options.negative_prompt
    if options.cfg is not None:
        validation["video_cfg_scale"] = validation["audio_cfg_scale"] = options.cfg
    model = {name: getattr(options, name) for name in ("model_path", "text_encoder_path", "video_vae_path", "audio_vae_path", "tokenizer_path")}
    model = {k: v for k, v in model.items() if v is not None}
    return SampleJob.parse({"model": model, "loras": loras, "validation": validation, "output_dir": options.out, "seed": options.seed})


def lora_use(text: str) -> dict[str, object]:
    """``FILE``, ``FILE:STRENGTH`` or ``C:\\FILE:STRENGTH`` as the job has it. Raises ConfigError for a strength that is no number from -10 to 10."""
    if not text.strip():
        raise ConfigError("lora.path", "--lora names no file.", "Write --lora FILE or --lora FILE:STRENGTH, such as my_lora.safetensors:0.8.")
    path, _, strength = text.rpartition(":")
    try:
        number = float(strength)
    except ValueError:
        number = None
    if path and number is not None and -10 <= number <= 10:
        return {"path": path, "strength": number}
    a_path = not path or "/" in strength or "\\" in strength or strength.lower().endswith(".safetensors")
    if a_path or Path(text).is_file():  # a colon in the name itself
        return {"path": text}
    raise ConfigError("lora.strength", f"--lora {text}: {strength!r} is no strength from -10 to 10.", "Write --lora FILE or --lora FILE:STRENGTH, such as my_lora.safetensors:0.8.")


def run_runs(options: argparse.Namespace) -> int:
    if not options.root.is_dir():
        raise RunError("runs.missing", f"There is no folder {options.root}", "Give the folder that holds the runs' folders (output_dir's parent).")
    rows = [(run, run.status()) for run in list_runs(options.root) if run.has_job()]
    if options.json:
        print(json.dumps([{"name": r.name, "path": str(r.path), **s.model_dump(mode="json")} for r, s in rows], ensure_ascii=False))  # noqa: T201 - for machines
        return 0
    table = Table("run", "state", "step", "loss", "error")
    for run, status in rows:
        table.add_row(run.name, status.state, f"{status.step}/{status.total or '?'}", "" if status.loss is None else f"{status.loss:.4f}", status.error)
    console().print(table, soft_wrap=False)
    return 0
