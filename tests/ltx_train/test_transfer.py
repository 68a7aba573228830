"""Uploads and readings: the numbers arrive, and later changes do not reach them."""

import torch

from ltx_train.transfer import Reading, locked, upload


def test_upload():
    tensor = torch.arange(4)
    assert upload(None, "cpu") is None
    assert upload(tensor, "cpu") is tensor
    assert upload(tensor, torch.device("cpu"), torch.float32).dtype == torch.float32


def test_memory_that_cannot_be_locked_is_copied_as_it_is(monkeypatch):
    def refuse(self):
        raise RuntimeError("CUDA error: out of memory")

    monkeypatch.setattr(torch.Tensor, "pin_memory", refuse)
    tensor = torch.arange(4)
    assert locked(tensor) is tensor


def test_a_reading_is_of_the_moment_it_was_asked_for():
    values = torch.tensor([1.0, float("nan")], requires_grad=True)
    reading = Reading(values)
    with torch.no_grad():
        values.fill_(7.0)
    assert reading.get()[0] == 1.0 and reading.get()[1] != reading.get()[1]
