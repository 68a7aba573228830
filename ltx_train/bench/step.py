"""``bench step``: seconds and memory of one real training step at full size, with the plain way in the same run."""

from __future__ import annotations

import gc
import json
import os
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import asdict, dataclass, fields, replace

import torch

from ..conditioning.modes import TrainingStrategySection
from ..data.batches import Batch
from ..errors import ConfigError
from ..geometry import AudioGrid, Latents, VideoFactors, VideoGrid
from ..lora.adapters import LoraSection, attach
from ..memory.attention import prefer_attention
from ..memory.compiling import keep_compiled_code
from ..memory.engine import EngineSettings
from ..memory.graphs import GraphedPasses
from ..memory.limit import limit_memory
from ..memory.pinned import HostMemory
from ..models.families import FAMILIES, TransformerConfig
from ..models.transformer import LTXTransformer
from ..text import Context
from ..training.flow_matching import FlowMatchingSection
from ..training.optim import OptimizationSection, can_stay, step_unless
from ..training.step import TrainStep
from ..training.trainable import Trainable, clip_gradients
from .device import GIB, card_name, device_of, kernels, memory_in_use, now, seconds_between, synchronise
from .link import hold_back
from .networks import fast_transformer, full_config, per_token, plain_adapter, plain_transformer

TINY = dict(num_layers=4, num_attention_heads=4, attention_head_dim=32, cross_attention_dim=128, in_channels=128, out_channels=128)
TINY_AUDIO = dict(audio_num_attention_heads=4, audio_attention_head_dim=32, audio_cross_attention_dim=128)


@dataclass(frozen=True)
class StepCase:
    """One measurement. resident: blocks on the device, -1 for all. disk: of the others, those that rest in a file. cap: GiB of the card that may be used, 0 for all.

    together: micro-batches of a step, which go through each block together; ``sample_s`` is then told beside ``step_s``.
    link: GB/s that uploads are held back to, 0 for none.
    """

    size: str = "960x544x89"
    rank: int = 32
    family: str = "ltx2.3"
    quantization: str = ""
    resident: int = -1
    slots: int = 3
    disk: int = 0
    budget: float = 0.0
    compile: bool = True
    graph: bool = True
    fp8: bool = False
    offload: bool = False
    optimizer: str = "device"
    together: int = 1
    link: float = 0.0
    audio: bool = True
    cap: float = 0.0
    attention: str = "auto"
    steps: int = 5
    warmup: int = 4
    text_tokens: int = 1024
    layers: int = 0
    tiny: bool = False
    profile: bool = False

    @classmethod
    def parse(cls, text: str, base: StepCase) -> StepCase:
        """``key=value,key=value`` over another case."""
        kinds = {f.name: f.type for f in fields(cls)}
        read = {"int": int, "float": float, "str": str, "bool": lambda v: v.lower() in ("1", "true", "yes", "on")}
        found = {}
        for part in filter(None, text.split(",")):
            name, _, value = part.partition("=")
            try:
                found[name] = read[kinds[name]](value)
            except (KeyError, ValueError) as error:
                raise ConfigError("bench.case", f"--case {part[:60]}: there is no such setting or value.", f"Settings: {', '.join(kinds)}; such as quantization=int8,resident=0.") from error
        case = replace(base, **found)
        if case.fp8 and case.quantization != "fp8":
            raise ConfigError("bench.case", f"--case fp8=true multiplies fp8 weights, and quantization is {case.quantization or 'none'}.", "Add quantization=fp8.")
        if case.disk and case.engine().streamed < case.disk:
            raise ConfigError("bench.case", f"--case disk={case.disk}: of the streamed blocks, and {case.engine().streamed} are streamed.", "Lower resident, or disk.")
        return case

    @property
    def setting(self) -> dict[str, object]:
        """What differs from the defaults, beside size, rank and family."""
        plain = StepCase()
        return {k: v for k, v in asdict(self).items() if v != getattr(plain, k) and k not in ("size", "rank", "family", "steps", "warmup", "profile")}

    def config(self) -> TransformerConfig:
        """The family's transformer, or one a CPU runs in a moment."""
        config = full_config(self.family)
        if self.layers:
            config = replace(config, num_layers=self.layers)
        return replace(config, **TINY, **(TINY_AUDIO if config.has_audio else {})) if self.tiny else config

    def engine(self) -> EngineSettings:
        return EngineSettings(
            streamed=0 if self.resident < 0 else max(0, self.config().num_layers - self.resident), slots=self.slots, compile=self.compile, budget=self.budget, offload=self.offload, float8=self.fp8, on_disk=self.disk,
            backend="aot_eager_decomp_partition" if self.tiny else "inductor",
        )  # fmt: skip


def strategy_of(audio: bool) -> TrainingStrategySection:
    """Text to video, with sound where the network has it."""
    return TrainingStrategySection.model_validate({"name": "text_to_video", "with_audio": audio})


