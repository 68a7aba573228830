"""``bench train``: a real run of real size on random weights, from its files on the disk to a resumed LoRA, beside ``bench step``."""

from __future__ import annotations

import signal
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from ..config import TrainConfig
from ..errors import ConfigError
from ..launch import Child, Outcome
from ..models.families import FAMILIES
from ..run_setup import launch_job, open_training
from ..runs.events import (
    ErrorEvent,
    Event,
    JobEvent,
    LoraEvent,
    PhaseEvent,
    ProgressEvent,
    SampleEvent,
    SnapshotEvent,
    StateEvent,
    StatisticsEvent,
    StepEvent,
    WarningEvent,
)
from ..runs.run_dir import RunDir
from .device import GIB, card_name
from .full_model import write_clips, write_full, write_small
from .step import StepCase, run_cases

WARM = 4
"""Steps that compile, warm up and record; the others are timed."""
EVERY = 10.0
"""Seconds between two lines on the same phase's progress."""
Say = Callable[[dict[str, object]], None]


@dataclass(frozen=True)
class TrainCase:
    """A run. setting: as for ``bench step``; its cap is the run's ``memory_limit_gb``. previews: steps between two, 0 for none.

    resumed: steps after the first ``steps``, by a new process from the last snapshot. processes: GPUs, each with its own clip.
    part: the run waits after so many steps with its weights in host memory, and goes on; 0: it does not. result: the run writes
    its file at the end; else it is ended after its last step.
    """

    setting: StepCase
    steps: int = 10
    resumed: int = 0
    previews: int = 0
    preview_steps: int = 8
    processes: int = 1
    part: int = 0
    mode: str = "lora"
    optimizer: str = "adamw"
    result: bool = True

    def config(self, folder: Path, device: torch.device) -> TrainConfig:
        """The job as a user would write it, its model and clips written below ``folder`` where they are not there yet."""
        s = self.setting
        row = FAMILIES[s.family]
        if not row.audio:
            raise ConfigError("bench.family", f"bench train writes no full {row.title} model.", "Give --family ltx2, ltx2.3 or ltx2.5.")
        model = write_small(folder / "model", s.family) if s.tiny else write_full(folder / "model", s.family, device)
        if s.tiny:
            from ..models.checkpoint import Checkpoint

            found = Checkpoint.open(model["model_path"]).transformer
            widths = {"video_width": found.cross_attention_dim, "audio_width": found.audio_cross_attention_dim, "tokens": 16}
        else:
            published = row.config["transformer"]
            widths = {"video_width": published["cross_attention_dim"], "audio_width": published["audio_cross_attention_dim"], "tokens": s.text_tokens}
        clips = write_clips(folder / f"clips-{s.size}", s.size, **widths)
        full = self.mode == "full"
        return TrainConfig.parse({
            "model": {name: str(path) for name, path in model.items()} | {"training_mode": self.mode},
            **({} if full else {"lora": {"rank": s.rank, "alpha": s.rank}}),
            "training_strategy": {"name": "text_to_video", "with_audio": s.audio, "first_frame_conditioning_p": 0.0},  # a conditioned step is compiled anew
            "optimization": {"steps": self.steps, "batch_size": 1, "learning_rate": 1e-4, "scheduler_type": "constant", "optimizer_type": self.optimizer},
            "acceleration": self.acceleration(found.num_layers if s.tiny else row.config["transformer"]["num_layers"]),
            "data": {"preprocessed_data_root": str(clips)},
            "validation": {
                "samples": [{"prompt": "a red ball rolls over a table"}] if self.previews else [], "video_dims": [int(v) for v in s.size.split("x")],
                "inference_steps": self.preview_steps, "interval": self.previews or None, "skip_initial_validation": True, "generate_audio": s.audio,
            },
            "checkpoints": {"interval": None, **({"save_training_state": "off"} if full else {})},  # 12 bytes a weight: more than the disk of most machines
            "distributed": {"num_processes": self.processes},
            "output_dir": str(folder / "run"),
        })  # fmt: skip

    def acceleration(self, layers: int) -> dict[str, Any]:
        """The setting in the config's words."""
        s = self.setting
        return {
            "mixed_precision_mode": "no" if s.tiny else "bf16", "quantization": s.quantization or None, "stream_blocks": 0 if s.resident < 0 else max(0, layers - s.resident),
            "activation_budget": s.budget, "offload_activations": "on" if s.offload else "off", "optimizer_in_ram": "on" if s.optimizer == "host" else "off",
            "compile": "off" if s.tiny or not s.compile else "auto", "cuda_graphs": "on" if s.graph and s.compile and not s.disk else "off", "float8_products": s.fp8,
            "accumulate_together": 1, "blocks_on_disk": s.disk, "activation_checkpointing": "on", **({"memory_limit_gb": s.cap * GIB / 1e9} if s.cap else {}),
        }  # fmt: skip


