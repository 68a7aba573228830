"""The codec protocol (media and captions to features and back) and the engine's own implementation of it."""

from __future__ import annotations

import gc
import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Literal, Protocol, TypeVar

import torch
from torch import Tensor

from ..text import TextFeatures
from .checkpoint import Checkpoint
from .tiling import Tiling

if TYPE_CHECKING:
    from .audio_codec import AudioCodec
    from .text_encoder import TextEncoder
    from .video_codec import VideoCodec

CodecComponent = Literal["video_vae", "audio_vae", "text_encoder"]
M = TypeVar("M")

_SMALL = 2**26  # parameters: a network below this is freed without a full collection, which takes half a second
_USABLE = 0.8  # of the free memory: the allocator loses some to fragments


class Codec(Protocol):
    """What preprocess and validation need of a model's VAEs and text encoder. One model is in memory at a time.

    kind: ``engine`` or ``comfyui``; with the fingerprint it is part of every cache key.
    cut: of the last ``encode_text``, the captions longer than the encoder reads, with (their tokens, those kept).
    progress: called within ``encode_text`` with (parts done, parts in all), where the codec knows parts; what it raises ends the call.
    """

    kind: str
    cut: Mapping[str, tuple[int, int]]
    progress: Callable[[int, int], None] | None

    def fingerprint(self, component: CodecComponent) -> str:
        """A short text that changes whenever the component would give other numbers."""

    def encode_video(self, frames: Tensor) -> Tensor:
        """uint8 [B, F, H, W, 3] -> normalised latents [B, 128, F', H', W'] float32."""

    def decode_video(self, latents: Tensor) -> Tensor:
        """Normalised latents [B, 128, F', H', W'] -> uint8 [B, F, H, W, 3]."""

    def encode_audio(self, waveform: Tensor, sample_rate: int) -> Tensor:
        """float32 [B, 2, N] at any rate -> normalised latents [B, 8, T, 16] float32."""

    def decode_audio(self, latents: Tensor) -> tuple[Tensor, int]:
        """Normalised latents [B, 8, T, 16] -> (waveform [B, 2, N] float32, sample rate)."""

    def encode_text(self, captions: list[str]) -> list[TextFeatures]:
        """Features of every caption's valid tokens, in order."""

    def release(self, component: CodecComponent | None = None) -> None:
        """Free one component's model, or all of them."""


