"""The video VAEs of all families behind encode and decode: uint8 frames in and out, normalised latents between."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from einops import rearrange
from torch import Tensor, nn

from ..errors import DataError, MissingPackage
from ..geometry import VideoFactors
from .blank import blank
from .checkpoint import Checkpoint
from .diffusion_decoder import DiffusionDecoder, pad_to_floor
from .tiling import Span, Tiling, causal_encode_spans, over_space, over_time, spatial_spans, temporal_decode_spans, tile_cells
from .video_codec_keys import MEAN, STD, VaeLayout, constructor_arguments, conv_names
from .weights import WeightSource, load_weights

# Decoders that are conditioned on a timestep (LTX-Video 0.9.1 and later) expect slightly noised latents.
_DECODE_TIMESTEP = 0.05
_DECODE_NOISE = 0.025


class VideoCodec:
    """One loaded video VAE, or one half of it.

    encoder, decoder: networks or None where that half was not loaded. mean, std: [C] float32 statistics of the latents.
    """

    def __init__(
        self,
        layout: VaeLayout,
        factors: VideoFactors,
        encoder: nn.Module | None,
        decoder: nn.Module | DiffusionDecoder | None,
        mean: Tensor,
        std: Tensor,
        dtype: torch.dtype,
    ) -> None:
        self.layout, self.factors, self.dtype = layout, factors, dtype
        self.encoder, self.decoder = encoder, decoder
        self._mean, self._std = mean.view(1, -1, 1, 1, 1), std.view(1, -1, 1, 1, 1)
        self.decode_timestep, self.decode_noise = _DECODE_TIMESTEP, _DECODE_NOISE if layout.timestep_conditioning else 0.0

    @classmethod
    def load(
        cls,
        checkpoint: Checkpoint,
        *,
        device: torch.device | str,
        dtype: torch.dtype = torch.bfloat16,
        encoder: bool = True,
        decoder: bool = True,
    ) -> VideoCodec:
        """Build diffusers' network from the checkpoint's own config and load the halves asked for, strictly.

        Raises CheckpointError for a missing VAE, one that cannot be built (16x16x4 with attention), or wrong tensors.
        """
        source, config = checkpoint.source("video_vae"), checkpoint.config["vae"]
        layout, factors = VaeLayout.of(config), checkpoint.video_factors
        assert layout.factors == (factors.time, factors.height, factors.width), (layout.factors, factors)
        halves: dict[str, nn.Module | DiffusionDecoder] = {}
        for half, (module, tensors) in conv_halves(source, layout, encoder=encoder, decoder=decoder and not layout.diffusion).items():
            load_weights(module, tensors, dtype=dtype, device=device)
            halves[half] = module.eval().requires_grad_(False)
        if decoder and layout.diffusion:
            halves["decoder"] = DiffusionDecoder.load(source, layout, device=device, dtype=dtype)
        mean, std = (source.get(name, dtype=torch.float32, device=device) for name in (MEAN, STD))
        codec = cls(layout, factors, halves.get("encoder"), halves.get("decoder"), mean, std, dtype)
        codec.decode_timestep = float(config.get("decode_timestep", codec.decode_timestep))
        if layout.timestep_conditioning:
            codec.decode_noise = float(config.get("decode_noise_scale", codec.decode_noise))
        return codec

    @property
    def device(self) -> torch.device:
        return self._mean.device

    def bytes_per_pixel(self, *, decode: bool) -> float:
        """About how many bytes of work one pixel of one frame takes at the peak, for :meth:`Tiling.for_memory`.

        The full-rate layers decide: copies of their width over a patch. Measured on full-size networks in bfloat16: 7.7
        (encode) and 6.3 to 9 (decode) copies for the conv VAEs, 12.6 for the diffusion decoder.
        """
        width = self.layout.decoder_width if decode else self.layout.encoder_width
        copies = 13 if decode and self.layout.diffusion else 10
        return copies * width / self.layout.patch_size**2 * self.dtype.itemsize

    @torch.no_grad()
    def encode(self, frames: Tensor, tiling: Tiling | None = None) -> Tensor:
        """Frames [B, F, H, W, 3] uint8 -> normalised latents [B, C, F', H', W'] float32 on the codec's device.

        Frames must be 8n + 1 and sides multiples of 32 (the VAE's factors), else DataError.
        """
        assert self.encoder is not None, "the encoder was not loaded"
        self._check_frames(frames)
        frames = frames.to(self.device)
        factor = self.factors
        rows, columns, length = frames.shape[2] // factor.height, frames.shape[3] // factor.width, factor.latent_frames(frames.shape[1])
        space, overlap, time, late = tile_cells(tiling, factor)
        times = causal_encode_spans(length, time, late)
        across, down = spatial_spans(columns, space, overlap, 1), spatial_spans(rows, space, overlap, 1)

        def tile(time: Span, row: Span, column: Span) -> Tensor:
            first, last = time.start * factor.time, (time.stop - 1) * factor.time + 1
            part = frames[
                :,
                first:last,
                row.start * factor.height : row.stop * factor.height,
                column.start * factor.width : column.stop * factor.width,
            ]
            pixels = rearrange(part, "b f h w c -> b c f h w").float().div(127.5).sub(1).to(self.dtype)
            return self.encoder(pixels)[:, : self.layout.latent_channels].float()

        latents = torch.cat(
            list(over_time(times, lambda time: over_space(down, across, lambda row, column: tile(time, row, column)))), dim=2
        )
        return (latents - self._mean) / self._std

    @torch.no_grad()
    def decode(self, latents: Tensor, tiling: Tiling | None = None, seed: int = 0) -> Tensor:
        """Normalised latents [B, C, F', H', W'] -> frames [B, F, H, W, 3] uint8 on the CPU.

        seed: of the noise that some decoders start from or add; the same seed gives the same frames on every device.
        """
        stretches = [_to_uint8(chunk).cpu() for chunk in self.decode_stretches(latents, tiling, seed=seed)]
        return torch.cat(stretches, dim=1)

    @torch.no_grad()
    def decode_stretches(
        self, latents: Tensor, tiling: Tiling | None = None, *, seed: int = 0, noise: Tensor | None = None
    ) -> Iterator[Tensor]:
        """The same as float pixels [B, 3, f, H, W], about -1..1 and not clamped, one stretch of time after the other.

        noise: takes the place of the seeded noise, in the shape that the decoder draws (a conditioned decoder: the latents').
        """
        assert self.decoder is not None, "the decoder was not loaded"
        self._check_latents(latents)
        raw = latents.to(self.device, torch.float32) * self._std + self._mean
        tiles = tile_cells(tiling, self.factors)
        if isinstance(self.decoder, DiffusionDecoder):
            return self.decoder.decode(raw.to(self.dtype), tiles, seed=seed, noise=noise)
        if self.decode_noise:
            if noise is None:
                noise = torch.randn(raw.shape, generator=torch.Generator().manual_seed(seed))
            raw = (1 - self.decode_noise) * raw + self.decode_noise * noise.to(raw)
        height, width = raw.shape[3] * self.factors.height, raw.shape[4] * self.factors.width
        raw = pad_to_floor(raw, (1, self._least, self._least))[0]
        return (chunk[..., :height, :width] for chunk in self._conv_stretches(raw.to(self.dtype), tiles, seed))

    @property
    def _least(self) -> int:
        """The fewest rows or columns the conv decoder takes: a mirrored border needs a neighbour to mirror."""
        return 1 if self.layout.decoder_padding == "zeros" else 2

    def _conv_stretches(self, raw: Tensor, tiles: tuple[int, int, int, int], seed: int) -> Iterator[Tensor]:
        space, overlap, length, late = tiles
        times = temporal_decode_spans(raw.shape[2], length, late, self.factors.time)
        rows, columns = (
            spatial_spans(raw.shape[axis], space, overlap, factor, self._least)
            for axis, factor in ((3, self.factors.height), (4, self.factors.width))
        )
        moment = (
            torch.full((raw.shape[0],), self.decode_timestep, device=raw.device, dtype=raw.dtype)
            if self.layout.timestep_conditioning
            else None
        )

        def tile(time: Span, row: Span, column: Span) -> Tensor:
            part = raw[:, :, time.start : time.stop, row.start : row.stop, column.start : column.stop]
            with _seeded(seed, raw.device, self.layout.injects_noise):
                return self.decoder(part, moment).float()

        return over_time(times, lambda time: over_space(rows, columns, lambda row, column: tile(time, row, column)))

    def _check_frames(self, frames: Tensor) -> None:
        if frames.ndim != 5 or frames.shape[-1] != 3 or frames.dtype != torch.uint8:
            raise DataError(
                "codec.frames",
                f"Frames of shape {list(frames.shape)}, {frames.dtype} cannot be encoded.",
                "The codec takes uint8 [batch, frames, height, width, 3].",
            )
        _, count, height, width, _ = frames.shape
        factor = self.factors
        if height % factor.height or width % factor.width or not height or not width:
            near = f"{max(1, round(width / factor.width)) * factor.width}x{max(1, round(height / factor.height)) * factor.height}"
            raise DataError(
                "codec.frame_size",
                f"A {width}x{height} clip does not fit this VAE.",
                f"Sides must be multiples of {factor.width}x{factor.height}; the nearest size is {near}.",
            )
        if (count - 1) % factor.time or count < 1:
            below = max(0, count - 1) // factor.time * factor.time + 1
            raise DataError(
                "codec.frame_count",
                f"A clip of {count} frames does not fit this VAE.",
                f"It must be {factor.time}n+1 frames: {below} or {below + factor.time}.",
            )

    def _check_latents(self, latents: Tensor) -> None:
        channels = self.layout.latent_channels
        if latents.ndim != 5 or latents.shape[1] != channels or 0 in latents.shape:
            raise DataError(
                "codec.latents",
                f"Latents of shape {list(latents.shape)} cannot be decoded by this VAE.",
                f"It takes [batch, {channels}, frames, rows, columns].",
            )


def _to_uint8(pixels: Tensor) -> Tensor:
    """[B, 3, F, H, W] in -1..1 -> [B, F, H, W, 3] uint8, rounded."""
    return rearrange(pixels.float().add(1).mul(127.5).round().clamp(0, 255).to(torch.uint8), "b c f h w -> b f h w c").contiguous()


def conv_halves(
    source: WeightSource, layout: VaeLayout, *, encoder: bool = True, decoder: bool = True
) -> dict[str, tuple[nn.Module, WeightSource]]:
    """The halves asked for of diffusers' conv VAE on the meta device, each with its tensors under diffusers' names."""
    build = _conv_class(layout)
    with blank():
        vae = build(**constructor_arguments(layout))
    named = source.renamed(conv_names(source.keys(), layout))
    wanted = {"encoder": encoder, "decoder": decoder}
    return {half: (getattr(vae, half), named.subset(half + ".")) for half, want in wanted.items() if want}


def _conv_class(layout: VaeLayout) -> Callable[..., nn.Module]:
    try:
        if layout.ltx_video:
            from diffusers.models.autoencoders.autoencoder_kl_ltx import AutoencoderKLLTXVideo

            return AutoencoderKLLTXVideo
        from diffusers.models.autoencoders.autoencoder_kl_ltx2 import AutoencoderKLLTX2Video

        return AutoencoderKLLTX2Video
    except ImportError as error:
        raise MissingPackage(
            "diffusers>=0.38", "The engine's video VAE", "Inside ComfyUI its own VAE can do this: connect the VAE socket"
        ) from error


@contextmanager
def _seeded(seed: int, device: torch.device, needed: bool) -> Iterator[None]:
    """Make the layers that draw from torch's global generator (LTX-Video 0.9.1's noise injection) repeatable."""
    if not needed:
        yield
        return
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(seed)
        yield