def run_train(case: TrainCase, *, folder: Path | None, step_too: bool, command: str, say: Say = lambda line: None) -> Iterator[dict[str, object]]:
    """A record of the run, one of the resumed part if there is one, and ``bench step`` of the same setting with their ratio.

    Several processes are measured beside one instead: ``times_one`` is how many times its samples a second they train.

    folder: where the model and the clips are kept for another time; the run itself is made anew. say: gets a line for each part
    of the way as it goes. Interrupted (Ctrl+C, or SIGTERM as a time limit sends it), the child is ended and what is known is the last record.
    """
    if case.resumed and not case.result:
        raise ConfigError("bench.result", "A run without a result cannot be resumed.", "Leave --resume or --no-result out.")
    with terminated_as_interrupt(), TemporaryDirectory(prefix="ltx_train_bench_") as temporary:
        place = folder or Path(temporary)
        device = torch.device("cuda", 0) if torch.cuda.is_available() and not case.setting.tiny else torch.device("cpu")
        began = time.time()
        say({"bench": "train", "phase": "write the model and the clips"})
        config = case.config(place, device).model_copy(update={"output_dir": str(Path(temporary) / "run")})
        say({"bench": "train", "phase": "write the model and the clips", "seconds": round(time.time() - began, 1)})
        s = case.setting
        about = {"bench": "train", "size": s.size, "rank": s.rank, "family": s.family, "setting": s.setting, "processes": case.processes, "card": card_name(device), "mode": case.mode}
        told = {"command": command, "date": time.strftime("%Y-%m-%d")}
        if device.type == "cuda":
            torch.cuda.empty_cache()
        found = carried_out(config, part=case.part, result=case.result, say=say)
        yield {**about, **found, **told}
        if "interrupted" in found:
            return
        if case.processes > 1:
            if step_too and "step_s" in found:
                yield alone(config, found, {**about, "processes": 1}, result=case.result, say=say) | told
            return
        if case.resumed and "error" not in found:
            longer = config.model_copy(update={"optimization": config.optimization.model_copy(update={"steps": case.steps + case.resumed})})
            again = carried_out(longer, after=case.steps, say=say)
            yield {**about, "resumed_at": case.steps, **again, **told}
            if "interrupted" in again:
                return
        if step_too and "step_s" in found:
            say({"bench": "train", "phase": "bench step"})
            record = next(run_cases([replace(s, steps=max(3, case.steps - WARM))], plain=False, command=command))
            ratio = {"train_over_bench_step": round(found["step_s"] / record["step_s"], 3)} if "step_s" in record else {}
            yield {**record, **ratio}


