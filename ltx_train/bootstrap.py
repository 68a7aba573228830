"""Starts a module of the engine by this file's absolute path: the interpreter may ignore PYTHONPATH, cwd and script folder.

    python [-I] /any where/ltx_train/bootstrap.py worker DIR train
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
    if len(sys.argv) < 2 or sys.argv[1] not in MODULES:
        sys.stderr.write(f"usage: {os.path.basename(__file__)} {{{','.join(MODULES)}}} ...\n")
        return 2
    return importlib.import_module(f"ltx_train.{sys.argv[1]}").main(sys.argv[2:])


# data workers and the like import this file again under another name when processes are spawned
if __name__ == "__main__":
    sys.exit(main())
else:
    prepare(__file__)
