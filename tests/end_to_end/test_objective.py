"""Regularisation and prior clips, caption dropout by stream and the end's statistics, through the real loop."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from ltx_train.data.cache import Cache
from ltx_train.data.manifest import Manifest
from ltx_train.errors import ConfigError
from ltx_train.runs.events import StatisticsEvent
from ltx_train.training.step import TrainStep
from tests.end_to_end.corridor import train


@pytest.fixture
def mixed(home):
    """An index of the tiny cache whose second clip is marked, by its kind; the name of the index."""

    def mark(kind):
        root = home.cache("ltx2.3")
        manifest = Manifest.read(root / "index.json")
        entries = [replace(e, regularisation=kind if n else "") for n, e in enumerate(manifest.entries)]
        Cache(root).write_index(replace(manifest, entries=tuple(entries)), f"index_{kind}.json")
        return {"preprocessed_data_root": str(root), "index": f"index_{kind}.json"}

    return mark


def test_prior_clips_cost_nothing_while_the_adapter_changes_nothing(home, tmp_path, mixed):
    done = train(home.config(tmp_path / "run", data=mixed("prior"), optimization={"steps": 3}))
    first, *rest = done.steps.values()
    assert first.regularisation_loss == 0.0 and all(step.regularisation_loss > 0 for step in rest)
    assert first.loss == pytest.approx((first.video_loss + first.audio_loss) / 2), "the mean over two clips, of which one costs nothing"
    plain = train(home.config(tmp_path / "plain", data=mixed("plain"), flow_matching={"regularisation_weight": 0.5}, optimization={"steps": 1}))
    step = plain.steps[1]
    assert step.video_loss == pytest.approx(first.video_loss) and step.regularisation_loss > 0
    assert step.loss == pytest.approx((step.video_loss + step.audio_loss + 0.5 * step.regularisation_loss) / 2)


def test_prior_clips_are_refused_where_there_is_no_base_model_left(home, tmp_path, mixed):
    with pytest.raises(ConfigError, match="full fine-tuning changes"):
        train(home.config(tmp_path / "run", data=mixed("prior"), model={"training_mode": "full"}))


def test_a_dataset_of_prior_clips_alone_is_refused(home, tmp_path, mixed):
    data = mixed("prior")
    manifest = Manifest.read(Path(data["preprocessed_data_root"]) / data["index"])
    entries = tuple(replace(e, regularisation="prior") for e in manifest.entries)
    Cache(Path(data["preprocessed_data_root"])).write_index(replace(manifest, entries=entries), "index_alone.json")
    with pytest.raises(ConfigError, match="nothing to learn"):
        train(home.config(tmp_path / "run", data={**data, "index": "index_alone.json"}))


def test_captions_dropped_in_one_stream_reach_the_network(home, tmp_path, monkeypatch):
    seen = []
    original = TrainStep.__call__

    def call(self, batch, **key):
        seen.append(batch.context)
        return original(self, batch, **key)

    monkeypatch.setattr(TrainStep, "__call__", call)
    train(home.config(tmp_path / "both", data={"preprocessed_data_root": str(home.cache("ltx2.3"))}, optimization={"steps": 1}))
    train(home.config(tmp_path / "video", data={"preprocessed_data_root": str(home.cache("ltx2.3")), "video_caption_dropout": 1.0}, optimization={"steps": 1}))
    train(home.config(tmp_path / "none", data={"preprocessed_data_root": str(home.cache("ltx2.3")), "caption_dropout": 1.0}, optimization={"steps": 1}))
    both, video, none = seen
    assert torch.equal(video.video, none.video) and not torch.equal(video.video, both.video)
    assert torch.equal(video.audio, both.audio) and not torch.equal(video.audio, none.audio)


def test_the_end_is_told_in_numbers(home, tmp_path, monkeypatch):
    told = {}
    monkeypatch.setattr("ltx_train.runs.publish.CsvTracker.statistics", lambda self, numbers: told.update(numbers))
    rates, step_of = [], torch.optim.AdamW.step
    monkeypatch.setattr(torch.optim.AdamW, "step", lambda self, *args: rates.append(self.param_groups[0]["lr"]) or step_of(self, *args))
    config = home.config(tmp_path / "run", logging={"csv": True, "tensorboard": False}, optimization={"steps": 3, "batch_size": 1, "gradient_accumulation_steps": 2})
    done = train(config)
    assert rates == [config.optimization.lr_at(n) for n in range(3)] == [e.learning_rate for e in done.steps.values()] and len(set(rates)) > 1
    (event,) = done.events(StatisticsEvent)
    seconds = sum(step.seconds for step in done.steps.values())
    assert (event.step, event.steps, event.samples, event.global_batch, event.processes) == (3, 3, 6, 2, 1)
    assert event.steps_per_second == pytest.approx(3 / seconds, rel=0.05) and event.samples_per_second == pytest.approx(2 * event.steps_per_second)
    assert event.minutes * 60 > seconds and event.tokens == sum(step.tokens for step in done.steps.values())
    assert set(told) >= {"total_time_minutes", "steps_per_second", "samples_per_second", "num_processes", "global_batch_size"}
    assert json.loads(json.dumps(told))["samples"] == 6.0
