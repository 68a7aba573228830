"""Makes the fitted set: ``python -m ltx_train.tiny.fit OUT``. Everything it learns from is drawn by it, from one seed.

Stages, each of which leaves a file in OUT: ``video`` and ``sound`` (may run side by side), then ``base``, then ``report``.
On one H200 all of it takes about five minutes. The same seed gives the same clips and the same steps; the last bits
depend on the machine.
"""

from __future__ import annotations

import argparse
import json
import logging
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from ..models.families import TRANSFORMER_PREFIX
from .drawing import KNOWN, NEW, captions
from .fit_base import fit_base
from .fit_codecs import Effort, fit_sound, fit_video
from .fit_report import base_quality, codec_quality
from .fitted_layout import FAMILY, fitted_config, text_side, write_model, write_text_encoder
from .fitted_set import FittedSet
from .transformer_shapes import transformer_shapes

STAGES = ("video", "sound", "base", "report")
log = logging.getLogger(__name__)


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m ltx_train.tiny.fit", description="Make the fitted set from clips drawn here.")
    parser.add_argument("out", type=Path, help="folder for the result")
    parser.add_argument("--stages", nargs="+", choices=STAGES, default=STAGES)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=float, default=1.0, help="factor on the number of steps")
    parser.add_argument("--clips", type=float, default=1.0, help="factor on the number of drawn clips")
    parser.add_argument("--limit", type=float, help="seconds that one loop may take; it then ends early, its rate falling in time")
    given = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    torch.backends.cudnn.benchmark = True
    given.out.mkdir(parents=True, exist_ok=True)
    for stage in given.stages:
        torch.manual_seed(given.seed)
        log.info("stage %s on %s", stage, device)
        run_stage(stage, given.out, device, Effort(given.steps, given.clips, given.limit), given.seed)


def run_stage(stage: str, out: Path, device: torch.device, effort: Effort, seed: int) -> None:
    """One stage: reads what earlier ones left in ``out``, leaves its own result there."""
    config = fitted_config()
    if stage == "video":
        _keep(out / "video.safetensors", fit_video(config, device, effort))
    elif stage == "sound":
        _keep(out / "sound.safetensors", fit_sound(config, device, effort))
    elif stage == "base":
        write_text_encoder(out, seed)
        parts = load_file(out / "video.safetensors") | load_file(out / "sound.safetensors") | text_side(config, seed)
        write_model(out, config, parts | _blank(config))
        transformer = fit_base(FittedSet.at(out).open(), device, effort)
        write_model(out, config, parts | {TRANSFORMER_PREFIX + n: t for n, t in transformer.items()})
    else:
        _report(FittedSet.at(out), out / "report.json", device)


def _blank(config: Mapping) -> dict[str, Tensor]:
    """A transformer of zeros, so that the codecs can be opened before there is one."""
    return {TRANSFORMER_PREFIX + n: torch.zeros(shape) for n, shape in transformer_shapes(config["transformer"], FAMILY).items()}


def _keep(path: Path, tensors: Mapping[str, Tensor]) -> None:
    save_file({n: t.detach().float().cpu().contiguous() for n, t in tensors.items()}, path)


def _report(made: FittedSet, path: Path, device: torch.device) -> None:
    """Measure the set as it will be used, from its bfloat16 file."""
    checkpoint, where = made.open(), str(device)
    found = {"bytes": made.size}
    for size in ((17, 64, 64), (25, 64, 96)):
        found["codecs " + "x".join(map(str, size))] = asdict(codec_quality(checkpoint, clips=64, seed=1, frames=size[0], height=size[1], width=size[2], device=where))
    for steps, cfg in ((8, 1.0), (16, 1.0), (16, 2.5)):
        for name, words in (("known", KNOWN), ("new", NEW)):
            texts = captions(words) * (1 if name == "known" else 8)
            found[f"{name}, {steps} steps, cfg {cfg}"] = asdict(base_quality(checkpoint, texts, steps=steps, cfg=cfg, device=where))
    path.write_text(json.dumps(found, indent=1), encoding="utf-8")
    for name, value in found.items():
        log.info("%s: %s", name, value)


if __name__ == "__main__":
    main()
