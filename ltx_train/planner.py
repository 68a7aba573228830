"""Will it fit: which settings train a job fastest within the memory that is free, what they cost, and why."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product

import torch

from .config import TrainConfig
from .errors import ConfigError
from .lora.adapters import LoraSection
from .lora.targets import select
from .memory.capability import Facts, compile_capability
from .memory.costs import GIB, Cost, Fit, Speeds, Work, block_layers, cost
from .memory.settings import AccelerationSection
from .models.families import TransformerConfig
from .runs.run_dir import RunDir

RESERVE = 0.6 * GIB
"""Left free on a card: the desktop, other programs, and what the model of costs does not see."""
BUDGETS = (0.5, 0.4, 0.3, 0.2, 0.1, 0.0)
NOTHING_MOVED = {"stream_blocks": 0, "offload_activations": "off", "optimizer_in_ram": "off"}


@dataclass(frozen=True)
class Machine:
    """What a job may use. device, host: free bytes. sm: compute capability, None where it is no NVIDIA card.

    shared: the device's memory is the host's (a CPU), so that nothing is gained by moving things there.
    """

    name: str
    device: float
    host: float
    speeds: Speeds
    compiled: bool = True
    sm: int | None = 90
    shared: bool = False


# card: GB, dense 16-bit TFLOPS by its maker, GB/s of its link, compute capability: one of each size, for "--card 12"
CARDS: dict[int, tuple[str, float, float, int]] = {
    8: ("RTX 4060", 60, 12, 89), 10: ("RTX 3080", 60, 24, 86), 12: ("RTX 4070", 58, 24, 89), 16: ("RTX 4080", 97, 24, 89), 24: ("RTX 4090", 165, 24, 89),
    32: ("RTX 5090", 210, 50, 120), 48: ("L40S", 181, 24, 89), 80: ("H100", 989, 50, 90), 141: ("H200", 989, 50, 90),
}  # fmt: skip


def named_machine(gigabytes: int, ram: float = 64.0) -> Machine:
    """A card of a size, with so many GB of RAM free. Raises ConfigError for a size that is not in the table."""
    if gigabytes not in CARDS:
        raise ConfigError("plan.card", f"There is no card of {gigabytes} GB in the table.", f"Known: {', '.join(map(str, CARDS))}.")
    name, tflops, link, sm = CARDS[gigabytes]
    return Machine(f"{name} {gigabytes} GB", gigabytes * 1e9 * 0.98, ram * 1e9, Speeds(tflops, link * 1e9), sm=sm)


def this_machine(device: torch.device, limit_gb: float | None = None) -> Machine:
    """What is free here now. A card that the table does not know is rated by its number of multiprocessors."""
    import psutil

    ram = float(psutil.virtual_memory().available)
    facts = Facts.here(device)
    compiled = compile_capability(facts).action == "use"
    if device.type != "cuda":
        usable = min(ram * 0.8, limit_gb * 1e9) if limit_gb else ram * 0.8
        return Machine(device.type, usable, ram, Speeds(2.0, 1e10), compiled, None, shared=True)
    free, _ = torch.cuda.mem_get_info(device)
    free += torch.cuda.memory_reserved(device)
    properties = torch.cuda.get_device_properties(device)
    known = next((card for card in CARDS.values() if card[0].split()[-1] in properties.name), None)
    tflops = known[1] if known else properties.multi_processor_count * (7.5 if (facts.sm or 0) >= 90 else 1.3)
    usable = min(float(free), limit_gb * 1e9) if limit_gb else float(free)
    return Machine(properties.name, usable, ram, Speeds(tflops, (known[2] if known else 24) * 1e9), compiled, facts.sm)


@dataclass(frozen=True)
class Plan:
    """The choice, what it costs, and the acceleration section with every ``auto`` decided. why: in words."""

    fit: Fit
    cost: Cost
    section: AccelerationSection
    why: str
    layers: int

    def settings(self) -> dict[str, object]:
        """For the run's plan event."""
        return {
            **vars(self.fit), "layers": self.layers, "device_gib": round(self.cost.device / GIB, 2), "host_gib": round(self.cost.host / GIB, 2),
            "seconds_per_step": round(self.cost.seconds, 3), "upload_bound": self.cost.upload_bound,
        }  # fmt: skip


