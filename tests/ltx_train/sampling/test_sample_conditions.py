"""Conditions of samples: which media they ask for, and the states that they lead to."""

import pytest
import torch

from ltx_train.conditioning.conditions import CONTENT
from ltx_train.errors import ConfigError, DataError
from ltx_train.geometry import AudioGrid, Latents, VideoGrid
from ltx_train.sampling.recipe import ValidationSample, start_states

GRID = VideoGrid(5, 2, 4, fps=24.0)  # 128x64, 33 frames
SOUND = AudioGrid(1, 2, 3)
STEPS = round(33 / 24 * 25)


def sample(*conditions):
    return ValidationSample.model_validate({"prompt": "a", "conditions": list(conditions)})


def start(one, *media, streams=("video", "audio")):
    return start_states(one, list(media), streams=streams, video_grid=GRID, audio_grid=SOUND, video_channels=4, audio_channels=6)


def latents(frames=5, value=1.0, height=2, width=4):
    """Video whose latent frame i holds value + i."""
    line = (value + torch.arange(float(frames))).view(1, 1, frames, 1, 1)
    return Latents(line.expand(1, 4, frames, height, width).clone(), VideoGrid(frames, height, width))


def sound(steps, value=1.0):
    return Latents(torch.full((1, 2, steps, 3), value), AudioGrid(steps, 2, 3))


def given(state):
    """Clean value of each latent frame (or step) that is given, None where it is generated."""
    per = 8 if isinstance(state.grid, VideoGrid) else 1
    clean, denoise = (t[0, : state.num_target].reshape(-1, per, *t.shape[2:]) for t in (state.clean, state.denoise))
    return [None if d.any() else float(c.flatten()[0]) for c, d in zip(clean, denoise)]


def test_plain_sample_knows_nothing():
    states = start(sample())
    assert states.video.denoise.eq(1).all() and states.audio.clean.shape == (1, STEPS, 6)
    assert start(sample(), streams=("video",)).audio is None


@pytest.mark.parametrize(
    "condition, needs, media, expected",
    [
        ({"type": "first_frame", "image_or_video": "a.PNG"}, ("image", 1, False, True), latents(1), [1, None, None, None, None]),
        ({"type": "first_frame", "image_or_video": "a.mp4"}, ("video", 1, False, True), latents(1), [1, None, None, None, None]),
        ({"type": "last_frame", "image_or_video": "a.png"}, ("image", 9, True, False), latents(2), [None, None, None, None, 2]),
        ({"type": "prefix", "video": "a.mp4", "num_frames": 17}, ("video", 17, False, False), latents(3), [1, 2, 3, None, None]),
        ({"type": "prefix", "video": "a.mp4", "duration": 0.4}, ("video", 9, False, False), latents(2), [1, 2, None, None, None]),
        ({"type": "prefix", "video": "a.mp4"}, ("video", 33, False, False), latents(4), [1, 2, 3, 4, None]),
        ({"type": "suffix", "video": "a.mp4", "num_frames": 16}, ("video", 33, True, False), latents(5), [None, None, None, 4, 5]),
        ({"type": "keyframe", "image": "a.png", "frame": 0, "how": "replace"}, ("image", 1, False, False), latents(1), [1, None, None, None, None]),
        ({"type": "keyframe", "image": "a.png", "frame": 9, "how": "replace"}, ("image", 9, True, False), latents(2), [None, None, 2, None, None]),
        ({"type": "keyframe", "image": "a.png", "frame": 8, "how": "replace"}, ("image", 9, True, False), latents(2), [None, 2, None, None, None]),
    ],
)
def test_video_frames(condition, needs, media, expected):
    one = sample(condition)
    (need,) = one.conditions[0].needs(GRID)
    assert (need.kind, need.frames, need.from_end, need.recompress) == needs and (need.width, need.height, need.role) == (128, 64, CONTENT)
    assert given(start(one, {need.role: media}).video) == expected


@pytest.mark.parametrize(
    "condition, seconds, held",
    [
        ({"type": "prefix", "audio": "a.wav", "duration": 0.2}, 0.2, range(0, 5)),
        ({"type": "suffix", "audio": "a.wav", "duration": 0.2}, STEPS / 25, range(STEPS - 5, STEPS)),
    ],
)
def test_sound_runs(condition, seconds, held):
    one = sample(condition)
    grid = start(sample()).audio.grid
    (need,) = one.conditions[0].needs(grid)
    assert need.kind == "audio" and need.seconds == pytest.approx(seconds)
    state = start(one, {CONTENT: sound(STEPS)}).audio
    assert [i for i, v in enumerate(given(state)) if v is not None] == list(held)


