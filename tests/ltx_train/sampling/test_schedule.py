"""Schedules against the closed form, diffusers' scheduler, and checkpoint metadata."""

import math

import pytest
import torch

from ltx_train.errors import ConfigError
from ltx_train.sampling.schedule import DISTILLED, LTXV_098_DISTILLED, Schedule, distilled_schedule, is_distilled, sigma_schedule


@pytest.mark.parametrize("tokens", [256, 4096, 9000])
def test_closed_form(tokens):
    m = 0.95 + (tokens - 1024) * 1.1 / 3072
    plain = [math.exp(m) / (math.exp(m) + (1 / s - 1)) for s in (1, 0.75, 0.5, 0.25)]
    assert sigma_schedule(4, tokens=tokens, stretch=False) == pytest.approx([*plain, 0])
    stretched = [1 - (1 - s) * 0.9 / (1 - plain[-1]) for s in plain]
    assert sigma_schedule(4, tokens=tokens) == pytest.approx([*stretched, 0])
    assert sigma_schedule(4, tokens=tokens)[-2] == pytest.approx(0.1)


def test_one_step_goes_straight_to_zero():
    assert sigma_schedule(1) == (1.0, 0.0)


@pytest.mark.parametrize("steps, tokens", [(8, 4096), (30, 4096), (20, 1500)])
def test_equals_diffusers_dynamic_shift(steps, tokens):
    from diffusers.schedulers.scheduling_flow_match_euler_discrete import FlowMatchEulerDiscreteScheduler

    theirs = FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True, base_shift=0.95, max_shift=2.05, base_image_seq_len=1024, max_image_seq_len=4096, shift_terminal=0.1)
    theirs.set_timesteps(sigmas=torch.linspace(1, 1 / steps, steps).tolist(), mu=0.95 + (tokens - 1024) * 1.1 / 3072)
    torch.testing.assert_close(torch.tensor(sigma_schedule(steps, tokens=tokens)), theirs.sigmas, atol=2e-6, rtol=0)


def test_distilled_models_have_their_own_lists():
    assert distilled_schedule("ltx2.3") == Schedule(DISTILLED, "euler")
    assert distilled_schedule("ltx2.5") == Schedule(DISTILLED, "euler_ancestral", 1.0)
    assert distilled_schedule("ltxv-13b").sigmas == LTXV_098_DISTILLED
    # the list in the metadata of ltxv-13b-0.9.8-distilled goes before the table
    own = distilled_schedule("ltxv-13b", {"transformer": {}, "allowed_inference_steps": [1.0, 0.5, 0.25]})
    assert own.sigmas == (1.0, 0.5, 0.25, 0.0)
    assert distilled_schedule("ltx2", {"scheduler": {"allowed_inference_steps": [1.0, 0.0]}}).sigmas == (1.0, 0.0)


def test_names():
    assert is_distilled("ltx-2.3-22b-distilled-1.1.safetensors") and not is_distilled("ltx-2.3-22b-dev.safetensors")
    assert not is_distilled("ltx-2-19b-distilled-lora-384.safetensors")


@pytest.mark.parametrize("sigmas", [(1.0,), (0.5, 0.7, 0.0), (1.2, 0.0), (1.0, 0.5, 0.5, 0.0), (0.5, -0.1)])
def test_nonsense_schedules_are_refused(sigmas):
    with pytest.raises(ConfigError):
        Schedule(sigmas)
