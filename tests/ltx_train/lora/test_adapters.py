"""Adapters: which modules are touched, start values, and the same numbers as peft."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import peft
import pytest
import torch
from torch import nn

from ltx_train.errors import ConfigError, LtxTrainError, MissingPackage
from ltx_train.lora.adapters import LoraSection, attach, check_start, module_seed
from ltx_train.lora.files import LoraFile, adapter_modules, warm_start
from ltx_train.lora.metadata import LoraMetadata
from ltx_train.lora.targets import TARGET_GROUPS, matches, stream_of
from ltx_train.models.linear import Linear

_spec = importlib.util.spec_from_file_location("lora_stand_in", Path(__file__).with_name("stand_in.py"))
_stand_in = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(_stand_in)
net, KINDS = _stand_in.net, _stand_in.KINDS


def test_official_defaults():
    section = LoraSection()
    assert (section.rank, section.alpha, section.dropout, section.target_modules) == (64, 64, 0.0, ["to_k", "to_q", "to_v", "to_out.0"])
    adapters = attach(net(), LoraSection(rank=4), seed=0)
    assert len(adapters.names) == 2 * 6 * 4
    assert not any("gate" in n or "ff" in n or "proj" in n for n in adapters.names)


@pytest.mark.parametrize("pattern", ["to_q", "attn1.to_q", "attn2.to_out.0", "transformer_blocks.0.ff.net.2", "net.0.proj", "proj"])
def test_matching_rule_is_pefts(pattern):
    model = net()
    ours = attach(net(), LoraSection(rank=2, target_modules=[pattern]), seed=0).names
    theirs = peft.inject_adapter_in_model(peft.LoraConfig(r=2, target_modules=[pattern]), model)
    assert ours == [n for n, m in theirs.named_modules() if isinstance(m, peft.tuners.lora.Linear)]


def test_groups():
    names = attach(net(1, 1), LoraSection(rank=2, target_modules=["re:.*"]), seed=0).names
    count = {group: sum(matches(n, group) for n in names) for group in TARGET_GROUPS}
    assert count == {
        "attention": 24, "ff": 4, "text": 8, "self_attention": 8, "video": 10, "video_attention": 8, "video_ff": 2,
        "audio": 10, "audio_attention": 8, "audio_ff": 2, "cross_modal": 8, "gates": 6,
    }  # fmt: skip
    assert all(stream_of(n) == "video" for n in names if matches(n, "video"))
    assert all(stream_of(n) == "audio" for n in names if matches(n, "audio"))
    assert all(stream_of(n) == "cross" for n in names if matches(n, "cross_modal"))


@pytest.mark.parametrize(("streams", "kinds"), [(["video"], {"video"}), (["audio"], {"audio"}), (["video", "audio"], {"video", "audio", "cross"})])
def test_absent_stream_is_never_adapted(streams, kinds):
    adapters = attach(net(), LoraSection(rank=2, target_modules=["re:.*"]), seed=0, streams=streams)
    assert {stream_of(n) for n in adapters.names} == kinds


def test_no_match_names_the_nearest():
    with pytest.raises(ConfigError) as error:
        attach(net(), LoraSection(rank=2, target_modules=["attn1.to_qq"]), seed=0)
    assert error.value.code == "lora.no_match" and "attn1.to_q" in error.value.hint and len(error.value.message) < 120
    with pytest.raises(ConfigError, match="stream that is not trained"):
        attach(net(), LoraSection(rank=2, target_modules=["audio"]), seed=0, streams=["video"])


def test_patterns_without_effect_are_told_by_field():
    section = LoraSection(
        rank=2, target_modules=["to_q", "to_nothing"], exclude_modules=["attn2.to_q", "atn1.to_q"],
        rank_pattern={"attn1.to_q": 4, "to_k": 4}, alpha_pattern={"audio_attn1.to_q": 1, "to_kk": 1},
    )  # fmt: skip
    told = ["target_modules: to_nothing", "exclude_modules: atn1.to_q", "rank_pattern: to_k", "alpha_pattern: to_kk"]
    assert attach(net(), section, seed=0).unmatched == told


@pytest.mark.parametrize(
    "fields",
    [
        {"rank_pattern": {"to_q": 0}}, {"rank_pattern": {"to_q": -1}}, {"rank_pattern": {"re:(": 2}}, {"alpha_pattern": {"to_q": 0}},
        {"alpha_pattern": {"to_q": -3}}, {"target_modules": ["re:("]}, {"target_modules": ["to_q", ""]}, {"exclude_modules": ["re:["]},
    ],
)  # fmt: skip
def test_patterns_that_cannot_work_are_refused_with_the_section(fields):
    with pytest.raises(ValueError, match=next(iter(fields))):
        LoraSection.model_validate(fields)


def test_exclude_and_patterns():
    section = LoraSection(
        rank=4, alpha=8, target_modules=["video", "cross_modal"], exclude_modules=["cross_modal", "attn2.to_k"],
        rank_pattern={"video_ff": 6, "to_q": 2}, alpha_pattern={"transformer_blocks.1.attn1.to_q": 3},
    )  # fmt: skip
    adapters = attach(net(), section, seed=0)
    assert "transformer_blocks.0.attn2.to_k" not in adapters.names and not any("audio" in n for n in adapters.names)
    ranks = {n: (m.rank, m.scale) for n, m in adapters.modules.items()}
    assert ranks["transformer_blocks.0.ff.net.2"] == (6, 8 / 6)
    assert ranks["transformer_blocks.1.attn1.to_q"] == (2, 1.5) and ranks["transformer_blocks.0.attn1.to_k"] == (4, 2.0)
    assert adapters.modules["transformer_blocks.0.ff.net.2"].tensors["lora_A.weight"].shape == (6, 24)


@pytest.mark.parametrize("kind", ["lora", "rslora"])
def test_forward_and_gradients_equal_pefts(kind):
    """Reference: peft's lora.Linear on the same base and adapter weights, float32; differences relative to the largest value."""
    ours, theirs = net(3), net(3)
    section = LoraSection(rank=4, alpha=6, kind=kind, target_modules=["to_q", "to_k", "to_v", "to_out.0"])
    adapters = attach(ours, section, seed=0)
    config = peft.LoraConfig(r=4, lora_alpha=6, target_modules=section.target_modules, use_rslora=kind == "rslora")
    theirs = peft.inject_adapter_in_model(config, theirs)
    wrapped = {n: m for n, m in theirs.named_modules() if isinstance(m, peft.tuners.lora.Linear)}
    assert set(wrapped) == set(adapters.names)
    generator = torch.Generator().manual_seed(1)
    for name, module in adapters.modules.items():
        with torch.no_grad():
            module.tensors["lora_B.weight"].copy_(0.2 * torch.randn(module.tensors["lora_B.weight"].shape, generator=generator))
            wrapped[name].lora_A["default"].weight.copy_(module.tensors["lora_A.weight"])
            wrapped[name].lora_B["default"].weight.copy_(module.tensors["lora_B.weight"])
    x = torch.randn(2, 5, 12, generator=generator)
    y, z = ours(x), theirs(x)
    assert (y - z).abs().max() / z.abs().max() < 2e-6
    y.square().sum().backward()
    z.square().sum().backward()
    checked = 0
    for name, module in adapters.modules.items():
        for suffix, part in (("lora_A.weight", "lora_A"), ("lora_B.weight", "lora_B")):
            other = getattr(wrapped[name], part)["default"].weight.grad
            if other is None:
                assert module.tensors[suffix].grad is None
                continue
            scale = other.abs().max().clamp_min(1e-12)
            assert ((module.tensors[suffix].grad - other).abs().max() / scale) < 1e-5
            checked += 1
    assert checked == 2 * 3 * 4 * 2


