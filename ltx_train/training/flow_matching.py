"""The objective: samplers of the noise level, losses, weighting by noise level, and the balance of the two streams."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any, ClassVar, Literal

import torch
from pydantic import Field, field_validator, model_validator
from torch import Tensor

from ..section import Section, parse_parameters


# ---- samplers: one noise level of one sample, from its own generator, in double precision on the host ----
class UniformSampler(Section):
    """U[min_value, max_value]."""

    mode: ClassVar[str] = "uniform"
    min_value: float = Field(0.0, ge=0, le=1)
    max_value: float = Field(1.0, ge=0, le=1)

    @model_validator(mode="after")
    def _ordered(self) -> UniformSampler:
        if self.min_value > self.max_value:
            raise ValueError(f"min_value {self.min_value} is above max_value {self.max_value}")
        return self

    def sample(self, tokens: int, generator: torch.Generator) -> float:
        return self.min_value + (self.max_value - self.min_value) * _uniform(generator)


class ShiftedLogitNormalSampler(Section):
    """Logit-normal, shifted by the number of target tokens and stretched to reach 1 (the official sampler).

    mu(n) = 0.95 + (n - 1024) * (2.05 - 0.95) / (4096 - 1024); s = sigmoid(mu + std * N(0, 1)) between its 0.5 % and
    99.9 % quantiles, mapped to 0..1, folded at eps; with probability uniform_prob U(eps, 1) instead.
    Written so that it is finite at any length (the official single precision form gives NaN from about 52,000 tokens).
    """

    mode: ClassVar[str] = "shifted_logit_normal"
    std: float = Field(1.0, ge=1e-6, description="Spread of the logit.")
    eps: float = Field(1e-3, ge=0, lt=0.5, description="Levels below are folded upwards.")
    uniform_prob: float = Field(0.1, ge=0, le=1, description="Share of draws that are uniform instead.")
    min_tokens: int | None = Field(None, ge=1, description="Shift short clips as if they had at least so many tokens.")
    max_tokens: int | None = Field(None, ge=1, description="Shift long clips as if they had at most so many tokens (4096 = the inference schedule's shift).")

    @model_validator(mode="after")
    def _ordered(self) -> ShiftedLogitNormalSampler:
        if self.min_tokens and self.max_tokens and self.min_tokens > self.max_tokens:
            raise ValueError(f"min_tokens {self.min_tokens} is above max_tokens {self.max_tokens}")
        return self

    def shift(self, tokens: int) -> float:
        """mu of a clip of so many target tokens."""
        tokens = max(tokens, self.min_tokens or 0)
        tokens = min(tokens, self.max_tokens or tokens)
        return 0.95 + (tokens - 1024) * (2.05 - 0.95) / (4096 - 1024)

    def stretched(self, tokens: int, normal: float) -> float:
        """The noise level of one standard normal draw, before the uniform mix."""
        mu = self.shift(tokens)
        low, high, x = mu - 2.5758 * self.std, mu + 3.0902 * self.std, mu + self.std * normal
        # (s - lo) / (hi - lo) of sigmoids by ratios on the side where they do not saturate
        side = -1.0 if mu > 0 else 1.0
        ratio = lambda value: math.expm1(_log_sigmoid(side * value) - _log_sigmoid(side * low))  # noqa: E731
        level = ratio(x) / ratio(high)
        if level < self.eps:
            level = 2 * self.eps - level
        return min(max(level, 0.0), 1.0)

    def sample(self, tokens: int, generator: torch.Generator) -> float:
        normal = float(torch.randn((), generator=generator, dtype=torch.float64))
        choice, other = _uniform(generator), _uniform(generator)
        if choice < self.uniform_prob:
            return self.eps + (1 - self.eps) * other
        return self.stretched(tokens, normal)


class LogitNormalSampler(Section):
    """sigmoid(mean + std * N(0, 1)): no shift by length."""

    mode: ClassVar[str] = "logit_normal"
    mean: float = 0.0
    std: float = Field(1.0, gt=0)

    def sample(self, tokens: int, generator: torch.Generator) -> float:
        return math.exp(_log_sigmoid(self.mean + self.std * float(torch.randn((), generator=generator, dtype=torch.float64))))


class FixedSampler(Section):
    """One of a list of noise levels, each equally likely (a distilled model's own levels, or one level)."""

    mode: ClassVar[str] = "fixed"
    values: tuple[float, ...] = Field(min_length=1, description="Noise levels in 0..1.")

    @field_validator("values")
    @classmethod
    def _levels(cls, values: tuple[float, ...]) -> tuple[float, ...]:
        if any(not 0 <= v <= 1 for v in values):
            raise ValueError(f"values {list(values)} must lie in 0..1")
        return values

    def sample(self, tokens: int, generator: torch.Generator) -> float:
        return self.values[int(torch.randint(len(self.values), (), generator=generator))]


SAMPLERS: dict[str, type[Section]] = {s.mode: s for s in (UniformSampler, ShiftedLogitNormalSampler, LogitNormalSampler, FixedSampler)}
Sampler = UniformSampler | ShiftedLogitNormalSampler | LogitNormalSampler | FixedSampler


def _only_levels(sampler: Sampler) -> tuple[float, ...]:
    """The noise levels of a sampler that draws from a list or always the same; nan stands for any others."""
    if isinstance(sampler, FixedSampler):
        return sampler.values
    if isinstance(sampler, UniformSampler) and sampler.min_value == sampler.max_value:
        return (sampler.min_value,)
    return (math.nan,)


def _uniform(generator: torch.Generator) -> float:
    return float(torch.rand((), generator=generator, dtype=torch.float64))


def _log_sigmoid(x: float) -> float:
    return -math.log1p(math.exp(-x)) if x > 0 else x - math.log1p(math.exp(x))


# ---- losses: [B] per sample, a mean over the tokens that count and the channels ----
def token_error(prediction: Tensor, target: Tensor, kind: str, delta: float) -> Tensor:
    """[B, T] error of each token, a mean over its channels, in float32.

    mse: (p - t)^2. huber: 2*delta*(sqrt((p - t)^2 + delta^2) - delta), which is the square for small and 2*delta times
    the absolute error for large differences (pseudo-Huber, scaled to meet mse).
    """
    square = (prediction.float() - target.float()).square()
    if kind == "huber":
        square = 2 * delta * square / ((square + delta * delta).sqrt() + delta)  # the same without cancellation
    return square.mean(dim=-1)


def masked_mean(error: Tensor, weight: Tensor) -> Tensor:
    """[B]: mean(weight * error) / mean(weight) over the tokens (official rule); 0 where no token counts. Both [B, T]."""
    return (error * weight).mean(dim=1) / weight.mean(dim=1).clamp(min=1e-8)


def min_snr_weight(sigma: Tensor, gamma: float) -> Tensor:
    """[B]: min(SNR, gamma) * sigma^2 with SNR = ((1 - sigma) / sigma)^2.

    Min-SNR weighs the error of the clean latent by min(SNR, gamma); with x0 = x - sigma*v a velocity error counts
    sigma^2 times there. As min((1 - sigma)^2, gamma * sigma^2) it needs no division.
    """
    return torch.minimum((1 - sigma).square(), gamma * sigma.square())


class FlowMatchingSection(Section):
    """The objective of a run. The first two fields are the official ones."""

    timestep_sampling_mode: Literal["uniform", "shifted_logit_normal", "logit_normal", "fixed"] = Field(
        "shifted_logit_normal", description="How noise levels are drawn."
    )
    timestep_sampling_params: dict[str, Any] = Field(default_factory=dict, description="Parameters of that sampler.")
    audio_timestep_sampling_mode: Literal["uniform", "shifted_logit_normal", "logit_normal", "fixed"] | None = Field(
        None, description="Another sampler for sound; None uses the same."
    )
    audio_timestep_sampling_params: dict[str, Any] = Field(default_factory=dict, description="Parameters of the sound's own sampler.")
    shared_sigma: bool | None = Field(None, description="One noise level for video and sound (by the video's length), or one each; None: as the strategy does.")
    loss: Literal["mse", "huber"] = Field("mse", description="Error of the velocity.")
    huber_delta: float = Field(1.0, gt=0, le=1e6, description="Where the Huber loss turns from square to linear.")
    weighting: Literal["none", "min_snr"] = Field("none", description="Weight of a sample by its noise level.")
    min_snr_gamma: float = Field(5.0, gt=0, description="Cap of the signal to noise ratio in min_snr.")
    video_weight: float = Field(1.0, ge=0, description="Weight of the video loss.")
    audio_weight: float = Field(1.0, ge=0, description="Weight of the sound loss.")
    regularisation_weight: float = Field(1.0, ge=0, description="Weight of the loss of regularisation clips, on top of their source's own.")
    balance: Literal["none", "auto"] = Field("none", description="auto: scale the sound loss to the video loss by their running means.")
    balance_min: float = Field(0.1, gt=0, description="Least factor of the automatic balance.")
    balance_max: float = Field(10.0, gt=0, description="Greatest factor of the automatic balance.")
    balance_decay: float = Field(0.99, gt=0, lt=1, description="Memory of the running means, per step.")

    @model_validator(mode="after")
    def _samplers(self) -> FlowMatchingSection:
        for modality in ("video", "audio"):
            self.sampler(modality)  # refuses unknown parameters by name
        if self.audio_timestep_sampling_params and self.audio_timestep_sampling_mode is None:
            raise ValueError("audio_timestep_sampling_params needs audio_timestep_sampling_mode")
        if self.balance_min > self.balance_max:
            raise ValueError(f"balance_min {self.balance_min} is above balance_max {self.balance_max}")
        return self

    def nothing_counts(self, generated: Iterable[str]) -> str | None:
        """Why nothing is learned of the streams that are generated; None where something is."""
        generated = list(generated)
        weighed = [stream for stream in generated if getattr(self, f"{stream}_weight")]
        if not weighed:
            return f"{' and '.join(f'{stream}_weight' for stream in generated)} 0: nothing that is generated counts in the loss, so nothing would be learned"
        drawn = {level for name in {*weighed, generated[0]} for level in _only_levels(self.sampler(name))}  # sound may share the video's level
        if self.weighting == "min_snr" and drawn <= {0.0, 1.0}:
            return "weighting min_snr counts nothing at the noise levels 0 and 1, and no others are drawn: nothing would be learned"
        return None

    def sampler(self, modality: str) -> Sampler:
        """The sampler of a stream's noise levels."""
        if modality == "audio" and self.audio_timestep_sampling_mode is not None:
            mode, values = self.audio_timestep_sampling_mode, self.audio_timestep_sampling_params
        else:
            mode, values = self.timestep_sampling_mode, self.timestep_sampling_params
        return parse_parameters(SAMPLERS[mode], f"the noise level sampler {mode}", values)

    def sample_loss(self, prediction: Tensor, target: Tensor, weight: Tensor) -> Tensor:
        """[B]: the plain loss of each sample, before any weighting. prediction, target [B, T, C]; weight [B, T]."""
        return masked_mean(token_error(prediction, target, self.loss, self.huber_delta), weight)

    def sigma_weight(self, sigma: Tensor) -> Tensor:
        """[B]: the weight of samples at these noise levels."""
        return min_snr_weight(sigma, self.min_snr_gamma) if self.weighting == "min_snr" else torch.ones_like(sigma)


class ModalityBalance:
    """The sound loss's factor: ratio of the running means of the losses (video / audio), clamped.

    The trainer feeds it once a step with the losses averaged over micro-batches and ranks, so that every rank holds
    the same factor; regularisation clips do not count in it. Its two numbers belong into the snapshot. Tensors stay on the device: nothing waits.
    """

    def __init__(self, section: FlowMatchingSection, device: torch.device | str = "cpu") -> None:
        self.section = section
        self.means = torch.zeros(2, device=device)
        self.weights = torch.zeros(2, device=device)

    def update(self, video_loss: Tensor | float | None, audio_loss: Tensor | float | None) -> None:
        """Take in one step's mean losses; None or NaN for a stream without a loss this step."""
        decay = self.section.balance_decay
        video_loss, audio_loss = (float("nan") if x is None else x for x in (video_loss, audio_loss))
        now = torch.stack([torch.as_tensor(x, dtype=torch.float32, device=self.means.device) for x in (video_loss, audio_loss)])
        known = torch.isfinite(now)
        self.means = torch.where(known, decay * self.means + (1 - decay) * torch.nan_to_num(now), self.means)
        self.weights = torch.where(known, decay * self.weights + (1 - decay), self.weights)

    def factor(self) -> Tensor:
        """Scalar: what the sound loss is multiplied with; 1 until both streams have been seen."""
        if self.section.balance == "none":
            return torch.ones((), device=self.means.device)
        video, audio = self.means / self.weights.clamp(min=1e-12)
        ratio = (video / audio.clamp(min=1e-12)).clamp(self.section.balance_min, self.section.balance_max)
        return torch.where((self.weights > 0).all(), ratio, torch.ones_like(ratio))

    def state_dict(self) -> dict[str, list[float]]:
        """Plain numbers, for a snapshot's JSON; float32 survives them exactly."""
        return {"means": self.means.tolist(), "weights": self.weights.tolist()}

    def load_state_dict(self, state: dict[str, list[float]]) -> None:
        self.means, self.weights = (torch.tensor(state[k], device=self.means.device) for k in ("means", "weights"))


