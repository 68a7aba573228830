"""Stills, silent clips and clips of sound alone beside videos with sound: each batch trains the streams that it has."""

from dataclasses import replace

import pytest
import torch

from ltx_train.conditioning.modes import mode
from ltx_train.errors import DataError
from ltx_train.training.flow_matching import FlowMatchingSection
from ltx_train.training.metrics import StepMeter
from ltx_train.training.step import TrainStep
from tests.ltx_train.training.test_step import FakeTransformer, batch


@pytest.mark.parametrize(("lost", "kept"), [("audio", "video"), ("video", "audio")])
@pytest.mark.parametrize("shared", [False, True])
def test_a_batch_without_a_stream_trains_the_other_as_if_alone(lost, kept, shared):
    """Its loss is the one that the stream has in a batch of both, with the same noise."""
    model = FakeTransformer()
    step = TrainStep(model, mode("t2v_audio").strategy(), FlowMatchingSection(shared_sigma=shared))
    whole = batch()
    part = replace(whole, **{lost: None}, audio_present=torch.full((2,), lost != "audio"))
    out = step(part, seed=3, step=1, slot=0, sigma={"video": 0.4, "audio": 0.4})
    both = step(whole, seed=3, step=1, slot=0, sigma={"video": 0.4, "audio": 0.4})
    assert getattr(out, f"{lost}_loss") is None and getattr(out, f"{lost}_sigma") is None
    assert torch.equal(getattr(out, f"{kept}_loss"), getattr(both, f"{kept}_loss"))
    assert out.tokens == getattr(whole, kept).tokens.shape[:2].numel()
    drawn = step(part, seed=3, step=1, slot=0)
    drawn.loss.backward()
    assert model.seen[("video", "audio").index(lost)] is None and torch.isfinite(model.weight.grad)
    meter = StepMeter()
    meter.add(drawn.loss, drawn.per_modality())


def test_a_stream_that_others_are_made_from_must_be_there():
    step = TrainStep(FakeTransformer(), mode("a2v").strategy(), FlowMatchingSection())
    with pytest.raises(DataError, match="uses audio"):
        step(replace(batch(), audio=None), seed=0, step=0, slot=0)
    step = TrainStep(FakeTransformer(), mode("t2v_audio").strategy(), FlowMatchingSection())
    with pytest.raises(DataError, match="uses video"):
        step(replace(batch(), audio=None, video=None), seed=0, step=0, slot=0)
