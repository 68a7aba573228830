"""The model node: dropdowns from ComfyUI's folders, the family told by the files, and what is missing."""

from __future__ import annotations

import logging
from dataclasses import replace
from functools import lru_cache
from pathlib import Path

from comfy_api.latest import io

from ..ltx_train.config import ModelSection
from ..ltx_train.errors import CheckpointError, DataError, LtxTrainError
from ..ltx_train.models.checkpoint import Checkpoint
from . import paths, sockets

AUTO = "auto"
IN_MODEL = "in the model file"
MODEL_FOLDERS = ("checkpoints", "diffusion_models")
log = logging.getLogger(__name__)


class LTXTrainLoadModel(io.ComfyNode):
    """Names the files of one LTX model; nothing is loaded."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="LTXTrainLoadModel",
            display_name="LTX Model for Training",
            category=sockets.CATEGORY,
            description="Chooses the files of an LTX model (LTX-Video, LTX-2, 2.3, 2.5). The family is read from the file. Nothing is "
                "loaded into memory here.",
            search_aliases=["ltx", "train", "checkpoint", "lora trainer"],
            inputs=[
                io.Combo.Input("model", options=paths.model_files(*MODEL_FOLDERS), tooltip="A file of models/checkpoints or "
                    "models/diffusion_models."),
                io.Combo.Input(
                    "text_encoder", options=[AUTO, IN_MODEL, *paths.model_files("text_encoders"), *paths.encoder_folders()],
                    tooltip="auto takes the first file of models/text_encoders that fits the model (T5, Gemma 3 or LTX's Gemma 4).",
                ),
                io.Combo.Input("video_vae", options=[AUTO, *paths.model_files("vae")], tooltip="auto: the one inside the model file, else "
                    "the first fitting file of models/vae."),
                io.Combo.Input("audio_vae", options=[AUTO, *paths.model_files("vae")], tooltip="auto: the one inside the model file, else "
                    "the first fitting file of models/vae."),
            ],
            outputs=[sockets.Model.Output("ltx_model", display_name="ltx_model")],
        )  # fmt: skip

    @classmethod
    def fingerprint_inputs(cls, model: str, **_: str) -> str:
        """Changes when the file does, or the files that auto chooses from; a file that has gone is told by execute."""
        try:
            others = [*paths.model_files("text_encoders", "vae"), *paths.encoder_folders()]
            return "|".join([paths.digest_of(paths.model_file(model, *MODEL_FOLDERS)), *others])
        except LtxTrainError:
            return "missing"

    @classmethod
    def execute(cls, model: str, text_encoder: str = AUTO, video_vae: str = AUTO, audio_vae: str = AUTO) -> io.NodeOutput:
        found = choose(model, text_encoder, video_vae, audio_vae)
        return io.NodeOutput(found, ui={"ltx_text": [found.summary]})


def choose(model: str, text_encoder: str = AUTO, video_vae: str = AUTO, audio_vae: str = AUTO) -> sockets.LtxModel:
    """The files as a model, with ``auto`` settled by looking into the folders' headers."""
    main = paths.model_file(model, *MODEL_FOLDERS)
    given: dict[str, Path | None] = {
        "text_encoder": None if text_encoder in (AUTO, IN_MODEL) else paths.encoder_path(text_encoder),
        "video_vae": None if video_vae == AUTO else paths.model_file(video_vae, "vae"),
        "audio_vae": None if audio_vae == AUTO else paths.model_file(audio_vae, "vae"),
    }
    checkpoint = Checkpoint.open(main, **given)
    if text_encoder == AUTO and not checkpoint.has("text_encoder"):
        given["text_encoder"] = _fitting(main, "text_encoder", "text_encoders")
    for role, chosen in (("video_vae", video_vae), ("audio_vae", audio_vae)):
        if chosen == AUTO and role in checkpoint.family.components and not checkpoint.has(role):
            given[role] = _fitting(main, role, "vae")
    return _described(main, given, {"text_encoder": text_encoder, "video_vae": video_vae, "audio_vae": audio_vae})


