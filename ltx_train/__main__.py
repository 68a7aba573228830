"""The command line: python -m ltx_train VERB ..."""

from __future__ import annotations

import argparse
import sys

from .cli import datasets, models, training
from .cli.show import show_error
from .errors import LtxTrainError


def parser() -> argparse.ArgumentParser:
    """The parser of all verbs."""
    top = argparse.ArgumentParser(prog="python -m ltx_train", description="Train LoRAs for LTX-Video, LTX-2, LTX-2.3 and LTX-2.5.")
    verbs = top.add_subparsers(dest="verb", required=True, metavar="VERB")
    for group in (training, datasets, models):
        group.add(verbs)
    return top


def main(arguments: list[str] | None = None) -> int:
    """Run one verb; a user's error is one clear line, the exit code says what kind."""
    options = parser().parse_args(arguments)
    try:
        return options.run(options)
    except LtxTrainError as error:
        return show_error(error)


if __name__ == "__main__":
    sys.exit(main())
