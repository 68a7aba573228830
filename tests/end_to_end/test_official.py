"""Configs and data of the official trainer, unchanged: all sixteen shapes of config, its encoded folders of every age."""

import sys

import pytest
import torch
import yaml
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from ltx_train.__main__ import main
from ltx_train.checks import check_config
from ltx_train.config import TrainConfig
from ltx_train.data.cache import Cache
from ltx_train.data.manifest import Manifest
from ltx_train.errors import ConfigError, DataError, LtxTrainError, MissingPackage
from ltx_train.runs.events import WarningEvent
from ltx_train.tiny import media
from tests.end_to_end.corridor import train
from tests.quantised_files import repacked

ALL = ["to_k", "to_q", "to_v", "to_out.0"]
VIDEO = [f"{a}.{m}" for a in ("attn1", "attn2") for m in ALL]
VIDEO_FF = ["ff.net.0.proj", "ff.net.2"]
AUDIO = [f"{a}.{m}" for a in ("audio_attn1", "audio_attn2") for m in ALL] + ["audio_ff.net.0.proj", "audio_ff.net.2"]
V2A = [f"video_to_audio_attn.{m}" for m in ALL]

MADE = {"is_generated": True}
V, A = {**MADE, "latents_dir": "latents"}, {**MADE, "latents_dir": "audio_latents"}
VIDEO_GIVEN, AUDIO_GIVEN = {**V, "is_generated": False}, {**A, "is_generated": False}


def on(stream, *conditions):
    return {**stream, "conditions": list(conditions)}


FIRST = {"type": "first_frame", "probability": 0.5}
LONG = {"rank": 32, "lr": "2e-4", "steps": 3000}
USUAL = {"rank": 32, "lr": "1e-4", "steps": 2000}
# name -> (video, audio, target modules, numbers, validation's deviations in the order audio CFG, video STG, audio STG,
# video modality, audio modality, generate_video, generate_audio, keep_last_n, condition of the validation sample)
CONFIGS = {
    "t2v_lora": (V, A, ALL, USUAL, (7, 1, 1, 3, 3, True, True, -1), None),
    "t2v_lora_low_vram": (V, A, ALL, {**USUAL, "rank": 16}, (7, 1, 1, 3, 3, True, True, -1), None),
    "i2v_lora": (on(V, FIRST), A, ALL, USUAL, (7, 1, 1, 3, 3, True, True, -1), {"type": "first_frame", "image_or_video": "image.png"}),
    "video_extend_lora": (on(V, {"type": "prefix", "temporal_boundary": 8}), A, ALL, USUAL, (7, 1, 1, 3, 3, True, True, -1), {"type": "prefix", "video": "clip.mp4", "num_frames": 57}),
    "video_suffix_lora": (on(V, {"type": "suffix", "temporal_boundary": 8}), A, ALL, USUAL, (7, 1, 1, 3, 3, True, True, -1), {"type": "suffix", "video": "clip.mp4", "num_frames": 64}),
    "v2v_ic_lora": (on(V, {"type": "reference", "latents_dir": "reference_latents", "probability": 1.0}, {"type": "first_frame", "probability": 0.2}), None, VIDEO + VIDEO_FF, LONG, (7, 1, 1, 1, 3, True, False, 3), {"type": "reference", "video": "clip.mp4", "downscale_factor": 1, "include_in_output": True}),
    "video_inpainting_lora": (on(V, {"type": "mask", "mask_dir": "video_masks"}), None, VIDEO, USUAL, (7, 1, 1, 1, 3, True, False, -1), {"type": "mask", "video": "clip.mp4", "mask": "image.png"}),
    "video_outpainting_lora": (on(V, {"type": "spatial_crop", "spatial_region": [0, 0, 288, 576]}), None, VIDEO, USUAL, (7, 1, 1, 1, 3, True, False, -1), {"type": "spatial_crop", "video": "clip.mp4", "spatial_region": [0, 0, 288, 576]}),
    "a2v_lora": (V, AUDIO_GIVEN, ALL, USUAL, (1, 1, 0, 3, 1, True, False, -1), {"type": "audio_to_video", "audio": "sound.wav"}),
    "v2a_lora": (VIDEO_GIVEN, A, AUDIO + V2A, USUAL, (7, 0, 1, 1, 3, False, True, -1), {"type": "video_to_audio", "video": "clip.mp4"}),
    "t2a_lora": (None, A, AUDIO, LONG, (7, 1, 1, 3, 1, False, True, 3), None),
    "audio_extend_lora": (None, on(A, {"type": "prefix", "temporal_boundary": 8}), AUDIO, LONG, (7, 1, 1, 3, 1, False, True, 3), {"type": "prefix", "audio": "sound.wav", "duration": 1.0}),
    "audio_suffix_lora": (None, on(A, {"type": "suffix", "temporal_boundary": 8}), AUDIO, LONG, (7, 1, 1, 3, 1, False, True, 3), {"type": "suffix", "audio": "sound.wav", "duration": 1.0}),
    "audio_inpainting_lora": (None, on(A, {"type": "mask", "mask_dir": "audio_masks"}), AUDIO, LONG, (7, 1, 1, 3, 1, False, True, 3), {"type": "mask", "audio": "sound.wav", "mask": "sound.wav"}),
    "a2a_ic_lora": (None, on(A, {"type": "reference", "latents_dir": "reference_audio_latents"}), AUDIO, LONG, (7, 1, 1, 3, 1, False, True, 3), {"type": "reference", "audio": "sound.wav", "include_in_output": False}),
    "av2av_ic_lora": (on(V, {"type": "reference", "latents_dir": "reference_latents"}), on(A, {"type": "reference", "latents_dir": "reference_audio_latents"}), ALL, LONG, (7, 1, 1, 3, 3, True, True, 3), {"type": "reference", "video": "clip.mp4"}),
}  # fmt: skip


