"""Linear: base, LoRA, quantised store; against the closed form and against peft."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from ltx_train.models.linear import Linear, LoraWeights, QuantizedWeight, linears, lora_disabled


class RoundedWeight:
    """A store for tests: int8 with one scale, counting how often it is dequantised."""

    def __init__(self, weight: torch.Tensor, device="cpu") -> None:
        self.scale = float(weight.abs().max() / 127)
        self.values = (weight / self.scale).round().to(torch.int8).to(device)
        self.calls = 0

    @property
    def shape(self) -> torch.Size:
        return self.values.shape

    @property
    def device(self) -> torch.device:
        return self.values.device

    def dequantize(self, dtype: torch.dtype) -> torch.Tensor:
        self.calls += 1
        return (self.values.float() * self.scale).to(dtype)

    def to(self, device) -> "RoundedWeight":
        moved = object.__new__(RoundedWeight)
        moved.scale, moved.values, moved.calls = self.scale, self.values.to(device), 0
        return moved


def layer_with_lora(rank: int = 3, alpha: float = 6.0, dropout: float = 0.0) -> Linear:
    torch.manual_seed(0)
    layer = Linear(8, 5)
    layer.lora = LoraWeights(8, 5, rank=rank, alpha=alpha, dropout=dropout)
    nn.init.normal_(layer.lora.B)
    return layer


def test_lora_is_the_closed_form():
    layer, x = layer_with_lora(), torch.randn(2, 4, 8)
    merged = layer.weight + 2.0 * layer.lora.B @ layer.lora.A
    torch.testing.assert_close(layer(x), F.linear(x, merged, layer.bias))


def test_equals_peft_with_gradients():
    import peft

    ours = layer_with_lora()
    model = nn.Sequential(nn.Linear(8, 5))
    model[0].load_state_dict({"weight": ours.weight, "bias": ours.bias})
    model = peft.inject_adapter_in_model(peft.LoraConfig(r=3, lora_alpha=6, target_modules=["0"]), model)
    theirs = model[0]
    theirs.lora_A["default"].weight.data.copy_(ours.lora.A)
    theirs.lora_B["default"].weight.data.copy_(ours.lora.B)
    x = torch.randn(2, 4, 8)
    a, b = ours(x), model(x)
    torch.testing.assert_close(a, b)
    a.square().sum().backward()
    b.square().sum().backward()
    torch.testing.assert_close(ours.lora.A.grad, theirs.lora_A["default"].weight.grad)
    torch.testing.assert_close(ours.lora.B.grad, theirs.lora_B["default"].weight.grad)


def test_a_new_lora_changes_nothing_and_starts_within_its_bound():
    torch.manual_seed(0)
    layer, x = Linear(16, 5), torch.randn(3, 16)
    before = layer(x)
    layer.lora = LoraWeights(16, 5, rank=64, alpha=1)
    assert torch.equal(layer(x), before)
    assert layer.lora.scale == 1 / 64
    assert LoraWeights(16, 5, rank=4).scale == 1.0
    assert layer.lora.A.abs().max() <= 0.25  # 1/sqrt(16)
    assert layer.lora.A.abs().max() > 0.2


def test_masters_are_float32_and_output_is_in_the_compute_dtype():
    layer = layer_with_lora()
    layer.weight.data, layer.bias.data = layer.weight.data.bfloat16(), layer.bias.data.bfloat16()
    x = torch.randn(4, 8, dtype=torch.bfloat16)
    y = layer(x)
    assert y.dtype == torch.bfloat16
    y.sum().backward()
    assert layer.lora.A.dtype == layer.lora.A.grad.dtype == torch.float32
    exact = F.linear(x.float(), layer.weight.float() + 2.0 * layer.lora.B @ layer.lora.A, layer.bias.float())
    assert (y.float() - exact).norm() / exact.norm() < 0.01


def test_moving_to_bfloat16_leaves_the_masters():
    layer = layer_with_lora().to(torch.bfloat16)
    assert layer.weight.dtype == torch.bfloat16
    assert layer.lora.A.dtype == layer.lora.B.dtype == torch.float32
    assert layer.lora.to("meta").A.is_meta


def test_dropout_only_in_training():
    layer, x = layer_with_lora(dropout=0.5), torch.ones(1, 8)
    layer.eval()
    assert torch.equal(layer(x), layer(x))
    layer.train()
    outputs = torch.stack([layer(x) for _ in range(400)])
    assert outputs.std(dim=0).max() > 0.1
    layer.eval()
    expected = layer(x)
    spread = outputs.std(dim=0) / 20  # standard error of 400 draws
    assert ((outputs.mean(dim=0) - expected).abs() <= 5 * spread + 1e-6).all()


def test_lora_disabled_reaches_every_layer_and_comes_back_after_an_error():
    model = nn.ModuleList([layer_with_lora(), layer_with_lora()])
    model[1].lora_enabled = False
    x = torch.randn(2, 8)
    with_lora, base = model[0](x), F.linear(x, model[0].weight, model[0].bias)
    with pytest.raises(KeyError), lora_disabled(model):
        assert torch.equal(model[0](x), base)
        raise KeyError
    assert torch.equal(model[0](x), with_lora)
    assert not model[1].lora_enabled
    assert [name for name, _ in linears(model)] == ["0", "1"]


@pytest.mark.parametrize("bias", [True, False])
def test_quantised_equals_the_dequantised_layer(bias):
    torch.manual_seed(1)
    plain, layer = Linear(8, 5, bias=bias), Linear(8, 5, bias=bias)
    store = RoundedWeight(plain.weight.detach())
    assert isinstance(store, QuantizedWeight)
    plain.weight.data = store.dequantize(torch.float32)
    if bias:
        layer.bias.data.copy_(plain.bias.data)
    layer.set_quantized(store)
    for one in (plain, layer):
        one.lora = LoraWeights(8, 5, rank=2)
        nn.init.constant_(one.lora.A, 0.3)
        nn.init.constant_(one.lora.B, 0.2)
    x = torch.randn(2, 4, 8, requires_grad=True)
    y = torch.randn(2, 4, 8).copy_(x.detach()).requires_grad_()
    torch.testing.assert_close(layer(x), plain(y))
    layer(x).square().sum().backward()
    plain(y).square().sum().backward()
    torch.testing.assert_close(x.grad, y.grad)
    torch.testing.assert_close(layer.lora.A.grad, plain.lora.A.grad)
    if bias:
        torch.testing.assert_close(layer.bias.grad, plain.bias.grad)
    torch.testing.assert_close(layer.base_weight(torch.float32), plain.weight)
    assert "weight" not in layer.state_dict()


def test_quantised_forward_keeps_no_dequantised_copy():
    layer = Linear(8, 5)
    layer.set_quantized(RoundedWeight(layer.weight.detach()))
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t.shape) or t, lambda t: t):
        y = layer(torch.randn(3, 8, requires_grad=True))
    assert saved == []
    y.sum().backward()
    assert layer.quantized.calls == 2


def test_quantised_store_moves_with_the_module():
    model = nn.Sequential(Linear(8, 5))
    model[0].set_quantized(RoundedWeight(model[0].weight.detach()))
    store = model[0].quantized
    assert model.to(torch.bfloat16)[0].quantized is store
    assert model.to("meta")[0].quantized.device.type == "meta"


def test_a_store_of_another_shape_is_refused():
    with pytest.raises(AssertionError):
        Linear(8, 5).set_quantized(RoundedWeight(torch.ones(8, 5)))
