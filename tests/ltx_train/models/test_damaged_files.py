"""Headers that say nonsense, files in the wrong slot, folders: one CheckpointError each, before anything is read."""

import json
import struct

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from ltx_train.errors import CheckpointError
from ltx_train.models.checkpoint import Checkpoint
from ltx_train.models.inspect import inspect_files
from ltx_train.models.safetensors_file import SafetensorsFile
from ltx_train.tiny.checkpoints import write_tiny

WHOLE = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}
DAMAGED = {
    "entry is a number": ({"a": 1}, "checkpoint.header"),
    "no offsets": ({"a": {"dtype": "F32", "shape": [2]}}, "checkpoint.header"),
    "offsets are words": ({"a": {**WHOLE, "data_offsets": "ab"}}, "checkpoint.header"),
    "offsets backwards": ({"a": {**WHOLE, "data_offsets": [8, 0]}}, "checkpoint.header"),
    "offsets negative": ({"a": {**WHOLE, "data_offsets": [-8, 0]}}, "checkpoint.header"),
    "shape is a word": ({"a": {**WHOLE, "shape": "x"}}, "checkpoint.header"),
    "shape and bytes differ": ({"a": {**WHOLE, "shape": [200]}}, "checkpoint.header"),
    "unknown dtype": ({"a": {**WHOLE, "dtype": "F4"}}, "checkpoint.dtype"),
    "header is a list": ([1], "checkpoint.not_safetensors"),
    "cut short": ({"a": {**WHOLE, "shape": [4], "data_offsets": [0, 16]}}, "checkpoint.truncated"),
}


def write(path, header, body=b"\0" * 8):
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + body)
    return path


@pytest.mark.parametrize("name", DAMAGED)
def test_one_error_for_each_damaged_header(name, tmp_path):
    header, code = DAMAGED[name]
    with pytest.raises(CheckpointError) as caught:
        SafetensorsFile.open(write(tmp_path / "x.safetensors", header))
    assert caught.value.code in (code, "checkpoint.not_safetensors") and "x.safetensors" in caught.value.message and caught.value.hint


def test_metadata_that_is_no_mapping_is_passed_over(tmp_path):
    file = SafetensorsFile.open(write(tmp_path / "x.safetensors", {"__metadata__": ["x"], "a": WHOLE}))
    assert file.metadata == {} and file.read("a").tolist() == [0, 0]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return {name: write_tiny(tmp_path_factory.mktemp(name), name) for name in ("ltx2.3", "ltx2.5")}


def test_a_vae_given_as_the_model_is_named(tiny):
    with pytest.raises(CheckpointError) as caught:
        Checkpoint.open(tiny["ltx2.5"]["video_vae"], text_encoder=tiny["ltx2.3"]["text_encoder"])
    assert caught.value.code == "checkpoint.no_transformer" and "video vae" in caught.value.hint


def test_a_config_with_unreadable_blocks(tiny, tmp_path):
    model = tiny["ltx2.3"]["model"]
    with safe_open(str(model), "pt") as file:
        metadata = file.metadata()
    save_file(load_file(model), tmp_path / "x.safetensors", metadata={**metadata, "config": json.dumps({"vae": {"encoder_blocks": 5}})})
    with pytest.raises(CheckpointError, match="no readable VAE blocks"):
        _ = Checkpoint.open(tmp_path / "x.safetensors").video_factors


def test_folders_are_inspected_as_what_they_hold(tiny, tmp_path):
    pack = tiny["ltx2.3"]["model"].parents[1]
    assert set(inspect_files([pack])["components"]) >= {"transformer", "text_encoder"}
    assert set(inspect_files([tiny["ltx2.3"]["text_encoder_folder"]])["components"]) == {"text_encoder"}
    for empty in (tmp_path, tmp_path / "nothing"):
        with pytest.raises(CheckpointError) as caught:
            inspect_files([empty])
        assert caught.value.code in ("checkpoint.is_folder", "checkpoint.missing_file")


def test_a_tokenizer_that_is_none(tiny, tmp_path):
    (tmp_path / "film.mp4").touch()
    with pytest.raises(CheckpointError, match="film.mp4 is no tokenizer file"):
        Checkpoint.open(tiny["ltx2.3"]["model"], tokenizer=tmp_path / "film.mp4")


def test_tensors_that_do_not_fit_are_named_with_their_file(tiny, tmp_path):
    from ltx_train.models.transformer import load_transformer

    model = tiny["ltx2.3"]["model"]
    with safe_open(str(model), "pt") as file:
        metadata = file.metadata()
    tensors = load_file(model)
    del tensors[next(n for n in tensors if "transformer_blocks.0.attn1.to_q.weight" in n)]
    save_file(tensors, tmp_path / "cut.safetensors", metadata=metadata)
    with pytest.raises(CheckpointError) as caught:
        load_transformer(Checkpoint.open(tmp_path / "cut.safetensors"), dtype=torch.float32, device="cpu")
    assert caught.value.message.startswith("cut.safetensors does not fit") and "attn1.to_q.weight" in caught.value.hint
