"""The audio VAE and vocoder behind encode and decode: waveforms in and out, normalised latents between."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from ..errors import DataError, MissingPackage
from ..geometry import AudioGrid, patchify, unpatchify
from .audio_codec_keys import audio_vae_arguments, has_extension, vocoder_arguments, vocoder_names
from .blank import blank
from .checkpoint import Checkpoint
from .mel import MelSettings, log_mel, resample
from .video_codec_keys import MEAN, STD
from .weights import WeightSource, load_weights


class AudioCodec:
    """One loaded audio VAE with its vocoder, or one half of it.

    encoder, decoder, vocoder: networks, or None where that half was not loaded. The vocoder always runs in float32.
    """

    def __init__(
        self,
        grid: AudioGrid,
        mel: MelSettings,
        encoder: nn.Module | None,
        decoder: nn.Module | None,
        vocoder: nn.Module | None,
        statistics: tuple[Tensor, Tensor],
        dtype: torch.dtype,
        rate: int,
    ) -> None:
        self.grid, self.mel, self.dtype = grid, mel, dtype
        self.encoder, self.decoder, self.vocoder = encoder, decoder, vocoder
        self._mean, self._std = statistics  # [channels * bins], in the token order (channel, bin)
        self.output_rate = rate

    @classmethod
    def load(
        cls,
        checkpoint: Checkpoint,
        *,
        device: torch.device | str,
        dtype: torch.dtype = torch.float32,
        encoder: bool = True,
        decoder: bool = True,
        vocoder: bool = True,
    ) -> AudioCodec:
        """Build diffusers' networks from the checkpoint's own config and load the halves asked for, strictly.

        decoder loads the vocoder as well, unless vocoder is False (then only :meth:`decode_mel` works).
        Raises CheckpointError naming the file that would supply what is missing.
        """
        source, config = checkpoint.source("audio_vae"), checkpoint.config["audio_vae"]
        arguments = audio_vae_arguments(config)
        halves: dict[str, nn.Module] = {}
        for half, (module, tensors) in audio_halves(source, arguments, encoder=encoder, decoder=decoder).items():
            load_weights(module, tensors, dtype=dtype, device=device)
            halves[half] = module.eval().requires_grad_(False)
        voice, rate = (
            _vocoder(checkpoint, arguments["output_channels"] * arguments["mel_bins"], device) if decoder and vocoder else (None, 0)
        )
        mean, std = (source.get(name, dtype=torch.float32, device=device) for name in (MEAN, STD))
        return cls(
            checkpoint.audio_grid, MelSettings.of(config), halves.get("encoder"), halves.get("decoder"), voice, (mean, std), dtype, rate
        )

    @property
    def device(self) -> torch.device:
        return self._mean.device

    @torch.no_grad()
    def encode(self, waveform: Tensor, sample_rate: int) -> Tensor:
        """Waveform [B, 1 or 2, N] float in -1..1 -> normalised latents [B, 8, T, 16] float32 on the codec's device.

        Mono is doubled; any rate is resampled to the VAE's 16 kHz. T = ceil((N16 // 160 + 1) / 4): 25 a second.
        Raises DataError for other layouts and for sounds under 32 ms.
        """
        if waveform.ndim != 3 or waveform.shape[1] not in (1, 2) or not waveform.is_floating_point():
            raise DataError(
                "codec.waveform",
                f"A waveform of shape {list(waveform.shape)}, {waveform.dtype} cannot be encoded.",
                "The codec takes floats [batch, 1 or 2 channels, samples]; mix more channels down first.",
            )
        waveform = resample(waveform.to(self.device, torch.float32), sample_rate, self.mel.sample_rate)
        return self.encode_mel(log_mel(waveform.expand(-1, 2, -1), self.mel))

    @torch.no_grad()
    def encode_mel(self, mel: Tensor) -> Tensor:
        """Log mel [B, 2, frames, bins] -> normalised latents [B, C, T, bins / 4] float32."""
        assert self.encoder is not None, "the encoder was not loaded"
        latents = self.encoder(mel.to(self.device, self.dtype))[:, : self.grid.channels].float()
        return self._per_token(latents, (patchify(latents) - self._mean) / self._std)

    @torch.no_grad()
    def decode(self, latents: Tensor) -> tuple[Tensor, int]:
        """Normalised latents [B, 8, T, 16] -> (waveform [B, 2, N] float32 on the CPU, its sample rate).

        24 kHz from LTX-2's vocoder, 48 kHz from the bandwidth extension of 2.3 and later; N covers 4T - 3 mel frames.
        """
        assert self.vocoder is not None, "the vocoder was not loaded"
        waveform = self.vocoder(self.decode_mel(latents))
        return waveform.float().clamp(-1, 1).cpu(), self.output_rate

    @torch.no_grad()
    def decode_mel(self, latents: Tensor) -> Tensor:
        """Normalised latents [B, C, T, bins / 4] -> log mel [B, 2, 4T - 3, bins] float32."""
        assert self.decoder is not None, "the decoder was not loaded"
        grid = self.grid
        if latents.ndim != 4 or latents.shape[1] != grid.channels or latents.shape[3] != grid.bins or not latents.shape[2]:
            raise DataError(
                "codec.latents",
                f"Latents of shape {list(latents.shape)} cannot be decoded by this audio VAE.",
                f"It takes [batch, {grid.channels}, steps, {grid.bins}].",
            )
        raw = patchify(latents.to(self.device, torch.float32)) * self._std + self._mean
        return self.decoder(self._per_token(latents, raw).to(self.dtype)).float()

    def _per_token(self, like: Tensor, tokens: Tensor) -> Tensor:
        return unpatchify(tokens, AudioGrid(like.shape[2], like.shape[1], like.shape[3]))


def audio_halves(
    source: WeightSource, arguments: dict, *, encoder: bool = True, decoder: bool = True
) -> dict[str, tuple[nn.Module, WeightSource]]:
    """The halves asked for of diffusers' audio VAE on the meta device, each with its tensors."""
    try:
        from diffusers.models.autoencoders.autoencoder_kl_ltx2_audio import AutoencoderKLLTX2Audio
    except ImportError as error:
        raise MissingPackage(
            "diffusers>=0.38", "The engine's audio VAE", "Inside ComfyUI its own audio VAE can do this: connect its socket"
        ) from error
    with blank():
        vae = AutoencoderKLLTX2Audio(**arguments)
    wanted = {"encoder": encoder, "decoder": decoder}
    return {half: (getattr(vae, half), source.subset(half + ".")) for half, want in wanted.items() if want}


