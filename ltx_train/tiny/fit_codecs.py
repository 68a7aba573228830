"""Fitting the codecs: the video VAE to drawn clips, the audio VAE to their sounds, the vocoder to the waves themselves."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..geometry import patchify
from ..models.audio_codec_keys import audio_vae_arguments, vocoder_arguments, vocoder_names
from ..models.mel import MelSettings, log_mel
from ..models.video_codec_keys import MEAN, STD, VaeLayout, constructor_arguments, conv_names
from .drawing import COLOURS, DIRECTIONS, FPS, SHAPES, TONES, Scenes, draw, sound
from .fit_loop import Loop, pick
from .shapes import audio_vae_shapes, video_vae_shapes, vocoder_shapes
from .values import spectrogram_tables

WORDS = (tuple(COLOURS), SHAPES, tuple(DIRECTIONS), tuple(TONES))
CLIPS = ((17, 64, 64, 32), (25, 64, 96, 12), (1, 64, 64, 48))
"""Frames, height, width and clips a step."""


@dataclass(frozen=True)
class Effort:
    """How much is done: factors on the steps and on how many clips are drawn (1 on a GPU, little in a test), and the
    seconds that one loop may take."""

    steps: float = 1.0
    clips: float = 1.0
    limit: float | None = None

    def of(self, steps: int) -> int:
        return max(2, round(steps * self.steps))

    def count(self, clips: int) -> int:
        return max(8, round(clips * self.clips))


def generator(device: torch.device) -> torch.Generator:
    """torch's own generator of a device: graphs know how to advance it."""
    return torch.cuda.default_generators[device.index or 0] if device.type == "cuda" else torch.default_generator


def drawn_pool(count: int, frames: int, height: int, width: int, words: tuple, device: torch.device) -> tuple[Tensor, Scenes]:
    """Clips [count, F, H, W, 3] uint8 and their scenes."""
    scenes = Scenes.random(count, generator(device), words)
    parts = [(draw(scenes[i : i + 256], frames, height, width) * 255).round().to(torch.uint8) for i in range(0, count, 256)]
    return torch.cat(parts), scenes


def _pixels(clips: Tensor) -> Tensor:
    return clips.permute(0, 4, 1, 2, 3).float() / 127.5 - 1


def _kl(mean: Tensor, log_variance: Tensor) -> Tensor:
    """Mean over all values of the divergence from a standard normal."""
    return 0.5 * (mean.square() + log_variance.exp() - 1 - log_variance).mean()


