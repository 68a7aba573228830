"""Recorded official numbers (data/schedules.safetensors): sigmas, positions, token order, training noise levels."""

import re
from functools import lru_cache
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from ltx_train.conditioning.references import Reference
from ltx_train.errors import DataError
from ltx_train.geometry import AudioGrid, VideoGrid, patchify, unpatchify
from ltx_train.sampling.schedule import DISTILLED, DISTILLED_STAGE2, DISTILLED_STAGE2_TILED, LTXV_098_DISTILLED, sigma_schedule
from ltx_train.training.flow_matching import ShiftedLogitNormalSampler

DATA = Path(__file__).parent / "data" / "schedules.safetensors"
TOKENS = (100, 256, 1024, 4032, 16320)


@lru_cache(maxsize=1)
def recorded():
    return load_file(DATA)


def names(prefix):
    return sorted(k for k in recorded() if k.startswith(prefix))


@pytest.mark.parametrize("name", names("sigmas.steps"))
def test_sigma_schedule(name):
    steps, tokens = (re.search(p, name) for p in (r"steps(\d+)", r"tokens(\d+)"))
    ours = sigma_schedule(int(steps[1]), tokens=int(tokens[1]) if tokens else 4096, stretch="no_stretch" not in name)
    torch.testing.assert_close(torch.tensor(ours), recorded()[name], atol=1e-6, rtol=0)


def test_distilled_schedules():
    for ours, name in ((DISTILLED, "distilled"), (DISTILLED_STAGE2, "distilled_stage2"), (DISTILLED_STAGE2_TILED, "distilled_stage2_tiled")):
        torch.testing.assert_close(torch.tensor(ours), recorded()[f"sigmas.{name}"], atol=1e-7, rtol=0)
    # the checkpoint's list has no closing zero
    torch.testing.assert_close(torch.tensor(LTXV_098_DISTILLED[:-1]), recorded()["sigmas.ltxv_0.9.8_distilled"], atol=1e-7, rtol=0)
    assert LTXV_098_DISTILLED[-1] == 0


@pytest.mark.parametrize("name", names("positions.video."))
def test_video_positions(name):
    frames, height, width, fps = re.search(r"f(\d+)h(\d+)w(\d+)\.fps([\d.]+)", name).groups()
    ours = VideoGrid(int(frames), int(height), int(width), float(fps)).positions()
    assert torch.equal(ours, recorded()[name])  # to the bit: RoPE's highest frequencies enlarge a last bit to 2e-4 after 4 steps


@pytest.mark.parametrize("name", names("positions.audio."))
def test_audio_positions(name):
    ours = AudioGrid(int(re.search(r"t(\d+)", name)[1])).positions()
    assert torch.equal(ours, recorded()[name])


@pytest.mark.parametrize("given", [False, True])
@pytest.mark.parametrize("name", names("positions.reference."))
def test_reference_positions(name, given):
    found = re.search(r"target_f(\d+)h(\d+)w(\d+)\.ref_f(\d+)h(\d+)w(\d+)\.spatial(\d+)\.temporal(\d+)\.fps(\d+)", name).groups()
    *sizes, spatial, temporal, fps = (int(x) for x in found)
    target, reference = VideoGrid(*sizes[:3], float(fps)), VideoGrid(*sizes[3:], float(fps) / temporal)
    condition = Reference(downscale_factor=spatial, temporal_scale_factor=temporal) if given else Reference()
    if not given and not derivable(sizes, spatial, temporal):
        with pytest.raises(DataError):  # the factors of this record do not follow from its grids: they must be given
            condition.positions(target, reference)
        return
    ours = torch.cat([target.positions(), condition.positions(target, reference)], dim=1)
    assert torch.equal(ours, recorded()[name]), (ours - recorded()[name]).abs().max()


def derivable(sizes, spatial, temporal):
    frames, height, width, r_frames, r_height, r_width = sizes
    return (r_height * spatial, r_width * spatial) == (height, width) and (r_frames == 1 or (r_frames - 1) * temporal == frames - 1)


@pytest.mark.parametrize("kind, grid", [("video", VideoGrid(2, 3, 2)), ("audio", AudioGrid(5, 4, 4))])
def test_token_order(kind, grid):
    latent, tokens = recorded()[f"patchify.{kind}.latent"], recorded()[f"patchify.{kind}.tokens"]
    assert torch.equal(patchify(latent), tokens) and torch.equal(unpatchify(tokens, grid), latent)


@pytest.mark.parametrize("tokens", TOKENS)
def test_stretched_levels_of_recorded_normals(tokens):
    sampler = ShiftedLogitNormalSampler()
    ours = torch.tensor([sampler.stretched(tokens, z) for z in recorded()["timesteps.z"].tolist()])
    # the official code computes in float32, whose sigmoid has 1e-5 relative steps near its end at 16,320 tokens
    tolerance = 1e-5 if tokens > 10_000 else 1e-6
    torch.testing.assert_close(ours, recorded()[f"timesteps.tokens{tokens}.stretched_of_z"], atol=tolerance, rtol=0)
    assert sampler.shift(tokens) == pytest.approx(recorded()[f"timesteps.tokens{tokens}.mu_p005_p999"][0].item(), abs=1e-9)


@pytest.mark.parametrize("tokens", TOKENS)
def test_quantiles_of_a_million_official_draws(tokens):
    sampler, count = ShiftedLogitNormalSampler(), 20_000
    normal = torch.special.ndtri((torch.arange(count * 9 // 10, dtype=torch.float64) + 0.5) / (count * 9 // 10))
    flat = sampler.eps + (1 - sampler.eps) * (torch.arange(count // 10, dtype=torch.float64) + 0.5) / (count // 10)
    levels = torch.cat([torch.tensor([sampler.stretched(tokens, z) for z in normal.tolist()], dtype=torch.float64), flat])
    ours = levels.quantile(recorded()["timesteps.quantile_levels"])
    # the outermost quantiles are extreme values of the official draws: 3e-3 holds from 0.1 % to 99.9 %
    torch.testing.assert_close(ours[1:-1].float(), recorded()[f"timesteps.tokens{tokens}.quantiles"][1:-1], atol=3e-3, rtol=0)
    torch.testing.assert_close(torch.stack([levels.mean(), levels.std()]), recorded()[f"timesteps.tokens{tokens}.mean_std"], atol=2e-3, rtol=0)