def official_yaml(name, files, data, out, media_folder):
    """The text of one of the sixteen configs: every official field, 1e-4 as YAML reads it (a string); STG on a block that the tiny model has (theirs: 28)."""
    video, audio, targets, numbers, deviations, condition = CONFIGS[name]
    low = name.endswith("low_vram")
    audio_cfg, video_stg, audio_stg, video_mod, audio_mod, make_video, make_audio, keep = deviations
    given = {k: str(media_folder / v) if k in ("video", "audio", "mask", "image_or_video") else v for k, v in (condition or {}).items()}
    strategy = {"name": "flexible", **({"video": video} if video else {}), **({"audio": audio} if audio else {})}
    sections = {
        "model": {"model_path": str(files["model"]), "text_encoder_path": str(files["text_encoder"]), "training_mode": "lora", "load_checkpoint": None},
        "lora": {"rank": numbers["rank"], "alpha": numbers["rank"], "dropout": 0.0, "target_modules": targets},
        "training_strategy": strategy,
        "acceleration": {"mixed_precision_mode": "bf16", "quantization": "int8-quanto" if low else None, "load_text_encoder_in_8bit": low, "offload_optimizer_during_validation": low},
        "data": {"preprocessed_data_root": str(data), "num_dataloader_workers": 2},
        "validation": {
            "samples": [{"prompt": "A red block moves from left to right, a tone sounds.", "conditions": [given] if given else []}],
            "negative_prompt": "worst quality, inconsistent motion, blurry, jittery, distorted", "video_dims": [576, 576, 49] if low else [960, 544, 97],
            "frame_rate": 24.0, "seed": 42, "inference_steps": 30, "interval": 100, "video_cfg_scale": 1.0 if name == "v2a_lora" else 3.0, "audio_cfg_scale": float(audio_cfg),
            "video_stg_scale": float(video_stg), "audio_stg_scale": float(audio_stg), "stg_blocks": [1], "guidance_rescale": 0.7,
            "video_modality_guidance_scale": float(video_mod), "audio_modality_guidance_scale": float(audio_mod),
            "generate_video": make_video, "generate_audio": make_audio, "skip_initial_validation": False,
        },
        "checkpoints": {"interval": 250, "keep_last_n": keep, "precision": "bfloat16", "no_resume": False, "save_training_state": "minimal"},
        "flow_matching": {"timestep_sampling_mode": "shifted_logit_normal", "timestep_sampling_params": {}},
        "hub": {"push_to_hub": False, "hub_model_id": None},
        "wandb": {"enabled": False, "project": "ltx-2-trainer", "entity": None, "tags": ["ltx2", "lora"], "log_validation_videos": True},
        "seed": 42,
        "output_dir": str(out),
    }  # fmt: skip
    optimization = (
        f"optimization:\n  learning_rate: {numbers['lr']}\n  steps: {numbers['steps']}\n  batch_size: 1\n  gradient_accumulation_steps: 1\n  max_grad_norm: 1.0\n"
        f'  optimizer_type: "{"adamw8bit" if low else "adamw"}"\n  scheduler_type: "linear"\n  scheduler_params: {{}}\n  enable_gradient_checkpointing: true\n'
    )
    return yaml.safe_dump(sections, sort_keys=False) + optimization