class EngineCodec:
    """The networks of the checkpoint itself, each loaded on first use; loading one frees the others.

    dtype: of the VAE and text encoder; the audio VAE and vocoder run in float32.
    tiling: of the video VAE; "auto" chooses by free memory for every clip, None never tiles.
    """

    kind = "engine"

    def __init__(
        self,
        checkpoint: Checkpoint,
        *,
        device: torch.device | str,
        dtype: torch.dtype = torch.bfloat16,
        tiling: Tiling | Literal["auto"] | None = "auto",
        load_text_encoder_in_8bit: bool = False,
        seed: int = 0,
    ) -> None:
        self.checkpoint, self.device, self.dtype = checkpoint, torch.device(device), dtype
        self.tiling, self.load_text_encoder_in_8bit, self.seed = tiling, load_text_encoder_in_8bit, seed
        self.cut: Mapping[str, tuple[int, int]] = {}
        self.progress: Callable[[int, int], None] | None = None
        self._loaded: tuple[str, object] | None = None

    def fingerprint(self, component: CodecComponent) -> str:
        """See :class:`Codec`; text features also hang on the model's projection: LTX-2 and 2.3 share one Gemma 3 file."""
        mark = self.checkpoint.fingerprint_of(component)
        if component == "text_encoder" and self.checkpoint.has("text_projection"):
            mark = f"{mark}-{self.checkpoint.fingerprint_of('text_projection')}"
        return mark

    @torch.no_grad()
    def encode_video(self, frames: Tensor) -> Tensor:
        """See :class:`Codec`; the latents come back on the CPU."""
        codec = self._video("encoder")
        _, count, height, width, _ = frames.shape if frames.ndim == 5 else (0, 0, 0, 0, 0)
        return codec.encode(frames, self._tiling(codec, count * len(frames), height, width, decode=False)).cpu()

    @torch.no_grad()
    def decode_video(self, latents: Tensor) -> Tensor:
        codec = self._video("decoder")
        factors = codec.factors
        batch, _, count, rows, columns = latents.shape if latents.ndim == 5 else (0, 0, 0, 0, 0)
        tiling = self._tiling(codec, factors.pixel_frames(count) * batch, rows * factors.height, columns * factors.width, decode=True)
        return codec.decode(latents, tiling, self.seed)

    def encode_audio(self, waveform: Tensor, sample_rate: int) -> Tensor:
        """See :class:`Codec`; the latents come back on the CPU."""
        return self._audio("encoder").encode(waveform, sample_rate).cpu()

    def decode_audio(self, latents: Tensor) -> tuple[Tensor, int]:
        return self._audio("decoder").decode(latents)

    def encode_text(self, captions: list[str]) -> list[TextFeatures]:
        encoder = self._text()
        features = encoder.encode(captions, self.progress)
        self.cut = {captions[t.index]: (t.tokens, t.kept) for t in encoder.truncated}
        return features

    def release(self, component: CodecComponent | None = None) -> None:
        if self._loaded is None or (component is not None and not self._loaded[0].startswith(component)):
            return
        large = self._size(self._loaded[0].partition(".")[0]) > _SMALL
        self._loaded = None
        if large or self.device.type != "cpu":
            gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
        elif self.device.type == "mps":
            torch.mps.empty_cache()

    def _size(self, component: str) -> int:
        source = self.checkpoint.source(component)
        return sum(math.prod(source.info(name).shape) for name in source.keys())

    def _use(self, key: str, load: Callable[[], M]) -> M:
        """The loaded model of ``key``, or a fresh one after freeing what was there."""
        if self._loaded is None or self._loaded[0] != key:
            self.release()
            self._loaded = (key, load())
        return self._loaded[1]  # type: ignore[return-value]

    def _video(self, half: str) -> VideoCodec:
        from .video_codec import VideoCodec

        halves = {"encoder": half == "encoder", "decoder": half == "decoder"}
        return self._use(f"video_vae.{half}", lambda: VideoCodec.load(self.checkpoint, device=self.device, dtype=self.dtype, **halves))

    def _audio(self, half: str) -> AudioCodec:
        from .audio_codec import AudioCodec

        halves = {"encoder": half == "encoder", "decoder": half == "decoder"}
        return self._use(f"audio_vae.{half}", lambda: AudioCodec.load(self.checkpoint, device=self.device, **halves))

    def _text(self) -> TextEncoder:
        from .text_encoder import TextEncoder

        eight = self.load_text_encoder_in_8bit
        return self._use(
            "text_encoder", lambda: TextEncoder.load(self.checkpoint, device=self.device, dtype=self.dtype, load_in_8bit=eight)
        )

    def _tiling(self, codec: VideoCodec, frames: int, height: int, width: int, *, decode: bool) -> Tiling | None:
        if self.tiling != "auto":
            return self.tiling
        return Tiling.for_memory(int(free_bytes(self.device) * _USABLE), width, height, frames, codec.bytes_per_pixel(decode=decode))


def free_bytes(device: torch.device) -> int:
    """Bytes that work on ``device`` can still take, counting what torch's allocator holds and does not use, under its limit if one is set."""
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        used = torch.cuda.memory_allocated(device)
        number = torch.cuda.current_device() if device.index is None else device.index
        share = getattr(torch.cuda, "get_per_process_memory_fraction", lambda device: 1.0)(number)  # newer torch
        limit = int(total * share)
        return max(0, min(free + torch.cuda.memory_reserved(device) - used, limit - used))
    import psutil

    return psutil.virtual_memory().available
