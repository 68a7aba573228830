"""Captions by a local audio-visual model of Qwen2.5-Omni's class, from a Hugging Face folder; its inputs are made here."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import Field
from torch import Tensor

from ..errors import ConfigError, MissingPackage, is_out_of_memory
from ..memory.settings import DEVICES
from ..section import Section
from ..training.parallel import single_device
from .answers import AUDIO_INSTRUCTION, IMAGE_INSTRUCTION, VIDEO_INSTRUCTION, parse_caption
from .clips import SOUND_RATE, Excerpt, read_excerpt

TYPES = ("qwen2_5_omni", "qwen2_5_omni_thinker")
CLIP_MEAN, CLIP_STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
SOUND_SECONDS = 300.0  # the audio encoder's positions end there


class LocalCaptioner(Section):
    """A Qwen2.5-Omni model on this machine: hears and sees, nothing leaves the machine."""

    kind: Literal["local"] = "local"
    model_path: str = Field(description="A Hugging Face folder of a Qwen2.5-Omni model (its thinker is what is loaded).")
    device: str = Field("auto", description="auto takes the GPU where there is one.", pattern=DEVICES)
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = Field("auto", description="auto: bfloat16 on a GPU, float32 on the CPU.")
    max_tokens: int = Field(1024, ge=16, le=32768, description="Longest answer.")
    sound: bool = Field(True, description="Let it hear the sound.")
    fps: float = Field(2.0, gt=0, le=60, description="Frames a second that it sees.")
    max_frames: int = Field(64, ge=2, le=768, description="Most frames that it sees.")
    side: int = Field(448, ge=28, le=4096, description="Longer side of the frames, in pixels.")
    instruction: str | None = Field(None, description="What is asked of videos and sounds; None is a paragraph of picture and sound.")
    image_instruction: str | None = Field(None, description="What is asked of pictures; None is a paragraph.")

    def build(self, allowed: frozenset[str] = frozenset()) -> LocalModel:
        """Load the model. Raises ConfigError for a folder without one, MissingPackage when transformers is too old."""
        return LocalModel(self)

    @property
    def name(self) -> str:
        return Path(self.model_path).name


class LocalModel:
    """A loaded model: ``caption(path, sound=None) -> str``."""

    def __init__(self, settings: LocalCaptioner) -> None:
        folder = Path(settings.model_path).expanduser()
        self.settings = settings
        _check_folder(folder)
        try:
            from transformers import AutoTokenizer, Qwen2_5OmniThinkerForConditionalGeneration, WhisperFeatureExtractor
        except ImportError as error:
            raise MissingPackage("transformers>=4.52", "Local captioning", "Or caption through an endpoint") from error
        device = single_device(settings.device)
        dtype = {"auto": torch.float32 if device.type == "cpu" else torch.bfloat16}.get(settings.dtype) or getattr(torch, settings.dtype)
        try:
            self.tokenizer: Any = AutoTokenizer.from_pretrained(folder, local_files_only=True)
            self.model: Any = Qwen2_5OmniThinkerForConditionalGeneration.from_pretrained(folder, torch_dtype=dtype, local_files_only=True).to(device).eval()
        except Exception as error:  # noqa: B902 - a damaged or foreign folder fails in the libraries in as many ways as there are
            if is_out_of_memory(error):
                raise
            raise ConfigError("caption.model", f"The captioning model in {folder.name} cannot be loaded."[:118], str(error)[:500]) from error
        self.config = self.model.config
        self.hearing: Any = WhisperFeatureExtractor(feature_size=self.config.audio_config.num_mel_bins, n_samples=int(SOUND_SECONDS * SOUND_RATE), chunk_length=int(SOUND_SECONDS))
        self.mean, self.std = _normalisation(folder)

    def caption(self, path: Path, sound: Path | None = None) -> str:
        """The caption of one file; raises DataError for this clip's faults."""
        s = self.settings
        vision = self.config.vision_config
        block = vision.patch_size * vision.spatial_merge_size
        excerpt = read_excerpt(
            path, fps=s.fps, most=s.max_frames, side=max(block, s.side // block * block), with_sound=s.sound, sound=sound, multiple=block, sound_seconds=SOUND_SECONDS
        )
        return parse_caption(self.answer(excerpt))

    @torch.inference_mode()
    def answer(self, excerpt: Excerpt) -> str:
        inputs = {name: value.to(self.model.device) for name, value in self.inputs(excerpt).items()}
        for name in ("pixel_values", "pixel_values_videos", "input_features"):
            if name in inputs:
                inputs[name] = inputs[name].to(self.model.dtype)
        made = self.model.generate(**inputs, max_new_tokens=self.settings.max_tokens, do_sample=False, repetition_penalty=1.05, eos_token_id=self._ids("<|im_end|>"))
        return self.tokenizer.decode(made[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)

    def inputs(self, excerpt: Excerpt) -> dict[str, Tensor]:
        """The model's inputs: the ChatML question with a place for every patch and every step of sound."""
        s, config = self.settings, self.config
        question = {"image": s.image_instruction or IMAGE_INSTRUCTION, "audio": s.instruction or AUDIO_INSTRUCTION}.get(excerpt.kind, s.instruction or VIDEO_INSTRUCTION)
        ids = self._ids("<|im_start|>system\nYou describe clips for training a video model.<|im_end|>\n<|im_start|>user\n")
        made: dict[str, Tensor] = {}
        if excerpt.frames is not None:
            still = excerpt.kind == "image"
            pixels, grid = self.patches(excerpt.frames)
            count = int(grid.prod()) // config.vision_config.spatial_merge_size**2
            ids += self._ids("<|vision_bos|>") + [config.image_token_id if still else config.video_token_id] * count + self._ids("<|vision_eos|>")
            made |= {"pixel_values": pixels, "image_grid_thw": grid[None]} if still else {"pixel_values_videos": pixels, "video_grid_thw": grid[None]}
            if not still:
                made["video_second_per_grid"] = torch.tensor([config.vision_config.temporal_patch_size / excerpt.fps])
        if excerpt.sound is not None:
            heard = self.hearing(excerpt.sound.numpy(), sampling_rate=SOUND_RATE, return_attention_mask=True, return_tensors="pt", padding="longest", truncation=True)
            made |= {"input_features": heard["input_features"], "feature_attention_mask": heard["attention_mask"]}
            ids += self._ids("<|audio_bos|>") + [config.audio_token_id] * sound_tokens(int(heard["attention_mask"].sum())) + self._ids("<|audio_eos|>")
        ids += self._ids(f"{question}<|im_end|>\n<|im_start|>assistant\n")
        tokens = torch.tensor([ids])
        return {"input_ids": tokens, "attention_mask": torch.ones_like(tokens), **made}

    def patches(self, frames: Tensor) -> tuple[Tensor, Tensor]:
        """[F, H, W, 3] uint8 -> ([patches, 3 * time * patch * patch], grid (F', H', W')); the last frame fills the last pair."""
        vision = self.config.vision_config
        pairs, size, merge = vision.temporal_patch_size, vision.patch_size, vision.spatial_merge_size
        frames = torch.cat([frames, frames[-1:].expand(-len(frames) % pairs, -1, -1, -1)])
        values = ((frames.float() / 255 - self.mean) / self.std).permute(0, 3, 1, 2)
        count, channels, height, width = values.shape
        grid = torch.tensor([count // pairs, height // size, width // size])
        split = values.reshape(count // pairs, pairs, channels, height // size // merge, merge, size, width // size // merge, merge, size)
        return split.permute(0, 3, 6, 4, 7, 2, 1, 5, 8).reshape(int(grid.prod()), channels * pairs * size * size), grid

    def _ids(self, text: str) -> list[int]:
        return self.tokenizer(text, add_special_tokens=False)["input_ids"]


def sound_tokens(steps: int) -> int:
    """Places that ``steps`` mel frames take: a convolution of stride 2, then a pooling of 2."""
    return ((steps - 1) // 2 + 1 - 2) // 2 + 1


def _check_folder(folder: Path) -> None:
    file = folder / "config.json"
    if not file.is_file():
        raise ConfigError("caption.model", f"There is no model in {folder}."[:118], "Give a Hugging Face folder of a Qwen2.5-Omni model, with its config.json.")
    kind = str(_json(file).get("model_type", "unknown"))
    if kind not in TYPES:
        raise ConfigError("caption.model", f"{folder.name} holds a {kind} model; local captioning runs {TYPES[0]}."[:118], "Serve another model with vLLM and caption through its endpoint.")


def _json(file: Path) -> dict[str, Any]:
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError("caption.model", f"{file.name} of {file.parent.name} is no JSON: the download is damaged."[:118], f"{file}: {error}") from error
    if not isinstance(found, dict):
        raise ConfigError("caption.model", f"{file.name} of {file.parent.name} is not a model's."[:118], "Give a Hugging Face folder of a Qwen2.5-Omni model.")
    return found


def _normalisation(folder: Path) -> tuple[Tensor, Tensor]:
    file = folder / "preprocessor_config.json"
    told = _json(file) if file.is_file() else {}
    return torch.tensor(told.get("image_mean", CLIP_MEAN)), torch.tensor(told.get("image_std", CLIP_STD))