def latents_pt(values, fps=24.0):
    return {"latents": values, "num_frames": values.shape[1], "height": values.shape[2], "width": values.shape[3], "fps": fps}


def audio_pt(values):
    return {"latents": values, "num_time_steps": values.shape[1], "frequency_bins": values.shape[2], "duration": values.shape[1] / 25}


@pytest.fixture(scope="module")
def encoded(tmp_path_factory):
    """An official .precomputed folder with one sample of every role, 960x544x97 as the shipped configs want it."""
    root = tmp_path_factory.mktemp("official") / ".precomputed"
    steps = round(97 / 24 * 25)
    contents = {
        "latents": latents_pt(torch.zeros(128, 13, 17, 30, dtype=torch.bfloat16)),
        "reference_latents": latents_pt(torch.zeros(128, 13, 17, 30, dtype=torch.bfloat16)),
        "audio_latents": audio_pt(torch.zeros(8, steps, 16)),
        "reference_audio_latents": audio_pt(torch.zeros(8, steps, 16)),
        "video_masks": {"mask": torch.zeros(13, 17, 30)},
        "audio_masks": {"mask": torch.zeros(steps)},
        "conditions": {"video_prompt_embeds": torch.zeros(1024, 8), "audio_prompt_embeds": torch.zeros(1024, 4), "prompt_attention_mask": torch.ones(1024, dtype=torch.long)},
    }
    for folder, content in contents.items():
        (root / folder / "clips").mkdir(parents=True)
        torch.save(content, root / folder / "clips" / "one.pt")
    return root


@pytest.fixture(scope="module")
def given_media(tmp_path_factory):
    """What the validation samples name."""
    folder = tmp_path_factory.mktemp("media")
    media.counter_clip(folder / "clip.mp4", 9, width=64, height=64)
    media.write_pcm(folder / "sound.wav", media.tone(0.2, 16000), 16000)
    from PIL import Image

    Image.fromarray(media.counter_frame(1, 64, 64)).save(folder / "image.png")
    return folder


@pytest.mark.parametrize("name", CONFIGS)
def test_the_sixteen_configs_are_accepted(home, tmp_path, encoded, given_media, name):
    path = tmp_path / f"{name}.yaml"
    path.write_text(official_yaml(name, home.model("ltx2.3"), encoded, tmp_path / "outputs" / name, given_media), encoding="utf-8")
    config = TrainConfig.load(path)
    lines = check_config(config)
    assert any(line.startswith("adapter: lora of rank") for line in lines) and any(line.startswith("data: 1 encoded") for line in lines)
    assert not any("matches no module" in line for line in lines)
    assert not (tmp_path / "outputs").exists(), "a check writes nothing"

    numbers = CONFIGS[name][3]
    assert (config.lora.rank, config.lora.alpha, config.optimization.steps) == (numbers["rank"], numbers["rank"], numbers["steps"])
    assert config.optimization.learning_rate == float(numbers["lr"])
    config.save(tmp_path / "training_config.yaml")
    again = TrainConfig.load(tmp_path / "training_config.yaml")
    assert again == config and again.fingerprint() == config.fingerprint()
    again.save(tmp_path / "again.yaml")
    assert (tmp_path / "again.yaml").read_bytes() == (tmp_path / "training_config.yaml").read_bytes()


def test_the_command_says_what_it_found(home, tmp_path, encoded, given_media, capsys):
    path = tmp_path / "t2v.yaml"
    path.write_text(official_yaml("t2v_lora", home.model("ltx2.3"), encoded, tmp_path / "outputs", given_media), encoding="utf-8")
    assert main(["train", str(path), "--check"]) == 0
    shown = capsys.readouterr().out
    assert "LTX-2.3" in shown and "The config can run." in shown
    path.write_text(path.read_text(encoding="utf-8").replace("  rank: 32", "  rang: 32"), encoding="utf-8")
    assert main(["train", str(path), "--check"]) == 2
    shown = capsys.readouterr()
    assert "lora.rang" in shown.out + shown.err and "lora.rank" in shown.out + shown.err


