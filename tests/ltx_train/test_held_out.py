"""Held-out losses: clips kept out of training, the same numbers for the same weights, the base beside them, a hint when they turn."""

import pytest
import torch
from torch import nn

from ltx_train.conditioning.modes import TrainingStrategySection
from ltx_train.config import TrainConfig
from ltx_train.data.dataset import open_dataset
from ltx_train.data.items import Item
from ltx_train.geometry import AudioGrid, Latents, VideoFactors, VideoGrid
from ltx_train.held_out import SIGMAS, HeldOut, Line, Portion, split
from ltx_train.models.families import TransformerConfig
from ltx_train.parts import build_parts
from ltx_train.runs.events import HeldOutEvent, WarningEvent
from ltx_train.runs.live import LiveRun
from ltx_train.runs.run_dir import RunDir
from ltx_train.text import Context
from ltx_train.training.flow_matching import FlowMatchingSection
from ltx_train.training.parallel import Parallel
from ltx_train.training.step import TrainStep
from tests.end_to_end.corridor import Home, train


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    return Home(tmp_path_factory.mktemp("home"))


@pytest.fixture(autouse=True, scope="module")
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def job(home, out, share=0.4, **sections):
    data = {"preprocessed_data_root": str(home.cache("ltx2.3", home.clips)), "held_out_share": share}
    validation = {"samples": [], "interval": 1}
    return home.config(out, data=data, validation=validation, lora={"rank": 2, "alpha": 4, "dropout": 0.3}, optimization={"steps": 2, "batch_size": 1, "learning_rate": 1e-2}, **sections)


# ---- the split


