"""The nodes that make or mend a dataset: films into scenes, captions, references for IC-LoRA. Each works in a process of its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from comfy_api.latest import io

from ..ltx_train.config import digest, parse_section
from ..ltx_train.errors import ConfigError, LtxTrainError
from ..ltx_train.runs.run_dir import RunDir
from ..ltx_train.tools import CAPTIONERS, CONTROLS, CaptionJob, Outcome, ReferenceJob, SceneSection, ToolJob
from . import jobs, paths, schema, sockets
from .dataset import NONE
from .follow import Screen

CATEGORY = f"{sockets.CATEGORY}/data"
MARK = "done.json"


class _ToolNode(io.ComfyNode):
    """What these nodes share: a file or folder in, a job done in a child, its place and a report out."""

    source = "dataset"
    """The dropdown beside which ``path`` may be given."""

    @classmethod
    def made(cls, node_id: str, title: str, description: str, aliases: list[str], inputs: list[io.Input]) -> io.Schema:
        return io.Schema(
            node_id=node_id,
            display_name=title,
            category=CATEGORY,
            description=description,
            search_aliases=["ltx", "train", *aliases],
            is_output_node=True,
            inputs=inputs,
            outputs=[
                io.String.Output("path", display_name="path", tooltip="For the path input of LTX Dataset."),
                io.String.Output("report", display_name="report"),
            ],
            hidden=[io.Hidden.unique_id],
        )

    @classmethod
    def places(cls, options: list[str], tooltip: str) -> list[io.Input]:
        """The dropdown and the text beside it."""
        return [
            io.Combo.Input(cls.source, options=[*options, NONE], tooltip=tooltip),
            io.String.Input("path", default="", optional=True, advanced=True, tooltip="A path instead: input/..., datasets/..., "
                "output/..., or a folder that the server's owner allows."),
        ]  # fmt: skip

    @classmethod
    def do(cls, task: dict[str, Any], source: Path) -> tuple[Outcome, RunDir]:
        """The task's outcome; nothing is started when the same was done before and nothing has changed since."""
        job = ToolJob.parse({"task": task, "output_dir": str(paths.jobs_root() / f"{task['kind']}-{digest(task, 12)}")})
        run, screen = RunDir(job.output_dir), Screen.of(cls.hidden.unique_id)
        told = lambda: {"job": job.fingerprint(), "source": paths.digest_of(source)}  # noqa: E731
        if not (jobs.done_before(run, run.path / MARK, told()) and Path(Outcome.read(run).output).exists()):
            jobs.carry_out(job, screen)
            jobs.mark_done(run.path / MARK, told())
        done = Outcome.read(run)
        screen.text(summary(done).splitlines()[0])
        return done, run

    @classmethod
    def given(cls, done: Outcome) -> io.NodeOutput:
        """The node's outputs."""
        text = summary(done)
        return io.NodeOutput(paths.label_of(Path(done.output)), text, ui={"ltx_text": [text]})


def summary(done: Outcome, limit: int = 40) -> str:
    """What became of the clips, for reading: counts, the place, those that failed with their reasons, then the others."""
    lines = [f"{len(done.made)} made" + (f", {len(done.kept)} kept as they were" if done.kept else "")]
    lines[0] += f", {len(done.failed)} failed" if done.failed else ""
    lines.append(paths.label_of(Path(done.output)))
    rows = [f"x {name}: {reason}" for name, reason in done.failed.items()] + [f"+ {name}" for name in done.made]
    return "\n".join([*lines, *rows[:limit], *([f"... and {len(rows) - limit} more"] if len(rows) > limit else [])])


def place_is_there(choice: str | None, path: str | None, what: str) -> bool | str:
    """For validate_inputs: True, or what is wrong. A path that comes through a link is not known yet."""
    if path is None or (choice is None and not path):
        return True
    try:
        paths.resolve(path or choice or "", what=what)
    except LtxTrainError as error:
        return error.message
    return True


def print_of(choice: str | None, path: str | None) -> str:
    """For fingerprint_inputs: changes with the files."""
    try:
        return paths.digest_of(paths.resolve(path or choice or ""))
    except LtxTrainError:
        return "missing"


class LTXTrainSplitScenes(_ToolNode):
    """Cuts films into clips at their cuts."""

    source = "film"
    BASIC = {"detector", "threshold", "min_seconds", "max_seconds"}

    @classmethod
    def define_schema(cls) -> io.Schema:
        inputs = [
            *cls.places(paths.films(), "A film, or a folder of films, below ComfyUI's input and datasets folders."),
            io.String.Input("folder", default="datasets/my_scenes", tooltip="Where the clips go: datasets/name or input/name. Clips that "
                "are there already are kept."),
            *schema.inputs_of(SceneSection, leave=("stats_file",), basic=cls.BASIC),
        ]  # fmt: skip
        return cls.made("LTXTrainSplitScenes", "LTX Split Scenes", "Cuts films into their scenes, each a clip with its sound. The film "
            "itself is only read.", ["scene detection", "cut video"], inputs)  # fmt: skip

    @classmethod
    def validate_inputs(cls, film: str | None = None, path: str | None = "") -> bool | str:
        return place_is_there(film, path, "film")

    @classmethod
    def fingerprint_inputs(cls, film: str | None = None, path: str | None = "", **_: Any) -> str:
        return print_of(film, path)

    @classmethod
    def execute(cls, film: str, folder: str, path: str = "", **widgets: Any) -> io.NodeOutput:
        source, target = paths.resolve(path or film, what="film"), paths.new_folder(folder)
        scenes = parse_section(SceneSection, schema.values_of(SceneSection, widgets))
        done, _ = cls.do({"kind": "split", "films": [str(source)], "output": str(target), "scenes": scenes.model_dump()}, source)
        return cls.given(done)


