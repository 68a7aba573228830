"""The node that shows what is in a cache: encoded clips decoded again, in a process of its own."""

from __future__ import annotations

from pathlib import Path

from comfy_api.latest import io

from ..ltx_train.config import digest
from ..ltx_train.runs.run_dir import RunDir
from ..ltx_train.tools import Outcome, ToolJob
from . import jobs, paths, sockets
from .follow import Screen
from .media import media_of, media_outputs, shown
from .model import need
from .tools import CATEGORY, MARK


class LTXTrainDecode(io.ComfyNode):
    """Decodes clips of a cache, to see and hear what training gets."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="LTXTrainDecode",
            display_name="LTX Decode Preview",
            category=CATEGORY,
            description="Decodes clips of an encoded dataset again: what training sees and hears, after cutting, scaling and encoding.",
            search_aliases=["ltx", "train", "latents", "look", "vae decode"],
            is_output_node=True,
            inputs=[
                sockets.Model.Input("ltx_model", tooltip="From LTX Model for Training: the model that encoded the dataset."),
                sockets.Cache.Input("ltx_cache", tooltip="From LTX Encode Dataset."),
                io.Int.Input("clip", default=1, min=1, max=1_000_000, tooltip="Which clip, in the order of the encoding; its pictures and "
                    "sound are the outputs."),
                io.Int.Input("count", default=1, min=1, max=64, tooltip="So many clips from there on are shown in the node."),
                sockets.Settings["memory"].Input("memory", optional=True, tooltip="From LTX Memory Settings."),
            ],
            outputs=media_outputs(),
            hidden=[io.Hidden.unique_id],
        )  # fmt: skip

    @classmethod
    def execute(
        cls, ltx_model: sockets.LtxModel, ltx_cache: sockets.LtxCache, clip: int = 1, count: int = 1, memory: sockets.SettingsOf | None = None
    ) -> io.NodeOutput:
        need(ltx_model, "video_vae", *(("audio_vae",) if ltx_model.audio else ()))
        index = ltx_cache.data.data_root() / ltx_cache.data.index
        task = {
            "kind": "decode", "model": ltx_model.section.model_dump(), "index": str(index), "first": clip, "count": count,
            "acceleration": dict(memory.fields) if memory else {},
        }  # fmt: skip
        job = ToolJob.parse({"task": task, "output_dir": str(paths.jobs_root() / f"decode-{digest([task, paths.digest_of(index)], 12)}")})
        run, told = RunDir(job.output_dir), {"job": job.fingerprint()}
        if not (jobs.done_before(run, run.path / MARK, told) and all(p.is_file() for p in made(run))):
            jobs.carry_out(job, Screen.of(cls.hidden.unique_id))
            jobs.mark_done(run.path / MARK, told)
        files = made(run)
        return io.NodeOutput(*media_of(files[0]), ui=shown(files))


def made(run: RunDir) -> list[Path]:
    """The files that a decoding job wrote."""
    done = Outcome.read(run)
    return [Path(done.output) / name for name in done.made]
