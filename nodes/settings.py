"""The optional settings nodes, derived from a job's sections: adapter, optimizer, objective, previews, memory, snapshots, mode, GPUs."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import zip_longest
from typing import Any

from comfy_api.latest import io

from ..ltx_train.conditioning.modes import MODES
from ..ltx_train.config import (
    AccelerationSection,
    CheckpointsSection,
    DataSection,
    DistributedSection,
    FlowMatchingSection,
    LoraSection,
    OptimizationSection,
    ValidationSection,
)
from ..ltx_train.errors import ConfigError
from ..ltx_train.training.flow_matching import SAMPLERS
from ..ltx_train.training.optim import OPTIMIZERS
from ..ltx_train.training.schedule import SCHEDULES
from . import schema, sockets
from .sample_inputs import preview_size, prompts_of, recipe_input, recipe_of, sample_of

CATEGORY = f"{sockets.CATEGORY}/settings"
OWN = "auto"
ClipOptions = schema.is_section(DataSection.model_fields["clips"].annotation)
Ema = schema.is_section(OptimizationSection.model_fields["ema"].annotation)


class _SettingsNode(io.ComfyNode):
    """What all settings nodes share: inputs from a section's fields, and the fields of that section as output.

    socket: the type of the output. section: the part of the job it becomes. holds: that part's class.
    LEAVE: fields that are asked elsewhere. BASIC: those always shown (None: all). DEFAULTS: where a node starts from better ones.
    """

    socket = ""
    section = ""
    holds: type[schema.Section]
    LEAVE: tuple[str, ...] = ()
    BASIC: frozenset[str] | None = None
    DEFAULTS: Mapping[str, Any] = {}

    @classmethod
    def made(cls, node_id: str, title: str, description: str, inputs: list[io.Input] | None = None) -> io.Schema:
        output = sockets.Settings[cls.socket].Output(cls.socket, display_name=cls.socket)
        return io.Schema(
            node_id=node_id,
            display_name=title,
            category=CATEGORY,
            description=description,
            search_aliases=["ltx", "train", cls.socket],
            inputs=schema.inputs_of(cls.holds, leave=cls.LEAVE, basic=cls.BASIC, defaults=cls.DEFAULTS) if inputs is None else inputs,
            outputs=[output],
        )

    @classmethod
    def execute(cls, **widgets: Any) -> io.NodeOutput:
        return io.NodeOutput(sockets.SettingsOf(cls.section, cls.fields(widgets)))

    @classmethod
    def fields(cls, widgets: Mapping[str, Any]) -> dict[str, Any]:
        """The section's fields that the widgets set."""
        return schema.values_of(cls.holds, widgets)


class LTXTrainAdapterSettings(_SettingsNode):
    """What is adapted, and how."""

    socket, section, holds = "adapter", "lora", LoraSection
    LEAVE, BASIC, DEFAULTS = ("rank", "alpha"), frozenset({"kind", "target_modules", "dropout"}), {"target_modules": []}

    @classmethod
    def define_schema(cls) -> io.Schema:
        made = cls.made("LTXTrainAdapterSettings", "LTX Adapter Settings", "Kind of adapter, which modules it is put on, rank and alpha "
            "by module.")
        targets = next(one for one in made.inputs if one.id == "target_modules")
        targets.tooltip = f"{targets.tooltip} Empty: what suits the mode."
        return made

    @classmethod
    def fields(cls, widgets: Mapping[str, Any]) -> dict[str, Any]:
        found = schema.values_of(cls.holds, widgets)
        if not found.get("target_modules"):
            found.pop("target_modules", None)
        return found


class LTXTrainOptimizerSettings(_SettingsNode):
    """Optimizer, schedule, batch, warm-up, clipping, running average."""

    socket, section = "optimizer", "optimization"
    FIELDS = ("batch_size", "gradient_accumulation_steps", "warmup_steps", "max_grad_norm")

    @classmethod
    def define_schema(cls) -> io.Schema:
        inputs = [
            schema.choice_input("optimizer_type", OPTIMIZERS, default="adamw", tooltip="The optimizer, with its own parameters. The 8-bit "
                "and paged ones need bitsandbytes."),
            schema.choice_input("scheduler_type", {OWN: schema.Section, **SCHEDULES}, default=OWN, tooltip="How the learning rate falls "
                "over the steps; auto: as the optimizer is used."),
            *schema.inputs_of(OptimizationSection, cls.FIELDS, defaults={"batch_size": 1}),
            io.DynamicCombo.Input(
                "ema", optional=True, tooltip="Keep a running average of the weights, and save and sample that.",
                options=[io.DynamicCombo.Option("off", []), io.DynamicCombo.Option("on", schema.inputs_of(Ema))],
            ),
        ]  # fmt: skip
        return cls.made("LTXTrainOptimizerSettings", "LTX Optimizer Settings", "Optimizer, learning-rate schedule, batch size, gradient "
            "accumulation, warm-up, clipping, EMA.", inputs)

    @classmethod
    def fields(cls, widgets: Mapping[str, Any]) -> dict[str, Any]:
        found = schema.values_of(OptimizationSection, widgets, only=cls.FIELDS)
        if "optimizer_type" in widgets:
            found["optimizer_type"], found["optimizer_params"] = schema.choice_of("optimizer_type", OPTIMIZERS, widgets["optimizer_type"])
        schedule = widgets.get("scheduler_type")
        if schedule and schedule["scheduler_type"] != OWN:
            found["scheduler_type"], found["scheduler_params"] = schema.choice_of("scheduler_type", SCHEDULES, schedule)
        ema = widgets.get("ema")
        if ema and ema["ema"] == "on":
            found["ema"] = schema.values_of(Ema, ema)
        return found


