"""In a real ComfyUI: a run in three parts with stock nodes sampling between them, the same as in one, and without loading again."""

import json
import os
import time

import psutil
import torch
from safetensors.torch import load_file

from ltx_train.runs.events import JobEvent, PhaseEvent, StateEvent, StepEvent
from tests.comfyui.host import MODELS

STEPS, PART = 6, 2


def graph(workflow, run_name, part):
    """Train some steps, then sample with LoraLoaderModelOnly and the stock sampler."""
    prompt = workflow("train", MODEL=MODELS["ltx2.3"], RUN=run_name, MODE="t2v")
    prompt["4"]["inputs"] |= {"steps": STEPS, "steps_this_run": part}
    stock = workflow(
        "stock_sample", MODEL=MODELS["ltx2.3"], LOADER="CheckpointLoaderSimple", WIDTH=48, AUDIO=True, LORA=["4", 2], STRENGTH=1.0, PREFIX=f"{run_name}/preview"
    )
    return prompt | json.loads(json.dumps(stock).replace('"INPUT"', '"ckpt_name"'))


def test_three_parts_with_stock_sampling_between_them(server, workflow):
    server.run(graph(workflow, "in one", 0)).good()
    whole = server.run_dir("in one")
    run, folder = server.run_dir("in parts"), server.base / "output" / "loras" / "ltx_train"
    prompt, waits, children = graph(workflow, "in parts", PART), [], []
    for part in (1, 2, 3):
        asked = time.time()
        ended = server.run(prompt).good()
        cached = next(data["nodes"] for kind, data in ended.record["status"]["messages"] if kind == "execution_cached")
        assert not {"4", "21", "27", "28"} & set(cached), "the train node and all that samples with its LoRA run again"
        status, first = run.status(), next(e for e in run.events().events if isinstance(e, StepEvent) and e.step == PART * (part - 1) + 1)
        waits.append(first.t - first.seconds - asked)
        assert status.step == PART * part and status.state == ("parked" if part < 3 else "finished")
        assert (folder / f"in parts_step_{PART * part:05d}.safetensors").read_bytes() == (run.checkpoints / f"lora_weights_step_{PART * part:05d}.safetensors").read_bytes()
        if part < 3:
            children.append(status.pid)
            assert psutil.pid_exists(status.pid)
    print(f"from queueing to the first step of each part: {', '.join(f'{s:.2f} s' for s in waits)}")
    events = run.events().events
    assert children[0] == children[1] and sum(isinstance(e, JobEvent) for e in events) == 1
    assert [e.phase for e in events if isinstance(e, PhaseEvent) and e.state == "start"].count("load the model") == 1
    assert [e.state for e in events if isinstance(e, StateEvent) and not e.control] == ["preparing", "running", "parked", "running", "parked", "running", "finished"]
    busy = max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))  # others may be at work on this machine
    assert max(waits[1:]) < 5 * busy, waits

    assert [loss for _, loss in run.history().losses] == [loss for _, loss in whole.history().losses] and len(run.history().losses) == STEPS
    last = f"lora_weights_step_{STEPS:05d}.safetensors"
    assert (run.checkpoints / last).read_bytes() == (whole.checkpoints / last).read_bytes()
    files = sorted((server.base / "output" / "in parts").glob("preview_*.latent"))
    latents = [load_file(file)["latent_tensor"] for file in [*files, *(server.base / "output" / "in one").glob("preview_*.latent")]]
    assert len(latents) == 4 and torch.equal(latents[2], latents[3])
    assert not torch.equal(latents[0], latents[1]) and not torch.equal(latents[1], latents[2])

    seen = run.events_path.read_bytes()
    server.run(prompt).good()
    assert run.events_path.read_bytes() == seen, "a finished run is handed on at once"


def test_a_part_is_interrupted_and_a_parked_run_stopped(server, workflow):
    """Stop on the panel ends the waiting child; the next part starts a new one at its snapshot."""
    prompt, run = graph(workflow, "left", PART), server.run_dir("left")
    server.run(prompt).good()
    child = run.status().pid
    server.post("/ltx_train/runs/left/stop", {})
    server.until(lambda: run.status().state == "stopped", 30)
    server.run(prompt).good()
    assert run.status().pid != child and [step for step, _ in run.history().losses] == [1, 2, 3, 4]
    server.post("/ltx_train/runs/left/stop", {})
    server.until(lambda: run.status().state == "stopped", 30)
