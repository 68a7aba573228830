"""The cache: content-addressed safetensors of encoded clips, sounds, masks and captions."""

from __future__ import annotations

import errno
import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from uuid import uuid4

import torch
from torch import Tensor

from ..errors import DataError, utf8
from ..geometry import Latents, VideoFactors
from ..tensorfile import write_tensors
from ..text import TextFeatures
from .manifest import FORMAT, KINDS, Manifest, grid_from_json, grid_to_json

if TYPE_CHECKING:
    from .buckets import ClipPlan
    from .sources import MemoryClip

READER = 2
"""Raised when reading changes what a plan's pixels or samples are, so that old entries are not used."""
WHOLE = 8 << 20  # bytes: files up to this are hashed whole
BLOCK = 64 << 10


def digest(value: Any) -> str:
    """40 hex digits over a value's canonical JSON."""
    return hashlib.sha256(json.dumps(value, sort_keys=True, separators=(",", ":"), default=str).encode()).hexdigest()[:40]


def file_fingerprint(path: Path) -> str:
    """40 hex digits of a file's content: size with the whole of small files, or head, tail and 32 blocks between of large ones."""
    size = path.stat().st_size
    sha = hashlib.sha256(str(size).encode())
    with open(path, "rb") as file:
        if size <= WHOLE:
            sha.update(file.read())
        else:
            for n in range(34):
                file.seek((size - BLOCK) * n // 33)
                sha.update(file.read(BLOCK))
    return sha.hexdigest()[:40]


def memory_fingerprint(clip: MemoryClip) -> str:
    """40 hex digits of a ComfyUI clip's frames and sound."""
    sha = hashlib.sha256(f"{clip.fps}/{clip.sample_rate}".encode())
    for tensor in (clip.frames, clip.waveform):
        if tensor is not None:
            sha.update(str((tensor.dtype, tuple(tensor.shape))).encode())
            for part in tensor.detach().cpu().contiguous():
                sha.update(part.reshape(-1).view(torch.uint8).numpy())
    return sha.hexdigest()[:40]


@dataclass(frozen=True)
class Entry:
    """One cache file: its tensors and what it says of itself."""

    tensors: dict[str, Tensor]
    about: dict[str, Any]


class Cache:
    """Entries by key below ``root``: ``<kind>/<2 hex>/<key>.safetensors``, each written beside and renamed.

    A key is the kind, a dash, and 40 hex digits over everything that decides the content. Safe for several threads and processes.
    """

    def __init__(self, root: str | Path) -> None:
        self.root = Path(root).expanduser()
        self._fingerprints: dict[tuple[str, int, int], str] = {}
        self._clips: dict[int, str] = {}

    # -- keys --

    def fingerprint(self, media: Path | MemoryClip) -> str:
        """The content's fingerprint, remembered by path, size and change time."""
        if not isinstance(media, Path):
            return self._clips.setdefault(id(media), memory_fingerprint(media))
        status = media.stat()
        known = (str(media), status.st_size, status.st_mtime_ns)
        if known not in self._fingerprints:
            self._fingerprints[known] = file_fingerprint(media)
        return self._fingerprints[known]

    def video_key(self, plan: ClipPlan, codec_fingerprint: str) -> str:
        """Key of the plan's pixels through a codec (a reference's plan gives the reference's key)."""
        return "video-" + digest([READER, codec_fingerprint, self.fingerprint(plan.media), pixel_facts(plan)])

    def audio_key(self, plan: ClipPlan, codec_fingerprint: str, role: str = "audio") -> str | None:
        """Key of the plan's sound (or its reference sound) through a codec; None where there is no sound."""
        source = plan.sample.roles.get(role) if role != "audio" else plan.sound
        if source is None:
            return None
        own = source is plan.media
        offset = plan.start - (plan.probe.timeline.start if plan.probe.timeline and not own else 0.0)
        facts = [round(offset, 6), round(plan.seconds, 6), "file" if own else "role"]
        return "audio-" + digest([READER, codec_fingerprint, self.fingerprint(source), facts])

    def mask_key(self, plan: ClipPlan, role: str, factors: VideoFactors, steps: int = 0) -> str:
        """Key of a pooled mask: its file, the clip's cut, the latent factors (or sound steps). ``alpha``: the clip's transparency."""
        source = plan.media if role == "alpha" else plan.sample.roles[role]
        cut = pixel_facts(plan) if plan.bucket else [plan.seconds]
        shape = [plan.probe.width, plan.probe.height]
        return "mask-" + digest([READER, role, self.fingerprint(source), cut, shape, asdict(factors), steps, round(plan.start, 6)])

    def text_key(self, caption: str, encoder_fingerprint: str) -> str:
        """Key of a caption's features."""
        return "text-" + digest([encoder_fingerprint, caption])

    # -- files --

    def path(self, key: str) -> Path:
        """Where the entry of a key lies."""
        kind, _, name = key.partition("-")
        assert kind in KINDS and name, f"no cache key: {key}"
        return self.root / kind / name[:2] / f"{name}.safetensors"

    def has(self, key: str) -> bool:
        return self.path(key).is_file()

    def put(self, key: str, tensors: Mapping[str, Tensor], about: Mapping[str, Any] | None = None) -> None:
        """Write an entry at once or not at all; the same content gives the same bytes.

        Raises DataError cache.disk_full when there is no room.
        """
        path = self.path(key)
        text = json.dumps({"format": FORMAT, "key": key, **(about or {})}, sort_keys=True, ensure_ascii=False, default=str)
        text = utf8(text).decode()
        self._write(path, lambda file: write_tensors(file, {k: t.detach().cpu().contiguous() for k, t in tensors.items()}, {"ltx_train": text}))

    def get(self, key: str) -> Entry:
        """Read an entry; raises DataError when it is missing or damaged."""
        from safetensors import SafetensorError, safe_open

        path = self.path(key)
        try:
            with safe_open(str(path), framework="pt") as file:
                tensors = {name: file.get_tensor(name) for name in file.keys()}
                about = json.loads((file.metadata() or {}).get("ltx_train", "{}"))
        except FileNotFoundError as error:
            raise DataError("cache.missing", f"The cache has no {key[:14]}..., which the index names.", "Preprocess the dataset again; what is there is kept.") from error
        except (SafetensorError, json.JSONDecodeError, OSError) as error:
            raise DataError("cache.damaged", f"The cache file {path.name[:20]}... cannot be read.", f"{path}: {error}. Delete it and preprocess again.") from error
        return Entry(tensors, about)

    @contextmanager
    def _said(self, key: str) -> Iterator[None]:
        """A file that is read but holds something else, told as damaged."""
        try:
            yield
        except (KeyError, TypeError, ValueError, AttributeError, AssertionError) as error:
            path = self.path(key)
            raise DataError("cache.damaged", f"The cache file {path.name[:20]}... holds no {key.partition('-')[0]}.", f"{path}: {error!r}. Delete it and preprocess again.") from error

    def _write(self, path: Path, fill: Any) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        waiting = self.root / "tmp"
        waiting.mkdir(parents=True, exist_ok=True)
        temporary = waiting / f"{os.getpid()}-{uuid4().hex[:12]}"
        try:
            with open(temporary, "wb") as file:
                fill(file)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, path)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EFBIG, getattr(errno, "EDQUOT", errno.ENOSPC)):
                raise
            raise DataError(
                "cache.disk_full", f"The disk of the cache is full while writing {path.name[:12]}...", f"{self.root}: free some space, then go on; whole entries are kept."
            ) from error
        finally:
            temporary.unlink(missing_ok=True)

    def clean(self) -> int:
        """Remove what killed processes left half written; returns how many files."""
        import psutil

        removed = 0
        for file in (self.root / "tmp").glob("*") if (self.root / "tmp").is_dir() else ():
            owner = file.name.split("-")[0]
            if not owner.isdecimal() or int(owner) == os.getpid() or not psutil.pid_exists(int(owner)):
                file.unlink(missing_ok=True)
                removed += 1
        return removed

    # -- typed entries --

    def put_latents(self, key: str, latents: Latents) -> None:
        """One clip's latents (batch of 1) with their grid."""
        assert latents.batch == 1, "an entry holds one clip"
        self.put(key, {"latents": latents.values[0]}, {"grid": grid_to_json(latents.grid)})

    def get_latents(self, key: str) -> Latents:
        """Latents with a batch of 1."""
        entry = self.get(key)
        with self._said(key):
            return Latents(entry.tensors["latents"].unsqueeze(0), grid_from_json(entry.about["grid"]))

    def get_mask(self, key: str) -> Tensor:
        """A mask on the latent grid."""
        entry = self.get(key)
        with self._said(key):
            return entry.tensors["mask"]

    def put_text(self, key: str, features: TextFeatures, caption: str = "") -> None:
        """Features of one caption's valid tokens."""
        tensors = {"video": features.video} | ({"audio": features.audio} if features.audio is not None else {})
        self.put(key, tensors, {"features": features.kind, "caption": caption})

    def get_text(self, key: str) -> TextFeatures:
        entry = self.get(key)
        with self._said(key):
            return TextFeatures(entry.about["features"], entry.tensors["video"], entry.tensors.get("audio"))

    def write_index(self, manifest: Manifest, name: str = "index.json") -> Path:
        """Write a manifest beside the entries."""
        path = self.root / name
        text = json.dumps(manifest.to_json(), indent=1, ensure_ascii=False, sort_keys=True)
        self._write(path, lambda file: file.write(utf8(text)))
        return path


