"""References and keyframe tokens: positions, derived factors, metadata, dropout."""

import pytest
import torch

from ltx_train.conditioning.draws import Sure
from ltx_train.conditioning.modes import ModalityConfig
from ltx_train.conditioning.references import KeyframeTokens, Reference
from ltx_train.conditioning.state import LatentState
from ltx_train.errors import ConfigError, DataError
from ltx_train.geometry import AudioGrid, Latents, VideoGrid
from ltx_train.training.randomness import KeyedDraws

TARGET = VideoGrid(3, 2, 4, fps=24.0)


def latents(grid, batch=1, value=None):
    shape = (batch, 4, grid.frames, grid.height, grid.width) if isinstance(grid, VideoGrid) else (batch, grid.channels, grid.steps, grid.bins)
    return Latents(torch.randn(shape) if value is None else torch.full(shape, float(value)), grid)


def test_reference_is_appended_clean_and_without_loss():
    state = LatentState.of(latents(TARGET, 2), keyframe_marker=True)
    reference = latents(VideoGrid(3, 1, 2, fps=24.0), 2)
    edited = Reference().edit(state, {"reference_video": reference}, Sure(2))
    assert edited.num_target == 24 and edited.tokens == 30
    assert torch.equal(edited.clean[:, 24:], reference.tokens) and torch.equal(edited.clean[:, :24], state.clean)
    assert edited.timesteps(torch.ones(2))[:, 24:].eq(0).all() and edited.loss_weight[:, 24:].eq(0).all()
    assert not edited.keyframes[:, 24:].any()
    # rows and columns of the half-size grid are stretched over the clip's
    assert edited.positions[0, 1, 24:].max() == 64 and edited.positions[0, 2, 24:].max() == 128


def test_several_references_have_roles_of_their_own():
    state = LatentState.of(latents(TARGET))
    media = {"reference_video": latents(TARGET, value=1), "reference_video_2": latents(VideoGrid(3, 1, 2), value=2)}
    config = ModalityConfig.model_validate({"is_generated": True, "conditions": [{"type": "reference"}, {"type": "first_frame"}, {"type": "reference", "latents_dir": "depth"}]})
    folders = [c.folders("video") for c in config.conditions]
    assert folders == [{"reference_video": "reference_latents"}, {}, {"reference_video_2": "depth"}]
    state = config.state(latents(TARGET), media, Sure())
    assert state.tokens == 24 + 24 + 6 and state.clean[0, 24:48].eq(1).all() and state.clean[0, 48:].eq(2).all()
    assert ModalityConfig.model_validate(config.model_dump()) == config


def test_dropout_is_one_draw_a_batch_and_independent_of_the_split():
    condition = Reference(probability=0.5)
    media = {"reference_video": latents(TARGET)}
    state = LatentState.of(latents(TARGET))
    seen = [condition.edit(state, media, KeyedDraws(0, step, (7,), "video")).tokens for step in range(100)]
    assert set(seen) == {24, 48} and 30 < seen.count(48) < 70
    assert seen == [condition.edit(state, media, KeyedDraws(0, step, (1, 2), "video")).tokens for step in range(100)]


@pytest.mark.parametrize(
    "reference, message",
    [(VideoGrid(3, 1, 3), "no whole fraction"), (VideoGrid(3, 2, 2), "no whole fraction"), (VideoGrid(4, 2, 4), "frames are no whole fraction")],
)
def test_odd_sizes_are_refused(reference, message):
    with pytest.raises(DataError, match=message):
        Reference().factors(TARGET, reference)


def test_given_factors_are_taken_as_they_are_and_a_still_is_no_subsampling():
    assert Reference(downscale_factor=1, temporal_scale_factor=1).factors(TARGET, VideoGrid(2, 3, 3)) == (1, 1)
    assert Reference().factors(TARGET, VideoGrid(1, 1, 2)) == (2, 1)


def test_metadata_under_every_key_that_loaders_read():
    grids = {"reference_video": VideoGrid(2, 1, 2)}
    assert Reference().lora_metadata(TARGET, grids) == {
        "reference_downscale_factor": "2",
        "reference_spatial_scale_factor": "2",
        "reference_temporal_scale_factor": "2",
    }
    assert Reference().lora_metadata(AudioGrid(5), {"reference_audio": AudioGrid(5)}) == {}


def test_sound_reference_over_and_before_the_clip():
    grid = AudioGrid(6, 2, 3)
    target = AudioGrid(9, 2, 3)
    over = Reference().positions(target, grid)
    before = Reference(placement="before").positions(target, grid)
    assert torch.equal(over, grid.positions())
    # t - duration - 0.04 with the duration of 6 latent steps: (4*6 + 1 - 4) * 0.01 s
    torch.testing.assert_close(before, grid.positions() - 0.21 - 0.04)
    assert before.max() == pytest.approx(-0.04) and target.positions().min() == 0
    state = Reference(placement="before").edit(LatentState.of(latents(target)), {"reference_audio": latents(grid)}, Sure())
    assert state.tokens == 15 and state.positions[0, 0, 9:].max() < 0
    with pytest.raises(ConfigError):
        Reference(placement="before").check(TARGET)


def test_keyframe_tokens_span_one_pixel_frame():
    still = latents(VideoGrid(1, 2, 4))
    state = KeyframeTokens(frame=-1).edit(LatentState.of(latents(TARGET), keyframe_marker=True), {"keyframe": still}, Sure())
    assert state.tokens == 32 and not state.keyframes[:, 24:].any() and state.denoise[:, 24:].eq(0).all()
    torch.testing.assert_close(state.positions[0, 0, 24:], torch.tensor([[16 / 24, 17 / 24]]).expand(8, 2))
    assert torch.equal(state.positions[0, 1:, 24:], VideoGrid(1, 2, 4).positions()[1:])
    with pytest.raises(ConfigError, match="frame 17 of a clip of 17"):
        KeyframeTokens(frame=17).check(TARGET)
    with pytest.raises(DataError, match="is not a still of"):
        KeyframeTokens().edit(LatentState.of(latents(TARGET)), {"keyframe": latents(VideoGrid(1, 1, 2))}, Sure())