class LTXTrainObjectiveSettings(_SettingsNode):
    """Noise levels, loss, weights of the streams."""

    socket, section = "objective", "flow_matching"
    SAMPLED = ("timestep_sampling_mode", "timestep_sampling_params", "audio_timestep_sampling_mode", "audio_timestep_sampling_params")
    AS_VIDEO = "as the video"
    BASIC = {"loss", "weighting", "balance", "video_weight", "audio_weight"}

    @classmethod
    def define_schema(cls) -> io.Schema:
        inputs = [
            schema.choice_input("timestep_sampling_mode", SAMPLERS, default="shifted_logit_normal", tooltip="How noise levels are drawn."),
            schema.choice_input(
                "audio_timestep_sampling_mode", {cls.AS_VIDEO: schema.Section, **SAMPLERS}, default=cls.AS_VIDEO,
                tooltip="How noise levels of the sound are drawn.",
            ),
            *schema.inputs_of(FlowMatchingSection, leave=cls.SAMPLED, basic=cls.BASIC),
        ]
        return cls.made("LTXTrainObjectiveSettings", "LTX Objective Settings", "Noise levels, loss, weighting, and the balance of video "
            "and sound.", inputs)

    @classmethod
    def fields(cls, widgets: Mapping[str, Any]) -> dict[str, Any]:
        found = schema.values_of(FlowMatchingSection, {k: v for k, v in widgets.items() if k not in cls.SAMPLED})
        for stream in ("", "audio_"):
            name = f"{stream}timestep_sampling_mode"
            chosen = widgets.get(name)
            if chosen and chosen[name] != cls.AS_VIDEO:
                found[name], found[f"{stream}timestep_sampling_params"] = schema.choice_of(name, SAMPLERS, chosen)
        return found


class LTXTrainValidationSettings(_SettingsNode):
    """The previews of a run."""

    socket, section = "validation", "validation"
    FIELDS = (
        "interval", "frame_rate", "seed", "negative_prompt", "generate_audio", "generate_video", "skip_initial_validation",
        "guidance_passes", "image_crf", "decode", "contact_sheet",
    )  # fmt: skip

    @classmethod
    def define_schema(cls) -> io.Schema:
        inputs = [
            io.String.Input("prompts", default="", multiline=True, tooltip="Further prompts, one a line, beside the train node's."),
            io.String.Input("first_frames", default="", multiline=True, advanced=True, tooltip="First frames, one image a line for each "
                "prompt in order: input/face.png; an empty line for none."),
            *preview_size(),
            *schema.inputs_of(ValidationSection, cls.FIELDS, basic={"interval", "frame_rate", "seed", "negative_prompt", "generate_audio"}),
            recipe_input(),
        ]
        return cls.made("LTXTrainValidationSettings", "LTX Preview Settings", "Which clips a run makes while it trains, how large, and "
            "how often.", inputs)

    @classmethod
    def fields(cls, widgets: Mapping[str, Any]) -> dict[str, Any]:
        found = schema.values_of(ValidationSection, widgets, only=cls.FIELDS) | recipe_of(widgets)
        if {"width", "height", "frames"} <= widgets.keys():
            found["video_dims"] = (widgets["width"], widgets["height"], widgets["frames"])
        frames = [line.strip() for line in (widgets.get("first_frames") or "").splitlines()]
        prompts = prompts_of(widgets.get("prompts") or "")
        found["samples"] = [sample_of(text, frame) for text, frame in zip_longest(prompts, frames[: len(prompts)], fillvalue="")]
        return found


class LTXTrainMemorySettings(_SettingsNode):
    """Precision, quantisation, and what leaves the card."""

    socket, section, holds = "memory", "acceleration", AccelerationSection
    BASIC = frozenset({"quantization", "mixed_precision_mode", "activation_checkpointing", "stream_blocks", "load_text_encoder_in_8bit"})

    @classmethod
    def define_schema(cls) -> io.Schema:
        return cls.made("LTXTrainMemorySettings", "LTX Memory Settings", "Precision, quantisation, activation checkpointing, streamed "
            "blocks: how the model fits onto its card.")


class LTXTrainCheckpointSettings(_SettingsNode):
    """When a run saves, and what."""

    socket, section, holds = "checkpoints", "checkpoints", CheckpointsSection
    LEAVE, DEFAULTS = ("no_resume",), {"interval": 250, "keep_last_n": 3}

    @classmethod
    def define_schema(cls) -> io.Schema:
        return cls.made("LTXTrainCheckpointSettings", "LTX Checkpoint Settings", "How often a run saves its LoRA and a snapshot to go on "
            "from.")


