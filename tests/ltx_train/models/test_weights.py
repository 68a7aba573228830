"""Weights: lazy reading, quantised formats against ComfyUI's own numbers, strict loading."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from ltx_train.errors import CheckpointError
from ltx_train.models.stored_quant import hadamard, untile_scales
from ltx_train.models.weights import WeightSource, load_weights

DATA = Path(__file__).parents[2] / "data" / "quantised" / "comfyui.safetensors"
LAYERS = sorted(k.removeprefix("expected.") for k in load_file(DATA) if k.startswith("expected."))
FORMATS = {"fp8": "float8_e4m3fn", "fp8_e5m2": "float8_e5m2", "nvfp4": "nvfp4", "nvfp4_small": "nvfp4", "mxfp8": "mxfp8"}


@pytest.mark.parametrize("layer", LAYERS)
def test_dequantised_values_are_comfyuis(layer):
    """Reference: comfy-kitchen 0.2.31, float32; equal to the bit, but for the order of sums in the Hadamard product."""
    source = WeightSource.open(DATA)
    expected = source.get(f"expected.{layer}")
    got = source.get(f"{layer}.weight", dtype=torch.float32)
    assert source.format(f"{layer}.weight") == FORMATS.get(layer, "int8_tensorwise")
    assert source.info(f"{layer}.weight").shape == tuple(expected.shape)
    if "convrot" in layer or "nested" in layer:
        torch.testing.assert_close(got, expected, rtol=0, atol=2e-7)
    else:
        assert torch.equal(got, expected)


def test_quantised_parts_are_not_tensors_of_their_own():
    names = [n for n in WeightSource.open(DATA).keys() if not n.startswith("expected.")]
    assert sorted(names) == sorted([*(f"{layer}.weight" for layer in LAYERS), "fp8.bias"])


def test_stored_form_is_offered_for_training_as_it_is():
    source = WeightSource.open(DATA)
    stored = source.quantized("int8_convrot.weight")
    assert stored.format == "int8_tensorwise" and stored.options == {"convrot": True, "convrot_groupsize": 256}
    assert stored.tensors["weight"].dtype == torch.int8 and stored.tensors["weight_scale"].shape == (8, 1)
    assert source.quantized("fp8.bias") is None
    assert source.get("fp8.weight").dtype == torch.bfloat16
    assert stored.nbytes == 8 * 512 + 8 * 4


def test_old_scaled_fp8_equals_the_new_form(tmp_path):
    """The marker form (scaled_fp8, scale_weight) means the same numbers: ComfyUI renames it at load."""
    stored = WeightSource.open(DATA).quantized("fp8.weight")
    path = tmp_path / "old.safetensors"
    marker = torch.zeros(2, dtype=torch.float32)
    save_file({"enc.scaled_fp8": marker, "enc.q.weight": stored.tensors["weight"], "enc.q.scale_weight": stored.tensors["weight_scale"], "enc.q.scale_input": torch.ones(())}, path)
    source = WeightSource.open(path)
    assert source.keys() == ["enc.q.weight"]
    assert torch.equal(source.get("enc.q.weight", torch.float32), stored.dequantize())


def test_bare_fp8_is_a_plain_cast(tmp_path):
    value = torch.randn(4, 8).to(torch.float8_e4m3fn)
    save_file({"q.weight": value}, tmp_path / "f.safetensors")
    assert torch.equal(WeightSource.open(tmp_path / "f.safetensors").get("q.weight", torch.float32), value.float())


def test_pre_quant_scale_scales_the_inputs(tmp_path):
    """A layer with pre_quant_scale computes (x * p) W^T, so its weight is W diag(p)."""
    stored = WeightSource.open(DATA).quantized("nvfp4_small.weight")
    p = torch.rand(32) + 0.5
    tensors = {f"l.{k}": v for k, v in stored.tensors.items()} | {"l.pre_quant_scale": p}
    path = tmp_path / "f.safetensors"
    save_file(tensors, path, {"_quantization_metadata": json.dumps({"layers": {"l": {"format": "nvfp4"}}})})
    assert torch.equal(WeightSource.open(path).get("l.weight", torch.float32), stored.dequantize() * p)


@pytest.mark.parametrize(
    "tensors, word",
    [
        ({"comfy_quant": torch.tensor(list(b'{"format": "convrot_w4a4"}'), dtype=torch.uint8), "weight_scale": torch.ones(4)}, "convrot_w4a4"),
        ({"comfy_quant": torch.tensor(list(b"nonsense"), dtype=torch.uint8)}, "unreadably"),
        ({"weight_scale": torch.ones(4, 1)}, "undeclared int8"),
        ({"weight_s_rel": torch.ones(4), "weight_s_channel": torch.ones(4)}, "asym_w4a8_int8"),
    ],
)
def test_what_is_not_exactly_known_is_refused(tmp_path, tensors, word):
    save_file({"l.weight": torch.ones(4, 8, dtype=torch.int8), **{f"l.{k}": v for k, v in tensors.items()}}, tmp_path / "f.safetensors")
    with pytest.raises(CheckpointError, match=word) as caught:
        WeightSource.open(tmp_path / "f.safetensors").get("l.weight")
    assert caught.value.code == "checkpoint.quant_format" and "bf16" in caught.value.hint


def test_a_missing_scale_is_named(tmp_path):
    conf = torch.tensor(list(b'{"format": "int8_tensorwise"}'), dtype=torch.uint8)
    save_file({"l.weight": torch.ones(4, 8, dtype=torch.int8), "l.comfy_quant": conf}, tmp_path / "f.safetensors")
    with pytest.raises(CheckpointError, match="lacks weight_scale of l"):
        WeightSource.open(tmp_path / "f.safetensors").get("l.weight")


@pytest.mark.parametrize("size", [4, 16, 256])
def test_hadamard_is_orthogonal_symmetric_regular(size):
    """Regular: every row sums to the same, sqrt(size) / 1 of the unit vector's length (ConvRot's choice)."""
    h = hadamard(size)
    torch.testing.assert_close(h @ h, torch.eye(size))
    assert torch.equal(h, h.T)
    torch.testing.assert_close(h.sum(0), torch.ones(size))


def test_tiles_follow_the_cublas_order():
    """Scale (r, c) of a tile sits at flat offset (r % 32) * 16 + (r // 32) * 4 + c (cuBLAS 1D block scaling layout)."""
    rows, cols = 200, 6
    flat = torch.zeros(2 * 2 * 512)
    expected = torch.arange(rows * cols, dtype=torch.float32).reshape(rows, cols)
    for r in range(rows):
        for c in range(cols):
            flat[((r // 128) * 2 + c // 4) * 512 + (r % 32) * 16 + (r % 128 // 32) * 4 + c % 4] = expected[r, c]
    assert torch.equal(untile_scales(flat, rows, cols), expected)


def test_shards_subset_and_rename(tmp_path):
    save_file({"m.a": torch.ones(2), "m.b": torch.ones(3)}, tmp_path / "1.safetensors", {"x": "1"})
    save_file({"n.c": torch.ones(4)}, tmp_path / "2.safetensors")
    source = WeightSource.open(tmp_path / "1.safetensors", tmp_path / "2.safetensors")
    assert source.keys() == ["m.a", "m.b", "n.c"] and source.metadata == {"x": "1"}
    assert source.subset("m.").keys() == ["a", "b"]
    assert source.renamed({"m.a": "z"}).keys() == ["z", "m.b", "n.c"]
    assert source.renamed(lambda n: n if n.startswith("n") else None).keys() == ["n.c"]
    assert source.subset("n.").get("c").shape == (4,)
    with pytest.raises(CheckpointError, match="no tensor q"):
        source.get("q")


def test_two_files_with_the_same_tensor_are_refused(tmp_path):
    for name in ("1", "2"):
        save_file({"a": torch.ones(2)}, tmp_path / f"{name}.safetensors")
    with pytest.raises(CheckpointError, match="both hold a"):
        WeightSource.open(tmp_path / "1.safetensors", tmp_path / "2.safetensors")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.uint8, torch.bool, torch.float8_e5m2])
def test_every_dtype_reads_as_written(tmp_path, dtype):
    value = (torch.randn(3, 5) * 4).to(dtype)
    save_file({"a": value, "s": torch.tensor(3.5), "e": torch.empty(0, 4)}, tmp_path / "f.safetensors")
    source = WeightSource.open(tmp_path / "f.safetensors")
    assert torch.equal(source.get("a").view(torch.uint8), value.view(torch.uint8)) and source.get("a").dtype == dtype
    assert source.get("s").shape == () and source.get("e").shape == (0, 4)
    assert source.get("a", torch.float64).dtype == (torch.float64 if dtype.is_floating_point else dtype)


def _module() -> nn.Module:
    with torch.device("meta"):
        module = nn.Sequential(nn.Linear(4, 2), nn.BatchNorm1d(2))
    return module


def _tensors() -> dict[str, torch.Tensor]:
    tensors = {"0.weight": torch.randn(2, 4), "0.bias": torch.randn(2), "1.weight": torch.randn(2), "1.bias": torch.randn(2)}
    return tensors | {"1.running_mean": torch.randn(2), "1.running_var": torch.rand(2), "1.num_batches_tracked": torch.tensor(3)}


def test_load_fills_a_meta_module(tmp_path):
    tensors = _tensors()
    save_file({f"x.{k}": v for k, v in tensors.items()}, tmp_path / "f.safetensors")
    module = _module().requires_grad_(False)
    load_weights(module, WeightSource.open(tmp_path / "f.safetensors").renamed(lambda n: n[2:]), dtype=torch.bfloat16, device="cpu")
    assert torch.equal(module[0].weight, tensors["0.weight"].bfloat16()) and not module[0].weight.requires_grad
    assert torch.equal(module[1].running_var, tensors["1.running_var"].bfloat16())
    assert module[1].num_batches_tracked.item() == 3 and module[1].num_batches_tracked.dtype == torch.int64


def test_load_dtype_by_name(tmp_path):
    save_file(_tensors(), tmp_path / "f.safetensors")
    module = _module()
    load_weights(module, WeightSource.open(tmp_path / "f.safetensors"), dtype=lambda n: torch.float16 if n.startswith("0") else None, device="cpu")
    assert module[0].weight.dtype == torch.float16 and module[1].weight.dtype == torch.float32


def test_load_is_strict_and_names_all_faults(tmp_path):
    tensors = _tensors() | {"2.extra": torch.ones(1), "0.weight": torch.ones(2, 5)}
    del tensors["1.bias"]
    save_file(tensors, tmp_path / "f.safetensors")
    module = _module()
    with pytest.raises(CheckpointError) as caught:
        load_weights(module, WeightSource.open(tmp_path / "f.safetensors"), dtype=None, device="cpu")
    assert caught.value.code == "checkpoint.tensors"
    assert "1 missing, 1 unexpected, 1 of another shape" in caught.value.message
    for word in ("1.bias", "2.extra", "0.weight: file [2, 5], model [2, 4]"):
        assert word in caught.value.hint
    assert module[0].bias.is_meta, "nothing is loaded before all is checked"
