"""Checkpoint: what opens, what is missing and who supplies it, and one clear error for each wrong file."""

from __future__ import annotations

import json
import shutil
import struct
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from ltx_train.errors import CheckpointError
from ltx_train.geometry import AudioGrid, VideoFactors
from ltx_train.models.checkpoint import Checkpoint, audio_layout, vae_factors
from ltx_train.models.families import FAMILIES, known_config
from ltx_train.models.inspect import inspect_files
from ltx_train.models.safetensors_file import SafetensorsFile
from ltx_train.models.transformer import load_transformer
from tests.tensor_tables import table, write_hollow

PARITY = Path(__file__).parents[2] / "parity" / "data"
V1, V23, V25, LTXV = (PARITY / f"{n}.checkpoint.safetensors" for n in ("ltx2", "ltx2.3", "ltx2.5", "ltxv0.9.5"))
DIFFUSION = PARITY / "ltx2.5.video_vae_diffusion.safetensors"


def split(path: Path, folder: Path, *, keep: bool = False) -> dict[str, Path]:
    """A unified parity file as a 2.5-style pack with the files' own metadata sections."""
    tensors = load_file(path)
    metadata = SafetensorsFile.open(path).metadata
    config = json.loads(metadata["config"])
    groups = {
        "transformer": (("model.diffusion_model.",), ("transformer", "scheduler"), ""),
        "video_vae": (("vae.",), ("vae",), "" if keep else "vae."),
        "audio_vae": (("audio_vae.", "vocoder."), ("audio_vae", "vocoder"), ""),
        "text": (("text_embedding_projection.",), (), ""),
    }
    paths = {}
    for name, (prefixes, sections, cut) in groups.items():
        mine = {k.removeprefix(cut): v for k, v in tensors.items() if k.startswith(prefixes)}
        said = {k: v for k, v in metadata.items() if k != "config"} | {"config": json.dumps({s: config[s] for s in sections if s in config})}
        if mine:
            paths[name] = folder / f"{name}.safetensors"
            save_file(mine, paths[name], said if sections else None)
    return paths


def hollow_encoder(path: Path, kind: str, layers: int = 2, hidden: int = 16, metadata: dict[str, str] | None = None) -> Path:
    """A text encoder file by its names and shapes alone: the published list, cut to ``layers`` and made narrow."""
    listed = table({"t5": "t5xxl", "gemma3": "gemma3-12b", "gemma4": "gemma4-12b-ltx"}[kind])
    entries = {}
    for name, (shape, dtype, component) in listed.items():
        number = name.split("block.")[-1].split(".")[0] if kind == "t5" else name.split("layers.")[-1].split(".")[0]
        if number.isdigit() and int(number) >= layers or component in ("text_projection", "tokenizer_assets"):
            continue
        entries[name.removeprefix("language_model.").removeprefix("vision_tower.")] = (tuple(hidden if d in (3840, 4096) else d for d in shape), dtype)
    return write_hollow(path, entries, metadata)


# ---- what opens


@pytest.mark.parametrize("path, family", [(V1, "ltx2"), (V23, "ltx2.3"), (V25, "ltx2.5"), (LTXV, "ltxv-2b")])
def test_unified_files(path, family):
    checkpoint = Checkpoint.open(path)
    assert checkpoint.family is FAMILIES[family]
    assert set(checkpoint.missing) == {"text_encoder"}
    assert checkpoint.video_factors == VideoFactors(8, 32, 32)
    assert checkpoint.model_version == {"ltx2.3": "2.3.0", "ltx2.5": "2.5.0"}.get(family)
    assert checkpoint.config == {k: v for k, v in json.loads(SafetensorsFile.open(path).metadata["config"]).items() if k != "scheduler"}
    assert checkpoint.files == (path,)
    if checkpoint.family.audio:
        assert checkpoint.audio_grid == AudioGrid(1, channels=1, bins=16)


