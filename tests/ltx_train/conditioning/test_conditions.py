"""Every condition within the clip: which tokens it gives (timestep 0, no loss), and the nonsense it refuses."""

import pytest
import torch

from ltx_train.conditioning.conditions import CONTENT, FirstFrame, Keyframes, LastFrame, Prefix, Suffix
from ltx_train.conditioning.draws import Sure
from ltx_train.conditioning.masks import Mask, RandomMask, SpatialCrop
from ltx_train.conditioning.state import LatentState
from ltx_train.errors import ConfigError, DataError
from ltx_train.geometry import AudioGrid, Latents, VideoGrid
from ltx_train.training.randomness import KeyedDraws

GRID = VideoGrid(5, 2, 3, fps=24.0)
SOUND = AudioGrid(10, 2, 3)


def state_of(grid=GRID, batch=2):
    shape = (batch, 4, grid.frames, grid.height, grid.width) if isinstance(grid, VideoGrid) else (batch, grid.channels, grid.steps, grid.bins)
    return LatentState.of(Latents(torch.randn(shape), grid))


def given_slices(state):
    """The held slices of sample 0, as a set of indices; asserts that slices are whole and the formula agrees."""
    held = state.denoise[:, : state.num_target] == 0
    assert torch.equal(held, state.loss_weight[:, : state.num_target] == 0)
    sigma = torch.full((state.batch,), 0.7)
    assert torch.equal(state.timesteps(sigma) == 0, state.denoise == 0)
    noised = state.noised(torch.randn(state.batch, state.num_target, state.clean.shape[2]), sigma)
    assert torch.equal(noised[state.denoise == 0], state.clean[state.denoise == 0])
    per = state.grid.tokens_per_frame if isinstance(state.grid, VideoGrid) else 1
    rows = held[0].reshape(-1, per)
    assert torch.equal(rows.all(1), rows.any(1))
    return {i for i, row in enumerate(rows.all(1).tolist()) if row}


@pytest.mark.parametrize(
    "condition, grid, expected",
    [
        (FirstFrame(), GRID, {0}),
        (LastFrame(), GRID, {4}),
        (Prefix(temporal_boundary=2), GRID, {0, 1}),
        (Suffix(temporal_boundary=2), GRID, {3, 4}),
        (Prefix(temporal_boundary=4), SOUND, {0, 1, 2, 3}),
        (Suffix(temporal_boundary=3), SOUND, {7, 8, 9}),
        (Keyframes(at=(1, -1)), GRID, {1, 4}),
    ],
)
def test_time_conditions(condition, grid, expected):
    condition.check(grid)
    assert given_slices(condition.edit(state_of(grid), {}, Sure(2))) == expected


def test_first_frame_leaves_stills_alone():
    still = VideoGrid(1, 2, 3)
    FirstFrame().check(still)
    assert FirstFrame().edit(state_of(still), {}, Sure(2)).denoise.eq(1).all()


@pytest.mark.parametrize(
    "condition, grid, code",
    [
        (Prefix(temporal_boundary=5), GRID, "condition.covers_all"),
        (Prefix(temporal_boundary=2, temporal_boundary_max=5), GRID, "condition.covers_all"),
        (Suffix(temporal_boundary=12), SOUND, "condition.covers_all"),
        (LastFrame(), VideoGrid(1, 2, 3), "condition.covers_all"),
        (Keyframes(at=(7,)), GRID, "condition.out_of_range"),
        (Keyframes(count=(1, 5)), GRID, "condition.covers_all"),
        (SpatialCrop(spatial_region=(0, 0, 64, 96)), GRID, "condition.covers_all"),
        (SpatialCrop(spatial_region=(0, 0, 31, 96)), GRID, "condition.empty_region"),
    ],
)
def test_nonsense_is_refused_by_name(condition, grid, code):
    with pytest.raises(ConfigError) as caught:
        condition.check(grid)
    assert caught.value.code == code and condition.type in caught.value.message and len(caught.value.message) < 120 and caught.value.hint


def test_the_official_extend_example_on_its_own_bucket_is_refused():
    # prefix 8 on 960x544x49 = 7 latent frames: the official trainer trains on nothing
    with pytest.raises(ConfigError, match="prefix: 8 given latent frames leave nothing of a clip of 7"):
        Prefix(temporal_boundary=8).check(VideoGrid.of_pixels(960, 544, 49, 24.0, GRID.factors))


def test_probability_is_drawn_for_each_sample():
    batch = 400
    state = FirstFrame(probability=0.25).edit(state_of(VideoGrid(2, 1, 1), batch), {}, KeyedDraws(1, 0, range(batch), "video"))
    share = (state.denoise[:, 0] == 0).float().mean()
    assert 0.17 < share < 0.33  # 400 draws: 0.25 +- 3.7 standard deviations
    none = FirstFrame(probability=0.0).edit(state_of(batch=8), {}, KeyedDraws(1, 0, range(8), "video"))
    every = FirstFrame(probability=1.0).edit(state_of(batch=8), {}, KeyedDraws(1, 0, range(8), "video"))
    assert none.denoise.eq(1).all() and every.denoise[:, :6].eq(0).all()


