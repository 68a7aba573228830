"""The sampling loop: closed forms, diffusers' Euler, conditions kept, passes skipped or batched, stops, seeds."""

from pathlib import Path

import pytest
import torch
from torch import nn

from ltx_train.conditioning.conditions import CONTENT, FirstFrame
from ltx_train.conditioning.draws import Sure
from ltx_train.conditioning.references import Reference
from ltx_train.conditioning.state import LatentState
from ltx_train.errors import ConfigError, StopRequested
from ltx_train.geometry import AudioGrid, Latents, VideoGrid
from ltx_train.models.checkpoint import Checkpoint
from ltx_train.models.families import TransformerConfig
from ltx_train.models.transformer import load_transformer
from ltx_train.sampling.denoise import Noise, ancestral_step, denoise
from ltx_train.sampling.guidance import Guidance, StreamGuidance
from ltx_train.sampling.schedule import DISTILLED, Schedule, sigma_schedule
from ltx_train.text import Context

DATA = Path(__file__).parents[2] / "parity" / "data"
GRID, SOUND = VideoGrid(3, 2, 3, fps=24.0), AudioGrid(6, 1, 16)
TEXT = Context(torch.zeros(1, 2, 4), torch.zeros(1, 2, 4))


class KnowsTheAnswer(nn.Module):
    """The exact velocity (x - goal) / t towards a goal; counts its forwards and the batch of each."""

    config = TransformerConfig(3, 1, 4, 4, 4, 4, None)

    def __init__(self, goal=2.0):
        super().__init__()
        self.goal, self.batches, self.modes = goal, [], []
        self.dropout = nn.Dropout(0.5)

    def forward(self, video, audio, perturbations=None):
        self.batches.append((video or audio).tokens.shape[0])
        self.modes.append(self.training)
        field = lambda m: None if m is None else (m.tokens - self.goal) / m.timesteps[..., None].clamp(min=1e-6)  # noqa: E731
        return field(video), field(audio)


class Linear(nn.Module):
    """Velocity = 0.3 * x, the same for every token: any Euler integrator can be compared on it."""

    config = KnowsTheAnswer.config

    def forward(self, video, audio, perturbations=None):
        return (None if m is None else 0.3 * m.tokens for m in (video, audio))


def blank():
    return LatentState.blank(GRID, channels=4)


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize("sampler", ["euler", "euler_ancestral"])
@pytest.mark.parametrize("sigmas", [sigma_schedule(5), DISTILLED, (1.0, 0.0)])
def test_reaches_what_an_exact_model_knows(sampler, sigmas):
    result = denoise(KnowsTheAnswer(), video=blank(), audio=None, positive=TEXT, schedule=Schedule(sigmas, sampler), generator=seeded())
    torch.testing.assert_close(result.video.values, torch.full((1, 4, 3, 2, 3), 2.0), atol=1e-5, rtol=0)
    assert result.audio is None


def test_euler_equals_diffusers():
    from diffusers.schedulers.scheduling_flow_match_euler_discrete import FlowMatchEulerDiscreteScheduler

    sigmas = sigma_schedule(6)
    theirs = FlowMatchEulerDiscreteScheduler(shift=1.0)
    theirs.set_timesteps(sigmas=list(sigmas[:-1]))
    x = noise = torch.randn(1, 18, 4, generator=seeded())
    for t in theirs.timesteps:
        x = theirs.step(0.3 * x, t, x, return_dict=False)[0]
    ours = denoise(Linear(), video=blank(), audio=None, positive=TEXT, schedule=Schedule(sigmas), noise=Noise(noise, None))
    torch.testing.assert_close(ours.video.tokens, x, atol=1e-5, rtol=0)


