"""The report: one row a clip with its findings, made from headers before any model is loaded."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from ..errors import DataError
from ..geometry import VideoFactors
from .buckets import Bucket, ClipOptions, ClipPlan, check, parse_buckets, plan
from .findings import CODES, Finding, MediaError
from .probe import Probe, probe
from .references import check_references, plan_reference
from .sources import Sample

TOKEN_LIMIT = 1024
LETTERS_PER_TOKEN = 4.0
"""About what Gemma and T5 make of English; with a tokenizer the true count is used."""


@dataclass(frozen=True)
class Row:
    """One clip of the report."""

    sample: Sample
    probe: Probe | None
    plans: tuple[ClipPlan, ...]
    findings: tuple[Finding, ...]
    caption_tokens: int = 0

    @property
    def usable(self) -> bool:
        return bool(self.plans) and not any(f.refused for f in self.findings)

    def to_json(self) -> dict[str, Any]:
        """The row of ``report --json``."""
        found, first = self.probe, self.plans[0] if self.plans else None
        row: dict[str, Any] = {
            "path": str(self.sample.media or self.sample.id),
            "id": self.sample.id,
            "dataset": self.sample.dataset,
            "usable": self.usable,
            "findings": [{"code": f.code, "message": f.message, "fix": f.fix, "refused": f.refused} for f in self.findings],
            "caption": self.sample.caption,
            "caption_tokens": self.caption_tokens,
            "repeats": self.sample.repeats,
            "weight": self.sample.weight,
            "roles": {role: str(path) for role, path in self.sample.roles.items()},
            "pieces": len(self.plans),
        }
        if found is not None:
            row |= {
                "kind": found.kind,
                "width": found.width,
                "height": found.height,
                "rotation": found.orientation.degrees,
                "fps": round(found.fps, 4),
                "frames": found.frames,
                "seconds": round(found.seconds, 4),
                "codec": found.codec,
                "pixel_format": found.pixel_format,
                "transfer": found.transfer,
                "sound": "none" if found.sound is None else f"{found.sound.layout} {found.sound.sample_rate} Hz",
                "audio": None if found.sound is None else {"rate": found.sound.sample_rate, "channels": found.sound.channels, "layout": found.sound.layout, "seconds": round(found.sound.seconds, 4)},
            }
        if first is not None:
            row |= {
                "bucket": str(first.bucket) if first.bucket else None,
                "frames_used": sum(p.frames for p in self.plans),
                "used_fps": round(float(first.fps), 4),
                "used_seconds": round(sum(p.seconds for p in self.plans), 4),
                "crop": None if first.placement is None else [first.placement.fit_width, first.placement.fit_height, first.placement.left, first.placement.top],
            }
        return row


@dataclass(frozen=True)
class Report:
    """All rows. Its usable plans are exactly what preprocessing encodes."""

    rows: tuple[Row, ...]
    buckets: tuple[Bucket, ...] = ()
    warnings: tuple[str, ...] = field(default_factory=tuple)

    @property
    def total(self) -> int:
        return len(self.rows)

    @property
    def usable(self) -> int:
        return sum(row.usable for row in self.rows)

    @property
    def plans(self) -> list[ClipPlan]:
        """The pieces that preprocessing encodes, in order."""
        return [p for row in self.rows if row.usable for p in row.plans]

    def counts(self) -> dict[str, int]:
        """Rows per finding code, most first."""
        return dict(Counter(code for row in self.rows for code in dict.fromkeys(f.code for f in row.findings)).most_common())

    def to_json(self) -> dict[str, Any]:
        return {
            "total": self.total,
            "usable": self.usable,
            "pieces": len(self.plans),
            "buckets": dict(Counter(str(p.bucket or "sound") for p in self.plans)),
            "seconds": round(sum(p.seconds for p in self.plans), 3),
            "with_audio": sum(p.sound is not None for p in self.plans),
            "findings": {code: {"clips": n, "refused": CODES[code].refused, "fix": CODES[code].fix} for code, n in self.counts().items()},
            "warnings": list(self.warnings),
            "clips": [row.to_json() for row in self.rows],
        }

    def skipped(self) -> list[dict[str, Any]]:
        """Rows left out, for the manifest."""
        return [{"path": str(r.sample.media or r.sample.id), "findings": [{"code": f.code, "message": f.message} for f in r.findings if f.refused]} for r in self.rows if not r.usable]


def make_report(
    samples: Sequence[Sample],
    buckets: Sequence[Bucket] | Callable[[Sequence[Probe]], Sequence[Bucket]],
    options: ClipOptions,
    factors: VideoFactors,
    *,
    wanted_roles: Sequence[str] = (),
    workers: int = 8,
    progress: Callable[[int, int], None] | None = None,
    with_audio: bool = True,
) -> Report:
    """Look at every clip's headers and plan it.

    buckets: a fixed set, or a function of the probes (automatic buckets). wanted_roles: roles that the mode needs;
    a clip without one is refused. Datasets with buckets of their own are planned with these.
    """
    if not with_audio:
        options = options.model_copy(update={"audio": "off"})
    probes = _probe_all(samples, workers, progress)
    if callable(buckets):
        buckets = tuple(buckets([p for p in probes if isinstance(p, Probe)]))
    if buckets:
        check(buckets, factors)
    own = {text: parse_buckets(text) for text in {s.buckets for s in samples if s.buckets}}
    for each in own.values():
        check(each, factors)
    if "reference_video" in wanted_roles:
        check_references([b for each in (buckets, *own.values()) for b in each], factors, options)
    rows = [_row(s, p, own.get(s.buckets or "", tuple(buckets)), options, factors, wanted_roles) for s, p in zip(samples, probes)]
    return Report(tuple(rows), tuple(buckets), tuple(_warnings(rows, options)))


def _probe_all(samples: Sequence[Sample], workers: int, progress: Callable[[int, int], None] | None) -> list[Probe | Finding | None]:
    def one(sample: Sample) -> Probe | Finding | None:
        source = sample.in_memory if sample.in_memory is not None else sample.media
        if source is None or any(f.code == "media.missing" for f in sample.findings):
            return None
        try:
            return probe(source)
        except MediaError as error:
            return error.finding

    found: list[Probe | Finding | None] = []
    with ThreadPoolExecutor(max(1, workers), thread_name_prefix="probe") as pool:
        for result in pool.map(one, samples):
            found.append(result)
            if progress:
                progress(len(found), len(samples))
    return found


def _row(sample: Sample, found: Probe | Finding | None, buckets: Sequence[Bucket], options: ClipOptions, factors: VideoFactors, wanted: Sequence[str]) -> Row:
    tokens = round(len(sample.caption) / LETTERS_PER_TOKEN)
    findings = list(sample.findings)
    if tokens > TOKEN_LIMIT:
        findings.append(Finding("caption.long", f"about {tokens:,} tokens"))
    if not isinstance(found, Probe):
        return Row(sample, None, (), tuple(findings + ([found] if found else [])), tokens)
    findings += found.findings
    findings += [Finding("role.unpaired", f"no {role}, which this mode needs") for role in wanted if role not in sample.roles]
    planned = plan(sample, found, buckets, options)
    if isinstance(planned, Finding):
        return Row(sample, found, (), tuple(findings if planned in findings else [*findings, planned]), tokens)
    findings += planned[0].notes
    findings += _role_findings(planned[0], factors)
    return Row(sample, found, tuple(planned), tuple(dict.fromkeys(findings)), tokens)


def _role_findings(first: ClipPlan, factors: VideoFactors) -> list[Finding]:
    """What is wrong with the files of a clip's roles: unreadable ones refuse the clip."""
    findings: list[Finding] = []
    for role, path in first.sample.roles.items():
        if path.suffix.lower() == ".pt" or not path.is_file():
            continue
        try:
            own = probe(path)
        except MediaError as error:
            findings.append(error.finding)
            continue
        if role == "reference_video" and first.bucket:
            planned = plan_reference(first, own, factors)
            findings += [planned] if isinstance(planned, Finding) else planned.notes
        elif role in ("audio", "reference_audio") and own.sound is None:
            findings.append(Finding("media.no_frames", f"the {role} {path.name} has no sound"))
    return findings


