"""Verbs on model files and this machine: inspect, tiny, lora, env, demo."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from rich.table import Table

from ..models.families import FAMILIES
from .show import console


def add(verbs: argparse._SubParsersAction) -> None:
    """Register the verbs."""
    inspect = verbs.add_parser("inspect", help="which model the files are, what they hold, what is missing and which file has it")
    inspect.add_argument("files", nargs="+")
    inspect.add_argument("--json", action="store_true")
    inspect.set_defaults(run=run_inspect)

    tiny = verbs.add_parser("tiny", help="write a tiny checkpoint set with random weights in the real layout")
    tiny.add_argument("out", type=Path)
    tiny.add_argument("--family", choices=list(FAMILIES), default="ltx2.3")
    tiny.add_argument("--seed", type=int, default=0)
    tiny.set_defaults(run=run_tiny)

    demo = verbs.add_parser("demo", help="the whole way on built-in tiny models: clips to a LoRA and sample videos, on the CPU")
    demo.add_argument("--out", type=Path, default=Path("demo_out"))
    demo.add_argument("--steps", type=int)
    demo.add_argument("--family", choices=list(FAMILIES))
    demo.add_argument("--media", type=Path, help="train on the clips of this folder instead of drawn ones")
    demo.set_defaults(run=run_demo)

    environment = verbs.add_parser("env", help="what is installed, what is missing for what; make a separate engine environment", add_help=False, prefix_chars="\0")
    environment.add_argument("arguments", nargs=argparse.REMAINDER)
    environment.set_defaults(run=run_env)

    fields = verbs.add_parser("fields", help="the reference page of every config field, as Markdown")
    fields.set_defaults(run=run_fields)

    lora = verbs.add_parser("lora", help="look at a LoRA file, merge, resize, strip or convert it")
    lora.add_argument("action", choices=["show", "merge", "resize", "strip", "convert"])
    lora.add_argument("file", type=Path)
    lora.add_argument("--out", type=Path)
    lora.add_argument("--model", type=Path, help="merge: the checkpoint (not quantised)")
    lora.add_argument("--strength", type=float, default=1.0)
    lora.add_argument("--rank", type=int)
    lora.add_argument("--keep", nargs="+", choices=["video", "audio", "cross_modal"], help="strip: what stays")
    lora.add_argument("--layout", default="comfyui", choices=["comfyui", "diffusers", "peft", "kohya"])
    lora.set_defaults(run=run_lora)


def run_inspect(options: argparse.Namespace) -> int:
    from ..models.inspect import inspect_files

    data = inspect_files(options.files)
    if options.json:
        print(json.dumps(data, default=str, ensure_ascii=False))  # noqa: T201 - for machines
        return 2 if data["faults"] else 0
    screen = console()
    screen.print(f"{data['title']} ({data['family']}), version {data['version'] or 'not stated'}{', distilled' if data['distilled'] else ''}")
    table = Table("component", "kind", "file", "parameters", "formats")
    for name, part in data["components"].items():
        formats = ", ".join([*map(str, part["dtypes"]), *(f"{k} x{n}" for k, n in part["quantisation"].items())])
        table.add_row(name, str(part["kind"]), ", ".join(Path(f).name for f in part["files"]), f"{part['parameters']:,}", formats)
    screen.print(table, soft_wrap=False)
    for name, supplier in data["missing"].items():
        screen.print(f"missing: {name.replace('_', ' ')} - {supplier}", style="yellow")
    for fault in data["faults"]:
        screen.print(fault, style="red")
    return 2 if data["faults"] else 0


def run_tiny(options: argparse.Namespace) -> int:
    from ..tiny.checkpoints import write_tiny

    for role, path in write_tiny(options.out, options.family, seed=options.seed).items():
        console().print(f"{role}: {path}")
    return 0


def run_demo(options: argparse.Namespace) -> int:
    from ..demo import demo

    return demo(options.out, options.steps, options.family, options.media)


def run_env(options: argparse.Namespace) -> int:
    from ..environment import main

    return main(options.arguments)


def run_fields(options: argparse.Namespace) -> int:
    from ..fields import page

    print(page())  # noqa: T201 - a page to redirect into a file
    return 0


def run_lora(options: argparse.Namespace) -> int:
    from ..errors import ConfigError
    from ..lora import edit
    from ..lora.files import read_lora, write_modules

    lora, screen = read_lora(options.file), console()
    if options.action == "show":
        screen.print(f"{len(lora.modules)} modules, kinds {lora.kinds}, ranks {lora.ranks}, layouts {lora.layouts}")
        for key, value in vars(lora.metadata).items():
            if value:
                screen.print(f"{key}: {value}")
        return 0
    if options.out is None:
        raise ConfigError("lora.out", f"lora {options.action} needs --out.", "Name the file to write; the source is never changed.")
    if options.out.exists() and options.out.samefile(options.file):
        raise ConfigError("lora.out", f"lora {options.action} must not write over its source {options.file.name}.", "Give another name with --out; the source is never changed.")
    if options.action == "merge":
        if options.model is None:
            raise ConfigError("lora.model", "lora merge needs --model.", "Give the unquantised checkpoint that the LoRA is merged into.")
        if other := family_warning(options.file, options.model):
            screen.print(other, style="yellow")
        edit.merge(options.model, [(lora, options.strength)], options.out)
    elif options.action == "resize":
        resized = edit.resize(lora, options.rank)
        write_modules(options.out, resized.lora.modules, resized.lora.metadata)
    elif options.action == "strip":
        kept = edit.strip(lora, options.keep or ["video"])
        write_modules(options.out, kept.modules, kept.metadata)
    else:
        edit.convert(lora, options.out, options.layout)
    screen.print(f"written: {options.out}")
    return 0


def family_warning(lora: Path, model: Path) -> str | None:
    """That the LoRA was trained on another family; None where it was not, or that is not known."""
    from ..errors import CheckpointError
    from ..models.checkpoint import Checkpoint
    from ..trained_weights import other_family

    try:
        return other_family(lora, Checkpoint.open(model))
    except CheckpointError:
        return None  # the merging itself says what is wrong
