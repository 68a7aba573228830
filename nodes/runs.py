"""The nodes around what a run leaves: load a run, save its LoRA elsewhere or in another form."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import folder_paths
import torch
from comfy_api.latest import io

from ..ltx_train.errors import LtxTrainError, RunError
from ..ltx_train.lora.edit import convert, resize, strip
from ..ltx_train.lora.files import LoraFile, read_lora
from ..ltx_train.runs.run_dir import RunDir, check_name, list_runs
from . import paths, sockets
from .follow import Screen
from .media import media_of, media_outputs
from .sample import newest_sample
from .train import LORA_FOLDER, Result, last_lora

NO_RUN = "(no run yet)"
LAYOUTS = ("comfyui", "diffusers", "peft", "kohya", "plain")
PRECISIONS = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
STREAMS = {
    "all": None,
    "video": ("video",),
    "audio": ("audio",),
    "video and cross": ("video", "cross"),
    "audio and cross": ("audio", "cross"),
}


def run_names() -> list[str]:
    """Names of the training runs, the newest first."""
    runs = [run for run in list_runs(paths.runs_root()) if not run.name.startswith(".") and run.job_path("train").is_file()]
    return [run.name for run in sorted(runs, key=lambda run: run.job_path("train").stat().st_mtime, reverse=True)]


class LTXTrainLoadRun(io.ComfyNode):
    """A run that is on disk: finished, stopped or at work."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="LTXTrainLoadRun",
            display_name="LTX Load Run",
            category=sockets.CATEGORY,
            description="A run of output/ltx_train: its newest sample, its losses, and its newest LoRA.",
            search_aliases=["ltx", "train", "resume", "loss"],
            inputs=[
                io.Combo.Input("run", options=run_names() or [NO_RUN], tooltip="A folder of output/ltx_train."),
                io.Int.Input("sample", default=1, min=1, max=1000, tooltip="Which prompt's sample."),
                io.Int.Input("step", default=-1, min=-1, max=10_000_000, advanced=True, tooltip="The sample of this step; -1: the newest."),
            ],
            outputs=[
                sockets.Run.Output("ltx_run", display_name="ltx_run"),
                *media_outputs(),
                io.LossMap.Output("loss_map", display_name="loss_map"),
                io.LoraModel.Output("lora", display_name="lora"),
                sockets.LoraName.Output("lora_name", display_name="lora_name", tooltip="For LoraLoader and LoraLoaderModelOnly."),
            ],
            hidden=[io.Hidden.unique_id],
        )

    @classmethod
    def validate_inputs(cls, run: str) -> bool | str:
        try:
            paths.existing_run(run)
        except LtxTrainError as error:
            return error.message
        return True

    @classmethod
    def fingerprint_inputs(cls, run: str, **_: Any) -> str:
        try:
            found = RunDir(paths.existing_run(run))
        except LtxTrainError:
            return "missing"
        return paths.digest_of(found.events_path) if found.events_path.exists() else "empty"

    @classmethod
    def execute(cls, run: str, sample: int = 1, step: int = -1) -> io.NodeOutput:
        from comfy_execution.graph import ExecutionBlocker

        found = RunDir(paths.existing_run(run))
        media = media_of(newest_sample(found, sample - 1, None if step < 0 else step))
        losses = {"loss": [loss for _, loss in found.history().losses]}
        status = found.status()
        Screen.of(cls.hidden.unique_id).text(f"{found.name}: {status.state}, step {status.step} of {status.total or '?'}")
        nothing = ExecutionBlocker(None)
        lora: tuple[Any, Any] = (nothing, nothing)
        if last_lora(found) is not None:
            result = Result.of(found)
            lora = (result.lora_model(), result.lora_name)
        return io.NodeOutput(sockets.LtxRun(found.path), *media, losses, *lora, ui={"ltx_run": [found.name]})


