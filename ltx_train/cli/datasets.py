"""Verbs on data: report, preprocess, decode, with the official scripts' flag names."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from rich.table import Table

from ..config import ModelSection, PreprocessJob, parse_section
from ..data.cache import Cache
from ..data.dataset import DataSection
from ..data.manifest import Manifest
from ..data.report import usable_or_raise
from ..encode import Target
from ..errors import ConfigError, DataError
from ..geometry import VideoFactors
from ..preprocess import report_on
from ..run_setup import open_other
from .show import console, positive
from .training import finish


def add(verbs: argparse._SubParsersAction) -> None:
    """Register the verbs."""
    report = verbs.add_parser("report", help="what of a dataset will be trained on, and what is wrong with the rest")
    _dataset_arguments(report)
    report.add_argument("--model-path", help="the checkpoint, for its latent factors (default 8x32x32)")
    report.add_argument("--json", action="store_true")
    report.set_defaults(run=run_report)

    preprocess = verbs.add_parser("preprocess", help="encode a dataset into its cache")
    _dataset_arguments(preprocess)
    _model_arguments(preprocess)
    preprocess.add_argument("--with-audio", action=argparse.BooleanOptionalAction, default=True)
    preprocess.add_argument("--skip-audio", action="store_true")
    preprocess.add_argument("--batch-size", type=positive, default=1)
    preprocess.add_argument("--device", default="auto")
    preprocess.add_argument("--load-text-encoder-in-8bit", action="store_true")
    preprocess.add_argument("--output-dir", help="cache folder (default: .ltx_cache beside the dataset)")
    preprocess.set_defaults(run=run_preprocess)

    decode = verbs.add_parser("decode", help="write clips back from a cache, or latents that previews kept, for looking")
    decode.add_argument("cache", type=Path, help="a cache, a run, its samples folder, or a .latent file")
    decode.add_argument("output", type=Path)
    _model_arguments(decode)
    decode.add_argument("--limit", type=positive, help="only so many clips")
    decode.add_argument("--device", default="auto")
    decode.set_defaults(run=run_decode)


def _dataset_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("dataset", help="folder of clips, or a .csv, .json or .jsonl file")
    parser.add_argument("--resolution-buckets", help="such as 960x544x49;512x512 (default: proposed from the clips)")
    parser.add_argument("--token-budget", type=int, default=4096, help="latent tokens a clip may have, for proposed buckets")
    parser.add_argument("--lora-trigger", help="word put before every caption")
    parser.add_argument("--remove-llm-prefixes", action="store_true", help="strip beginnings such as 'This video shows'")
    parser.add_argument("--caption-column")
    parser.add_argument("--video-column")
    parser.add_argument("--reference-downscale-factor", type=int, default=1)
    parser.add_argument("--reference-temporal-scale-factor", type=int, default=1)
    parser.add_argument("--frame-rate", type=float, help="resample clips to this rate")
    parser.add_argument("--audio-durations", help='lengths of sound-only clips, such as "2;4;8"')


def _model_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model-path", required=True)
    parser.add_argument("--text-encoder-path")
    parser.add_argument("--video-vae-path")
    parser.add_argument("--audio-vae-path")
    parser.add_argument("--tokenizer-path")


def data_section(options: argparse.Namespace) -> DataSection:
    """The data section of the command line's options."""
    clips = {
        "reference_downscale_factor": options.reference_downscale_factor,
        "reference_temporal_scale_factor": options.reference_temporal_scale_factor,
        "fps": options.frame_rate,
        "audio_durations": options.audio_durations,
    }
    captions = {"trigger": options.lora_trigger, "remove_llm_prefixes": options.remove_llm_prefixes}
    values: dict[str, object] = {
        "resolution_buckets": options.resolution_buckets,
        "token_budget": options.token_budget,
        "clips": {k: v for k, v in clips.items() if v is not None},
        "cache_dir": getattr(options, "output_dir", None),
        "preprocess_batch_size": getattr(options, "batch_size", 1),
    }
    captions = {k: v for k, v in captions.items() if v}
    if options.caption_column or options.video_column:
        if Path(options.dataset).expanduser().is_dir():
            raise ConfigError("dataset.column", f"--caption-column and --video-column are for a dataset file; {options.dataset} is a folder.", "Give the .csv, .json or .jsonl file.")
        columns = {"caption": options.caption_column, "video": options.video_column}
        values["sources"] = [{"path": options.dataset, "columns": {k: v for k, v in columns.items() if v}, "captions": captions}]
    else:
        values |= {"dataset": options.dataset, "captions": captions}
    return parse_section(DataSection, values)


