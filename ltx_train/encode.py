"""Encoding planned clips, captions and sounds into the cache: what is there is kept, an interruption leaves whole entries."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, closing
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from .data.buckets import ClipPlan, encode_batches
from .data.cache import Cache, forecast
from .data.dataset import DataSection
from .data.findings import CODES, Finding, MediaError
from .data.manifest import Manifest, ManifestEntry, manifest_entry
from .data.report import Report
from .errors import DataError, size_text
from .geometry import AudioGrid, Latents, VideoFactors, VideoGrid
from .models.codec import Codec
from .text import TextFeatures

if TYPE_CHECKING:
    from .data.media import Prepared
    from .models.checkpoint import Checkpoint

TEXT_BATCH = 256


class Reporter(Protocol):
    """What preprocessing says and asks: a :class:`LiveRun` in the child, a small stand-in inside ComfyUI."""

    def phase(self, name: str, message: str = "") -> AbstractContextManager[None]: ...
    def progress(self, phase: str, done: int, total: int | None = None, *, unit: str = "", message: str = "", eta: float | None = None) -> None: ...
    def warn(self, code: str, message: str, hint: str = "") -> None: ...
    def check(self) -> None:
        """Raise StopRequested if a stop was asked for."""


@dataclass(frozen=True)
class Target:
    """The model that a cache is made for: what of it decides the entries."""

    family: str
    factors: VideoFactors
    audio_grid: AudioGrid | None

    @classmethod
    def of(cls, checkpoint: Checkpoint) -> Target:
        return cls(checkpoint.family.name, checkpoint.video_factors, checkpoint.audio_grid if checkpoint.family.audio else None)


class Preprocessor:
    """Fills the cache for planned clips. What is there already is not encoded again; an interruption leaves whole entries only.

    roles: the roles to encode beside the streams (None: every one that a sample has).
    part: (rank, ranks): this process encodes every ranks-th batch.
    """

    def __init__(
        self,
        section: DataSection,
        target: Target,
        codec: Codec,
        report: Reporter,
        *,
        with_audio: bool = True,
        with_video: bool = True,
        roles: frozenset[str] | None = None,
        part: tuple[int, int] = (0, 1),
    ) -> None:
        self.section, self.target, self.codec, self.report = section, target, codec, report
        self.cache = Cache(section.cache_root())
        self.with_audio = with_audio and target.audio_grid is not None and section.clips.audio != "off"
        self.with_video, self.roles, self.part = with_video, roles, part
        self.refused: dict[str, Finding] = {}
        self.noted: dict[str, list[str]] = {}  # by finding code: clips of which decoding showed what their headers do not

    # -- the whole way --
    def encode(self, planned: Report, texts: Sequence[str]) -> None:
        """Encode what is missing: captions and texts, then pictures, then sound."""
        self.check_room(planned, texts)
        with self.report.phase("encode text"):
            self.encode_texts(dict.fromkeys([p.sample.caption for p in planned.plans] + list(texts)))
        if self.with_video and any(p.bucket for p in planned.plans):
            with self.report.phase("encode video"):
                self.encode_pictures([p for p in planned.plans if p.bucket])
        if self.with_audio:
            with self.report.phase("encode audio"):
                self.encode_sounds(planned.plans)
        self.codec.release()

    def check_room(self, planned: Report, texts: Sequence[str]) -> None:
        """Raise DataError before any work when the entries cannot fit on the disk."""
        captions = [p.sample.caption for p in planned.plans]
        needed = forecast(self.cache, planned.plans, self.target.factors, codec=self.video_fingerprint, captions=captions + list(texts), audio=self.with_audio)
        if not needed.fits:
            raise DataError(
                "cache.disk_full",
                f"The cache needs {size_text(needed.bytes_needed)}; {size_text(needed.bytes_free)} are free.",
                f"Free some space at {self.cache.root}, or set data.cache_dir to another disk.",
            )

    @property
    def video_fingerprint(self) -> str:
        return f"{self.codec.kind}:{self.codec.fingerprint('video_vae')}" if self.with_video else ""

    @property
    def audio_fingerprint(self) -> str:
        return f"{self.codec.kind}:{self.codec.fingerprint('audio_vae')}" if self.with_audio else ""

    @property
    def text_fingerprint(self) -> str:
        return f"{self.codec.kind}:{self.codec.fingerprint('text_encoder')}"

    def share(self, items: Iterable) -> list:
        """This process's part of the work, cut before the cache is looked at: other ranks are filling it meanwhile."""
        return list(items)[self.part[0] :: self.part[1]]

    # -- text --
    def text_key(self, text: str) -> str:
        return self.cache.text_key(text, self.text_fingerprint)

    def encode_texts(self, texts: Iterable[str]) -> None:
        missing = [t for t in self.share(texts) if not self.cache.has(self.text_key(t))]
        cut: dict[str, tuple[int, int]] = {}
        for start in range(0, len(missing), TEXT_BATCH):
            self.report.check()
            batch = missing[start : start + TEXT_BATCH]
            self.codec.progress = partial(self.tell_texts, start, len(batch), len(missing))
            for text, features in zip(batch, self.codec.encode_text(batch)):
                _check_features(text, features)
                self.cache.put_text(self.text_key(text), features, text)
            cut |= self.codec.cut
            self.report.progress("encode text", start + len(batch), len(missing), unit="captions")
        self.codec.progress = None
        if cut:
            named = "\n".join(f"{tokens} tokens: {text[:80]}" for text, (tokens, _) in list(cut.items())[:20])
            limit = next(iter(cut.values()))[1]
            self.report.warn("caption.cut", f"Captions longer than the {limit} tokens that are read, their ends cut off: {len(cut)}.", named)

    def tell_texts(self, start: int, size: int, total: int, done: int, parts: int) -> None:
        """How far a batch of captions is: a large encoder read from the disk takes minutes for one, and a stop is heard meanwhile."""
        self.report.check()
        self.report.progress("encode text", start + size * done // parts, total, unit="captions")

    # -- pictures, references and masks --
    def picture_keys(self, piece: ClipPlan) -> dict[str, str]:
        """Cache keys of a clip's picture entries by role, from the plan alone."""
        from .data.media import fill_motion

        piece = fill_motion(piece)
        keys = {"video": self.cache.video_key(piece, self.video_fingerprint)}
        reference = self.reference_plan(piece)
        if reference is not None:
            keys["reference_video"] = self.cache.video_key(reference, self.video_fingerprint)
        if self.wants("video_mask", piece):
            keys["video_mask"] = self.cache.mask_key(piece, "video_mask", self.target.factors)
        if piece.probe.alpha and piece.options.alpha == "mask":
            keys["loss_mask"] = self.cache.mask_key(piece, "alpha", self.target.factors)
        return keys

    def wants(self, role: str, piece: ClipPlan) -> bool:
        return role in piece.sample.roles and (self.roles is None or role in self.roles)

    def reference_plan(self, piece: ClipPlan) -> ClipPlan | None:
        from .data.probe import probe
        from .data.references import plan_reference

        if not self.wants("reference_video", piece):
            return None
        found = plan_reference(piece, probe(piece.sample.roles["reference_video"]), self.target.factors)
        return None if isinstance(found, Finding) else found

    def encode_pictures(self, plans: Sequence[ClipPlan]) -> None:
        from .data.media import prepare

        batches = [b for b in self.share(encode_batches(plans, self.section.preprocess_batch_size)) if not all(self.cache.has(k) for p in b for k in self.picture_keys(p).values())]
        total, done = sum(map(len, batches)), 0
        reading = prepare(batches, self.target.factors, wanted=self.roles, workers=self.section.decoding_threads)
        with closing(reading):
            for ready in reading:
                self.report.check()
                self.refused.update({r.plan.id: Finding(r.error.code, r.error.message) for r in ready if isinstance(r.error, MediaError)})
                for item in ready:
                    if item.error is not None and not isinstance(item.error, MediaError):
                        raise item.error
                    self.note(item.plan, item.notes)
                self.encode_batch([r for r in ready if r.error is None])
                done += len(ready)
                self.report.progress("encode video", done, total, unit="clips", message=ready[-1].plan.id)

    def encode_batch(self, ready: list[Prepared]) -> None:
        if not ready:
            return
        latents = self.codec.encode_video(torch.stack([r.clip.frames for r in ready]))
        for item, values in zip(ready, latents):
            if not self.finite_values(values, item.plan):
                continue
            keys = self.picture_keys(item.plan)
            self.put_video(keys["video"], item.plan, values)
            if item.reference is not None:
                encoded = self.codec.encode_video(item.reference.frames[None])[0]
                if not self.finite_values(encoded, item.plan):
                    continue
                self.put_video(keys["reference_video"], item.reference_plan, encoded)
            if item.video_mask is not None:
                self.put_mask(keys["video_mask"], item.video_mask)
            if "loss_mask" in keys and item.clip.alpha is not None:
                from .data.media import loss_mask

                self.put_mask(keys["loss_mask"], loss_mask(item.clip.alpha, self.target.factors))

    def note(self, piece: ClipPlan, findings: Iterable[Finding]) -> None:
        """Keep what was found while decoding, where the report did not know it."""
        known = {f.code for f in piece.notes}
        for code in dict.fromkeys(f.code for f in findings if f.code not in known):
            self.noted.setdefault(code, []).append(piece.id)

    def finite_values(self, latents: Tensor, piece: ClipPlan) -> bool:
        """Whether all are numbers; a clip whose latents are not is left out: one such step would end the training's weights."""
        if bool(torch.isfinite(latents).all()):
            return True
        self.refused[piece.id] = Finding("latents.values", f"the VAE gave {int((~torch.isfinite(latents)).sum())} values that are no numbers")
        return False

    def put_video(self, key: str, piece: ClipPlan, values: Tensor) -> None:
        if not self.cache.has(key):
            bucket = piece.bucket
            grid = VideoGrid.of_pixels(bucket.width, bucket.height, bucket.frames, float(piece.fps), self.target.factors)
            self.cache.put_latents(key, Latents(values[None], grid))

    def put_mask(self, key: str, mask: Tensor) -> None:
        if not self.cache.has(key):
            self.cache.put(key, {"mask": mask})

    # -- sound --
    def sound_keys(self, piece: ClipPlan) -> dict[str, str]:
        """Cache keys of a clip's sound entries by role; nothing where the clip has no sound."""
        keys = {"audio": self.cache.audio_key(piece, self.audio_fingerprint)}
        if self.wants("reference_audio", piece):
            keys["reference_audio"] = self.cache.audio_key(piece, self.audio_fingerprint, "reference_audio")
        if self.wants("audio_mask", piece):
            keys["audio_mask"] = self.cache.mask_key(piece, "audio_mask", self.target.factors, self.steps(piece))
        return {role: key for role, key in keys.items() if key is not None}

    def steps(self, piece: ClipPlan) -> int:
        return self.target.audio_grid.of_seconds(piece.seconds).steps

    def encode_sounds(self, plans: Sequence[ClipPlan]) -> None:
        waiting = [p for p in self.share(plans) if p.id not in self.refused and not all(map(self.cache.has, self.sound_keys(p).values()))]
        with ThreadPoolExecutor(self.section.decoding_threads) as pool:
            for done, (piece, sounds) in enumerate(_ahead(pool, self.read_sounds, waiting), 1):
                self.report.check()
                if isinstance(sounds, Finding):
                    self.refused[piece.id] = sounds
                    continue
                for key, sound in sounds.items():
                    self.put_sound(key, piece, sound)
                    self.note(piece, sound.notes)
                if self.wants("audio_mask", piece):
                    self.put_audio_mask(piece)
                self.report.progress("encode audio", done, len(waiting), unit="clips", message=piece.id)

    def read_sounds(self, piece: ClipPlan):
        """The sounds of a clip that are still to encode, by key; a finding when one cannot be read."""
        from .data.media import read_reference_audio, read_sound_of

        readers = {"audio": read_sound_of, "reference_audio": read_reference_audio}
        try:
            wanted = {role: key for role, key in self.sound_keys(piece).items() if role in readers and not self.cache.has(key)}
            found = {key: readers[role](piece) for role, key in wanted.items()}
        except MediaError as error:
            return Finding(error.code, error.message)
        return {key: sound for key, sound in found.items() if sound is not None}

    def put_sound(self, key: str, piece: ClipPlan, sound) -> None:
        try:
            made = self.codec.encode_audio(sound.waveform[None], sound.sample_rate)
        except DataError as error:
            if error.code not in CODES:
                raise
            self.refused[piece.id] = Finding(error.code, error.message)  # such as nine frames of a slow-motion camera: too short to hear
            return
        latents = fit_steps(made, self.steps(piece))
        grid = self.target.audio_grid.of_seconds(piece.seconds)
        if self.finite_values(latents, piece):
            self.cache.put_latents(key, Latents(latents, grid))

    def put_audio_mask(self, piece: ClipPlan) -> None:
        from .data.media import read_audio_mask

        key = self.sound_keys(piece)["audio_mask"]
        if not self.cache.has(key):
            self.cache.put(key, {"mask": read_audio_mask(piece, self.steps(piece))})

    # -- the manifest --
    def manifest(self, planned: Report, texts: Sequence[str]) -> Manifest:
        """The list that training reads: every clip whose entries are all there, and every one left out with its reason."""
        entries, skipped = [], planned.skipped()
        for piece in planned.plans:
            finding = self.refused.get(piece.id)
            if finding is not None:
                skipped.append({"path": str(piece.sample.media or piece.id), "findings": [{"code": finding.code, "message": finding.message}]})
                continue
            entries.append(self.entry(piece))
        model = {"family": self.target.family, "video": self.video_fingerprint, "audio": self.audio_fingerprint, "text": self.text_fingerprint}
        grid = self.target.audio_grid if self.with_audio else None
        return Manifest(tuple(entries), model, tuple(skipped), {t: self.text_key(t) for t in texts}, grid)

    def entry(self, piece: ClipPlan) -> ManifestEntry:
        pictures = self.picture_keys(piece) if piece.bucket and self.with_video else {}
        sounds = {role: key for role, key in self.sound_keys(piece).items() if self.cache.has(key)} if self.with_audio else {}
        roles = {role: key for role, key in {**pictures, **sounds}.items() if role not in ("video", "audio")}
        return manifest_entry(
            piece, text=self.text_key(piece.sample.caption), video=pictures.get("video"), audio=sounds.get("audio"),
            audio_grid=self.target.audio_grid if self.with_audio else None, factors=self.target.factors, roles=roles,
        )  # fmt: skip


def _check_features(text: str, features: TextFeatures) -> None:
    if not all(bool(torch.isfinite(t).all()) for t in (features.video, features.audio) if t is not None):
        raise DataError(
            "text.values", f"The text encoder gave values that are no numbers for '{text[:40]}'.", "Its file may be damaged: try another copy, and acceleration.mixed_precision_mode bf16."
        )  # fmt: skip


def fit_steps(latents: Tensor, steps: int) -> Tensor:
    """Sound latents [B, C, T, bins] cut, or held at their last step, to ``steps``: the codec's rounding is off by one at most."""
    have = latents.shape[2]
    if have >= steps:
        return latents[:, :, :steps]
    return torch.cat([latents, latents[:, :, -1:].expand(-1, -1, steps - have, -1)], dim=2)


def _ahead(pool: ThreadPoolExecutor, work: Callable, items: Sequence, depth: int = 8) -> Iterator[tuple]:
    """(item, work(item)) in order, computed by the pool at most ``depth`` items ahead."""
    waiting = []
    for item in items:
        waiting.append((item, pool.submit(work, item)))
        if len(waiting) > depth:
            first, future = waiting.pop(0)
            yield first, future.result()
    for first, future in waiting:
        yield first, future.result()
