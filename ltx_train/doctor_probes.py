"""What the doctor looks at: clips with captions (drawn, the user's, or a cache's latents) and the measures taken on them."""

from __future__ import annotations

import math
import re
import statistics
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .conditioning.modes import TrainingStrategySection
from .contexts import ContextStore
from .data.batches import collate
from .data.dataset import DataSection, open_dataset
from .data.items import Item, TrainingDataset
from .data.media import read_clip
from .data.precomputed import find_root
from .encode import Target
from .errors import DataError
from .geometry import Latents
from .models.checkpoint import Checkpoint
from .models.weights import WeightSource
from .preprocess import report_on
from .tiny.drawing import FPS, KNOWN, RATE, Scenes, draw, sound
from .training.flow_matching import FlowMatchingSection
from .training.step import TrainStep

if TYPE_CHECKING:
    from .models.transformer import LTXTransformer

MOST = 8
"""Clips that are looked at."""
_SMALL = 8  # a model of fewer blocks is a tiny one: its clips are drawn at the size it knows
_SAMPLE = 1 << 20
_TOGETHER = 4  # clips in one forward


@dataclass(frozen=True)
class Probes:
    """Clips of one size: frames [N, F, H, W, 3] uint8, sounds [2, n] at ``rate`` or None, captions, frames a second."""

    frames: Tensor
    sounds: list[Tensor | None]
    rate: int
    captions: list[str]
    fps: float
    drawn: bool


def drawn_probes(checkpoint: Checkpoint, count: int = MOST) -> Probes:
    """Drawn clips: a coloured shape moves, a tone sounds; the caption says which."""
    tiny = checkpoint.transformer is not None and checkpoint.transformer.num_layers < _SMALL
    scenes = Scenes.random(count, torch.Generator().manual_seed(4), KNOWN)
    frames = 17 if tiny else 33
    pictures = draw(scenes, frames, 64, 64)
    if not tiny:
        pictures = F.interpolate(pictures.flatten(0, 1).movedim(-1, 1), scale_factor=6, mode="bilinear").movedim(1, -1).unflatten(0, (count, frames))
    waves = list(sound(scenes, frames / FPS))
    return Probes((pictures * 255).round().to(torch.uint8), waves, RATE, [scenes.caption(i) for i in range(count)], float(FPS), True)


def clip_probes(section: DataSection, checkpoint: Checkpoint, count: int = MOST) -> Probes:
    """The user's clips, of the bucket that most of them fall into. Raises DataError when none can be used."""
    plans = [p for p in report_on(section, Target.of(checkpoint)).plans if p.bucket is not None]
    if not plans:
        raise DataError("doctor.no_clips", "None of the dataset's clips can be used.", "See why: python -m ltx_train report DATASET")
    shape = lambda p: (p.bucket, float(p.fps))  # noqa: E731
    usual = Counter(map(shape, plans)).most_common(1)[0][0]
    chosen = [p for p in plans if shape(p) == usual][:count]
    clips = [read_clip(p) for p in chosen]
    rate = next((c.sample_rate for c in clips if c.audio_present), RATE)
    sounds = [c.waveform if c.audio_present and c.sample_rate == rate else None for c in clips]
    return Probes(torch.stack([c.frames for c in clips]), sounds, rate, [p.sample.caption for p in chosen], float(chosen[0].fps), False)


def open_cache(root: Path, checkpoint: Checkpoint) -> TrainingDataset | None:
    """The dataset of a folder that holds encoded clips (ours or the official layout), None for one that holds media."""
    if not (root / "index.json").is_file() and (not root.is_dir() or find_root(root) is None):
        return None
    return open_dataset(root, factors=checkpoint.video_factors, audio_grid=checkpoint.audio_grid if checkpoint.family.audio else None)


# ---- measures


def psnr(one: Tensor, other: Tensor) -> float:
    """Peak signal to noise ratio in dB of uint8 pictures of one shape."""
    error = (one.float() - other.float()).square().mean() / 255**2
    return float(-10 * torch.log10(error.clamp(min=1e-10)))


def snr(reference: Tensor, other: Tensor) -> float:
    """Signal to noise ratio in dB."""
    return float(10 * torch.log10(reference.square().sum().clamp(min=1e-20) / (reference - other).square().sum().clamp(min=1e-20)))


