"""Model files of full size in random weights, and encoded clips for them: what a real run of real size needs, without a download."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from ..memory.pinned import HostMemory, Through
from ..models.families import FAMILIES, Family
from ..models.transformer import keeps_float32
from ..tensorfile import Lazy, write_tensors
from ..tiny.checkpoints import GEMMA_VERSION, write_tiny
from ..tiny.shapes import audio_vae_shapes, connector_shapes, projection_shapes, video_vae_shapes, vocoder_shapes
from ..tiny.text_encoders import GEMMA3, write_gemma3
from ..tiny.transformer_shapes import transformer_shapes
from ..tiny.values import spectrogram_tables
from .networks import DEVIATION

PREFIX = "model.diffusion_model."
GEMMA_WIDTH, GEMMA_LAYERS = 3840, 48
"""Of the published Gemma 3 12B: what the text projection's size hangs on. The rest of the encoder is kept small here."""
CLIPS = 2
Tensors = dict[str, Tensor | Lazy]


def write_random(path: Path, family: str, device: torch.device, config: Mapping[str, object] | None = None) -> Path:
    """A transformer file of the family's full size (or of ``config``) in random bfloat16, written tensor by tensor; one that is there stays."""
    row = FAMILIES[family]
    config = config or row.config["transformer"]
    return _write(path, _transformer(row, config, device), {"config": json.dumps({"transformer": config})}, device)


def write_full(folder: Path, family: str, device: torch.device) -> dict[str, Path]:
    """Everything a run of an audio-video family needs, as the config's ``model`` fields: transformer, connectors, VAEs and vocoder
    of the published sizes, and for the Gemma 3 families a text encoder as wide and deep as the published one, but thin. Files that are there stay."""
    row = FAMILIES[family]
    config = row.config
    folder.mkdir(parents=True, exist_ok=True)
    core: Tensors = _transformer(row, config["transformer"], device) | _drawn(connector_shapes(config["transformer"]), device, prefix=PREFIX)
    vae = _drawn(video_vae_shapes(config["vae"]), device)
    sound = _drawn(audio_vae_shapes(config["audio_vae"]), device, prefix="audio_vae.") | _vocoder(config["vocoder"], device)
    version = {"model_version": row.name.removeprefix("ltx") + ".0"} if row.feature_kind == "v2" else {}
    if row.text == "gemma4":
        said = version | {"gemma_source_checkpoint": json.dumps({"ltx_version": "2.5.0", "gemma_version": GEMMA_VERSION})}
        return {
            "model_path": _write(folder / f"{family}-transformer.safetensors", core, _said(config, "transformer") | said, device),
            "video_vae_path": _write(folder / f"{family}-video-vae.safetensors", vae, _said(config, "vae") | version, device),
            "audio_vae_path": _write(folder / f"{family}-audio-vae.safetensors", sound, _said(config, "audio_vae", "vocoder") | version, device),
        }
    core |= {f"vae.{name}": t for name, t in vae.items()} | sound | _projection(row, config["transformer"], device)
    model = _write(folder / f"{family}.safetensors", core, _said(config, "transformer", "vae", "audio_vae", "vocoder") | version, device)
    thin = GEMMA3 | {"hidden_size": GEMMA_WIDTH, "num_hidden_layers": GEMMA_LAYERS, "intermediate_size": 64}
    place = folder / "gemma-3-thin"
    return {"model_path": model, "text_encoder_path": place if place.exists() else write_gemma3(place, 0, thin)["text_encoder_folder"]}


def write_small(folder: Path, family: str) -> dict[str, Path]:
    """The same fields of a tiny model."""
    names = {"model": "model_path", "text_encoder": "text_encoder_path", "video_vae": "video_vae_path", "audio_vae": "audio_vae_path"}
    return {names[key]: path for key, path in write_tiny(folder, family).items() if key in names}


