"""Preprocessing: samples to cache entries and a manifest, one model in memory at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from .data.cache import Cache
from .data.dataset import DataSection
from .data.findings import CODES
from .data.manifest import Manifest
from .data.report import Report, make_report, usable_or_raise
from .encode import Preprocessor, Reporter, Target
from .errors import DataError
from .memory.limit import limit_memory
from .models.codec import Codec, EngineCodec

if TYPE_CHECKING:
    from .config import PreprocessJob, TrainConfig
    from .models.checkpoint import Checkpoint
    from .runs.live import LiveRun
    from .training.parallel import Parallel


def report_on(
    section: DataSection, target: Target, required: Iterable[str] = (), progress: Callable[[int, int], None] | None = None, with_audio: bool = True
) -> Report:
    """Look at every clip's header and plan it; nothing is decoded or encoded. What preprocessing then encodes is ``report.plans``.

    required: roles every clip must have beside its media, such as reference_video. Raises ConfigError for bad buckets.
    """
    return make_report(
        section.samples(),
        lambda probes: section.buckets(target.factors, lambda: probes) if any(p.kind != "audio" for p in probes) else (),
        section.clips,
        target.factors,
        wanted_roles=sorted(set(required) - {"video", "audio"}),
        workers=section.decoding_threads,
        progress=progress,
        with_audio=with_audio,
    )


# -- as a job, and as the first phase of a training ------------------------------------------------------------------


class _LiveReport:
    """A LiveRun as a :class:`Reporter`."""

    def __init__(self, live: LiveRun) -> None:
        self.phase, self.progress, self.warn, self.check = live.phase, live.progress, live.warn, live.stop.check


def preprocess(
    section: DataSection,
    target: Target,
    codec: Codec,
    report: Reporter,
    *,
    texts: Sequence[str] = (),
    with_audio: bool = True,
    with_video: bool = True,
    required: frozenset[str] = frozenset(),
    roles: frozenset[str] | None = None,
    parallel: Parallel | None = None,
) -> Path:
    """Encode a dataset and write its manifest; the cache folder. Raises DataError when no clip is usable.

    required: roles every clip must have. roles: roles to encode (None: all that are there).
    """
    texts = list(dict.fromkeys([*texts, *([""] if section.caption_dropouts else [])]))
    with report.phase("look at the dataset"):
        planned = report_on(section, target, required, lambda done, total: report.progress("look at the dataset", done, total, unit="clips"), with_audio)
    usable_or_raise(planned)
    part = (parallel.rank, parallel.world) if parallel is not None else (0, 1)
    if part[0] == 0:
        Cache(section.cache_root()).clean()
    worker = Preprocessor(section, target, codec, report, with_audio=with_audio, with_video=with_video, roles=roles, part=part)
    worker.encode(planned, texts)
    if parallel is not None:
        for refused in parallel.gather(worker.refused):
            worker.refused.update(refused)
        for noted in parallel.gather(worker.noted)[1:]:
            for code, clips in noted.items():
                worker.noted.setdefault(code, []).extend(clips)
    manifest = worker.manifest(planned, texts)
    if not manifest.entries:
        refused = next(iter(worker.refused.values()))
        raise DataError("data.none", f"None of {planned.total} clips is usable; the first: {refused.message}"[:118], refused.fix)
    if part[0] == 0:
        worker.cache.write_index(manifest, section.index)
        say_skipped(manifest, report)
        say_noted(worker.noted, report)
    if parallel is not None:
        parallel.barrier()
    return worker.cache.root


def say_skipped(manifest: Manifest, report: Reporter) -> None:
    """Count and name what was left out."""
    if manifest.skipped:
        named = "\n".join(f"{s['path']}: {'; '.join(f['message'] for f in s['findings'])}" for s in manifest.skipped[:50])
        report.warn("data.skipped", f"{len(manifest.skipped)} of {len(manifest.skipped) + len(manifest.entries)} clips are left out.", named)


def say_noted(noted: Mapping[str, Sequence[str]], report: Reporter) -> None:
    """Name the clips of which decoding showed something, one warning a kind: no header tells that a sound is silence."""
    for code, clips in noted.items():
        told, _, advice = CODES[code].fix.partition(". ")
        report.warn(code, f"{len(clips)} of the clips encoded now: {told.rstrip('.')}.", "\n".join(filter(None, (advice, ", ".join(clips[:20])))))


def run(job: PreprocessJob, live: LiveRun) -> None:
    """Carry out a preprocessing job as one rank of the run's processes."""
    from .training.parallel import Parallel

    parallel = Parallel.start(device=job.acceleration.device)
    try:
        live.set_state("running")
        checkpoint = job.model.open()
        strategy = job.training_strategy
        codec = engine_codec(checkpoint, job.acceleration, parallel.device)
        preprocess(
            job.data, Target.of(checkpoint), codec, _LiveReport(live), texts=job.prompts, parallel=parallel,
            with_audio=job.with_audio and (strategy is None or strategy.streams().audio != "absent"),
            with_video=strategy is None or strategy.streams().video != "absent",
            required=strategy.required_roles() if strategy is not None else frozenset(),
        )  # fmt: skip
    finally:
        parallel.close()


def ensure(config: TrainConfig, checkpoint: Checkpoint, live: LiveRun, parallel: Parallel, texts: Sequence[str]) -> Path:
    """The data of a training: what is preprocessed already, or the dataset preprocessed now (with the prompts' features)."""
    section = config.data
    if not section.all_sources():
        return section.data_root()
    strategy = config.training_strategy
    codec = engine_codec(checkpoint, config.acceleration, parallel.device)
    return preprocess(
        section, Target.of(checkpoint), codec, _LiveReport(live), texts=texts, parallel=parallel,
        with_audio=strategy.streams().audio != "absent", with_video=strategy.streams().video != "absent",
        required=strategy.required_roles(), roles=strategy.required_roles(),
    )  # fmt: skip


def engine_codec(checkpoint: Checkpoint, acceleration, device: torch.device) -> EngineCodec:
    """The engine's codec as the acceleration settings say: bf16 where the device has it, within the memory limit."""
    limit_memory(device, acceleration.limit_bytes)
    dtype = torch.float32 if device.type == "cpu" else acceleration.dtype
    return EngineCodec(checkpoint, device=device, dtype=dtype, load_text_encoder_in_8bit=acceleration.load_text_encoder_in_8bit)


