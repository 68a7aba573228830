"""Checkpoint: which files and prefixes hold which component of one model, and which file would supply what is missing."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from ..errors import CheckpointError
from ..geometry import AudioGrid, VideoFactors
from .checkpoint_family import check_one_family, family_of
from .checkpoint_parts import COMPONENTS, Part, by_rank, find_parts, folder_parts, open_files
from .families import Family, TransformerConfig, known_config, parse_config, transformer_config
from .safetensors_file import SafetensorsFile, checked_path
from .text_files import check_text_encoder, find_tokenizer, text_encoder_folder
from .weights import WeightSource


@dataclass(frozen=True)
class Component:
    """One part of a model: where its tensors are and what kind it is (kinds: see checkpoint_parts.Part)."""

    name: str
    source: WeightSource = field(repr=False)
    kind: str = ""

    @property
    def files(self) -> tuple[Path, ...]:
        return self.source.paths

    @cached_property
    def quantisation(self) -> dict[str, int]:
        """Quantisation format -> number of weights stored in it; {} for a plain component."""
        counts: dict[str, int] = {}
        for name in self.source.keys():
            kind = self.source.format(name)
            if kind is not None:
                counts[kind] = counts.get(kind, 0) + 1
        return counts


@dataclass(frozen=True)
class Checkpoint:
    """One model of a family, opened but not loaded.

    Component sources carry bare names: transformer without ``model.diffusion_model.``; connectors as
    ``video_embeddings_connector...``; text_projection as ``aggregate_embed...`` or ``video_aggregate_embed...``;
    video_vae and audio_vae as ``encoder. decoder. per_channel_statistics.``; vocoder without its first ``vocoder.``;
    text_encoder as stored. ``config`` has the sections of the metadata (transformer, vae, audio_vae, vocoder),
    each from the file that holds that component, or from the family's row when that file has none.
    """

    family: Family
    config: dict[str, Any] = field(repr=False)
    transformer: TransformerConfig | None
    components: dict[str, Component]
    metadata: dict[str, str] = field(repr=False)
    tokenizer_path: Path | None = None
    _fingerprints: dict[str, str] = field(default_factory=dict, repr=False, compare=False)

    @classmethod
    def open(
        cls,
        *paths: str | Path,
        text_encoder: str | Path | None = None,
        video_vae: str | Path | None = None,
        audio_vae: str | Path | None = None,
        tokenizer: str | Path | None = None,
    ) -> Checkpoint:
        """Open a unified file, or the files of a split pack, in any order; nothing is loaded.

        text_encoder: a file or a Hugging Face folder. video_vae, audio_vae: files that replace those of ``paths``.
        Raises CheckpointError for files that are missing, damaged, no LTX models, or of different families.
        """
        parts = _gather(paths, text_encoder=text_encoder, video_vae=video_vae, audio_vae=audio_vae)
        family = family_of(parts)
        check_one_family(family, parts)
        config = _config(family, parts)
        components = {p.component: Component(p.component, WeightSource.of_part(p.files, p.names), p.kind) for p in parts.values()}
        found = parts.get("transformer")
        transformer = transformer_config(family, _logical(components["transformer"], found.shapes), config["transformer"]) if found else None
        if found:
            _check_plain_basis(family, found, components["transformer"])
        if "text_encoder" in parts:
            try:
                check_text_encoder(family, parts, components)
            except CheckpointError as error:
                if found or not paths or text_encoder is None:
                    raise
                raise _no_transformer(paths[0], parts) from error  # the family was guessed from a VAE that was given as the model
        metadata = {k: v for p in reversed(by_rank(parts)) for f in p.files for k, v in f.metadata.items()}
        place = find_tokenizer(tokenizer, components.get("text_encoder"))
        return cls(family, config, transformer, components, metadata, place)

    def has(self, component: str) -> bool:
        assert component in COMPONENTS, component
        return component in self.components

    def source(self, component: str) -> WeightSource:
        """The tensors of a component. Raises CheckpointError naming the file that would supply it."""
        if not self.has(component):
            wanted = self.family.supplies.get(component)
            if component not in self.family.components:
                raise CheckpointError("checkpoint.no_component", f"{self.family.title} has no {component.replace('_', ' ')}.", "This family makes video only.")
            raise CheckpointError("checkpoint.missing_component", f"The {component.replace('_', ' ')} of {self.family.title} is missing.", f"Give {wanted}.")
        return self.components[component].source

    @property
    def missing(self) -> dict[str, str]:
        """Components of the family that no file supplies -> the file that would."""
        return {c: self.family.supplies[c] for c in self.family.components if c not in self.components}

    @property
    def files(self) -> tuple[Path, ...]:
        return tuple(dict.fromkeys(p for c in self.components.values() for p in c.files))

    @property
    def model_version(self) -> str | None:
        """``model_version`` as the file says it, such as 2.3.0; None for LTX-2 and LTX-Video."""
        return self.metadata.get("model_version")

    @property
    def distilled(self) -> bool:
        """Whether this is a distilled model: its config lists inference steps, or its file name says so."""
        if parse_config(self.metadata).get("allowed_inference_steps"):
            return True
        main = self.components.get("transformer")
        return any("distilled" in p.name.lower() for p in (main.files if main else ()))

    @property
    def video_factors(self) -> VideoFactors:
        """Pixels per latent cell (time, height, width), counted from the VAE's blocks."""
        time, space = vae_factors(self.config.get("vae") or {})
        return VideoFactors(time, space, space, self.transformer.causal_positions if self.transformer else True)

    @property
    def audio_grid(self) -> AudioGrid:
        """The layout of audio latents, with one step; the default layout for families without audio."""
        return audio_layout(self.config.get("audio_vae") or {})

    @cached_property
    def fingerprint(self) -> str:
        """16 hex digits of the transformer, or of all components when there is none."""
        if "transformer" in self.components:
            return self.fingerprint_of("transformer")
        return _digest(self.family.name, *(self.fingerprint_of(c) for c in COMPONENTS if c in self.components))

    def fingerprint_of(self, component: str) -> str:
        """16 hex digits of one component: names, shapes, config, sampled blocks of its tensors.

        The same for a unified file and a split pack of the same weights.
        """
        if component not in self._fingerprints:
            self._fingerprints[component] = self._fingerprint(component, self.source(component))
        return self._fingerprints[component]

    def _fingerprint(self, component: str, source: WeightSource) -> str:
        section = {"transformer": "transformer", "connectors": "transformer", "video_vae": "vae"}.get(component, component)
        extra = [json.dumps(self.config.get(section) or {}, sort_keys=True)]
        if component == "text_encoder" and self.tokenizer_path is not None:
            extra += _tokenizer_digests(self.tokenizer_path)
        return _digest(component, *extra, source.sampled_digest())


