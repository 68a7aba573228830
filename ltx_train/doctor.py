"""The doctor: proves on this machine that a model's files belong together and work, or says what is wrong."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .contexts import ContextStore
from .data.dataset import DataSection
from .data.items import Item
from .doctor_probes import (
    MOST,
    Probes,
    Trial,
    by_block,
    clip_probes,
    drawn_probes,
    mean_and_error,
    mean_of,
    odd_ones,
    open_cache,
    psnr,
    scan,
    snr,
    wiener_loss,
)
from .doctor_report import Check, Diagnosis
from .errors import LtxTrainError
from .geometry import Latents, VideoGrid
from .models.checkpoint import Checkpoint
from .models.codec import EngineCodec
from .text import TextFeatures

if TYPE_CHECKING:
    from .models.transformer import LTXTransformer

LEVELS = (0.1, 0.3, 0.5, 0.7)
"""Noise levels whose loss shows whether latents are what the model knows: enough signal is left in them."""
TEXT_LEVELS = (0.5, 0.7, 0.9)
"""Noise levels at which the caption helps."""
LEAST_PSNR, LEAST_SNR = 20.0, 3.0
"""dB that a round trip keeps at least: of pictures; of the log mel of sounds (through the audio VAE alone)."""
MOST_LOSS = 0.85
"""Share of the loss of a predictor that knows mean and variance alone, which the base model must stay below."""
LEAST_CLIPS = 4
"""Fewer clips say nothing about captions; so many sounds are sent through the vocoder."""
_STATISTICS = ("per_channel_statistics.mean-of-means", "per_channel_statistics.std-of-means")


class Doctor:
    """Examines one model, one network in memory at a time.

    load: gives the transformer (on the device, as acceleration says). dataset: the user's clips, or a cache of theirs.
    say: called with each check as it is done. preview: makes a sample with the loaded transformer and returns its file.
    """

    def __init__(
        self, checkpoint: Checkpoint, codec: EngineCodec, load: Callable[[], LTXTransformer], *, dtype: torch.dtype, dataset: DataSection | Path | None = None,
        say: Callable[[Check], None] = lambda check: None, preview: Callable[[LTXTransformer, str, TextFeatures], Path] | None = None,
    ) -> None:  # fmt: skip
        self.checkpoint, self.codec, self.load, self.dtype, self.dataset, self.say, self.preview = checkpoint, codec, load, dtype, dataset, say, preview
        self.found = Diagnosis(f"{checkpoint.family.title}{f', version {checkpoint.model_version}' if checkpoint.model_version else ''}")
        self.features: dict[str, TextFeatures] = {}
        self.items: list[Item] = []

    def run(self) -> Diagnosis:
        """Every check that the files allow, in the order in which faults explain each other."""
        self.whole()
        for component in self.checkpoint.family.components:
            if component == "transformer" and not self.checkpoint.has(component):
                continue  # told above
            with self.guarded(f"files: {component.replace('_', ' ')}", "files.unreadable"):
                self.weights(component)
        probes, cached = self.probes()
        if probes is not None:
            with self.guarded("text encoder", "text_encoder.failed"):
                self.text(probes.captions)
            with self.guarded("video VAE", "video_vae.failed"):
                self.pictures(probes)
            if self.checkpoint.family.audio:
                with self.guarded("audio VAE", "audio_vae.failed"):
                    self.sounds(probes)
        if cached:
            self.items = cached
        self.codec.release()
        if self.items and all(i.text in self.features for i in self.items):
            with self.guarded("base model", "base.failed"), torch.no_grad():
                self.base()
        else:
            self.add(Check("base model", "skipped", "Without latents and captions the base model cannot be tried."))
        return self.found

    def add(self, check: Check) -> None:
        self.found.checks.append(check)
        self.say(check)

    @contextmanager
    def guarded(self, name: str, code: str) -> Iterator[None]:
        """A check that breaks off is a finding, not the end of the examination."""
        try:
            yield
        except (LtxTrainError, RuntimeError, ValueError, OSError, KeyError, MemoryError) as error:
            missing = isinstance(error, LtxTrainError) and error.code in ("checkpoint.missing_component", "package.missing")
            said = error.message if isinstance(error, LtxTrainError) else f"{type(error).__name__}: {error}".splitlines()[0]
            hint = error.hint if isinstance(error, LtxTrainError) else str(error)
            self.add(Check(name, "skipped" if missing else "fail", said, "" if missing else code, hint))

    def failed(self, *codes: str) -> bool:
        return any(c.code.startswith(codes) for c in self.found.problems)

    # -- files --
    def whole(self) -> None:
        """Without a transformer the files are no model, whatever else is sound in them."""
        if self.checkpoint.has("transformer"):
            return
        held = ", ".join(name.replace("_", " ") for name in self.checkpoint.components)
        hint = f"They hold: {held}. Give the model too, such as {self.checkpoint.family.supplies['transformer']}."
        self.add(Check("files: transformer", "fail", "No transformer is among the files: they are no model.", "files.no_transformer", hint))

    def weights(self, component: str) -> None:
        """Every tensor read once: finite, not zero, of a size like its sisters in other blocks."""
        name = f"files: {component.replace('_', ' ')}"
        stored = list(scan(self.checkpoint.source(component)))
        broken = [s.name for s in stored if not s.largest < float("inf")]
        zero = [s.name for s in stored if s.matrix and s.largest == 0]
        blocks = [b for b, parts in by_block(stored).items() if all(p.largest == 0 for p in parts)]
        odd = odd_ones(stored)
        numbers = {"tensors": len(stored), "not_finite": broken[:8], "zero": zero[:8], "odd": odd[:8]}
        again = "The file is damaged: download it again, or convert it again from the original."
        if broken:
            self.add(Check(name, "fail", f"{len(broken)} tensors hold NaN or infinity, such as {broken[0]}.", "files.not_finite", again, numbers))
        elif blocks:
            self.add(Check(name, "fail", f"{blocks[0]} holds zeros only{f', and {len(blocks) - 1} more blocks' if len(blocks) > 1 else ''}.", "files.zero_block", again, numbers))
        elif odd:
            self.add(Check(name, "fail", f"{odd[0]} is unlike the same tensor in other blocks.", "files.odd_tensor", again, numbers))
        elif zero:
            self.add(Check(name, "warning", f"{len(zero)} matrices hold zeros only, such as {zero[0]}.", "files.zero", "Fine where the vendor's file has them so.", numbers))
        else:
            self.add(Check(name, "pass", f"{len(stored)} tensors, all finite.", numbers=numbers))

    # -- probes --
    def probes(self) -> tuple[Probes | None, list[Item]]:
        """Clips to look at, and the items of a cache where one was given (its texts are then known already)."""
        cached: list[Item] = []
        section = self.dataset
        try:
            if isinstance(section, Path):
                dataset = open_cache(section, self.checkpoint)
                if dataset is not None:
                    section = None
                    cached = [dataset.item(i) for i in range(min(len(dataset), 4 * MOST))]
                    usual = statistics.mode([_shape(i) for i in cached])
                    cached = [i for i in cached if _shape(i) == usual][:MOST]
                    self.features.update({i.text: dataset.features(i.text) for i in cached})
                else:
                    section = DataSection(dataset=str(section))
            probes = clip_probes(section, self.checkpoint) if section is not None else drawn_probes(self.checkpoint)
        except LtxTrainError as error:
            self.add(Check("dataset", "fail", error.message, "dataset.unusable", error.hint))
            return drawn_probes(self.checkpoint), []
        source = "drawn clips" if probes.drawn else "clips of the dataset"
        self.add(Check("dataset", "pass", f"{len(probes.captions)} {source}" + (f", and {len(cached)} of the cache." if cached else ".")))
        return probes, cached

    # -- text --
    def text(self, captions: Sequence[str]) -> None:
        """Features of the captions: finite, of a sane size, and different for different captions."""
        distinct = list(dict.fromkeys(captions))
        found = dict(zip(distinct, self.codec.encode_text(distinct)))
        self.codec.release()
        self.features.update(found)
        means = torch.stack([f.video.float().mean(0) for f in found.values()])
        size = float(torch.cat([f.video.float() for f in found.values()]).square().mean().sqrt())
        alike = torch.nn.functional.cosine_similarity(means[:, None], means[None], dim=-1)
        apart = float((1 - alike)[~torch.eye(len(means), dtype=torch.bool)].mean()) if len(means) > 1 else None
        numbers = {"captions": len(distinct), "rms": size, "mean_distance": apart, "tokens": [len(f.video) for f in found.values()]}
        if not size < float("inf"):
            self.add(Check("text encoder", "fail", "The text features are not finite.", "text_encoder.not_finite", "The text encoder's file is damaged.", numbers))
        elif size == 0 or (apart is not None and apart < 1e-6):
            self.add(Check("text encoder", "fail", "Every caption gives the same features.", "text_encoder.deaf", "The text encoder's file or tokenizer is damaged.", numbers))
        else:
            self.add(Check("text encoder", "pass", f"features of rms {size:.2f}" + ("" if apart is None else f", captions {apart:.3f} apart (1 - cosine)"), numbers=numbers))

    # -- codecs --
    def pictures(self, probes: Probes) -> None:
        """Round trip of the clips through the video VAE, and the size of its latents."""
        encoded = torch.cat([self.codec.encode_video(clip[None]) for clip in probes.frames])
        decoded = torch.cat([self.codec.decode_video(latent[None]).cpu() for latent in encoded[:MOST]])
        quality, spread = psnr(decoded, probes.frames), float(encoded.std())
        mean, std = (self.checkpoint.source("video_vae").get(n, dtype=torch.float32) for n in _STATISTICS)
        blank = bool((mean == 0).all()) and bool((std == 1).all())
        numbers = {"psnr": quality, "latent_mean": float(encoded.mean()), "latent_std": spread, "channel_std": _channels(encoded)}
        size = f"{quality:.1f} dB, latents of spread {spread:.2f}"
        if blank:
            why = "The file's statistics are mean 0 and deviation 1 for every channel: they were lost in a conversion. Use the original file."
            self.add(Check("video VAE", "fail", "The video VAE does not normalise its latents.", "latents.unnormalised", why, numbers))
        elif not quality >= LEAST_PSNR:
            why = "A sound VAE gives 25 dB and more. The file is damaged, or is the VAE of another model."
            self.add(Check("video VAE", "fail", f"The video VAE does not give pictures back: {size}.", "video_vae.round_trip", why, numbers))
        else:
            self.add(Check("video VAE", "pass", f"round trip {size}", numbers=numbers))
        grid = VideoGrid.of_pixels(probes.frames.shape[3], probes.frames.shape[2], probes.frames.shape[1], probes.fps, self.checkpoint.video_factors)
        self.items = [Item(str(i), caption, Latents(encoded[i : i + 1], grid), None) for i, caption in enumerate(probes.captions)]

    def sounds(self, probes: Probes) -> None:
        """Round trip of the sounds: the log mel through the audio VAE, the wave through VAE and vocoder (which need not keep phases)."""
        from .models.audio_codec import AudioCodec
        from .models.mel import log_mel, resample

        known = [(i, w) for i, w in enumerate(probes.sounds) if w is not None and w.shape[-1] > 0]
        if not known:
            self.add(Check("audio VAE", "skipped", "No clip has sound."))
            return
        self.codec.release()
        codec, grid = AudioCodec.load(self.checkpoint, device=self.codec.device), self.checkpoint.audio_grid
        mels, waves, latents = [], [], []
        for number, (index, wave) in enumerate(known):
            encoded = codec.encode(wave[None], probes.rate)
            latents.append(encoded.float().cpu())
            if index < len(self.items):
                self.items[index] = replace(self.items[index], audio=Latents(latents[-1], replace(grid, steps=encoded.shape[2])))
            if number >= LEAST_CLIPS:
                continue  # enough for a median
            heard, rate = codec.decode(encoded)
            own = resample(wave[None].float(), probes.rate, grid.sample_rate)
            mel, decoded = log_mel(own, codec.mel).cpu(), codec.decode_mel(encoded).float().cpu()
            length = min(mel.shape[2], decoded.shape[2])
            floor = mel.amin()
            mels.append(snr(mel[:, :, :length] - floor, decoded[:, :, :length] - floor))
            back = resample(heard.float().cpu(), rate, grid.sample_rate)
            length = min(back.shape[2], own.shape[2])
            waves.append(snr(own[:, :, :length], back[:, :, :length]))
        quality, spread = statistics.median(mels), float(torch.cat([x.flatten() for x in latents]).std())
        numbers = {"mel_snr": quality, "wave_snr": statistics.median(waves), "latent_std": spread}
        if not quality >= LEAST_SNR:
            why = "The file is damaged, or is the audio VAE of another model."
            self.add(Check("audio VAE", "fail", f"The audio VAE does not give sounds back: {quality:.1f} dB of the log mel.", "audio_vae.round_trip", why, numbers))
        else:
            self.add(Check("audio VAE", "pass", f"round trip {quality:.1f} dB of the log mel, latents of spread {spread:.2f}", numbers=numbers))

    # -- base model --
    def base(self) -> None:
        """Connectors, the base model's loss by noise level, whether captions help it, and a preview."""
        sound = self.checkpoint.family.audio and all(i.audio is not None for i in self.items)
        if not sound:
            self.items = [replace(i, audio=None) for i in self.items]
        contexts = ContextStore(self.checkpoint, self.features.__getitem__, video=True, audio=self.checkpoint.family.audio, device=self.codec.device, dtype=self.dtype)
        contexts.prepare(self.features)
        self.connectors(contexts)
        transformer = self.load().eval()
        trial = Trial(transformer, contexts, self.items, sound, self.codec.device)
        self.losses(trial)
        self.captions(trial)
        if self.preview is not None:
            with self.guarded("preview", "preview.failed"):
                text = self.items[0].text
                self.found.preview = self.preview(transformer, text, self.features[text])
                self.add(Check("preview", "pass", f"step 0: {self.found.preview.name}"))

    def connectors(self, contexts: ContextStore) -> None:
        sizes = [float(t.float().square().mean().sqrt()) for t in _tensors(contexts, list(self.features))]
        numbers = {"rms": sizes}
        if not all(0 < s < float("inf") for s in sizes):
            self.add(Check("connectors", "fail", "The text contexts are not finite, or all zero.", "connectors.broken", "The connectors' weights are damaged.", numbers))
        else:
            self.add(Check("connectors", "pass", "contexts of rms " + ", ".join(f"{s:.2f}" for s in sizes), numbers=numbers))

    def losses(self, trial: Trial) -> None:
        """The loss by noise level against that of a predictor that knows nothing but mean and variance."""
        for stream in trial.streams:
            latents = [getattr(i, stream) for i in self.items]
            table = {s: (mean_of(trial.loss(s)[stream]), wiener_loss(latents, s)) for s in (*LEVELS, 0.9)}
            share = mean_of([own / least for s, (own, least) in table.items() if s in LEVELS])
            numbers = {"loss": {str(s): own for s, (own, _) in table.items()}, "knows_nothing": {str(s): w for s, (_, w) in table.items()}, "share": share}
            line = ", ".join(f"{s:g}: {own:.2f} ({own / least:.0%})" for s, (own, least) in table.items())
            name = f"base loss, {stream}"
            if share <= MOST_LOSS:
                self.add(Check(name, "pass", f"by noise level {line}", numbers=numbers))
            else:
                self.add(self.blame(trial, stream, name, share, numbers))

    def blame(self, trial: Trial, stream: str, name: str, share: float, numbers: dict[str, Any]) -> Check:
        """Why the base model does not know these latents: earlier findings, missing normalisation, or another VAE."""
        said = f"The base model does not know these {stream} latents: {share:.0%} of the loss of a predictor that knows nothing."
        if self.failed("files."):
            return Check(name, "fail", said, "base.damaged", "See the damaged files above.", numbers)
        if self.failed("latents.", f"{stream}_vae."):
            return Check(name, "warning", said, "", f"See the {stream} VAE above.", numbers)
        if stream == "video":
            better = self.normalised_share(trial)
            numbers["share_normalised"] = better
            if better <= MOST_LOSS and better < 0.7 * share:
                why = f"Normalised with the VAE's statistics they fit ({better:.0%}): whatever encoded them left that out. Encode the dataset again."
                return Check(name, "fail", "The latents are not normalised.", "latents.unnormalised", why, numbers)
        why = f"The {stream} VAE is another model's than the transformer, or the latents were made by another VAE."
        return Check(name, "fail", said[:118], f"{stream}_vae.other", why, numbers)

    def normalised_share(self, trial: Trial) -> float:
        """The share that the base model reaches when the latents are taken for raw ones and normalised."""
        mean, std = (self.checkpoint.source("video_vae").get(n, dtype=torch.float32).view(1, -1, 1, 1, 1) for n in _STATISTICS)
        items = [replace(i, video=Latents((i.video.values - mean) / std, i.video.grid)) for i in self.items]
        other = replace(trial, items=items, known={})
        return mean_of([mean_of(other.loss(s)["video"]) / wiener_loss([i.video for i in items], s) for s in LEVELS])

    def captions(self, trial: Trial) -> None:
        """Whether a clip's own caption helps more than another's, at the same noise: a foreign text encoder's does not."""
        texts = [i.text for i in self.items]
        others = [next((t for t in texts[n + 1 :] + texts[:n] if t != texts[n]), None) for n in range(len(texts))]
        if self.failed("files.", "latents.", "video_vae.", "base."):
            self.add(Check("captions", "skipped", "Not judged: what is wrong above changes it too."))
            return
        if len(texts) < LEAST_CLIPS or None in others:
            self.add(Check("captions", "skipped", f"Needs {LEAST_CLIPS} clips or more with different captions."))
            return
        gains: list[float] = []
        own = {s: trial.loss(s) for s in TEXT_LEVELS}
        foreign = {s: trial.loss(s, others) for s in TEXT_LEVELS}
        for n in range(len(texts)):
            gains.append(mean_of([foreign[s][m][n] / own[s][m][n] - 1 for s in TEXT_LEVELS for m in trial.streams]))
        mean, error = mean_and_error(gains)
        numbers = {"gain": mean, "error": error, "clips": len(texts)}
        line = f"another clip's caption raises the loss by {mean:.1%} (+- {error:.1%})"
        if mean > 2 * error:
            self.add(Check("captions", "pass", line, numbers=numbers))
            return
        why = f"{line}. The text encoder is not the one the model was trained with, or the captions do not describe the clips."
        self.add(Check("captions", "fail", "The captions do not help the base model.", "text_encoder.other", why, numbers))


def _tensors(contexts: ContextStore, texts: list[str]) -> list[Tensor]:
    found = [contexts.batch([t]) for t in texts]
    return [torch.cat(parts) for name in ("video", "audio") if (parts := [getattr(c, name)[0] for c in found if getattr(c, name) is not None])]


def _shape(item: Item) -> tuple:
    return tuple(getattr(getattr(item, m), "grid", None) for m in ("video", "audio"))


def _channels(latents: Tensor) -> dict[str, float]:
    """Least, median and largest deviation over the channels of [N, C, F, H, W]."""
    deviation = latents.transpose(0, 1).flatten(1).std(1)
    return {"least": float(deviation.min()), "median": float(deviation.median()), "largest": float(deviation.max())}
