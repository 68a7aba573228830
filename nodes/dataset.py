"""The dataset node: a folder or file of clips with its settings, looked at and reported before any model is loaded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from comfy_api.latest import io

from ..ltx_train.config import DataSection
from ..ltx_train.data.report import Report, make_report, usable_or_raise
from ..ltx_train.data.sources import ChainSource, FolderSource, TableSource, open_source
from ..ltx_train.errors import ConfigError, DataError, LtxTrainError
from ..ltx_train.geometry import VideoFactors
from . import paths, schema, sockets
from .follow import Screen

ClipOptions = schema.is_section(DataSection.model_fields["clips"].annotation)
Captions = schema.is_section(DataSection.model_fields["captions"].annotation)
NONE = "(type a path below)"
CLIP_FIELDS = ("fps", "frame_selection", "windows", "crop", "audio")
CAPTION_FIELDS = ("trigger", "policy", "missing")
ROLE_FIELDS = ("reference_video", "reference_audio", "video_mask", "audio_mask")
BASIC = {"fps", "frame_selection", "trigger", "policy", "audio"}
FACTORS = VideoFactors(8, 32, 32)
"""Of every LTX family; the encoder checks again with the model's own."""


class LTXTrainDataset(io.ComfyNode):
    """A folder of clips, or a dataset file, with how to cut and caption them."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="LTXTrainDataset",
            display_name="LTX Dataset",
            category=sockets.CATEGORY,
            description="Clips and captions for training: a folder (captions in .txt files beside the clips) or a .csv, .json or .jsonl "
                "file. Reports on every clip before anything is loaded.",
            search_aliases=["ltx", "train", "clips", "captions", "folder"],
            is_output_node=True,
            inputs=[
                io.Combo.Input("dataset", options=[*paths.datasets(), NONE], tooltip="A folder or dataset file below ComfyUI's input and "
                    "datasets folders."),
                io.String.Input("path", default="", optional=True, advanced=True, tooltip="A path instead: input/..., datasets/..., "
                    "output/..., or a folder that the server's owner allows."),
                io.String.Input("buckets", default="auto", optional=True, tooltip="Sizes to train at, such as "
                    "768x512x49;512x768x49;768x512 (width x height x frames). auto proposes them from the clips."),
                io.Int.Input("token_budget", optional=True, default=4096, min=1, max=1_000_000, advanced=True,
                    tooltip="With auto buckets: latent tokens a clip may have (768x512x49 has 2,688)."),
                *schema.inputs_of(Captions, CAPTION_FIELDS, basic=BASIC),
                *schema.inputs_of(ClipOptions, CLIP_FIELDS, basic=BASIC),
                io.Int.Input("repeats", optional=True, default=1, min=1, max=10000, tooltip="Times an epoch each clip is seen."),
                io.Float.Input("weight", optional=True, default=1.0, min=0.0, max=100.0, step=0.1, advanced=True,
                    tooltip="Factor on the loss of these clips."),
                io.Float.Input("caption_dropout", optional=True, default=0.0, min=0.0, max=1.0, step=0.01, advanced=True,
                    tooltip="Share of samples that train with an empty caption."),
                *[
                    io.String.Input(role, default="", optional=True, advanced=True, tooltip=f"Folder with a {role.replace('_', ' ')} of "
                        f"the same name for each clip.")
                    for role in ROLE_FIELDS
                ],
                sockets.Settings["clips"].Input("clips", optional=True, tooltip="From LTX Clip Settings: how clips are cut, scaled and "
                    "cleaned, reference factors."),
                sockets.Dataset.Input("previous", optional=True, tooltip="Another dataset that is trained together with this one; each keeps "
                    "its sizes where given, and the first one's cutting (fps, frame_selection, crop...) counts for all."),
            ],
            outputs=[sockets.Dataset.Output("ltx_dataset", display_name="ltx_dataset"), io.String.Output("report", display_name="report")],
            hidden=[io.Hidden.unique_id],
        )  # fmt: skip

    @classmethod
    def validate_inputs(cls, dataset: str, path: str | None = "") -> bool | str:
        """Told at once: a dataset that is not there, or lies where workflows may not look. A path through a link is not known yet."""
        if path is None:
            return True
        try:
            paths.resolve(path or dataset)
        except LtxTrainError as error:
            return error.message
        return True

    @classmethod
    def fingerprint_inputs(cls, dataset: str, path: str | None = "", **_: Any) -> str:
        try:
            return paths.digest_of(paths.resolve(path or dataset))
        except LtxTrainError:
            return "missing"

    @classmethod
    def execute(cls, dataset: str, path: str = "", previous: sockets.LtxDataset | None = None, **widgets: Any) -> io.NodeOutput:
        place = paths.resolve(path or dataset)
        found = describe(place, widgets, previous)
        screen = Screen.of(cls.hidden.unique_id)
        report = look(found.data, screen)
        usable_or_raise(report)
        text = report_text(report)
        screen.text(text.splitlines()[0])
        made = sockets.LtxDataset(found.data, found.name, text)
        return io.NodeOutput(made, text, ui={"ltx_text": [report_head(report)], "ltx_table": [table(report)]})


def describe(place: Path, widgets: dict[str, Any], previous: sockets.LtxDataset | None = None) -> sockets.LtxDataset:
    """The node's widgets as a data section; a previous dataset's sources come first."""
    captions = schema.values_of(Captions, widgets, only=CAPTION_FIELDS)
    fields = {"repeats": widgets.get("repeats", 1), "weight": widgets.get("weight", 1.0), "captions": captions, "name": ""}
    source = open_source(place, **fields)
    roles = {role: str(paths.resolve(widgets[role], what="folder")) for role in ROLE_FIELDS if widgets.get(role)}
    if roles and not isinstance(source, FolderSource):
        raise DataError("dataset.roles", f"{place.name[:50]} is a dataset file: it names its clips' {', '.join(roles)} in columns.",
            f"Add a column {next(iter(roles))} to it, and leave the folder empty here.")
    source = source.model_copy(update=roles)
    further = widgets.get("clips")
    clips = schema.values_of(ClipOptions, widgets, only=CLIP_FIELDS) | (dict(further.fields) if further is not None else {})
    buckets = (widgets.get("buckets") or "auto").strip()
    sources: list[FolderSource | TableSource] = [source]
    if previous is not None:
        # one data section holds both; sizes given here stay with these clips
        sources = [*previous.data.sources, source.model_copy(update={"resolution_buckets": None if buckets == "auto" else buckets})]
        buckets, clips = previous.data.resolution_buckets or "auto", one_cutting(clips, previous.data.clips).model_dump()
    data = DataSection.model_validate(
        {
            "sources": [s.model_dump() for s in sources],
            "resolution_buckets": buckets,
            "token_budget": widgets.get("token_budget", 4096),
            "caption_dropout": widgets.get("caption_dropout", 0.0),
            "clips": clips,
            "captions": captions,
        }
    )
    return sockets.LtxDataset(data, place.stem if place.is_file() else place.name)


def one_cutting(clips: dict[str, Any], before: Any) -> Any:
    """How all clips of joined datasets are cut: as the first says. Raises ConfigError where this one asks for something else."""
    plain = ClipOptions()
    own = ClipOptions.model_validate(clips)
    for name in ClipOptions.model_fields:
        value = getattr(own, name)
        if value not in (getattr(plain, name), getattr(before, name)):
            raise ConfigError("dataset.clips", f"{name} is {value!s:.30} here and {getattr(before, name)!s:.30} in the dataset before; "
                f"joined clips are cut in one way.", f"Set {name} in the first LTX Dataset, which counts for all, and leave it as it was here.")
    return before


def samples_of(data: DataSection):
    """All samples of a section's sources."""
    sources = data.all_sources()
    return sources[0].samples() if len(sources) == 1 else ChainSource(sources=sources).samples()


