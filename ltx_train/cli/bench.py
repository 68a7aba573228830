"""Verbs that measure and choose: bench step, bench numerics, bench load, bench learning, bench preprocess, plan, autotune."""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from pathlib import Path

from . import bench_learning, bench_load, bench_preprocess, bench_train
from .bench_cases import sound, sound_out
from .show import positive


def add(verbs: argparse._SubParsersAction) -> None:
    """Register the verbs."""
    bench = verbs.add_parser("bench", help="measure this machine with random weights; no model files needed")
    kinds = bench.add_subparsers(dest="what", required=True, metavar="WHAT")
    step = kinds.add_parser("step", help="one training step at full size, with the plain way in the same run; prints JSON lines")
    step.add_argument("--size", default="960x544x89", help="WIDTHxHEIGHTxFRAMES")
    step.add_argument("--rank", type=int, default=32)
    step.add_argument("--family", default="ltx2.3")
    step.add_argument("--case", action="append", default=[], metavar="KEY=VALUE,...", help="a setting to measure, such as quantization=int8,resident=0,cap=16; may be given several times")
    step.add_argument("--steps", type=int, default=5)
    step.add_argument("--no-plain", action="store_true", help="leave the baseline out")
    step.add_argument("--tiny", action="store_true", help="a tiny network that a CPU measures in seconds")
    step.add_argument("--profile", action="store_true", help="add a table of kernels")
    step.add_argument("--table", nargs="?", const="all", metavar="ROWS", help="measure the rows of the release table instead (all, or such as 1-4,7), each with its limits")
    step.add_argument("--minutes", type=float, help="with --table: begin no row after so many minutes; what is left is told")
    step.add_argument("--out", type=Path, help="append the records to this file too")
    step.set_defaults(run=run_step)
    numerics = kinds.add_parser("numerics", help="errors of every fast path beside float32, on three full-width blocks")
    numerics.add_argument("--size", default="512x320x25")
    numerics.add_argument("--rank", type=int, default=32)
    numerics.add_argument("--family", default="ltx2.3")
    numerics.add_argument("--weights", choices=("untrained", "normal"), help="what the blocks are filled with: as torch begins its layers, or about as large as trained ones (default: one after the other)")
    numerics.add_argument("--only", default="", metavar="LETTERS", help="the paths with these letters in their names, such as fp8")
    numerics.add_argument("--tiny", action="store_true", help="a tiny network, on the CPU; most of the time goes into tracing it")
    numerics.add_argument("--out", type=Path, help="append the records to this file too")
    numerics.set_defaults(run=run_numerics)
    bench_load.add(kinds, command_of, show)
    bench_train.add(kinds, command_of, show)
    bench_learning.add(kinds, show)
    bench_preprocess.add(kinds)

    plan = verbs.add_parser("plan", help="will it fit, and how fast: the settings a training would get, on this machine or a card of a size")
    plan.add_argument("config", type=Path)
    plan.add_argument("--card", type=int, metavar="GB", help="a card of 8, 10, 12, 16, 24, 32, 48, 80 or 141 GB instead of the one here")
    plan.add_argument("--ram", type=float, default=64.0, metavar="GB", help="with --card: free RAM")
    plan.add_argument("--size", help="WIDTHxHEIGHTxFRAMES of the largest clip; else the config's largest bucket")
    plan.add_argument("--json", action="store_true")
    plan.set_defaults(run=run_plan)

    tune = verbs.add_parser("autotune", help="try what may make a training faster on this machine, one change at a time; prints the config lines that did")
    tune.add_argument("config", type=Path)
    tune.add_argument("--steps", type=positive, default=50, help="steps of a trial")
    tune.add_argument("--folder", type=Path, metavar="DIR", help="where the trials run; else beside the run, with _autotune behind its name")
    tune.add_argument("--write", type=Path, metavar="FILE", help="save the whole tuned config")
    tune.set_defaults(run=run_autotune)


def run_step(options: argparse.Namespace) -> int:
    from ..bench.step import StepCase, line, run_cases
    from ..errors import ConfigError

    sound_out(options.out)
    base = StepCase(size=options.size, rank=options.rank, family=options.family, steps=options.steps, tiny=options.tiny, profile=options.profile)
    sound(base)
    if options.tiny and options.size == "960x544x89":
        base = StepCase.parse(f"size=128x64x9,steps={min(3, options.steps)}" if not options.table else "size=64x64x9,rank=4,steps=1,warmup=1,layers=2,compile=0", base)
    if options.table and options.case:
        raise ConfigError("bench.table", "--table measures its own cases; --case names others.", "Give one of the two.")
    if options.minutes is not None and not (options.table and options.minutes >= 0):
        raise ConfigError("bench.table", f"--minutes {options.minutes:g}: so many minutes are for --table, from 0 on.", "Begin no row of the table after so many minutes.")
    if options.table:
        from ..bench.table import chosen, run_table

        try:
            rows = chosen(options.table)
        except ValueError as error:
            raise ConfigError("bench.table", f"--table {options.table}: {error}"[:118], "Give row numbers such as 1-4,7, or nothing for all.") from error
        records = run_table(rows, base, plain=not options.no_plain, command=command_of(options), minutes=options.minutes)
    else:
        records = run_cases([sound(StepCase.parse(text, base)) for text in options.case or [""]], plain=not options.no_plain, command=command_of(options))
    failed = 0
    for record in records:
        show(line(record), options.out)
        failed += "error" in record
    return 1 if failed else 0


