"""What training reads: the data section, cached datasets, batches. Imports neither av nor Pillow."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Protocol

import torch
from pydantic import BeforeValidator, Discriminator, Field, model_validator
from torch import Tensor

from ..errors import DataError
from ..geometry import AudioGrid, Latents, VideoFactors
from ..section import Section
from ..text import Context, TextFeatures
from ..transfer import upload
from .buckets import ClipOptions
from .cache import Cache
from .items import Item, TrainingDataset
from .manifest import Manifest
from .precomputed import PrecomputedDataset, find_root
from .reading import Key, Reader, Warn
from .sampler import BucketSampler, Stage, Unit
from .sources import Captions, FolderSource, Sample, TableSource, open_source, with_kind

if TYPE_CHECKING:
    from .buckets import Bucket
    from .probe import Probe


class StageSection(Section):
    """A stage of progressive resolution."""

    from_step: int = Field(0, ge=0, description="The step this stage begins at.")
    max_tokens: int | None = Field(None, ge=1, description="Only clips of at most this many latent tokens; None for all.")


@dataclass(frozen=True)
class CaptionDropout:
    """Shares of samples whose caption is emptied: for both streams at once, and for each alone; independent coins."""

    both: float = 0.0
    video: float = 0.0
    audio: float = 0.0

    def __bool__(self) -> bool:
        return max(self.both, self.video, self.audio) > 0


class DataSection(Section):
    """The data: the official preprocessed_data_root and num_dataloader_workers, and a dataset to preprocess itself."""

    preprocessed_data_root: str | None = Field(None, description="Folder of a cache of ours or of the official .precomputed layout.")
    num_dataloader_workers: int = Field(2, ge=0, le=64, description="Threads that load batches ahead; where one fails, the main process reads its clips.")
    dataset: str | None = Field(None, description="Folder of clips, or a .csv, .json or .jsonl file, to preprocess before training.")
    sources: list[Annotated[FolderSource | TableSource, Discriminator("kind"), BeforeValidator(with_kind)]] = Field(
        default_factory=list, description="Several datasets, each with its own settings."
    )
    cache_dir: str | None = Field(None, description="Where encoded clips go; None is .ltx_cache beside the dataset.")
    index: str = Field("index.json", description="Name of the list of this dataset inside the cache.")
    resolution_buckets: str | None = Field(None, description="Buckets such as 960x544x49;512x512; auto proposes them from the clips.")
    token_budget: int = Field(4096, ge=1, le=1_000_000, description="With auto buckets: latent tokens a clip may have.")
    clips: ClipOptions = Field(default_factory=ClipOptions, description="How clips are cut and scaled.")
    captions: Captions = Field(default_factory=Captions, description="Caption policy, trigger word, cleaning (for dataset).")
    caption_dropout: float = Field(0.0, ge=0, le=1, description="Share of samples that train with an empty caption.")
    video_caption_dropout: float = Field(0.0, ge=0, le=1, description="Share of samples whose video stream alone reads an empty caption.")
    audio_caption_dropout: float = Field(0.0, ge=0, le=1, description="Share of samples whose sound stream alone reads an empty caption.")
    held_out_share: float = Field(0.0, ge=0, le=0.5, description="Share of the clips kept out of training, to measure the loss on; 0: none.")
    held_out_root: str | None = Field(None, description="Another preprocessed dataset to measure the loss on, instead of a share of this one.")
    stages: list[StageSection] = Field(default_factory=list, description="Progressive resolution: small clips first, larger ones from a step on.")
    preprocess_workers: int = Field(0, ge=0, le=64, description="Threads that decode clips ahead of the encoder; 0: one a processor core, at most 16.")
    preprocess_batch_size: int = Field(1, ge=1, le=256, description="Clips of a bucket encoded together.")

    @model_validator(mode="after")
    def _something(self) -> DataSection:
        if not (self.preprocessed_data_root or self.dataset or self.sources):
            raise ValueError("preprocessed_data_root, dataset or sources: one of them must say where the data is")
        return self

    @property
    def decoding_threads(self) -> int:
        """``preprocess_workers``, decided."""
        return self.preprocess_workers or min(16, os.cpu_count() or 2)

    @property
    def caption_dropouts(self) -> CaptionDropout:
        """The three shares together."""
        return CaptionDropout(self.caption_dropout, self.video_caption_dropout, self.audio_caption_dropout)

    @classmethod
    def free_fields(cls) -> frozenset[str]:
        """Fields that may change without making another run."""
        return frozenset({"held_out_root", "num_dataloader_workers", "preprocess_workers", "preprocess_batch_size", "cache_dir"})

    def all_sources(self) -> list[FolderSource | TableSource]:
        """The datasets to preprocess, in order; empty when only a preprocessed root is given."""
        found = list(self.sources)
        if self.dataset:
            found.insert(0, open_source(self.dataset, captions=self.captions))
        return found

    def samples(self) -> list[Sample]:
        """All samples of all datasets; ids carry the dataset's name when there are several."""
        from .sources import ChainSource

        sources = self.all_sources()
        return sources[0].samples() if len(sources) == 1 else ChainSource(sources=sources).samples()

    def cache_root(self) -> Path:
        """Where the cache of this section lies."""
        if self.cache_dir:
            return Path(self.cache_dir).expanduser()
        sources = self.all_sources()
        if sources:
            place = Path(sources[0].path).expanduser()
            return (place if place.is_dir() else place.parent) / ".ltx_cache"
        return Path(self.preprocessed_data_root or ".").expanduser()

    def data_root(self) -> Path:
        """What training opens: the preprocessed root if given, else the cache."""
        return Path(self.preprocessed_data_root).expanduser() if self.preprocessed_data_root else self.cache_root()

    def buckets(self, factors: VideoFactors, probes: Callable[[], Sequence[Probe]]) -> tuple[Bucket, ...]:
        """The buckets, checked; ``auto`` or none proposes them from ``probes()`` under the token budget."""
        from .buckets import check, parse_buckets
        from .proposals import propose

        if self.resolution_buckets and self.resolution_buckets.strip().lower() != "auto":
            found = parse_buckets(self.resolution_buckets)
        else:
            found = propose(probes(), factors, self.token_budget)
        check(found, factors)
        return found


