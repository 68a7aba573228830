"""The engine's codecs against recorded numbers of the reference software (tests/parity/data/README.md), 5e-5."""

import copy
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from ltx_train.models.audio_codec import AudioCodec
from ltx_train.models.checkpoint import Checkpoint
from ltx_train.models.mel import log_mel
from ltx_train.models.video_codec import VideoCodec

DATA = Path(__file__).parent / "data"
VIDEO = ["ltx2", "ltx2.3", "ltx2.5", "ltxv0.9.5"]
AUDIO = ["ltx2", "ltx2.3", "ltx2.5"]
TOLERANCE = 5e-5


def error(ours: Tensor, recorded: Tensor) -> float:
    assert ours.shape == recorded.shape
    return (ours - recorded).abs().max().item()


@pytest.fixture(scope="module")
def inputs() -> dict[str, Tensor]:
    return load_file(DATA / "codec_inputs.safetensors")


@pytest.fixture(scope="module", params=VIDEO)
def video(request) -> tuple[VideoCodec, dict[str, Tensor]]:
    checkpoint = Checkpoint.open(DATA / f"{request.param}.checkpoint.safetensors")
    codec = VideoCodec.load(checkpoint, device="cpu", dtype=torch.float32)
    codec.decode_noise = 0.0  # the 0.9.5 numbers were recorded with decode timestep 0.05 and no noise added
    return codec, load_file(DATA / f"{request.param}.codecs.safetensors")


@pytest.mark.parametrize("frames", [1, 9, 17])
def test_video_encode(video, inputs, frames: int) -> None:
    codec, recorded = video
    pixels = inputs["pixels_u8"].permute(0, 2, 3, 4, 1)
    latent = codec.encode(pixels[:, :frames])
    assert latent.dtype == torch.float32
    assert error(latent, recorded[f"video_encode.frames{frames}.latent"]) < TOLERANCE


def test_video_decode(video) -> None:
    codec, recorded = video
    image = torch.cat(list(codec.decode_stretches(recorded["video_decode.image.latent"])), dim=2)
    assert error(image, recorded["video_decode.image.pixels"]) < TOLERANCE
    clip = torch.cat(list(codec.decode_stretches(recorded["video_decode.clip.latent"])), dim=2)
    assert error(clip[..., ::5, ::5], recorded["video_decode.clip.pixels_every5"]) < TOLERANCE
    assert error(clip.square().mean((1, 3, 4)).sqrt(), recorded["video_decode.clip.frame_rms"]) < TOLERANCE


def test_decode_to_uint8_is_the_rounded_recording(video) -> None:
    codec, recorded = video
    frames = codec.decode(recorded["video_decode.image.latent"])
    wanted = ((recorded["video_decode.image.pixels"] + 1) * 127.5).clamp(0, 255).permute(0, 2, 3, 4, 1)
    assert frames.dtype == torch.uint8 and frames.shape == wanted.shape
    assert (frames.float() - wanted).abs().max() <= 0.5 + 1e-2


def fixture_noise(shape: list[int]) -> Tensor:
    """n[i] = sqrt(3) * (2 * frac((i + 1) * golden ratio) - 1), as the recording used it."""
    place = torch.arange(math.prod(shape), dtype=torch.float64) + 1
    return (math.sqrt(3) * (2 * (place * 0.6180339887498949 % 1) - 1)).float().view(*shape)


DIFFUSION = [
    ("floor", 7, 1, "x0"),
    ("below_floor_image", 3, 1, "x0"),
    ("below_floor_clip", 5, 1, "x0"),
    ("floor_2step_x0", 11, 2, "x0"),
    ("floor_2step_v", 11, 2, "v"),
    ("below_floor_clip_2step_x0", 7, 2, "x0"),
]


