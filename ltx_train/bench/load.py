"""``bench load``: host memory at its highest while a model of full size is loaded, and seconds to the first training step."""

from __future__ import annotations

import multiprocessing
import os
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace

import torch

from ..lora.adapters import LoraSection, attach
from ..memory.settings import AccelerationSection
from ..models.checkpoint import Checkpoint
from ..network import load_network
from ..tiny.checkpoints import write_tiny
from ..training.flow_matching import FlowMatchingSection
from ..training.optim import OptimizationSection
from ..training.step import TrainStep
from .device import GIB, card_name, device_of, memory_in_use, synchronise
from .full_model import write_random
from .link import hold_back
from .step import StepCase, cap, random_batch, strategy_of

EVERY = 0.01
"""Seconds between two looks at the memory."""


class HighWater:
    """The most anonymous memory (page-locked buffers among it) that this process holds while it is entered."""

    def __init__(self) -> None:
        self.most = 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def _watch(self) -> None:
        while not self._stop.is_set():
            self.most = max(self.most, anonymous())
            self._stop.wait(EVERY)

    def __enter__(self) -> HighWater:
        self._thread.start()
        return self

    def __exit__(self, *error) -> None:
        self._stop.set()
        self._thread.join()
        self.most = max(self.most, anonymous())


def anonymous() -> int:
    """Bytes of this process that no file stands behind; where the system does not tell, all that is resident."""
    try:
        lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
        return 1024 * int(next(line.split()[1] for line in lines if line.startswith("RssAnon")))
    except (OSError, StopIteration):
        import psutil

        return psutil.Process().memory_info().rss


def measure_load(path: str, case: StepCase, second: str, text_encoder: str | None = None) -> dict[str, object]:
    """Load as a training does, attach a LoRA, take a step, then the first step of another size. In a process of its own."""
    device = device_of(case.tiny)
    cap(case, device)
    checkpoint = Checkpoint.open(path)
    layers = checkpoint.transformer.num_layers
    section = AccelerationSection(
        mixed_precision_mode="no" if case.tiny else "bf16", quantization=case.quantization or None, stream_blocks=0 if case.resident < 0 else max(0, layers - case.resident),
        compile="auto" if case.compile else "off", activation_budget=case.budget, offload_activations="on" if case.offload else "off",
    )  # fmt: skip
    live = SimpleNamespace(warn=lambda *words: None, progress=lambda *words, **more: None)
    started = time.perf_counter()
    with HighWater() as water:
        model = load_network(checkpoint, section, device, streams=("video", "audio") if case.audio else ("video",), live=live, recompute=True)
        synchronise(device)
    loaded = time.perf_counter() - started
    engine = model.block_runner
    hold_back(engine.store, case.link, device)
    adapters = attach(model, LoraSection(rank=case.rank, alpha=case.rank), seed=0, streams=("video", "audio") if model.has_audio else ("video",))
    step = TrainStep(model, strategy_of(model.has_audio), FlowMatchingSection(), config=checkpoint.transformer)
    optimizer = OptimizationSection().build_optimizer(adapters.parameters(), in_ram=case.optimizer == "host")
    dtype = section.compute_dtype(device)

    def one(size: str, number: int) -> float:
        batch = random_batch(replace(case, size=size), checkpoint.transformer, device, dtype)
        synchronise(device)
        began = time.perf_counter()
        step(batch, seed=0, step=number, slot=0).loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        synchronise(device)
        return round(time.perf_counter() - began, 3)

    first = one(case.size, 0)
    ready = time.perf_counter() - started
    steady = min(one(case.size, n) for n in (1, 2))
    other, again = one(second, 3), min(one(second, n) for n in (4, 5))
    pinned = engine.memory.pinned
    return {
        "load_s": round(loaded, 1), "load_gb_s": round(Path(path).stat().st_size / 1e9 / loaded, 2),
        "first_step_s": first, "ready_s": round(ready, 1), "step_s": steady, "second_size": second, "new_bucket_s": round(max(0.0, other - again), 2),
        "anonymous_gib": round(water.most / GIB, 2), "pinned_gib": round(pinned / GIB, 2), "card": card_name(device), **memory_in_use(device),
    }  # fmt: skip


def _child(queue, environment: dict[str, str], arguments: tuple) -> None:
    os.environ.update(environment)
    try:
        queue.put(measure_load(*arguments))
    except Exception as error:  # noqa: B902 - told to the parent, which prints it
        queue.put({"error": f"{type(error).__name__}: {error}"[:600]})


def run_load(cases: Sequence[StepCase], *, second: str, file: Path | None, command: str, apart: bool = True) -> Iterator[dict[str, object]]:
    """Records of loading, each from a fresh process (apart=False: this one): the first case with a cold and with a warm compile
    cache, the others, of the same family, with the warm one."""
    with TemporaryDirectory(prefix="ltx_train_load_") as folder:
        place, first = Path(folder), cases[0]
        if first.tiny:
            path = write_tiny(place, first.family)["model"]
        else:
            path = write_random(file or place / f"{first.family}.safetensors", first.family, torch.device("cuda" if torch.cuda.is_available() else "cpu"))
        for cache, case in (("cold", first), *(("warm", case) for case in cases)):
            about = {"bench": "load", "size": case.size, "rank": case.rank, "family": case.family, "setting": case.setting, "file_gib": round(path.stat().st_size / GIB, 2)}
            environment = {"TORCHINDUCTOR_CACHE_DIR": str(place / "compiled"), "TRITON_CACHE_DIR": str(place / "compiled" / "triton")}
            arguments = (str(path), case, second)
            found = _apart(environment, arguments) if apart else measure_load(*arguments)
            yield {**about, "compile_cache": cache, **found, "command": command, "date": time.strftime("%Y-%m-%d")}


def _apart(environment: dict[str, str], arguments: tuple) -> dict[str, object]:
    """The measurement in a process of its own: caches are empty, memory is all its own."""
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    child = context.Process(target=_child, args=(queue, environment, arguments))
    child.start()
    while child.is_alive() and queue.empty():
        child.join(0.1)
    found = queue.get(timeout=5) if not queue.empty() or child.exitcode == 0 else {"error": f"the process ended with code {child.exitcode}"}
    child.join()
    return found
