"""Quantisers: optimum-quanto's numbers, stated errors, exact gradients, nothing kept, exclusions, loading, training."""

from __future__ import annotations

import platform
import sys
from pathlib import Path

import pytest
import safetensors.torch
import torch

from ltx_train.errors import CheckpointError
from ltx_train.geometry import AudioGrid, VideoGrid
from ltx_train.lora.adapters import LoraSection, attach
from ltx_train.memory.quantization import QUANTIZERS, is_excluded, load_quantized, quantize_linears, weight_bytes
from ltx_train.memory.stores import AsStored, Nf4, pack
from ltx_train.models.checkpoint import Checkpoint
from ltx_train.models.linear import Linear, QuantizedWeight, linears
from ltx_train.models.modality import Modality
from ltx_train.models.transformer import load_transformer
from tests.quantised_files import repacked

DATA = Path(__file__).parents[2] / "parity" / "data"
NAMES = sorted(QUANTIZERS)

# Largest relative Frobenius error allowed for a normal weight [256, 512], and for y and dx through it in float32. Measured:
# int8 0.0065, int8-quanto 0.0075, fp8 and its quanto forms 0.0263, nf4 0.092, int4 0.100, int2 0.50 (y and dx within 2 % of these).
ERROR = {"int8": 0.007, "int8-quanto": 0.008, "fp8": 0.028, "fp8-quanto": 0.028, "fp8uz-quanto": 0.028, "nf4": 0.097, "int4-quanto": 0.105, "int2-quanto": 0.53}


def weight(out: int = 256, inputs: int = 512, dtype=torch.float32) -> torch.Tensor:
    return (0.02 * torch.randn(out, inputs, generator=torch.Generator().manual_seed(0))).to(dtype)


def relative(a: torch.Tensor, b: torch.Tensor) -> float:
    return ((a.float() - b.float()).norm() / b.float().norm()).item()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_error_is_as_stated(name, dtype):
    plain = weight(dtype=dtype)
    store = QUANTIZERS[name]().quantize(plain)
    assert isinstance(store, QuantizedWeight) and tuple(store.shape) == (256, 512) and store.device.type == "cpu"
    back = store.dequantize(dtype)
    assert back.dtype == dtype and back.shape == plain.shape
    assert ERROR[name] / 3 < relative(back, plain) < ERROR[name] * (1.05 if dtype == torch.bfloat16 else 1)
    if dtype == torch.bfloat16:
        assert store.nbytes == pytest.approx(256 * 512 * QUANTIZERS[name].bits / 8, rel=0.02)
    assert torch.equal(store.to("cpu").dequantize(dtype), back)


@pytest.mark.parametrize("name", NAMES)
def test_forward_and_backward_are_those_of_the_dequantised_weight(name):
    """Exactly: the layer computes with the store's own numbers; and within the stated error of the plain layer."""
    layer, plain = Linear(512, 256), Linear(512, 256)
    with torch.no_grad():
        layer.weight.copy_(weight())
        plain.weight.copy_(weight())
        plain.bias.copy_(layer.bias)
    layer.requires_grad_(False)
    layer.set_quantized(QUANTIZERS[name]().quantize(layer.weight))
    x = torch.randn(3, 7, 512, generator=torch.Generator().manual_seed(1)).requires_grad_(True)
    g = torch.randn(3, 7, 256, generator=torch.Generator().manual_seed(2))
    y = layer(x)
    (dx,) = torch.autograd.grad(y, x, g)
    dense = layer.quantized.dequantize(torch.float32)
    torch.testing.assert_close(y, torch.nn.functional.linear(x, dense, layer.bias), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(dx, g @ dense, rtol=1e-6, atol=1e-6)
    z = plain(x)
    (dz,) = torch.autograd.grad(z, x, g)
    assert relative(y - layer.bias, z - plain.bias) < ERROR[name] * 1.1 and relative(dx, dz) < ERROR[name] * 1.1


@pytest.mark.parametrize("name", NAMES)
def test_no_plain_copy_is_kept_for_the_backward_pass(name):
    layer = Linear(512, 256).requires_grad_(False)
    layer.set_quantized(QUANTIZERS[name]().quantize(layer.weight.detach()))
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t.numel()) or t, lambda t: t):
        y = layer(torch.randn(2, 512, requires_grad=True))
    y.sum().backward()
    assert not [n for n in saved if n >= 256 * 512]
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t.numel()) or t, lambda t: t):
        torch.nn.functional.linear(torch.randn(2, 512, requires_grad=True), torch.randn(256, 512))
    assert [n for n in saved if n >= 256 * 512]  # the control: a plain layer keeps its weight