def alone(config: TrainConfig, together: dict[str, object], about: dict[str, object], *, result: bool, say: Say) -> dict[str, object]:
    """The same run on one GPU, and how many times its samples a second the processes together trained."""
    place = config.output_dir + "_alone"
    one = carried_out(config.model_copy(update={"output_dir": place, "distributed": config.distributed.model_copy(update={"num_processes": 1})}), result=result, say=say)
    rate = lambda found: found["global_batch"] / found["step_s"]  # noqa: E731
    ratio = {"times_one": round(rate(together) / rate(one), 3)} if "step_s" in one else {}
    return {**about, **one, **ratio}


def carried_out(config: TrainConfig, *, after: int = 0, part: int = 0, result: bool = True, say: Say = lambda line: None) -> dict[str, object]:
    """What a run of the config does, in children as always; after: the step that an earlier start ended at; part, result: see :class:`TrainCase`."""
    started = time.time()
    opened = open_training(config)
    last = None if result else config.optimization.steps
    children: list[Child] = []
    waited: dict[str, object] = {}

    def follow(**options: object) -> Outcome | None:
        children.append(launch_job(opened, **options))
        return followed(children[-1], started, say, last)

    try:
        outcome = follow(lower_plan=None, steps_this_run=part)
        if part and outcome is not None and outcome.part_done:
            waited, asked = while_parked(opened.run), time.time()
            outcome = follow(lower_plan=None)
            later = [e for e in opened.run.events().events if isinstance(e, StepEvent) and e.t > asked]
            waited["go_on_s"] = round(later[0].t - asked, 2) if later else None
    except KeyboardInterrupt:
        events = opened.run.events().events
        for child in children:
            child.kill()
        return {**told_by(events, started, after), **standing(events, started), "error": "interrupted", "interrupted": True, "log": list(opened.run.tail(8))}
    run = RunDir.open(opened.run.path)
    found = {**told_by(run.events().events, started, after), **waited}
    if outcome is None:
        return {"global_batch": config.optimization.batch_size * config.distributed.num_processes, **found}
    return found if outcome.ok else {**found, "error": f"{outcome.code}: {outcome.message}"[:400], "log": list(outcome.log[-12:])}


def followed(child: Child, started: float, say: Say, last: int | None) -> Outcome | None:
    """How the child ends, its events told as they come; None where it is ended after the step ``last``."""
    progress: dict[str, float] = {}
    for event in child.follow():
        line = line_of(event)
        seldom = isinstance(event, ProgressEvent) and event.done != event.total and event.t < progress.get(event.phase, 0.0) + EVERY
        if line is not None and not seldom:
            say({"bench": "train", **line, "at_s": round(event.t - started, 1)})
            progress |= {event.phase: event.t} if isinstance(event, ProgressEvent) else {}
        if last is not None and isinstance(event, StepEvent) and event.step >= last:
            child.kill()
            return None
    return child.wait()


def line_of(event: Event) -> dict[str, object] | None:
    """What of an event is told on the way."""
    if isinstance(event, PhaseEvent):
        return {"phase": event.phase} | ({} if event.seconds is None else {"seconds": round(event.seconds, 1)})
    if isinstance(event, ProgressEvent):
        return {"phase": event.phase, "done": event.done, "of": event.total, "unit": event.unit}
    if isinstance(event, StepEvent):
        return {"step": event.step, "seconds": None if event.seconds is None else round(event.seconds, 3)}
    if isinstance(event, JobEvent | SnapshotEvent | LoraEvent | SampleEvent):
        return {"event": event.type}
    return {"event": event.type, "message": event.message} if isinstance(event, WarningEvent | ErrorEvent) else None


def standing(events: list[Event], started: float) -> dict[str, object]:
    """Where a run stands: the phases that have begun and not ended, with their seconds so far, and what was said last."""
    now, open_phases = time.time(), {}
    mine = [e for e in events if e.t >= started]
    for event in mine:
        if isinstance(event, PhaseEvent):
            open_phases[event.phase] = event.t if event.state == "start" else None
    lines = [{**line, "at_s": round(e.t - started, 1)} for e in mine if (line := line_of(e)) is not None]
    return {"stands_in": {name: round(now - begun, 1) for name, begun in open_phases.items() if begun is not None}, "after_s": round(now - started, 1), "last": lines[-4:]}


