"""Sampling: from noise to latents in Euler or ancestral Euler steps, with guidance and every condition of training."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass, fields

import torch
from torch import Tensor, nn

from ..conditioning.state import LatentState
from ..errors import ConfigError
from ..geometry import Latents
from ..models.families import TransformerConfig
from ..models.modality import Modality
from ..models.transformer import Perturbations
from ..text import Context
from .guidance import StreamGuidance
from .schedule import Schedule


@dataclass(frozen=True)
class Noise:
    """Start noise of each stream [B, T, C] (all tokens, or the targets alone), None for a stream left out."""

    video: Tensor | None
    audio: Tensor | None

    @classmethod
    def drawn(cls, video: LatentState | None, audio: LatentState | None, generator: torch.Generator) -> Noise:
        """Standard normal noise, video first, then audio, on the generator's device (the official order)."""
        draw = lambda s: None if s is None else torch.randn(s.clean.shape, generator=generator, device=generator.device).to(s.device)  # noqa: E731
        return cls(draw(video), draw(audio))


@dataclass(frozen=True)
class StepView:
    """What a step left, for progress and previews: step (from 1) of total, its next noise level, tokens [B, T, C]."""

    step: int
    total: int
    sigma: float
    video: Tensor | None
    audio: Tensor | None


@dataclass(frozen=True)
class Sampled:
    """The generated (or given) latents of each stream, references cut off."""

    video: Latents | None
    audio: Latents | None


@dataclass(frozen=True)
class _Pass:
    """One forward of a step: its text and what it leaves out."""

    name: str
    context: Context
    perturbations: Perturbations | None = None


@torch.no_grad()
def denoise(
    transformer: nn.Module,
    *,
    video: LatentState | None,
    audio: LatentState | None,
    positive: Context,
    schedule: Schedule,
    negative: Context | None = None,
    guidance: StreamGuidance | None = None,
    noise: Noise | None = None,
    generator: torch.Generator | None = None,
    batched: bool = True,
    on_step: Callable[[StepView], None] | None = None,
    check: Callable[[], None] | None = None,
    config: TransformerConfig | None = None,
) -> Sampled:
    """Run a schedule on the streams given.

    A frozen state takes part clean (timestep 0, sigma 0). noise: the start noise, or drawn from ``generator``, which
    ancestral steps go on drawing from. batched: guidance passes of a step in one forward (more memory, less time).
    on_step is called after each step, check before each forward; either may raise to stop. config: of a wrapped model.
    """
    config = config or transformer.config
    states = {m: s for m, s in (("video", video), ("audio", audio)) if s is not None}
    free = tuple(m for m, s in states.items() if s.levels != (0.0,))
    guidance = (guidance or StreamGuidance()).settled(free, tuple(states))
    passes = _passes(guidance, free, positive, negative, config.num_layers, next(iter(states.values())).batch)
    if generator is None:
        assert noise is not None, "either noise or a generator"
        if schedule.sampler == "euler_ancestral":
            raise ConfigError("sampling.generator", "Ancestral steps need a seed beside the start noise.", "Give a seed, or use the sampler euler.")
    start = noise or Noise.drawn(video, audio, generator)
    first = schedule.sigmas[0]
    tokens = {m: s.noised(getattr(start, m).to(s.clean), _sigma(s, first)) if m in free else s.clean for m, s in states.items()}

    with evaluating(transformer):
        for index, (sigma, following) in enumerate(zip(schedule.sigmas, schedule.sigmas[1:])):
            given = {m: (s, tokens[m], _sigma(s, sigma if m in free else 0.0)) for m, s in states.items()}
            results = _run(transformer, given, passes, batched, check)
            for modality in free:
                state = states[modality]
                guided = guidance[modality].combine(*(results[n].get(modality) for n in ("cond", "text", "perturbed", "isolated")))
                tokens[modality] = _step(schedule, state, tokens[modality], state.blended(guided), sigma, following, generator)
            if on_step is not None:
                on_step(StepView(index + 1, schedule.steps, following, tokens.get("video"), tokens.get("audio")))
    done = {m: s.targets(tokens[m]) for m, s in states.items()}
    return Sampled(done.get("video"), done.get("audio"))


def _passes(guidance: StreamGuidance, free: tuple[str, ...], positive: Context, negative: Context | None, layers: int, batch: int) -> list[_Pass]:
    """The forwards of a step; those with neutral scales in every stream are left out."""
    scales = {m: guidance[m] for m in free}
    passes = [_Pass("cond", positive)]
    if any(g.cfg != 1 for g in scales.values()):
        if negative is None:
            raise ConfigError("sampling.negative", "Classifier-free guidance needs a negative prompt.", "Give a negative prompt, or set both cfg scales to 1.")
        passes.append(_Pass("text", negative))
    skipped = {m: m in scales and scales[m].stg != 0 for m in ("video", "audio")}
    if any(skipped.values()):
        passes.append(_Pass("perturbed", positive, Perturbations.self_attention(layers, batch, guidance.blocks(layers), **skipped)))
    if any(g.modality != 1 for g in scales.values()):
        passes.append(_Pass("isolated", positive, Perturbations.isolated(layers, batch)))
    return passes