def _fitting(main: Path, role: str, folder: str) -> Path | None:
    """The first file of a model folder that the checkpoint takes for ``role``; None where none fits."""
    for name in paths.model_files(folder):
        try:
            path = paths.model_file(name, folder)
        except DataError:
            continue
        if _fits(main, path, role, _stamp(main), _stamp(path)):
            return path
    return None


def _stamp(path: Path) -> tuple[int, int]:
    stat = path.stat()
    return stat.st_size, stat.st_mtime_ns


@lru_cache(maxsize=512)
def _fits(main: Path, path: Path, role: str, *_: tuple[int, int]) -> bool:
    """Whether the model takes this file for a role, by its header; remembered until either file changes."""
    try:
        return Checkpoint.open(main, **{role: path}).has(role)
    except Exception as error:  # files of any origin and form lie in these folders: what cannot be read does not fit
        log.debug("LTX Train: %s is no %s of %s: %s", path.name, role, main.name, error)
        return False


def _described(main: Path, given: dict[str, Path | None], chosen: dict[str, str]) -> sockets.LtxModel:
    checkpoint = Checkpoint.open(main, **given)
    tokenizer = None
    if checkpoint.family.text == "t5" and checkpoint.tokenizer_path is None:
        tokenizer = paths.host_t5_tokenizer()
        checkpoint = replace(checkpoint, tokenizer_path=tokenizer)
    section = ModelSection(
        model_path=str(main),
        text_encoder_path=_or_none(given["text_encoder"]),
        video_vae_path=_or_none(given["video_vae"]),
        audio_vae_path=_or_none(given["audio_vae"]),
        tokenizer_path=_or_none(tokenizer),
    )
    family, config = checkpoint.family, checkpoint.transformer
    if config is None:
        raise CheckpointError("checkpoint.no_transformer", f"{main.name} holds no LTX transformer.", "Choose the model itself, not a VAE "
            "or an encoder.")
    widths = family.features if family.feature_kind != "v2" else (config.cross_attention_dim, config.audio_cross_attention_dim or 0)
    found = sockets.LtxModel(
        section, family.name, family.title, family.audio, family.feature_kind, widths, checkpoint.fingerprint, dict(checkpoint.missing)
    )
    return replace(found, summary=_summary(checkpoint, found, chosen))


def _or_none(path: Path | None) -> str | None:
    return None if path is None else str(path)


def _summary(checkpoint: Checkpoint, found: sockets.LtxModel, chosen: dict[str, str]) -> str:
    """What the node shows: the family, what comes from where, what is missing."""
    kind = "distilled" if checkpoint.distilled else "base model"
    lines = [f"{found.title}, {kind}" + (f", version {checkpoint.model_version}" if checkpoint.model_version else "")]
    stored = checkpoint.components["transformer"].quantisation
    if stored:
        lines.append("stored as " + ", ".join(f"{name} ({count} weights)" for name, count in stored.items()))
    for role in ("text_encoder", "video_vae", "audio_vae"):
        if checkpoint.has(role):
            lines.append(f"{role.replace('_', ' ')}: "
                f"{checkpoint.components[role].files[0].name}{' (auto)' if chosen[role] == AUTO else ''}")
    lines += [f"missing {name.replace('_', ' ')}: put {file} into its folder" for name, file in found.missing.items()]
    return "\n".join(lines)


def need(model: sockets.LtxModel, *components: str) -> None:
    """Raise CheckpointError when a component that a job needs is in none of the files."""
    for name in components:
        if name in model.missing:
            raise CheckpointError("checkpoint.missing_component", f"The {name.replace('_', ' ')} of {model.title} is "
                f"missing.", f"Put {model.missing[name]} into its folder.")
