"""The validation section: official fields and defaults, legacy forms, checks, and which numbers follow the model."""

import pytest
from pydantic import ValidationError

from ltx_train.errors import ConfigError
from ltx_train.geometry import VideoFactors
from ltx_train.models.families import FAMILIES
from ltx_train.sampling.guidance import Guidance
from ltx_train.sampling.recipe import MODEL_NUMBERS, ValidationSample, ValidationSection
from ltx_train.sampling.sample_conditions import FirstFrameSample, ReferenceSample
from ltx_train.sampling.schedule import DISTILLED, LTXV_098_DISTILLED, sigma_schedule

# reference/official_trainer.md 1.7
OFFICIAL_DEFAULTS = dict(
    samples=(), video_dims=(960, 544, 89), frame_rate=24.0, seed=42, inference_steps=30, interval=100, video_cfg_scale=3.0, audio_cfg_scale=7.0,
    video_stg_scale=1.0, audio_stg_scale=1.0, stg_blocks=(28,), guidance_rescale=0.7, video_modality_guidance_scale=3.0,
    audio_modality_guidance_scale=3.0, generate_audio=True, generate_video=True, skip_initial_validation=False,
)  # fmt: skip


def read(**fields):
    return ValidationSection.model_validate(fields)


def test_official_defaults():
    section = ValidationSection()
    assert {name: getattr(section, name) for name in OFFICIAL_DEFAULTS} == OFFICIAL_DEFAULTS
    assert not section.active and read(samples=[{"prompt": "a"}]).active and not read(samples=[{"prompt": "a"}], interval=None).active


def test_official_samples_with_every_condition():
    conditions = [
        {"type": "first_frame", "image_or_video": "a.png"},
        {"type": "prefix", "video": "a.mp4", "num_frames": 57},
        {"type": "prefix", "audio": "a.wav", "duration": 1.0},
        {"type": "suffix", "video": "a.mp4", "num_frames": 64},
        {"type": "spatial_crop", "video": "a.mp4", "spatial_region": [0, 0, 288, 576]},
        {"type": "mask", "video": "a.mp4", "mask": "m.mp4"},
        {"type": "mask", "audio": "a.wav", "mask": "m.pt"},
        {"type": "reference", "video": "a.mp4", "downscale_factor": 2, "temporal_scale_factor": 1, "include_in_output": True},
    ]
    section = read(samples=[{"prompt": "a", "conditions": conditions, "video_dims": [512, 512, 25], "seed": 0}, {"prompt": "b", "conditions": [{"type": "video_to_audio", "video": "a.mp4"}]}])
    assert section.seed_of(section.samples[0]) == 0  # seed 0 is a seed
    assert section.seed_of(section.samples[1]) == 42
    assert section.samples[1].frozen() == "video"
    assert read(**section.model_dump(mode="json")) == section


def test_legacy_forms(tmp_path):
    image, clip = tmp_path / "a.png", tmp_path / "b.mp4"
    image.touch(), clip.touch()
    section = read(
        prompts=["one", "two"], images=[str(image), str(image)], reference_videos=[str(clip), str(clip)], reference_downscale_factor=2,
        include_reference_in_output=True, guidance_scale=4.5, stg_scale=0.5, stg_mode="stg_v",
    )  # fmt: skip
    assert [s.prompt for s in section.samples] == ["one", "two"]
    assert section.samples[0].conditions == (FirstFrameSample(image_or_video=str(image)), ReferenceSample(video=str(clip), downscale_factor=2, include_in_output=True))
    assert (section.video_cfg_scale, section.audio_cfg_scale, section.video_stg_scale, section.audio_stg_scale) == (4.5, 4.5, 0.5, 0.0)
    assert read(stg_scale=2.0, stg_mode="stg_av").audio_stg_scale == 2.0
    one = read(prompts="a cat, sitting", images=str(image))
    assert [s.prompt for s in one.samples] == ["a cat, sitting"] and one.samples[0].conditions == (FirstFrameSample(image_or_video=str(image)),)
    assert read(prompts="").samples == ()
    assert read(**section.model_dump(mode="json")) == section


