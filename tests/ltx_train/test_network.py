"""Acceleration settings meet the model: the same numbers however it is loaded, and what cannot go together is refused by name."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from pydantic import ValidationError

from ltx_train.checks import check_packages
from ltx_train.config import TrainConfig
from ltx_train.errors import ConfigError
from ltx_train.memory.capability import Facts
from ltx_train.memory.engine import BlockEngine
from ltx_train.memory.settings import AccelerationSection
from ltx_train.models.checkpoint import Checkpoint
from ltx_train.models.transformer import load_transformer
from ltx_train.network import engine_settings, load_network

DATA = Path(__file__).parents[1] / "parity" / "data"
CPU = torch.device("cpu")
LIVE = SimpleNamespace(warn=lambda *a: None, progress=lambda *a, **k: None)


def test_streamed_weights_are_the_loaded_ones():
    opened = Checkpoint.open(DATA / "ltx2.3.checkpoint.safetensors")
    plain = load_transformer(opened, dtype=torch.float32, device="cpu").state_dict()
    section = AccelerationSection(mixed_precision_mode="no", stream_blocks=1)
    model = load_network(opened, section, CPU, streams=("video", "audio"), live=LIVE)
    assert isinstance(model.block_runner, BlockEngine)
    assert model.block_runner.store.streams
    found = model.state_dict()
    assert set(found) == set(plain)
    assert all(torch.equal(found[name], value) for name, value in plain.items())


@pytest.mark.parametrize(("fields", "kinds", "name"), [
    ({"stream_blocks": 4}, {"frozen": False}, "Full fine-tuning"), ({"offload_activations": "on"}, {"frozen": False}, "Full fine-tuning"),
    ({"accumulate_together": 2}, {"own_layers": False}, "adapter kinds"), ({"accumulate_together": 2}, {"dropout": True}, "no dropout"),
    ({"blocks_on_disk": 2, "cuda_graphs": "on"}, {}, "blocks_on_disk"),
    ({"stream_blocks": 4}, {"own_layers": False}, "stream_blocks"), ({"float8_products": True, "quantization": "fp8"}, {"own_layers": False}, "float8_products"),
])  # fmt: skip
def test_what_cannot_go_together_is_refused_before_loading(fields, kinds, name):
    with pytest.raises(ConfigError, match=name):
        load_network(None, AccelerationSection(**fields), CPU, streams=("video",), live=LIVE, **kinds)


@pytest.mark.parametrize(("quantization", "codes"), [("int2-quanto", ["quantization.coarse"]), ("int4-quanto", [])])
def test_a_kind_that_harms_the_base_says_so(quantization, codes):
    """In the run and in its check beforehand; what it costs is measured in tests/end_to_end/test_quantised.py."""
    said = []
    live = SimpleNamespace(warn=lambda code, message, hint="": said.append((code, message)), progress=LIVE.progress)
    section = AccelerationSection(mixed_precision_mode="no", quantization=quantization)
    load_network(Checkpoint.open(DATA / "ltx2.3.checkpoint.safetensors"), section, CPU, streams=("audio",), live=live)
    assert [code for code, _ in said] == codes and all("a third higher" in message for _, message in said)
    job = TrainConfig.parse({"model": {"model_path": "m.safetensors"}, "data": {"dataset": "d"}, "lora": {}, "output_dir": "o", "acceleration": {"device": "cpu", "quantization": quantization}})
    assert [line for line in check_packages(job) if "quantization" in line] == [f"quantization: {message}" for _, message in said]


def test_a_block_is_moved_away_before_the_next_one_is_read(monkeypatch, tmp_path):
    """Loading holds one block beside those that are at rest, also where they rest on the disk."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    seen = []
    original = BlockEngine.take

    def take(self, index, block):
        loaded = [all(not p.is_meta for p in b.parameters()) for b in self.transformer.transformer_blocks]
        seen.append((index, sum(loaded)))
        original(self, index, block)

    monkeypatch.setattr(BlockEngine, "take", take)
    opened = Checkpoint.open(DATA / "ltx2.3.checkpoint.safetensors")
    layers = opened.transformer.num_layers
    plain = load_transformer(opened, dtype=torch.float32, device="cpu").state_dict()
    section = AccelerationSection(mixed_precision_mode="no", stream_blocks=layers, blocks_on_disk=layers)
    model = load_network(opened, section, CPU, streams=("video", "audio"), live=LIVE)
    assert seen == [(n, n + 1) for n in range(layers)]
    found = model.state_dict()
    assert all(torch.equal(found[name], value) for name, value in plain.items())
    model.block_runner.close()


def test_fp8_products_need_fp8_weights_and_a_card_that_has_them():
    with pytest.raises(ValidationError, match="needs quantization fp8"):
        AccelerationSection(float8_products=True)
    section = AccelerationSection(float8_products=True, quantization="fp8")
    with pytest.raises(ConfigError, match="8.9"):
        engine_settings(section, Facts(sm=86), CPU, recompute=True, dropout=False, warn=print)


def test_recompute_and_budget():
    make = lambda recompute, **fields: engine_settings(AccelerationSection(**fields), Facts.here(CPU), CPU, recompute=recompute, dropout=False, warn=print)  # noqa: E731
    assert (make(True).budget, make(True).recompute) == (0.0, True)
    assert make(False).budget == 0.6
    assert make(True, activation_budget=0.3).budget == 0.3
    with pytest.raises(ValidationError):
        AccelerationSection(activation_budget=1.5)