TOGETHER = {"acceleration": {"accumulate_together": 2}}


@pytest.mark.parametrize(
    ("sections", "code"),
    [
        ({**TOGETHER, "lora": {"kind": "dora"}}, "memory.together"),
        ({**TOGETHER, "lora": {"dropout": 0.1}}, "memory.together"),
        ({"acceleration": {"quantization": "int8"}, "lora": {"kind": "loha"}}, "lora.quantized_base"),
    ],
)
def test_a_check_refuses_memory_settings_that_do_not_go_with_the_adapter(home, tmp_path, encoded, sections, code):
    with pytest.raises(ConfigError) as caught:
        check_config(home.config(tmp_path / "run", data={"preprocessed_data_root": str(encoded)}, **sections))
    assert caught.value.code == code


AUDIO_ALONE, TWO_REFERENCES = {"name": "flexible", "audio": MADE}, {"name": "flexible", "video": on(MADE, {"type": "reference"}, {"type": "reference"})}


@pytest.mark.parametrize(
    ("strategy", "family", "silent", "code"),
    [
        (TWO_REFERENCES, "ltx2.3", False, "data.role_missing"),
        ({"name": "flexible", "video": on(MADE, {"type": "keyframe_tokens"})}, "ltx2.3", False, "data.role_missing"),
        (AUDIO_ALONE, "ltx2.3", True, "mode.silent_clips"),
        (AUDIO_ALONE, "ltxv-2b", False, "mode.no_audio_model"),
    ],
)
def test_a_check_and_a_training_refuse_data_that_lacks_what_the_mode_needs(home, tmp_path, strategy, family, silent, code):
    """Before the transformer is loaded: the check, which reads headers alone, and the training say the same."""
    data = {"preprocessed_data_root": str(home.cache(family, home.silent if silent else None))}
    config = home.config(tmp_path / "run", family, training_strategy=strategy, data=data)
    for look in (check_config, train):
        with pytest.raises(LtxTrainError) as caught:
            look(config)
        assert caught.value.code == code and len(caught.value.message) < 120


@pytest.fixture(scope="module")
def loha(home, tmp_path_factory):
    return train(home.config(tmp_path_factory.mktemp("loha") / "run", lora={"kind": "loha", "rank": 3}, optimization={"steps": 1})).lora


LATE = {
    "another rank": ({"lora": {"kind": "loha", "rank": 2}}, "lora.rank", "is a LoHa of rank 3; lora.rank is 2."),
    "another kind": ({"lora": {"rank": 4}}, "lora.kind", "holds LoHa; lora.kind is lora."),
    "no common module": ({"lora": {"kind": "loha", "target_modules": ["gates"]}}, "lora.no_common_module", "no module that is adapted here"),
    "a stage": ({"data": {"stages": [{"from_step": 1, "max_tokens": 1}]}}, "data.stage", "No sample has at most 1 tokens"),
    "held out": ({"data": {"held_out_root": "nowhere"}}, "data.root", "nowhere"),
    "a quantised file": ({"lora": {"kind": "dora"}}, "lora.quantized_base", "kind dora needs a base that is not quantised; the model file is."),
    "a quantised file, full": ({"model": {"training_mode": "full"}}, "full.quantized", "quantised"),
    "a LoRA, full": ({"model": {"training_mode": "full"}}, "full.state_mismatch", "do not fit this model"),
    "8-bit products": ({"acceleration": {"quantization": "fp8", "float8_products": True}}, "float8.card", "float8_products needs an NVIDIA card"),
    "shards": ({"model": {"training_mode": "full"}, "optimization": {"optimizer_type": "adafactor"}, "distributed": {"num_processes": 2}}, "full.optimizer", "adafactor"),
}