class LTXTrainSaveLoRA(io.ComfyNode):
    """A run's LoRA (or one from another node) as a file of its own."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="LTXTrainSaveLoRA",
            display_name="LTX Save LoRA",
            category=sockets.CATEGORY,
            description="Saves a run's LoRA under a name of your own: another step, a smaller rank, the video or sound part alone, "
                "another tool's key names. Its strength stays the same.",
            search_aliases=["ltx", "export lora", "convert", "resize"],
            is_output_node=True,
            inputs=[
                sockets.Run.Input("ltx_run", tooltip="From LTX Train LoRA or LTX Load Run."),
                io.String.Input("name", default=f"{LORA_FOLDER}/my_lora_final", tooltip="Name in the loras folder, without .safetensors."),
                io.Combo.Input("folder", options=["output/loras", "models/loras"], tooltip="Both are listed by LoraLoader."),
                io.Int.Input("step", default=-1, min=-1, max=10_000_000, tooltip="The LoRA of this step; -1: the newest."),
                io.Combo.Input("precision", options=list(PRECISIONS), advanced=True, tooltip="Number format of the file."),
                io.Combo.Input("keep", options=list(STREAMS), advanced=True, tooltip="Which part of the model it changes: video, sound, "
                    "the layers between them (cross)."),
                io.Int.Input("resize_to", default=0, min=0, max=1024, advanced=True, tooltip="A smaller rank, by the best approximation; "
                    "0 keeps the rank."),
                io.Combo.Input("layout", options=list(LAYOUTS), advanced=True, tooltip="Key names; comfyui is what ComfyUI and the "
                    "official tools read."),
                io.Boolean.Input("overwrite", default=False, tooltip="Replace a file of this name; otherwise a number is added."),
            ],
            outputs=[sockets.LoraName.Output("lora_name", display_name="lora_name"), io.String.Output("path", display_name="path")],
            hidden=[io.Hidden.unique_id],
        )

    @classmethod
    def execute(
        cls,
        ltx_run: sockets.LtxRun,
        name: str,
        folder: str = "output/loras",
        step: int = -1,
        precision: str = "bfloat16",
        keep: str = "all",
        resize_to: int = 0,
        layout: str = "comfyui",
        overwrite: bool = False,
    ) -> io.NodeOutput:
        source = lora_of_step(ltx_run.dir, step)
        target = target_of(name, folder, overwrite)
        lora = edited(read_lora(source), keep, resize_to)
        target.parent.mkdir(parents=True, exist_ok=True)
        convert(lora, target, layout, PRECISIONS[precision])
        ranks, size = ", ".join(map(str, lora.ranks)), target.stat().st_size / 2**20
        text = f"saved {target.name}: {len(lora.modules)} modules, rank {ranks}, {size:.1f} MiB"
        Screen.of(cls.hidden.unique_id).text(text)
        listed = os.path.relpath(target, loras_folder(folder))
        return io.NodeOutput(listed, str(target), ui={"ltx_text": [f"{text}\n{target}"]})


def lora_of_step(run: RunDir, step: int) -> Path:
    """The run's LoRA of a step, or its newest. Raises RunError naming the steps that are there."""
    if step < 0:
        found = last_lora(run)
        if found is None:
            raise RunError("run.no_lora", f"The run {run.name} has no LoRA yet.", "Train it first.")
        return found[0]
    path = run.checkpoints / f"lora_weights_step_{step:05d}.safetensors"
    if not path.is_file():
        there = [p.stem.rsplit("_", 1)[-1].lstrip("0") for p in sorted(run.checkpoints.glob("lora_weights_step_*.safetensors"))]
        raise RunError("run.no_step", f"The run {run.name} has no LoRA of step {step}.", f"There are: {', '.join(there) or 'none'}.")
    return path


def edited(lora: LoraFile, keep: str, resize_to: int) -> LoraFile:
    """The LoRA reduced to some streams and to a rank."""
    streams = STREAMS[keep]
    if streams is not None:
        lora = strip(lora, streams)
    return resize(lora, resize_to).lora if resize_to else lora


def loras_folder(folder: str) -> Path:
    """The folder that a choice of the save node stands for."""
    if folder == "output/loras":
        return paths.loras_root()
    inside_output = folder_paths.get_output_directory()
    return next((Path(p) for p in folder_paths.get_folder_paths("loras") if not paths.inside(inside_output, p)), paths.loras_root())


def target_of(name: str, folder: str, overwrite: bool) -> Path:
    """The file for a name below a loras folder. Raises RunError for names that are none or leave the folder."""
    parts = [part for part in name.replace("\\", "/").removesuffix(".safetensors").split("/") if part]
    for part in parts or [""]:
        check_name(part)
    root = loras_folder(folder)
    target = root.joinpath(*parts[:-1], f"{parts[-1]}.safetensors")
    if not paths.inside(root, target):
        raise RunError("lora.name", f"{name[:60]} lies outside the loras folder.", "Give a plain name, or folder/name.")
    number = 2
    while target.exists() and not overwrite:
        target = target.with_name(f"{parts[-1]}_{number:03d}.safetensors")
        number += 1
    return target
