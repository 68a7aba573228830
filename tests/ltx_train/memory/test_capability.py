"""The capability table with faked machines: used, replaced, refused, each with its reason."""

from __future__ import annotations

import importlib

import pytest
import torch

from ltx_train.errors import ConfigError
from ltx_train.memory.capability import Facts, capability, compile_capability, precision_capability
from ltx_train.memory.quantization import QUANTIZERS, choose

BARE = frozenset()
MACHINES = {
    "V100": Facts(sm=70), "2080": Facts(sm=75), "A100": Facts(sm=80), "3090": Facts(sm=86), "4090": Facts(sm=89), "H200": Facts(sm=90), "B200": Facts(sm=100), "5090": Facts(sm=120),
    "GTX 980": Facts(sm=52), "4090 Windows portable": Facts(sm=89, system="windows", packages=BARE, compiler=False),
    "5090 Windows with bitsandbytes": Facts(sm=120, system="windows", packages=frozenset({"bitsandbytes"}), compiler=False),
    "MI300": Facts("rocm", None), "7900 Windows": Facts("rocm", None, "windows"), "Mac": Facts("mps", None, "darwin", frozenset({"bitsandbytes"})),
    "Arc": Facts("xpu", None), "CPU": Facts("cpu", None), "CPU, bare": Facts("cpu", None, packages=BARE, compiler=False), "old torch": Facts(sm=80, float8=False),
    "FSDP": Facts(sm=90, fsdp=True),
}  # fmt: skip

# Every machine and quantiser not named here is "use".
OTHERWISE = {
    ("GTX 980", "nf4"): "int4-quanto", ("4090 Windows portable", "nf4"): "int4-quanto", ("7900 Windows", "nf4"): "int4-quanto", ("Mac", "nf4"): "int4-quanto",
    ("Arc", "nf4"): "int4-quanto", ("CPU, bare", "nf4"): "int4-quanto",
    ("Mac", "fp8"): "int8", ("Mac", "fp8-quanto"): "int8-quanto", ("Mac", "fp8uz-quanto"): "int8-quanto",
    ("old torch", "fp8"): "int8", ("old torch", "fp8-quanto"): "int8-quanto", ("old torch", "fp8uz-quanto"): "int8-quanto",
} | {("FSDP", name): None for name in QUANTIZERS}  # fmt: skip


@pytest.mark.parametrize("machine", MACHINES)
def test_quantisers(machine):
    for name in QUANTIZERS:
        verdict = capability(name, MACHINES[machine])
        expected = OTHERWISE.get((machine, name), "use")
        if expected == "use":
            assert verdict.action == "use", (machine, name)
        elif expected is None:
            assert verdict.action == "refuse" and "DDP" in verdict.reason
        else:
            assert (verdict.action, verdict.instead) == ("fallback", expected) and len(verdict.reason) > 10
            assert capability(verdict.instead, MACHINES[machine]).action == "use"
    assert capability(None, MACHINES[machine]).action == "use"


def test_choose_says_why():
    said = []
    assert choose("nf4", MACHINES["4090 Windows portable"], said.append).name == "int4-quanto"
    assert "bitsandbytes is not installed" in said[0]
    assert choose("nf4", MACHINES["5090"], said.append).name == "nf4" and len(said) == 1
    assert choose(None, MACHINES["FSDP"]) is None
    with pytest.raises(ConfigError) as error:
        choose("int8-quanto", MACHINES["FSDP"])
    assert error.value.code == "quantization.refused" and "FSDP" in error.value.hint and len(error.value.message) < 120


@pytest.mark.parametrize(
    ("machine", "mode", "expected"),
    [("V100", "bf16", "fp16"), ("2080", "bf16", "fp16"), ("A100", "bf16", None), ("5090", "bf16", None), ("V100", "fp16", None), ("CPU", "fp16", "bf16"), ("Mac", "bf16", None), ("V100", "no", None)],
)
def test_precision(machine, mode, expected):
    verdict = precision_capability(mode, MACHINES[machine])
    assert verdict.instead == expected and (verdict.action == "use") == (expected is None)


@pytest.mark.parametrize(
    ("machine", "words"),
    [("V100", ""), ("5090", ""), ("MI300", ""), ("GTX 980", "this card has 5.2"), ("4090 Windows portable", "triton-windows"), ("Mac", "nothing on mps"), ("CPU", "nothing on cpu")],
)
def test_compiling(machine, words):
    verdict = compile_capability(MACHINES[machine])
    assert (verdict.action == "use") == (words == "") and words in verdict.reason
    without = Facts(sm=90, compiler=False)
    assert "needs a C compiler" in compile_capability(without).reason


def test_facts_of_this_machine(monkeypatch):
    facts = Facts.here("cpu", fsdp=True)
    assert (facts.device, facts.sm, facts.fsdp) == ("cpu", None, True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (12, 0))
    assert Facts.here("cuda").sm == 120 or torch.version.hip is not None
    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "bitsandbytes" else real(name))
    assert "bitsandbytes" not in Facts.here("cpu").packages
