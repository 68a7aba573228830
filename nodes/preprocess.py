"""The encoding node: clips and captions to a cache, in a process of its own or with models that ComfyUI has loaded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from comfy_api.latest import io

from ..ltx_train.config import DataSection
from ..ltx_train.errors import LtxTrainError
from ..ltx_train.runs.run_dir import RunDir
from . import compose, jobs, paths, sockets
from .follow import Screen
from .model import need
from .sample_inputs import prompts_of

ANY_MODE = "any"


class LTXTrainPreprocess(io.ComfyNode):
    """Encodes a dataset once; what is in the cache already is not encoded again."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="LTXTrainPreprocess",
            display_name="LTX Encode Dataset",
            category=sockets.CATEGORY,
            description="Encodes clips, sound and captions into a cache on disk, before training. Without VAE and CLIP it runs in a "
                "process of its own; with them it uses the models that ComfyUI has loaded.",
            search_aliases=["ltx", "train", "latents", "cache", "preprocess"],
            is_output_node=True,
            inputs=[
                sockets.Model.Input("ltx_model", tooltip="From LTX Model for Training."),
                sockets.Dataset.Input("ltx_dataset", tooltip="From LTX Dataset."),
                io.Combo.Input("mode", options=[ANY_MODE, *compose.MODE_NAMES], tooltip="Encode what this mode needs; any: every stream "
                    "and every reference that the clips have."),
                io.Boolean.Input("with_audio", default=True, tooltip="Encode sound where clips have it and the model knows sound."),
                io.String.Input("prompts", default="", multiline=True, optional=True, advanced=True, tooltip="Prompts of later previews, "
                    "one a line, so that training needs no text encoder."),
                io.Vae.Input("vae", optional=True, tooltip="ComfyUI's video VAE: encode here instead of in a process of its own (with "
                    "clip, and audio_vae for sound)."),
                io.Clip.Input("clip", optional=True, tooltip="ComfyUI's text encoder of this model."),
                io.Vae.Input("audio_vae", optional=True, tooltip="ComfyUI's audio VAE of this model."),
                sockets.Settings["memory"].Input("memory", optional=True, tooltip="From LTX Memory Settings."),
            ],
            outputs=[sockets.Cache.Output("ltx_cache", display_name="ltx_cache"), io.String.Output("report", display_name="report")],
            hidden=[io.Hidden.unique_id],
        )  # fmt: skip

    @classmethod
    def execute(
        cls,
        ltx_model: sockets.LtxModel,
        ltx_dataset: sockets.LtxDataset,
        mode: str = ANY_MODE,
        with_audio: bool = True,
        prompts: str = "",
        vae: Any = None,
        clip: Any = None,
        audio_vae: Any = None,
        memory: sockets.SettingsOf | None = None,
    ) -> io.NodeOutput:
        screen = Screen.of(cls.hidden.unique_id)
        wanted = {"mode_name": "" if mode == ANY_MODE else mode, "prompts": prompts_of(prompts), "with_audio": with_audio}
        if vae is not None or clip is not None or audio_vae is not None:
            given = {"vae": vae, "clip": clip, "audio_vae": audio_vae}
            cache, text = encode_with_comfy(ltx_model, ltx_dataset, screen, given, **wanted)
        else:
            cache, text = encode_in_child(ltx_model, ltx_dataset, screen, acceleration=memory.fields if memory else None, **wanted)
        screen.text(text.splitlines()[0])
        return io.NodeOutput(cache, text, ui={"ltx_text": [text]})


def encode_with_comfy(
    model: sockets.LtxModel,
    dataset: sockets.LtxDataset,
    screen: Screen,
    given: dict[str, Any],
    *,
    mode_name: str,
    prompts: list[str],
    with_audio: bool,
) -> tuple[sockets.LtxCache, str]:
    """Encode here with ComfyUI's models; the training then takes the cache as it is."""
    from .codec import ComfyCodec, encode_here

    codec = ComfyCodec(model, **given)
    prints = "-".join(codec.fingerprint(c) for c in ("video_vae", "audio_vae", "text_encoder") if codec.has(c))
    data = compose.settled_data(dataset, model, "comfyui", prints)
    root, warnings = encode_here(model, data, codec, screen, mode_name=mode_name, prompts=prompts, with_audio=with_audio)
    as_it_is = {"sources": [], "dataset": None, "cache_dir": None, "preprocessed_data_root": str(root)}
    plain = DataSection.model_validate({**data.model_dump(), **as_it_is})
    return sockets.LtxCache(plain, dataset.name, model.family, "comfyui"), "\n".join([cache_text(root, data.index), *warnings])


def encode_in_child(
    model: sockets.LtxModel,
    dataset: sockets.LtxDataset,
    screen: Screen,
    *,
    mode_name: str,
    prompts: list[str],
    with_audio: bool,
    acceleration: Any = None,
) -> tuple[sockets.LtxCache, str]:
    """Encode in a child with the engine's own networks; nothing is started when the same was done before."""
    need(model, "text_encoder", "video_vae", *(("audio_vae",) if with_audio and model.audio else ()))
    data = compose.settled_data(dataset, model)
    job = compose.preprocess_job(model, data, mode_name=mode_name, prompts=prompts, with_audio=with_audio, acceleration=acceleration)
    state = digest_of_sources(data)
    index = data.cache_root() / data.index
    run = RunDir(job.output_dir)
    mark = run.path / "encoded.json"
    if not (index.is_file() and jobs.done_before(run, mark, {"job": job.fingerprint(), "data": state})):
        jobs.carry_out(job, screen)
        mark.write_text(json.dumps({"job": job.fingerprint(), "data": state}), encoding="utf-8")
    warnings = [w.message for w in run.history().warnings]
    return sockets.LtxCache(data, dataset.name, model.family), "\n".join([cache_text(data.cache_root(), data.index), *warnings])


def digest_of_sources(data: DataSection) -> str:
    """Changes when a file of any of the datasets does."""
    return "+".join(paths.digest_of(Path(source.path)) for source in data.sources)


def cache_text(root: Path, index: str) -> str:
    """What the cache holds, from its index."""
    try:
        entries = json.loads((root / index).read_text(encoding="utf-8"))
        listed = entries.get("entries", [])
        sound = sum(bool(entry.get("audio")) for entry in listed)
        skipped = len(entries.get("skipped", []))
    except (OSError, ValueError, AttributeError) as error:
        raise LtxTrainError("cache.index", f"The list of the cache cannot be read: {index}", str(error)) from error
    return f"{len(listed)} pieces encoded, {sound} with sound{f', {skipped} clips left out' if skipped else ''}\ncache: {root}"
