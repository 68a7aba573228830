"""LoRA editing: merge, resize, extract, strip, convert, each against plain linear algebra."""

from __future__ import annotations

import json

import pytest
import safetensors
import safetensors.torch
import torch

from ltx_train.errors import CheckpointError, ConfigError, LtxTrainError
from ltx_train.lora.edit import convert, extract, merge, resize, strip
from ltx_train.lora.files import LoraFile, read_lora, write_modules
from ltx_train.lora.lowrank import decompose, low_rank, rank_for
from ltx_train.lora.metadata import LoraMetadata
from ltx_train.lora.module import LoraModule

NAMES = ("transformer_blocks.0.attn1.to_q", "transformer_blocks.0.audio_attn1.to_q", "transformer_blocks.1.audio_to_video_attn.to_k")
G = torch.Generator().manual_seed(0)


def randn(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=G)


def lora_of(rank: int = 4, alpha: float = 8.0, out: int = 10, width: int = 12) -> LoraFile:
    modules = {n: LoraModule(n, "lora", {"lora_A": randn(rank, width), "lora_B": randn(out, rank)}, alpha) for n in NAMES}
    return LoraFile(modules, LoraMetadata(family="ltx2.3", rank=rank, alpha=alpha), ("comfyui",))


def checkpoint(path, prefix: str = "model.diffusion_model.", dtype=torch.bfloat16) -> dict[str, torch.Tensor]:
    sd = {f"{prefix}{n}.weight": randn(10, 12).to(dtype) for n in NAMES} | {f"{prefix}{n}.bias": randn(10).to(dtype) for n in NAMES}
    sd |= {f"{prefix}scale_shift_table": randn(2, 12), "vae.x": randn(3), f"{prefix}video_embeddings_connector.transformer_1d_blocks.0.attn1.to_q.weight": randn(10, 12)}
    safetensors.torch.save_file(sd, path, {"config": json.dumps({"transformer": {"a": 1}}), "model_version": "2.3.0"})
    return sd


@pytest.mark.parametrize("prefix", ["model.diffusion_model.", "diffusion_model.", ""])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_merge_is_the_sum_rounded_once(prefix, dtype, tmp_path):
    before = checkpoint(tmp_path / "base.safetensors", prefix, dtype)
    one, two = lora_of(), lora_of(2, 1.0)
    seen = []
    out = merge(tmp_path / "base.safetensors", [(one, 0.7), (two, -1.0)], tmp_path / "out.safetensors", progress=lambda n, total: seen.append((n, total)))
    after = safetensors.torch.load_file(out)
    assert set(after) == set(before) and seen[-1] == (len(before), len(before))
    for name in NAMES:
        a, b = one.modules[name].tensors, two.modules[name].tensors
        expected = before[f"{prefix}{name}.weight"].float() + 0.7 * 2.0 * a["lora_B"] @ a["lora_A"] - 0.5 * b["lora_B"] @ b["lora_A"]
        torch.testing.assert_close(after[f"{prefix}{name}.weight"], expected.to(dtype))
    for name in set(before) - {f"{prefix}{n}.weight" for n in NAMES}:
        assert torch.equal(before[name], after[name]) and before[name].dtype == after[name].dtype
    with safetensors.safe_open(out, "pt") as file:
        assert json.loads(file.metadata()["config"]) == {"transformer": {"a": 1}} and file.metadata()["model_version"] == "2.3.0"