def wiener_loss(latents: Sequence[Latents], sigma: float) -> float:
    """Mean loss of the best predictor that knows each channel's mean and variance m and nothing else.

    With x = (1 - s) z + s n and v = n - z: Var(v) = 1 + m, Var(x) = s^2 + (1 - s)^2 m, Cov(v, x) = s - (1 - s) m, so the
    loss is Var(v) - Cov(v, x)^2 / Var(x).
    """
    tokens = torch.cat([part.tokens.flatten(0, 1) for part in latents]).double()
    m = tokens.var(dim=0, unbiased=False)
    known = (sigma - (1 - sigma) * m).square() / (sigma**2 + (1 - sigma) ** 2 * m).clamp(min=1e-12)
    return float((1 + m - known).mean())


def mean_of(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def mean_and_error(values: Sequence[float]) -> tuple[float, float]:
    """Mean and its standard error; the error of one value is infinite."""
    mean = sum(values) / len(values)
    if len(values) < 2:
        return mean, math.inf
    return mean, math.sqrt(sum((v - mean) ** 2 for v in values) / (len(values) - 1) / len(values))


@dataclass(frozen=True)
class Stored:
    """One tensor of a file: its largest absolute value (NaN when one is in it) and its deviation."""

    name: str
    largest: float
    deviation: float
    matrix: bool


def scan(source: WeightSource) -> Iterator[Stored]:
    """Read every tensor of a component once."""
    for name in source.keys():
        value = source.get(name)
        if not value.dtype.is_floating_point or value.numel() == 0:
            continue
        flat = value.flatten()
        largest = max((float(part.float().abs().amax()) for part in flat.split(1 << 26)), key=lambda x: (math.isnan(x), x))
        part = flat[:: max(1, len(flat) // _SAMPLE)].float()
        yield Stored(name, largest, float(part.std()) if len(part) > 1 else 0.0, value.ndim >= 2 and value.numel() >= 64)


_BLOCK = re.compile(r"(.*(?:blocks?|layers?|block)\.\d+)\.(.+)")


def by_block(stored: Sequence[Stored]) -> dict[str, list[Stored]]:
    """Matrices by the block they lie in."""
    blocks: dict[str, list[Stored]] = {}
    for one in stored:
        found = _BLOCK.match(one.name)
        if found and one.matrix:
            blocks.setdefault(found.group(1), []).append(one)
    return blocks


def odd_ones(stored: Sequence[Stored]) -> list[str]:
    """Matrices a hundred times smaller or larger than the same matrix in most other blocks."""
    sisters: dict[str, list[Stored]] = {}
    for one in stored:
        if one.matrix and _BLOCK.match(one.name):
            sisters.setdefault(re.sub(r"\.\d+\.", ".*.", one.name, count=1), []).append(one)
    odd = []
    for same in sisters.values():
        usual = statistics.median(s.deviation for s in same)
        if len(same) >= 3 and usual > 0:
            odd += [s.name for s in same if not usual / 100 <= s.deviation <= usual * 100]
    return odd


# ---- the base model's losses


@dataclass(frozen=True)
class Trial:
    """The base model's losses on items at a noise level, with fixed noise."""

    transformer: LTXTransformer
    contexts: ContextStore
    items: Sequence[Item]
    sound: bool
    device: torch.device
    known: dict[tuple, dict[str, list[float]]] = field(default_factory=dict)

    @property
    def streams(self) -> tuple[str, ...]:
        return ("video", "audio") if self.sound else ("video",)

    def loss(self, sigma: float, texts: Sequence[str] | None = None) -> dict[str, list[float]]:
        """Losses of every item by stream. texts: other captions than their own."""
        captions = tuple([i.text for i in self.items] if texts is None else texts)
        if (sigma, captions) not in self.known:
            self.known[sigma, captions] = self._loss(sigma, captions)
        return self.known[sigma, captions]

    def _loss(self, sigma: float, captions: Sequence[str]) -> dict[str, list[float]]:
        modes: dict[str, Any] = {"name": "flexible", "video": {"is_generated": True}}
        if self.sound:
            modes["audio"] = {"is_generated": True}
        step = TrainStep(self.transformer, TrainingStrategySection.model_validate(modes), FlowMatchingSection())
        found: dict[str, list[float]] = {m: [] for m in self.streams}
        for first in range(0, len(self.items), _TOGETHER):
            items, texts = self.items[first : first + _TOGETHER], captions[first : first + _TOGETHER]
            out = step(collate(items, self.contexts.batch(texts)).to(self.device), seed=0, step=round(1000 * sigma), slot=first, sigma=sigma)
            for stream in self.streams:
                found[stream] += getattr(out, f"{stream}_loss").tolist()
        return found
