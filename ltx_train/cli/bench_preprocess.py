"""The verb bench preprocess: clips a second from files to the encoder, beside the official way, as JSON lines."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from .bench_cases import sound_out


def add(kinds: argparse._SubParsersAction) -> None:
    """Register it below ``bench``."""
    verb = kinds.add_parser("preprocess", help="clips a second from files to the encoder and how busy it is, beside the official way; prints JSON lines")
    verb.add_argument("--media", help="folder of clips (default: 1080p clips made for it)")
    verb.add_argument("--resolution-bucket", help="WIDTHxHEIGHTxFRAMES (default 768x448x49)")
    verb.add_argument("--clips", type=int, help="clips that are read (default 8)")
    verb.add_argument("--workers", type=int, help="threads that read ahead (default: one a core)")
    verb.add_argument("--batch-size", type=int)
    verb.add_argument("--model-path", help="also encode with this checkpoint's video VAE, and tell how busy it was")
    verb.add_argument("--video-vae-path")
    verb.add_argument("--full-size-vae", metavar="FAMILY", help="also encode with a video VAE of this family's full size in random weights")
    verb.add_argument("--encode-seconds", type=float, help="also play an encoder that takes so long for a clip")
    verb.add_argument("--device")
    verb.add_argument("--skip-official", action="store_true", help="leave the official way out")
    verb.add_argument("--out", type=Path, help="append the rows to this file too")
    verb.set_defaults(run=run_preprocess)


def run_preprocess(options: argparse.Namespace) -> int:
    from ..bench.preprocess import PreprocessBench
    from ..config import parse_section

    sound_out(options.out)
    names = ("media", "resolution_bucket", "clips", "workers", "batch_size", "model_path", "video_vae_path", "full_size_vae", "encode_seconds", "device")
    values = {name: value for name in names if (value := getattr(options, name)) is not None}
    for row in parse_section(PreprocessBench, {**values, "official": not options.skip_official}).run():
        text = json.dumps(row)
        print(text, flush=True)  # noqa: T201 - what the verb is for
        if options.out is not None:
            with options.out.open("a", encoding="utf-8") as file:
                file.write(text + "\n")
    return 0
