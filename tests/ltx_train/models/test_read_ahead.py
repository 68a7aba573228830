"""Reading ahead: the same bits in any order, never more memory than allowed, errors where they belong, no thread left."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from ltx_train.errors import CheckpointError
from ltx_train.memory.quantization import QUANTIZERS, load_quantized
from ltx_train.models import read_ahead
from ltx_train.models.checkpoint import Checkpoint
from ltx_train.models.read_ahead import ReadAhead
from ltx_train.models.safetensors_file import SafetensorsFile
from ltx_train.models.transformer import load_transformer
from ltx_train.models.weights import WeightSource

TESTS = Path(__file__).parents[2]
STORED = TESTS / "data" / "quantised" / "comfyui.safetensors"
TINY = TESTS / "parity" / "data" / "ltx2.3.checkpoint.safetensors"
SIZES = (700, 64, 0, 1000, 9000, 300, 2500, 65, 1200)


@pytest.fixture(autouse=True)
def small_numbers(monkeypatch):
    """So that tiny tensors are worth it: pieces of 512 bytes, 4 KiB ahead, of which one tensor here is more than twice as much."""
    monkeypatch.setattr(read_ahead, "SMALL", 64)
    monkeypatch.setattr(read_ahead, "PIECE", 512)
    monkeypatch.setattr(read_ahead, "AHEAD", 4096)


@pytest.fixture
def source(tmp_path):
    g = torch.Generator().manual_seed(0)
    drawn = {f"t{n}": torch.randint(0, 256, (size,), dtype=torch.uint8, generator=g) for n, size in enumerate(SIZES)}
    drawn["t3"] = drawn["t3"].view(torch.bfloat16).view(5, 100)
    save_file({n: t for n, t in drawn.items() if n < "t4"}, tmp_path / "a.safetensors")
    save_file({n: t for n, t in drawn.items() if n >= "t4"}, tmp_path / "b.safetensors")
    return WeightSource.open(tmp_path / "a.safetensors", tmp_path / "b.safetensors")


def staging(size: int) -> torch.Tensor:
    """What page-locked memory is to a card; on the CPU the copies are over when they return."""
    return torch.full((size,), 7, dtype=torch.uint8)


def readers() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("reads ahead")]


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8))


@pytest.mark.parametrize("room", [None, staging], ids=["own memory", "staged"])
@pytest.mark.parametrize("order", ["as told", "backwards", "every second", "twice"])
def test_the_same_bits_in_any_order(source, room, order):
    names = sorted(source.keys())
    asked = {"as told": names, "backwards": names[::-1], "every second": names[::2], "twice": [*names, *names]}[order]
    ahead = ReadAhead(source, names, staging=room)
    with ahead as reading:
        for name in asked:
            assert same(reading.get(name), source.get(name))
            assert ahead._held <= read_ahead.AHEAD and len(ahead._pieces) <= 8
        assert readers()
    assert not readers()


@pytest.mark.parametrize("room", [None, staging], ids=["own memory", "staged"])
def test_no_more_is_read_than_there_is_room_for(source, room, monkeypatch):
    """And what is asked for in turn is read by the threads alone, once."""
    filled, fill = [], SafetensorsFile.fill

    def watched(file, name, buffer, start=0):
        filled.append((threading.current_thread().name.startswith("reads ahead"), buffer.numel()))
        fill(file, name, buffer, start)

    monkeypatch.setattr(SafetensorsFile, "fill", watched)
    names = sorted(source.keys())
    ahead = ReadAhead(source, names, staging=room)
    with ahead as reading:
        reading.get(names[0])
        ahead._threads.submit(int).result()
    assert sum(size for _, size in filled) <= SIZES[0] + read_ahead.AHEAD
    filled.clear()
    with ReadAhead(source, names, staging=room) as reading:
        for name in names:
            reading.get(name)
    assert sum(size for _, size in filled) == sum(SIZES) and [size for thread, size in filled if not thread] == [64]


def test_quantised_weights_come_with_their_scales(monkeypatch):
    monkeypatch.setattr(read_ahead, "SMALL", 0)
    plain = WeightSource.open(STORED)
    with ReadAhead(plain, plain.keys(), staging=staging) as reading:
        for name in plain.keys():
            assert same(reading.get(name), plain.get(name))
            stored = reading.quantized(name)
            assert stored is None or all(same(t, plain.quantized(name).tensors[key]) for key, t in stored.tensors.items())


@pytest.mark.parametrize("harm", ["cut short", "gone"])
def test_an_error_is_told_where_the_tensor_is_asked_for_and_the_threads_end(source, harm):
    file = source.store.where["t5"].path
    names = sorted(source.keys())
    if harm == "gone":
        file.unlink()
    else:
        with file.open("r+b") as opened:
            opened.truncate(source.store.where["t4"].spans["t4"].begin + 5000)
    with pytest.raises(CheckpointError, match="ends inside the tensor t4" if harm == "cut short" else "b.safetensors cannot be read") as error:
        with ReadAhead(source, names) as reading:
            for name in names:
                last = name
                reading.get(name)
    assert last == "t4" and error.value.code == {"cut short": "checkpoint.truncated", "gone": "checkpoint.unreadable"}[harm]
    assert not readers()


def test_a_quantised_transformer_is_the_same_to_the_bit():
    """Its plain parameters and its stores: those of the model that is loaded one tensor at a time, and then quantised."""
    checkpoint, quantizer = Checkpoint.open(TINY), QUANTIZERS["int8"]()
    plain = load_transformer(checkpoint, dtype=torch.bfloat16, device="cpu")
    model = load_quantized(checkpoint, quantizer, dtype=torch.bfloat16, device="cpu")
    assert all(same(p, plain.get_parameter(n)) for n, p in model.named_parameters())
    stores = {n: layer.quantized for n, layer in model.named_modules() if getattr(layer, "quantized", None) is not None}
    for layer, store in stores.items():
        expected = quantizer.quantize(plain.get_submodule(layer).weight)
        assert same(store.data, expected.data) and same(store.scale, expected.scale)
    assert stores and not readers()


def test_a_stop_while_loading_is_heard_at_once():
    """What the progress callback raises ends the loading, its threads too."""

    def stop(done, total):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        load_quantized(Checkpoint.open(TINY), QUANTIZERS["int8"](), dtype=torch.bfloat16, device="cpu", progress=stop)
    assert not readers()
