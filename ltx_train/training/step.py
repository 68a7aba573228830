"""TrainStep: one micro-batch to one loss, with keyed randomness and without waiting for the accelerator."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from ..conditioning.modes import TrainingStrategySection
from ..conditioning.state import LatentState
from ..errors import DataError
from ..models.families import TransformerConfig
from ..models.modality import Modality
from ..models.transformer import Perturbations
from ..transfer import upload
from .flow_matching import FlowMatchingSection, ModalityBalance
from .randomness import KeyedDraws, keyed_generator

if TYPE_CHECKING:
    from ..data.batches import Batch

SHARED = "shared"


@dataclass(frozen=True)
class StepOutput:
    """What a micro-batch gave. All tensors are on the device; reading them is the caller's choice of moment.

    loss: scalar to run backward from. video_loss, audio_loss: [B] plain losses before any weighting, detached, None for
    a stream without a loss. video_sigma, audio_sigma: [B]. video_counts, audio_counts: [B] bool, False where a sample
    has no such loss (a silent clip, a clip that is given whole, a regularisation clip). regularisation_loss: [B] the sum of
    both streams' losses of regularisation clips, which regularisation_counts [B] marks; None where there is none.
    tokens: all tokens of the micro-batch.
    """

    loss: Tensor
    video_loss: Tensor | None
    audio_loss: Tensor | None
    video_sigma: Tensor | None
    audio_sigma: Tensor | None
    video_counts: Tensor | None
    audio_counts: Tensor | None
    tokens: int
    regularisation_loss: Tensor | None = None
    regularisation_counts: Tensor | None = None

    def per_modality(self) -> dict[str, tuple[Tensor, Tensor, Tensor]]:
        """Of each generated stream: losses [B], noise levels [B] and whether they count [B], for the step's report."""
        found = {m: (getattr(self, f"{m}_loss"), getattr(self, f"{m}_sigma"), getattr(self, f"{m}_counts")) for m in ("video", "audio")}
        sigma = self.audio_sigma if self.video_sigma is None else self.video_sigma
        found["regularisation"] = (self.regularisation_loss, sigma, self.regularisation_counts)
        return {m: values for m, values in found.items() if values[0] is not None}


@dataclass(frozen=True)
class _Prepared:
    """A micro-batch ready for the transformer."""

    batch: Batch
    streams: Mapping[str, _Stream]
    given: Mapping[str, Modality]
    silent: Perturbations | None
    prior: Mapping[str, Tensor | None]

    @property
    def inputs(self) -> tuple[Modality | None, Modality | None, Perturbations | None]:
        return self.given.get("video"), self.given.get("audio"), self.silent


@dataclass(frozen=True)
class _Stream:
    """One stream of a micro-batch, noised: its state, noise level [B], noise and noisy tokens [B, T, C]."""

    state: LatentState
    sigma: Tensor
    noise: Tensor | None
    tokens: Tensor

    @property
    def generated(self) -> bool:
        return self.noise is not None


