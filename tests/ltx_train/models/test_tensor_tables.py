"""Published checkpoints by their tensor lists: opened as files of full size (with holes for values), every name in its place."""

from __future__ import annotations

import json
from functools import cache

import pytest
import torch

from ltx_train.geometry import AudioGrid, VideoFactors
from ltx_train.models.checkpoint import Checkpoint
from ltx_train.models.connectors import Connectors
from ltx_train.models.families import FAMILIES, known_config
from ltx_train.models.transformer import load_transformer, transformer_source
from ltx_train.models.weights import check_weights
from tests.tensor_tables import detect, shapes, table, write_hollow

UNIFIED = {"ltxv-2b-0.9.0": "ltxv-2b", "ltxv-2b-0.9.1": "ltxv-2b", "ltxv-2b-0.9.5": "ltxv-2b", "ltxv-13b-0.9.7": "ltxv-13b", "ltx2-19b": "ltx2", "ltx2.3-22b": "ltx2.3"}
SPLIT = {
    "diffusion_models/ltx-2.5-22b-dev-transformer-bf16.safetensors": ("transformer", "connectors"),
    "vae/ltx-2.5-video-vae-conv-bf16.safetensors": ("video_vae_conv",),
    "vae/ltx-2.5-video-vae-bf16.safetensors": ("video_vae_diffusion",),
    "vae/ltx-2.5-audio-vae-bf16.safetensors": ("audio_file",),
}


def _entries(name: str, *components: str) -> dict[str, tuple[tuple[int, ...], str]]:
    return {n.rpartition("|")[2]: (s, d) for n, (s, d, c) in table(name).items() if not components or c.startswith(components)}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """All published lists as files; a 2.5 split pack, and text encoders."""
    place = tmp_path_factory.mktemp("published")
    for name in UNIFIED:
        write_hollow(place / f"{name}.safetensors", _entries(name))
    for path, components in SPLIT.items():
        (place / path).parent.mkdir(exist_ok=True)
        write_hollow(place / path, _entries("ltx2.5-22b", *components), {"model_version": "2.5.0"})
    (place / "text_encoders").mkdir()
    write_hollow(place / "text_encoders/gemma4.safetensors", _entries("gemma4-12b-ltx"))
    write_hollow(place / "text_encoders/t5xxl.safetensors", _entries("t5xxl"))
    comfy = {n.removeprefix("language_model.").removeprefix("vision_tower."): v for n, v in _entries("gemma3-12b").items()}
    write_hollow(place / "text_encoders/gemma3.safetensors", comfy | {"spiece_model": ((64,), "U8")})
    return place


def open_published(folder, name: str) -> Checkpoint:
    encoder = {"ltx2-19b": "gemma3", "ltx2.3-22b": "gemma3", "ltx2.5-22b": "gemma4"}.get(name, "t5xxl")
    paths = [folder / f"{name}.safetensors"] if name in UNIFIED else [folder / p for p in SPLIT if "video-vae-bf16" not in p]
    return Checkpoint.open(*paths, text_encoder=folder / "text_encoders" / f"{encoder}.safetensors")


ALL = [*UNIFIED, "ltx2.5-22b"]


@pytest.fixture(scope="module")
def transformer(folder):
    """name -> its transformer with both streams, on no device."""
    return cache(lambda name: load_transformer(open_published(folder, name), dtype=torch.bfloat16, device="meta"))


@pytest.mark.parametrize("name", ALL)
def test_opened_whole(folder, name):
    checkpoint = open_published(folder, name)
    assert checkpoint.family.name == UNIFIED.get(name, "ltx2.5")
    assert checkpoint.missing == {}
    assert set(checkpoint.components) == set(checkpoint.family.components)
    assert checkpoint.video_factors == VideoFactors(8, 32, 32, name not in ("ltxv-2b-0.9.0", "ltxv-2b-0.9.1"))
    assert checkpoint.audio_grid == AudioGrid(1)
    assert not checkpoint.distilled