def test_files_are_held_out_whole_and_by_name_alone(home):
    root = home.cache("ltx2.3", home.clips)
    dataset = open_dataset(root, factors=VideoFactors(), audio_grid=AudioGrid(1))
    trained, held = split(dataset, 0.4)
    assert len(held) == 2 and sorted(trained + held) == list(range(5))
    assert split(dataset, 0.4) == (trained, held)
    assert set(split(dataset, 0.2)[1]) < set(held)  # a smaller share is part of a larger one
    assert split(dataset, 0.0) == (list(range(5)), [])
    assert len(split(dataset, 0.01)[1]) == 1

    class Pieces:
        """Ten pieces of five files, one of the files for regularisation."""

        class manifest:
            entries = tuple(type("E", (), {"regularisation": "plain" if i // 2 == 4 else "", "dataset": "d", "path": f"/x/clip{i // 2}.mp4"})() for i in range(10))

    trained, held = split(Pieces(), 0.5)
    assert len(held) == 4 and {i // 2 for i in held}.isdisjoint({i // 2 for i in trained}) and {8, 9} <= set(trained)


def test_one_file_cannot_be_split():
    class Alone:
        def text_keys(self):
            return ["a"]

    assert split(Alone(), 0.5) == ([0], [])


def test_a_portion_is_a_dataset_of_its_own(home):
    whole = open_dataset(home.cache("ltx2.3", home.clips), factors=VideoFactors(), audio_grid=AudioGrid(1))
    part = Portion(whole, [3, 1])
    assert len(part) == 2 and part.item(0).id == whole.item(3).id and part.units() == [whole.units()[3], whole.units()[1]]
    assert set(part.text_keys()) == {whole.item(3).text, whole.item(1).text} and part.audio_coverage() == 1.0
    assert [e.id for e in part.manifest.entries] == [whole.manifest.entries[3].id, whole.manifest.entries[1].id]


# ---- in a run


@pytest.fixture(scope="module")
def done(home, tmp_path_factory):
    """A run that measures before, between and after its steps."""
    return train(job(home, tmp_path_factory.mktemp("done") / "run"))


def test_held_out_clips_are_never_trained_on_and_the_run_is_that_of_the_rest(home, tmp_path, done):
    """Training with a share held out equals training on a dataset that lacks those clips; measuring changes nothing."""
    with LiveRun(RunDir.create(tmp_path / "parts")) as live:
        parts = build_parts(job(home, tmp_path / "parts"), live, Parallel.start(device="cpu"))
        held = {parts.held_out.dataset.item(i).id for i in range(len(parts.held_out.dataset))}
        seen = {i for step in range(12) for i in parts.data.batch(step, 0).batch.ids}
        parts.data.close()
    assert len(held) == 2 and len(seen) == 3 and held.isdisjoint(seen)
    silent = train(TrainConfig.parse({**job(home, tmp_path / "quiet").model_dump(mode="json"), "validation": {"samples": [], "interval": None}}))
    assert done.losses == silent.losses
    events = done.events(HeldOutEvent)
    assert [e.step for e in events] == [0, 1, 2] and all(e.clips == 2 for e in events)
    assert events[0].losses == events[0].base == events[1].base  # a LoRA starts as the base model
    assert events[0].losses != events[1].losses != events[2].losses
    assert set(events[0].losses) == {"video", "audio", *(f"{m} {s:g}" for m in ("video", "audio") for s in SIGMAS)}
    assert events[2].total == pytest.approx(events[2].losses["video"] + events[2].losses["audio"])
    assert done.run.history().held_out.keys() == {0, 1, 2}


def test_another_dataset_is_measured_and_the_whole_is_trained_on(home, tmp_path):
    other = str(home.cache("ltx2.3"))
    data = {"preprocessed_data_root": str(home.cache("ltx2.3", home.clips)), "held_out_root": other}
    config = home.config(tmp_path / "run", data=data, optimization={"steps": 1, "batch_size": 1})
    done = train(config)
    assert [e.clips for e in done.events(HeldOutEvent)] == [2, 2]
    assert "held_out_root" in config.data.free_fields() and "held_out_share" not in config.data.free_fields()


def test_a_failing_measure_is_a_warning(home, tmp_path, monkeypatch, done):
    monkeypatch.setattr(HeldOut, "measure", lambda self, parallel=None: 1 / 0)
    failed = train(job(home, tmp_path / "run"))
    assert failed.losses == done.losses and failed.warnings.count("held_out.failed") == 3


# ---- the measure, closed


class Guess(nn.Module):
    """Predicts a constant velocity, plus one bit of dropout that must be off."""

    config = TransformerConfig(1, 1, 4, 4, 4, 4, None)

    def __init__(self, value):
        super().__init__()
        self.value, self.dropout, self.forwards = value, nn.Dropout(0.5), 0

    def forward(self, video, audio, perturbations=None):
        self.forwards += 1
        return self.dropout(torch.full_like(video.tokens, self.value)), None


class Zeros:
    """Clips of zeros: the target is the noise itself."""

    audio_grid = None

    def __init__(self, count):
        self.count = count

    def __len__(self):
        return self.count

    def item(self, index):
        return Item(str(index), "text", Latents(torch.zeros(1, 4, 2, 8, 8), VideoGrid(2, 8, 8)), None)


class Texts:
    def batch(self, keys):
        return Context(torch.zeros(len(keys), 2, 4), None)


def measure(model, clips=3, parallel=None):
    step = TrainStep(model, TrainingStrategySection.model_validate({"name": "flexible", "video": {"is_generated": True}}), FlowMatchingSection(), config=model.config)
    return HeldOut(Zeros(clips), Texts(), step, torch.device("cpu"), base=None).run(0, Silent(), parallel)


class Silent:
    def __init__(self):
        self.said = []

    def phase(self, *args):
        from contextlib import nullcontext

        return nullcontext()

    def emit(self, event):
        self.said.append(event)

    def warn(self, *args):
        self.said.append(args)


def test_loss_of_a_constant_guess_is_its_square_plus_the_noise():
    """E (c - n)^2 = c^2 + 1 for noise of unit variance; the same numbers every time, at every level; the mode comes back."""
    torch.manual_seed(0)
    model = Guess(0.5).train()
    event = measure(model)
    assert event.losses["video"] == pytest.approx(1.25, abs=0.05) and event.total == event.losses["video"] and model.training and model.dropout.training
    torch.manual_seed(1)
    assert measure(Guess(0.5).train()).losses == event.losses
    assert event.base == event.losses and model.forwards == 3 * len(SIGMAS)
    assert len({round(v, 6) for v in event.losses.values()}) == len(SIGMAS) + 1  # noise of its own at every level


class Rank:
    """One of two ranks whose sums are added by hand."""

    def __init__(self, rank, other=None):
        self.rank, self.world, self.is_main, self.other, self.mine = rank, 2, rank == 0, other, None

    def sum(self, values):
        self.mine = values
        return values if self.other is None else [a + b for a, b in zip(values, self.other)]


def test_two_ranks_measure_what_one_does():
    alone = measure(Guess(0.5), clips=3).losses
    second = Rank(1)
    measure(Guess(0.5), clips=3, parallel=second)
    first = Rank(0, second.mine)
    assert measure(Guess(0.5), clips=3, parallel=first).losses == pytest.approx(alone)


# ---- turning


def test_the_line_turns_when_the_loss_has_risen_twice():
    line = Line()
    assert [line.add(s, v) for s, v in ((0, 1.0), (10, 0.8), (20, 0.79), (30, 0.85), (40, 0.86), (50, 0.9))] == [None, None, None, None, 20, None]
    assert line.add(60, 0.7) is None and line.add(70, 0.8) is None and line.add(80, 0.81) == 60
    flat = Line()
    assert [flat.add(s, 0.8 + 0.004 * (s % 20 == 0)) for s in range(0, 100, 10)] == [None] * 10  # noise is no turn


def test_a_resumed_run_knows_the_line_and_the_base(home, tmp_path):
    done = train(job(home, tmp_path / "run"))
    event = done.events(HeldOutEvent)[0]
    held = HeldOut(Zeros(1), Texts(), None, torch.device("cpu"), base=None)
    rising = [event.model_copy(update={"step": s, "total": t}) for s, t in ((0, 1.0), (10, 0.5), (20, 0.6), (30, 9.0))]
    held.resume([WarningEvent(code="x", message="y"), *rising], 20)
    assert held.line.points == [(0, 1.0), (10, 0.5), (20, 0.6)] and held._base == dict(event.base)
    assert held.line.add(30, 0.7) == 10