def look(data: DataSection, screen: Screen) -> Report:
    """The report on a dataset, from headers alone."""
    buckets = lambda probes: data.buckets(FACTORS, lambda: probes)  # noqa: E731
    return make_report(samples_of(data), buckets, data.clips, FACTORS, progress=screen.progress)


def report_head(report: Report) -> str:
    """What a report says of all clips together: totals, buckets, warnings, findings with their fix."""
    plain = report.to_json()
    lines = [f"{report.usable} of {report.total} clips usable, {plain['pieces']} pieces, {plain['seconds']:.1f} s, {plain['with_audio']} "
        f"with sound"]
    lines.append("buckets: " + (", ".join(f"{name} ({count})" for name, count in plain["buckets"].items()) or "none"))
    lines += [f"! {warning}" for warning in report.warnings]
    for code, found in plain["findings"].items():
        lines.append(f"{'x' if found['refused'] else '-'} {code} ({found['clips']}): {found['fix']}")
    return "\n".join(lines)


def report_text(report: Report, limit: int = 60) -> str:
    """The report for reading: its head, then a line a clip (those with faults first)."""
    lines = [report_head(report)]
    rows = sorted(report.to_json()["clips"], key=lambda row: row["usable"])
    lines += [clip_line(row) for row in rows[:limit]]
    if len(rows) > limit:
        lines.append(f"... and {len(rows) - limit} more")
    return "\n".join(lines)


def clip_line(row: dict[str, Any]) -> str:
    """One clip: what is used of it, or why it is left out."""
    if not row["usable"]:
        return f"x {row['id']}: {'; '.join(f['message'] for f in row['findings'] if f['refused'])}"
    used = row.get("kind", "")
    if used == "video":
        used = f"{row.get('frames_used', 0)} of {row.get('frames', 0)} frames at {row.get('used_fps', 0):g}"
    place, sound = row.get("bucket") or "sound", ", sound" if row.get("audio") else ""
    return f"+ {row['id']}: {place}, {used}, {row.get('used_seconds', 0):g} s{sound}: {row['caption'][:60]}"


def table(report: Report, limit: int = 200) -> list[dict[str, Any]]:
    """The rows for the node's table, the ones with faults first."""
    rows = sorted(report.to_json()["clips"], key=lambda row: row["usable"])[:limit]
    keep = ("id", "usable", "kind", "bucket", "frames", "frames_used", "used_fps", "used_seconds", "caption")
    more = lambda row: {"sound": bool(row.get("audio")), "findings": [f["message"] for f in row["findings"]]}  # noqa: E731
    return [{**{k: row.get(k) for k in keep}, **more(row)} for row in rows]
