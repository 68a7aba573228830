"""The strategy section: official forms, legacy migration, streams and roles, refused nonsense, the table of modes."""

import pytest
import torch
from pydantic import ValidationError

from ltx_train.conditioning.conditions import FirstFrame, Prefix
from ltx_train.conditioning.modes import MODES, TrainingStrategySection, mode
from ltx_train.conditioning.references import Reference
from ltx_train.errors import ConfigError, DataError
from ltx_train.geometry import AudioGrid, Latents, VideoGrid
from ltx_train.training.randomness import KeyedDraws

VIDEO, AUDIO = VideoGrid(9, 10, 20, fps=24.0), AudioGrid(12, 2, 3)


def read(value):
    return TrainingStrategySection.model_validate(value)


def test_a_mapping_without_a_name_is_text_to_video():
    strategy = read({})
    assert strategy.name == "text_to_video" and strategy.shared_sigma
    assert strategy.video.conditions == (FirstFrame(probability=0.1),) and strategy.audio is None
    assert (strategy.streams().video, strategy.streams().audio) == ("generated", "absent")


def test_legacy_forms_are_migrated():
    sound = read({"name": "text_to_video", "with_audio": True, "first_frame_conditioning_p": 0.0})
    assert sound.video.conditions == () and sound.audio.is_generated and sound.audio.latents_dir == "audio_latents"
    pair = read({"name": "video_to_video", "first_frame_conditioning_p": 0.2})
    assert pair.video.conditions == (FirstFrame(probability=0.2), Reference(latents_dir="reference_latents"))
    assert pair.required_roles() == {"video", "reference_video"}


def test_official_flexible_form_with_all_conditions():
    strategy = read(
        {
            "name": "flexible",
            "video": {
                "is_generated": True,
                "latents_dir": "latents",
                "conditions": [
                    {"type": "first_frame", "probability": 0.5},
                    {"type": "prefix", "temporal_boundary": 2},
                    {"type": "suffix", "temporal_boundary": 2},
                    {"type": "spatial_crop", "spatial_region": [0, 0, 288, 576]},
                    {"type": "mask", "mask_dir": "video_masks"},
                    {"type": "reference", "latents_dir": "reference_latents", "probability": 1.0},
                ],
            },
            "audio": {"is_generated": True, "latents_dir": "audio_latents", "conditions": [{"type": "reference", "latents_dir": "reference_audio_latents"}]},
        }
    )
    assert not strategy.shared_sigma
    assert strategy.required_roles() == {"video", "audio", "video_mask", "reference_video", "reference_audio"}
    assert strategy.directories() == {
        "video": "latents",
        "audio": "audio_latents",
        "video_mask": "video_masks",
        "reference_video": "reference_latents",
        "reference_audio": "reference_audio_latents",
    }
    assert strategy.without_audio().streams().present == ("video",) and strategy.without_audio().video == strategy.video
    assert read(strategy.model_dump(mode="json")) == strategy


@pytest.mark.parametrize(
    "value, said",
    [
        ({"name": "flexible"}, "nothing is generated"),
        ({"name": "flexible", "video": {"is_generated": False, "latents_dir": "latents"}}, "nothing is generated"),
        ({"name": "flexible", "audio": {"is_generated": True, "conditions": [{"type": "first_frame"}]}}, "first_frame is for video only"),
        ({"name": "flexible", "audio": {"is_generated": True, "conditions": [{"type": "spatial_crop", "spatial_region": [0, 0, 1, 1]}]}}, "for video only"),
        ({"name": "flexibel"}, "must be flexible, text_to_video or video_to_video"),
        ({"name": "flexible", "video": {"is_generated": True, "conditions": [{"type": "prefix", "boundary": 3}]}}, "Extra inputs"),
        ({"name": "flexible", "video": {"latents_dir": "latents"}}, "is_generated"),
        ({"first_frame_conditioning_p": 2.0}, "less than or equal to 1"),
    ],
)
def test_nonsense_is_refused(value, said):
    with pytest.raises(ValidationError, match=said):
        read(value)


