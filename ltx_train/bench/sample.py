"""``bench sample``: seconds of a preview's steps with all guidance passes in one forward, and with one after another."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace

import torch

from ..conditioning.state import LatentState
from ..lora.adapters import LoraSection, attach
from ..memory.pinned import HostMemory
from ..sampling.denoise import denoise
from ..sampling.guidance import Guidance, StreamGuidance
from ..sampling.schedule import Schedule, sigma_schedule
from .device import card_name, device_of, memory_in_use, synchronise
from .step import StepCase, fast_network, guarded, random_batch

PREVIEW_STEPS = 30
FOUR_PASSES = StreamGuidance(Guidance(cfg=3.0, stg=1.0, modality=3.0, rescale=0.7), Guidance(cfg=7.0, stg=1.0, modality=3.0, rescale=0.7), stg_blocks=(0,))
"""Plain, negative prompt, skipped self-attention, streams apart: what LTX-2's previews run."""


def run_sample(case: StepCase, *, command: str) -> Iterator[dict[str, object]]:
    """A record for one forward a step and one for four, and what the first gains."""
    device = device_of(case.tiny)
    memory = HostMemory(pin=device.type == "cuda")
    about = {"bench": "sample", "size": case.size, "family": case.family, "setting": case.setting, "card": card_name(device)}
    taken: dict[str, float] = {}
    for way in ("one by one", "batched"):
        found = guarded(measure_sample, case, device, memory, way == "batched")
        if "step_s" in found:
            taken[way] = float(found["step_s"])
        yield {**about, "passes": way, **found, "command": command, "date": time.strftime("%Y-%m-%d")}
    if len(taken) == 2:
        yield {**about, "passes": "ratio", "batched_is_faster_by": round(taken["one by one"] / taken["batched"], 3), "command": command, "date": time.strftime("%Y-%m-%d")}
    memory.close()


def measure_sample(case: StepCase, device: torch.device, memory: HostMemory, batched: bool) -> dict[str, object]:
    """Median-free: the mean of ``case.steps`` denoising steps after one that warms up."""
    config, dtype, model = fast_network(case, device, memory)
    attach(model, LoraSection(rank=case.rank, alpha=case.rank), seed=0, streams=("video", "audio") if model.has_audio else ("video",))
    batch = random_batch(case, config, device, dtype)
    states = {m: None if latents is None else LatentState.of(latents) for m, latents in (("video", batch.video), ("audio", batch.audio))}

    def steps(count: int) -> None:
        sigmas = sigma_schedule(max(2, PREVIEW_STEPS))[: count + 1]
        denoise(
            model, **states, positive=batch.context, negative=batch.context, schedule=Schedule(tuple(sigmas)), guidance=FOUR_PASSES,
            generator=torch.Generator(device).manual_seed(0), batched=batched, config=config,
        )  # fmt: skip

    began = time.perf_counter()
    steps(1)
    synchronise(device)
    first = time.perf_counter() - began
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    began = time.perf_counter()
    steps(case.steps)
    synchronise(device)
    each = (time.perf_counter() - began) / case.steps
    model.block_runner = None
    return {"step_s": round(each, 4), "first_step_s": round(first, 1), "preview_s": round(each * PREVIEW_STEPS, 1), "preview_steps": PREVIEW_STEPS, **memory_in_use(device)}


def tiny_case() -> StepCase:
    """What a CPU samples in a moment."""
    return replace(StepCase(), size="64x64x9", rank=4, tiny=True, compile=False, layers=2, steps=1)