@pytest.mark.parametrize("name", ALL)
def test_every_tensor_belongs_to_one_component(folder, name):
    checkpoint = open_published(folder, name)
    stored = sum(len(c.source) for c in checkpoint.components.values())
    lists = {"ltx2.5-22b": ["ltx2.5-22b", "gemma4-12b-ltx"], "ltx2-19b": ["ltx2-19b", "gemma3-12b"], "ltx2.3-22b": ["ltx2.3-22b", "gemma3-12b"]}.get(name, [name, "t5xxl"])
    other = ("video_vae_diffusion", "latent_upscaler", "duration_head")
    total = sum(not c.startswith(other) for n in lists for _, _, c in table(n).values())
    assert stored == total + ("gemma3-12b" in lists)  # the sentencepiece tensor of the ComfyUI file


AV = ["ltx2-19b", "ltx2.3-22b", "ltx2.5-22b"]
STREAMS = {"av": (True, True), "video": (True, False), "audio": (False, True)}


@pytest.mark.parametrize("name, streams", [*((n, "av") for n in ALL), *((n, s) for n in AV for s in ("video", "audio"))])
def test_the_transformer_has_exactly_these_tensors(folder, transformer, name, streams):
    video, audio = STREAMS[streams]
    checkpoint = open_published(folder, name)
    model = transformer(name) if video and audio else load_transformer(checkpoint, dtype=torch.bfloat16, device="meta", video=video, audio=audio)
    filled = check_weights(model, transformer_source(checkpoint, model))
    assert filled and set(filled) == set(dict(model.named_parameters()))


@pytest.mark.parametrize("name", AV)
def test_the_transformer_keeps_the_stored_dtypes(folder, transformer, name):
    """Every *scale_shift_table* of the 2.x files is float32, all else bfloat16."""
    source = open_published(folder, name).source("transformer")
    assert all(p.dtype == source.info(n).dtype for n, p in transformer(name).named_parameters())


@pytest.mark.parametrize("name", AV)
def test_the_connectors_have_exactly_these_tensors(folder, name):
    checkpoint = open_published(folder, name)
    connectors = Connectors.load(checkpoint, device="meta", dtype=torch.bfloat16)
    source = checkpoint.source("connectors")
    for stream, network in connectors.networks.items():
        check_weights(network, source.subset(f"{stream}_embeddings_connector."))
    assert set(connectors.networks) == {"video", "audio"}


def test_the_diffusion_vae_of_the_pack(folder):
    paths = [folder / p for p in SPLIT if "conv" not in p]
    checkpoint = Checkpoint.open(*paths, text_encoder=folder / "text_encoders/gemma4.safetensors")
    assert checkpoint.components["video_vae"].kind == "diffusion"
    assert checkpoint.config["vae"]["_class_name"] == "CausalDiffusionVAE"  # from the family's row: these files hold no config
    assert checkpoint.video_factors == VideoFactors(8, 32, 32)


@pytest.mark.parametrize("name", ["ltx2-19b", "ltx2.3-22b"])
def test_third_party_splits_without_prefixes_or_metadata(folder, name, tmp_path):
    """Community splits: a bare transformer with connectors, a bare VAE, audio and projection files."""
    entries = _entries(name)
    bare = {n.removeprefix("model.diffusion_model."): v for n, v in entries.items() if n.startswith("model.diffusion_model.")}
    groups = {
        "transformer": {n: v for n, v in bare.items() if "connector" not in n},
        "connectors": {n: v for n, v in bare.items() if "connector" in n},
        "vae": {n.removeprefix("vae."): v for n, v in entries.items() if n.startswith("vae.")},
        "audio": {n: v for n, v in entries.items() if n.startswith(("audio_vae.", "vocoder."))},
        "projection": {n: v for n, v in entries.items() if n.startswith("text_embedding_projection.")},
    }
    paths = [write_hollow(tmp_path / f"{n}.safetensors", g) for n, g in groups.items()]
    split, whole = Checkpoint.open(*reversed(paths)), open_published(folder, name)
    assert split.family is whole.family and split.transformer == whole.transformer
    for component in ("transformer", "connectors", "text_projection", "video_vae", "audio_vae", "vocoder"):
        assert set(split.source(component).keys()) == set(whole.source(component).keys()), component


