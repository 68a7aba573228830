"""The objective against plain formulas: samplers, losses, weighting, balance, and the settings' refusals."""

import json
import math

import pytest
import torch

from ltx_train.training.flow_matching import (
    FixedSampler,
    FlowMatchingSection,
    LogitNormalSampler,
    ModalityBalance,
    ShiftedLogitNormalSampler,
    UniformSampler,
    masked_mean,
    min_snr_weight,
    token_error,
)


def draws(sampler, tokens, count, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.tensor([sampler.sample(tokens, generator) for _ in range(count)], dtype=torch.float64)


# reference/official_trainer.md 2.1, measured by 1 M draws of the official sampler; printed to 2 digits
OFFICIAL = {
    100: (0.14, 0.41, 0.61, 0.77, 0.92),
    256: (0.15, 0.42, 0.62, 0.78, 0.92),
    1024: (0.17, 0.47, 0.67, 0.82, 0.94),
    4032: (0.26, 0.64, 0.81, 0.90, 0.97),
    16320: (0.37, 0.82, 0.92, 0.96, 0.99),
    32640: (0.37, 0.82, 0.92, 0.96, 0.99),
}


def mixture(sampler, tokens, count=20_000):
    """The sampler's distribution on evenly spread quantiles instead of random draws: stretched part and uniform part."""
    many, few = round(count * (1 - sampler.uniform_prob)), round(count * sampler.uniform_prob)
    normal = torch.special.ndtri((torch.arange(many, dtype=torch.float64) + 0.5) / many)
    flat = sampler.eps + (1 - sampler.eps) * (torch.arange(few, dtype=torch.float64) + 0.5) / few
    return torch.cat([torch.tensor([sampler.stretched(tokens, z) for z in normal.tolist()], dtype=torch.float64), flat])


@pytest.mark.parametrize("tokens", OFFICIAL)
def test_shifted_quantiles_equal_the_official_table(tokens):
    levels = torch.tensor([0.05, 0.25, 0.5, 0.75, 0.95], dtype=torch.float64)
    ours = mixture(ShiftedLogitNormalSampler(), tokens).quantile(levels)
    assert (ours - torch.tensor(OFFICIAL[tokens], dtype=torch.float64)).abs().max() <= 0.0075  # printed to 0.01, from finite draws


def test_draws_follow_the_distribution():
    sampler = ShiftedLogitNormalSampler()
    drawn, exact = draws(sampler, 4032, 8000).sort().values, mixture(sampler, 4032).sort().values
    place = torch.searchsorted(exact, drawn) / len(exact)
    gap = (place - (torch.arange(8000) + 0.5) / 8000).abs().max()
    assert gap < 1.63 / math.sqrt(8000)  # Kolmogorov-Smirnov, 1 % level


@pytest.mark.parametrize("tokens", [1, 64, 52_000, 55_080, 100_000, 200_000, 10_000_000])
def test_finite_at_any_length(tokens):
    sampler = ShiftedLogitNormalSampler()
    values = torch.tensor([sampler.stretched(tokens, z / 10) for z in range(-80, 81)], dtype=torch.float64)
    assert torch.isfinite(values).all() and values.min() >= 0 and values.max() <= 1
    assert values.unique().numel() > 50  # not collapsed into one value either
    drawn = draws(sampler, tokens, 200)
    assert torch.isfinite(drawn).all() and 0.1 < drawn.mean() < 0.95


@pytest.mark.parametrize("tokens", [64, 1024, 4032])
@pytest.mark.parametrize("std", [0.5, 1.0, 2.0])
def test_stretched_formula_written_out(tokens, std):
    sampler = ShiftedLogitNormalSampler(std=std, eps=0.01)
    sigmoid = lambda x: 1 / (1 + math.exp(-x))  # noqa: E731
    mu = 0.58333333333 + 3.5807291667e-4 * tokens
    for z in (-3.0, -1.0, 0.0, 0.5, 3.2):
        low, high = sigmoid(mu - 2.5758 * std), sigmoid(mu + 3.0902 * std)
        y = (sigmoid(mu + std * z) - low) / (high - low)
        y = 2 * 0.01 - y if y < 0.01 else y
        assert sampler.stretched(tokens, z) == pytest.approx(min(max(y, 0), 1), abs=1e-8)


def test_shift_clamps():
    sampler = ShiftedLogitNormalSampler(min_tokens=1024, max_tokens=4096)
    assert sampler.shift(16) == pytest.approx(0.95) and sampler.shift(200_000) == pytest.approx(2.05)
    assert ShiftedLogitNormalSampler().shift(16_384) > 6


def test_other_samplers():
    flat = draws(UniformSampler(min_value=0.2, max_value=0.4), 10, 2000)
    assert 0.2 <= flat.min() < 0.21 and 0.39 < flat.max() <= 0.4 and abs(flat.mean() - 0.3) < 0.005
    logit = draws(LogitNormalSampler(mean=1.0, std=0.5), 10, 4000).logit()
    assert abs(logit.mean() - 1.0) < 0.03 and abs(logit.std() - 0.5) < 0.03
    fixed = draws(FixedSampler(values=(0.1, 0.9)), 10, 1000)
    assert set(fixed.tolist()) == {0.1, 0.9} and 0.4 < (fixed == 0.1).double().mean() < 0.6


def test_masked_mse_is_the_mean_over_unmasked_tokens():
    generator = torch.Generator().manual_seed(0)
    prediction, target = torch.randn(2, 6, 3, generator=generator), torch.randn(2, 6, 3, generator=generator)
    mask = torch.tensor([[1, 1, 1, 0, 0, 0], [1, 0, 1, 1, 1, 1]], dtype=torch.float32)
    ours = FlowMatchingSection().sample_loss(prediction, target, mask)
    for b in range(2):
        plain = torch.stack([(prediction[b, t] - target[b, t]) ** 2 for t in range(6) if mask[b, t]]).mean()
        torch.testing.assert_close(ours[b], plain)


def test_a_sample_without_tokens_that_count_has_loss_zero():
    loss = masked_mean(torch.ones(1, 4, requires_grad=True), torch.zeros(1, 4))
    assert loss.item() == 0.0


def test_loss_is_computed_in_float32():
    prediction, target = torch.full((1, 1, 1), 1.0, dtype=torch.bfloat16), torch.full((1, 1, 1), 1.001)
    assert FlowMatchingSection().sample_loss(prediction, target, torch.ones(1, 1)).item() == pytest.approx(1e-6, rel=1e-3)


def test_huber_is_square_for_small_and_linear_for_large_errors():
    delta = 0.5
    small, large = torch.tensor([[[1e-3]]]), torch.tensor([[[100.0]]])
    zero = torch.zeros(1, 1, 1)
    assert token_error(small, zero, "huber", delta).item() == pytest.approx(1e-6, rel=1e-3)
    assert token_error(large, zero, "huber", delta).item() == pytest.approx(2 * delta * (100 - delta), rel=1e-3)
    value = token_error(torch.tensor([[[0.7]]]), zero, "huber", delta).item()
    assert value == pytest.approx(2 * delta * (math.sqrt(0.49 + 0.25) - 0.5), rel=1e-6)


def test_min_snr_weight_written_out():
    gamma = 5.0
    for sigma in (0.05, 0.3, 0.309, 0.5, 0.9):
        snr = ((1 - sigma) / sigma) ** 2
        assert min_snr_weight(torch.tensor([sigma]), gamma).item() == pytest.approx(min(snr, gamma) * sigma**2, rel=1e-5)
    assert min_snr_weight(torch.tensor([0.0, 1.0]), gamma).tolist() == [0.0, 0.0]
    assert FlowMatchingSection().sigma_weight(torch.tensor([0.3])).tolist() == [1.0]


def test_balance_is_the_clamped_ratio_of_running_means():
    section = FlowMatchingSection(balance="auto", balance_decay=0.5, balance_max=4.0)
    balance = ModalityBalance(section)
    assert balance.factor().item() == 1.0
    means = {"video": (0.0, 0.0), "audio": (0.0, 0.0)}
    for video, audio in ((0.2, 1.0), (0.4, 0.8), (0.3, float("nan"))):
        balance.update(video, torch.tensor(audio))
        for name, value in (("video", video), ("audio", audio)):
            if not math.isnan(value):
                total, weight = means[name]
                means[name] = (0.5 * total + 0.5 * value, 0.5 * weight + 0.5)
    ratio = (means["video"][0] / means["video"][1]) / (means["audio"][0] / means["audio"][1])
    assert balance.factor().item() == pytest.approx(ratio, rel=1e-5)
    again = ModalityBalance(section)
    again.load_state_dict(json.loads(json.dumps(balance.state_dict())))
    again.update(None, None)
    assert again.factor().item() == balance.factor().item()
    for _ in range(20):
        balance.update(100.0, 0.1)
    assert balance.factor().item() == 4.0
    off = ModalityBalance(FlowMatchingSection())
    off.update(1.0, 5.0)
    assert off.factor().item() == 1.0


def test_section_reads_the_official_form():
    section = FlowMatchingSection.model_validate({"timestep_sampling_mode": "uniform", "timestep_sampling_params": {"min_value": 0.1, "max_value": 0.9}})
    assert section.sampler("video") == UniformSampler(min_value=0.1, max_value=0.9) == section.sampler("audio")
    assert FlowMatchingSection().sampler("video") == ShiftedLogitNormalSampler(std=1.0, eps=1e-3, uniform_prob=0.1)
    own = FlowMatchingSection(audio_timestep_sampling_mode="logit_normal", audio_timestep_sampling_params={"mean": 0.5})
    assert own.sampler("audio") == LogitNormalSampler(mean=0.5) and isinstance(own.sampler("video"), ShiftedLogitNormalSampler)


@pytest.mark.parametrize(
    "fields",
    [
        {"timestep_sampling_mode": "uniform", "timestep_sampling_params": {"std": 1.0}},
        {"timestep_sampling_mode": "fixed"},
        {"timestep_sampling_mode": "fixed", "timestep_sampling_params": {"values": [1.5]}},
        {"timestep_sampling_params": {"std": 0}},
        {"timestep_sampling_params": {"std": 1e-300}},
        {"timestep_sampling_params": {"min_tokens": 500, "max_tokens": 100}},
        {"timestep_sampling_mode": "uniform", "timestep_sampling_params": {"min_value": 0.9, "max_value": 0.1}},
        {"huber_delta": 1e30},
        {"audio_timestep_sampling_params": {"std": 1}},
        {"balance_min": 3, "balance_max": 2},
        {"loss": "l7"},
    ],
)
def test_refusals(fields):
    with pytest.raises(ValueError):
        FlowMatchingSection.model_validate(fields)


def test_streams_of_which_nothing_counts_are_told():
    fixed = lambda *levels: {"timestep_sampling_mode": "fixed", "timestep_sampling_params": {"values": levels}}  # noqa: E731
    other = {"audio_timestep_sampling_mode": "fixed", "audio_timestep_sampling_params": {"values": [0.3]}}
    ends = FlowMatchingSection(weighting="min_snr", **fixed(0, 1), **other)
    assert "noise levels 0 and 1" in ends.nothing_counts(["video"]) and ends.nothing_counts(["video", "audio"]) is None and ends.nothing_counts(["audio"]) is None
    assert FlowMatchingSection(weighting="min_snr", **fixed(0, 0.5)).nothing_counts(["video"]) is None and FlowMatchingSection(**fixed(1)).nothing_counts(["video"]) is None
    assert "video_weight 0" in FlowMatchingSection(video_weight=0).nothing_counts(["video"]) and FlowMatchingSection(video_weight=0).nothing_counts(["video", "audio"]) is None
