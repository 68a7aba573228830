"""ComfyUI's loaded VAE and CLIP behind the engine's codec protocol, and preprocessing with them inside this process."""

from __future__ import annotations

import hashlib
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..ltx_train.config import DataSection
from ..ltx_train.encode import Target
from ..ltx_train.errors import CheckpointError
from ..ltx_train.preprocess import preprocess
from ..ltx_train.text import TOKEN_LIMITS, TextFeatures
from . import sockets
from .follow import Screen

_SAMPLES = 64  # numbers of each weight that go into a fingerprint


class ComfyCodec:
    """A video VAE, an audio VAE and a CLIP that ComfyUI has loaded, as preprocessing uses them (see ``models.codec.Codec``)."""

    kind = "comfyui"

    def __init__(self, model: sockets.LtxModel, *, vae: Any = None, clip: Any = None, audio_vae: Any = None) -> None:
        self.model = model
        self.parts = {"video_vae": vae, "audio_vae": audio_vae, "text_encoder": clip}
        self.cut: dict[str, tuple[int, int]] = {}
        self._fingerprints: dict[str, str] = {}

    def has(self, component: str) -> bool:
        return self.parts[component] is not None

    def _part(self, component: str) -> Any:
        part = self.parts[component]
        if part is None:
            socket = {"video_vae": "vae", "audio_vae": "audio_vae", "text_encoder": "clip"}[component]
            raise CheckpointError("codec.socket", f"The socket {socket} is needed and nothing is plugged "
                f"in.", "Plug in all of vae, clip and (for sound) audio_vae, or none of them.")
        return part

    def fingerprint(self, component: str) -> str:
        """Class, names, shapes and sampled numbers of the weights: another file of the same architecture reads differently."""
        if component not in self._fingerprints:
            part = self._part(component)
            module = part.cond_stage_model if component == "text_encoder" else part.first_stage_model
            self._fingerprints[component] = _fingerprint(module)
        return self._fingerprints[component]

    def encode_video(self, frames: Tensor) -> Tensor:
        """uint8 [B, F, H, W, 3] -> [B, 128, F', H', W'] float32; one clip at a time, as ComfyUI's VAE takes a clip's frames."""
        vae = self._part("video_vae")
        return torch.cat([vae.encode(clip.float() / 255).float().cpu() for clip in frames])

    def decode_video(self, latents: Tensor) -> Tensor:
        vae = self._part("video_vae")
        clips = [vae.decode(one[None]) for one in latents]
        return torch.stack([(c[0] if c.ndim == 5 else c).clamp(0, 1).mul(255).round().to(torch.uint8).cpu() for c in clips])

    def encode_audio(self, waveform: Tensor, sample_rate: int) -> Tensor:
        """float32 [B, 2, N] at any rate -> [B, 8, T, 16] float32; ComfyUI's audio VAE wants its own rate, channels last."""
        import torchaudio

        vae = self._part("audio_vae")
        rate = int(getattr(vae, "audio_sample_rate", 44100))
        if rate != sample_rate:
            waveform = torchaudio.functional.resample(waveform, sample_rate, rate)
        return vae.encode(waveform.movedim(1, -1)).float().cpu()

    def decode_audio(self, latents: Tensor) -> tuple[Tensor, int]:
        vae = self._part("audio_vae")
        return vae.decode(latents).movedim(-1, 1).float().cpu(), int(vae.first_stage_model.output_sample_rate)

    def encode_text(self, captions: list[str]) -> list[TextFeatures]:
        """Features before the connectors, valid tokens only: what ComfyUI's CLIP gives for these families."""
        self.cut = {}
        return [self._features(text) for text in captions]

    def _features(self, text: str) -> TextFeatures:
        clip, kind = self._part("text_encoder"), self.model.feature_kind
        values, extra = clip.encode_from_tokens_scheduled(self._tokens(clip, text))[0]
        tokens = values[0].float().cpu()
        mask = extra.get("attention_mask")
        if mask is not None:
            tokens = tokens[mask.reshape(-1).bool().cpu()]
        wanted = sum(self.model.widths) if kind == "v2" else tokens.shape[-1] if kind == "t5" else self.model.widths[0]
        if tokens.shape[-1] != wanted and not (kind == "v1" and extra.get("unprocessed_ltxav_embeds")):
            raise CheckpointError(
                "codec.clip", f"The CLIP gives features of width {tokens.shape[-1]}; {self.model.title} reads "
                    f"{wanted}.", "Load the text encoder of this model's family.",
            )  # fmt: skip
        if kind == "v2":
            video, audio = tokens.split(list(self.model.widths), dim=-1)
            return TextFeatures(kind, video.contiguous(), audio.contiguous())
        return TextFeatures(kind, tokens.contiguous())

    def _tokens(self, clip: Any, text: str) -> dict[str, list[list[tuple]]]:
        """What the engine reads of a caption: without spaces around it, at most the encoder's limit, T5's end token kept.

        ComfyUI takes the backslash out of ``\\(``, its sign for a bracket that is no weight: doubled, it stays.
        """
        tokens = clip.tokenize(re.sub(r"\\(?=[()])", r"\\\\", text.strip()), disable_weights=True)
        t5 = self.model.feature_kind == "t5"
        limit = TOKEN_LIMITS["t5" if t5 else "gemma3"]
        longest = max(len(row) for rows in tokens.values() for row in rows)
        if longest <= limit:
            return tokens
        self.cut[text] = (longest, limit)
        return {name: [[*row[: limit - 1], row[-1]] if t5 else row[:limit] for row in rows] for name, rows in tokens.items()}

    def release(self, component: str | None = None) -> None:
        """ComfyUI frees its models itself when others need the room."""


