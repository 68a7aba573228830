"""The train node: writes a job, frees ComfyUI's models, follows the child, and hands on what it leaves on disk."""

from __future__ import annotations

import json
import logging
import os
import shutil
from pathlib import Path
from typing import Any

from comfy_api.latest import io

from ..ltx_train.config import TrainConfig
from ..ltx_train.errors import LtxTrainError, RunError
from ..ltx_train.run_setup import OpenedRun, end_parked, open_training, parked
from ..ltx_train.runs.run_dir import RunDir, check_name, list_runs, versions_of
from . import compose, paths, schema, sockets
from .follow import Screen, follow, free_memory
from .model import need
from .sample_inputs import prompts_of, sample_of

LORA_FOLDER = "ltx_train"
log = logging.getLogger(__name__)
MAX_ROUNDS = 5


class LTXTrainLoRA(io.ComfyNode):
    """Trains a LoRA in a process of its own."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        lines = "\n".join(f"{name}: {row.title}. {row.summary}" for name, row in compose.MODES.items())
        return io.Schema(
            node_id="LTXTrainLoRA",
            display_name="LTX Train LoRA",
            category=sockets.CATEGORY,
            description="Trains a LoRA in a process of its own and shows loss and previews while it goes. Interrupt saves a snapshot; "
                "queueing it again goes on from there.",
            search_aliases=["ltx", "train", "finetune", "lora trainer"],
            is_output_node=True,
            inputs=[
                sockets.Model.Input("ltx_model", tooltip="From LTX Model for Training."),
                io.MultiType.Input("data", [sockets.Cache, sockets.Dataset], tooltip="An encoded dataset from LTX Encode Dataset, or a "
                    "dataset, which is then encoded first."),
                io.String.Input("run_name", default="my_lora", tooltip="The run's folder in output/ltx_train, and the name of its LoRA. "
                    "The same name with other training settings makes name_002."),
                io.Combo.Input("mode", options=list(compose.MODE_NAMES), default="t2v_audio", tooltip=lines),
                io.Int.Input("rank", default=32, min=2, max=1024, tooltip="Capacity of the LoRA and size of its file."),
                io.Float.Input("alpha", default=0.0, min=0.0, max=4096.0, step=1.0, tooltip="The LoRA is scaled by alpha / rank in "
                    "training, and the file plays at that strength. 0: as the rank."),
                io.Int.Input("steps", default=2000, min=1, max=1_000_000, tooltip="Optimizer steps in all. Raise it later to go on with "
                    "the same run."),
                io.Float.Input("learning_rate", default=1e-4, min=0.0, max=10.0, step=1e-6, round=False, tooltip="0: the optimizer's own "
                    "default (prodigy: 1)."),
                io.Int.Input("seed", default=42, min=0, max=schema.MAX_SEED, control_after_generate=io.ControlAfterGenerate.fixed,
                    tooltip="Of noise, data order and the LoRA's start."),
                io.String.Input("validation_prompt", default="", multiline=True, optional=True, tooltip="Prompts of the previews, one a "
                    "line. Empty: no previews."),
                io.Int.Input("num_processes", optional=True, default=1, min=1, max=4096, advanced=True, tooltip="Processes, one a GPU."),
                io.String.Input("warm_start", default="", optional=True, advanced=True, tooltip="Start from this LoRA: a name in "
                    "ComfyUI's loras folder."),
                io.Int.Input("steps_this_run", default=0, min=0, max=1_000_000, optional=True, tooltip="Train so many steps each time the "
                    "graph is queued, then hand on the LoRA of that step: the graph may sample with it between the parts. The trainer waits "
                    "in host memory meanwhile, the GPU free. 0: all steps at once."),
                *[sockets.Settings[name].Input(name, optional=True, tooltip=f"From {title}.") for name, title in SETTINGS.items()],
            ],
            outputs=[
                io.LoraModel.Output("lora", display_name="lora"),
                io.LossMap.Output("loss_map", display_name="loss_map"),
                sockets.LoraName.Output("lora_name", display_name="lora_name", tooltip="For LoraLoader and LoraLoaderModelOnly."),
                sockets.Run.Output("ltx_run", display_name="ltx_run"),
            ],
            hidden=[io.Hidden.unique_id, io.Hidden.prompt, io.Hidden.extra_pnginfo],
        )  # fmt: skip

    @classmethod
    def validate_inputs(cls, run_name: str) -> bool | str:
        try:
            check_name(run_name.strip())
        except RunError as error:
            return f"{error.message} {error.hint}"
        return True

    @classmethod
    def fingerprint_inputs(cls, run_name: str, **_: Any) -> str:
        return results.generation(run_name)  # which is another one as long as parts of the run are to come

    @classmethod
    def execute(cls, ltx_model: sockets.LtxModel, data: sockets.LtxCache | sockets.LtxDataset, **widgets: Any) -> io.NodeOutput:
        config = config_of(ltx_model, data, widgets)
        screen = Screen.of(cls.hidden.unique_id)
        part = widgets.get("steps_this_run") or 0
        run = train(config, screen, {"prompt": cls.hidden.prompt, "workflow": (cls.hidden.extra_pnginfo or {}).get("workflow")}, part)
        found = Result.of(run, numbered=part > 0)
        results.remember(widgets["run_name"], more=part > 0 and found.step < config.optimization.steps)
        text = found.summary()
        screen.text(text.splitlines()[0])
        outputs = (found.lora_model(), found.loss_map(), found.lora_name, sockets.LtxRun(run.path))
        return io.NodeOutput(*outputs, ui={"ltx_text": [text], "ltx_run": [run.name]})


SETTINGS = {
    "adapter": "LTX Adapter Settings",
    "optimizer": "LTX Optimizer Settings",
    "objective": "LTX Objective Settings",
    "validation": "LTX Preview Settings",
    "memory": "LTX Memory Settings",
    "checkpoints": "LTX Checkpoint Settings",
    "mode_settings": "LTX Mode Settings",
    "distribution": "LTX Distribution Settings",
}


def config_of(model: sockets.LtxModel, data: sockets.LtxCache | sockets.LtxDataset, widgets: dict[str, Any]) -> TrainConfig:
    """The job of the train node's inputs; what is missing for it is told before anything starts."""
    if isinstance(data, sockets.LtxDataset):
        need(model, "text_encoder", "video_vae")
        section = compose.settled_data(data, model)
    else:
        if data.family != model.family:
            raise RunError("cache.family", f"The data were encoded for {data.family}; the model is "
                f"{model.family}.", "Encode them again with this model.")
        section = data.data
    warm = (widgets.get("warm_start") or "").strip()
    return compose.train_config(
        model,
        section,
        run_name=widgets["run_name"],
        mode_name=widgets["mode"],
        rank=widgets["rank"],
        alpha=widgets["alpha"],
        steps=widgets["steps"],
        learning_rate=widgets["learning_rate"],
        seed=widgets["seed"],
        num_processes=widgets.get("num_processes", 1),
        samples=[sample_of(prompt) for prompt in prompts_of(widgets.get("validation_prompt") or "")],
        settings=[widgets.get(name) for name in SETTINGS],
        warm_start=str(paths.model_file(warm, "loras")) if warm else None,
    )