# --- optimum-quanto's numbers ---


def quantos_weight(name: str, plain: torch.Tensor, monkeypatch) -> torch.Tensor:
    """Reference: optimum-quanto's QLinear, quantised and dequantised, its kernel-agnostic tensors, no compiled unpacking."""
    if platform.machine() == "aarch64":
        pytest.skip("requirements.txt leaves optimum-quanto out on aarch64")
    from optimum import quanto
    from optimum.quanto.tensor.packed import PackedTensor
    from optimum.quanto.tensor.weights import quantization as module

    def unpack(self):  # the documented packing, read without quanto's C++ extension
        mask = 2**self._bits - 1
        return torch.cat([(self._data >> (self._bits * i)) & mask for i in range(8 // self._bits)])[: self.shape[0]]

    monkeypatch.setattr(PackedTensor, "unpack", unpack)
    real = module.quantize_weight
    monkeypatch.setattr("optimum.quanto.nn.qmodule.quantize_weight", lambda *args, **kw: real(*args, **{**kw, "optimized": False}))
    linear = torch.nn.Linear(plain.shape[1], plain.shape[0], dtype=plain.dtype)
    linear.weight.data.copy_(plain)
    kind = {"int8": quanto.qint8, "int4": quanto.qint4, "int2": quanto.qint2, "fp8": quanto.qfloat8_e4m3fn, "fp8uz": quanto.qfloat8_e4m3fnuz}
    layer = quanto.QLinear.from_module(linear, weights=kind[name.removesuffix("-quanto")])
    layer.freeze()
    return layer.weight.dequantize()


@pytest.mark.parametrize("name", [n for n in NAMES if n.endswith("-quanto")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("shape", [(64, 256), (33, 96), (32, 160), (7, 100)], ids=str)
def test_numbers_are_quantos(name, dtype, shape, monkeypatch):
    plain = weight(*shape, dtype=dtype)
    ours = QUANTIZERS[name]().quantize(plain).dequantize(dtype)
    assert torch.equal(ours, quantos_weight(name, plain, monkeypatch))


@pytest.mark.skipif(sys.platform == "darwin", reason="requirements.txt leaves bitsandbytes out on a Mac")
def test_nf4_is_bitsandbytes_linear4bit():
    """Reference: bitsandbytes' own Linear4bit with nf4 and compressed statistics."""
    import bitsandbytes as bnb

    plain = weight()
    layer = bnb.nn.Linear4bit(512, 256, bias=False, quant_type="nf4", compress_statistics=True, compute_dtype=torch.float32)
    layer.weight = bnb.nn.Params4bit(plain.clone(), requires_grad=False, quant_type="nf4", compress_statistics=True)
    layer = layer.to("cpu")
    x = torch.randn(5, 512, generator=torch.Generator().manual_seed(3))
    store = QUANTIZERS["nf4"]().quantize(plain)
    assert isinstance(store, Nf4)
    reference = bnb.functional.dequantize_4bit(layer.weight.data, layer.weight.quant_state) if layer.weight.quant_state is not None else None
    if reference is not None:
        assert torch.equal(store.dequantize(torch.float32), reference.float())
    torch.testing.assert_close(x @ store.dequantize(torch.float32).T, layer(x), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("bits", [2, 4])
@pytest.mark.parametrize("rows", [1, 2, 3, 7, 8])
def test_packing_goes_round(bits, rows):
    values = torch.randint(0, 2**bits, (rows, 5), dtype=torch.uint8, generator=torch.Generator().manual_seed(rows))
    from ltx_train.memory.stores import PackedAffine

    store = PackedAffine(pack(values, bits), torch.ones(rows, 1), torch.zeros(rows, 1), bits, (rows, 5))
    assert torch.equal(store.unpacked(), values)


@pytest.mark.parametrize("name", NAMES)
def test_zero_rows_stay_zero(name):
    plain = weight()
    plain[3] = 0
    plain[200] = 0
    back = QUANTIZERS[name]().quantize(plain).dequantize(torch.float32)
    assert torch.isfinite(back).all() and back[3].abs().max() == 0 and back[200].abs().max() == 0


# --- models ---

CHECKPOINTS = ["ltxv0.9.5", "ltx2", "ltx2.3", "ltx2.5"]


def opened(name: str) -> Checkpoint:
    return Checkpoint.open(DATA / f"{name}.checkpoint.safetensors")


@pytest.mark.parametrize("family", CHECKPOINTS)
def test_loading_quantises_blocks_and_nothing_that_is_excluded(family):
    checkpoint = opened(family)
    seen = []
    model = load_quantized(checkpoint, QUANTIZERS["int8"](), dtype=torch.float32, device="cpu", progress=lambda n, total: seen.append((n, total)))
    plain = load_transformer(checkpoint, dtype=torch.float32, device="cpu")
    done = [name for name, layer in linears(model) if layer.quantized is not None]
    kept = [name for name, layer in linears(model) if layer.quantized is None]
    assert done and all(name.startswith("transformer_blocks.") for name in done)
    everything = len(plain.state_dict())
    assert seen[-1] == (everything, everything) and len(seen) > len(done)
    assert all(any(part in name for part in ("patchify", "proj_out", "adaln", "caption_projection", "gate")) for name in kept)
    assert {"patchify_proj", "proj_out", "adaln_single.linear", "adaln_single.emb.timestep_embedder.linear_1"} <= set(kept)
    assert all(is_excluded(name) for name in kept) and not any(is_excluded(name) for name in done)
    for name, layer in linears(model):  # the same as loading plainly and quantising in place
        reference = plain.get_submodule(name).weight
        expected = QUANTIZERS["int8"]().quantize(reference).dequantize(torch.float32) if name in done else reference
        assert torch.equal(layer.base_weight(torch.float32), expected)
    assert {n: tuple(p.shape) for n, p in plain.named_parameters() if n.removesuffix(".weight") not in done} == {n: tuple(p.shape) for n, p in model.named_parameters()}
    assert quantize_linears(plain, QUANTIZERS["int8"]()) == done
    assert not any(p.requires_grad for p in model.parameters()) and weight_bytes(model) == weight_bytes(plain)


def test_no_quantiser_is_the_plain_model():
    model = load_quantized(opened("ltx2.3"), None, dtype=torch.float32, device="cpu")
    plain = load_transformer(opened("ltx2.3"), dtype=torch.float32, device="cpu")
    assert all(torch.equal(a, b) for a, b in zip(model.state_dict().values(), plain.state_dict().values()))
    assert list(model.state_dict()) == list(plain.state_dict())


def test_video_only_loads_no_audio():
    model = load_quantized(opened("ltx2.3"), QUANTIZERS["int8"](), dtype=torch.float32, device="cpu", audio=False)
    assert not [n for n, _ in model.named_modules() if "audio" in n]


def test_a_block_is_handed_over_before_the_next_one_is_begun():
    """With the places of those that follow still empty: who takes it away needs room for one."""
    seen = []

    def whole(model, index):
        there = [not any(p.is_meta for p in block.parameters()) for block in model.transformer_blocks]
        seen.append((index, there.count(True)))

    model = load_quantized(opened("ltx2.3"), QUANTIZERS["int8"](), dtype=torch.float32, device="cpu", whole=whole)
    assert seen == [(index, index + 1) for index in range(len(model.transformer_blocks))]


def stored_checkpoint(tmp_path, kind: str) -> tuple[Path, dict[str, torch.Tensor]]:
    """The tiny LTX-2.3 file with its attention weights as fp8-scaled or int8, as repacks have them; and their exact numbers."""
    path = tmp_path / f"{kind}.safetensors"
    wanted = lambda key: "transformer_blocks." in key and ".attn1.to_" in key and "connector" not in key  # noqa: E731
    numbers = repacked(DATA / "ltx2.3.checkpoint.safetensors", path, kind, wanted)
    return path, {layer.removeprefix("model.diffusion_model."): value for layer, value in numbers.items()}


@pytest.mark.parametrize("kind", ["fp8", "int8"])
def test_stored_weights_are_trained_on_as_they_are(kind, tmp_path):
    path, numbers = stored_checkpoint(tmp_path, kind)
    checkpoint = Checkpoint.open(path)
    model = load_quantized(checkpoint, None, dtype=torch.float32, device="cpu")
    kept = {name: layer for name, layer in linears(model) if layer.quantized is not None}
    assert set(kept) == set(numbers) and all(isinstance(layer.quantized, AsStored) for layer in kept.values())
    for name, value in numbers.items():
        assert torch.equal(kept[name].base_weight(torch.float32), value)
    expanded = load_quantized(checkpoint, None, dtype=torch.float32, device="cpu", keep_stored=False)
    assert not [1 for _, layer in linears(expanded) if layer.quantized is not None]
    for name, value in numbers.items():
        assert torch.equal(expanded.get_submodule(name).weight, value)
    mixed = load_quantized(checkpoint, QUANTIZERS["int4-quanto"](), dtype=torch.float32, device="cpu")
    assert not [1 for _, layer in linears(mixed) if isinstance(layer.quantized, AsStored)]  # 4 bits were asked for
    eight = load_quantized(checkpoint, QUANTIZERS["int8"](), dtype=torch.float32, device="cpu")
    assert {n for n, layer in linears(eight) if isinstance(layer.quantized, AsStored)} == set(numbers)


def test_a_misshapen_tensor_is_named(tmp_path):
    sd = safetensors.torch.load_file(DATA / "ltx2.3.checkpoint.safetensors")
    with safetensors.safe_open(DATA / "ltx2.3.checkpoint.safetensors", "pt") as file:
        metadata = file.metadata()
    key = next(k for k in sd if k.endswith("transformer_blocks.0.ff.net.2.weight") and "connector" not in k)
    sd[key] = torch.zeros(3, 5)
    safetensors.torch.save_file(sd, tmp_path / "x.safetensors", metadata)
    with pytest.raises(CheckpointError, match=r"ff\.net\.2"):
        load_quantized(Checkpoint.open(tmp_path / "x.safetensors"), QUANTIZERS["int8"](), dtype=torch.float32, device="cpu")


def inputs(model) -> tuple[Modality, Modality]:
    g = torch.Generator().manual_seed(4)
    randn = lambda *shape: torch.randn(*shape, generator=g)  # noqa: E731
    c, video, audio = model.config, VideoGrid(2, 2, 2), AudioGrid(6)
    made = []
    for grid, channels, width in ((video, c.in_channels, c.cross_attention_dim), (audio, c.audio_in_channels, c.audio_cross_attention_dim)):
        positions = grid.positions().expand(2, *grid.positions().shape[-3:])
        tokens = positions.shape[2]
        made.append(Modality(randn(2, tokens, channels), torch.tensor([0.4, 0.8]), torch.tensor([[0.4], [0.8]]).expand(2, tokens), positions, randn(2, 5, width)))
    return made[0], made[1]


def tiny_training(name: str | None, steps: int = 6, checkpoint: Checkpoint | None = None) -> tuple[float, float]:
    """First and last loss of a LoRA on fixed targets over a tiny LTX-2.3 base in bfloat16, quantised or not."""
    quantizer = None if name is None else QUANTIZERS[name]()
    model = load_quantized(checkpoint or opened("ltx2.3"), quantizer, dtype=torch.bfloat16, device="cpu")
    adapters = attach(model, LoraSection(rank=4, alpha=4, target_modules=["attention", "ff"]), seed=0)
    video, audio = inputs(model)
    g = torch.Generator().manual_seed(9)
    goals = [torch.randn(*m.tokens.shape[:2], n, generator=g) for m, n in ((video, model.config.out_channels), (audio, model.config.audio_out_channels))]
    optimizer = torch.optim.AdamW(adapters.parameters(), lr=2e-2)
    losses = []
    for _ in range(steps):
        v, a = model(video, audio)
        loss = (v.float() - goals[0]).square().mean() + (a.float() - goals[1]).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses[0], losses[-1]


@pytest.fixture(scope="module")
def bf16_losses():
    return tiny_training(None)


@pytest.mark.parametrize("name", NAMES)
def test_training_on_a_quantised_base_ends_within_2_percent_of_bf16(name, bf16_losses):
    """int2 too: this base knows nothing that its error could harm. What it does to one that does: tests/end_to_end/test_quantised.py."""
    assert_ends_alike(tiny_training(name), bf16_losses)


@pytest.mark.parametrize("kind", ["fp8", "int8"])
def test_training_on_a_file_with_quantised_weights_ends_within_2_percent_of_bf16(kind, bf16_losses, tmp_path):
    path, _ = stored_checkpoint(tmp_path, kind)
    assert_ends_alike(tiny_training(None, checkpoint=Checkpoint.open(path)), bf16_losses)


def assert_ends_alike(losses, bf16_losses):
    first, last = losses
    assert last < 0.9 * first
    assert last == pytest.approx(bf16_losses[1], rel=0.02)