@contextmanager
def terminated_as_interrupt() -> Iterator[None]:
    """Inside, SIGTERM interrupts as Ctrl+C does, once: a time limit ends us with what we know, and our children with us."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def handle(number: int, frame: object) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, handle)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def while_parked(run: RunDir) -> dict[str, object]:
    """What a waiting run says, and what the card has in use meanwhile."""
    said = [e.reason for e in run.events().events if isinstance(e, StateEvent) and e.state == "parked"]
    found: dict[str, object] = {"parked": said[-1] if said else None}
    if torch.cuda.is_available():
        free, total = torch.cuda.mem_get_info(0)
        found["in_use_parked_gib"] = round((total - free) / GIB, 2)
    return found


def told_by(events: list[Event], started: float, after: int) -> dict[str, object]:
    """Seconds of steps and phases, memory and files, from the events since ``started`` (wall clock) of steps past ``after``."""
    mine = [e for e in events if e.t >= started]
    steps = [e for e in mine if isinstance(e, StepEvent) and e.step > after and e.seconds]
    found: dict[str, object] = {}
    if steps:
        timed = steps[WARM:] or steps[-1:]
        found |= {
            "step_s": round(statistics.median(e.seconds for e in timed), 4), "slowest_s": round(max(e.seconds for e in timed), 4),
            "first_step_s": round(steps[0].seconds, 1), "ready_s": round(steps[0].t - started, 1), "steps": [steps[0].step, steps[-1].step],
            "losses": [round(e.loss, 4) for e in steps if e.loss is not None][:: max(1, len(steps) // 6)],
            "data_wait_s": round(statistics.median(e.data_wait or 0.0 for e in timed), 4),
        }  # fmt: skip
        peaks = [e.peak_memory for e in timed if e.peak_memory]
        found |= {"allocated_gib": round(max(peaks) / GIB, 2)} if peaks else {}
    made = [e for e in mine if isinstance(e, LoraEvent) and e.final]
    if made and steps:
        found["result_s"] = round(made[-1].t - steps[-1].t, 1)
    batches = [e.global_batch for e in mine if isinstance(e, StatisticsEvent)]
    found |= {"global_batch": batches[-1]} if batches else {}
    previews = [e for e in mine if isinstance(e, SampleEvent)]
    if previews:
        found |= {"previews": [e.step for e in previews], "preview_s": [round(e.seconds, 1) for e in previews if e.seconds is not None], **around(steps, {e.step for e in previews})}
    found["phases"] = {e.phase: round(e.seconds, 1) for e in mine if isinstance(e, PhaseEvent) and e.state == "end" and e.seconds is not None}
    found["snapshots"] = {e.step: round((e.size or 0) / 1e9, 3) for e in mine if isinstance(e, SnapshotEvent)}
    warnings = [f"{e.code}: {e.message}" for e in mine if isinstance(e, WarningEvent)]
    return {**found, **({"warnings": warnings} if warnings else {})}


def around(steps: list[StepEvent], previews: set[int]) -> dict[str, object]:
    """Median seconds of steps before the first preview and after it, the first step after each preview left out and told apart."""
    first = min(previews)
    before = [e.seconds for e in steps[WARM:] if e.step <= first]
    next_ones = [round(e.seconds, 4) for e in steps if e.step - 1 in previews]
    after = [e.seconds for e in steps if e.step > first and e.step - 1 not in previews]
    if not before or not after:
        return {}
    return {
        "before_preview_s": round(statistics.median(before), 4), "after_preview_s": round(statistics.median(after), 4), "next_step_s": next_ones,
        "after_over_before": round(statistics.median(after) / statistics.median(before), 3),
    }  # fmt: skip