def train(config: TrainConfig, screen: Screen, workflow: dict[str, Any] | None = None, steps_this_run: int = 0) -> RunDir:
    """The finished run of a job: as it lies there, attached to, gone on with, or trained now.

    steps_this_run: after so many further steps (0: all) the run is handed on as it is, its child parked.
    """
    for _ in range(MAX_ROUNDS):
        opened = open_training(config)
        if opened.finished and Result.there(opened.run):
            return opened.run
        going_on = parked(opened.run)
        if going_on or not opened.run.live():
            screen.text("Freeing memory")
            end_others(opened.run)
            free_memory()
            _keep_workflow(opened, workflow)
        child = compose.start_child(opened, steps_this_run)
        if child.attached and not going_on:
            log.info("LTX Train: the run %s is at work already: attached to it.", opened.run.name)
            screen.text(f"The run {opened.run.name} is at work already: attached to it.")
        if follow(child, screen).part_done:
            return opened.run
    raise RunError("run.unfinished", f"The run {Path(config.output_dir).name} ends before its {config.optimization.steps} "
        f"steps.", "Another process keeps changing it; look at its train.log.")


def end_others(run: RunDir) -> None:
    """End the children that wait between parts of other runs: they hold host memory, and their snapshots are all they need."""
    for other in list_runs(paths.runs_root()):
        if other.path != run.path and parked(other):
            log.info("LTX Train: the run %s waited for its next part; it ends to make room, and goes on from its snapshot.", other.name)
            end_parked(other)


def _keep_workflow(opened: OpenedRun, workflow: dict[str, Any] | None) -> None:
    """The graph that made the run, beside its config; a run does without it."""
    if workflow and workflow.get("workflow") is not None:
        (opened.run.path / "workflow.json").write_text(json.dumps(workflow["workflow"]), encoding="utf-8")
    elif workflow and workflow.get("prompt") is not None:
        (opened.run.path / "prompt.json").write_text(json.dumps(workflow["prompt"]), encoding="utf-8")


