"""Starts the engine by this file's absolute path: the interpreter may ignore PYTHONPATH, cwd and script folder.

    python [-I] /any where/ltx_train/bootstrap.py worker DIR train     a module that we start
    python [-I] /any where/ltx_train/bootstrap.py VERB ...             the command line, as ``python -m ltx_train VERB ...``
"""

import importlib
import os
import sys

MODULES = ("worker", "environment")


def prepare(file: str) -> None:
    """Make ``ltx_train`` importable and the output UTF-8, whatever the interpreter was told."""
    package = os.path.dirname(os.path.abspath(file))
    root = os.path.dirname(package)
    # without -I the script's folder is on the path: our text.py, errors.py... would be top-level modules
    sys.path[:] = [root] + [entry for entry in sys.path if os.path.abspath(entry or ".") not in (package, root)]
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(encoding="utf-8", errors="backslashreplace", line_buffering=True)


def main() -> int:
    prepare(__file__)
    if sys.argv[1:] and sys.argv[1] in MODULES:
        return importlib.import_module(f"ltx_train.{sys.argv[1]}").main(sys.argv[2:])
    return importlib.import_module("ltx_train.__main__").main(sys.argv[1:])


# data workers and the like import this file again under another name when processes are spawned
if __name__ == "__main__":
    sys.exit(main())
else:
    prepare(__file__)
