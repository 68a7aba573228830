"""The verb bench train: a real run of real size on random weights, with previews, a resume and several GPUs where asked."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from .bench_load import told


def add(kinds: argparse._SubParsersAction, command_of, show) -> None:
    """Register it below ``bench``; command_of, show: how the command line is told and a record shown."""
    train = kinds.add_parser("train", help="a real run on a full-size random model written to disk: seconds of its steps beside bench step, previews, resume, several GPUs")
    train.add_argument("--size", default="960x544x89", help="WIDTHxHEIGHTxFRAMES")
    train.add_argument("--family", default="ltx2.3", help="ltx2, ltx2.3 or ltx2.5")
    train.add_argument("--case", default="", metavar="KEY=VALUE,...", help="the setting, as for bench step; cap is the run's memory limit")
    train.add_argument("--steps", type=int, default=10)
    train.add_argument("--resume", type=int, default=0, metavar="STEPS", help="then so many more, by a new process from the last snapshot")
    train.add_argument("--previews", type=int, default=0, metavar="STEPS", help="steps between previews of the clips' size; 0: none")
    train.add_argument("--preview-steps", type=int, default=8, help="denoising steps of a preview")
    train.add_argument("--processes", type=int, default=1, help="GPUs")
    train.add_argument("--part", type=int, default=0, metavar="STEPS", help="wait after so many steps with the weights in host memory, then go on")
    train.add_argument("--mode", default="lora", choices=("lora", "full"))
    train.add_argument("--optimizer", default="adamw")
    train.add_argument("--folder", type=Path, help="where the random model and clips are kept; found there they are used again")
    train.add_argument("--no-step", action="store_true", help="leave bench step of the same setting out; with several GPUs, the run on one")
    train.add_argument("--no-result", action="store_true", help="end the run after its last step: a full model's file is not gathered and written")
    train.add_argument("--tiny", action="store_true", help="a tiny model that a CPU trains in seconds")
    train.add_argument("--out", type=Path, help="append the records to this file too")
    train.set_defaults(run=run_train, command_of=command_of, show=show)


def run_train(options: argparse.Namespace) -> int:
    from ..bench.step import StepCase
    from ..bench.train import TrainCase
    from ..bench.train import run_train as run

    base = StepCase(size="64x64x9", rank=4, tiny=True, compile=False) if options.tiny else StepCase(size=options.size)
    setting = StepCase.parse(options.case, StepCase.parse(f"family={options.family}", base))
    case = TrainCase(
        setting, options.steps, options.resume, options.previews, options.preview_steps, options.processes, options.part, options.mode, options.optimizer, not options.no_result
    )  # fmt: skip
    return told(run(case, folder=options.folder, step_too=not options.no_step, command=options.command_of(options), say=_say), options)


def _say(line: dict[str, object]) -> None:
    """Where the run stands, for whoever waits for its record; what is cut off by a time limit has told that much."""
    sys.stderr.write(json.dumps(line) + "\n")
    sys.stderr.flush()