def test_dropout_is_on_the_input():
    model = net()
    adapters = attach(model, LoraSection(rank=2, dropout=0.999999, target_modules=["attn1.to_q"]), seed=0)
    torch.manual_seed(0)
    with torch.no_grad():
        for p in adapters.parameters():
            p.fill_(1.0)
    x = torch.randn(1, 3, 12)
    with adapters.disabled():
        base = model(x)
    assert torch.equal(model.train()(x), base)
    assert not torch.equal(model.eval()(x), base)


def test_start_values_are_pefts_for_the_same_seed():
    model = net()
    adapters = attach(model, LoraSection(rank=4), seed=7)
    for name in adapters.names[:5]:
        layer = adapters.modules[name]
        with torch.random.fork_rng():
            torch.manual_seed(module_seed(7, name))
            reference = peft.tuners.lora.Linear(nn.Linear(layer.shape[1], layer.shape[0]), "default", peft.LoraConfig(r=4), r=4, lora_alpha=4)
            torch.manual_seed(module_seed(7, name))
            reference.reset_lora_parameters("default", True)
        assert torch.equal(layer.tensors["lora_A.weight"], reference.lora_A["default"].weight)
        assert torch.equal(layer.tensors["lora_B.weight"], torch.zeros(layer.shape[0], 4))


def section_of(kind: str, **fields) -> LoraSection:
    return LoraSection(rank=4, alpha=2, kind=kind, **fields)