@pytest.mark.parametrize("name, config", [("ltx2-19b", "ltx2"), ("ltx2.3-22b", "ltx2.3"), ("ltxv-2b-0.9.0", "ltxv-2b-0.9.0"), ("ltxv-2b-0.9.1", "ltxv-2b-0.9.1")])
def test_config_is_supplied_when_the_file_has_none(folder, name, config):
    checkpoint = open_published(folder, name)
    assert checkpoint.config == known_config(config)


def test_fp8_file_of_the_vendor(folder, tmp_path):
    """LTX-2 19B fp8: 42 of 48 blocks with 28 quantised linears, 6,404 tensors in the file (published count)."""
    layers, entries = {}, {}
    for n, (shape, dtype) in _entries("ltx2-19b").items():
        block = n.split(".")[3] if ".transformer_blocks." in n else "0"
        inside = n.startswith("model.diffusion_model.transformer_blocks.") and n.endswith(".weight") and len(shape) == 2
        if inside and 1 <= int(block) <= 42:
            layer = n.removesuffix(".weight")
            entries |= {n: (shape, "F8_E4M3"), f"{layer}.weight_scale": ((), "F32"), f"{layer}.input_scale": ((), "F32")}
            layers[layer] = {"format": "float8_e4m3fn"}
        else:
            entries[n] = (shape, dtype)
    path = write_hollow(tmp_path / "ltx-2-19b-distilled-fp8.safetensors", entries, {"_quantization_metadata": json.dumps({"layers": layers})})
    assert len(entries) == 6404 and len(layers) == 1176
    checkpoint = Checkpoint.open(path)
    assert checkpoint.family is FAMILIES["ltx2"] and checkpoint.distilled
    assert checkpoint.components["transformer"].quantisation == {"float8_e4m3fn": 1176}
    model = load_transformer(checkpoint, dtype=torch.bfloat16, device="meta")
    check_weights(model, transformer_source(checkpoint, model))


def test_nvfp4_file_of_the_vendor(tmp_path):
    """LTX-2.5 nvfp4: 28 linears of blocks 0 to 41, 7,877 tensors in the file (published count)."""
    layers, entries = {}, {}
    for n, (shape, dtype) in _entries("ltx2.5-22b", "transformer", "connectors").items():
        inside = n.startswith("model.diffusion_model.transformer_blocks.") and n.endswith(".weight") and len(shape) == 2 and "gate_logits" not in n
        if inside and int(n.split(".")[3]) <= 41:
            layer = n.removesuffix(".weight")
            entries |= {n: ((shape[0], shape[1] // 2), "U8"), f"{layer}.weight_scale": ((shape[0], shape[1] // 16), "F8_E4M3")}
            entries |= {f"{layer}.{s}": ((), "F32") for s in ("weight_scale_2", "input_scale")}
            layers[layer] = {"format": "nvfp4"}
        else:
            entries[n] = (shape, dtype)
    path = write_hollow(tmp_path / "nvfp4.safetensors", entries, {"_quantization_metadata": json.dumps({"layers": layers})})
    assert len(entries) == 7877 and len(layers) == 1176
    checkpoint = Checkpoint.open(path)
    assert checkpoint.family is FAMILIES["ltx2.5"] and checkpoint.components["transformer"].quantisation == {"nvfp4": 1176}
    assert checkpoint.transformer == open_config("ltx2.5-22b")
    model = load_transformer(checkpoint, dtype=torch.bfloat16, device="meta")
    check_weights(model, transformer_source(checkpoint, model))


def open_config(name: str):
    """The transformer config of a plain file of the same model."""
    return detect(shapes(name, "transformer"))[1]