@pytest.mark.parametrize("eta", [0.0, 0.5, 1.0])
def test_ancestral_step_keeps_the_noise_level(eta):
    """From (1-s)*clean + s*n the step leads to (1-s')*clean + s'*n' with n' of unit variance, whatever eta is."""
    generator = seeded()
    clean, n, fresh = torch.full((200_000,), 3.0), torch.randn(200_000, generator=generator), torch.randn(200_000, generator=generator)
    sigma, following = 0.9, 0.6
    x = ancestral_step((1 - sigma) * clean + sigma * n, clean, fresh, sigma, following, eta)
    rest = (x - (1 - following) * clean) / following
    assert abs(rest.mean()) < 0.01 and abs(rest.std() - 1) < 0.01
    share = torch.corrcoef(torch.stack([rest, fresh]))[0, 1]
    assert share.abs() < 0.01 if eta == 0 else share > 0.5 * eta
    if eta == 0:
        torch.testing.assert_close(x, (1 - following) * clean + following * n, atol=1e-5, rtol=0)


@pytest.mark.parametrize("sampler", ["euler", "euler_ancestral"])
def test_given_tokens_stay_and_references_are_cut_off(sampler):
    still = Latents(torch.randn(1, 4, 1, 2, 3), VideoGrid(1, 2, 3))
    state = FirstFrame().edit(blank(), {CONTENT: still}, Sure())
    state = Reference().edit(state, {"reference_video": Latents(torch.randn(1, 4, 3, 2, 3), GRID)}, Sure())
    views = []
    schedule = Schedule(sigma_schedule(4), sampler)
    result = denoise(KnowsTheAnswer(), video=state, audio=None, positive=TEXT, schedule=schedule, generator=seeded(), on_step=views.append)
    for view in views:
        torch.testing.assert_close(view.video[:, :6], state.clean[:, :6], atol=1e-6, rtol=0)
        torch.testing.assert_close(view.video[:, 18:], state.clean[:, 18:], atol=1e-6, rtol=0)
    assert result.video.values.shape == (1, 4, 3, 2, 3)
    torch.testing.assert_close(result.video.values[:, :, 0], still.values[:, :, 0], atol=1e-6, rtol=0)
    assert [v.step for v in views] == [1, 2, 3, 4] and views[-1].sigma == 0


@pytest.mark.parametrize(
    "video, audio, per_step",
    [
        (Guidance(), Guidance(), 1),
        (Guidance(cfg=3), Guidance(), 2),
        (Guidance(cfg=3, stg=1), Guidance(cfg=7), 3),
        (Guidance(3, 1, 3), Guidance(7, 1, 3), 4),
    ],
)
def test_neutral_passes_are_skipped(video, audio, per_step):
    for batched in (True, False):
        model = KnowsTheAnswer()
        denoise(
            model,
            video=blank(),
            audio=LatentState.blank(SOUND, channels=16),
            positive=TEXT,
            negative=TEXT,
            schedule=Schedule(sigma_schedule(2)),
            guidance=StreamGuidance(video, audio),
            generator=seeded(),
            batched=batched,
        )
        assert model.batches == ([per_step] * 2 if batched else [1] * (2 * per_step))


def test_stg_skips_the_chosen_blocks_of_its_stream():
    model, seen = KnowsTheAnswer(), []
    forward = model.forward
    model.forward = lambda video, audio, perturbations: seen.append(perturbations) or forward(video, audio)
    denoise(model, video=blank(), audio=None, positive=TEXT, schedule=Schedule((1.0, 0.0)), guidance=StreamGuidance(Guidance(stg=1), stg_blocks=(1,)), generator=seeded())
    (skips,) = seen
    assert skips.skip_video_self_attn.tolist() == [[1, 1], [1, 0], [1, 1]] and skips.skip_audio_self_attn is None


def test_texts_of_different_length_run_one_by_one():
    model = KnowsTheAnswer()
    short = Context(torch.zeros(1, 1, 4), None)
    long = Context(torch.zeros(1, 5, 4), None)
    denoise(model, video=blank(), audio=None, positive=long, negative=short, schedule=Schedule((1.0, 0.0)), guidance=StreamGuidance(Guidance(cfg=2)), generator=seeded())
    assert model.batches == [1, 1]


def test_stops_between_forwards_and_after_steps():
    calls = []

    def stop():
        calls.append(1)
        if len(calls) == 3:
            raise StopRequested

    model = KnowsTheAnswer()
    with pytest.raises(StopRequested):
        denoise(model, video=blank(), audio=None, positive=TEXT, schedule=Schedule(sigma_schedule(9)), generator=seeded(), check=stop)
    assert len(model.batches) == 2


