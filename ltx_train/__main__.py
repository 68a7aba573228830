"""The command line: python -m ltx_train VERB ..."""

from __future__ import annotations

import argparse
import os
import signal
import sys
import threading
import traceback

if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C while the libraries load ends us without a word

if sys.version_info < (3, 10):  # noqa: UP036 - older ones stop at our syntax, with a traceback
    sys.stderr.write(f"error: LTX Train needs Python 3.10 or newer; this is {sys.version_info[0]}.{sys.version_info[1]} ({sys.executable}).\n")
    sys.exit(2)

from .errors import LtxTrainError, RunError, explain_os_error
from .runs.exits import CRASH, OK, STOPPED


def parser() -> argparse.ArgumentParser:
    """The parser of all verbs."""
    from .cli import bench, datasets, doctor, media, models, training

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
    words = sys.argv[1:] if arguments is None else list(arguments)
    try:
        if words[:1] == ["env"]:  # it tells what is missing, so it must run where hardly anything is there
            from .environment import main as environment

            interruptible()
            return environment(words[1:])
        options = verbs_or_what_is_missing().parse_args(words)
        interruptible()
        return options.run(options)
    except LtxTrainError as error:
        return show(error)
    except KeyboardInterrupt:
        print("Stopped.", file=sys.stderr)
        return STOPPED
    except BrokenPipeError:  # the reader of our output has gone, as `| head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return OK
    except Exception as error:  # noqa: B902 - told by its kind below
        return unexpected(error)


def interruptible() -> None:
    """The libraries are loaded: from here on Ctrl-C is an exception again."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_DFL and threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGINT, signal.default_int_handler)


def verbs_or_what_is_missing() -> argparse.ArgumentParser:
    """The parser; RunError where a package that all verbs need is not there, or does not load."""
    try:
        return parser()
    except (ImportError, OSError) as error:  # OSError: a library of torch is missing
        package = (getattr(error, "name", None) or "").split(".")[0]
        if package == __package__:
            raise
        from .environment import ROOT, shell_line

        told = f"The package {package} is not installed." if isinstance(error, ModuleNotFoundError) else f"A package does not load: {error}"
        install = shell_line([sys.executable, "-m", "pip", "install", "-r", str(ROOT / "requirements.txt")])
        raise RunError("package.missing", told, f"Install what training needs: {install}\n`python -m ltx_train env` says what is missing.") from error


def show(error: LtxTrainError) -> int:
    """Print a user's error, without colours where the package for them is missing; the exit code."""
    try:
        from .cli.show import show_error
    except (ImportError, OSError):
        sys.stderr.write(f"error: {error}\n")
        return error.exit_code
    return show_error(error)


def unexpected(error: Exception) -> int:
    """Tell of an exception that is none of ours, by its kind; the exit code."""
    known = explain_os_error(error) if isinstance(error, OSError) else None
    if known is not None:
        return show(known)
    from .worker import describe

    event, code = describe(error)
    if event is None:
        return code
    if code == CRASH:
        traceback.print_exception(error)
    show(RunError(event.code, event.message, event.hint))
    return code


if __name__ == "__main__":
    sys.exit(main())