def _warnings(rows: Sequence[Row], options: ClipOptions) -> list[str]:
    usable = [r for r in rows if r.usable]
    warnings = []
    videos = [r for r in usable if r.probe and r.probe.kind == "video"]
    silent = [r for r in videos if all(p.sound is None for p in r.plans)]
    if videos and options.audio != "off" and len(silent) == len(videos):
        warnings.append("No clip has sound: sound cannot be learned from this dataset.")
    rates = Counter(round(float(p.fps), 3) for r in videos for p in r.plans)
    if len(rates) > 3:
        warnings.append(f"The clips have {len(rates)} frame rates; batches are of one rate. Set clips.fps to bring them to one.")
    captions = Counter(r.sample.caption for r in usable)
    if len(usable) > 3 and len(captions) == 1:
        warnings.append("All clips have the same caption.")
    return warnings


def usable_or_raise(report: Report) -> None:
    """Raise DataError naming the commonest finding when nothing is usable."""
    if report.usable:
        return
    if not report.rows:
        raise DataError("data.none", "The dataset is empty.", "Give a folder of clips, or a dataset file with rows.")
    code, count = next(iter(report.counts().items()), ("media.unreadable", 0))
    refused = {c: n for c, n in report.counts().items() if CODES[c].refused}
    code, count = next(iter(refused.items()), (code, count))
    raise DataError("data.none", f"None of {report.total} clips is usable; {count} have {code}.", CODES[code].fix)


def thumbnail(row: Row, width: int = 160) -> Any:
    """[h, w, 3] uint8 of a row's first frame for the node, or None when it cannot be decoded."""
    from dataclasses import replace as changed

    from .decode import pictures

    if not row.plans or row.plans[0].bucket is None:
        return None
    first = row.plans[0]
    small = Bucket(width, max(1, round(width / first.bucket.aspect)), 1)
    place = first.placement
    scale = small.width / first.bucket.width
    fit = changed(place, fit_width=max(small.width, round(place.fit_width * scale)), fit_height=max(small.height, round(place.fit_height * scale)), left=round(place.left * scale), top=round(place.top * scale))
    try:
        return next(iter(pictures(changed(first, bucket=small, placement=fit)))).pixels
    except (MediaError, OSError, StopIteration):
        return None