@pytest.mark.parametrize("name", LATE)
def test_what_would_fail_late_is_refused_by_a_check_and_before_the_model_is_loaded(home, tmp_path, monkeypatch, loha, name):
    sections, code, said = LATE[name]
    model = {"load_checkpoint": str(loha)} if code in ("lora.rank", "lora.kind", "lora.no_common_module", "full.state_mismatch") else {}
    if name.startswith("a quantised file"):
        model["model_path"] = str(tmp_path / "fp8.safetensors")
        repacked(home.model("ltx2.3")["model"], tmp_path / "fp8.safetensors", "fp8", lambda key: key.endswith(".attn1.to_q.weight") and ".transformer_blocks." in key)
    data = {"preprocessed_data_root": str(home.cache("ltx2.3")), **sections.get("data", {})}
    config = home.config(tmp_path / "run", **{**sections, "data": data, "model": {**model, **sections.get("model", {})}})
    monkeypatch.setattr("ltx_train.parts.load_base", lambda *given: pytest.fail("the model is loaded"))
    for look in (check_config, train):
        with pytest.raises(LtxTrainError) as caught:
            look(config)
        assert caught.value.code == code and said in caught.value.message and len(caught.value.message) < 120


def test_a_check_knows_that_silent_clips_leave_the_sound_out(home, tmp_path):
    """What sits between the streams is then not adapted: alone it would be nothing."""
    silent = home.config(tmp_path / "run", data={"preprocessed_data_root": str(home.cache("ltx2.3", home.silent))}, lora={"target_modules": ["cross_modal"]})
    with pytest.raises(ConfigError) as caught:
        check_config(silent)
    assert caught.value.code == "lora.no_match"
    unheard = home.config(tmp_path / "run", data={"preprocessed_data_root": str(home.cache("ltx2.3", home.silent))}, flow_matching={"video_weight": 0})
    for look in (check_config, train):
        with pytest.raises(ConfigError, match="the clips have no sound"):
            look(unheard)


def test_a_check_tells_of_packages_that_are_not_installed(home, tmp_path, monkeypatch):
    data = {"preprocessed_data_root": str(home.cache("ltx2.3"))}
    previews = {"samples": [{"prompt": "a red block"}], "video_dims": [64, 64, 9]}
    eight = home.config(tmp_path / "run", data=data, validation=previews, acceleration={"load_text_encoder_in_8bit": True})
    monkeypatch.setattr("ltx_train.memory.capability._PACKAGES", ())
    monkeypatch.setitem(sys.modules, "peft", None)
    for config, package in ((eight, "bitsandbytes"), (home.config(tmp_path / "run", data=data, lora={"kind": "lokr"}), "peft")):
        with pytest.raises(MissingPackage) as caught:
            check_config(config)
        assert caught.value.package == package


def test_starting_from_a_lora_of_another_family_is_told(home, tmp_path):
    earlier = train(home.config(tmp_path / "one", optimization={"steps": 1}))
    with safe_open(earlier.lora, "pt") as file:
        metadata = {**file.metadata(), "ltx_train.family": "ltx2"}
    save_file(load_file(earlier.lora), tmp_path / "old.safetensors", metadata)
    config = home.config(tmp_path / "two", model={"load_checkpoint": str(tmp_path / "old.safetensors")}, optimization={"steps": 1})
    said = "old.safetensors was trained on LTX-2 19B, not on LTX-2.3 22B."
    assert said in check_config(config)
    assert said in [e.message for e in train(config).events(WarningEvent)]


@pytest.mark.parametrize("name", ["video_extend_lora", "video_suffix_lora"])
def test_extending_what_is_too_short_is_refused(home, tmp_path, given_media, name):
    """The shipped boundary of 8 latent frames on the documented 960x544x49 (7 latent frames) would train on nothing."""
    for folder, content in {
        "latents": latents_pt(torch.zeros(128, 7, 2, 2)), "audio_latents": audio_pt(torch.zeros(8, 51, 16)),
        "conditions": {"video_prompt_embeds": torch.zeros(8, 8), "audio_prompt_embeds": torch.zeros(8, 4), "prompt_attention_mask": torch.ones(8)},
    }.items():  # fmt: skip
        (tmp_path / "data" / folder).mkdir(parents=True)
        torch.save(content, tmp_path / "data" / folder / "a.pt")
    text = official_yaml(name, home.model("ltx2.3"), tmp_path / "data", tmp_path / "out", given_media)
    with pytest.raises(ConfigError) as caught:
        check_config(TrainConfig.parse(yaml.safe_load(text)))
    assert caught.value.code == "condition.covers_all" and "7" in caught.value.message


