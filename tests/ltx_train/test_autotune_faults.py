"""Autotune on a bad day: interrupted, run again, in somebody's folder, with a result that cannot be saved."""

import pytest

from ltx_train import autotune as tuning
from ltx_train.__main__ import main
from ltx_train.autotune import Measured, autotune, measure, new_place, trial
from ltx_train.cli.bench import writable
from ltx_train.errors import RunError
from ltx_train.runs.lock import ProcessId
from ltx_train.runs.run_dir import RunDir
from tests.ltx_train.test_autotune import config


class Interrupted:
    """A child whose owner presses Ctrl-C while it trains."""

    def __init__(self, opened, **options):
        self.run, self.stopped = opened.run, []
        self.run.checkpoints.mkdir()

    def wait(self):
        raise KeyboardInterrupt

    def stop(self, deadline):
        self.stopped.append(deadline)


def test_an_interrupt_ends_the_trial_too(tmp_path, monkeypatch):
    children = []
    monkeypatch.setattr(tuning, "launch_job", lambda *words, **options: children.append(Interrupted(*words, **options)) or children[0])
    with pytest.raises(KeyboardInterrupt):
        measure(trial(config(), tmp_path / "0_sanity", 5, sample=False), tmp_path / "0_sanity")
    assert children[0].stopped == [0.0] and not children[0].run.checkpoints.exists()


def test_an_earlier_trial_gives_way_and_nothing_else_does(tmp_path):
    run = new_place(tmp_path / "0_sanity")
    config().save(run.job_path("train"))
    run.events_path.write_text('{"type": "step"}\n')
    assert not new_place(run.path).events_path.exists() and not run.job_path("train").exists()
    (tmp_path / "1_mine").mkdir()
    (tmp_path / "1_mine" / "notes.txt").write_text("x")
    with pytest.raises(RunError, match="other files"):
        new_place(tmp_path / "1_mine")
    assert (tmp_path / "1_mine" / "notes.txt").exists()
    busy = RunDir.create(tmp_path / "2_busy")
    token = busy.lock.take(ProcessId.of())
    with pytest.raises(RunError, match="at work"):
        new_place(busy.path)
    busy.lock.release(token)


def test_what_the_sanity_run_failed_of_is_told_with_its_way_out(tmp_path):
    with pytest.raises(RunError, match="There is no dataset") as caught:
        autotune(config(), tmp_path, measure=lambda job, place: Measured(None, "There is no dataset at x", "Give a folder of clips."))
    assert "Give a folder of clips." in caught.value.hint and "--check" in caught.value.hint


def test_a_result_that_cannot_be_saved_is_told_before_tuning(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(tuning, "measure", lambda *words: pytest.fail("it began"))
    job = tmp_path / "job.yaml"
    config(data={"preprocessed_data_root": str(tmp_path)}).model_copy(update={"output_dir": str(tmp_path / "run")}).save(job)
    for place, why in ((job, "the config that is tuned"), (tmp_path, "it is a folder"), (job / "x.yaml", "is a file")):
        assert main(["autotune", str(job), "--write", str(place)]) == 2
        assert why in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["job.yaml"]


def test_the_log_goes_where_it_can_be_written(tmp_path):
    (tmp_path / "a").mkdir()
    assert writable(tmp_path / "a", tmp_path / "b.log") == tmp_path / "b.log"
    assert writable(tmp_path / "c.log", tmp_path / "b.log") == tmp_path / "c.log"