@pytest.mark.parametrize("path", [V1, V23, V25])
def test_a_split_pack_equals_the_unified_file(path, tmp_path):
    whole, parts = Checkpoint.open(path), split(path, tmp_path)
    pack = Checkpoint.open(*parts.values())
    assert pack.family is whole.family and pack.transformer == whole.transformer and pack.config == whole.config
    for name, component in whole.components.items():
        assert pack.source(name).keys() == component.source.keys()
        assert pack.fingerprint_of(name) == whole.fingerprint_of(name), "a component's fingerprint does not depend on its packing"
    first = whole.source("video_vae").keys()[0]
    assert torch.equal(pack.source("video_vae").get(first), whole.source("video_vae").get(first))


def test_a_pack_in_comfyui_folders(tmp_path):
    parts = split(V25, tmp_path)
    for name, folder in (("transformer", "diffusion_models"), ("video_vae", "vae"), ("audio_vae", "vae"), ("text", "text_encoders")):
        (tmp_path / "models" / folder).mkdir(parents=True, exist_ok=True)
        shutil.move(parts[name], tmp_path / "models" / folder / f"{name}.safetensors")
    save_file({"diffusion_model.a.lora_A.weight": torch.ones(1)}, tmp_path / "models" / "vae" / "stray_lora.safetensors")
    checkpoint = Checkpoint.open(tmp_path / "models")
    assert checkpoint.family.name == "ltx2.5" and set(checkpoint.missing) == {"text_encoder"}
    shutil.copy(DIFFUSION, tmp_path / "models" / "vae")
    with pytest.raises(CheckpointError, match="holds the video vae 2 times") as caught:
        Checkpoint.open(tmp_path / "models")
    assert caught.value.code == "checkpoint.duplicate" and DIFFUSION.name in caught.value.hint
    assert Checkpoint.open(tmp_path / "models", video_vae=DIFFUSION).components["video_vae"].kind == "diffusion"


def test_an_explicit_vae_replaces_the_inner_one():
    checkpoint = Checkpoint.open(V25, video_vae=DIFFUSION)
    assert checkpoint.components["video_vae"].files == (DIFFUSION,)
    assert checkpoint.config["vae"]["_class_name"] == "CausalDiffusionVAE"
    assert checkpoint.fingerprint == Checkpoint.open(V25).fingerprint
    assert checkpoint.fingerprint_of("video_vae") != Checkpoint.open(V25).fingerprint_of("video_vae")


def test_fingerprints_change_with_any_merged_weight(tmp_path):
    tensors = load_file(V1)
    name = "model.diffusion_model.transformer_blocks.1.attn1.to_q.weight"
    tensors[name] = tensors[name] + 0.01
    save_file(tensors, tmp_path / "merged.safetensors", SafetensorsFile.open(V1).metadata)
    old, new = Checkpoint.open(V1), Checkpoint.open(tmp_path / "merged.safetensors")
    assert new.fingerprint != old.fingerprint
    assert new.fingerprint_of("video_vae") == old.fingerprint_of("video_vae")
    assert len(old.fingerprint) == 16 and len({old.fingerprint_of(c) for c in old.components}) == len(old.components)


def test_components_alone():
    """decode, and preprocessing with split files, need no transformer."""
    checkpoint = Checkpoint.open(DIFFUSION)
    assert checkpoint.family.name == "ltx2.5" and checkpoint.transformer is None
    assert Checkpoint.open(video_vae=DIFFUSION).fingerprint == checkpoint.fingerprint
    with pytest.raises(CheckpointError, match="transformer of LTX-2.5 22B is missing") as caught:
        checkpoint.source("transformer")
    assert "ltx-2.5-22b-dev-transformer-bf16.safetensors" in caught.value.hint


@pytest.mark.parametrize("family", FAMILIES.values(), ids=list(FAMILIES))
def test_each_missing_component_names_its_file(family, tmp_path):
    source = {"ltx2": V1, "ltx2.3": V23, "ltx2.5": V25}.get(family.name, LTXV)
    checkpoint = Checkpoint.open(source)
    bare = Checkpoint(family, {}, None, {}, {})
    assert list(bare.missing) == list(family.components)
    for component in family.components:
        with pytest.raises(CheckpointError) as caught:
            bare.source(component)
        assert caught.value.code == "checkpoint.missing_component" and ".safetensors" in caught.value.hint
    assert not checkpoint.has("text_encoder")