def run_numerics(options: argparse.Namespace) -> int:
    import time

    from ..bench.device import card_name, device_of
    from ..bench.numerics import WEIGHTS, compare
    from ..bench.step import StepCase, line

    size = "128x64x9" if options.tiny and options.size == "512x320x25" else options.size
    case = sound(StepCase(size=size, rank=options.rank, family=options.family, tiny=options.tiny))
    sound_out(options.out)
    device = device_of(options.tiny)
    for weights in (options.weights,) if options.weights else WEIGHTS:
        for record in compare(case, device, weights, options.only):
            show(line({**record, "card": card_name(device), "command": command_of(options), "date": time.strftime("%Y-%m-%d")}), options.out)
    return 0


def run_plan(options: argparse.Namespace) -> int:
    import torch

    from ..config import TrainConfig
    from ..errors import ConfigError
    from ..planner import clip_tokens, make_plan, named_machine, open_choices, plans, this_machine, work_of

    if not 0 <= options.ram < float("inf"):
        raise ConfigError("plan.ram", f"--ram {options.ram:g} is no size of a memory.", "Give the GB of RAM that are free, such as 64.")
    config = TrainConfig.load(options.config)
    if not plans(config):
        raise ConfigError("plan.kind", "Only trainings of a lora or rslora adapter are planned.", "Full fine-tuning and other adapter kinds keep their base on the card.")
    transformer = config.resolved(options.config.absolute().parent).model.open().transformer
    sizes = [options.size] if options.size else (config.data.resolution_buckets or "").split(";")
    if sizes in ([""], ["auto"]):
        raise ConfigError("plan.size", "The config names no bucket to plan for.", "Give --size WIDTHxHEIGHTxFRAMES, the largest clip.")
    tokens = max(clip_tokens(size if size.count("x") == 2 else f"{size}x1", transformer) for size in sizes)
    audio = config.training_strategy.streams().audio != "absent"
    work = work_of(config, transformer, video_tokens=tokens[0], audio_tokens=tokens[1] if audio else 0)
    machine = named_machine(options.card, options.ram) if options.card else this_machine(torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu"))
    if machine.shared and not options.json:
        show("This machine has no GPU: its RAM stands for the card below. --card 24 plans for a card of 24 GB.", None)
    plan = make_plan(work, machine, open_choices(config))
    total = plan.cost.seconds * config.optimization.steps
    if options.json:
        import json

        show(json.dumps({"machine": machine.name, **plan.settings(), "seconds_in_all": round(total), "why": plan.why}), None)
    else:
        show(f"{plan.why}\n{config.optimization.steps} steps: about {total / 3600:.1f} h", None)
    return 0


def run_autotune(options: argparse.Namespace) -> int:
    import torch

    from ..autotune import LOG, autotune
    from ..config import TrainConfig

    config = TrainConfig.load(options.config).resolved(options.config.absolute().parent)
    sound_result(options.write, options.config)
    folder = (options.folder or Path(config.output_dir + "_autotune")).absolute()
    folder.mkdir(parents=True, exist_ok=True)
    log = writable(options.config.absolute().with_name(LOG), folder / LOG)
    cards = [torch.cuda.get_device_properties(n).total_memory for n in range(torch.cuda.device_count())] if torch.cuda.is_available() else []
    try:
        tuned = autotune(config, folder, steps=options.steps, card_bytes=min(cards, default=None), say=lambda line: show(line, None), log=log)
    except KeyboardInterrupt:
        show(f"Interrupted; what was measured is in {log}. The trial at hand is ended; started again, tuning begins anew.", None)
        raise
    if tuned.kept:
        show(f"\n{tuned.yaml()}", None)
    if options.write:
        tuned.config.save(options.write)
    show(f"All of it is in {log}", None)
    return 0


def sound_result(write: Path | None, config: Path) -> None:
    """Raise ConfigError for a place where the tuned config cannot be saved, before hours go into tuning."""
    if write is None:
        return
    from ..errors import ConfigError

    folder = next(place for place in write.absolute().parents if place.exists())
    why = "it is a folder" if write.is_dir() else f"{folder} is a file" if not folder.is_dir() else "" if os.access(write if write.exists() else folder, os.W_OK) else "no permission"
    if write.exists() and write.samefile(config):
        why = "it is the config that is tuned, whose comments would be lost"
    if why:
        raise ConfigError("autotune.write", f"--write {write}: the tuned config cannot be saved there: {why}.", "Name another .yaml file.")


def writable(*files: Path) -> Path:
    """The first of ``files`` that can be appended to."""
    for file in files[:-1]:
        try:
            file.open("a", encoding="utf-8").close()
        except OSError:  # a config in a folder that is not ours to write
            continue
        return file
    return files[-1]


def command_of(options: argparse.Namespace) -> str:
    """The command line as it was given, without the file for the records."""
    shown = [word for word in sys.argv[1:] if word not in ("--out", str(options.out))]
    return "python -m ltx_train " + shlex.join(shown)


def show(text: str, file: Path | None) -> None:
    """Print a record, and keep it."""
    print(text, flush=True)  # noqa: T201 - what the verb is for
    if file is not None:
        with file.open("a", encoding="utf-8") as lines:
            lines.write(text + "\n")