def test_random_length_stays_in_its_range_and_differs():
    grid = VideoGrid(6, 1, 1)
    state = Prefix(temporal_boundary=1, temporal_boundary_max=4).edit(state_of(grid, 64), {}, KeyedDraws(3, 5, range(64), "video"))
    lengths = (state.denoise == 0).sum(1)
    assert set(lengths.tolist()) == {1, 2, 3, 4}
    assert all(state.denoise[b, : lengths[b]].eq(0).all() for b in range(64))


def test_random_keyframes_count():
    state = Keyframes(count=(1, 3)).edit(state_of(GRID, 64), {}, KeyedDraws(3, 5, range(64), "video"))
    counts = (state.denoise == 0).reshape(64, 5, 6).all(2).sum(1)
    assert set(counts.tolist()) == {1, 2, 3}


def test_spatial_crop_floor_and_clamp():
    condition = SpatialCrop(spatial_region=(0, 33, 500, 70))  # rows 0..2 (clamped), columns 1..2 by floor division
    condition.check(GRID)
    held = (condition.edit(state_of(), {}, Sure(2)).denoise == 0).reshape(2, 5, 2, 3)
    expected = torch.zeros(2, 5, 2, 3, dtype=torch.bool)
    expected[..., 1:2] = True
    assert torch.equal(held, expected)


def test_mask_above_one_half_is_given_and_folders_are_named():
    mask = torch.tensor([0.2, 0.5, 0.51, 1.0]).repeat(8)[:30].reshape(1, 5, 2, 3).repeat(2, 1, 1, 1)
    for condition in (Mask(), Mask(mask_dir="video_masks")):
        assert condition.roles("video") == {"video_mask"}
        state = condition.edit(state_of(), {"video_mask": mask}, Sure(2))
        assert torch.equal(state.denoise == 0, mask.reshape(2, 30) > 0.5)
    assert Mask(mask_dir="my_masks").folders("audio") == {"audio_mask": "my_masks"} and Mask().folders("audio") == {"audio_mask": "audio_masks"}
    with pytest.raises(DataError) as caught:
        Mask().edit(state_of(), {}, Sure(2))
    assert caught.value.code == "condition.media_missing"
    with pytest.raises(DataError):
        Mask().edit(state_of(), {"video_mask": mask[:, :4]}, Sure(2))


@pytest.mark.parametrize("generate", ["inside", "outside"])
@pytest.mark.parametrize("grid", [GRID, VideoGrid(1, 4, 4), VideoGrid(3, 1, 1), SOUND])
def test_random_masks_always_leave_and_give_something(generate, grid):
    condition = RandomMask(generate=generate, share=(0.1, 1.0), duration=(0.5, 1.0))
    state = condition.edit(state_of(grid, 100), {}, KeyedDraws(0, 0, range(100), "video"))
    given = (state.denoise == 0).float().mean(1)
    assert given.gt(0).all() and given.lt(1).all() and state.denoise.unique(dim=0).shape[0] > 1


def test_random_mask_covers_about_the_asked_share():
    grid = VideoGrid(1, 20, 20)
    state = RandomMask(share=(0.3, 0.3)).edit(state_of(grid, 50), {}, KeyedDraws(0, 0, range(50), "video"))
    assert (state.denoise.mean(1) - 0.3).abs().max() < 0.05  # the box is generated; edges are rounded to cells


def test_sampling_puts_content_in():
    still = Latents(torch.full((1, 4, 1, 2, 3), 7.0), VideoGrid(1, 2, 3))
    state = FirstFrame().edit(LatentState.blank(GRID, channels=4), {CONTENT: still}, Sure())
    assert state.clean[:, :6].eq(7).all() and state.clean[:, 6:].eq(0).all() and state.denoise[:, :6].eq(0).all()

    clip = Latents(torch.arange(3.0).view(1, 1, 3, 1, 1).expand(1, 4, 3, 2, 3), VideoGrid(3, 2, 3))
    ahead = Prefix(temporal_boundary=2).edit(LatentState.blank(GRID, channels=4), {CONTENT: clip}, Sure())
    behind = Suffix(temporal_boundary=2).edit(LatentState.blank(GRID, channels=4), {CONTENT: clip}, Sure())
    assert ahead.clean.reshape(5, 6, 4)[:, 0, 0].tolist() == [0, 1, 0, 0, 0]
    assert behind.clean.reshape(5, 6, 4)[:, 0, 0].tolist() == [0, 0, 0, 1, 2]  # the end of what was given
    with pytest.raises(DataError, match="prefix: the given media has 3 latent slices"):
        Prefix(temporal_boundary=4).edit(LatentState.blank(GRID, channels=4), {CONTENT: clip}, Sure())


def test_several_conditions_add_up():
    state = state_of()
    for condition in (FirstFrame(), Keyframes(at=(2,)), LastFrame()):
        state = condition.edit(state, {}, Sure(2))
    assert given_slices(state) == {0, 2, 4}


def test_fields_are_checked():
    for build in (
        lambda: Prefix(temporal_boundary=0),
        lambda: Prefix(temporal_boundary=4, temporal_boundary_max=2),
        lambda: Keyframes(),
        lambda: Keyframes(at=(1,), count=(1, 2)),
        lambda: RandomMask(share=(0.5, 0.2)),
        lambda: FirstFrame(probability=1.5),
        lambda: FirstFrame(probabilty=1.0),
    ):
        with pytest.raises(ValueError):
            build()
