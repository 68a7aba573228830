"""The sample node: a clip from a prompt with the engine's own sampler, a run's LoRA applied."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from comfy_api.latest import io

from ..ltx_train.errors import LtxTrainError
from ..ltx_train.runs.events import WarningEvent
from ..ltx_train.runs.run_dir import RunDir
from . import compose, jobs, paths, schema, sockets
from .follow import Screen
from .media import keep_image, media_of, media_outputs
from .model import need
from .sample_inputs import preview_size, recipe_input, recipe_of
from .train import last_lora

NO_LORA = "none"
NEGATIVE = compose.DEFAULT_NEGATIVE


class LTXTrainSample(io.ComfyNode):
    """Makes one clip in a process of its own, as the previews of a run are made."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="LTXTrainSample",
            display_name="LTX Sample",
            category=sockets.CATEGORY,
            description="Makes a clip (or a picture, or sound) as the previews of a run are made: the model's own schedule and guidance, "
                "with the run's LoRA.",
            search_aliases=["ltx", "preview", "validation", "generate"],
            inputs=[
                sockets.Model.Input("ltx_model", tooltip="From LTX Model for Training."),
                io.String.Input("prompt", default="", multiline=True, tooltip="What the clip shows and sounds like."),
                io.String.Input("negative_prompt", default=NEGATIVE, multiline=True, advanced=True, tooltip="What to keep away from."),
                *preview_size(768, 512, 49),
                io.Float.Input("frame_rate", default=24.0, min=1.0, max=240.0, step=0.01, tooltip="Frames a second."),
                io.Int.Input("seed", default=42, min=0, max=schema.MAX_SEED, control_after_generate=True, tooltip="Of the noise."),
                io.Boolean.Input("generate_audio", default=True, tooltip="Make sound, where the model knows sound."),
                sockets.Run.Input("ltx_run", optional=True, tooltip="A run: its last LoRA is applied."),
                io.Combo.Input("lora_name", options=[NO_LORA, *paths.model_files("loras")], optional=True,
                    tooltip="A LoRA of ComfyUI's loras folder, beside or instead of the run's."),
                io.Float.Input("strength", default=1.0, min=-10.0, max=10.0, step=0.05, tooltip="Strength of the LoRA."),
                io.Image.Input("first_frame", optional=True, tooltip="The clip's first frame is given."),
                recipe_input(),
                sockets.Settings["memory"].Input("memory", optional=True, tooltip="From LTX Memory Settings."),
            ],
            outputs=media_outputs(),
            hidden=[io.Hidden.unique_id],
        )  # fmt: skip

    @classmethod
    def fingerprint_inputs(cls, lora_name: str = NO_LORA, **_: Any) -> str:
        """Changes when the LoRA file of that name does."""
        try:
            return "none" if lora_name in (NO_LORA, None) else paths.digest_of(paths.model_file(lora_name, "loras"))
        except LtxTrainError:
            return "missing"

    @classmethod
    def execute(cls, ltx_model: sockets.LtxModel, prompt: str, **widgets: Any) -> io.NodeOutput:
        need(ltx_model, "text_encoder", "video_vae")
        screen = Screen.of(cls.hidden.unique_id)
        loras = [(str(path), widgets.get("strength", 1.0)) for path in lora_files(widgets)]
        memory = widgets.get("memory")
        section, settings = section_of(prompt, widgets), memory.fields if memory else None
        job = compose.sample_job(ltx_model, section, loras, seed=widgets["seed"], acceleration=settings)
        run, told = RunDir(job.output_dir), {"job": job.fingerprint()}
        mark = run.path / "sampled.json"
        if not (jobs.done_before(run, mark, told) and newest_sample(run) is not None):
            jobs.carry_out(job, screen)
            jobs.mark_done(mark, told)
        if warnings := [e.message for e in run.events().events if isinstance(e, WarningEvent) and e.code.startswith("lora.")]:
            screen.text("\n".join(dict.fromkeys(warnings)))
        path = newest_sample(run)
        if path is None:
            raise LtxTrainError("sample.none", "The job left no sample.", f"See {run.log_path}.")
        return io.NodeOutput(*media_of(path))


def lora_files(widgets: dict[str, Any]) -> list[Path]:
    """The LoRA files that the node's inputs name."""
    found = []
    run = widgets.get("ltx_run")
    if run is not None:
        last = last_lora(run.dir)
        if last is None:
            raise LtxTrainError("run.no_lora", f"The run {run.dir.name} has no LoRA yet.", "Train it first.")
        found.append(last[0])
    name = widgets.get("lora_name") or NO_LORA
    return found if name == NO_LORA else [*found, paths.model_file(name, "loras")]


def section_of(prompt: str, widgets: dict[str, Any]) -> dict[str, Any]:
    """The validation section of one sample."""
    sample: dict[str, Any] = {"prompt": prompt}
    image = widgets.get("first_frame")
    if image is not None:
        sample["conditions"] = [{"type": "first_frame", "image_or_video": str(keep_image(image))}]
    return {
        "samples": [sample],
        "negative_prompt": widgets.get("negative_prompt", NEGATIVE),
        "video_dims": (widgets["width"], widgets["height"], widgets["frames"]),
        "frame_rate": widgets.get("frame_rate", 24.0),
        "generate_audio": widgets.get("generate_audio", True),
        **recipe_of(widgets),
    }


def newest_sample(run: RunDir, index: int | None = None, step: int | None = None) -> Path | None:
    """The file of the newest sample of a run (of a step, of a prompt's index), if it is on disk."""
    events = [e for e in run.history().samples.values() if (index is None or e.index == index) and (step is None or e.step == step)]
    found = [run.path / e.path for e in sorted(events, key=lambda e: (e.step, -e.index))]
    found = [path for path in found if path.is_file() and paths.inside(run.path, path)]
    return found[-1] if found else None