def _digest(*texts: str) -> str:
    return hashlib.sha256("\n".join(texts).encode()).hexdigest()[:16]


def _tokenizer_digests(place: Path) -> list[str]:
    files = sorted(p for p in (place.iterdir() if place.is_dir() else [place]) if p.name.startswith(("tokenizer", "spiece", "special_tokens")))
    return [hashlib.sha256(p.read_bytes()).hexdigest() for p in files if p.is_file()]


def _gather(paths: tuple[str | Path, ...], **given: str | Path | None) -> dict[str, Part]:
    """Component -> the part that supplies it; explicit files win over those of ``paths``."""
    if not paths and not any(given.values()):
        raise CheckpointError("checkpoint.missing_file", "No model file was given.", "Give the LTX checkpoint (.safetensors).")
    parts: dict[str, Part] = {}
    for path in paths:
        place = checked_path(path)
        explicit = {role for role, other in given.items() if other is not None}
        found = folder_parts(place, explicit) if place.is_dir() else find_parts([SafetensorsFile.open(place)])
        for part in found:
            other = parts.get(part.component)
            if other is not None:
                names = f"{other.files[0].path.name} and {part.files[0].path.name}"
                raise CheckpointError("checkpoint.duplicate", f"Two files hold the {part.component.replace('_', ' ')}: {names[:60]}.", f"{names}: give one of them.")
            parts[part.component] = part
    if set(parts) == {"text_encoder"} and not any(given.values()):
        raise _is_text_encoder(parts["text_encoder"])
    for role, path in given.items():
        if path is None:
            continue
        files = open_files(text_encoder_folder(path)) if role == "text_encoder" else [SafetensorsFile.open(path)]
        parts.update(_role_parts(role, find_parts(files)))
    if not (set(parts) - {"text_encoder", "text_projection"}) and "text_encoder" in parts and paths:
        raise _is_text_encoder(parts["text_encoder"])
    return parts


def _no_transformer(path: str | Path, parts: Mapping[str, Part]) -> CheckpointError:
    held = ", ".join(c.replace("_", " ") for c, p in parts.items() if any(f.path == Path(path).expanduser() for f in p.files))
    hint = f"It holds: {held}. Give the unified checkpoint or the transformer file as the model." if held else "Give the unified checkpoint or the transformer file as the model."
    return CheckpointError("checkpoint.no_transformer", f"{Path(path).name} is no LTX model: it holds no transformer.", hint)


def _is_text_encoder(part: Part) -> CheckpointError:
    return CheckpointError(
        "checkpoint.is_text_encoder", f"{part.files[0].path.name} is a text encoder, not an LTX model.", "Give it as the text encoder, and the LTX checkpoint as the model."
    )