@pytest.mark.parametrize(
    "fields, said",
    [
        ({"guidance_scale": 3.0, "video_cfg_scale": 3.0}, "older form"),
        ({"stg_scale": 1.0, "audio_stg_scale": 1.0}, "older form"),
        ({"stg_mode": "stg_x"}, "stg_mode"),
        ({"prompts": ["a", "b"], "images": ["x.png"]}, "1 files for 2 prompts"),
        ({"prompts": ["a"], "images": ["/nowhere/x.png"]}, "there is no file"),
        ({"images": ["x.png"]}, "go with prompts"),
        ({"prompts": ["a"], "samples": [{"prompt": "b"}]}, "not both"),
        ({"prompts": 5}, "prompts: a list of texts"),
        ({"prompts": {"a": 1}}, "prompts: a list of texts"),
        ({"prompts": ["a"], "images": 5}, "images: a list"),
        ({"prompts": ["a"], "images": [5]}, "there is no file 5"),
        ({"prompts": ["a"], "images": ["\udc80"]}, "there is no file .udc80"),
        ({"prompts": ["a"], "images": ["~nobody-here/x.png"]}, "there is no file"),
        ({"frame_rate": 1e-6}, "greater than or equal to 1"),
        ({"frame_rate": 1e300}, "less than or equal to 240"),
        ({"inference_steps": 10**12}, "less than or equal to 1000"),
        ({"samples": [{"prompt": "a", "conditions": [{"type": "prefix", "audio": "a", "duration": 1e308}]}]}, "less than or equal to 3600"),
        ({"samples": [{"prompt": "a"}], "generate_audio": False, "generate_video": False}, "nothing to sample"),
        ({"video_cfg_scale": 0.5}, "greater than or equal to 1"),
        ({"guidance_rescale": 1.5}, "less than or equal to 1"),
        ({"interval": 0}, "greater than 0"),
        ({"frame_rat": 24}, "Extra inputs"),
        ({"samples": [{"prompt": "a", "conditions": [{"type": "prefix", "video": "a", "audio": "b"}]}]}, "either video or audio"),
        ({"samples": [{"prompt": "a", "conditions": [{"type": "reference"}]}]}, "either video or audio"),
        ({"samples": [{"prompt": "a", "conditions": [{"type": "prefix", "audio": "b", "num_frames": 9}]}]}, "num_frames is for video"),
        ({"samples": [{"prompt": "a", "conditions": [{"type": "prefix", "video": "b", "num_frames": 9, "duration": 1.0}]}]}, "not both"),
    ],
)
def test_refusals(fields, said):
    with pytest.raises(ValidationError, match=said):
        read(**fields)


def test_own_noise_levels_are_checked():
    with pytest.raises(ConfigError, match="no schedule"):
        read(sigmas=[0.5, 0.9, 0.0])


GIVEN = {"video_to_audio": {"type": "video_to_audio", "video": "a.mp4"}, "audio_to_video": {"type": "audio_to_video", "audio": "a.wav"}}


@pytest.mark.parametrize(
    "conditions, fine",
    [
        ([GIVEN["video_to_audio"], GIVEN["audio_to_video"]], False),
        ([GIVEN["video_to_audio"], {"type": "first_frame", "image_or_video": "a.png"}], False),
        ([GIVEN["audio_to_video"], {"type": "prefix", "audio": "a.wav"}], False),
        ([GIVEN["audio_to_video"], {"type": "first_frame", "image_or_video": "a.png"}], True),
        ([GIVEN["video_to_audio"], {"type": "reference", "audio": "a.wav"}], True),
    ],
)
def test_a_given_stream_takes_no_other_condition(conditions, fine):
    if fine:
        assert ValidationSample.model_validate({"prompt": "a", "conditions": conditions}).frozen()
    else:
        with pytest.raises(ValidationError, match="cannot be combined"):
            ValidationSample.model_validate({"prompt": "a", "conditions": conditions})


def test_streams_of_a_sample():
    plain = ValidationSample(prompt="a")
    given = {k: ValidationSample.model_validate({"prompt": "a", "conditions": [v]}) for k, v in GIVEN.items()}
    assert read().streams_of(plain, has_audio=True) == ("video", "audio")
    assert read().streams_of(plain, has_audio=False) == ("video",)  # LTX-Video with the official defaults
    assert read(generate_video=False).streams_of(plain, has_audio=True) == ("audio",)
    assert read(generate_audio=False).streams_of(given["audio_to_video"], has_audio=True) == ("video", "audio")
    assert read(generate_video=False).streams_of(given["video_to_audio"], has_audio=True) == ("video", "audio")
    for section, sample in ((read(generate_video=False), plain), (read(), given["audio_to_video"])):
        with pytest.raises(ConfigError) as caught:
            section.streams_of(sample, has_audio=False)
        assert caught.value.code == "sample.no_audio_model"


def test_texts_and_missing_files(tmp_path):
    section = read(samples=[{"prompt": "a"}, {"prompt": "a", "negative_prompt": "n"}, {"prompt": "b", "conditions": [{"type": "first_frame", "image_or_video": str(tmp_path / "x.png")}]}])
    assert section.texts() == ["a", section.negative_prompt, "n", "b"]
    assert section.missing_files() == [tmp_path / "x.png"]


def test_a_file_that_no_disk_takes_is_missing(tmp_path):
    names = ["x" * 300, "a\0b", "~nobody-here/x.png"]
    section = read(samples=[{"prompt": "a", "noise": name} for name in names])
    assert [str(p) for p in section.missing_files()] == names


def test_grid_of_a_sample():
    grid = read(video_dims=[960, 544, 89], frame_rate=23.976).video_grid(ValidationSample(prompt="a"), VideoFactors())
    assert (grid.frames, grid.height, grid.width, grid.fps) == (12, 17, 30, 23.976)
    with pytest.raises(ConfigError) as caught:
        read().video_grid(ValidationSample(prompt="a", video_dims=(970, 544, 90)), VideoFactors())
    assert caught.value.code == "sample.dims" and "960x544x89" in caught.value.hint