def test_a_component_the_family_does_not_have():
    with pytest.raises(CheckpointError, match="has no vocoder"):
        Checkpoint.open(LTXV).source("vocoder")


@pytest.mark.parametrize("name, distilled", [("ltx-2.3-22b-distilled-1.1", True), ("ltx-2.3-22b-dev", False)])
def test_distilled_by_file_name(name, distilled, tmp_path):
    shutil.copy(V23, tmp_path / f"{name}.safetensors")
    assert Checkpoint.open(tmp_path / f"{name}.safetensors").distilled is distilled


def test_distilled_by_config(tmp_path):
    config = json.loads(SafetensorsFile.open(LTXV).metadata["config"]) | {"allowed_inference_steps": [1.0, 0.5]}
    save_file(load_file(LTXV), tmp_path / "f.safetensors", {"config": json.dumps(config)})
    assert Checkpoint.open(tmp_path / "f.safetensors").distilled


# ---- factors


@pytest.mark.parametrize("key", ["ltxv-2b-0.9.0", "ltxv-2b-0.9.1", "ltxv-2b-0.9.5", "ltxv-13b", "ltx2", "ltx2.3", "ltx2.5"])
def test_published_vaes_have_8_32_32(key):
    assert vae_factors(known_config(key)["vae"]) == (8, 32)
    if "vae_diffusion" in known_config(key):
        assert vae_factors(known_config(key)["vae_diffusion"]) == (8, 32)


@pytest.mark.parametrize(
    "config, factors",
    [
        ({"encoder_blocks": [["res_x", {}], ["compress_all_res", {}], ["compress_space", {}]], "patch_size": 2}, (2, 8)),
        ({"encoder": {"blocks": [["compress_time_res", {}]], "patch_size": 8}, "patch_size": 2}, (2, 8)),
        ({}, (8, 32)),
    ],
)
def test_factors_count_blocks_and_patch(config, factors):
    assert vae_factors(config) == factors


def test_audio_layout():
    """8 channels x 16 bins, 25 steps a second in every published model; other sizes from the config."""
    assert audio_layout(known_config("ltx2.3")["audio_vae"]) == AudioGrid(1)
    assert Checkpoint.open(PARITY / "audio_vae_2ch.checkpoint.safetensors").audio_grid == AudioGrid(1, channels=2, bins=4)


# ---- text encoders


def test_text_encoder_kinds(tmp_path):
    gemma3 = hollow_encoder(tmp_path / "g3.safetensors", "gemma3")
    t5 = hollow_encoder(tmp_path / "t5.safetensors", "t5")
    gemma4 = hollow_encoder(tmp_path / "g4.safetensors", "gemma4", metadata={"gemma_config": json.dumps({"gemma_version": "gemma4-12b-ltx-v1"})})
    assert Checkpoint.open(V1, text_encoder=gemma3).missing == {}
    assert Checkpoint.open(V1, gemma3).components["text_encoder"].kind == "gemma3"
    assert Checkpoint.open(LTXV, text_encoder=t5).components["text_encoder"].kind == "t5"
    assert Checkpoint.open(V25, text_encoder=gemma4).missing == {}
    for model, wrong, word in ((V1, t5, "is T5-XXL; LTX-2 19B needs Gemma 3 12B"), (V25, gemma3, "needs Gemma 4 12B-LTX"), (V23, gemma4, "needs Gemma 3"), (LTXV, gemma3, "needs T5-XXL")):
        with pytest.raises(CheckpointError, match=word) as caught:
            Checkpoint.open(model, text_encoder=wrong)
        assert caught.value.code == "checkpoint.wrong_text_encoder" and ".safetensors" in caught.value.hint


