"""The doctor's visit: opens the files, lends the networks one by one, makes the step-0 preview, writes the report."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch

from .contexts import ContextStore
from .data.dataset import DataSection
from .doctor import Doctor
from .doctor_report import Check, Diagnosis
from .errors import LtxTrainError, utf8
from .memory.settings import AccelerationSection
from .models.checkpoint import Checkpoint
from .models.inspect import is_encoder
from .models.transformer import LTXTransformer
from .network import load_network
from .preprocess import engine_codec
from .runs.events import WarningEvent
from .runs.live import LiveRun
from .runs.run_dir import RunDir
from .sampling.recipe import ValidationSection
from .text import TextFeatures
from .validation import Validator, prepare_samples

REPORT = "report.json"
_SIZES = {True: (64, 64, 17), False: (512, 320, 25)}  # of the preview: of a tiny model, of a real one


def examine(
    files: Sequence[Path], paths: Mapping[str, str | None], acceleration: AccelerationSection, *, out: Path, dataset: Path | None = None, buckets: str | None = None,
    preview: bool = True, say: Callable[[Check], None] = lambda check: None,
) -> Diagnosis:  # fmt: skip
    """Examine a model. paths: text_encoder, video_vae, audio_vae, tokenizer, where given by name. The report and preview land in ``out``.

    Files that do not open are a finding too; nothing but a wrong call raises.
    """
    from .training.parallel import Parallel

    run = RunDir.create(out)
    with LiveRun(run) as live:
        try:
            checkpoint = open_files(files, paths)
        except LtxTrainError as error:
            found = Diagnosis(", ".join(p.name for p in files), [Check("files", "fail", error.message, error.code, error.hint)])
            say(found.checks[0])
        else:
            device = Parallel.start(device=acceleration.device).device
            found = _doctor(checkpoint, acceleration, device, live, dataset, buckets, preview, say).run()
    (run.path / REPORT).write_bytes(utf8(json.dumps(found.to_json(), indent=1, ensure_ascii=False)))
    return found


def open_files(files: Sequence[Path], paths: Mapping[str, str | None]) -> Checkpoint:
    """The checkpoint of files in any order; a text encoder among them is found by what it holds."""
    given = {name: Path(value).expanduser() for name, value in paths.items() if value}
    models = []
    for path in files:
        if "text_encoder" not in given and is_encoder(path):
            given["text_encoder"] = path
        else:
            models.append(path)
    return Checkpoint.open(*models, **given)


def _doctor(
    checkpoint: Checkpoint, acceleration: AccelerationSection, device: torch.device, live: LiveRun, dataset: Path | None, buckets: str | None, preview: bool, say: Callable[[Check], None]
) -> Doctor:
    codec, dtype = engine_codec(checkpoint, acceleration, device), acceleration.compute_dtype(device)
    streams = ("video", "audio") if checkpoint.family.audio else ("video",)
    place: DataSection | Path | None = dataset
    if dataset is not None and buckets:
        place = DataSection(dataset=str(dataset), resolution_buckets=buckets)

    def sample(transformer: LTXTransformer, prompt: str, features: TextFeatures) -> Path:
        """A step-0 sample of a clip's caption, without guidance (whose negative prompt is not encoded here)."""
        section = ValidationSection(
            samples=[{"prompt": prompt}], video_dims=_SIZES[transformer.config.num_layers < 8], contact_sheet=False, video_cfg_scale=1.0, audio_cfg_scale=1.0,
            guidance_passes="one_by_one",
        )  # fmt: skip
        contexts = ContextStore(checkpoint, {prompt: features}.__getitem__, video=True, audio="audio" in streams, device=device, dtype=dtype)
        contexts.prepare([prompt])
        prepared = prepare_samples(section, checkpoint, codec, lambda text: prompt)
        made = Validator(section, checkpoint, prepared, contexts, codec, transformer).run(0, live)
        if not made:
            raise ValueError(next((f"{e.message} {e.hint}" for e in reversed(live.dir.events().events) if isinstance(e, WarningEvent)), "no file"))
        return made[0]

    return Doctor(
        checkpoint, codec, lambda: load_network(checkpoint, acceleration, device, streams=streams, live=live), dtype=dtype, dataset=place, say=say,
        preview=sample if preview else None,
    )  # fmt: skip