def _role_parts(role: str, found: list[Part]) -> dict[str, Part]:
    """The parts a file given for a role supplies; refuses a file that does not hold that role."""
    mine = {p.component: p for p in found}
    if role not in mine:
        name = found[0].files[0].path.name
        what = ", ".join(c.replace("_", " ") for c in mine)
        code = "checkpoint.is_model" if role == "text_encoder" and "transformer" in mine else "checkpoint.wrong_file"
        raise CheckpointError(code, f"{name} holds no {role.replace('_', ' ')}.", f"It holds: {what}. Give the file of the {role.replace('_', ' ')}.")
    along = {"text_encoder": ("text_encoder", "text_projection"), "audio_vae": ("audio_vae", "vocoder")}.get(role, (role,))
    return {c: mine[c] for c in along if c in mine}


def _check_plain_basis(family: Family, part: Part, component: Component) -> None:
    """Refuse LTX-Video fp8 files that declare nothing: the vendor's are made for q8_kernels, in a rotated basis."""
    store = component.source.store
    if family.audio or store.declared or any(n.endswith(("scaled_fp8", ".comfy_quant")) for n in store.where):
        return
    if any("float8" in str(store.info(s).dtype) for s in part.names.values()):
        raise CheckpointError(
            "checkpoint.quant_format", f"{part.files[0].path.name}: an LTX-Video fp8 file made for q8_kernels cannot be read exactly.",
            f"Get the bf16 file: {family.supplies['transformer']}.",
        )  # fmt: skip


def _config(family: Family, parts: Mapping[str, Part]) -> dict[str, Any]:
    """Config sections, each from the file that holds its component, else from the family's known config."""
    kind = parts["video_vae"].kind if "video_vae" in parts else ""
    known = known_config(f"ltxv-2b-{kind}") if family.name == "ltxv-2b" and kind in ("0.9.0", "0.9.1") else family.config
    diffusion = known.pop("vae_diffusion", None)
    if kind == "diffusion" and diffusion is not None:
        known["vae"] = diffusion
    merged = dict(known)
    for component, section in (("transformer", "transformer"), ("connectors", "transformer"), ("video_vae", "vae"), ("audio_vae", "audio_vae"), ("vocoder", "vocoder")):
        if component not in parts or (component == "connectors" and "transformer" in parts):
            continue
        said = next((c[section] for f in parts[component].files if isinstance((c := parse_config(f.metadata)).get(section), dict)), None)
        if said is not None:
            merged[section] = said
    return merged


def _logical(component: Component, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
    """Stored shapes with the few that :func:`transformer_config` reads made logical (nvfp4 packs two values in a byte)."""
    wanted = [n for n in shapes if n in component.source and n.startswith("transformer_blocks.0.") and n.endswith("weight")]
    return {**shapes, **{n: component.source.info(n).shape for n in wanted}}


def vae_factors(config: Mapping[str, Any]) -> tuple[int, int]:
    """(time, space) factors of a ``config.vae``: compress_* blocks of the encoder, times the patch size.

    Flat (encoder_blocks, or blocks in 0.9.0) or nested (encoder.blocks, 2.5) configs; (8, 32) when it lists no blocks.
    """
    nested = config.get("encoder") if isinstance(config.get("encoder"), Mapping) else {}
    blocks = nested.get("blocks") or config.get("encoder_blocks") or config.get("blocks")
    if not blocks:
        return 8, 32
    if not isinstance(blocks, list) or not all(isinstance(b, list | tuple) and b for b in blocks):
        raise CheckpointError("checkpoint.config", "The config in the file's metadata lists no readable VAE blocks.", "The file was repacked badly: get the vendor's file.")
    names = [str(b[0]) for b in blocks]
    both = sum(n.startswith("compress_all") for n in names)
    time = 2 ** (both + sum(n.startswith("compress_time") for n in names))
    space = 2 ** (both + sum(n.startswith("compress_space") for n in names))
    return time, space * int(nested.get("patch_size") or config.get("patch_size") or 4)


def audio_layout(config: Mapping[str, Any]) -> AudioGrid:
    """Audio latents of a ``config.audio_vae``: channels, bins, and how many mel frames one step covers."""
    params = (config.get("model") or {}).get("params") or {}
    dd = params.get("ddconfig") or {}
    pre = config.get("preprocessing") or {}
    if not dd:
        return AudioGrid(1)
    factor = 2 ** (len(dd.get("ch_mult", (1, 2, 4))) - 1)
    mels = int((pre.get("mel") or {}).get("n_mel_channels") or dd.get("mel_bins") or 64)
    hop = int((pre.get("stft") or {}).get("hop_length") or 160)
    return AudioGrid(1, int(dd.get("z_channels", 8)), mels // factor, factor, hop, int(params.get("sampling_rate", 16000)))