def test_conditions_that_together_leave_nothing():
    strategy = read({"name": "flexible", "video": {"is_generated": True, "conditions": [{"type": "prefix", "temporal_boundary": 2}, {"type": "last_frame"}]}})
    strategy.check({"video": VIDEO})
    with pytest.raises(ConfigError) as caught:
        strategy.check({"video": VideoGrid(3, 2, 2)})
    assert caught.value.code == "mode.nothing_left" and "prefix, last_frame" in caught.value.message


def test_sound_from_silent_clips_is_refused():
    with pytest.raises(DataError) as caught:
        mode("t2v_audio").strategy().check_sound(clips=4, silent=4)
    assert caught.value.code == "mode.silent_clips"
    mode("t2v_audio").strategy().check_sound(clips=4, silent=3)
    mode("t2v").strategy().check_sound(clips=4, silent=4)


def test_a_given_stream_takes_references_only():
    strategy = read(
        {
            "name": "flexible",
            "video": {"is_generated": True},
            "audio": {"is_generated": False, "conditions": [{"type": "prefix", "temporal_boundary": 2}, {"type": "reference"}]},
        }
    )
    sound = Latents(torch.randn(2, 2, 12, 3), AUDIO)
    state = strategy.audio.state(sound, {"reference_audio": sound}, KeyedDraws(0, 0, (0, 1), "audio"))
    assert state.tokens == 24 and state.denoise.eq(0).all() and state.loss_weight.eq(0).all() and state.levels == (0.0,)


def test_metadata_comes_from_the_data():
    grids = {"video": VIDEO}
    assert mode("v2v").strategy().lora_metadata(grids, {"reference_video": VideoGrid(5, 5, 10)})["reference_downscale_factor"] == "2"
    assert mode("t2v").strategy().lora_metadata(grids, {}) == {}


ISSUE_MODES = "t2v t2v_audio i2v extend suffix inpaint outpaint v2v a2v v2a t2a audio_extend audio_suffix audio_inpaint a2a av2av".split()


@pytest.mark.parametrize("name", ISSUE_MODES + sorted(set(MODES) - set(ISSUE_MODES)))
def test_every_mode_gives_clean_tokens_no_timestep_and_no_loss(name):
    strategy = mode(name).strategy()
    strategy.check({"video": VIDEO, "audio": AUDIO})
    assert read(strategy.model_dump(mode="json")) == strategy
    latents = {"video": Latents(torch.randn(2, 4, 9, 10, 20), VIDEO), "audio": Latents(torch.randn(2, 2, 12, 3), AUDIO)}
    media = {
        "reference_video": latents["video"],
        "reference_audio": latents["audio"],
        "video_mask": (torch.rand(2, 9, 10, 20) > 0.5).float(),
        "audio_mask": (torch.rand(2, 12) > 0.5).float(),
    }
    assert strategy.required_roles() - {"video", "audio"} <= media.keys()
    for modality, config in strategy.modalities().items():
        state = config.state(latents[modality], media, KeyedDraws(0, 3, (0, 1), modality))
        sigma = torch.tensor([0.3, 0.8])
        noise = torch.randn(2, state.num_target, state.clean.shape[2])
        clean = state.denoise == 0
        assert torch.equal(state.timesteps(sigma) == 0, clean) and torch.equal(state.loss_weight == 0, clean)
        assert torch.equal(state.noised(noise, sigma)[clean], state.clean[clean])
        free = torch.where(clean[..., None], 0.0, 1.0)[:, : state.num_target]
        expected = state.clean[:, : state.num_target] * (1 - sigma[:, None, None] * free) + sigma[:, None, None] * free * noise
        torch.testing.assert_close(state.noised(noise, sigma)[:, : state.num_target], expected)
        assert bool((state.denoise > 0).any()) == config.is_generated


def test_unknown_mode_names_the_nearest():
    with pytest.raises(ConfigError) as caught:
        mode("t2w")
    assert "t2v" in caught.value.hint
    assert mode("extend").strategy().video.conditions == (Prefix(temporal_boundary=8),)
