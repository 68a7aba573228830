"""The worker: exceptions become events and exit codes, signals ask for a stop, the bootstrap finds the package."""

import os
import signal
import subprocess
import sys
import time

import pytest
import torch

from ltx_train.errors import ConfigError, OutOfMemory, StopRequested
from ltx_train.launch import start
from ltx_train.runs.lock import ProcessId
from ltx_train.runs.run_dir import RunDir
from ltx_train.worker import describe, is_out_of_memory, run_main_rank

posix = pytest.mark.skipif(sys.platform == "win32", reason="signals of POSIX")


def caused(outer, inner):
    outer.__cause__ = inner
    return outer


MEMORY = [
    MemoryError(),
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."),
    OutOfMemory("memory.plan", "Does not fit."),
    RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    RuntimeError("[enforce fail at alloc_cpu.cpp:114] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes."),
    RuntimeError("DefaultCPUAllocator: not enough memory: you tried to allocate 9 bytes."),
    RuntimeError("MPS backend out of memory"),
    OSError(12, "Cannot allocate memory"),
    caused(RuntimeError("while checkpointing"), torch.OutOfMemoryError("HIP out of memory")),
]


@pytest.mark.parametrize("error", MEMORY, ids=lambda error: str(error)[:30] or "MemoryError")
def test_every_kind_of_running_out_of_memory_is_seen(error):
    assert is_out_of_memory(error) and describe(error)[1] == 4


def test_numpys_words_for_it():
    import numpy

    with pytest.raises(MemoryError) as caught:
        numpy.empty(1 << 60, dtype=numpy.uint8)
    assert describe(caught.value)[1] == 4


@pytest.mark.parametrize("error", [RuntimeError("size mismatch"), ValueError("out of memory of names"), KeyError("x"), OSError(2, "No such file")])
def test_other_errors_are_crashes(error):
    event, code = describe(error)
    assert code == 1 and event.code == "crash" and type(error).__name__ in event.message


def test_the_rest_of_the_map():
    assert describe(StopRequested())[1] == 3 and describe(KeyboardInterrupt())[1] == 3
    assert describe(SystemExit(0)) == (None, 0) and describe(SystemExit("no"))[1] == 1
    event, code = describe(ConfigError("a.b", "wrong", "do"), rank=2)
    assert (code, event.code, event.message, event.hint, event.rank, event.traceback) == (2, "a.b", "wrong", "do", 2, "")
    event, code = describe(ModuleNotFoundError("No module named 'wandb.sdk'", name="wandb.sdk"))
    assert code == 2 and "package wandb is" in event.message
    event, code = describe(ModuleNotFoundError("No module named 'ltx_train.nope'", name="ltx_train.nope"))
    assert code == 1
    assert describe(OSError(28, "No space left on device"))[1] == 2


def test_a_worker_without_a_parent_takes_and_releases_the_lock(tmp_path):
    directory = RunDir.create(tmp_path / "run")
    seen = []

    def work(run):
        seen.append(directory.lock.owner() == ProcessId.of())
        run.set_state("running")

    assert run_main_rank(directory, "train", work) == 0
    assert seen == [True] and directory.lock.owner() is None
    assert directory.status().state == "finished" and directory.status().exit_code == 0


def test_a_locked_run_is_left_alone(tmp_path, capsys):
    directory = RunDir.create(tmp_path / "run")
    directory.lock.take(ProcessId.of())
    before = directory.lock.owner()
    assert run_main_rank(directory, "train", lambda run: pytest.fail("must not run")) == 2
    assert "in use by process" in capsys.readouterr().err
    assert directory.lock.owner() == before and not directory.events_path.exists()


def test_an_error_is_written_even_when_the_event_file_fails(tmp_path, capsys):
    directory = RunDir.create(tmp_path / "run")

    def work(run):
        run._log.close()
        run._log.write = lambda event: (_ for _ in ()).throw(OSError(28, "No space left on device"))
        raise ConfigError("a.b", "wrong value", "do this")

    assert run_main_rank(directory, "train", work) == 2
    told = capsys.readouterr().err
    assert "wrong value" in told and "could not be written" in told and directory.lock.owner() is None


@posix
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signals_stop_gracefully(engine, number):
    run = engine.run(steps=10_000, delay=0.02)
    child = start(run)
    deadline = time.time() + 15
    while RunDir(run).read_status().state != "running" and time.time() < deadline:
        time.sleep(0.02)
    os.kill(child.pid, signal.SIGHUP)
    os.kill(child.pid, number)
    outcome = child.wait(15)
    assert (outcome.exit_code, outcome.state) == (3, "stopped")
    assert (run / "counter").exists(), "it left a snapshot"


@pytest.mark.parametrize("flags", [[], ["-I"]])
def test_the_bootstrap_finds_its_package_and_nothing_of_it_is_top_level(engine, tmp_path, flags):
    (engine.root / "ltx_train" / "worker.py").write_text(
        "import sys\n"
        "def main(argv):\n"
        "    import importlib.util\n"
        "    print(__name__, argv, importlib.util.find_spec('geometry'), importlib.util.find_spec('section'), sys.stdout.encoding, 'ü')\n"
        "    return 7\n",
        encoding="utf-8",
    )
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | {"LC_ALL": "C", "PYTHONUTF8": "0"}
    done = subprocess.run([sys.executable, *flags, str(engine.bootstrap), "worker", "a", "b"], cwd=tmp_path, env=environment, capture_output=True, timeout=60)
    assert done.returncode == 7, done.stderr.decode()
    assert done.stdout.decode("utf-8").split() == ["ltx_train.worker", "['a',", "'b']", "None", "None", "utf-8", "ü"]


def test_the_bootstrap_is_the_command_line_too(engine, tmp_path):
    """Where the interpreter finds no package by the current folder (Windows portable's), -I here."""
    (engine.bootstrap.parent / "__main__.py").write_text("def main(arguments):\n    print(arguments)\n    return 3\n", encoding="utf-8")
    done = subprocess.run([sys.executable, "-I", str(engine.bootstrap), "report", "a b"], cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (3, "['report', 'a b']\n"), done.stderr