def test_merge_of_every_kind(tmp_path):
    before = checkpoint(tmp_path / "base.safetensors", dtype=torch.float32)
    modules = {
        NAMES[0]: LoraModule(NAMES[0], "dora", {"lora_A": randn(2, 12), "lora_B": randn(10, 2), "dora_scale": randn(10, 1).abs()}, 2.0),
        NAMES[1]: LoraModule(NAMES[1], "lokr", {"lokr_w1": randn(2, 3), "lokr_w2": randn(5, 4)}, None),
        NAMES[2]: LoraModule(NAMES[2], "full", {"diff": randn(10, 12), "diff_b": randn(10)}, None),
    }
    after = safetensors.torch.load_file(merge(tmp_path / "base.safetensors", [(LoraFile(modules, LoraMetadata()), 1.0)], tmp_path / "o.safetensors"))
    p = "model.diffusion_model."
    d = modules[NAMES[0]].tensors
    w = before[f"{p}{NAMES[0]}.weight"] + d["lora_B"] @ d["lora_A"]
    torch.testing.assert_close(after[f"{p}{NAMES[0]}.weight"], d["dora_scale"] * w / w.norm(dim=1, keepdim=True))
    k = modules[NAMES[1]].tensors
    torch.testing.assert_close(after[f"{p}{NAMES[1]}.weight"], before[f"{p}{NAMES[1]}.weight"] + torch.kron(k["lokr_w1"], k["lokr_w2"]))
    torch.testing.assert_close(after[f"{p}{NAMES[2]}.weight"], before[f"{p}{NAMES[2]}.weight"] + modules[NAMES[2]].tensors["diff"])
    torch.testing.assert_close(after[f"{p}{NAMES[2]}.bias"], before[f"{p}{NAMES[2]}.bias"] + modules[NAMES[2]].tensors["diff_b"])


@pytest.mark.parametrize("how", ["fp8", "int8 with scale", "bf16 with scale"])
def test_merge_refuses_quantised(how, tmp_path):
    sd = checkpoint(tmp_path / "base.safetensors")
    layer = f"model.diffusion_model.{NAMES[0]}"
    if how == "fp8":
        sd[f"{layer}.weight"] = sd[f"{layer}.weight"].to(torch.float8_e4m3fn)
    else:
        sd[f"{layer}.weight_scale"] = torch.ones(())
        sd[f"{layer}.weight"] = sd[f"{layer}.weight"].to(torch.int8) if how.startswith("int8") else sd[f"{layer}.weight"]
    safetensors.torch.save_file(sd, tmp_path / "base.safetensors")
    with pytest.raises(CheckpointError, match="is quantised"):
        merge(tmp_path / "base.safetensors", [(lora_of(), 1.0)], tmp_path / "o.safetensors")
    assert not (tmp_path / "o.safetensors").exists()


def test_merge_refuses_another_model_and_its_own_input(tmp_path):
    checkpoint(tmp_path / "base.safetensors")
    with pytest.raises(LtxTrainError, match="the model has"):
        merge(tmp_path / "base.safetensors", [(lora_of(out=11), 1.0)], tmp_path / "o.safetensors")
    for short in ({"diff": torch.ones(3, 3)}, {"diff_b": torch.ones(3)}):
        lora = LoraFile({NAMES[0]: LoraModule(NAMES[0], "full", short, None)}, LoraMetadata())
        with pytest.raises(LtxTrainError, match="the LoRA is for"):
            merge(tmp_path / "base.safetensors", [(lora, 1.0)], tmp_path / "o.safetensors")
    foreign = LoraFile({"transformer_blocks.9.attn1.to_q": LoraModule("transformer_blocks.9.attn1.to_q", "lora", {}, None)}, LoraMetadata())
    with pytest.raises(LtxTrainError, match="has no weight"):
        merge(tmp_path / "base.safetensors", [(foreign, 1.0)], tmp_path / "o.safetensors")
    with pytest.raises(ConfigError, match="must not replace"):
        merge(tmp_path / "base.safetensors", [(lora_of(), 1.0)], tmp_path / "base.safetensors")


def test_a_merge_that_is_no_longer_finite_is_not_saved(tmp_path):
    checkpoint(tmp_path / "base.safetensors")
    with pytest.raises(LtxTrainError, match=r"merged at 1e\+39"):
        merge(tmp_path / "base.safetensors", [(lora_of(), 1e39)], tmp_path / "o.safetensors")
    assert [p.name for p in tmp_path.iterdir()] == ["base.safetensors"]