@pytest.mark.parametrize("kind", KINDS)
def test_start_does_not_hang_on_global_randomness_or_order(kind):
    torch.manual_seed(11)
    before = torch.random.get_rng_state()
    one = attach(net(5), section_of(kind), seed=3)
    torch.manual_seed(12)
    other = attach(net(5), section_of(kind, target_modules=["to_out.0", "to_q"]), seed=3)
    for name, value in other.state_dict().items():
        assert torch.equal(value, one.state_dict()[name]), name
    different = attach(net(5), section_of(kind), seed=4).state_dict()
    assert any(not torch.equal(different[n], v) for n, v in one.state_dict().items())
    torch.random.set_rng_state(before)
    model = net(5)
    state = torch.random.get_rng_state()
    attach(model, section_of(kind), seed=3)
    assert torch.equal(torch.random.get_rng_state(), state)


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_starts_as_the_base_trains_and_switches_off(kind):
    model = net(5)
    x = torch.randn(2, 3, 12)
    base = model(x).detach()
    adapters = attach(model, section_of(kind), seed=0)
    torch.testing.assert_close(model(x), base, rtol=1e-5, atol=1e-6)
    assert [n for n, p in model.named_parameters() if p.requires_grad] and all(p.dtype == torch.float32 for p in adapters.parameters())
    trainable = {id(p) for p in model.parameters() if p.requires_grad}
    assert trainable == {id(p) for p in adapters.parameters()}
    optimizer = torch.optim.Adam(adapters.parameters(), lr=1e-2)
    losses = []
    for _ in range(8):
        loss = (model(x) - 1).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    assert not torch.allclose(model(x), base)
    with adapters.disabled():
        torch.testing.assert_close(model(x), base, rtol=1e-6, atol=1e-7)
    assert all(p.requires_grad for p in adapters.parameters())
    assert not torch.allclose(model(x), base)


@pytest.mark.parametrize("kind", KINDS)
def test_state_goes_round(kind):
    first = attach(net(5), section_of(kind), seed=0)
    with torch.no_grad():
        for p in first.parameters():
            p.add_(1)
    second = attach(net(5), section_of(kind), seed=9)
    second.load_state_dict({n: v.clone() for n, v in first.state_dict().items()})
    assert all(torch.equal(a, b) for a, b in zip(first.state_dict().values(), second.state_dict().values()))
    state = dict(first.state_dict())
    state.pop(next(iter(state)))
    with pytest.raises(ConfigError, match="does not fit"):
        second.load_state_dict(state)


def test_quantised_base_takes_lora_and_refuses_peft_kinds():
    class Store:
        def __init__(self, weight):
            self.weight = weight
            self.shape, self.device = weight.shape, weight.device

        def dequantize(self, dtype):
            return self.weight.to(dtype)

        def to(self, device):
            return Store(self.weight.to(device))

    model = net()
    for _, module in list(model.named_modules()):
        if isinstance(module, Linear):
            module.set_quantized(Store(module.weight.detach().clone()))
    with pytest.raises(Exception, match="not quantised"):
        attach(model, section_of("dora"), seed=0)
    adapters = attach(model, section_of("lora"), seed=0)
    model(torch.randn(1, 2, 12)).sum().backward()
    assert adapters.modules["transformer_blocks.0.attn1.to_q"].tensors["lora_B.weight"].grad.abs().sum() > 0


def made(**section):
    """An adapter on one layer [80, 48], and its modules as a file has them."""
    torch.manual_seed(0)
    adapters = attach(nn.ModuleDict({"to_q": Linear(48, 80)}), LoraSection(alpha=4, target_modules=["to_q"], **section), seed=0)
    return adapters, adapter_modules(adapters)


STARTS = [
    *({"kind": "loha", "rank": rank} for rank in (2, 3)),
    *({"kind": "lokr", "rank": rank, "lokr_factor": factor} for factor in (-1, 4) for rank in (3, 4, 6, 12)),  # whole factors from rank 5 and 10 on
    {"kind": "lora", "rank": 2}, {"kind": "rslora", "rank": 5}, {"kind": "dora", "rank": 4},
]  # fmt: skip


@pytest.mark.parametrize("number", range(len(STARTS)))
def test_what_an_adapter_cannot_start_from_is_known_from_the_settings(number):
    """Of every kind, rank and factor it is refused by name just where its tensors could not be taken over."""
    _, modules = made(**STARTS[number])
    taken = []
    for own in STARTS:
        try:
            check_start(LoraSection(alpha=4, **own), modules, "old.safetensors")
        except ConfigError as error:
            assert error.code in ("lora.kind", "lora.rank") and error.message.startswith("old.safetensors ") and "load_checkpoint" in error.hint
            with pytest.raises((LtxTrainError, KeyError)):
                warm_start(made(**own)[0], LoraFile(modules, LoraMetadata()))
        else:
            taken.append(own)
            assert warm_start(made(**own)[0], LoraFile(modules, LoraMetadata())).matched == ("to_q",)
    assert STARTS[number] in taken


def test_a_missing_peft_is_told_by_the_settings(monkeypatch):
    monkeypatch.setitem(sys.modules, "peft", None)  # as if it were not installed
    for kind in KINDS:
        if kind in ("lora", "rslora"):
            assert LoraSection(kind=kind).package() is None
        else:
            with pytest.raises(MissingPackage, match=f"The adapter kind {kind} needs the package peft"):
                LoraSection(kind=kind).package()


def test_a_start_at_another_rank_says_which_rank_the_file_has():
    _, modules = made(kind="loha", rank=8)
    with pytest.raises(ConfigError) as caught:
        check_start(LoraSection(kind="loha", rank=4), modules, "old.safetensors")
    assert caught.value.message == "old.safetensors is a LoHa of rank 8; lora.rank is 4." and "set lora.rank: 8" in caught.value.hint
    with pytest.raises(ConfigError, match="holds LoHa; lora.kind is lora"):
        check_start(LoraSection(rank=8), modules, "old.safetensors")