def pixel_facts(plan: ClipPlan) -> list[Any]:
    """What decides a plan's pixels beside the file: sizes, place, moments, and the options that touch this file."""
    options, probe = plan.options, plan.probe
    facts: list[Any] = [str(plan.bucket), asdict(plan.placement), plan.slots()[0], plan.stride, plan.temporal_factor, plan.hold]
    facts += [str(plan.fps), round(plan.start, 6), [probe.orientation.degrees, probe.orientation.mirrored], str(probe.sample_aspect)]
    facts += [options.crop == "motion" and not options.letterbox, probe.interlaced, [probe.coded_width, probe.coded_height]]
    if probe.transfer != "sdr":
        facts.append(["hdr", probe.transfer, options.hdr])
    if probe.gamut:
        facts.append(["gamut", probe.gamut])
    if probe.alpha or plan.placement.left < 0 or plan.placement.top < 0:
        facts.append(["colour", list(options.alpha_colour)])
    return facts


@dataclass(frozen=True)
class Forecast:
    """What preprocessing will need of the disk, and what is free on it."""

    bytes_needed: int
    bytes_free: int

    @property
    def fits(self) -> bool:
        return self.bytes_needed < self.bytes_free


def forecast(
    cache: Cache, plans: Iterable[ClipPlan], factors: VideoFactors, *, codec: str, captions: Iterable[str] = (), text_width: int = 6144, channels: int = 128, audio: bool = True
) -> Forecast:
    """Disk that the entries still missing will take: float32 latents, bfloat16 text features of about one token per 4 letters."""
    import shutil

    needed = 0
    for plan in plans:
        if plan.bucket is not None and cache.has(cache.video_key(plan, codec)):
            continue
        needed += plan.bucket.tokens(factors) * channels * 4 if plan.bucket else 0
        needed += round(plan.seconds * 25) * 128 * 4 if audio and plan.sound is not None else 0
        needed += 4096
    needed += sum((len(text) // 4 + 2) * text_width * 2 for text in set(captions))
    folder = cache.root
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    return Forecast(needed, shutil.disk_usage(folder).free)
