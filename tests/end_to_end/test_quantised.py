"""A base held in fewer bits learns as the bf16 one does."""

import pytest

from ltx_train.memory.quantization import QUANTIZERS
from tests.end_to_end.corridor import train

STEPS = 8


def settings(home, out, quantization):
    data = {"preprocessed_data_root": str(home.cache("ltx2.3", home.clips))}
    optimization = {"steps": STEPS, "batch_size": 2, "learning_rate": 2e-2, "scheduler_type": "constant"}
    acceleration = {"quantization": quantization, "mixed_precision_mode": "bf16"}
    return home.config(out, data=data, optimization=optimization, acceleration=acceleration, lora={"rank": 8, "alpha": 8, "target_modules": ["to_k", "to_q", "to_v", "to_out.0", "ff"]})


def last(done):
    return sum(done.losses[-4:]) / 4


@pytest.fixture(scope="module")
def plain(home, tmp_path_factory):
    return train(settings(home, tmp_path_factory.mktemp("plain") / "run", None))


@pytest.mark.parametrize("quantization", sorted(set(QUANTIZERS) - {"int2-quanto", "fp8uz-quanto"}))
def test_quantised_training_is_within_two_percent(home, tmp_path, plain, quantization):
    """The same steps from the same start: last losses within 2 % of bf16's, which have clearly fallen."""
    done = train(settings(home, tmp_path / "run", quantization))
    assert last(plain) < 0.9 * sum(plain.losses[:2]) / 2, "the task is learnt"
    assert last(done) == pytest.approx(last(plain), rel=0.02)
    assert not done.warnings, "it worked as asked, without a fallback"