def vocoder_network(source: WeightSource, config: Mapping, mel_channels: int) -> tuple[nn.Module, WeightSource, int]:
    """diffusers' vocoder on the meta device, its tensors under diffusers' names, and its output rate in Hz."""
    try:
        from diffusers.pipelines.ltx2 import vocoder as library

        build = library.LTX2VocoderWithBWE if has_extension(config) else library.LTX2Vocoder
    except (ImportError, AttributeError) as error:
        raise MissingPackage(
            "diffusers>=0.38", "The engine's vocoder", "Inside ComfyUI its own audio VAE can do this: connect its socket"
        ) from error
    arguments = vocoder_arguments(config, mel_channels)
    with blank():
        vocoder = build(**arguments)
    if has_extension(config):  # a fixed filter that no file holds, and that the meta device would leave empty
        ratio = arguments["output_sampling_rate"] // arguments["input_sampling_rate"]
        vocoder.resampler = library.UpSample1d(ratio=ratio, window_type="hann", persistent=False)
    return vocoder, source.renamed(vocoder_names(source.keys())), arguments["output_sampling_rate"]


def _vocoder(checkpoint: Checkpoint, mel_channels: int, device: torch.device | str) -> tuple[nn.Module, int]:
    """The vocoder in float32 (its mathematics needs that) and its output rate in Hz."""
    vocoder, tensors, rate = vocoder_network(checkpoint.source("vocoder"), checkpoint.config["vocoder"], mel_channels)
    load_weights(vocoder, tensors, dtype=torch.float32, device=device)
    return vocoder.to(device).eval().requires_grad_(False), rate
