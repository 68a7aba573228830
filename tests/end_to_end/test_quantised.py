"""A base held in fewer bits learns as the bf16 one does; int2 says that it does not.

``LTX_TRAIN_LONG=1`` adds the kinds that differ in their numbers alone, quantised files, and every kind on the fitted model, which has something to lose.
"""

import os

import pytest

from ltx_train.bench.learning_tasks import TASKS, draw_clips, write_table
from ltx_train.config import TrainConfig
from ltx_train.memory.quantization import QUANTIZERS
from ltx_train.tiny.fitted_set import FittedSet
from tests.end_to_end.corridor import train
from tests.quantised_files import repacked

STEPS = 8
LONG = pytest.mark.skipif(os.environ.get("LTX_TRAIN_LONG") != "1", reason="LTX_TRAIN_LONG=1 trains on every kind")
FOUND = {"int2-quanto": ["quantization.coarse"]}
"""Warnings of those that are not to be used without knowing."""
RATE = "config.caution"
"""What a run says of so high a learning rate, which a task of a few steps wants."""


def settings(home, out, quantization, **model):
    data = {"preprocessed_data_root": str(home.cache("ltx2.3", home.clips))}
    optimization = {"steps": STEPS, "batch_size": 2, "learning_rate": 2e-2, "scheduler_type": "constant"}
    acceleration = {"quantization": quantization, "mixed_precision_mode": "bf16"}
    lora = {"rank": 8, "alpha": 8, "target_modules": ["to_k", "to_q", "to_v", "to_out.0", "ff"]}
    return home.config(out, data=data, optimization=optimization, acceleration=acceleration, lora=lora, model=model)


def last(done):
    return sum(done.losses[-4:]) / 4


@pytest.fixture(scope="module")
def plain(home, tmp_path_factory):
    done = train(settings(home, tmp_path_factory.mktemp("plain") / "run", None))
    assert last(done) < 0.9 * sum(done.losses[:2]) / 2, "the task is learnt"
    return done


def kinds():
    seldom = ("int2-quanto", "int8-quanto", "fp8-quanto", "fp8uz-quanto")  # each has a short training in memory/test_quantization.py too
    return [pytest.param(name, marks=LONG if name in seldom else ()) for name in sorted(QUANTIZERS)]


@pytest.mark.parametrize("quantization", kinds())
def test_quantised_training_is_within_two_percent(home, tmp_path, plain, quantization):
    """The same steps from the same start: last losses within 2 % of bf16's. This base has random weights: even two bits lose nothing that it knew."""
    done = train(settings(home, tmp_path / "run", quantization))
    assert last(done) == pytest.approx(last(plain), rel=0.02)
    assert done.warnings == [RATE, *FOUND.get(quantization, [])], "it worked as asked, without a fallback"


def in_blocks(key):
    """The weights of the blocks' attentions and feed-forwards, gates left out."""
    return ".transformer_blocks." in key and ("attn" in key or "ff" in key) and not any(word in key for word in ("connector", "gate"))


def quantised(source, target, kind):
    """The model file in that kind."""
    repacked(source, target, kind.removesuffix("-scaled"), in_blocks)
    return target


@LONG
@pytest.mark.parametrize("kind", ["fp8-scaled", "int8"])
def test_a_quantised_file_is_within_two_percent(home, tmp_path, plain, kind):
    """Trained on as it is."""
    path = quantised(home.model("ltx2.3")["model"], tmp_path / "repacked.safetensors", kind)
    done = train(settings(home, tmp_path / "run", None, model_path=str(path)))
    assert last(done) == pytest.approx(last(plain), rel=0.02) and done.losses != plain.losses
    assert done.warnings == [RATE]


# -- a base that knows something --


@pytest.fixture(scope="module")
def drawn(tmp_path_factory):
    """Text to video with sound on eight drawn clips: a function of quantisation and model file, 12 steps on the fitted model."""
    place, files = tmp_path_factory.mktemp("fitted"), FittedSet.at()
    table = write_table(place / "clips.jsonl", draw_clips(TASKS["t2v"], place / "clips", 8, 1))

    def run(quantization, model=files.model):
        return train(TrainConfig.parse({
            "model": {"model_path": str(model), "text_encoder_path": str(files.text_encoder)}, "lora": {"rank": 16, "alpha": 16},
            "training_strategy": TASKS["t2v"].mode.strategy().model_dump(mode="json"),
            "optimization": {"steps": 12, "batch_size": 2, "learning_rate": 4e-3, "scheduler_type": "constant"},
            "acceleration": {"device": "cpu", "mixed_precision_mode": "bf16", "quantization": quantization},
            "data": {"dataset": str(table), "resolution_buckets": "64x64x17", "cache_dir": str(place / "cache")},
            "logging": {"tensorboard": False, "csv": False}, "output_dir": str(place / f"{quantization}_{model.stem}"),
        }))  # fmt: skip

    return run


@pytest.fixture(scope="module")
def drawn_plain(drawn):
    return drawn(None)


@LONG
@pytest.mark.parametrize("quantization", sorted(QUANTIZERS))
def test_a_trained_base_loses_what_is_said(drawn, drawn_plain, quantization):
    """At most 2 % more loss than bf16's after the same steps; int2, as its caution says, about a third more."""
    more = last(drawn(quantization)) / last(drawn_plain) - 1
    print(f"{quantization}: {more:+.2%} loss")
    if quantization == "int2-quanto":
        assert 0.15 < more < 0.6 and "a third higher" in QUANTIZERS[quantization].caution
    else:
        assert -0.03 < more < 0.02


@LONG
@pytest.mark.parametrize("kind", ["fp8-scaled", "int8"])
def test_a_quantised_file_of_a_trained_base_loses_as_little(drawn, drawn_plain, tmp_path, kind):
    more = last(drawn(None, quantised(FittedSet.at().model, tmp_path / f"{kind}.safetensors", kind))) / last(drawn_plain) - 1
    print(f"{kind} file: {more:+.2%} loss")
    assert more != 0 and abs(more) < 0.02