def lora_numbers(section: LoraSection, work: Work) -> int:
    """Trained numbers of a LoRA on the blocks' layers."""
    layers = {f"transformer_blocks.0.{name}": (out, inputs) for name, out, inputs in block_layers(work.config, work.audio)}
    streams = ("video", "audio") if work.audio else ("video",)
    try:
        chosen = select(layers, section.target_modules, section.exclude_modules, streams)
    except ConfigError:  # targets outside of the blocks, which are few; what matches nothing at all is refused with the network at hand
        return 0
    return work.config.num_layers * sum(section.rank_of(name) * sum(layers[name]) for name in chosen)


def choices(work: Work, machine: Machine, section: AccelerationSection, share_on_disk: float = 0.0) -> Iterator[Fit]:
    """Every fit that the section allows: what it states is kept, what it leaves to ``auto`` is tried.

    share_on_disk: of the streamed blocks, where the section leaves it open.
    """
    if machine.shared:
        section = section.model_copy(update={name: value for name, value in NOTHING_MOVED.items() if getattr(section, name) == "auto"})
    layers = work.config.num_layers
    streamed = (section.stream_blocks,) if section.stream_blocks != "auto" else tuple(sorted({0, *range(4, layers, 4), layers}))
    budgets = (section.activation_budget,) if section.activation_budget != "auto" else BUDGETS
    compiled = machine.compiled and section.compile != "off"
    graphs = machine.sm is not None and section.cuda_graphs != "off"
    groups = (section.accumulate_together,) if section.accumulate_together != "auto" else tuple(sorted({n for n in (1, 2, 4, 8) if n <= work.accumulation}))
    both = lambda choice: (False, True) if choice == "auto" else (choice == "on",)  # noqa: E731
    on_disk = lambda count: round(share_on_disk * count) if section.blocks_on_disk == "auto" else min(section.blocks_on_disk, count)  # noqa: E731
    for count, budget, optimizer, offload in product(streamed, budgets if compiled else (0.0,), both(section.optimizer_in_ram), both(section.offload_activations)):
        if offload and budget:
            continue
        for together in groups if count else groups[:1]:
            fit = Fit(
                section.quantization, min(count, layers), budget, offload, optimizer, compiled, section.float8_products, min(together, work.accumulation), on_disk(count), graphs
            )
            yield fit
            if section.cuda_graphs == "auto" and fit.recorded(work):
                yield replace(fit, graphs=False)


def make_plan(work: Work, machine: Machine, section: AccelerationSection) -> Plan:
    """The fastest fit within what is free; among equals (1 %) the one that leaves most in RAM, then on the card.

    Raises ConfigError ``plan.too_large`` naming what would fit.
    """
    rated: list[tuple[Fit, Cost]] = []
    fitting: list[tuple[Fit, Cost]] = []
    for share in (0.0, 0.25, 0.5, 0.75, 1.0):  # the disk is slow: only as much as RAM lacks
        rated += [(fit, cost(work, fit, machine.speeds)) for fit in choices(work, machine, section, share)]
        fitting = [(fit, c) for fit, c in rated if c.device <= machine.device - RESERVE and c.host <= machine.host]
        if fitting or section.blocks_on_disk != "auto":
            break
    if not fitting:
        raise too_large(work, machine, section, rated)
    quickest = min(c.seconds for _, c in fitting)
    fit, best = min(((f, c) for f, c in fitting if c.seconds <= quickest * 1.01), key=lambda item: (item[1].host, item[1].device))
    # where the largest passes are too long to be recorded, a plan of several together has no memory for recordings of shorter ones
    graphs = fit.graphs and not fit.on_disk and (section.cuda_graphs == "on" or fit.together == 1 or fit.recorded(work))
    settled = section.model_copy(
        update={
            "stream_blocks": fit.streamed, "activation_budget": fit.budget, "offload_activations": "on" if fit.offload else "off",
            "optimizer_in_ram": "on" if fit.optimizer_in_ram else "off", "activation_checkpointing": "on",
            "accumulate_together": fit.together, "blocks_on_disk": fit.on_disk,
            **({} if graphs else {"cuda_graphs": "off"}),
        }
    )  # fmt: skip
    return Plan(fit, best, settled, in_words(work, machine, fit, best, rated), work.config.num_layers)


