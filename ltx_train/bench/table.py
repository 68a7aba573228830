"""The table of settings that a release is measured by: each row's case, its limits on an H200, and whether they hold."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from ..lora.adapters import LoraSection
from ..memory.costs import GIB, Fit, Speeds, Work, cost
from ..planner import clip_tokens, lora_numbers, this_machine
from .device import device_of
from .step import StepCase, run_cases

TOLERANCE = 1.05
"""Limits hold within 5 %."""
BIG, MIDDLE, SMALL = "size=960x544x89,rank=32", "size=576x576x49,rank=16", "size=512x512x25,rank=32"
STREAMED = "quantization=int8,resident=0"


@dataclass(frozen=True)
class Row:
    """One line of the table. seconds, gib: the most a step (a sample, where several go together) and the card may take.

    times_plain: at least so many times the plain way's speed, measured in the same run. times_row: at most so many times
    the seconds of an earlier row.
    """

    title: str
    case: str
    seconds: float | None = None
    gib: float | None = None
    times_plain: float | None = None
    times_row: tuple[int, float] | None = None


# rows that share compiled code stand together; the heaviest first
ROWS: tuple[Row, ...] = (
    Row("bf16, full recompute", BIG, 1.20, 45),
    Row("bf16, activation budget", f"{BIG},budget=0.45", 1.00, 75, times_plain=2.0),
    Row("int8 weights, resident", f"{BIG},quantization=int8", 1.26, 28),
    Row("int8, all blocks streamed, cap 16", f"{BIG},{STREAMED},cap=16", 1.30, 12),
    Row("int8, all streamed, inputs and optimizer on the host, cap 12", f"{BIG},{STREAMED},offload=1,optimizer=host,cap=12", 1.35, 9),
    Row("fp8 products, full recompute", f"{BIG},quantization=fp8,fp8=1", 0.97, 27),
    Row("fp8 products, activation budget", f"{BIG},quantization=fp8,fp8=1,budget=0.5", 0.80, 72),
    Row("not compiled, int8 streamed, cap 16", f"{BIG},{STREAMED},compile=0,graph=0,cap=16", None, 12, times_row=(4, 1.6)),
    Row("video only, bf16", f"{BIG},audio=0", 1.02, 32),
    Row("bf16, activation budget", f"{MIDDLE},budget=0.48", 0.34, 53, times_plain=5.0),
    Row("fp8 products, activation budget", f"{MIDDLE},quantization=fp8,fp8=1,budget=0.4", 0.31, 47),
    Row("int8, cap 24", f"{MIDDLE},quantization=int8,resident=42,cap=24", 0.49, 22.8),
    Row("int8, cap 16", f"{MIDDLE},quantization=int8,resident=16,cap=16", 0.53, 15),
    Row("int8, all streamed, optimizer on the host, cap 8", f"{MIDDLE},{STREAMED},optimizer=host,cap=8", 0.76, 7.2),
    Row("int8, cap 16", f"{SMALL},quantization=int8,resident=18,cap=16", 0.40, 15),
    Row("int8, 4 micro-batches together, cap 12, per sample", f"{SMALL},{STREAMED},together=4,cap=12", 0.28, 11),
    Row("LTX-Video 13B, int8, cap 12", "family=ltxv-13b,size=768x512x97,rank=32,quantization=int8,resident=0,cap=12", None, 12),
)


def chosen(text: str) -> list[int]:
    """Numbers of rows, from 1, of ``all`` or such as ``1-4,7``. Raises ValueError for a row that is not there."""
    if text == "all":
        return list(range(1, len(ROWS) + 1))
    numbers: list[int] = []
    for part in text.split(","):
        first, _, last = (word.strip() for word in part.partition("-"))
        if not first.isdecimal() or not (last or first).isdecimal():
            raise ValueError(f"{part!r:.40} is no row's number")
        ends = int(first), int(last or first)
        wrong = [n for n in ends if not 1 <= n <= len(ROWS)]
        if wrong or ends[1] < ends[0]:
            raise ValueError(f"there is no row {wrong[0]}; there are {len(ROWS)}" if wrong else f"{part} goes backwards")
        numbers += range(ends[0], ends[1] + 1)
    return numbers


def run_table(rows: Sequence[int], base: StepCase, *, plain: bool, command: str, minutes: float | None = None) -> Iterator[dict[str, object]]:
    """Measure rows one after another; a record each, with its limits and whether they hold. minutes: begin no row after them.

    A tiny ``base`` keeps its own size, rank and depth: the way through the code is then all that is tried.
    """
    started, seconds = time.monotonic(), dict[int, float]()
    pending = list(rows)
    settings = [tiny(ROWS[n - 1].case, base) if base.tiny else StepCase.parse(ROWS[n - 1].case, base) for n in pending]
    cases = run_cases(settings, plain=plain, command=command)
    speeds = this_machine(device_of(base.tiny)).speeds
    for number, case in zip(pending, settings):
        if minutes is not None and time.monotonic() - started > 60 * minutes:
            cases.close()
            yield {"left": pending[pending.index(number) :], "why": f"{minutes:g} minutes are over"}
            return
        record = next(cases)
        row = ROWS[number - 1]
        taken = record.get("sample_s", record.get("step_s"))
        if taken is not None:
            seconds[number] = float(taken)
        own = {} if base.tiny else {"command": f'python -m ltx_train bench step --case "{row.case}"'}
        yield {"row": number, "title": row.title, **record, **own, **predicted(case, speeds), **judged(row, record, seconds)}


def predicted(case: StepCase, speeds: Speeds) -> dict[str, float]:
    """What the planner expects of a case: seconds of a step (a sample, where several go together) and GiB of the card."""
    config = case.config()
    video, audio = clip_tokens(case.size, config)
    work = Work(config, video, audio if case.audio else 0, accumulation=case.together)
    work = replace(work, lora=lora_numbers(LoraSection(rank=case.rank, alpha=case.rank), work))
    fit = Fit(case.quantization or None, case.engine().streamed, case.budget, case.offload, case.optimizer == "host", case.compile, case.fp8, case.together, case.disk, graphs=case.graph)
    found = cost(work, fit, speeds)
    return {"plan_s": round(found.seconds / case.together, 3), "plan_gib": round(found.device / GIB, 2)}


def tiny(text: str, base: StepCase) -> StepCase:
    """The row's settings on a network that a CPU runs in a moment."""
    case = StepCase.parse(text, base)
    layers = base.config().num_layers
    resident = min(case.resident, layers - 1) if case.resident > 0 else case.resident
    return replace(case, size=base.size, rank=base.rank, layers=base.layers, resident=resident, cap=0.0, compile=case.compile and base.compile)


def judged(row: Row, record: Mapping[str, object], seconds: Mapping[int, float]) -> dict[str, object]:
    """The row's limits, and ``within``: whether all that could be measured hold; absent where nothing could."""
    taken, gib, plain = record.get("sample_s", record.get("step_s")), record.get("device_gib"), record.get("times_plain")
    limit = row.seconds
    if row.times_row is not None and row.times_row[0] in seconds:
        limit = round(row.times_row[1] * seconds[row.times_row[0]], 3)
    holds = []
    if limit is not None and taken is not None:
        holds.append(float(taken) <= limit * TOLERANCE)
    if row.gib is not None and gib is not None:
        holds.append(float(gib) <= row.gib * TOLERANCE)
    if row.times_plain is not None and plain is not None:
        holds.append(float(plain) >= row.times_plain / TOLERANCE)
    found = {"limit_s": limit, "limit_gib": row.gib, "limit_times_plain": row.times_plain, "within": all(holds) if holds else None}
    return {k: v for k, v in found.items() if v is not None}
