"""LatentState against the one formula written out, and what frozen, held and appended tokens become."""

import torch

from ltx_train.conditioning.state import LatentState, stream_name, time_slices
from ltx_train.geometry import AudioGrid, Latents, VideoGrid
from ltx_train.text import Context

GRID = VideoGrid(3, 2, 2, fps=24.0)


def video(batch=2, channels=4, seed=0):
    return Latents(torch.randn(batch, channels, GRID.frames, GRID.height, GRID.width, generator=torch.Generator().manual_seed(seed)), GRID)


def test_formula_written_out():
    state = LatentState.of(video()).held(torch.arange(12) < 4)
    noise = torch.randn(2, 12, 4, generator=torch.Generator().manual_seed(1))
    sigma = torch.tensor([0.25, 0.75])
    for b in range(2):
        for t in range(12):
            d = 0.0 if t < 4 else 1.0
            s = float(sigma[b])
            expected = (1 - d * s) * state.clean[b, t] + d * s * noise[b, t]
            torch.testing.assert_close(state.noised(noise, sigma)[b, t], expected, atol=1e-6, rtol=0)
            assert state.timesteps(sigma)[b, t] == d * s
    assert torch.equal(state.noised(noise, sigma)[:, :4], state.clean[:, :4])
    assert torch.equal(state.target(noise), noise - state.clean)
    assert state.loss_weight[:, :4].eq(0).all() and state.loss_weight[:, 4:].eq(1).all()


def test_start_of_sampling_is_noise_on_free_tokens():
    state = LatentState.of(video()).held(torch.arange(12) < 4)
    noise = torch.randn(2, 12, 4)
    mask = state.denoise[..., None]
    torch.testing.assert_close(state.noised(noise, torch.ones(2)), noise * mask + state.clean * (1 - mask))
    prediction = torch.randn(2, 12, 4)
    torch.testing.assert_close(state.blended(prediction), prediction * mask + state.clean * (1 - mask))


def test_frozen_has_no_noise_timestep_or_loss():
    state = LatentState.of(video()).frozen()
    sigma = torch.tensor([0.5, 0.9])
    assert torch.equal(state.noised(torch.randn(2, 12, 4), sigma), state.clean)
    assert state.timesteps(sigma).eq(0).all() and state.loss_weight.eq(0).all()


def test_appended_tokens_follow_the_targets_and_stay_clean():
    state = LatentState.of(video(), keyframe_marker=True)
    extra = torch.randn(2, 5, 4)
    longer = state.appended(extra, torch.zeros(2, 3, 5, 2))
    sigma = torch.tensor([0.5, 0.9])
    noised = longer.noised(torch.randn(2, 12, 4), sigma)
    assert longer.num_target == 12 and longer.tokens == 17 and longer.positions.shape == (2, 3, 17, 2)
    assert torch.equal(noised[:, 12:], extra)
    assert longer.timesteps(sigma)[:, 12:].eq(0).all() and longer.loss_weight[:, 12:].eq(0).all()
    assert longer.target(torch.randn(2, 12, 4)).shape == (2, 12, 4)
    assert not longer.keyframes[:, 12:].any() and longer.keyframes[:, :4].all() and not longer.keyframes[:, 4:12].any()
    assert longer.targets(noised).values.shape == (2, 4, 3, 2, 2)


def test_keyframe_marker_only_where_the_model_has_one_and_only_on_video():
    assert LatentState.of(video()).keyframes is None
    sound = Latents(torch.zeros(1, 2, 5, 3), AudioGrid(5, 2, 3))
    assert LatentState.of(sound, keyframe_marker=True).keyframes is None


def test_modality_compact_timesteps_equal_the_full_ones():
    context = Context(torch.zeros(2, 3, 8), torch.zeros(2, 3, 6))
    sigma = torch.tensor([0.5, 0.9])
    whole = LatentState.of(video())
    for state in (whole, whole.frozen(), whole.held(torch.arange(12) < 4), whole.appended(torch.zeros(2, 5, 4), torch.zeros(2, 3, 5, 2))):
        given = state.modality(state.clean, sigma, context)
        index = torch.zeros(2, state.tokens, dtype=torch.long) if given.row_index is None else given.row_index
        assert torch.equal(given.timestep_rows.gather(1, index), given.timesteps)
        assert given.context.shape[-1] == 8
        assert (given.row_index is None) == (given.timestep_rows.shape[1] == 1)


def test_blank_states_and_slices():
    grid = AudioGrid(7, 2, 3)
    state = LatentState.blank(grid, channels=6, batch=2)
    assert state.clean.shape == (2, 7, 6) and state.clean.eq(0).all() and state.denoise.eq(1).all()
    assert time_slices(grid) == (7, 1) and time_slices(GRID) == (3, 4)
    assert stream_name(grid) == "audio" and stream_name(GRID) == "video"
