"""A rank's own rows, read from a model file by several threads."""

import pytest
import torch
from safetensors.torch import save_file

from ltx_train.errors import CheckpointError
from ltx_train.models.weights import WeightSource
from ltx_train.training import sharded
from ltx_train.training.sharded import RowReader, own_rows

CPU = torch.device("cpu")


@pytest.fixture
def file(tmp_path, monkeypatch):
    monkeypatch.setattr(sharded, "PIECE", 16)
    path = tmp_path / "m.safetensors"
    tensors = {"a": torch.randn(5, 7).to(torch.bfloat16), "b": torch.randn(3), "q.weight": torch.randn(4, 4).to(torch.float8_e4m3fn), "q.scale_weight": torch.tensor(2.0)}
    save_file(tensors, path)
    return path, tensors


def test_rows_are_those_of_the_whole_tensor(file):
    path, tensors = file
    source = WeightSource.open(path).renamed({"a": "first"})
    with RowReader(source, CPU) as reader:
        for rows in ((0, 3), (3, 5), (5, 5), None):
            into = torch.full_like(tensors["a"] if rows is None else tensors["a"][rows[0] : rows[1]], 99, dtype=torch.float32)
            reader.fill("first", into, rows)
            assert torch.equal(into, tensors["a"].float() if rows is None else tensors["a"][rows[0] : rows[1]].float())
        small, dequantised = torch.zeros(2), torch.zeros(2, 4)
        reader.fill("b", small, (1, 3))
        assert torch.equal(small, tensors["b"][1:])
        reader.fill("q.weight", dequantised, (2, 4))
        assert torch.equal(dequantised, source.get("q.weight", dtype=torch.float32)[2:])


def test_a_file_that_was_cut_is_told(file):
    path, _ = file
    with RowReader(WeightSource.open(path), CPU) as reader:
        with path.open("r+b") as cut:
            cut.truncate(path.stat().st_size - 60)
        with pytest.raises(CheckpointError, match="ends inside the tensor"):
            for name in reader.source.keys():
                if reader.source.format(name) is None:
                    reader.fill(name, torch.zeros(reader.source.info(name).shape))


def test_rows_are_equal_chunks_and_the_last_are_shorter():
    ranks = [type("Rank", (), {"rank": rank, "world": 4}) for rank in range(4)]
    assert [own_rows(torch.empty(9, 2), rank) for rank in ranks] == [(0, 3), (3, 6), (6, 9), (9, 9)]
    assert [own_rows(torch.empty(2), rank) for rank in ranks] == [(0, 1), (1, 2), (2, 2), (2, 2)]