class LTXTrainCaption(_ToolNode):
    """Writes captions with a model that sees and hears."""

    FIELDS = ("override", "extensions", "recursive", "remove_llm_prefixes", "workers")

    @classmethod
    def define_schema(cls) -> io.Schema:
        inputs = [
            *cls.places(paths.datasets(), "A folder of clips or a dataset file below ComfyUI's input and datasets folders."),
            schema.choice_input("captioner", CAPTIONERS, default="endpoint", leave=("kind",), tooltip="endpoint: a server that speaks "
                "OpenAI's protocol (vLLM, llama.cpp), on this machine or a host that the server's owner allows. local: a model folder."),
            *schema.inputs_of(CaptionJob, cls.FIELDS, basic={"override"}),
        ]  # fmt: skip
        return cls.made("LTXTrainCaption", "LTX Caption Clips", "Writes captions with a model that sees and hears, into a file that you "
            "can edit. What a person wrote stays.", ["caption", "describe", "qwen omni"], inputs)  # fmt: skip

    @classmethod
    def validate_inputs(cls, dataset: str | None = None, path: str | None = "", captioner: Any = None) -> bool | str:
        """ComfyUI gives what a choice brings along, asked or not."""
        return place_is_there(dataset, path, "dataset")

    @classmethod
    def fingerprint_inputs(cls, dataset: str | None = None, path: str | None = "", **_: Any) -> str:
        return print_of(dataset, path)

    @classmethod
    def execute(cls, dataset: str, captioner: dict[str, Any], path: str = "", **widgets: Any) -> io.NodeOutput:
        source = paths.resolve(path or dataset)
        kind, chosen = schema.choice_of("captioner", CAPTIONERS, captioner)
        if kind == "local":
            chosen["model_path"] = str(model_folder(chosen.get("model_path") or "", "captioning"))
        values = {"input": str(source), "captioner": {"kind": kind, **chosen}, **schema.values_of(CaptionJob, widgets, only=cls.FIELDS)}
        job = parse_section(CaptionJob, values)
        hosts = list(paths.Settings.read().caption_hosts)
        done, _ = cls.do({"kind": "caption", "job": job.model_dump(), "hosts": hosts}, source)
        return cls.given(done)


class LTXTrainMakeReferences(_ToolNode):
    """Makes the reference clips of an IC-LoRA."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        inputs = [
            *cls.places(paths.datasets(), "A folder of clips or a dataset file below ComfyUI's input and datasets folders."),
            schema.choice_input("control", CONTROLS, default="canny", leave=("kind",), tooltip="What is made of each clip: edges, depth, "
                "blur, a low resolution, or grey."),
            *schema.inputs_of(ReferenceJob, ("override",)),
        ]  # fmt: skip
        return cls.made("LTXTrainMakeReferences", "LTX Make References", "Makes a reference of every clip for IC-LoRA training, and a "
            "dataset file that pairs them. Your clips are only read.", ["ic-lora", "control", "canny", "depth"], inputs)  # fmt: skip

    @classmethod
    def validate_inputs(cls, dataset: str | None = None, path: str | None = "", control: Any = None) -> bool | str:
        """ComfyUI gives what a choice brings along, asked or not."""
        return place_is_there(dataset, path, "dataset")

    @classmethod
    def fingerprint_inputs(cls, dataset: str | None = None, path: str | None = "", **_: Any) -> str:
        return print_of(dataset, path)

    @classmethod
    def execute(cls, dataset: str, control: dict[str, Any], path: str = "", override: bool = False) -> io.NodeOutput:
        source = paths.resolve(path or dataset)
        kind, chosen = schema.choice_of("control", CONTROLS, control)
        if kind == "depth":
            chosen["model_path"] = str(model_folder(chosen.get("model_path") or "", "depth"))
        values = {"dataset": str(source), "control": {"kind": kind, **chosen}, "override": override}
        job = parse_section(ReferenceJob, values)
        done, _ = cls.do({"kind": "reference", "job": job.model_dump()}, source)
        return cls.given(done)


def model_folder(text: str, what: str) -> Path:
    """A Hugging Face folder of ComfyUI's text_encoders, or at a path that workflows may name."""
    if not text.strip():
        raise ConfigError("tool.model", f"No {what} model is chosen.", "Give a Hugging Face folder: its name in models/text_encoders, or a "
            "path below input, output or datasets.")  # fmt: skip
    name = f"{text.strip().strip('/')}/"
    if name in paths.encoder_folders():
        return paths.encoder_path(name)
    return paths.resolve(text, what=f"{what} model")


NODES = (LTXTrainSplitScenes, LTXTrainCaption, LTXTrainMakeReferences)
