"""Guidance formulas and whole Euler trajectories against recorded official numbers (data/schedules.safetensors)."""

from dataclasses import replace
from functools import lru_cache
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from ltx_train.conditioning.state import LatentState
from ltx_train.geometry import AudioGrid, VideoGrid
from ltx_train.models.checkpoint import Checkpoint
from ltx_train.models.transformer import load_transformer
from ltx_train.sampling.denoise import Noise, denoise
from ltx_train.sampling.guidance import Guidance, StreamGuidance
from ltx_train.sampling.schedule import Schedule, sigma_schedule
from ltx_train.text import Context

DATA = Path(__file__).parent / "data"


@lru_cache(maxsize=1)
def recorded():
    return load_file(DATA / "schedules.safetensors")


@lru_cache(maxsize=1)
def transformer():
    return load_transformer(Checkpoint.open(DATA / "ltx2.3.checkpoint.safetensors"), dtype=torch.float32, device="cpu")


GUIDERS = {
    "cfg1_rescale0.7": Guidance(rescale=0.7),
    "cfg3": Guidance(cfg=3),
    "cfg3_rescale0.7": Guidance(cfg=3, rescale=0.7),
    "cfg3_stg1_modality3_rescale0.45": Guidance(3, 1, 3, 0.45),
    "cfg7_stg1_modality3_rescale0.7": Guidance(7, 1, 3, 0.7),
    "modality3": Guidance(modality=3),
    "stg1": Guidance(stg=1),
}


@pytest.mark.parametrize("name", GUIDERS)
def test_guiders(name):
    data = recorded()
    inputs = (data[f"guider.{k}"] for k in ("cond", "uncond_text", "uncond_perturbed", "uncond_modality"))
    torch.testing.assert_close(GUIDERS[name].combine(*inputs), data[f"guider.out.{name}"], atol=1e-5, rtol=0)


def test_every_recorded_guider_is_tested():
    assert {k.removeprefix("guider.out.") for k in recorded() if k.startswith("guider.out.")} == set(GUIDERS)


def test_cfg_star():
    cond, text = recorded()["guider.cond"], recorded()["guider.uncond_text"]
    delta = Guidance(cfg=3, cfg_star=True).combine(cond, text) - cond
    torch.testing.assert_close(delta, recorded()["guider.delta.cfg_star3"], atol=1e-5, rtol=0)


CASES = {
    "euler_cfg3": Guidance(cfg=3),
    "euler_cfg3_video_only": Guidance(cfg=3),
    "euler_cfg3_first_frame": Guidance(cfg=3),
    "euler_cfg3_stg1_block1_modality3_rescale0.7": Guidance(3, 1, 3, 0.7),
}


@pytest.mark.parametrize("batched", [True, False])
@pytest.mark.parametrize("case", CASES)
def test_euler_trajectories(case, batched):
    data = {k.removeprefix(f"{case}."): v for k, v in recorded().items() if k.startswith(f"{case}.")}
    with_audio = "noise_audio" in data
    video = LatentState.blank(VideoGrid(3, 2, 3, fps=24.0), channels=8)
    torch.testing.assert_close(video.positions, data["video_positions"], atol=1e-6, rtol=0)
    if "denoise_mask" in data:
        video = replace(video.held(data["denoise_mask"] == 0), clean=data["clean_video"])
        assert torch.equal(video.denoise, data["denoise_mask"])
    audio = LatentState.blank(AudioGrid(6, 1, 16), channels=16) if with_audio else None
    text = lambda sign: Context(data[f"{sign}_video_context"], data.get(f"{sign}_audio_context"))  # noqa: E731
    torch.testing.assert_close(torch.tensor(sigma_schedule(4)), data["sigmas"], atol=1e-6, rtol=0)
    seen = []
    result = denoise(
        transformer(),
        video=video,
        audio=audio,
        positive=text("positive"),
        negative=text("negative"),
        schedule=Schedule(tuple(data["sigmas"].double().tolist())),
        guidance=StreamGuidance(CASES[case], CASES[case], stg_blocks=(1,)),
        noise=Noise(data["noise_video"], data.get("noise_audio")),
        batched=batched,
        on_step=seen.append,
    )
    assert len(seen) == 4
    for view in seen:
        torch.testing.assert_close(view.video, data[f"step{view.step}.video"], atol=1e-4, rtol=0)
        if with_audio:
            torch.testing.assert_close(view.audio, data[f"step{view.step}.audio"], atol=1e-4, rtol=0)
    torch.testing.assert_close(result.video.tokens, data["step4.video"], atol=1e-4, rtol=0)
    assert (result.audio is not None) == with_audio
