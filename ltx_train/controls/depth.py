"""Depth of every frame through a transformers depth-estimation model in a folder, near bright, one scale for a whole clip."""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Iterator
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

from ..errors import ConfigError, MissingPackage, is_out_of_memory
from ..memory.settings import DEVICES
from ..section import Section
from ..training.parallel import single_device

METRIC = ("zoedepth", "depth_pro", "prompt_depth_anything")
"""Model types whose numbers are distances (larger is farther); the others give nearness."""


class DepthControl(Section):
    """Depth, near bright: Depth Anything, DPT, ZoeDepth and others of transformers' depth-estimation."""

    kind: Literal["depth"] = "depth"
    model_path: str = Field(description="A Hugging Face folder of a depth-estimation model.")
    device: str = Field("auto", description="auto takes the GPU where there is one.", pattern=DEVICES)
    trim: float = Field(0.5, ge=0, le=20, description="Percent of the darkest and brightest depths of a clip that are cut off before scaling.")

    @cached_property
    def estimator(self) -> _Estimator:
        """The model, loaded once for all clips."""
        return _Estimator(self)

    def apply(self, frames: Iterable[Tensor]) -> Iterator[Tensor]:
        """Depths of the whole clip wait in a temporary file, so that one scale serves all frames: depth does not flicker."""
        with tempfile.TemporaryFile() as waiting:
            sizes, sample = [], []
            for frame in frames:
                depth = self.estimator(frame)
                waiting.write(np.ascontiguousarray(depth, np.float32).tobytes())
                sizes.append((depth.shape, tuple(frame.shape[:2])))
                sample.append(depth[::8, ::8].ravel())
            if not sizes:
                return
            low, high = np.percentile(np.concatenate(sample), [self.trim, 100 - self.trim])
            waiting.seek(0)
            for shape, size in sizes:
                depth = np.frombuffer(waiting.read(4 * shape[0] * shape[1]), np.float32).reshape(shape)
                scaled = torch.from_numpy((depth - low) / max(high - low, 1e-9))[None, None]
                enlarged = F.interpolate(scaled, size=size, mode="bilinear", align_corners=False)[0, 0]
                yield (enlarged.clamp(0, 1) * 255).round().to(torch.uint8)[..., None].expand(-1, -1, 3)


class _Estimator:
    """A loaded model: [H, W, 3] uint8 -> nearness [h, w] float32 at the model's own size."""

    def __init__(self, control: DepthControl) -> None:
        folder = Path(control.model_path).expanduser()
        if not (folder / "config.json").is_file():
            raise ConfigError("depth.model", f"There is no depth model in {folder}.", "Give a Hugging Face folder with config.json, such as Depth-Anything-V2-Small-hf.")
        try:
            from transformers import AutoImageProcessor, AutoModelForDepthEstimation
        except ImportError as error:
            raise MissingPackage("transformers", "Depth estimation") from error
        device = single_device(control.device)
        try:
            self.processor: Any = AutoImageProcessor.from_pretrained(folder, local_files_only=True)
            self.model: Any = AutoModelForDepthEstimation.from_pretrained(folder, local_files_only=True).to(device).eval()
        except Exception as error:  # noqa: B902 - a damaged or foreign folder fails in the libraries in as many ways as there are
            if is_out_of_memory(error):
                raise
            raise ConfigError("depth.model", f"The model in {folder.name} is no depth-estimation model."[:118], str(error)[:500]) from error
        config = self.model.config
        self.far_is_large = config.model_type in METRIC or getattr(config, "depth_estimation_type", "") == "metric"

    @torch.inference_mode()
    def __call__(self, frame: Tensor) -> np.ndarray:
        from PIL import Image

        inputs = self.processor(images=Image.fromarray(frame.numpy()), return_tensors="pt")
        depth = self.model(**inputs.to(self.model.device)).predicted_depth[0].float().cpu()
        depth = depth.reshape(depth.shape[-2:]).numpy()
        return 1.0 / np.maximum(depth, 1e-3) if self.far_is_large else depth
