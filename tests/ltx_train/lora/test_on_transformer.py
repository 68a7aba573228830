"""Adapters on the real transformer of every family, tiny: attached, trained a step, saved, checked, warm-started."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from ltx_train.geometry import AudioGrid, VideoGrid
from ltx_train.lora.adapters import LoraSection, attach
from ltx_train.lora.files import base_shapes, read_lora, self_check, warm_start, write_lora
from ltx_train.lora.metadata import LoraMetadata
from ltx_train.lora.targets import stream_of
from ltx_train.models.checkpoint import Checkpoint
from ltx_train.models.modality import Modality
from ltx_train.models.transformer import load_transformer

DATA = Path(__file__).parents[2] / "parity" / "data"
FAMILIES = ("ltxv0.9.5", "ltx2", "ltx2.3", "ltx2.5")


def load(family: str):
    return load_transformer(Checkpoint.open(DATA / f"{family}.checkpoint.safetensors"), dtype=torch.float32, device="cpu")


def inputs(model):
    """One small sample a stream; the context is what the caption projection or the cross attention reads."""
    g, c = torch.Generator().manual_seed(4), model.config
    rows = [(VideoGrid(2, 2, 2), c.in_channels, c.cross_attention_dim), (AudioGrid(6), c.audio_in_channels, c.audio_cross_attention_dim)]
    made = []
    for grid, channels, width in rows[: 2 if model.has_audio else 1]:
        positions = grid.positions()
        tokens = positions.shape[-2]
        context = torch.randn(1, 5, c.caption_channels or width, generator=g)
        made.append(
            Modality(torch.randn(1, tokens, channels, generator=g), torch.tensor([0.7]), torch.full((1, tokens), 0.7), positions.reshape(1, -1, tokens, 2), context)
        )
    return made if model.has_audio else [made[0], None]


def losses(model):
    return sum(out.square().mean() for out in model(*inputs(model)) if out is not None)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("kind", ["lora", "dora", "loha", "lokr"])
def test_a_step_a_file_and_back(family, kind, tmp_path):
    model = load(family)
    shapes = base_shapes(model)
    before = losses(model).item()
    section = LoraSection(rank=2, alpha=5, kind=kind, target_modules=["attention", "ff"])
    adapters = attach(model, section, seed=0)
    assert losses(model).item() == pytest.approx(before, rel=1e-5)
    layers, streams = model.config.num_layers, 2 if model.has_audio else 1
    assert len(adapters.names) == layers * (10 if streams == 1 else 28)  # 2 or 6 attentions of 4 and 1 or 2 feed-forwards of 2
    optimizer = torch.optim.AdamW(adapters.parameters(), lr=1e-2)
    for _ in range(2):
        optimizer.zero_grad()
        losses(model).backward()
        optimizer.step()
    trained = losses(model).item()
    assert trained < before
    path = write_lora(tmp_path / "a.safetensors", adapters, LoraMetadata(family=family), torch.float32)
    assert self_check(path, shapes).modules == len(adapters.names)
    other = load(family)
    again = attach(other, LoraSection(rank=2, alpha=1, kind=kind, target_modules=["attention", "ff"]), seed=1)
    assert warm_start(again, read_lora(path)).missing == ()
    assert losses(other).item() == pytest.approx(trained, rel=1e-4)
    assert shapes == {name: shape for name, shape in base_shapes(other).items() if name in shapes}


@pytest.mark.parametrize("streams", [["video"], ["audio"]])
def test_one_stream_adapts_only_its_own(streams):
    adapters = attach(load("ltx2.3"), LoraSection(rank=2, target_modules=["attention", "ff"]), seed=0, streams=streams)
    assert {stream_of(name) for name in adapters.names} == set(streams)
