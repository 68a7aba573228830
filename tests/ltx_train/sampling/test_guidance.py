"""Neutral rules of guidance and its formula written out (official numbers: tests/parity/test_sampling.py)."""

import pytest
import torch

from ltx_train.errors import ConfigError
from ltx_train.sampling.guidance import Guidance, StreamGuidance


def tensors(count, seed=0):
    return torch.randn(count, 1, 5, 3, generator=torch.Generator().manual_seed(seed)).unbind()


def test_formula_written_out():
    c, u, s, m = tensors(4)
    p = c + 2 * (c - u) + 1.5 * (c - s) + 0.5 * (c - m)
    expected = p * (0.7 * c.std() / p.std() + 0.3)
    torch.testing.assert_close(Guidance(3, 1.5, 1.5, 0.7).combine(c, u, s, m), expected)


def test_neutral_scales_return_the_prediction_itself():
    c, u, s, m = tensors(4)
    assert torch.equal(Guidance(rescale=0.9).combine(c, u, s, m), c) and Guidance(rescale=0.9).neutral
    assert torch.equal(Guidance(3, 1, 3).combine(c), c)  # passes that were not run change nothing


def test_cfg_star_is_scale_free():
    c, u, *_ = tensors(4)
    guide = Guidance(3, cfg_star=True)
    torch.testing.assert_close(guide.combine(c, u), guide.combine(c, 5 * u), atol=1e-5, rtol=1e-5)


def test_streams_that_are_frozen_or_alone_are_neutral():
    both = StreamGuidance(Guidance(3, 1, 3, 0.7), Guidance(7, 1, 3, 0.7))
    assert both.settled(("video", "audio"), ("video", "audio")) == both
    alone = both.settled(("video",), ("video",))
    assert alone.video == Guidance(3, 1, 1, 0.7) and alone.audio == Guidance()
    given = both.settled(("audio",), ("video", "audio"))
    assert given.video == Guidance() and given.audio == both.audio


def test_blocks():
    assert StreamGuidance().blocks(3) == (0, 1, 2)
    assert StreamGuidance(stg_blocks=(1,)).blocks(3) == (1,)
    with pytest.raises(ConfigError, match="no block 28"):
        StreamGuidance(stg_blocks=(28,)).blocks(3)