class LTXTrainClipSettings(_SettingsNode):
    """How clips are cut, scaled and cleaned, beyond what the dataset node asks."""

    socket, section, holds = "clips", "clips", ClipOptions
    LEAVE = ("fps", "frame_selection", "windows", "crop", "audio")

    @classmethod
    def define_schema(cls) -> io.Schema:
        return cls.made("LTXTrainClipSettings", "LTX Clip Settings", "How clips are cut, scaled and cleaned; reference factors for "
            "IC-LoRA. For LTX Dataset.")


class LTXTrainDistributionSettings(_SettingsNode):
    """Processes on several GPUs or machines."""

    socket, section, holds = "distribution", "distributed", DistributedSection
    LEAVE, BASIC = ("num_processes",), frozenset({"devices"})

    @classmethod
    def define_schema(cls) -> io.Schema:
        return cls.made("LTXTrainDistributionSettings", "LTX Distribution Settings", "Which GPUs take part, and how processes on several "
            "machines meet.")


class LTXTrainModeSettings(_SettingsNode):
    """A mode with conditions of one's own."""

    socket, section = "mode_settings", "training_strategy"

    @classmethod
    def define_schema(cls) -> io.Schema:
        modes = {name: row.title for name, row in MODES.items()}
        tip = "; ".join(f"{name}: {title}" for name, title in modes.items())
        probability = io.Float.Input(
            "first_frame_probability", default=-1.0, min=-1.0, max=1.0, step=0.05,
            tooltip="Share of the clips whose first frame is given. -1: as the mode has it.",
        )  # fmt: skip
        text = (
            "Instead of the mode's: conditions of the stream as the YAML has them, one a line, "
            'such as {type: prefix, temporal_boundary: 4}. "none": no condition.'
        )
        inputs = [
            io.Combo.Input("base", options=list(MODES), default="t2v_audio", tooltip=tip),
            probability,
            io.String.Input("video_conditions", default="", multiline=True, tooltip=text, advanced=True),
            io.String.Input("audio_conditions", default="", multiline=True, tooltip=text, advanced=True),
        ]
        return cls.made("LTXTrainModeSettings", "LTX Mode Settings", "A training mode with its conditions changed: what of a clip is "
            "given and what is learned.", inputs)

    @classmethod
    def fields(cls, widgets: Mapping[str, Any]) -> dict[str, Any]:
        row = MODES[widgets["base"]]
        streams: dict[str, Any] = {"video": _copy(row.video), "audio": _copy(row.audio)}
        for stream in ("video", "audio"):
            written = (widgets.get(f"{stream}_conditions") or "").strip()
            if written and streams[stream] is None:
                raise ConfigError("mode.no_stream", f"The mode {row.name} has no {stream}: {stream}_conditions must be "
                    f"empty.", "Choose a mode with that stream.")
            if written:
                streams[stream]["conditions"] = conditions_of(f"{stream}_conditions", written)
        probability = widgets.get("first_frame_probability", -1.0)
        if probability >= 0 and streams["video"] is not None:
            others = [c for c in streams["video"].get("conditions", []) if c.get("type") != "first_frame"]
            streams["video"]["conditions"] = ([{"type": "first_frame", "probability": probability}] if probability else []) + others
        return {"mode": row.name, "strategy": {"name": "flexible", **streams}}


def _copy(stream: Mapping[str, Any] | None) -> dict[str, Any] | None:
    return None if stream is None else {**stream, "conditions": [dict(c) for c in stream.get("conditions", [])]}


def conditions_of(name: str, text: str) -> list[dict[str, Any]]:
    """Conditions from YAML: one mapping a line, or a list. Raises ConfigError with the line that cannot be read."""
    import yaml

    if text.lower() == "none":
        return []
    found = []
    try:
        lines = [text] if text.lstrip().startswith("-") else [line for line in text.splitlines() if line.strip()]
        read = [yaml.safe_load(line) for line in lines]
        parsed = [item for found_here in read for item in (found_here if isinstance(found_here, list) else [found_here])]
    except yaml.YAMLError as error:
        raise ConfigError("widget.yaml", f"{name} cannot be read: "
            f"{str(error).splitlines()[0]:.60}", "Write one condition a line: {type: prefix, temporal_boundary: 4}") from error
    for item in parsed:
        if not isinstance(item, dict) or "type" not in item:
            raise ConfigError("widget.yaml", f"{name}: {str(item)!r:.60} is no condition with a "
                f"type.", "Write one condition a line: {type: prefix, temporal_boundary: 4}")
        found.append(item)
    return found


NODES = (
    LTXTrainAdapterSettings,
    LTXTrainOptimizerSettings,
    LTXTrainObjectiveSettings,
    LTXTrainValidationSettings,
    LTXTrainMemorySettings,
    LTXTrainCheckpointSettings,
    LTXTrainModeSettings,
    LTXTrainClipSettings,
    LTXTrainDistributionSettings,
)