def test_low_rank_is_the_truncated_svd():
    """Reference: Eckart-Young with torch.linalg.svd of the whole matrix."""
    a, b = randn(6, 20), randn(15, 6)
    u, s, vh = torch.linalg.svd(b @ a)
    small_a, small_b, error = low_rank(a, b, 3)
    torch.testing.assert_close(small_b @ small_a, u[:, :3] * s[:3] @ vh[:3], rtol=1e-4, atol=1e-4)
    assert error == pytest.approx((s[3:].norm() / s.norm()).item(), rel=1e-4)
    assert low_rank(a, b, 99)[2] == pytest.approx(0, abs=1e-6)
    kept = s.square().cumsum(0) / s.square().sum()
    assert rank_for(a, b, float(kept[1]) - 1e-6) == 2 and rank_for(a, b, float(kept[1]) + 1e-6) == 3 and rank_for(a, b * 0, 0.9) == 1


@pytest.mark.parametrize("size", [40, 1100])
def test_decompose_finds_a_low_rank_matrix(size):
    m = randn(size, 3) @ randn(3, size + 7)
    a, b = decompose(m, 3)
    assert (a.shape, b.shape) == ((3, size + 7), (size, 3))
    assert (b @ a - m).norm() / m.norm() < 1e-4


def test_resize():
    lora = lora_of(rank=4, alpha=8.0)
    same = resize(lora, 4)
    assert all(error < 1e-6 for error in same.errors.values())
    for name in NAMES:
        torch.testing.assert_close(same.lora.modules[name].product(), lora.modules[name].product(), rtol=1e-4, atol=1e-4)
    less = resize(lora, 2)
    assert less.lora.ranks == (2,) and less.lora.metadata.rank == 2 and all(0 < e < 1 for e in less.errors.values())
    by_energy = resize(lora, energy=0.9)
    assert all(e <= 0.1**0.5 + 1e-6 for e in by_energy.errors.values())
    for bad in ({}, {"rank": 0}, {"energy": 1.5}):
        with pytest.raises(ConfigError, match="needs a rank"):
            resize(lora, **bad)


def test_extract_is_the_inverse_of_merge(tmp_path):
    checkpoint(tmp_path / "base.safetensors", dtype=torch.float32)
    lora = lora_of()
    merge(tmp_path / "base.safetensors", [(lora, 1.0)], tmp_path / "tuned.safetensors")
    got = extract(tmp_path / "base.safetensors", tmp_path / "tuned.safetensors", 4)
    assert set(got.modules) == set(NAMES)
    for name in NAMES:
        torch.testing.assert_close(got.modules[name].product(), lora.modules[name].product(), rtol=1e-3, atol=1e-3)
    with pytest.raises(LtxTrainError, match="do not differ"):
        extract(tmp_path / "base.safetensors", tmp_path / "base.safetensors", 4)


@pytest.mark.parametrize(("keep", "left"), [(["video"], [0]), (["audio"], [1]), (["cross"], [2]), (["video", "cross_modal"], [0, 2])])
def test_strip(keep, left):
    assert list(strip(lora_of(), keep).modules) == [NAMES[i] for i in left]


def test_strip_refuses():
    with pytest.raises(ConfigError, match="Unknown modality sound"):
        strip(lora_of(), ["sound"])
    with pytest.raises(LtxTrainError, match="no module of cross"):
        strip(strip(lora_of(), ["video"]), ["cross"])


def test_convert(tmp_path):
    lora = lora_of()
    source = write_modules(tmp_path / "a.safetensors", lora.modules, lora.metadata, torch.float32, "kohya")
    back = read_lora(convert(read_lora(source), tmp_path / "b.safetensors", "comfyui", torch.float32))
    assert back.layouts == ("comfyui",) and back.metadata.family == "ltx2.3"
    for name in NAMES:
        torch.testing.assert_close(back.modules[name].product(), lora.modules[name].product())
    with pytest.raises(ConfigError, match="Unknown LoRA layout"):
        convert(lora, tmp_path / "c.safetensors", "flux")
