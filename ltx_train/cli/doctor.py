"""The verb doctor: proves that a model's files belong together and work on this machine."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from .show import console

MARKS = {"pass": "[green]ok  [/]", "warning": "[yellow]?   [/]", "fail": "[red]FAIL[/]", "skipped": "[dim]--  [/]"}


def add(verbs: argparse._SubParsersAction) -> None:
    """Register the verb."""
    doctor = verbs.add_parser("doctor", help="prove that model files belong together and work here, or say what is wrong")
    doctor.add_argument("files", nargs="+", type=Path, metavar="MODEL", help="the model's files, text encoder included, in any order")
    doctor.add_argument("--text-encoder-path")
    doctor.add_argument("--video-vae-path")
    doctor.add_argument("--audio-vae-path")
    doctor.add_argument("--tokenizer-path")
    doctor.add_argument("--dataset", type=Path, help="your clips (a folder or a list), or a preprocessed dataset; default: clips drawn here")
    doctor.add_argument("--resolution-buckets", help="size of the dataset's clips, such as 512x320x25")
    doctor.add_argument("--out", type=Path, default=Path("outputs/doctor"), help="folder for the step-0 preview and report.json")
    doctor.add_argument("--no-preview", action="store_true")
    doctor.add_argument("--device", default="auto")
    doctor.add_argument("--precision", choices=["bf16", "fp16", "no"], default="bf16")
    doctor.add_argument("--quantization", help="hold the transformer in fewer bits, such as int8")
    doctor.add_argument("--stream-blocks", type=int, default=0, help="blocks that stay in RAM and are uploaded when needed")
    doctor.add_argument("--json", action="store_true")
    doctor.set_defaults(run=run_doctor)


def run_doctor(options: argparse.Namespace) -> int:
    """Examine, show each check as it is done; exit code 0 when nothing failed (what was not examined is said), else 2."""
    from ..config import parse_section
    from ..doctor_job import examine
    from ..doctor_report import Check
    from ..memory.settings import AccelerationSection

    screen = console(stderr=options.json)

    def say(check: Check) -> None:
        screen.print(f"{MARKS[check.verdict]} [bold]{check.name}[/]: ", end="", markup=True)
        screen.print(check.message)
        if check.hint:
            screen.print(f"     {check.hint}", style="dim")

    values = {"device": options.device, "mixed_precision_mode": options.precision, "quantization": options.quantization, "stream_blocks": options.stream_blocks}
    acceleration = parse_section(AccelerationSection, values)
    paths = {name: getattr(options, f"{name}_path") for name in ("text_encoder", "video_vae", "audio_vae", "tokenizer")}
    found = examine(
        options.files, paths, acceleration, out=options.out, dataset=options.dataset, buckets=options.resolution_buckets, preview=not options.no_preview, say=say
    )
    if options.json:
        print(json.dumps(found.to_json(), ensure_ascii=False))  # noqa: T201 - for machines
    else:
        style = "red" if not found.healthy else "yellow" if found.skipped else "green"
        screen.print(found.summary(), style=style)
    return 0 if found.healthy else 2
