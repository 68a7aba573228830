"""The verb bench learning: what a short training teaches the fitted tiny model, mode by mode, as JSON lines."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

from .bench_cases import sound_out


def add(kinds: argparse._SubParsersAction, show: Callable[[str, Path | None], None]) -> None:
    """Register it below ``bench``. show: prints a record and keeps it in a file."""
    learning = kinds.add_parser("learning", help="train the fitted tiny model in each mode on drawn clips, beside a control told wrongly; prints JSON lines")
    learning.add_argument("--mode", action="append", metavar="NAME", help="t2v, i2v, v2v, a2v or t2a; may be given several times; else all of them")
    learning.add_argument("--folder", type=Path, metavar="DIR", help="keep clips, runs and samples here")
    learning.add_argument("--out", type=Path, help="append the records to this file too")
    learning.set_defaults(run=lambda options: run(options, show))


def run(options: argparse.Namespace, show: Callable[[str, Path | None], None]) -> int:
    from ..bench.learning import measure, shortfalls
    from ..bench.learning_tasks import TASKS
    from ..bench.step import line
    from ..errors import ConfigError

    sound_out(options.out)
    names = options.mode or list(TASKS)
    for name in names:
        if name not in TASKS:
            raise ConfigError("bench.mode", f"bench learning has no mode {name!r}.", f"It has: {', '.join(TASKS)}.")
    missed = 0
    for name in names:
        record = measure(name, folder=options.folder)
        show(line({**record, "command": f"python -m ltx_train bench learning --mode {name}"}), options.out)
        for said in shortfalls(record, TASKS[name]):
            show(f"{name}: {said}", None)
            missed = 1
    return missed