class TrainStep:
    """Computes the loss of a micro-batch.

    transformer: called as ``transformer(video, audio, perturbations)``; may be wrapped for several processes, then
    ``config`` says what the bare one is. balance: the running balance of the streams, fed by the trainer.
    base: context in which the transformer is the base model, for samples with a prior.
    """

    def __init__(
        self,
        transformer: nn.Module,
        strategy: TrainingStrategySection,
        flow_matching: FlowMatchingSection,
        *,
        config: TransformerConfig | None = None,
        balance: ModalityBalance | None = None,
        base: Callable[[], AbstractContextManager[None]] | None = None,
    ) -> None:
        self.transformer, self.strategy, self.objective, self.balance, self.base = transformer, strategy, flow_matching, balance, base
        self.config = config or transformer.config
        self._modalities = strategy.modalities()
        self._generated = strategy.streams().generated
        self._samplers = {m: flow_matching.sampler(m) for m in self._generated}
        shared = strategy.shared_sigma if flow_matching.shared_sigma is None else flow_matching.shared_sigma
        self._shared = shared and len(self._generated) == 2

    def __call__(self, batch: Batch, *, seed: int, step: int, slot: int | Sequence[int], sigma: float | Mapping[str, float] | None = None) -> StepOutput:
        """The loss of ``batch`` at global step ``step``.

        slot: index of the batch's first sample in the whole global batch (rank, micro-step and position folded in; the
        others follow), or each sample's own. sigma: fixed noise levels instead of drawn ones, for held-out losses.
        """
        made = self._prepare(batch, seed, step, slot, sigma)
        return self._output(made, self.transformer(*made.inputs))

    def together(self, batches: Sequence[Batch], *, seed: int, step: int, slots: Sequence[Sequence[int]]) -> list[StepOutput]:
        """The same of several micro-batches that go through each block together; backward must be run once for all of them."""
        made = [self._prepare(batch, seed, step, own, None) for batch, own in zip(batches, slots)]
        return [self._output(one, velocity) for one, velocity in zip(made, self.transformer.passes([one.inputs for one in made]))]

    def _prepare(self, batch: Batch, seed: int, step: int, slot: int | Sequence[int], sigma: float | Mapping[str, float] | None) -> _Prepared:
        states = self._states(batch, seed, step, slots := _slots(slot, len(batch.weight)))
        levels = self._levels(states, seed, step, slots, sigma)
        streams = {m: self._noised(m, states[m], levels, seed, step, slots) for m in states}
        given = {m: s.state.modality(s.tokens, s.sigma, batch.context) for m, s in streams.items()}
        silent = self._silent(batch, streams)
        return _Prepared(batch, streams, given, silent, self._prior(batch, given, silent))

    def _prior(self, batch: Batch, given: Mapping[str, Modality], silent: Perturbations | None) -> dict[str, Tensor | None]:
        """The base model's own velocities for the same noisy input, where a sample trains towards them; else empty."""
        if batch.prior is None:
            return {}
        assert self.base is not None, "samples with a prior need to know how the base model is had"
        with torch.no_grad(), self.base():
            return dict(zip(("video", "audio"), self.transformer(given.get("video"), given.get("audio"), silent)))

    def _states(self, batch: Batch, seed: int, step: int, slots: Sequence[int]) -> dict[str, LatentState]:
        """The states of the streams that the samples have: stills and clips of sound alone train their own stream where it is generated."""
        states = {}
        there = [m for m in self._generated if getattr(batch, m) is not None]
        for modality, config in self._modalities.items():
            latents = getattr(batch, modality)
            if latents is None:
                if there and modality in self._generated:
                    continue
                raise DataError("batch.stream_missing", f"The strategy uses {modality}, but the samples {', '.join(batch.ids)} have none.", "Preprocess the dataset for this strategy.")
            draws = KeyedDraws(seed, step, slots, modality)
            states[modality] = config.state(latents, batch.roles, draws, keyframe_marker=self.config.keyframe_embedding)
        return states

    def _levels(self, states, seed: int, step: int, slots: Sequence[int], fixed: float | Mapping[str, float] | None) -> dict[str, list[float]]:
        """Noise levels of each generated stream, one a sample, on the host. The shift counts the targets alone."""
        if fixed is not None:
            return {m: [fixed[m] if isinstance(fixed, Mapping) else fixed] * len(slots) for m in self._generated if m in states}
        levels = {}
        for modality in self._generated:
            if modality not in states:
                continue
            if self._shared and levels:
                levels[modality] = next(iter(levels.values()))
                continue
            key = SHARED if self._shared else modality
            generators = (keyed_generator(seed, step, slot, key, "sigma") for slot in slots)
            levels[modality] = [self._samplers[modality].sample(states[modality].num_target, g) for g in generators]
        return levels

    def _noised(self, modality: str, state: LatentState, levels: Mapping[str, list[float]], seed: int, step: int, slots: Sequence[int]) -> _Stream:
        if modality not in levels:
            return _Stream(state, torch.zeros(state.batch, device=state.device), None, state.clean)
        sigma = upload(torch.tensor(levels[modality]), state.device)
        shape = (state.num_target, state.clean.shape[2])
        draw = lambda slot: torch.randn(shape, generator=keyed_generator(seed, step, slot, modality, device=state.device), device=state.device)  # noqa: E731
        noise = torch.stack([draw(slot) for slot in slots])
        return _Stream(state, sigma, noise, state.noised(noise, sigma))

    def _silent(self, batch: Batch, streams: Mapping[str, _Stream]) -> Perturbations | None:
        """Samples without sound carry filler in the sound stream: the video does not look at it.

        ``audio_present`` is best kept on the CPU: there it is known without waiting for the accelerator.
        """
        if len(streams) < 2 or bool((present := batch.audio_present.cpu()).all()):
            return None
        return Perturbations(skip_a2v_cross_attn=present.float().expand(self.config.num_layers, -1))

    def _output(self, made: _Prepared, velocities: tuple[Tensor | None, Tensor | None]) -> StepOutput:
        batch, streams, prior = made.batch, made.streams, made.prior
        velocity = dict(zip(("video", "audio"), velocities))
        losses, counts, total = {}, {}, 0.0
        general = upload(batch.regularisation, batch.weight.device)
        for modality, stream in streams.items():
            if not stream.generated:
                continue
            state = stream.state
            weight = state.loss_weight[:, : state.num_target]
            if modality == "video" and "loss_mask" in batch.roles:  # transparent parts of the pictures do not count
                weight = weight * batch.roles["loss_mask"].reshape(weight.shape).to(weight)
            if modality == "audio":
                weight = weight * upload(batch.audio_present, weight.device, weight.dtype)[:, None]
            prediction = velocity[modality][:, : state.num_target]
            target = state.target(stream.noise)
            if prior:
                own = upload(batch.prior, target.device)[:, None, None]
                target = torch.where(own, prior[modality][:, : state.num_target].to(target.dtype), target)
            loss = self.objective.sample_loss(prediction, target, weight)
            total = total + self._factor(modality) * self.objective.sigma_weight(stream.sigma) * loss
            losses[modality], counts[modality] = loss.detach(), (weight > 0).any(dim=1)
        regularised = None if general is None else (sum(losses.values()), general & torch.stack(list(counts.values())).any(0))
        if general is not None:
            counts = {m: c & ~general for m, c in counts.items()}
        sigma = {m: s.sigma for m, s in streams.items() if s.generated}
        return StepOutput(
            loss=(total * self._weight(batch, general).to(total)).mean(),
            video_loss=losses.get("video"),
            audio_loss=losses.get("audio"),
            video_sigma=sigma.get("video"),
            audio_sigma=sigma.get("audio"),
            video_counts=counts.get("video"),
            audio_counts=counts.get("audio"),
            tokens=sum(s.state.batch * s.state.tokens for s in streams.values()),
            regularisation_loss=None if regularised is None else regularised[0],
            regularisation_counts=None if regularised is None else regularised[1],
        )

    def _weight(self, batch: Batch, general: Tensor | None) -> Tensor:
        """[B]: the samples' own weights, times the objective's for regularisation clips."""
        return batch.weight if general is None else torch.where(general, batch.weight * self.objective.regularisation_weight, batch.weight)

    def _factor(self, modality: str) -> float | Tensor:
        """Weight of a stream's loss: as set, times the running balance for sound beside video."""
        if modality == "video":
            return self.objective.video_weight
        balanced = self.balance is not None and len(self._generated) == 2
        return self.objective.audio_weight * (self.balance.factor() if balanced else 1.0)


def _slots(slot: int | Sequence[int], batch: int) -> tuple[int, ...]:
    slots = tuple(range(slot, slot + batch)) if isinstance(slot, int) else tuple(slot)
    assert len(slots) == batch, f"{len(slots)} slots for {batch} samples"
    return slots
