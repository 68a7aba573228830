"""What training reads: the data section, and the dataset of a folder. Imports neither av nor Pillow."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from pydantic import BeforeValidator, Discriminator, Field, model_validator
from torch import Tensor

from ..errors import DataError
from ..geometry import AudioGrid, Latents, VideoFactors
from ..section import Section
from ..text import TextFeatures
from .batches import CaptionDropout
from .buckets import Bucket, ClipOptions, check, parse_buckets
from .cache import Cache
from .items import Item, TrainingDataset
from .manifest import Manifest
from .precomputed import PrecomputedDataset, find_root
from .proposals import propose
from .sampler import BucketSampler, Stage, Unit
from .sources import Captions, ChainSource, FolderSource, Sample, TableSource, open_source, with_kind

if TYPE_CHECKING:
    from .probe import Probe


class StageSection(Section):
    """A stage of progressive resolution."""

    from_step: int = Field(0, ge=0, description="The step this stage begins at.")
    max_tokens: int | None = Field(None, ge=1, description="Only clips of at most this many latent tokens; None for all.")


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


def make_sampler(dataset: TrainingDataset, section: DataSection, *, batch_size: int, accumulation: int, seed: int) -> BucketSampler:
    """The sampler of a dataset under a section's stages."""
    stages = [Stage(s.from_step, s.max_tokens) for s in section.stages]
    return BucketSampler(dataset.units(), batch_size=batch_size, accumulation=accumulation, seed=seed, stages=stages)