def test_eval_mode_and_no_gradients_then_the_old_mode():
    model = KnowsTheAnswer().train()
    result = denoise(model, video=blank(), audio=None, positive=TEXT, schedule=Schedule((1.0, 0.0)), generator=seeded())
    assert model.modes == [False] and model.training and model.dropout.training and not result.video.values.requires_grad


def test_seeds_video_first_then_audio():
    video, audio = blank(), LatentState.blank(SOUND, channels=16)
    drawn = Noise.drawn(video, audio, seeded(0))
    generator = seeded(0)
    assert torch.equal(drawn.video, torch.randn(1, 18, 4, generator=generator)) and torch.equal(drawn.audio, torch.randn(1, 6, 16, generator=generator))


def test_user_errors():
    common = dict(video=blank(), audio=None, positive=TEXT)
    with pytest.raises(ConfigError, match="negative prompt"):
        denoise(KnowsTheAnswer(), **common, schedule=Schedule((1.0, 0.0)), guidance=StreamGuidance(Guidance(cfg=2)), generator=seeded())
    with pytest.raises(ConfigError, match="seed"):
        denoise(KnowsTheAnswer(), **common, schedule=Schedule((1.0, 0.5, 0.0), "euler_ancestral"), noise=Noise(torch.zeros(1, 18, 4), None))


def test_later_stage_starts_from_given_latents():
    state = LatentState.of(Latents(torch.full((1, 4, 3, 2, 3), 5.0), GRID))
    noise = torch.randn(1, 18, 4, generator=seeded())
    views = []

    class Seen(KnowsTheAnswer):
        def forward(self, video, audio, perturbations=None):
            views.append(video.tokens.clone())
            return super().forward(video, audio, perturbations)

    denoise(Seen(), video=state, audio=None, positive=TEXT, schedule=Schedule((0.6, 0.3, 0.0)), noise=Noise(noise, None))
    torch.testing.assert_close(views[0], 0.4 * state.clean + 0.6 * noise)


@pytest.mark.parametrize("family, has_audio", [("ltxv0.9.5", False), ("ltx2", True), ("ltx2.3", True), ("ltx2.5", True)])
def test_every_family_samples_with_conditions_and_batching_changes_nothing(family, has_audio):
    checkpoint = Checkpoint.open(DATA / f"{family}.checkpoint.safetensors")
    model = load_transformer(checkpoint, dtype=torch.float32, device="cpu")
    c = checkpoint.transformer
    g = torch.Generator().manual_seed(3)
    widths = (c.caption_channels or c.cross_attention_dim, c.caption_channels or c.audio_cross_attention_dim)
    text = lambda: Context(torch.randn(1, 7, widths[0], generator=g), torch.randn(1, 7, widths[1], generator=g) if has_audio else None)  # noqa: E731
    still = Latents(torch.randn(1, c.in_channels, 1, 2, 3, generator=g), VideoGrid(1, 2, 3))
    video = FirstFrame().edit(LatentState.blank(GRID, channels=c.in_channels, keyframe_marker=c.keyframe_embedding), {CONTENT: still}, Sure())
    audio = LatentState.blank(SOUND, channels=c.audio_in_channels) if has_audio else None
    positive, negative = text(), text()
    run = lambda batched: denoise(  # noqa: E731
        model, video=video, audio=audio, positive=positive, negative=negative, schedule=Schedule(sigma_schedule(3)),
        guidance=StreamGuidance(Guidance(3, 1, 3, 0.7), Guidance(7, 1, 3, 0.7), (1,)), generator=seeded(5), batched=batched,
    )  # fmt: skip
    together, apart = run(True), run(False)
    torch.testing.assert_close(together.video.values, apart.video.values, atol=1e-4, rtol=0)
    torch.testing.assert_close(together.video.values[:, :, 0], still.values[:, :, 0], atol=1e-5, rtol=0)
    assert torch.isfinite(together.video.values).all() and (together.audio is not None) == has_audio