def _floored(means: Tensor, variance: Tensor, axes: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """Mean and deviation of each channel; a deviation below the posterior's noise carries nothing and is not enlarged."""
    return means.mean(axes), torch.maximum(means.std(axes), variance.mean(axes).sqrt())


# ---- pictures


def fit_video(config: Mapping[str, Any], device: torch.device, effort: Effort) -> dict[str, Tensor]:
    """Tensors of a fitted video VAE under the file's names (``vae.``)."""
    from diffusers.models.autoencoders.autoencoder_kl_ltx2 import AutoencoderKLLTX2Video

    layout = VaeLayout.of(config["vae"])
    vae = AutoencoderKLLTX2Video(**constructor_arguments(layout)).to(device).train()
    pools = [drawn_pool(effort.count(12000 if n == 32 else 4000), f, h, w, WORDS, device)[0] for f, h, w, n in CLIPS]
    losses = [lambda pool=pool, n=clip[3]: _video_loss(vae, pool, n) for pool, clip in zip(pools, CLIPS)]
    Loop([*vae.encoder.parameters(), *vae.decoder.parameters()], losses, (0, 0, 1, 0, 0, 2), steps=effort.of(VIDEO_STEPS), limit=effort.limit, rate=1.5e-3).run("video")
    mean, std = _video_statistics(vae, pools[0], layout.latent_channels)
    stored = conv_names(video_vae_shapes(config["vae"]), layout)
    state = vae.state_dict()
    return {f"vae.{name}": state[theirs] for name, theirs in stored.items()} | {f"vae.{MEAN}": mean, f"vae.{STD}": std}


VIDEO_STEPS = 6000


def _video_loss(vae: nn.Module, pool: Tensor, count: int) -> Tensor:
    pixels = _pixels(pick([pool], count)[0])
    with torch.autocast(pixels.device.type, torch.bfloat16, enabled=pixels.is_cuda, cache_enabled=False):
        mean, log_variance = vae.encoder(pixels).chunk(2, dim=1)
        mean, log_variance = mean.float(), log_variance.float().clamp(-12, 4)
        seen = vae.decoder(mean + (0.5 * log_variance).exp() * torch.randn_like(mean), None).float()
    error = seen - pixels
    return error.abs().mean() + 4 * error.square().mean() + 2e-4 * _kl(mean, log_variance)


@torch.no_grad()
def _video_statistics(vae: nn.Module, pool: Tensor, channels: int) -> tuple[Tensor, Tensor]:
    rows = [vae.encoder(_pixels(part)).float().chunk(2, dim=1) for part in pool[:2048].split(128)]
    means, variances = torch.cat([m for m, _ in rows]), torch.cat([v.exp() for _, v in rows])
    assert means.shape[1] == channels, means.shape
    return _floored(means, variances, (0, 2, 3, 4))


# ---- sound

SECONDS = (17 / FPS, 25 / FPS)
AUDIO_STEPS, VOCODER_STEPS = 2800, 2400


def fit_sound(config: Mapping[str, Any], device: torch.device, effort: Effort) -> dict[str, Tensor]:
    """Tensors of a fitted audio VAE and vocoder under the file's names (``audio_vae.``, ``vocoder.``)."""
    from diffusers.models.autoencoders.autoencoder_kl_ltx2_audio import AutoencoderKLLTX2Audio

    vae = AutoencoderKLLTX2Audio(**audio_vae_arguments(config["audio_vae"])).to(device).train()
    settings = MelSettings.of(config["audio_vae"])
    pools = [_sound_pool(effort.count(6000), seconds, settings, device) for seconds in SECONDS]
    losses = [lambda mel=mel: _mel_loss(vae, mel, 64) for _, mel in pools]
    Loop([*vae.encoder.parameters(), *vae.decoder.parameters()], losses, (0, 1), steps=effort.of(AUDIO_STEPS), limit=effort.limit, rate=1.5e-3).run("audio")
    mean, std = _audio_statistics(vae, pools[0][1])
    state = vae.state_dict()
    found = {f"audio_vae.{n}": state[n] for n in audio_vae_shapes(config["audio_vae"]) if not n.startswith("per_channel")}
    found |= {f"audio_vae.{MEAN}": mean, f"audio_vae.{STD}": std}
    return found | _fit_vocoder(config, vae, pools, device, effort)


def _sound_pool(count: int, seconds: float, settings: MelSettings, device: torch.device) -> tuple[Tensor, Tensor]:
    """Clean waves [count, 2, N] and log mels [count, 2, frames, bins] of the same with their hiss."""
    scenes = Scenes.random(count, generator(device), WORDS)
    clean, mels = [], []
    for start in range(0, count, 256):
        part = scenes[start : start + 256]
        clean.append(sound(part, seconds))
        mels.append(log_mel(sound(part, seconds, generator=generator(device)), settings))
    return torch.cat(clean), torch.cat(mels)


def _mel_loss(vae: nn.Module, pool: Tensor, count: int) -> Tensor:
    mel = pick([pool], count)[0]
    mean, log_variance = vae.encoder(mel).chunk(2, dim=1)
    log_variance = log_variance.clamp(-12, 4)
    heard = vae.decoder(mean + (0.5 * log_variance).exp() * torch.randn_like(mean))
    frames = min(heard.shape[2], mel.shape[2])
    error = heard[:, :, :frames] - mel[:, :, :frames]
    return error.abs().mean() + 0.3 * error.square().mean() + 1e-3 * _kl(mean, log_variance)


@torch.no_grad()
def _audio_statistics(vae: nn.Module, pool: Tensor) -> tuple[Tensor, Tensor]:
    """In the order of the tokens: (channel, bin)."""
    mean, log_variance = vae.encoder(pool[:2048]).chunk(2, dim=1)
    return _floored(patchify(mean), patchify(log_variance.exp()), (0, 1))


def _fit_vocoder(config: Mapping[str, Any], vae: nn.Module, pools: list[tuple[Tensor, Tensor]], device: torch.device, effort: Effort) -> dict[str, Tensor]:
    """The first stage is fitted to the waves, half from true mels and half from the VAE's; the extension adds nothing.

    Drawn tones have no partials above 8 kHz, so there is nothing for the bandwidth extension to add: its last layer is 0.
    """
    from diffusers.pipelines.ltx2.vocoder import LTX2VocoderWithBWE

    vocoder = LTX2VocoderWithBWE(**vocoder_arguments(config["vocoder"], 128)).to(device).train()
    nn.init.zeros_(vocoder.bwe_generator.conv_out.weight)
    given = []
    for wave, mel in pools:
        with torch.no_grad():
            heard = torch.cat([vae.decoder(vae.encoder(part).chunk(2, dim=1)[0]) for part in mel.split(256)])
        frames = min(heard.shape[2], mel.shape[2], wave.shape[2] // 160)
        given.append((wave[:, :, : frames * 160], mel[:, :, :frames], heard[:, :, :frames]))
    losses = [lambda rows=rows, which=which: _wave_loss(vocoder.vocoder, rows[0], rows[which]) for rows in given for which in (1, 2)]
    Loop(list(vocoder.vocoder.parameters()), losses, (0, 1, 2, 3), steps=effort.of(VOCODER_STEPS), limit=effort.limit, rate=2e-3).run("vocoder")
    state, bwe = vocoder.state_dict(), config["vocoder"]["bwe"]
    tensors = {name: state[theirs] for name, theirs in vocoder_names(vocoder_shapes(config["vocoder"])).items()}
    tensors |= spectrogram_tables(bwe["n_fft"], bwe["win_size"], bwe["num_mels"], bwe["input_sampling_rate"])
    return {f"vocoder.{name}": value for name, value in tensors.items()}


def _wave_loss(vocoder: nn.Module, waves: Tensor, mels: Tensor) -> Tensor:
    wave, mel = pick([waves, mels], 32)
    error = vocoder(mel) - wave
    return error.abs().mean() + 5 * error.square().mean()