@pytest.mark.parametrize("dims, near", [((64, 63, 8), "64x64x9"), ((0, 64, 9), "32x64x9"), ((64, -64, 9), "64x32x9"), ((64, 64, -7), "64x64x1"), ((64, 64, 0), "64x64x1"), ((32 * 10**9, 64, 10**12), "16384x64x16385")])
def test_sizes_below_one_are_refused_with_the_nearest_that_is_allowed(dims, near):
    with pytest.raises(ConfigError) as caught:
        read(video_dims=dims).video_grid(ValidationSample(prompt="a"), VideoFactors())
    assert near in caught.value.hint


@pytest.mark.parametrize("fields, said", [
    ({"seed": 2**64}, "a seed is"), ({"samples": [{"prompt": "a", "seed": -(2**63) - 1}]}, "a seed is"), ({"sigmas": [1.0, 0.5]}, "end with 0"),
    ({"negative_prompt": "a\ud800"}, "character 2"), ({"samples": [{"prompt": "\udc00"}]}, "character 1"),
])  # fmt: skip
def test_values_that_no_sample_can_be_made_with(fields, said):
    with pytest.raises(ValidationError, match=said):
        read(**fields)
    read(seed=-1, samples=[{"prompt": "", "seed": 2**64 - 1}])


def test_a_shift_that_leaves_no_noise_levels():
    for tokens in (200_000, 10**9):
        with pytest.raises(ConfigError, match=f"schedule_tokens {tokens}"):
            read(schedule_tokens=tokens).recipe(FAMILIES["ltx2.3"])


@pytest.mark.parametrize("name", FAMILIES)
def test_numbers_follow_the_model(name):
    family = FAMILIES[name]
    recipe = ValidationSection().recipe(family)
    assert recipe.schedule.sigmas == sigma_schedule(family.sampling.steps) and recipe.schedule.sampler == "euler"
    small = ValidationSection().recipe(family, tokens=1120).schedule.sigmas  # LTX-Video's shift goes by the sample, later ones' does not
    assert small == sigma_schedule(family.sampling.steps, tokens=4096 if family.audio else 1120)
    assert recipe.guidance.stg_blocks == family.sampling.stg_blocks and recipe.guidance.video.cfg == family.sampling.video_cfg
    assert recipe.image_crf == family.sampling.image_crf and recipe.needs_negative
    distilled = ValidationSection().recipe(family, distilled=True)
    assert distilled.schedule.sigmas == (DISTILLED if family.audio else LTXV_098_DISTILLED)
    assert distilled.schedule.sampler == ("euler_ancestral" if name == "ltx2.5" else "euler")
    assert distilled.guidance.video.neutral and distilled.guidance.audio.neutral and not distilled.needs_negative


def test_numbers_set_by_hand_stay_and_survive_the_yaml():
    section = read(inference_steps=30, video_cfg_scale=5.0)
    assert section.set_by_hand == ("inference_steps", "video_cfg_scale")
    again = read(**section.model_dump(mode="json"))
    assert again == section
    recipe = again.recipe(FAMILIES["ltx2"])
    assert recipe.schedule.steps == 30 and recipe.guidance.video == Guidance(5.0, 1.0, 3.0, 0.7) and recipe.guidance.stg_blocks == (29,)
    everything = read(**{k: v for k, v in OFFICIAL_DEFAULTS.items() if k in MODEL_NUMBERS})
    assert everything.recipe(FAMILIES["ltx2"], distilled=True).guidance.video == Guidance(3.0, 1.0, 3.0, 0.7)
    with pytest.raises(ValidationError, match="set_by_hand"):
        read(set_by_hand=["prompt"])


def test_sampler_and_schedule_by_choice():
    family = FAMILIES["ltx2.5"]
    assert read(sampler="euler").recipe(family, distilled=True).schedule.sampler == "euler"
    assert read(schedule="distilled").recipe(family).schedule.sigmas == DISTILLED
    assert read(schedule="shifted", inference_steps=4).recipe(family, distilled=True).schedule.sigmas == sigma_schedule(4)
    assert read(sigmas=[1.0, 0.5, 0.0]).recipe(family).schedule.sigmas == (1.0, 0.5, 0.0)
    assert read(schedule_tokens=None, inference_steps=4).recipe(family, tokens=999).schedule.sigmas == sigma_schedule(4, tokens=999)
    assert read(inference_steps=12).recipe(family, distilled=True).schedule.sigmas == sigma_schedule(12)


def test_stg_block_of_a_model_of_another_depth():
    assert ValidationSection().recipe(FAMILIES["ltx2.3"], num_layers=3).guidance.stg_blocks == (1,)
    assert ValidationSection().recipe(FAMILIES["ltx2.3"], num_layers=48).guidance.stg_blocks == (28,)
    for blocks in ([28], [-1]):
        with pytest.raises(ConfigError, match=f"no block {blocks[0]}"):
            read(stg_blocks=blocks).recipe(FAMILIES["ltx2.3"], num_layers=3)
    read(stg_blocks=[28], video_stg_scale=0, audio_stg_scale=0).recipe(FAMILIES["ltx2.3"], num_layers=3)  # not used
