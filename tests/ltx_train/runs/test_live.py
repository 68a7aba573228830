"""A live run: requests acknowledged within a second, heartbeat, phases, and silence on other ranks."""

import time

import pytest

from ltx_train.errors import StopRequested
from ltx_train.runs.events import PhaseEvent, ProgressEvent, StateEvent, StepEvent, WarningEvent
from ltx_train.runs.live import LiveRun
from ltx_train.runs.run_dir import RunDir


@pytest.fixture
def directory(tmp_path):
    return RunDir.create(tmp_path / "run")


def until(condition, seconds=1.0):
    deadline = time.time() + seconds
    while not condition():
        assert time.time() < deadline, "not within the time"
        time.sleep(0.01)


def states(directory):
    return [event for event in directory.events().events if isinstance(event, StateEvent)]


def test_a_stop_is_acknowledged_within_a_second_and_raised_at_the_next_check(directory):
    with LiveRun(directory) as run:
        run.set_state("running")
        run.stop.check()
        directory.request("stop")
        until(lambda: any(event.control == "stop" for event in states(directory)))
        assert directory.read_status().state == "stopping"
        with pytest.raises(StopRequested, match="control file"):
            run.stop.check()
        with pytest.raises(StopRequested):
            with run.phase("next"):
                raise AssertionError("must not be entered")
        run.set_state("stopped")
    assert [event.state for event in states(directory)] == ["running", "stopping", "stopped"]


@pytest.mark.parametrize("control", ["save", "sample"])
def test_save_and_sample_are_acknowledged_once_and_taken_once(directory, control):
    with LiveRun(directory) as run:
        run.set_state("running")
        assert run.take(control) is None
        directory.request(control, prompts=2)
        until(lambda: any(event.control == control for event in states(directory)))
        time.sleep(0.5)
        assert run.take(control)["prompts"] == 2
        assert run.take(control) is None
        directory.request(control)
        assert run.take(control) is not None
        assert sum(event.control == control for event in states(directory)) == 2


def test_the_heartbeat_goes_on_while_the_work_is_silent(directory):
    with LiveRun(directory) as run:
        run.set_state("running")
        first = directory.read_status().heartbeat
        until(lambda: directory.read_status().heartbeat > first, 3)
        assert time.time() - directory.read_status().heartbeat < 1


def test_steps_and_phases_move_the_status(directory):
    with LiveRun(directory) as run:
        run.set_state("running")
        with run.phase("train"):
            run.emit(StepEvent(step=3, total=10, loss=0.5))
            run.set(now=True)
            status = directory.read_status()
            assert (status.phase, status.step, status.total, status.loss) == ("train", 3, 10, 0.5)
    ends = [event for event in directory.events().events if isinstance(event, PhaseEvent) and event.state == "end"]
    assert ends[0].phase == "train" and ends[0].seconds >= 0


def test_progress_is_thinned_but_its_end_is_said(directory):
    with LiveRun(directory) as run:
        for done in range(1, 501):
            run.progress("encode", done, 500, unit="clips")
    said = [event.done for event in directory.events().events if isinstance(event, ProgressEvent)]
    assert said[0] == 1 and said[-1] == 500 and len(said) < 50


def test_another_rank_writes_nothing_but_its_own_log(directory, caplog):
    directory.request("stop")
    with LiveRun(directory, rank=1) as run:
        run.set_state("running")
        run.warn("a.b", "words")
        run.progress("p", 1, 1)
        with run.phase("train"):
            run.emit(StepEvent(step=1, total=1, loss=0.1))
        assert run.take("save") is None
        time.sleep(0.3)
        assert not run.stop.requested
    assert not directory.events_path.exists() and not directory.status_path.exists()
    assert "a.b: words" in caplog.text


def test_warnings_are_events(directory):
    with LiveRun(directory) as run:
        run.warn("x.y", "a warning", "do this")
    assert isinstance(directory.events().events[0], WarningEvent)