def in_words(work: Work, machine: Machine, fit: Fit, best: Cost, rated: list[tuple[Fit, Cost]]) -> str:
    """What was chosen and what kept it from more, in a line or two."""
    text = f"{fit.words(work.config.num_layers)}: about {best.device / GIB:.1f} of {machine.device / GIB:.1f} GiB on {machine.name}, {best.host / GIB:.0f} GiB of RAM, {best.seconds:.2f} s a step"
    if fit.on_disk:
        text += f" (all blocks in RAM would need {max(c.host for f, c in rated if f.streamed == fit.streamed) / GIB:.0f} GiB)"
    fastest_fit, fastest = min(rated, key=lambda item: item[1].seconds)
    if fastest.seconds < best.seconds * 0.98:
        text += f". Faster would be {fastest_fit.words(work.config.num_layers)} ({fastest.seconds:.2f} s), which needs {fastest.device / GIB:.0f} GiB"
    return text + (". Uploads are what it waits for." if best.upload_bound else ".")


def too_large(work: Work, machine: Machine, section: AccelerationSection, rated: list[tuple[Fit, Cost]]) -> ConfigError:
    """The refusal, with what would fit: fewer bits, the smallest need, or fewer tokens."""
    least_fit, least = min(rated, key=lambda item: item[1].device)
    hints = [f"The least it needs so is {least.device / GIB:.1f} GiB of the card and {least.host / GIB:.0f} GiB of RAM ({least_fit.words(work.config.num_layers)})."]
    if section.quantization is None:
        hints.append("With quantization: int8 the weights take half.")
    for share in (0.75, 0.5, 0.25):
        smaller = replace(work, video_tokens=int(work.video_tokens * share))
        fits = [c for f in choices(smaller, machine, section, 1.0) if (c := cost(smaller, f, machine.speeds)).device <= machine.device - RESERVE and c.host <= machine.host]
        if fits:
            hints.append(f"Clips of at most {smaller.video_tokens} latent tokens would fit ({work.video_tokens} now).")
            break
    else:
        halved = replace(work, lora=work.lora // 2)
        saved = (cost(work, least_fit, machine.speeds).device - cost(halved, least_fit, machine.speeds).device) / GIB
        hints.append(f"Half the LoRA's rank would save {saved:.1f} GiB.")
    return ConfigError("plan.too_large", f"This training does not fit: {machine.device / GIB:.1f} GiB of the card and {machine.host / GIB:.0f} GiB of RAM are free.", " ".join(hints))


# -- going on after running out of memory --
def lower(section: AccelerationSection, layers: int, notch: int, chosen: dict[str, object]) -> tuple[AccelerationSection, str] | None:
    """The section with less memory on the card than ``chosen`` (the last plan's settings); None when nothing is left.

    Notch 1 keeps no activations and streams half of what is on the card, notch 2 all of it, notch 3 puts the inputs and the
    optimizer in RAM too. From notch 2 on no passes are recorded.
    """
    streamed = int(chosen.get("streamed", 0) or 0)
    more = {1: streamed + (layers - streamed + 1) // 2}.get(notch, layers)
    update: dict[str, object] = {"activation_budget": 0.0, "activation_checkpointing": "on", "keep_activations_of": 0, "stream_blocks": more, "accumulate_together": 1}
    if notch >= 2:
        update |= {"optimizer_in_ram": "on", "cuda_graphs": "off"}
    if notch >= 3:
        update["offload_activations"] = "on"
    lowered = section.model_copy(update=update)
    if lowered == section:
        return None
    words = [f"{more} of {layers} blocks streamed", "all activations recomputed", *(["optimizer in RAM"] if notch >= 2 else []), *(["block inputs in RAM"] if notch >= 3 else [])]
    return lowered, ", ".join(words)


def lower_plan(run: RunDir, notch: int) -> str | None:
    """Edit a run's saved training job to need less memory, for :class:`launch.Launch`; None when nothing is left to lower."""
    job = run.job_path("train")
    if not job.is_file():
        return None
    config = TrainConfig.load(job)
    plan = run.history().plan
    chosen = dict(plan.settings) if plan is not None else {}
    frozen = config.model.training_mode == "lora" and config.lora is not None and config.lora.kind in ("lora", "rslora")
    layers = int(chosen.get("layers", 48) or 48)
    found = lower(config.acceleration, layers, notch, chosen) if frozen else None
    if found is None:
        return None
    section, words = found
    if config.optimization.optimizer_type != "adamw":
        section = section.model_copy(update={"optimizer_in_ram": config.acceleration.optimizer_in_ram})
    config.model_copy(update={"acceleration": section}).save(job)
    return words


# -- in a run, and for a person --
def work_of(config: TrainConfig, transformer: TransformerConfig, *, video_tokens: int, audio_tokens: int, text_tokens: int = 1024) -> Work:
    """The work of a job whose largest clip has so many tokens in each stream, references included."""
    optimization = config.optimization
    work = Work(transformer, video_tokens, audio_tokens, text_tokens, optimization.batch_size, optimization.gradient_accumulation_steps)
    return replace(work, lora=lora_numbers(config.lora, work)) if config.lora is not None else work


def plans(config: TrainConfig) -> bool:
    """Whether there is anything to plan: a LoRA that our own layers compute. Other trainings keep their base on the card."""
    return config.model.training_mode == "lora" and config.lora is not None and config.lora.kind in ("lora", "rslora")


def plan_here(config: TrainConfig, work: Work, device: torch.device) -> Plan | None:
    """The plan of a job on the device it will run on; None where there is nothing to plan (other adapters; no card and no limit)."""
    if not plans(config) or (device.type != "cuda" and config.acceleration.memory_limit_gb is None):
        return None
    return make_plan(work, this_machine(device, config.acceleration.memory_limit_gb), open_choices(config))


def open_choices(config: TrainConfig) -> AccelerationSection:
    """The acceleration section with what an adapter's dropout rules out decided: its masks are drawn anew in every micro-step."""
    section = config.acceleration
    if config.lora is None or config.lora.dropout == 0:
        return section
    together = {} if section.accumulate_together != "auto" else {"accumulate_together": 1}
    return section.model_copy(update={"cuda_graphs": "off", **together})


def has_auto(section: AccelerationSection) -> bool:
    """Whether the section leaves anything to the planner."""
    return "auto" in (section.stream_blocks, section.activation_budget, section.offload_activations, section.optimizer_in_ram)


def clip_tokens(size: str, transformer: TransformerConfig) -> tuple[int, int]:
    """(video, audio) tokens of a clip of WIDTHxHEIGHTxFRAMES pixels at 24 frames a second."""
    try:
        width, height, frames = (int(part) for part in size.lower().split("x"))
    except ValueError as error:
        raise ConfigError("plan.size", f"{size!r} is no size.", "Give WIDTHxHEIGHTxFRAMES, such as 768x512x49.") from error
    video = ((frames - 1) // 8 + 1) * (height // 32) * (width // 32)
    return video, max(1, round(frames / 24 * 25)) if transformer.has_audio else 0