@pytest.mark.parametrize("model, kind, size", [(V1, "gemma3", {"layers": 3}), (V23, "gemma3", {"hidden": 32}), (LTXV, "t5", {"hidden": 32})])
def test_an_encoder_of_another_size(model, kind, size, tmp_path):
    """Gemma 3 4B or 27B instead of 12B: the projection reads all hidden states side by side."""
    with pytest.raises(CheckpointError, match="of another size") as caught:
        Checkpoint.open(model, text_encoder=hollow_encoder(tmp_path / "e.safetensors", kind, **size))
    assert caught.value.code == "checkpoint.wrong_text_encoder"


def test_another_version_of_gemma_4(tmp_path):
    """The checkpoint's gemma_source_checkpoint names the version it was made with."""
    other = hollow_encoder(tmp_path / "e.safetensors", "gemma4", metadata={"gemma_config": json.dumps({"gemma_version": "gemma4-12b-ltx-v2"})})
    with pytest.raises(CheckpointError, match="is gemma4-12b-ltx-v2; this checkpoint was made with gemma4-12b-ltx-v1"):
        Checkpoint.open(V25, text_encoder=other)


def test_a_stock_gemma_4(tmp_path):
    parts = split(V25, tmp_path)
    with pytest.raises(CheckpointError, match="stock Gemma 4"):
        Checkpoint.open(parts["transformer"], text_encoder=hollow_encoder(tmp_path / "e.safetensors", "gemma4"))


def test_a_hugging_face_folder(tmp_path):
    """Shards by their index; a missing shard is named; the tokenizer lies in the folder."""
    entries = {n: (s, d) for n, (s, d, _) in table("gemma3-12b").items() if not n.split("layers.")[-1].split(".")[0].isdigit() or int(n.split("layers.")[-1].split(".")[0]) < 2}
    entries = {n: (tuple(16 if x == 3840 else x for x in s), d) for n, (s, d) in entries.items()}
    names = list(entries)
    shards = {"model-1.safetensors": names[::2], "model-2.safetensors": names[1::2]}
    folder = tmp_path / "gemma"
    folder.mkdir()
    for file, mine in shards.items():
        write_hollow(folder / file, {n: entries[n] for n in mine})
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {n: f for f, mine in shards.items() for n in mine}}))
    (folder / "tokenizer.json").write_text("{}")
    checkpoint = Checkpoint.open(V1, text_encoder=folder)
    assert checkpoint.tokenizer_path == folder and len(checkpoint.source("text_encoder")) == len(names)
    assert Checkpoint.open(text_encoder=folder).family.text == "gemma3"
    (folder / "model-2.safetensors").unlink()
    with pytest.raises(CheckpointError, match="lacks 1 of its 2 weight files, such as model-2.safetensors"):
        Checkpoint.open(V1, text_encoder=folder)
    with pytest.raises(CheckpointError, match="holds no .safetensors weights"):
        Checkpoint.open(V1, text_encoder=tmp_path)


def test_tokenizer_paths(tmp_path):
    t5 = hollow_encoder(tmp_path / "t5.safetensors", "t5")
    assert Checkpoint.open(LTXV, text_encoder=t5).tokenizer_path is None
    (tmp_path / "tokenizer").mkdir()
    with pytest.raises(CheckpointError, match="holds no tokenizer"):
        Checkpoint.open(LTXV, text_encoder=t5, tokenizer=tmp_path / "tokenizer")
    (tmp_path / "tokenizer" / "tokenizer.json").write_text("{}")
    without = Checkpoint.open(LTXV, text_encoder=t5)
    assert without.tokenizer_path == tmp_path / "tokenizer"
    before = without.fingerprint_of("text_encoder")
    (tmp_path / "tokenizer" / "tokenizer.json").write_text('{"other": 1}')
    assert Checkpoint.open(LTXV, text_encoder=t5).fingerprint_of("text_encoder") != before


# ---- what is refused


def _bytes(path: Path, content: bytes) -> Path:
    path.write_bytes(content)
    return path