def random_batch(case: StepCase, config: TransformerConfig, device: torch.device, dtype: torch.dtype) -> Batch:
    """One clip of the case's size with its sound, on the device."""
    width, height, frames = (int(v) for v in case.size.split("x"))
    grid = VideoGrid((frames - 1) // 8 + 1, height // 32, width // 32, factors=VideoFactors(8, 32, 32))
    audio = config.has_audio and case.audio
    sound = AudioGrid(max(1, round(frames / 24 * 25)))
    g = torch.Generator(device).manual_seed(1)
    randn = lambda *shape: torch.randn(*shape, generator=g, device=device)  # noqa: E731
    width_in = config.caption_channels or config.cross_attention_dim
    tokens = 16 if case.tiny else case.text_tokens
    context = Context(randn(1, tokens, width_in).to(dtype), randn(1, tokens, config.audio_cross_attention_dim).to(dtype) if audio else None)
    return Batch(
        video=Latents(randn(1, 128, grid.frames, grid.height, grid.width), grid), audio=Latents(randn(1, 8, sound.steps, 16), sound) if audio else None,
        context=context, roles={}, audio_present=torch.ones(1, dtype=torch.bool), weight=torch.ones(1, device=device), ids=("random",),
    )  # fmt: skip


def run_cases(cases: list[StepCase], *, plain: bool, command: str) -> Iterator[dict[str, object]]:
    """Measure the cases one after another, each (size, rank, sound) with its plain baseline first; a record a case."""
    os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    device = device_of(cases[0].tiny)
    baselines: dict[tuple, Mapping[str, float]] = {}
    memory = HostMemory(pin=device.type == "cuda")
    for case in cases:
        key = (case.size, case.rank, case.family, case.audio)
        if plain and key not in baselines:
            baselines[key] = guarded(measure_plain, case, device)
        record = guarded(measure_fast, case, device, memory)
        if device.type == "cuda" and torch.cuda.memory_allocated(device) > GIB // 8:
            record["left_gib"] = round(torch.cuda.memory_allocated(device) / GIB, 2)  # a fault: the next case starts with less
        base = baselines.get(key, {})
        extra = {"plain_step_s": base.get("step_s"), "plain_device_gib": base.get("device_gib"), "plain_error": base.get("error"), "command": command, "date": time.strftime("%Y-%m-%d")}
        found = {"size": case.size, "rank": case.rank, "family": case.family, "setting": case.setting, "card": card_name(device), **record, **extra}
        if base.get("step_s") and record.get("step_s"):
            found["times_plain"] = round(base["step_s"] * case.together / record["step_s"], 2)
        yield {k: v for k, v in found.items() if v is not None}
    memory.close()


def guarded(measure: Callable[..., dict[str, object]], *arguments) -> dict[str, object]:
    """A measurement, or what it failed of: one case too large does not lose the others."""
    try:
        return measure(*arguments)
    except (RuntimeError, AssertionError, ValueError, TypeError) as error:
        import traceback

        return {"error": f"{type(error).__name__}: {error}"[:600], "where": traceback.format_exc()[-1000:]}
    finally:
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def fast_network(case: StepCase, device: torch.device, memory: HostMemory) -> tuple[TransformerConfig, torch.dtype, LTXTransformer]:
    """The product's network as a case asks for it, on a device as small and with a link as slow as the case says."""
    cap(case, device)
    torch._dynamo.reset()
    memory.reuse()
    torch.manual_seed(0)
    config, dtype = case.config(), torch.float32 if case.tiny else torch.bfloat16
    keep_compiled_code()
    prefer_attention(case.attention, device)
    model = fast_transformer(
        config, case.engine(), quantization=case.quantization or None, audio=case.audio, device=device, dtype=dtype, memory=memory,
    )  # fmt: skip
    hold_back(model.block_runner.store, case.link, device)
    return config, dtype, model


def measure_fast(case: StepCase, device: torch.device, memory: HostMemory) -> dict[str, object]:
    """The product's step."""
    started = time.perf_counter()
    config, dtype, model = fast_network(case, device, memory)
    notes: list[str] = []
    if case.graph and case.compile and not case.disk:
        model.pass_runner = GraphedPasses(model, model.block_runner, lambda code, text: notes.append(text))
    audio = model.has_audio
    adapters = attach(model, LoraSection(rank=case.rank, alpha=case.rank), seed=0, streams=("video", "audio") if audio else ("video",))
    synchronise(device)
    ready = time.perf_counter() - started
    step = TrainStep(model, strategy_of(audio), FlowMatchingSection(), config=config)
    optimizer = OptimizationSection().build_optimizer(adapters.parameters(), in_ram=case.optimizer == "host")
    found = timed(case, config, device, dtype, step, optimizer, lambda: update(Adapter(adapters.parameters()), optimizer), nullcontext)
    engine, recorded = model.block_runner, len(model.pass_runner.recordings) if model.pass_runner is not None else 0
    model.block_runner = model.pass_runner = None
    kept = memory.idle / GIB  # of cases before
    return {
        **found, "host_gib": round(found["host_gib"] - kept, 2), "pinned_gib": round(memory.pinned / GIB - kept, 2), "graphs": recorded, "notes": notes or None,
        "setup_s": round(ready, 1), "uploaded_gb": round(engine.store.uploaded / 1e9 / (case.steps + case.warmup), 2),
    }  # fmt: skip


def measure_plain(case: StepCase, device: torch.device) -> dict[str, object]:
    """The same step as peft, autocast, adaLN a token and torch's checkpoint do it, on the whole card."""
    cap(replace(case, cap=0.0), device)
    torch.manual_seed(0)
    config, dtype = case.config(), torch.float32 if case.tiny else torch.bfloat16
    prefer_attention("sdpa", device)
    model = plain_transformer(config, audio=case.audio, device=device, dtype=dtype)
    parameters = plain_adapter(model, case.rank, FAMILIES[case.family].target_modules)
    step = TrainStep(per_token(model), strategy_of(model.has_audio), FlowMatchingSection(), config=config)
    optimizer = OptimizationSection().build_optimizer(parameters)
    autocast = lambda: torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda")  # noqa: E731

    def plainly() -> torch.Tensor:
        norm = torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        return norm

    return timed(replace(case, steps=min(3, case.steps), warmup=1, profile=False, together=1), config, device, dtype, step, optimizer, plainly, autocast)


class Adapter(Trainable):
    """An adapter's parameters, for the loop's own clipping."""

    def __init__(self, parameters: list[torch.nn.Parameter]) -> None:
        self._named = {str(number): p for number, p in enumerate(parameters)}

    def named_parameters(self) -> dict[str, torch.nn.Parameter]:
        return self._named


def update(adapter: Adapter, optimizer: torch.optim.Optimizer) -> torch.Tensor:
    """Clip and move as the trainer does, which waits for no number of the device where the optimizer can stay by itself."""
    norm = clip_gradients(adapter, 1.0).total
    if can_stay(optimizer):
        step_unless(optimizer, (~torch.isfinite(norm)).float())
    else:
        optimizer.step()
    return norm


def timed(case: StepCase, config, device, dtype, step: TrainStep, optimizer, move: Callable[[], torch.Tensor], autocast) -> dict[str, object]:
    """Median seconds of forward, backward, clipping and update, after warm-up; device and host memory at their highest.

    The steps follow each other as they do in a run: a step takes from the end of the one before to its own, on the device.
    move: clips the gradients and updates; returns their norm before.
    """
    batch = random_batch(case, config, device, dtype)
    losses, enqueued = [], []

    def one(number: int) -> None:
        with autocast():
            if case.together > 1:
                loss = sum(out.loss for out in step.together([batch] * case.together, seed=0, step=number, slots=[[n] for n in range(case.together)])) / case.together
            else:
                loss = step(batch, seed=0, step=number, slot=0).loss
        loss.backward()
        norm = move()
        optimizer.zero_grad(set_to_none=True)
        losses.append((loss.detach(), norm))

    started = time.perf_counter()
    for number in range(case.warmup):
        one(number)
        if number == 0:
            synchronise(device)
            first = time.perf_counter() - started
            if device.type == "cuda":
                torch.cuda.empty_cache()
                torch.cuda.reset_peak_memory_stats(device)
    synchronise(device)
    ends = [now(device)]
    for number in range(case.steps):
        start = time.perf_counter()
        one(case.warmup + number)
        enqueued.append(time.perf_counter() - start)
        ends.append(now(device))
    synchronise(device)
    seconds = [seconds_between(a, b) for a, b in zip(ends, ends[1:])]
    found = {
        "step_s": round(statistics.median(seconds), 4), "fastest_s": round(min(seconds), 4), "slowest_s": round(max(seconds), 4),
        "enqueue_s": round(statistics.median(enqueued), 4), "first_step_s": round(first, 1), "loss": round(losses[-1][0].item(), 4),
        "grad_norm": float(f"{losses[-1][1].item():.3g}"), **memory_in_use(device),
    }  # fmt: skip
    if case.together > 1:
        found["sample_s"] = round(found["step_s"] / case.together, 4)
    if case.profile and device.type == "cuda":
        found["profile"] = kernels(lambda: one(99))
    return found


def cap(case: StepCase, device: torch.device) -> None:
    """Make the card a small one, if the case says so."""
    limit_memory(device, case.cap * GIB if case.cap else None)


def line(record: Mapping[str, object]) -> str:
    """One JSON line."""
    return json.dumps(record, default=str)