class Result:
    """What a finished run leaves: its last LoRA, also in ComfyUI's loras folder, and its losses."""

    def __init__(self, run: RunDir, file: Path, step: int, *, numbered: bool = False) -> None:
        self.run, self.file, self.step = run, file, step
        self.lora_name = publish(run, file, step, numbered=numbered)
        self.history = run.history()

    @classmethod
    def of(cls, run: RunDir, *, numbered: bool = False) -> Result:
        """Raises RunError when the run has no LoRA file. numbered: the name in ComfyUI's loras folder holds the step."""
        found = last_lora(run)
        if found is None:
            raise RunError("run.no_lora", f"The run {run.name} left no LoRA.", f"See {run.log_path}.")
        return cls(run, *found, numbered=numbered)

    @staticmethod
    def there(run: RunDir) -> bool:
        return last_lora(run) is not None

    def lora_model(self) -> dict[str, Any]:
        from safetensors.torch import load_file

        return load_file(self.file)

    def loss_map(self) -> dict[str, list[float]]:
        return {"loss": [loss for _, loss in self.history.losses]}

    def summary(self) -> str:
        losses = [loss for _, loss in self.history.losses]
        status = self.run.read_status()
        to_come = f" of {status.total}; queue it again to go on" if status.part_done else ""
        lines = [f"{self.run.name}: {self.step} steps done{to_come}"]
        if losses:
            tenth = max(1, len(losses) // 10)
            lines.append(f"loss {sum(losses[:tenth]) / tenth:.4f} at first, {sum(losses[-tenth:]) / tenth:.4f} at the end")
        lines += [f"LoRA: {self.lora_name}", f"run: {self.run.path}"]
        return "\n".join(lines + [f"! {w.message}" for w in self.history.warnings[-5:]])


def last_lora(run: RunDir) -> tuple[Path, int] | None:
    """(file, step) of the newest LoRA that is on disk."""
    events = sorted(run.history().loras.values(), key=lambda event: event.step)
    found = [(run.path / event.path, event.step) for event in events]
    found = [(path, step) for path, step in found if path.is_file() and paths.inside(run.path, path)]
    return found[-1] if found else None


def publish(run: RunDir, file: Path, step: int, root: Path | None = None, *, numbered: bool = False) -> str:
    """Put a run's LoRA into ComfyUI's loras folder as ``<run>.safetensors``; the name that LoraLoader lists.

    LoraLoader keeps a file that it has read, by its path: when the run's LoRA there is an older one, or ``numbered`` asks
    for it, the new one also goes by a name with its step, and that name is given.
    """
    folder = (root or paths.loras_root()) / LORA_FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    plain, by_step = folder / f"{run.name}.safetensors", folder / f"{run.name}_step_{step:05d}.safetensors"
    replaced = numbered or (plain.exists() and not _same(plain, file))
    for target in (plain, by_step) if replaced or (by_step.exists() and not _same(by_step, file)) else (plain,):
        if not (target.exists() and _same(target, file)):
            temporary = target.with_name(f".{target.name}.tmp")
            shutil.copy2(file, temporary)
            os.replace(temporary, target)
    name = by_step.name if by_step.exists() else plain.name
    return os.path.join(LORA_FOLDER, name)


def _same(one: Path, other: Path) -> bool:
    a, b = one.stat(), other.stat()
    return a.st_size == b.st_size and a.st_mtime_ns == b.st_mtime_ns


class Results:
    """Which results this process has handed on, so that ComfyUI's cache of them lasts until the disk says otherwise."""

    def __init__(self) -> None:
        self._known: dict[str, tuple[str, int]] = {}

    def generation(self, run_name: str) -> str:
        """The same text as long as the runs of a name are as this process last left them."""
        digest, number = self._known.get(run_name, ("", 0))
        return f"{number}" if digest in ("", self._state(run_name)) else f"{number + 1}"

    def remember(self, run_name: str, *, more: bool = False) -> None:
        """The node has run: what is on disk now is what its outputs say. more: the next time it has something else to do."""
        digest, number = self._known.get(run_name, ("", 0))
        state = self._state(run_name)
        self._known[run_name] = ("a part" if more else state, number + 1 if digest not in ("", state) else number)

    @staticmethod
    def _state(run_name: str) -> str:
        try:
            runs = versions_of(paths.runs_root(), check_name(run_name.strip()))
        except LtxTrainError:
            return "no name"
        found = []
        for run in runs:
            published = paths.loras_root() / LORA_FOLDER / f"{run.name}.safetensors"
            files = [run.events_path, *sorted(run.checkpoints.glob("*.safetensors")), published]
            found += [f"{f}|{f.stat().st_size}|{f.stat().st_mtime_ns}" for f in files if f.exists()]
        return "\n".join(found) or "nothing"


results = Results()