def model_section(options: argparse.Namespace) -> dict[str, str]:
    names = ("model_path", "text_encoder_path", "video_vae_path", "audio_vae_path", "tokenizer_path")
    return {name: value for name in names if (value := getattr(options, name, None))}


def run_report(options: argparse.Namespace) -> int:
    section = data_section(options)
    target = Target("", VideoFactors(), None)
    if options.model_path:
        from ..models.checkpoint import Checkpoint

        target = Target.of(Checkpoint.open(options.model_path))
    found = report_on(section, target)
    if options.json:
        print(json.dumps(found.to_json(), ensure_ascii=False))  # noqa: T201 - for machines
    else:
        show_report(found.to_json())
    usable_or_raise(found)  # the same line and exit code that preprocessing ends with
    return 0


def show_report(data: dict) -> None:
    """The report as a table for people."""
    table = Table("clip", "size", "fps", "frames", "seconds", "sound", "bucket", "finding")
    for clip in data["clips"]:
        findings = "; ".join(f"{f['code']}: {f['message']}" for f in clip["findings"])
        size = f"{clip['width']}x{clip['height']}" if "width" in clip else "?"
        style = None if clip["usable"] else "red"
        cells = [Path(clip["path"]).name, size, str(clip.get("fps", "")), str(clip.get("frames", "")), str(clip.get("seconds", "")), str(clip.get("sound", "")), str(clip.get("bucket", ""))]
        table.add_row(*cells, findings, style=style)
    screen = console()
    screen.print(table, soft_wrap=False)
    screen.print(f"{data['usable']} of {data['total']} clips usable, {data['pieces']} pieces, buckets {data['buckets']}")
    for code, about in data["findings"].items():
        screen.print(f"{about['clips']} x {code}: {about['fix']}", style="red" if about["refused"] else None)
    for warning in data["warnings"]:
        screen.print(f"! {warning}", style="yellow")


def run_preprocess(options: argparse.Namespace) -> int:
    section = data_section(options)
    acceleration = {"device": options.device, "load_text_encoder_in_8bit": options.load_text_encoder_in_8bit}
    job = PreprocessJob.parse(
        {
            "model": model_section(options), "data": section.model_dump(mode="json"), "acceleration": acceleration,
            "with_audio": options.with_audio and not options.skip_audio, "output_dir": str(section.cache_root() / "job"),
        }
    )  # fmt: skip
    job.model.open()  # a wrong file is told before a child is started and a cache begun
    code = finish(open_other(job))
    if code == 0:
        manifest = Manifest.read(section.cache_root() / section.index)
        console().print(f"cache: {section.cache_root()} ({len(manifest.entries)} entries, {len(manifest.skipped)} clips left out)")
    return code


def run_decode(options: argparse.Namespace) -> int:
    """Each cached clip as mp4, png or wav, named after its id."""
    from ..decode import decode_entry, decode_kept
    from ..memory.settings import AccelerationSection
    from ..preprocess import engine_codec
    from ..training.parallel import Parallel

    acceleration = parse_section(AccelerationSection, {"device": options.device})
    checkpoint = parse_section(ModelSection, model_section(options)).open()
    codec = engine_codec(checkpoint, acceleration, Parallel.start(device=options.device).device)
    if not (options.cache / "index.json").is_file():
        for path in decode_kept(options.cache, codec, options.output):
            console().print(str(path))
        return 0
    manifest, cache = Manifest.read(options.cache), Cache(options.cache)
    made_for = manifest.model.get("family", checkpoint.family.name)
    if made_for != checkpoint.family.name:
        raise DataError("cache.family", f"The cache was made for {made_for}; the model is {checkpoint.family.name}.", "Decode it with the model that encoded it.")
    entries = manifest.entries[: options.limit or None]
    for entry in entries:
        console().print(str(decode_entry(entry, cache, codec, options.output)))
    return 0
