"""Key layouts of LoRA files: the names that each tool gives one module's tensors, read and written."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

_ATTENTION = ("to_q", "to_k", "to_v", "to_out.0", "to_gate_logits")
_BLOCK = tuple(
    f"{part}.{leaf}" for part in ("attn1", "attn2", "audio_attn1", "audio_attn2", "audio_to_video_attn", "video_to_audio_attn") for leaf in _ATTENTION
) + tuple(f"{part}.{leaf}" for part in ("ff", "audio_ff") for leaf in ("net.0.proj", "net.2"))
_ADALN = tuple(f"{p}.{leaf}" for p in (
    "adaln_single", "audio_adaln_single", "prompt_adaln_single", "audio_prompt_adaln_single", "av_ca_video_scale_shift_adaln_single",
    "av_ca_audio_scale_shift_adaln_single", "av_ca_a2v_gate_adaln_single", "av_ca_v2a_gate_adaln_single",
) for leaf in ("emb.timestep_embedder.linear_1", "emb.timestep_embedder.linear_2", "linear"))  # fmt: skip
_ROOT = _ADALN + tuple(
    prefix + name for prefix in ("", "audio_") for name in ("patchify_proj", "proj_out", "caption_projection.linear_1", "caption_projection.linear_2")
)
_CONNECTOR = tuple(f"attn1.{leaf}" for leaf in _ATTENTION) + ("ff.net.0.proj", "ff.net.2")

# Diffusers' names of modules that are named otherwise in the checkpoint (dependencies_and_parity.md 3.4).
_DIFFUSERS = {
    "proj_in": "patchify_proj", "audio_proj_in": "audio_patchify_proj", "time_embed": "adaln_single", "audio_time_embed": "audio_adaln_single",
    "prompt_adaln": "prompt_adaln_single", "audio_prompt_adaln": "audio_prompt_adaln_single",
    "av_cross_attn_video_scale_shift": "av_ca_video_scale_shift_adaln_single", "av_cross_attn_audio_scale_shift": "av_ca_audio_scale_shift_adaln_single",
    "av_cross_attn_video_a2v_gate": "av_ca_a2v_gate_adaln_single", "av_cross_attn_audio_v2a_gate": "av_ca_v2a_gate_adaln_single",
}  # fmt: skip
_TO_DIFFUSERS = {ours: theirs for theirs, ours in _DIFFUSERS.items()}

_ADAPTER = r"(?:\.[A-Za-z0-9_-]+)?"  # peft's adapter name, such as .default
_PARTS: tuple[tuple[re.Pattern[str], str], ...] = tuple(
    (re.compile(pattern + r"$"), part)
    for pattern, part in (
        (rf"\.lora_A{_ADAPTER}\.weight", "lora_A"), (rf"\.lora_B{_ADAPTER}\.weight", "lora_B"), (r"\.lora_A", "lora_A"), (r"\.lora_B", "lora_B"),
        (r"[._]lora(?:_linear_layer)?\.down\.weight", "lora_A"), (r"[._]lora(?:_linear_layer)?\.up\.weight", "lora_B"),
        (r"\.lora_down\.weight", "lora_A"), (r"\.lora_up\.weight", "lora_B"), (r"\.alpha", "alpha"), (r"\.dora_scale", "dora_scale"),
        (rf"\.lora_magnitude_vector{_ADAPTER}(?:\.weight)?", "dora_scale"),
        *((rf"\.hada_{p}{_ADAPTER}", f"hada_{p}") for p in ("w1_a", "w1_b", "w2_a", "w2_b")),
        *((rf"\.lokr_{p}{_ADAPTER}", f"lokr_{p}") for p in ("w1_a", "w1_b", "w2_a", "w2_b", "w1", "w2")),
        (r"\.diff_b", "diff_b"), (r"\.diff", "diff"),
    )
)  # fmt: skip

_UNDERSCORED = re.compile(r"^(lora_unet_|lora_transformer_|lycoris_)(.+)$")
_PREFIXES = (
    ("base_model.model.diffusion_model.", "peft"), ("base_model.model.transformer.", "peft"), ("base_model.model.", "peft"),
    ("model.diffusion_model.", "checkpoint"), ("diffusion_model.", "comfyui"), ("transformer.", "diffusers"), ("unet.", "diffusers"),
)  # fmt: skip

LAYOUTS = ("comfyui", "diffusers", "peft", "kohya", "plain")
"""Layouts that can be written; all of them, ``checkpoint`` and mixtures can be read."""


@dataclass(frozen=True)
class Key:
    """One key of a LoRA file: the module in checkpoint names, the canonical part, the layout it was written in."""

    module: str
    part: str
    layout: str


class Names:
    """Turns other tools' module names into the checkpoint's. ``known`` (names of a loaded model) settles every doubt."""

    def __init__(self, known: Iterable[str] = ()) -> None:
        self.known = set(known)
        self.flat = {name.replace(".", "_"): name for name in self.known}

    def parse(self, key: str) -> Key | None:
        """What a key is, or None when it belongs to no module of the transformer (text encoder, unknown tool)."""
        for pattern, part in _PARTS:
            match = pattern.search(key)
            if match:
                found = self._module(key[: match.start()])
                return None if found is None else Key(found[0], part, found[1])
        return None

    def _module(self, stem: str) -> tuple[str, str] | None:
        match = _UNDERSCORED.match(stem)
        if match:
            name = self._unflatten(match[2])
            return None if name is None else (name, "kohya")
        for prefix, layout in _PREFIXES:
            if stem.startswith(prefix):
                return self._checkpoint_name(stem[len(prefix) :]), layout
        return (self._checkpoint_name(stem), "plain") if not stem.startswith(("lora_te", "text_encoder", "te1", "te2")) else None

    def _checkpoint_name(self, name: str) -> str:
        if name in self.known:
            return name
        head, dot, rest = name.partition(".")
        return _DIFFUSERS[head] + dot + rest if head in _DIFFUSERS else name

    def _unflatten(self, flat: str) -> str | None:
        """``transformer_blocks_0_attn1_to_out_0`` -> ``transformer_blocks.0.attn1.to_out.0``: by the model's names, else by LTX's grammar."""
        if flat in self.flat:
            return self.flat[flat]
        block = re.match(r"^transformer_blocks_(\d+)_(.+)$", flat)
        if block and block[2] in _FLAT_BLOCK:
            return f"transformer_blocks.{block[1]}.{_FLAT_BLOCK[block[2]]}"
        connector = re.match(r"^((?:video|audio)_embeddings_connector)_transformer_1d_blocks_(\d+)_(.+)$", flat)
        if connector and connector[3] in _FLAT_CONNECTOR:
            return f"{connector[1]}.transformer_1d_blocks.{connector[2]}.{_FLAT_CONNECTOR[connector[3]]}"
        head = next((theirs for theirs in _DIFFUSERS if flat == theirs or flat.startswith(theirs + "_")), None)
        if head is not None and (flat.replace(head, _DIFFUSERS[head], 1)) in _FLAT_ROOT:
            return _FLAT_ROOT[flat.replace(head, _DIFFUSERS[head], 1)]
        return _FLAT_ROOT.get(flat)


def _flat(names: Iterable[str]) -> Mapping[str, str]:
    return {name.replace(".", "_"): name for name in names}


_FLAT_BLOCK, _FLAT_CONNECTOR, _FLAT_ROOT = _flat(_BLOCK), _flat(_CONNECTOR), _flat(_ROOT)

_WRITTEN_PARTS: dict[str, dict[str, str]] = {
    "kohya": {"lora_A": "lora_down.weight", "lora_B": "lora_up.weight"},
    "peft": {"lora_A": "lora_A.weight", "lora_B": "lora_B.weight", "dora_scale": "lora_magnitude_vector"},
    "": {"lora_A": "lora_A.weight", "lora_B": "lora_B.weight"},
}


def written_key(module: str, part: str, layout: str = "comfyui") -> str:
    """The key of one tensor in a layout that is written: comfyui, diffusers, peft, kohya or plain."""
    assert layout in LAYOUTS, layout
    suffix = _WRITTEN_PARTS.get(layout, _WRITTEN_PARTS[""]).get(part, part)
    if layout == "kohya":
        return f"lora_unet_{module.replace('.', '_')}.{suffix}"
    if layout == "diffusers":
        head, dot, rest = module.partition(".")
        module = _TO_DIFFUSERS.get(head, head) + dot + rest
    prefix = {"comfyui": "diffusion_model.", "diffusers": "transformer.", "peft": "base_model.model.", "plain": ""}[layout]
    return f"{prefix}{module}.{suffix}"
