"""The verbs bench load and bench sample: memory and seconds until the first step, seconds of a preview."""

from __future__ import annotations

import argparse
from pathlib import Path


def add(kinds: argparse._SubParsersAction, command_of, show) -> None:
    """Register them below ``bench``; command_of, show: how the command line is told and a record shown."""
    load = kinds.add_parser("load", help="host memory while a model of full size is loaded, seconds to the first step with a cold and a warm compile cache")
    load.add_argument(
        "--case", action="append", metavar="KEY=VALUE,...",
        help="the setting, as for bench step (default quantization=int8,resident=0); link=25 holds uploads back to so many GB/s; given again: another one, with the compile cache of the first",
    )  # fmt: skip
    load.add_argument("--second", default="512x512x25", help="another size, to see what a new bucket costs")
    load.add_argument("--file", type=Path, help="where the random model is written, and kept; found there it is used again")
    load.set_defaults(run=run_load)
    sample = kinds.add_parser("sample", help="seconds of a preview's steps: four guidance passes in one forward, and one by one")
    sample.add_argument("--case", default="", metavar="KEY=VALUE,...", help="the setting, as for bench step")
    sample.add_argument("--steps", type=int, default=3)
    sample.set_defaults(run=run_sample)
    for verb in (load, sample):
        verb.add_argument("--size", default="960x544x89", help="WIDTHxHEIGHTxFRAMES")
        verb.add_argument("--family", default="ltx2.3")
        verb.add_argument("--tiny", action="store_true", help="a tiny network that a CPU measures in seconds")
        verb.add_argument("--out", type=Path, help="append the records to this file too")
        verb.set_defaults(command_of=command_of, show=show)


def run_load(options: argparse.Namespace) -> int:
    from ..bench.load import run_load as run
    from ..bench.sample import tiny_case
    from ..bench.step import StepCase

    base = tiny_case() if options.tiny else StepCase(size=options.size)
    cases = [StepCase.parse(case, StepCase.parse(f"family={options.family}", base)) for case in options.case or ["quantization=int8,resident=0"]]
    second = "64x96x9" if options.tiny else options.second
    return told(run(cases, second=second, file=options.file, command=options.command_of(options)), options)


def run_sample(options: argparse.Namespace) -> int:
    from ..bench.sample import run_sample as run
    from ..bench.sample import tiny_case
    from ..bench.step import StepCase

    base = tiny_case() if options.tiny else StepCase(size=options.size, steps=options.steps)
    case = StepCase.parse(options.case, StepCase.parse(f"family={options.family}", base))
    return told(run(case, command=options.command_of(options)), options)


def told(records, options: argparse.Namespace) -> int:
    """Show the records as they come; 1 where one failed."""
    from ..bench.step import line

    failed = 0
    for record in records:
        options.show(line(record), options.out)
        failed += "error" in record
    return 1 if failed else 0
