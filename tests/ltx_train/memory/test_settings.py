"""The acceleration section: official fields and defaults, names, what auto means."""

from __future__ import annotations

import pytest
import torch
from pydantic import ValidationError

from ltx_train.memory import settings
from ltx_train.memory.capability import Facts
from ltx_train.memory.quantization import QUANTIZERS
from ltx_train.memory.settings import QUANTIZATIONS, AccelerationSection


def test_official_fields_and_defaults():
    """official_trainer.md 1.5"""
    dump = AccelerationSection().model_dump()
    official = {"mixed_precision_mode": "bf16", "quantization": None, "load_text_encoder_in_8bit": False, "offload_optimizer_during_validation": False}
    assert {k: dump[k] for k in official} == official
    for mode in ("no", "fp16", "bf16", None):
        assert AccelerationSection(mixed_precision_mode=mode).mixed_precision_mode == mode
    for name in ("int8-quanto", "int4-quanto", "int2-quanto", "fp8-quanto", "fp8uz-quanto"):
        assert AccelerationSection(quantization=name).quantization == name


def test_names_are_those_of_the_quantisers():
    assert sorted(QUANTIZATIONS) == sorted(QUANTIZERS)
    assert AccelerationSection(quantization="none").quantization is None


@pytest.mark.parametrize(
    ("fields", "words"),
    [({"quantization": "int8-quant"}, "did you mean int8"), ({"stream_blocks": -1}, "at least 0"), ({"device": "gpu"}, "pattern"), ({"compile": "yes"}, "auto"), ({"quantisation": "int8"}, "Extra inputs")],
)
def test_nonsense_is_refused(fields, words):
    with pytest.raises(ValidationError, match=words):
        AccelerationSection(**fields)


def test_round_trip():
    section = AccelerationSection(quantization="nf4", stream_blocks=3, compile="off", memory_limit_gb=11.5)
    assert AccelerationSection.model_validate(section.model_dump(mode="json")) == section


def test_dtypes_and_switches(monkeypatch):
    section = AccelerationSection()
    assert section.dtype == torch.bfloat16 and AccelerationSection(mixed_precision_mode="no").dtype == torch.float32
    assert section.compute_dtype("cpu") == torch.bfloat16 and AccelerationSection(mixed_precision_mode="fp16").compute_dtype("cpu") == torch.bfloat16
    monkeypatch.setattr(settings.Facts, "here", classmethod(lambda cls, device, fsdp=False: Facts(sm=75)))
    assert section.compute_dtype("cuda") == torch.float16 and section.compiles("cuda") == (True, "")
    assert AccelerationSection(compile="off").compiles("cuda") == (False, "")
    assert [section.checkpoints_activations(x) for x in (True, False)] == [True, False]
    assert AccelerationSection(activation_checkpointing="off").checkpoints_activations(True) is False
    assert AccelerationSection(activation_checkpointing="on").checkpoints_activations(False) is True
