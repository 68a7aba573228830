"""The command line: python -m ltx_train VERB ..."""

from __future__ import annotations

import argparse
import os
import signal
import sys
import traceback

if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C while the libraries load ends us without a word

from .cli import bench, datasets, doctor, media, models, training
from .cli.show import show_error
from .errors import LtxTrainError, RunError
from .runs.exits import CRASH, OK, STOPPED
from .worker import describe


def parser() -> argparse.ArgumentParser:
    """The parser of all verbs."""
    top = argparse.ArgumentParser(prog="python -m ltx_train", description="Train LoRAs for LTX-Video, LTX-2, LTX-2.3 and LTX-2.5.")
    verbs = top.add_subparsers(dest="verb", required=True, metavar="VERB")
    for group in (training, datasets, media, models, doctor, bench):
        group.add(verbs)
    return top


def main(arguments: list[str] | None = None) -> int:
    """Run one verb; a user's error is one clear line, the exit code says what kind. Only a fault of ours shows its traceback."""
    for stream in (sys.stdout, sys.stderr):  # a Windows pipe or a plain C locale must not fail on a name with an umlaut
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")
    options = parser().parse_args(arguments)
    try:
        return options.run(options)
    except LtxTrainError as error:
        return show_error(error)
    except KeyboardInterrupt:
        print("Stopped.", file=sys.stderr)
        return STOPPED
    except BrokenPipeError:  # the reader of our output has gone, as `| head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return OK
    except Exception as error:  # noqa: B902 - told by its kind below
        event, code = describe(error)
        if event is None:
            return code
        if code == CRASH:
            traceback.print_exception(error)
        show_error(RunError(event.code, event.message, event.hint))
        return code


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.exit(main())