def _lora(tmp_path: Path) -> Path:
    names = [f"diffusion_model.transformer_blocks.0.attn1.to_{p}.lora_{x}.weight" for p in "qkv" for x in "AB"]
    save_file({n: torch.ones(2, 2) for n in names}, tmp_path / "lora.safetensors")
    return tmp_path / "lora.safetensors"


def _one(name: str, **tensors: torch.Tensor):
    def make(tmp_path: Path) -> Path:
        save_file(tensors or {name: torch.ones(2, 2)}, tmp_path / "f.safetensors")
        return tmp_path / "f.safetensors"

    return make


def _header(text: str) -> bytes:
    return struct.pack("<Q", len(text)) + text.encode()


WRONG = {
    "url": (lambda t: "https://huggingface.co/Lightricks/LTX-2/resolve/main/ltx-2-19b-dev.safetensors", "checkpoint.url", "not a web address"),
    "hub url": (lambda t: "hf://Lightricks/LTX-2", "checkpoint.url", "not a web address"),
    "missing": (lambda t: PARITY / "ltx2.3.checkpoints.safetensors", "checkpoint.missing_file", "not found"),
    "lfs pointer": (lambda t: _bytes(t / "m.safetensors", b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 43\n"), "checkpoint.lfs_pointer", "Git LFS pointer"),
    "truncated data": (lambda t: _bytes(t / "m.safetensors", V1.read_bytes()[:-1000]), "checkpoint.truncated", "cut short"),
    "truncated header": (lambda t: _bytes(t / "m.safetensors", V1.read_bytes()[:2000]), "checkpoint.truncated", "cut short inside its header"),
    "empty": (lambda t: _bytes(t / "m.safetensors", b""), "checkpoint.empty", "holds 0 bytes"),
    "pickle": (lambda t: _bytes(t / "m.ckpt", b"PK\x03\x04" + b"\0" * 100), "checkpoint.not_safetensors", "pickled"),
    "web page": (lambda t: _bytes(t / "m.safetensors", b"<!doctype html><html>login</html>"), "checkpoint.not_safetensors", "web page"),
    "gguf": (lambda t: _bytes(t / "m.gguf", b"GGUF\3\0\0\0" + b"\0" * 100), "checkpoint.gguf", "GGUF"),
    "text": (lambda t: _bytes(t / "m.safetensors", b"hello, this is not a model file at all"), "checkpoint.not_safetensors", "not a safetensors file"),
    "broken header": (lambda t: _bytes(t / "m.safetensors", _header('{"a": ')), "checkpoint.not_safetensors", "header is not readable"),
    "no tensors": (lambda t: _bytes(t / "m.safetensors", _header("{}")), "checkpoint.empty", "holds no tensors"),
    "unknown dtype": (lambda t: _bytes(t / "m.safetensors", _header('{"a": {"dtype": "F4", "shape": [2], "data_offsets": [0, 1]}}') + b"\0"), "checkpoint.dtype", "stores a as F4"),
    "lora": (_lora, "checkpoint.is_lora", "is a LoRA"),
    "text encoder": (lambda t: hollow_encoder(t / "m.safetensors", "gemma3"), "checkpoint.is_text_encoder", "is a text encoder"),
    "t5": (lambda t: hollow_encoder(t / "m.safetensors", "t5"), "checkpoint.is_text_encoder", "is a text encoder"),
    "duration head": (_one("duration_head.mlp.weight"), "checkpoint.is_other", "duration head"),
    "upscaler": (_one("upsampler.0.weight"), "checkpoint.is_other", "latent upscaler"),
    "diffusers": (_one("", **{"proj_in.weight": torch.ones(1, 1), "time_embed.linear.weight": torch.ones(1, 1)}), "checkpoint.diffusers", "diffusers layout"),
    "another model": (_one("double_blocks.0.img_attn.qkv.weight"), "checkpoint.family", "no LTX model"),
    "an empty folder": (lambda t: t, "checkpoint.is_folder", "holds no LTX model files"),
}


@pytest.mark.parametrize("case", WRONG)
def test_one_clear_error_for_each_wrong_model_file(case, tmp_path):
    make, code, words = WRONG[case]
    with pytest.raises(CheckpointError) as caught:
        Checkpoint.open(make(tmp_path))
    error = caught.value
    assert error.code == code and words in error.message
    assert len(error.message) < 120 and "\n" not in error.message and error.hint


def test_missing_file_names_the_nearest():
    with pytest.raises(CheckpointError) as caught:
        Checkpoint.open(PARITY / "ltx2.3.checkpoint.safetensor")
    assert "ltx2.3.checkpoint.safetensors" in caught.value.hint


def test_a_diffusers_folder(tmp_path):
    (tmp_path / "model_index.json").write_text("{}")
    with pytest.raises(CheckpointError, match="diffusers layout"):
        Checkpoint.open(tmp_path)


def test_nothing_given():
    with pytest.raises(CheckpointError, match="No model file was given"):
        Checkpoint.open()


def test_a_model_given_as_text_encoder():
    with pytest.raises(CheckpointError, match="holds no text encoder") as caught:
        Checkpoint.open(V1, text_encoder=V23)
    assert caught.value.code == "checkpoint.is_model"


def test_a_wrong_file_given_as_vae(tmp_path):
    parts = split(V23, tmp_path)
    with pytest.raises(CheckpointError, match="holds no video vae") as caught:
        Checkpoint.open(parts["transformer"], video_vae=parts["audio_vae"])
    assert caught.value.code == "checkpoint.wrong_file" and "audio vae, vocoder" in caught.value.hint


@pytest.mark.parametrize("model, other, component", [(V23, V1, "video_vae"), (V1, V23, "video_vae"), (V1, V23, "audio_vae"), (V23, V25, "video_vae"), (V25, V23, "audio_vae"), (V1, V23, "text"), (LTXV, V1, "video_vae")])
def test_mixed_families_are_refused(model, other, component, tmp_path):
    (tmp_path / "a").mkdir(), (tmp_path / "b").mkdir()
    mine, theirs = split(model, tmp_path / "a"), split(other, tmp_path / "b")
    with pytest.raises(CheckpointError, match="is not of ") as caught:
        Checkpoint.open(mine["transformer"], theirs[component])
    assert caught.value.code == "checkpoint.mixed" and "one family" in caught.value.hint


def test_audio_files_with_a_video_only_model(tmp_path):
    (tmp_path / "a").mkdir(), (tmp_path / "b").mkdir()
    with pytest.raises(CheckpointError, match="is not of LTX-Video"):
        Checkpoint.open(split(LTXV, tmp_path / "a")["transformer"], split(V1, tmp_path / "b")["audio_vae"])


def test_two_transformers_are_refused(tmp_path):
    shutil.copy(V1, tmp_path / "copy.safetensors")
    with pytest.raises(CheckpointError, match="Two files hold the transformer"):
        Checkpoint.open(V1, tmp_path / "copy.safetensors")


def test_ltx_video_fp8_of_the_vendor_is_refused(tmp_path):
    """Made for q8_kernels, in a rotated basis; a file in ComfyUI's scaled form is read."""
    tensors = load_file(LTXV)
    fp8 = {k: v.to(torch.float8_e4m3fn) if "transformer_blocks" in k and v.ndim == 2 else v for k, v in tensors.items()}
    save_file(fp8, tmp_path / "fp8.safetensors", SafetensorsFile.open(LTXV).metadata)
    with pytest.raises(CheckpointError, match="q8_kernels") as caught:
        Checkpoint.open(tmp_path / "fp8.safetensors")
    assert "bf16" in caught.value.hint
    save_file(fp8 | {"model.diffusion_model.scaled_fp8": torch.ones(1)}, tmp_path / "scaled.safetensors", SafetensorsFile.open(LTXV).metadata)
    assert Checkpoint.open(tmp_path / "scaled.safetensors").components["transformer"].quantisation["float8_e4m3fn"] > 20


@pytest.mark.parametrize("kind", ["float8_e4m3fn", "int8_tensorwise"])
def test_a_quantised_repack_fills_the_transformer(kind, tmp_path):
    """The vendor's fp8 form (header metadata) and ComfyUI's int8 form (comfy_quant): each weight is its q x scale."""
    tensors, layers, expected = load_file(V23), {}, {}
    for name in [n for n in tensors if ".transformer_blocks." in n and n.endswith("to_q.weight")]:
        layer, value = name.removesuffix(".weight"), tensors[name].float()
        if kind == "int8_tensorwise":
            scale = value.abs().amax(1, keepdim=True) / 127
            tensors[name] = (value / scale).round().to(torch.int8)
            tensors[f"{layer}.comfy_quant"] = torch.tensor(list(json.dumps({"format": kind}).encode()), dtype=torch.uint8)
        else:
            scale = value.abs().amax() / 448
            tensors[name], tensors[f"{layer}.input_scale"] = (value / scale).to(torch.float8_e4m3fn), torch.ones(())
            layers[layer] = {"format": kind}
        tensors[f"{layer}.weight_scale"] = scale
        expected[layer.removeprefix("model.diffusion_model.")] = tensors[name].float() * scale
    said = SafetensorsFile.open(V23).metadata | ({"_quantization_metadata": json.dumps({"layers": layers})} if layers else {})
    save_file(tensors, tmp_path / "q.safetensors", said)
    checkpoint = Checkpoint.open(tmp_path / "q.safetensors")
    assert checkpoint.transformer == Checkpoint.open(V23).transformer
    report = inspect_files([tmp_path / "q.safetensors"])
    assert report["quantisation"] == {kind: len(expected)} and report["faults"] == []
    model = load_transformer(checkpoint, dtype=torch.float32, device="cpu")
    assert len(expected) == 18 and all(torch.equal(model.get_submodule(n).weight, v) for n, v in expected.items())


# ---- inspect


def test_inspect_report(tmp_path):
    report = inspect_files([V23])
    assert (report["family"], report["title"], report["version"]) == ("ltx2.3", "LTX-2.3 22B", "2.3.0")
    assert set(report["components"]) == {"transformer", "connectors", "text_projection", "video_vae", "audio_vae", "vocoder"}
    assert list(report["missing"]) == ["text_encoder"] and "Gemma 3" in report["missing"]["text_encoder"]
    assert report["components"]["vocoder"]["kind"] == "bwe" and report["quantisation"] == {}
    assert report["video_factors"] == [8, 32, 32] and report["audio_steps_per_second"] == 25
    assert report["fingerprint"] == report["components"]["transformer"]["fingerprint"]
    assert json.loads(json.dumps(report)) == report and report["faults"] == []


def test_inspect_tells_what_loading_would_refuse(tmp_path):
    tensors = load_file(V23)
    del tensors["model.diffusion_model.transformer_blocks.1.attn1.to_q.weight"]
    tensors["model.diffusion_model.proj_out.bias"] = torch.zeros(3)
    save_file(tensors, tmp_path / "cut.safetensors", SafetensorsFile.open(V23).metadata)
    (fault,) = inspect_files([tmp_path / "cut.safetensors"])["faults"]
    assert "1 missing, 1 of another shape" in fault and "transformer_blocks.1.attn1.to_q.weight" in fault and "proj_out.bias" in fault
    with pytest.raises(CheckpointError, match="1 missing, 1 of another shape"):
        load_transformer(Checkpoint.open(tmp_path / "cut.safetensors"), dtype=torch.float32, device="cpu")


def test_inspect_finds_the_encoder_among_the_files(tmp_path):
    gemma = hollow_encoder(tmp_path / "g.safetensors", "gemma3")
    assert inspect_files([gemma, V1])["missing"] == {}
    alone = inspect_files([gemma])
    assert alone["family"] == "ltx2.3" and list(alone["components"]) == ["text_encoder"]
    assert inspect_files([LTXV])["audio_steps_per_second"] is None