def write_clips(root: Path, size: str, *, video_width: int, audio_width: int, tokens: int = 1024, count: int = CLIPS) -> Path:
    """An official ``.precomputed`` folder of random latents [128, F, H, W] with sound and captions; what is there stays."""
    width, height, frames = (int(v) for v in size.split("x"))
    shape = (128, (frames - 1) // 8 + 1, height // 32, width // 32)
    steps = max(1, round(frames / 24 * 25))
    g = torch.Generator().manual_seed(0)
    drawn = lambda *shape: torch.randn(*shape, generator=g).to(torch.bfloat16)  # noqa: E731
    for number in range(count):
        contents = {
            "latents": {"latents": drawn(*shape), "num_frames": shape[1], "height": shape[2], "width": shape[3], "fps": 24.0},
            "audio_latents": {"latents": drawn(8, steps, 16), "num_time_steps": steps, "frequency_bins": 16, "duration": steps / 25},
            "conditions": {
                "video_prompt_embeds": drawn(tokens, video_width), "audio_prompt_embeds": drawn(tokens, audio_width),
                "prompt_attention_mask": torch.ones(tokens, dtype=torch.long),
            },
        }  # fmt: skip
        for name, content in contents.items():
            (root / name).mkdir(parents=True, exist_ok=True)
            if not (root / name / f"clip{number}.pt").exists():
                torch.save(content, root / name / f"clip{number}.pt")
    return root


def _write(path: Path, tensors: Tensors, metadata: Mapping[str, str], device: torch.device) -> Path:
    """Without a checksum and without waiting for the disk: 46 GB would take minutes, and nobody misses them."""
    if not path.exists():
        temporary, memory = path.with_suffix(".tmp"), HostMemory(pin=device.type == "cuda")
        through = Through(memory) if memory.pin else Tensor.cpu  # new host memory for each would take as long as the writing
        moved = lambda t: Lazy(t.shape, t.dtype, lambda: through(t.make())) if isinstance(t, Lazy) else t  # noqa: E731
        with open(temporary, "wb") as file:
            write_tensors(file, {name: moved(t) for name, t in tensors.items()}, metadata, checksum=False)
        memory.close()
        temporary.replace(path)
    return path


def _said(config: Mapping[str, object], *sections: str) -> dict[str, str]:
    return {"config": json.dumps({name: config[name] for name in sections})}


def _transformer(row: Family, config: Mapping[str, object], device: torch.device) -> Tensors:
    """Normal weights of a deviation about that of trained ones; norms are ones."""

    def lazy(name: str, shape: tuple[int, ...]) -> Lazy:
        dtype = torch.float32 if keeps_float32(name) else torch.bfloat16
        empty = lambda: torch.empty(shape, dtype=dtype, device=device)  # noqa: E731
        return Lazy(shape, dtype, lambda: empty().fill_(1.0) if "norm" in name else empty().normal_(std=DEVIATION))

    return {PREFIX + name: lazy(name, shape) for name, shape in transformer_shapes(config, row).items()}


def _drawn(shapes: Mapping[str, tuple[int, ...]], device: torch.device, prefix: str = "") -> Tensors:
    """Weights that keep the size of what passes through them; statistics and gains are ones, biases and means zeros."""

    def lazy(name: str, shape: tuple[int, ...]) -> Lazy:
        def make() -> Tensor:
            empty = torch.empty(shape, dtype=torch.bfloat16, device=device)
            if len(shape) > 1:
                return empty.normal_(std=1 / math.sqrt(math.prod(shape[1:])))
            return empty.fill_(0.0 if "bias" in name or "mean" in name or "alpha" in name or "beta" in name else 1.0)

        return Lazy(shape, torch.bfloat16, make)

    return {prefix + name: lazy(name, tuple(shape)) for name, shape in shapes.items()}


def _vocoder(config: Mapping[str, object], device: torch.device) -> Tensors:
    found = _drawn(vocoder_shapes(config), device)
    if bwe := config.get("bwe"):
        found |= spectrogram_tables(bwe["n_fft"], bwe["win_size"], bwe["num_mels"], bwe["input_sampling_rate"])
    return {f"vocoder.{name}": t for name, t in found.items()}


def _projection(row: Family, config: Mapping[str, object], device: torch.device) -> Tensors:
    video, audio = (GEMMA_WIDTH, 0) if row.feature_kind == "v1" else (config["cross_attention_dim"], config["audio_cross_attention_dim"])
    shapes = projection_shapes(row.feature_kind, (GEMMA_LAYERS + 1) * GEMMA_WIDTH, video, audio)
    return _drawn(shapes, device, prefix="text_embedding_projection.")
