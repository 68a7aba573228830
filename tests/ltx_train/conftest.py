"""A small engine for tests of launching: the real launch, worker and runs, with a job that counts instead of training."""

import shutil
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml

ENGINE = Path(__file__).parents[2] / "ltx_train"
REAL = ("__init__.py", "errors.py", "section.py", "launch.py", "spawn.py", "worker.py", "bootstrap.py", "environment.py")

CONFIG = '''"""Jobs of the test engine: a dict of what to do."""
import yaml

from .errors import ConfigError


class TrainConfig(dict):
    @classmethod
    def load(cls, path):
        data = yaml.safe_load(path.read_text(encoding="utf-8"))
        if "rang" in data:
            raise ConfigError("config.unknown_field", "lora.rang is no field of a job.", "Did you mean lora.rank?")
        return cls(data)


PreprocessJob = SampleJob = TrainConfig
'''

TRAINER = '''"""A job that counts steps into a file that stands for a snapshot, and ends as it is told."""
import os
import signal
import sys
import time

from .errors import DataError
from .runs.events import SnapshotEvent, StepEvent


def run(job, run):
    run.set_state("running", total=job["steps"])
    snapshot = run.dir.path / "counter"
    step = int(snapshot.read_text()) if snapshot.exists() else 0

    def save(reason):
        snapshot.write_text(str(step))
        run.emit(SnapshotEvent(step=step, path="counter", reason=reason))

    print("größe ✓ output of the child")
    parallel = None
    if job.get("parallel"):
        import torch

        from .training.parallel import Parallel

        parallel = Parallel.start(device=job.get("device", "cpu"))
        parallel.preflight()
    at = job.get("at", 3)
    if job.get("rank") == run.rank:
        at = max(at, step + 1)  # a rank that comes late finds rank 0's counter past the place
    while step < job["steps"]:
        if at == step + 1:
            end(job, run)
        time.sleep(job.get("delay", 0.0))
        step += 1
        loss = 1.0 / step
        if parallel is not None:
            weight = torch.nn.Parameter(torch.ones(3))
            (weight.sum() * (parallel.rank + 1)).backward()
            parallel.average_gradients([weight])
            loss = float(weight.grad[0])
        run.emit(StepEvent(step=step, total=job["steps"], loss=loss))
        if run.take("save"):
            save("asked for")
        if step % 5 == 0 and run.is_main:
            save("interval")
        stop = run.stop.requested if parallel is None else parallel.any(run.stop.requested)
        if stop and not job.get("deaf"):
            save("stop")
            run.stop.request("another rank")
            run.stop.check()
    if parallel is not None:
        parallel.close()


def end(job, run):
    how = job.get("end")
    if how is None or run.rank != job.get("rank", 0):
        return
    if how == "oom" and run.status.notch >= job.get("enough", 99):
        return
    if how == "oom":
        raise RuntimeError("CUDA error: out of memory")
    if how == "data":
        raise DataError("data.empty", "The dataset holds no clip.", "Add some.")
    if how == "crash":
        raise ValueError("a bug ü")
    if how == "disk":
        raise OSError(28, "No space left on device", "x.safetensors")
    if how == "import":
        import a_package_that_is_not_there  # noqa: F401
    if how == "exit":
        os._exit(job["code"])
    if how.startswith("SIG"):
        os.kill(os.getpid(), getattr(signal, how))
    if how == "argv":
        sys.stderr.write(repr((sys.flags.isolated, os.getcwd(), sys.argv)) + "\\n")
'''


@dataclass
class Engine:
    """A copied engine in a folder with a space and an umlaut."""

    root: Path

    @property
    def bootstrap(self) -> Path:
        return self.root / "ltx_train" / "bootstrap.py"

    def run(self, name: str = "lauf 1", **job) -> Path:
        path = self.root / "runs" / name
        path.mkdir(parents=True, exist_ok=True)
        (path / "training_config.yaml").write_text(yaml.safe_dump({"steps": 10, **job}), encoding="utf-8")
        return path


@pytest.fixture
def engine(tmp_path, monkeypatch):
    root = tmp_path / "größe pack"
    package = root / "ltx_train"
    (package / "training").mkdir(parents=True)
    for name in REAL:
        shutil.copy(ENGINE / name, package / name)
    shutil.copytree(ENGINE / "runs", package / "runs", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("__init__.py", "parallel.py"):
        shutil.copy(ENGINE / "training" / name, package / "training" / name)
    (package / "config.py").write_text(CONFIG, encoding="utf-8")
    (package / "trainer.py").write_text(TRAINER, encoding="utf-8")
    monkeypatch.setattr("ltx_train.runs.command.BOOTSTRAP", package / "bootstrap.py")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    assert sys.flags.isolated == 0
    return Engine(root)