def test_crop_and_mask_take_the_content_under_them():
    crop = start(sample({"type": "spatial_crop", "video": "a.mp4", "spatial_region": [0, 0, 64, 64]}), {CONTENT: latents()}).video
    held = (crop.denoise[0] == 0).view(5, 2, 4)
    assert held[:, :, :2].all() and not held[:, :, 2:].any() and crop.clean[0].view(5, 2, 4, 4)[3, 0, 0, 0] == 4 and crop.clean[0].view(5, 2, 4, 4)[3, 0, 3, 0] == 0
    one = sample({"type": "mask", "video": "a.mp4", "mask": "m.png"})
    assert [(n.role, n.kind) for n in one.conditions[0].needs(GRID)] == [(CONTENT, "video"), ("video_mask", "video_mask")]
    mask = (torch.rand(1, 5, 2, 4, generator=torch.Generator().manual_seed(0)) > 0.5).float()
    state = start(one, {CONTENT: latents(), "video_mask": mask}).video
    assert torch.equal(state.denoise == 0, mask.view(1, 40) > 0.5)
    spoken = start(sample({"type": "mask", "audio": "a.wav", "mask": "m.pt"}), {CONTENT: sound(STEPS), "audio_mask": torch.arange(STEPS)[None] < 4}).audio
    assert spoken.denoise[0, :4].eq(0).all() and spoken.denoise[0, 4:].eq(1).all()


def test_references_with_factors_and_several_of_them():
    one = sample({"type": "reference", "video": "a.mp4", "downscale_factor": 2, "temporal_scale_factor": 2}, {"type": "reference", "video": "b.mp4"}, {"type": "reference", "audio": "c.wav", "placement": "before"})
    first, second, third = (c.needs(start(sample())[c.modality].grid)[0] for c in one.conditions)
    assert (first.role, first.width, first.height, first.frames, first.stride) == ("reference_video", 64, 32, 17, 2)
    assert (second.role, second.frames) == ("reference_video_2", 33) and third.role == "reference_audio"
    states = start(one, {"reference_video": latents(3, height=1, width=2)}, {"reference_video_2": latents()}, {"reference_audio": sound(10)})
    assert states.video.tokens == 40 + 6 + 40 and states.video.num_target == 40 and states.audio.positions[0, 0, STEPS:].max() < 0
    assert states.video.positions[0, 1, 40:46].max() == 64  # stretched over the sample
    with pytest.raises(DataError, match="off the latent grid"):
        sample({"type": "reference", "video": "a.mp4", "downscale_factor": 4}).conditions[0].needs(GRID)


def test_appended_keyframes_are_numbered():
    one = sample({"type": "keyframe", "image": "a.png", "frame": 0}, {"type": "keyframe", "image": "b.png", "frame": -1})
    roles = [c.needs(GRID)[0].role for c in one.conditions]
    assert roles == ["keyframe", "keyframe_2"]
    state = start(one, *({role: latents(1)} for role in roles)).video
    assert state.tokens == 56 and state.positions[0, 0, 48:, 1].unique().item() == pytest.approx(33 / 24)


def test_given_streams():
    one = sample({"type": "video_to_audio", "video": "a.mp4"})
    assert one.conditions[0].needs(GRID)[0].kind == "video"
    states = start(one, {CONTENT: latents()})
    assert states.video.denoise.eq(0).all() and states.video.levels == (0.0,) and states.audio.denoise.eq(1).all()
    with pytest.raises(DataError, match="video_to_audio: the given video has 17 frames, the sample 33"):
        start(one, {CONTENT: latents(3)})
    states = start(sample({"type": "audio_to_video", "audio": "a.wav"}), {CONTENT: sound(STEPS)})
    assert states.audio.levels == (0.0,) and states.video.denoise.eq(1).all()


@pytest.mark.parametrize(
    "condition, error, said",
    [
        ({"type": "prefix", "video": "a.mp4", "num_frames": 16}, DataError, "prefix: 16 frames are not 8n[+]1"),
        ({"type": "suffix", "video": "a.mp4", "num_frames": 17}, DataError, "suffix: 17 frames are not 8n"),
        ({"type": "prefix", "video": "a.mp4", "num_frames": 33}, ConfigError, "leave nothing of a clip of 5"),
        ({"type": "keyframe", "image": "a.png", "frame": 33, "how": "replace"}, ConfigError, "frame 33 of a clip of 33"),
        ({"type": "spatial_crop", "video": "a.mp4", "spatial_region": [0, 0, 64, 128]}, ConfigError, "covers the whole"),
    ],
)
def test_nonsense_is_refused(condition, error, said):
    with pytest.raises(error, match=said):
        sample(condition).conditions[0].check(GRID)


def test_condition_on_a_stream_that_is_not_made():
    with pytest.raises(DataError, match="this sample makes no audio"):
        start(sample({"type": "prefix", "audio": "a.wav", "duration": 0.2}), {CONTENT: sound(5)}, streams=("video",))
