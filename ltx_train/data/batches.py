"""Batches: samples stacked for one pass, loaded ahead by threads, with the captions' contexts and caption dropout."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from ..errors import DataError
from ..geometry import AudioGrid, Latents
from ..text import Context
from ..transfer import upload
from .items import Item, TrainingDataset
from .reading import Key, Reader, Warn
from .sampler import BucketSampler


@dataclass(frozen=True)
class Batch:
    """What one forward and backward pass reads.

    roles: "reference_video", "reference_audio" -> Latents; "video_mask", "loss_mask" [B,F',H',W'], "audio_mask" [B,T].
    audio_present: [B] bool; audio is zeros where it is False. weight: [B] factors on the loss.
    regularisation: [B] bool, clips that keep the model general; prior: [B] bool, those of them whose target is the base
    model's prediction. None where there is none; they stay on the host, where asking them waits for nothing.
    """

    video: Latents | None
    audio: Latents | None
    context: Context
    roles: Mapping[str, Latents | Tensor]
    audio_present: Tensor
    weight: Tensor
    ids: tuple[str, ...]
    regularisation: Tensor | None = None
    prior: Tensor | None = None

    @property
    def size(self) -> int:
        return len(self.ids)

    def to(self, device: torch.device | str, dtype: torch.dtype | None = None) -> Batch:
        """The batch on a device, without waiting for it; latents and context cast to ``dtype`` if given, masks and weights kept."""
        move = lambda t: None if t is None else Latents(upload(t.values, device, dtype), t.grid)  # noqa: E731
        roles = {name: move(value) if isinstance(value, Latents) else upload(value, device) for name, value in self.roles.items()}
        context = self.context.to(device, dtype)
        return replace(
            self, video=move(self.video), audio=move(self.audio), context=context, roles=roles,
            audio_present=self.audio_present, weight=upload(self.weight, device),
        )  # fmt: skip


def collate(items: Sequence[Item], context: Context, audio_grid: AudioGrid | None = None) -> Batch:
    """Stack samples of one group. Samples without sound get zeros; with ``audio_grid`` also when no sample has sound."""
    present = torch.tensor([i.audio is not None for i in items])
    video = _stack([i.video for i in items]) if items[0].video is not None else None
    names = list(items[0].roles)
    roles = {n: _stack([i.roles[n] for i in items]) if isinstance(items[0].roles[n], Latents) else torch.stack([i.roles[n] for i in items]) for n in names}
    weight = torch.tensor([i.weight for i in items], dtype=torch.float32)
    general = torch.tensor([bool(i.regularisation) for i in items])
    prior = torch.tensor([i.regularisation == "prior" for i in items])
    return Batch(
        video, _stack_audio(items, audio_grid), context, roles, present, weight, tuple(i.id for i in items),
        general if general.any() else None, prior if prior.any() else None,
    )  # fmt: skip


def _stack(parts: Sequence[Latents]) -> Latents:
    shapes = {tuple(p.values.shape) for p in parts}
    if len(shapes) > 1:
        raise DataError("data.shapes", f"A batch mixes latents of shapes {sorted(shapes)}.", "Use batch size 1, or preprocess again so that buckets are known.")
    return Latents(torch.cat([p.values for p in parts]), parts[0].grid)


def _stack_audio(items: Sequence[Item], template: AudioGrid | None) -> Latents | None:
    known = next((i.audio for i in items if i.audio is not None), None)
    if known is None:
        steps = items[0].audio_steps
        if template is None or not steps:
            return None
        grid = replace(template, steps=steps)
        return Latents(torch.zeros(len(items), grid.channels, grid.steps, grid.bins), grid)
    silent = Latents(torch.zeros_like(known.values), known.grid)
    return _stack([i.audio if i.audio is not None else silent for i in items])


@dataclass(frozen=True)
class CaptionDropout:
    """Shares of samples whose caption is emptied: for both streams at once, and for each alone; independent coins."""

    both: float = 0.0
    video: float = 0.0
    audio: float = 0.0

    def __bool__(self) -> bool:
        return max(self.both, self.video, self.audio) > 0


class ContextStore(Protocol):
    """Gives the context of a caption; the trainer has one (connectors run once per caption)."""

    def batch(self, keys: Sequence[str]) -> Context: ...


class Batches:
    """Batches by (step, micro-step), loaded ahead by threads; order and content are the sampler's alone.

    with_audio: fill silence with zeros even where a whole batch has none, so that every rank runs the same network.
    warn: is told (code, message, hint) when a thread fails; its clips are read again where they are needed.
    """

    def __init__(
        self, dataset: TrainingDataset, sampler: BucketSampler, contexts: ContextStore, *, workers: int = 2, rank: int = 0, world: int = 1,
        caption_dropout: CaptionDropout | float = 0.0, with_audio: bool = True, empty_text: str | None = None, warn: Warn = lambda code, message, hint: None,
    ) -> None:  # fmt: skip
        self.dataset, self.sampler, self.contexts = dataset, sampler, contexts
        self.dropout = caption_dropout if isinstance(caption_dropout, CaptionDropout) else CaptionDropout(caption_dropout)
        self.rank, self.world, self.empty = rank, world, empty_text or dataset.empty_text()
        self.template = dataset.audio_grid if with_audio else None
        if self.dropout and self.empty is None:
            raise DataError("data.empty_caption", "Caption dropout needs the empty caption, which this cache lacks.", "Preprocess again with caption_dropout set, or set it to 0.")
        self._reader, self._ahead = Reader(self._load, workers, warn, self._names), workers

    def get(self, step: int, micro: int = 0) -> Batch:
        """The batch of a micro-step; the following ones are loaded meanwhile."""
        items = self._reader.get(list(self._following(step, micro)))
        return collate(items, self._context(items, step, micro), self.template)

    def _context(self, items: Sequence[Item], step: int, micro: int) -> Context:
        """The captions' contexts with dropout applied; each stream may have lost its own."""
        coins = lambda share, name: self.sampler.dropped(share, step, micro, self.rank, self.world, name)  # noqa: E731
        both, rates = coins(self.dropout.both, "caption"), self.dropout
        streams = [coins(rates.video, "caption video"), coins(rates.audio, "caption audio")]
        video, audio = ([self.empty if b or o else i.text for i, b, o in zip(items, both, own)] for own in streams)
        seen = self.contexts.batch(video)
        if seen.video is None or seen.audio is None:
            return seen if video == audio or seen.audio is None else self.contexts.batch(audio)
        if video == audio:
            return seen
        heard = self.contexts.batch(audio)
        assert seen.mask is None and heard.mask is None, "behind connectors every token counts, so the streams may read different captions"
        return Context(seen.video, heard.audio)

    def close(self) -> None:
        """End the threads."""
        self._reader.close()

    def _following(self, step: int, micro: int) -> Iterator[Key]:
        """This micro-step and those that come next, as many as there are threads."""
        for _ in range(self._ahead + 1):
            yield step, micro
            micro += 1
            if micro == self.sampler.accumulation:
                step, micro = step + 1, 0

    def _names(self, step: int, micro: int) -> list[str]:
        """What the samples of a micro-step are called: their ids where a manifest knows them, else their numbers."""
        entries = getattr(getattr(self.dataset, "manifest", None), "entries", None)
        indices = self.sampler.batch_ids(step, micro, self.rank, self.world)
        return [entries[i].id if entries is not None else f"number {i + 1}" for i in indices]

    def _load(self, step: int, micro: int) -> list[Item]:
        return [self.dataset.item(i) for i in self.sampler.batch_ids(step, micro, self.rank, self.world)]