def _fingerprint(module: torch.nn.Module) -> str:
    seen = hashlib.sha256(type(module).__qualname__.encode())
    for name, value in module.state_dict().items():
        seen.update(f"{name}|{tuple(value.shape)}|{value.dtype}\n".encode())
        try:
            flat = value.detach().reshape(-1)
            step = max(1, flat.numel() // _SAMPLES)
            seen.update(flat[::step][:_SAMPLES].to("cpu", torch.float32).numpy().tobytes())
        except RuntimeError:  # a quantised layout that cannot be sliced: names and shapes count
            continue
    return seen.hexdigest()[:16]


class _Report:
    """What preprocessing says, on a node's screen; interrupts come back through ``check``."""

    def __init__(self, screen: Screen) -> None:
        self.screen, self.warnings, self._shown = screen, [], 0.0

    @contextmanager
    def phase(self, name: str, message: str = "") -> Iterator[None]:
        self.check()
        self.screen.text(f"{name} {message}".strip())
        yield

    def progress(
        self, phase: str, done: int, total: int | None = None, *, unit: str = "", message: str = "", eta: float | None = None
    ) -> None:
        if done == total or time.monotonic() - self._shown > 0.3:
            self._shown = time.monotonic()
            self.screen.progress(done, total)
            self.screen.text(f"{phase}: {done}{f' of {total}' if total else ''} {unit}".strip())

    def warn(self, code: str, message: str, hint: str = "") -> None:
        self.warnings.append(f"{message}\n{hint}".strip())

    def check(self) -> None:
        if self.screen.take_interrupt():
            raise self.screen.interrupted()


def encode_here(
    model: sockets.LtxModel, data: DataSection, codec: ComfyCodec, screen: Screen, *, mode_name: str, prompts: list[str], with_audio: bool
) -> tuple[Path, list[str]]:
    """Encode a dataset with ComfyUI's models: (the cache folder, warnings)."""
    from .compose import mode

    strategy = mode(mode_name).strategy() if mode_name else None
    streams = strategy.streams() if strategy is not None else None
    with_audio = with_audio and model.audio and (streams is None or streams.audio != "absent")
    with_video = streams is None or streams.video != "absent"
    needed = ("text_encoder", *(("video_vae",) if with_video else ()), *(("audio_vae",) if with_audio else ()))
    for component in needed:
        codec._part(component)
    report = _Report(screen)
    target = Target.of(model.section.open())
    required = strategy.required_roles() if strategy is not None else frozenset()
    root = preprocess(data, target, codec, report, texts=prompts, with_audio=with_audio, with_video=with_video, required=required)
    return root, report.warnings