Given = dict[str, tuple[LatentState, Tensor, Tensor]]
"""By stream: its state, its tokens now, and its sigma [B]."""


def _run(transformer: nn.Module, given: Given, passes: list[_Pass], batched: bool, check: Callable[[], None] | None) -> dict[str, dict[str, Tensor]]:
    """Clean predictions x - t*v of every pass and stream, float32; passes that were left out are empty."""
    results: dict[str, dict[str, Tensor]] = {name: {} for name in ("cond", "text", "perturbed", "isolated")}
    groups = [passes] if batched and _same_shape([p.context for p in passes]) else [[p] for p in passes]
    for group in groups:
        if check is not None:
            check()
        modalities = {m: _joined([s.modality(x, sigma, p.context) for p in group]) for m, (s, x, sigma) in given.items()}
        batch = next(iter(given.values()))[1].shape[0]
        velocity = transformer(modalities.get("video"), modalities.get("audio"), _joined_perturbations(group, batch))
        for modality, v in zip(("video", "audio"), velocity):
            if v is None:
                continue
            state, x, sigma = given[modality]
            times = state.timesteps(sigma)[..., None]
            for place, one in enumerate(group):
                results[one.name][modality] = x - times * v[place * batch : (place + 1) * batch].float()
    return results


def _step(schedule: Schedule, state: LatentState, x: Tensor, clean: Tensor, sigma: float, following: float, generator: torch.Generator | None) -> Tensor:
    """One step of a stream from noise level ``sigma`` to ``following``, given its clean prediction."""
    if schedule.sampler == "euler" or following == 0:
        return x + (x - clean) / sigma * (following - sigma)
    fresh = torch.randn(x.shape, generator=generator, device=generator.device).to(x)
    renewed = ancestral_step(x, clean, fresh, sigma, following, schedule.eta)
    plain = x + (x - clean) / sigma * (following - sigma)
    return plain + state.denoise[..., None] * (renewed - plain)  # what is given gets no new noise


def ancestral_step(x: Tensor, clean: Tensor, fresh: Tensor, sigma: float, following: float, eta: float) -> Tensor:
    """An Euler step below ``following`` and back up with fresh noise, so that the noise level is ``following``.

    down = following * (1 + eta * (following / sigma - 1)); x goes to (1 - down)*clean + down*noise, is scaled by
    a = (1 - following) / (1 - down), and sqrt(following^2 - (a*down)^2) of fresh noise fills up the rest.
    """
    down = following * (1 + eta * (following / sigma - 1))
    scale = (1 - following) / (1 - down)
    x = clean + (x - clean) * (down / sigma)
    return scale * x + max(following**2 - (scale * down) ** 2, 0.0) ** 0.5 * fresh


def _sigma(state: LatentState, level: float) -> Tensor:
    return torch.full((state.batch,), level, device=state.device)


def _same_shape(contexts: list[Context]) -> bool:
    """Whether texts can be stacked as they are (padded to one length, all with a mask or all without)."""
    shape = lambda c: [None if t is None else tuple(t.shape) for t in (c.video, c.audio, c.mask)]  # noqa: E731
    return all(shape(c) == shape(contexts[0]) for c in contexts)


def _joined(parts: list[Modality]) -> Modality:
    """The passes' modalities stacked along the batch."""
    if len(parts) == 1:
        return parts[0]
    values = {f.name: [getattr(p, f.name) for p in parts] for f in fields(Modality)}
    return Modality(**{name: None if v[0] is None else torch.cat(v) for name, v in values.items()})


def _joined_perturbations(group: list[_Pass], batch: int) -> Perturbations | None:
    """Keep masks [blocks, passes * B]; ones for passes that skip nothing."""
    if all(p.perturbations is None for p in group):
        return None
    masks = {}
    for field in fields(Perturbations):
        parts = [None if p.perturbations is None else getattr(p.perturbations, field.name) for p in group]
        some = next((p for p in parts if p is not None), None)
        masks[field.name] = None if some is None else torch.cat([torch.ones_like(some) if p is None else p for p in parts], dim=1)
    return Perturbations(**masks)


@contextmanager
def evaluating(module: nn.Module):
    """Eval mode (no dropout) for the time of the block, every submodule's own mode restored after."""
    modes = [(m, m.training) for m in module.modules() if m.training]
    module.eval()
    try:
        yield
    finally:
        for m, training in modes:
            m.training = training