class CachedDataset:
    """The entries of one manifest, loaded from the cache when asked for."""

    def __init__(self, root: str | Path, index: str = "index.json") -> None:
        root = Path(root).expanduser()
        self.cache = Cache(root)
        self.manifest = Manifest.read(root / index)
        self.audio_grid = self.manifest.audio_grid

    def __len__(self) -> int:
        return len(self.manifest.entries)

    def units(self) -> list[Unit]:
        return [Unit(e.group, e.repeats, e.tokens or e.audio_steps) for e in self.manifest.entries]

    def item(self, index: int) -> Item:
        """Load one sample; raises DataError naming what is missing or damaged."""
        entry = self.manifest.entries[index]
        roles = {role: self._role(key) for role, key in entry.roles.items()}
        video = self.cache.get_latents(entry.video) if entry.video else None
        audio = self.cache.get_latents(entry.audio) if entry.audio else None
        return Item(entry.id, entry.text, video, audio, roles, entry.audio_steps, entry.weight, entry.regularisation)

    def _role(self, key: str) -> Latents | Tensor:
        return self.cache.get_mask(key) if key.startswith("mask-") else self.cache.get_latents(key)

    def features(self, key: str) -> TextFeatures:
        return self.cache.get_text(key)

    def text_keys(self) -> list[str]:
        """Distinct caption keys, in the order of the entries."""
        return list(dict.fromkeys(e.text for e in self.manifest.entries))

    def empty_text(self) -> str | None:
        """Key of the empty caption, for caption dropout; None when it was not encoded."""
        return self.manifest.texts.get("")

    def has_prior(self) -> bool:
        """Whether some entries train towards the base model's own prediction."""
        return any(e.regularisation == "prior" for e in self.manifest.entries)

    def audio_coverage(self) -> float:
        """Share of entries that have sound."""
        return sum(e.audio is not None for e in self.manifest.entries) / max(1, len(self))

    def missing(self) -> list[str]:
        """Keys that the manifest names and the cache lacks."""
        keys = {k for e in self.manifest.entries for k in (e.text, e.video, e.audio, *e.roles.values()) if k}
        return sorted(k for k in keys if not self.cache.has(k))


def open_dataset(root: str | Path, *, factors: VideoFactors, audio_grid: AudioGrid | None = None, index: str = "index.json", directories: Mapping[str, str] | None = None) -> TrainingDataset:
    """The dataset of a folder: ours (an index.json) or the official layout (latents/, conditions/...).

    directories: official role -> folder name (video, audio, reference_video...), for the official layout.
    """
    root = Path(root).expanduser()
    if (root / index).is_file():
        dataset = CachedDataset(root, index)
        if not len(dataset):
            raise DataError("data.none", f"{root.name[:60]}/{index} lists no clip to train on.", f"{root}: preprocess the dataset again; its report says what became of the clips.")
        return dataset
    found = find_root(root)
    if found is None:
        raise DataError("data.root", f"{root} holds neither index.json nor an official conditions folder.", "Preprocess a dataset first, or give its .precomputed folder.")
    return PrecomputedDataset(found, factors=factors, audio_grid=audio_grid, directories=directories)


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


def join_contexts(parts: Sequence[Context]) -> Context:
    """Contexts [1, S, D] along the batch; shorter ones are padded behind a mask."""

    def tensor(part: Context) -> Tensor:
        return part.video if part.video is not None else part.audio

    longest = max(tensor(p).shape[1] for p in parts)
    ragged = any(tensor(p).shape[1] != longest for p in parts) or any(p.mask is not None for p in parts)

    def padded(value: Tensor | None) -> Tensor | None:
        return None if value is None else torch.nn.functional.pad(value, (0, 0, 0, longest - value.shape[1]))

    def mask(part: Context) -> Tensor:
        own = part.mask if part.mask is not None else torch.ones(tensor(part).shape[:2], dtype=torch.long, device=tensor(part).device)
        return torch.nn.functional.pad(own, (0, longest - own.shape[1]))

    video = None if parts[0].video is None else torch.cat([padded(p.video) for p in parts])
    audio = None if parts[0].audio is None else torch.cat([padded(p.audio) for p in parts])
    return Context(video, audio, torch.cat([mask(p) for p in parts]) if ragged else None)


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


def make_sampler(dataset: TrainingDataset, section: DataSection, *, batch_size: int, accumulation: int, seed: int) -> BucketSampler:
    """The sampler of a dataset under a section's stages."""
    stages = [Stage(s.from_step, s.max_tokens) for s in section.stages]
    return BucketSampler(dataset.units(), batch_size=batch_size, accumulation=accumulation, seed=seed, stages=stages)
