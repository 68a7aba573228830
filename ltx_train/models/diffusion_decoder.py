"""The 2.5 diffusion video decoder: diffusers' network with our attention, padding to its floor, noise and tiles."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch
from torch import Tensor, nn

from ..errors import MissingPackage
from .blank import blank
from .diffusion_keys import Part, diffusion_parts
from .neighborhood import BlockedNeighborhoodProcessor, Triple
from .tiling import Span, over_space, over_time, spatial_spans, temporal_decode_spans
from .video_codec_keys import VaeLayout
from .weights import TensorInfo, WeightSource, load_weights


class DiffusionDecoder:
    """Latents (denormalised) to pixels in -1..1 by stages of neighbourhood attention and a few denoising steps."""

    def __init__(self, network: nn.Module, kernels: list[Triple], strides: list[Triple]) -> None:
        self.network = network
        self.kernels = kernels  # of the stages, the denoising one last
        self.strides = strides  # of the upsamplers between them

    @classmethod
    def load(cls, source: WeightSource, layout: VaeLayout, *, device: torch.device | str, dtype: torch.dtype) -> DiffusionDecoder:
        """Build from a video VAE source (names without ``vae.``); needs diffusers 0.40 or newer."""
        network, parts = diffusion_network(source, layout)
        load_weights(network, parts, dtype=dtype, device=device)
        for module in network.modules():
            if hasattr(module, "set_processor"):
                module.set_processor(BlockedNeighborhoodProcessor())
        arguments = layout.diffusion
        kernels = [*arguments["decoder_stage_kernels"], arguments["decoder_stage5_kernel"]]
        return cls(network.eval().requires_grad_(False), kernels, list(arguments["decoder_upsample_strides"]))

    @property
    def floor(self) -> Triple:
        """The least latent (frames, rows, columns): every stage's grid must hold its attention window.

        A stride-2 upsampler in time makes 2n - 1 frames of n (the causal mapping), in space 2n.
        """
        frames, rows, columns = (1, 1, 1)
        grown = [1, 1, 1]
        for stage, kernel in enumerate(self.kernels):
            frames = max(frames, -(-(kernel[0] - 1) // grown[0]) + 1)
            rows, columns = max(rows, -(-kernel[1] // grown[1])), max(columns, -(-kernel[2] // grown[2]))
            if stage < len(self.strides):
                grown = [g * s for g, s in zip(grown, self.strides[stage])]
        return frames, rows, columns

    def decode(self, latents: Tensor, tiles: tuple[int, int, int, int], *, seed: int, noise: Tensor | None = None) -> Iterator[Tensor]:
        """Yield float32 pixels [B, 3, f, H, W] in order of time.

        latents: [B, C, T, H, W] denormalised, on the network's device and dtype. tiles: (space, overlap, time, overlap) in
        latent cells, 0 = whole. noise: [B, 3, F, H, W] over the canvas padded to the floor; else drawn from the seed, a
        frame at a time, so that tiles share it.
        """
        frames, height, width = latents.shape[2:]
        padded, top, left = pad_to_floor(latents, self.floor)
        time, space = self._scales()
        wanted, done = (frames - 1) * time + 1, 0
        canvas = _Noise(padded, (padded.shape[3] * space, padded.shape[4] * space), seed, noise)
        for chunk in self._stretches(padded, tiles, canvas):
            chunk = chunk[:, :, : wanted - done, top * space : (top + height) * space, left * space : (left + width) * space]
            done += chunk.shape[2]
            if chunk.shape[2]:
                yield chunk

    def _scales(self) -> tuple[int, int]:
        return math.prod(s[0] for s in self.strides), math.prod(s[1] for s in self.strides) * self.network.patch_size

    def _stretches(self, latents: Tensor, tiles: tuple[int, int, int, int], canvas: _Noise) -> Iterator[Tensor]:
        """The early stages see the whole clip; the last two, which cost the memory, run tile by tile."""
        network = self.network
        features = network.forward_stages_1_to_3(latents)
        early = [math.prod(s[axis] for s in self.strides[:-1]) for axis in range(3)]
        ghosts = network.trailing_pad_latent_frames * early[0]
        stride = self.strides[-1]
        least = [max(a, -(-(b + s - 1) // s)) for a, b, s in zip(self.kernels[-2], self.kernels[-1], stride)]
        frames = features.shape[1] - ghosts
        size, overlap, length, late = tiles
        scale = stride[1] * network.patch_size
        times = temporal_decode_spans(frames, length * early[0], late * early[0], stride[0], least[0], first_alone=False)
        rows = spatial_spans(features.shape[2], size * early[1], overlap * early[1], scale, least[1])
        columns = spatial_spans(features.shape[3], size * early[2], overlap * early[2], scale, least[2])

        def tile(time: Span, row: Span, column: Span) -> Tensor:
            last = time.stop == frames
            part = features[:, time.start : features.shape[1] if last else time.stop, row.start : row.stop, column.start : column.stop]
            context = network.forward_stage_4(part, drop_leading_frame=time.start == 0, crop_trailing_ghost=last)
            noised = canvas.cut(time.out, context.shape[1], row.start * scale, row.stop * scale, column.start * scale, column.stop * scale)
            return network.denoise(context, noised, network.default_num_inference_steps).float()

        yield from over_time(times, lambda time: over_space(rows, columns, lambda row, column: tile(time, row, column)))


def diffusion_network(source: WeightSource, layout: VaeLayout) -> tuple[nn.Module, PartSource]:
    """diffusers' decoder on the meta device, and its tensors under diffusers' names."""
    try:
        from diffusers.models.autoencoders.ltx2_diffusion_decoder import LTX2VideoDiffusionDecoderModel
    except ImportError as error:
        raise MissingPackage(
            "diffusers>=0.40", "The LTX-2.5 diffusion decoder", "Or give the conv video VAE file (ltx-2.5-video-vae-conv)"
        ) from error
    with blank():
        network = LTX2VideoDiffusionDecoderModel(**layout.diffusion).decoder
    return network, PartSource(source, diffusion_parts(source.keys()), "decoder.")


class _Noise:
    """The canvas of noise that decoding starts from: given, or drawn a frame at a time on the CPU (same on every device)."""

    def __init__(self, like: Tensor, size: tuple[int, int], seed: int, given: Tensor | None) -> None:
        self.like, self.size, self.seed, self.given = like, size, seed, given

    def cut(self, start: int, frames: int, top: int, bottom: int, left: int, right: int) -> Tensor:
        if self.given is not None:
            part = self.given[:, :, start : start + frames, top:bottom, left:right]
        else:
            part = torch.stack([self._frame(f)[:, :, top:bottom, left:right] for f in range(start, start + frames)], dim=2)
        return part.to(self.like)

    def _frame(self, frame: int) -> Tensor:
        generator = torch.Generator().manual_seed((self.seed * 1_000_003 + frame) % (1 << 63))
        return torch.randn(self.like.shape[0], 3, *self.size, generator=generator)


def pad_to_floor(latents: Tensor, floor: Triple) -> tuple[Tensor, int, int]:
    """Latents [B, C, T, H, W] of at least ``floor`` cells, and how many rows and columns were put before the first.

    Time repeats the last frame; space is mirrored, edge included, on both sides.
    """
    frames = torch.arange(max(latents.shape[2], floor[0]), device=latents.device).clamp(max=latents.shape[2] - 1)
    latents = latents[:, :, frames]
    before = []
    for axis, least in ((3, floor[1]), (4, floor[2])):
        length = latents.shape[axis]
        missing = max(0, least - length)
        before.append(missing // 2)
        places = torch.arange(-before[-1], length + missing - before[-1], device=latents.device) % (2 * length)
        latents = latents.index_select(axis, torch.where(places < length, places, 2 * length - 1 - places))
    return latents, before[0], before[1]


class PartSource:
    """A WeightSource seen through :func:`diffusion_parts`: thirds of fused rows, gates folded into rows."""

    def __init__(self, source: WeightSource, parts: dict[str, Part], prefix: str) -> None:
        self.source = source
        self.names = {name.removeprefix(prefix): part for name, part in parts.items()}

    @property
    def paths(self) -> Iterable[Path]:
        return self.source.paths

    def __contains__(self, name: str) -> bool:
        return name in self.names

    def info(self, name: str) -> TensorInfo:
        part = self.names[name]
        info = self.source.info(part.name)
        return info if part.third is None else TensorInfo((info.shape[0] // 3, *info.shape[1:]), info.dtype)

    def get(self, name: str, dtype: torch.dtype | None = None, device: torch.device | str = "cpu") -> Tensor:
        part = self.names[name]
        value = self.source.get(part.name, dtype=dtype, device=device)
        if part.third is not None:
            value = value.chunk(3)[part.third].clone()
        if part.gate is not None:
            gate = self.source.get(part.gate, dtype=dtype, device=device)
            value = value * gate.view(-1, *[1] * (value.ndim - 1))
        return value
