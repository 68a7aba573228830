"""Whole sampling loops against diffusers: its transformers on the same weights, its flow-matching Euler scheduler, CFG as its pipelines do it."""

from dataclasses import replace

import pytest
import torch

from ltx_train.conditioning.conditions import CONTENT, FirstFrame
from ltx_train.conditioning.draws import Sure
from ltx_train.conditioning.state import LatentState
from ltx_train.geometry import AudioGrid, Latents, VideoGrid
from ltx_train.sampling.denoise import Noise, denoise
from ltx_train.sampling.guidance import Guidance, StreamGuidance
from ltx_train.sampling.schedule import Schedule, sigma_schedule
from ltx_train.text import Context
from tests.parity.test_transformer_diffusers import LTX2, LTX23, LTX25, LTXV, ask_ltxv, ask_oracle, build

FAMILIES = {"ltx-video": LTXV, "ltx2": LTX2, "ltx2.3": LTX23, "ltx2.5": replace(LTX25, keyframe_embedding=False)}  # diffusers knows no keyframe marks
CFG = {"video": 3.0, "audio": 7.0}
STEPS = 5


def theirs(oracle, states, tokens, texts, sigmas):
    """diffusers' loop: both texts, velocity u + cfg (c - u), the scheduler's step; given tokens are put back as its image pipelines do."""
    from diffusers.schedulers.scheduling_flow_match_euler_discrete import FlowMatchEulerDiscreteScheduler

    schedulers = {}
    for stream in states:
        schedulers[stream] = FlowMatchEulerDiscreteScheduler(shift=1.0)
        schedulers[stream].set_timesteps(sigmas=list(sigmas[:-1]))
    for index, sigma in enumerate(sigmas[:-1]):
        found = []
        for text in texts:
            given = {m: s.modality(tokens[m], torch.tensor([sigma]), text) for m, s in states.items()}
            out = ask_oracle(oracle, given["video"], given["audio"]) if "audio" in states else ask_ltxv(oracle, given["video"])
            found.append(dict(zip(states, out)))
        for stream, state in states.items():
            cond, uncond = (f[stream] for f in found)
            velocity = uncond + CFG[stream] * (cond - uncond)
            moved = schedulers[stream].step(velocity, schedulers[stream].timesteps[index], tokens[stream], return_dict=False)[0]
            tokens = {**tokens, stream: torch.where(state.denoise[..., None] > 0, moved, tokens[stream])}
    return tokens


@pytest.mark.parametrize("given", [False, True], ids=["text", "first_frame"])
@pytest.mark.parametrize("name", FAMILIES)
def test_loop(name, given):
    config = FAMILIES[name]
    oracle, ours = build(config)
    generator = torch.Generator().manual_seed(8)
    normal = lambda *shape: torch.randn(*shape, generator=generator)  # noqa: E731
    states = {"video": LatentState.blank(VideoGrid(3, 2, 3, fps=25.0), channels=config.in_channels)}
    if config.has_audio:
        states["audio"] = LatentState.blank(AudioGrid(6, 1, config.audio_in_channels), channels=config.audio_in_channels)
    if given:
        still = Latents(normal(1, config.in_channels, 1, 2, 3), VideoGrid(1, 2, 3))
        states["video"] = FirstFrame().edit(states["video"], {CONTENT: still}, Sure())
    widths = (config.caption_channels or config.cross_attention_dim, config.caption_channels or config.audio_cross_attention_dim)
    text = lambda: Context(normal(1, 7, widths[0]), *((normal(1, 7, widths[1]),) if config.has_audio else (None, torch.ones(1, 7))))  # noqa: E731
    texts = [text(), text()]
    noise = {m: normal(*s.clean.shape) for m, s in states.items()}
    sigmas = sigma_schedule(STEPS)
    start = {m: s.noised(noise[m], torch.ones(1)) for m, s in states.items()}
    with torch.no_grad():
        expected = theirs(oracle, states, start, texts, sigmas)
    made = denoise(
        ours, video=states["video"], audio=states.get("audio"), positive=texts[0], negative=texts[1], schedule=Schedule(sigmas),
        guidance=StreamGuidance(Guidance(CFG["video"]), Guidance(CFG["audio"])), noise=Noise(noise["video"], noise.get("audio")),
    )  # fmt: skip
    for stream in states:
        result = getattr(made, stream).tokens
        assert (result - noise[stream]).std() > 0.05
        torch.testing.assert_close(result, expected[stream], atol=1e-4, rtol=0)