@pytest.mark.parametrize("case, every, steps, output", DIFFUSION)
def test_diffusion_decode(case: str, every: int, steps: int, output: str) -> None:
    checkpoint = Checkpoint.open(DATA / "ltx2.5.checkpoint.safetensors", video_vae=DATA / "ltx2.5.video_vae_diffusion.safetensors")
    config = copy.deepcopy(checkpoint.config)
    config["vae"]["decoder"]["default_num_inference_steps"] = steps
    config["vae"]["model_output_type"] = output
    codec = VideoCodec.load(replace(checkpoint, config=config), device="cpu", dtype=torch.float32, encoder=False)
    assert codec.decoder.floor == (3, 3, 3)
    recorded = {
        k.split(".", 2)[2]: v for k, v in load_file(DATA / "ltx2.5.codecs.safetensors").items() if k.startswith(f"diffusion_decode.{case}.")
    }
    noise = fixture_noise(recorded["noise_shape"].tolist())
    assert error(noise.flatten()[:64], recorded["noise_head"]) < 1e-6
    pixels = torch.cat(list(codec.decode_stretches(recorded["latent"], noise=noise)), dim=2)
    assert error(pixels[..., ::every, ::every], recorded[f"pixels_every{every}"]) < TOLERANCE
    assert error(pixels.square().mean((1, 3, 4)).sqrt(), recorded["frame_rms"]) < TOLERANCE


def test_diffusion_vae_encodes_like_the_conv_vae(inputs) -> None:
    checkpoint = Checkpoint.open(DATA / "ltx2.5.checkpoint.safetensors", video_vae=DATA / "ltx2.5.video_vae_diffusion.safetensors")
    codec = VideoCodec.load(checkpoint, device="cpu", dtype=torch.float32, decoder=False)
    latent = codec.encode(inputs["pixels_u8"].permute(0, 2, 3, 4, 1))
    assert error(latent, load_file(DATA / "ltx2.5.codecs.safetensors")["video_encode.frames17.latent"]) < TOLERANCE


@pytest.fixture(scope="module", params=AUDIO)
def audio(request) -> tuple[AudioCodec, dict[str, Tensor]]:
    checkpoint = Checkpoint.open(DATA / f"{request.param}.checkpoint.safetensors")
    return AudioCodec.load(checkpoint, device="cpu"), load_file(DATA / f"{request.param}.codecs.safetensors")


def test_waveform_to_mel_to_latent(audio, inputs) -> None:
    codec, recorded = audio
    waveform = inputs["waveform_i16"].float() / 32768
    assert error(log_mel(waveform, codec.mel), recorded["audio.mel"]) < TOLERANCE
    assert error(codec.encode_mel(recorded["audio.mel"]), recorded["audio.latent"]) < TOLERANCE
    assert error(codec.encode(waveform, 16000), recorded["audio.latent"]) < TOLERANCE


def test_latent_to_mel_to_waveform(audio) -> None:
    codec, recorded = audio
    assert error(codec.decode_mel(recorded["audio.latent"]), recorded["audio.decoded_mel"]) < TOLERANCE
    assert error(codec.vocoder(recorded["vocoder.mel"]), recorded["vocoder.waveform"]) < TOLERANCE
    if "vocoder.stage1_waveform" in recorded:
        assert error(codec.vocoder.vocoder(recorded["vocoder.mel"])[..., :800], recorded["vocoder.stage1_waveform"]) < TOLERANCE
    waveform, rate = codec.decode(recorded["audio.latent"])
    frames = recorded["audio.decoded_mel"].shape[2]
    assert rate == codec.output_rate and waveform.shape == (1, 2, frames * rate // 100)


@pytest.mark.parametrize("frames", [29, 30, 33])
def test_two_latent_channels(frames: int) -> None:
    checkpoint = Checkpoint.open(DATA / "audio_vae_2ch.checkpoint.safetensors")
    codec = AudioCodec.load(checkpoint, device="cpu", vocoder=False)
    recorded = load_file(DATA / "audio_vae_2ch.codecs.safetensors")
    assert error(codec.encode_mel(recorded[f"T{frames}.mel"]), recorded[f"T{frames}.latent"]) < TOLERANCE
    assert error(codec.decode_mel(recorded[f"T{frames}.latent"]), recorded[f"T{frames}.decoded_mel"]) < TOLERANCE
