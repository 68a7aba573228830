"""Fitting the base transformer: flow matching on latents of drawn clips, their sounds and captions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..geometry import VideoGrid, patchify
from ..models.audio_codec import AudioCodec
from ..models.checkpoint import Checkpoint
from ..models.connectors import Connectors
from ..models.modality import Modality
from ..models.text_encoder import TextEncoder
from ..models.transformer import LTXTransformer
from ..models.video_codec import VideoCodec
from ..text import Context
from ..training.flow_matching import FlowMatchingSection
from .drawing import COLOURS, DIRECTIONS, FPS, KNOWN, RATE, SHAPES, TONES, Scenes, captions, sound
from .fit_codecs import Effort, drawn_pool, generator
from .fit_loop import Loop, pick

BASE_STEPS = 9200
CLIPS = ((17, 64, 64, 40000), (25, 64, 64, 12000), (17, 64, 96, 12000))
"""Frames, height, width and how many clips are drawn."""
_BATCH = 256
FULL_STEPS = 300
_WORDS, _REGISTERS = 16, 48
_DROPPED = 0.1  # share of samples with an empty caption, for classifier-free guidance
_SHARED = 0.5  # share of samples with one noise level for both streams; the trainer knows both ways


@dataclass(frozen=True)
class Pool:
    """Latents of one clip size: video [n, T, 128], audio [n, S, 128] tokens, caption rows [n], positions, noise levels."""

    video: Tensor
    audio: Tensor
    text: Tensor
    video_positions: Tensor
    audio_positions: Tensor
    levels: Tensor


@torch.no_grad()
def text_contexts(checkpoint: Checkpoint, texts: Sequence[str], device: torch.device) -> Context:
    """[n, S, D] contexts of the captions."""
    features = TextEncoder.load(checkpoint, device=device, dtype=torch.float32).encode(list(texts))
    return Connectors.load(checkpoint, device=device, dtype=torch.float32).contexts(features)


def _pool(checkpoint: Checkpoint, clip: tuple[int, int, int, int], effort: Effort, device: torch.device) -> Pool:
    frames, height, width, count = clip
    clips, scenes = drawn_pool(effort.count(count), frames, height, width, KNOWN, device)
    video = VideoCodec.load(checkpoint, device=device, dtype=torch.float32, decoder=False)
    audio = AudioCodec.load(checkpoint, device=device, decoder=False)
    latents = torch.cat([video.encode(part) for part in clips.split(256)])
    sounds = [audio.encode(sound(scenes[i : i + 256], frames / FPS, generator=generator(device)), RATE) for i in range(0, len(scenes), 256)]
    tones = torch.cat(sounds)
    grid = VideoGrid.of_pixels(width, height, frames, FPS, checkpoint.video_factors)
    places = replace(checkpoint.audio_grid, steps=tones.shape[2]).positions(device)[None]
    return Pool(patchify(latents), patchify(tones), _caption_rows(scenes), grid.positions(device)[None], places, _levels(grid.tokens, device))


def _levels(tokens: int, device: torch.device) -> Tensor:
    """Many noise levels of the official sampler at this length, to draw from on the device."""
    sampler, source = FlowMatchingSection().sampler("video"), torch.Generator().manual_seed(tokens)
    return torch.tensor([sampler.sample(tokens, source) for _ in range(16384)], device=device)


def _caption_rows(scenes: Scenes) -> Tensor:
    """The place of each scene's caption among ``captions(KNOWN)``."""
    row = torch.zeros_like(scenes.colour)
    for table, known, place in zip((list(COLOURS), SHAPES, list(DIRECTIONS), list(TONES)), KNOWN, (scenes.colour, scenes.shape, scenes.direction, scenes.tone)):
        lookup = torch.tensor([known.index(w) if w in known else -1 for w in table], device=row.device)
        row = row * len(known) + lookup[place]
    return row


def fit_base(checkpoint: Checkpoint, device: torch.device, effort: Effort) -> dict[str, Tensor]:
    """Tensors of the fitted transformer under bare names. checkpoint: fitted codecs, and the text side."""
    with torch.no_grad():
        contexts = text_contexts(checkpoint, [*captions(KNOWN), ""], device)
        pools = [_pool(checkpoint, clip, effort, device) for clip in CLIPS]
    model = LTXTransformer(checkpoint.transformer).to(device).train()
    for name, whole, steps, rate in (("base", False, BASE_STEPS, 1.5e-3), ("base, whole context", True, FULL_STEPS, 1e-4)):
        losses = [lambda pool=pool, whole=whole: _flow_loss(model, pool, contexts, whole) for pool in pools]
        Loop(list(model.parameters()), losses, (0, 0, 1, 0, 2), steps=effort.of(steps), rate=rate, decay=0.01, limit=effort.limit).run(name)
    return model.state_dict()


def _short(text: Tensor, slots: Tensor) -> Tensor:
    """[B, 64, D]: the slots that words may take, and some of the many registers behind them."""
    return torch.cat([text[:, :_WORDS], text[:, slots]], dim=1)


def _flow_loss(model: LTXTransformer, pool: Pool, contexts: Context, whole: bool) -> Tensor:
    """Mean square error of both velocities, noise - clean, at levels of the official sampler.

    whole: read all 1024 slots of the context. Else 48 random registers stand for all, each as often as it takes: the
    logarithm of that is added to their attention scores, which is the same as so many copies.
    """
    count = _BATCH if pool.video.is_cuda else 4
    video, audio, row = pick([pool.video, pool.audio, pool.text], count)
    device = video.device
    empty = len(contexts.video) - 1
    row = torch.where(torch.rand(count, device=device) < _DROPPED, empty, row)
    own, other = (pool.levels[torch.randint(len(pool.levels), (count,), device=device)] for _ in range(2))
    other = torch.where(torch.rand(count, device=device) < _SHARED, own, other)
    size = contexts.video.shape[1]
    slots = torch.randint(_WORDS, size, (_REGISTERS,), device=device)
    mask = torch.ones(count, _WORDS + _REGISTERS, device=device)
    mask[:, _WORDS:] = (size - _WORDS) / _REGISTERS
    total = torch.zeros((), device=device)
    given, targets = [], []
    for clean, sigma, places, text in ((video, own, pool.video_positions, contexts.video), (audio, other, pool.audio_positions, contexts.audio)):
        noise = torch.randn_like(clean)
        tokens = clean + sigma[:, None, None] * (noise - clean)
        times = sigma[:, None].expand(-1, clean.shape[1])
        words, strength = (text[row], None) if whole else (_short(text, slots)[row], mask)
        given.append(Modality(tokens, sigma, times, places.expand(count, -1, -1, -1), words, strength, timestep_rows=sigma[:, None]))
        targets.append(noise - clean)
    for velocity, target in zip(model(given[0], given[1]), targets):
        total = total + (velocity.float() - target).square().mean()
    return total
