"""The verbs bench load and bench sample: memory and seconds until the first step, seconds of a preview."""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path

from ..errors import ConfigError
from .bench_cases import sound, sound_out, sound_size

SECOND = "512x512x25"


def add(kinds: argparse._SubParsersAction, command_of, show) -> None:
    """Register them below ``bench``; command_of, show: how the command line is told and a record shown."""
    load = kinds.add_parser("load", help="host memory while a model of full size is loaded, seconds to the first step with a cold and a warm compile cache")
    load.add_argument(
        "--case", action="append", metavar="KEY=VALUE,...",
        help="the setting, as for bench step (default quantization=int8,resident=0); link=25 holds uploads back to so many GB/s; given again: another one, with the compile cache of the first",
    )  # fmt: skip
    load.add_argument("--second", default=SECOND, help="another size, to see what a new bucket costs")
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
    sound_out(options.out)
    cases = [sound(StepCase.parse(case, StepCase.parse(f"family={options.family}", base))) for case in options.case or ["quantization=int8,resident=0"]]
    second = sound_size("64x96x9" if options.tiny and options.second == SECOND else options.second)
    if options.file is not None and options.tiny:
        raise ConfigError("bench.file", "--file is for the model of full size; --tiny writes its own.", "Leave one of the two out.")
    sound_out(options.file)
    if len({case.family for case in cases}) > 1:
        raise ConfigError("bench.case", "The cases of one bench load are of one family: they load the same file.", "Measure the other family by itself.")
    return told(run(cases, second=second, file=options.file, command=options.command_of(options)), options)


def run_sample(options: argparse.Namespace) -> int:
    from ..bench.sample import run_sample as run
    from ..bench.sample import tiny_case
    from ..bench.step import StepCase

    base = replace(tiny_case(), steps=min(options.steps, tiny_case().steps)) if options.tiny else StepCase(size=options.size, steps=options.steps)
    sound_out(options.out)
    case = sound(StepCase.parse(options.case, StepCase.parse(f"family={options.family}", base)))
    return told(run(case, command=options.command_of(options)), options)


def told(records, options: argparse.Namespace) -> int:
    """Show the records as they come; 1 where one failed."""
    from ..bench.step import line

    failed = 0
    for record in records:
        options.show(line(record), options.out)
        failed += "error" in record
    return 1 if failed else 0
