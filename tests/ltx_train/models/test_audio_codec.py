"""AudioCodec beside the recorded numbers (tests/parity/test_codecs.py): mel bank, resampling, channels, refusals."""

import math
from pathlib import Path

import pytest
import torch

from ltx_train.errors import CheckpointError, DataError
from ltx_train.models.audio_codec import AudioCodec
from ltx_train.models.audio_codec_keys import audio_vae_arguments, vocoder_arguments
from ltx_train.models.checkpoint import Checkpoint
from ltx_train.models.families import known_config
from ltx_train.models.mel import MelSettings, log_mel, mel_bank, resample

DATA = Path(__file__).parents[2] / "parity" / "data"


def load(name: str, **options) -> AudioCodec:
    return AudioCodec.load(Checkpoint.open(DATA / f"{name}.checkpoint.safetensors"), device="cpu", **options)


def tone(rate: int, hertz: float, seconds: float = 0.5) -> torch.Tensor:
    return torch.sin(2 * math.pi * hertz * torch.arange(int(rate * seconds), dtype=torch.float64) / rate).float()


def test_mel_bank_against_transformers() -> None:
    from transformers.audio_utils import mel_filter_bank

    theirs = torch.tensor(mel_filter_bank(513, 64, 0.0, 8000.0, 16000, norm="slaney", mel_scale="slaney")).float()
    assert torch.allclose(mel_bank(64, 1024, 16000, 0.0, 8000.0), theirs, atol=1e-8)


def test_mel_of_a_tone_peaks_at_its_band() -> None:
    settings = MelSettings()
    mel = log_mel(tone(16000, 1000.0).view(1, 1, -1), settings)
    assert mel.shape == (1, 1, 8000 // 160 + 1, 64)
    band = mel_bank(64, 1024, 16000, 0.0, 8000.0)[round(1000 / 16000 * 1024)].argmax()
    assert mel[0, 0, 25].argmax() == band
    silence = log_mel(torch.zeros(1, 2, 4000), settings)
    assert torch.allclose(silence, torch.full_like(silence, math.log(1e-5)))


@pytest.mark.parametrize("rate", [48000, 44100, 22050, 24000, 8000, 96000, 44101])
def test_resampled_tones_are_the_same_tones(rate: int) -> None:
    """Closed form: below both Nyquist frequencies the sampled sine itself, above the lower one nothing."""
    tones = [hertz for hertz in (220.0, 3000.0, 7000.0, 9500.0) if hertz < 0.47 * rate]
    ours = resample(torch.stack([tone(rate, hertz) for hertz in tones]), rate, 16000)
    length = math.ceil(int(rate * 0.5) * 16000 / rate)
    assert len(tones) >= 2 and ours.shape == (len(tones), length)
    wanted = torch.stack([tone(16000, hertz)[:length] if hertz < 8000 else torch.zeros(length) for hertz in tones])
    assert (ours - wanted)[:, 200:-200].abs().max() < 5e-6


def test_resampling_keeps_constants_shapes_and_blocks() -> None:
    constant = resample(torch.ones(2, 3, 4410), 44100, 16000)
    assert constant.shape == (2, 3, 1600) and torch.allclose(constant[..., 200:-200], torch.ones(1200), atol=1e-6)
    sound = torch.randn(1, 2, 5000, generator=torch.Generator().manual_seed(0))
    assert torch.equal(resample(sound, 16000, 16000), sound)
    assert torch.equal(resample(sound, 48000, 16000, block=100), resample(sound, 48000, 16000))
    with pytest.raises(DataError):
        resample(sound, 0, 16000)


def test_mono_is_doubled_and_any_rate_taken() -> None:
    codec = load("ltx2.3", decoder=False)
    mono = tone(16000, 500.0).view(1, 1, -1)
    latents = codec.encode(mono, 16000)
    assert latents.shape == (1, 1, 13, 16) and latents.dtype == torch.float32  # 51 mel frames
    assert torch.equal(latents, codec.encode(mono.expand(-1, 2, -1), 16000))
    elsewhere = codec.encode(tone(48000, 500.0).view(1, 1, -1), 48000)
    assert elsewhere.shape == latents.shape
    assert (elsewhere - latents)[:, :, 2:-2].abs().mean() < 0.1 * latents.std()


@pytest.mark.parametrize("shape, dtype", [((1, 6, 16000), torch.float32), ((2, 16000), torch.float32), ((1, 2, 16000), torch.int16)])
def test_other_layouts_are_refused(shape, dtype) -> None:
    with pytest.raises(DataError) as caught:
        load("ltx2", decoder=False).encode(torch.zeros(shape, dtype=dtype), 16000)
    assert caught.value.code == "codec.waveform"


def test_too_short_and_foreign_latents_are_refused() -> None:
    codec = load("ltx2")
    with pytest.raises(DataError, match="too short"):
        codec.encode(torch.zeros(1, 2, 1500), 48000)
    with pytest.raises(DataError) as caught:
        codec.decode(torch.zeros(1, 8, 4, 16))
    assert "[batch, 1, steps, 16]" in caught.value.hint


@pytest.mark.parametrize("name, rate", [("ltx2", 24000), ("ltx2.5", 48000)])
def test_decode_gives_stereo_in_range(name: str, rate: int) -> None:
    codec = load(name, encoder=False)
    waveform, got = codec.decode(torch.randn(2, 1, 5, 16, generator=torch.Generator().manual_seed(0)))
    assert got == rate and waveform.shape == (2, 2, 17 * rate // 100) and waveform.abs().max() <= 1


def test_bfloat16_vae_keeps_a_float32_vocoder() -> None:
    codec = load("ltx2.3", dtype=torch.bfloat16)
    assert {p.dtype for p in codec.vocoder.parameters()} == {torch.float32}
    assert {p.dtype for p in codec.decoder.parameters()} == {torch.bfloat16}
    latents = torch.randn(1, 1, 5, 16, generator=torch.Generator().manual_seed(0))
    exact = load("ltx2.3", vocoder=False)
    assert (codec.decode_mel(latents) - exact.decode_mel(latents)).abs().mean() < 0.05
    assert codec.decode(latents)[0].isfinite().all()


def test_missing_vocoder_says_which_file() -> None:
    with pytest.raises(CheckpointError, match="vocoder"):
        load("audio_vae_2ch")


def test_first_stage_of_the_extended_vocoder_clamps() -> None:
    """diffusers' default leaves the clamp out (0.17 off where the first stage clips); the extension itself has none."""
    arguments = vocoder_arguments(known_config("ltx2.3")["vocoder"], 128)
    assert arguments["final_act_fn"] == "clamp" and arguments["bwe_final_act_fn"] is None
    assert vocoder_arguments(known_config("ltx2")["vocoder"], 128)["final_act_fn"] == "tanh"


def test_width_is_free_of_the_statistics() -> None:
    """The codec holds the statistics (channels x bins) itself, so a narrower VAE builds: diffusers ties them to its width."""
    config = known_config("ltx2")["audio_vae"]
    config["model"]["params"]["ddconfig"]["ch"] = 16
    arguments = audio_vae_arguments(config)
    assert (arguments["base_channels"], arguments["latent_channels"], arguments["mel_bins"]) == (16, 8, 64)