def test_missing_folders_and_files_are_named(home, tmp_path, encoded, given_media):
    job = yaml.safe_load(official_yaml("v2v_ic_lora", home.model("ltx2.3"), encoded, tmp_path / "out", given_media))
    job["training_strategy"]["video"]["conditions"][0]["latents_dir"] = "depth_latents"
    with pytest.raises(DataError) as caught:
        check_config(TrainConfig.parse(job))
    assert "depth_latents" in str(caught.value)
    job["training_strategy"]["video"]["conditions"][0]["latents_dir"] = "reference_latents"
    job["validation"]["samples"][0]["conditions"][0]["video"] = str(tmp_path / "nowhere.mp4")
    with pytest.raises(ConfigError) as caught:
        check_config(TrainConfig.parse(job))
    assert "nowhere.mp4" in str(caught.value)


# -- encoded folders of every age train as our own cache does --


def export(cache, root, form):
    """One sample of our cache as the official trainer writes it: new or legacy captions, 5-D or flat latents."""
    entry = Manifest.read(cache).entries[0]
    store = Cache(cache)
    video, audio, text = store.get_latents(entry.video), store.get_latents(entry.audio), store.get_text(entry.text)
    n, limit = text.video.shape[0], 1024
    padded = lambda t: torch.cat([t.new_zeros(limit - n, t.shape[1]), t])  # noqa: E731 - the official tokenizer pads at the left
    mask = torch.cat([torch.zeros(limit - n, dtype=torch.long), torch.ones(n, dtype=torch.long)])
    values, sound = video.values[0], audio.values[0]
    picture = {**latents_pt(values), "latents": values.flatten(1).T.contiguous()} if form == "legacy" else latents_pt(values)
    heard = {**audio_pt(sound), "latents": sound.permute(1, 0, 2).flatten(1).contiguous()} if form == "legacy" else audio_pt(sound)
    if form == "legacy":
        caption = {"prompt_embeds": padded(text.video), "prompt_attention_mask": mask}
    else:
        second = text.video if text.audio is None else text.audio
        caption = {"video_prompt_embeds": padded(text.video), "audio_prompt_embeds": padded(second), "prompt_attention_mask": mask}
    names = {"conditions": "condition_0.pt", "latents": "latent_0.pt", "audio_latents": "latent_0.pt"} if form == "legacy" else {}
    for folder, content in {"latents": picture, "audio_latents": heard, "conditions": caption}.items():
        (root / folder).mkdir(parents=True, exist_ok=True)
        torch.save(content, root / folder / names.get(folder, "clip.pt"))
    return root


@pytest.mark.parametrize(("family", "form"), [("ltx2.3", "new"), ("ltx2.5", "new"), ("ltx2", "new"), ("ltx2", "legacy")])
def test_official_folders_train_as_our_cache(home, tmp_path, family, form):
    cache = home.cache(family, media.dataset(home.root / "single", 1, frames=17, width=64, height=64))
    strategy = {"name": "flexible", "video": V, "audio": A}
    ours = train(home.config(tmp_path / "ours", family, data={"preprocessed_data_root": str(cache)}, training_strategy=strategy, optimization={"batch_size": 1}))
    root = export(cache, tmp_path / ".precomputed", form)
    theirs = train(home.config(tmp_path / "theirs", family, data={"preprocessed_data_root": str(tmp_path)}, training_strategy=strategy, optimization={"batch_size": 1}))
    assert theirs.losses == pytest.approx(ours.losses, rel=1e-6) and root.is_dir()
    mine, other = ours.snapshot["weights"], theirs.snapshot["weights"]
    assert mine.keys() == other.keys() and all(torch.allclose(mine[n], other[n], atol=1e-6) for n in mine)


def test_the_old_strategies_train(home, tmp_path):
    """text_to_video without a name, and video_to_video: one noise level for both streams, first frames by chance."""
    old = train(home.config(tmp_path / "t2v", training_strategy={"with_audio": True, "first_frame_conditioning_p": 0.5}))
    assert len(old.losses) == 2 and any("audio" in n for n in old.modules)
    ic = train(home.config(tmp_path / "v2v", training_strategy={"name": "video_to_video", "first_frame_conditioning_p": 0.0}))
    assert len(ic.losses) == 2 and not any("audio" in n for n in ic.modules)
