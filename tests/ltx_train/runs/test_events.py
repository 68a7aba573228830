"""Events: written as whole lines, read tolerantly with a byte offset, rebuilt after a resume."""

import json
import os
import shutil
import threading
from pathlib import Path

import pytest

from ltx_train.runs.event_log import EventLog, last_seq, read_events
from ltx_train.runs.events import EVENTS, Event, JobEvent, StateEvent, StepEvent, WarningEvent, event_schema
from ltx_train.runs.history import History

SCHEMA = Path(__file__).parents[2] / "snapshots" / "events.schema.json"


def step(n, loss=0.5):
    return StepEvent(step=n, total=10, loss=loss)


def test_a_line_has_the_agreed_shape(tmp_path):
    log = EventLog(tmp_path / "events.jsonl")
    log.write(StepEvent(step=400, total=1000, loss=0.31, learning_rate=1e-4))
    record = json.loads((tmp_path / "events.jsonl").read_text())
    assert list(record)[:4] == ["v", "seq", "t", "type"]
    assert (record["v"], record["seq"], record["type"], record["step"], record["loss"]) == (1, 1, "step", 400, 0.31)
    assert record["t"] > 1.7e9 and record["learning_rate"] == 1e-4
    assert "audio_loss" not in record


def test_the_schema_is_the_one_in_the_snapshot():
    """Web client and other readers rely on it; a wanted change is written with json.dumps(event_schema(), indent=1)."""
    assert json.loads(SCHEMA.read_text(encoding="utf-8")) == event_schema()


def test_every_type_comes_back_equal(tmp_path):
    samples = {"kind": "train", "name": "größe ✓", "pid": 7, "phase": "encode", "state": "start", "done": 1, "step": 3, "total": 9, "loss": 0.25}
    samples |= {"path": "samples/a b.mp4", "code": "x.y", "message": "words"}
    written = []
    log = EventLog(tmp_path / "e")
    for kind in EVENTS:
        fields = {name: samples[name] for name, info in kind.model_fields.items() if info.is_required()}
        written.append(log.write(kind(**fields)))
    assert read_events(tmp_path / "e").events == tuple(written)
    assert [event.seq for event in written] == list(range(1, len(EVENTS) + 1))


def test_a_loss_that_is_not_finite_reads_as_none(tmp_path):
    log = EventLog(tmp_path / "e")
    log.write(StepEvent(step=1, total=2, loss=float("nan"), sigma_loss={"0.0-0.5": float("inf")}))
    text = (tmp_path / "e").read_text()
    assert "NaN" not in text and "Infinity" not in text
    assert read_events(tmp_path / "e").events[0].loss is None


@pytest.mark.skipif(os.name == "nt", reason="Windows keeps a file that is open")
def test_what_follows_a_removed_file_is_still_read(tmp_path):
    log = EventLog(tmp_path / "run" / "e")
    log.write(step(1))
    shutil.rmtree(tmp_path / "run")
    log.write(step(2)), log.write(step(3))
    assert [e.step for e in read_events(tmp_path / "run" / "e").events] == [2, 3]


def test_unknown_fields_are_refused_on_writing(tmp_path):
    with pytest.raises(AssertionError, match="lozz"):
        EventLog(tmp_path / "e").write(StepEvent(step=1, total=2, loss=0.1, lozz=3))


def test_reading_waits_for_the_rest_of_a_partial_line(tmp_path):
    path = tmp_path / "e"
    log = EventLog(path)
    log.write(step(1))
    first = read_events(path)
    line = b'{"v":1,"seq":2,"t":1,"type":"step","step":2,"total":10,"loss":0.4}\n'
    with open(path, "ab") as file:
        file.write(line[:20])
        file.flush()
        half = read_events(path, first.offset)
        assert half.events == () and half.offset == first.offset
        file.write(line[20:])
    assert read_events(path, first.offset).events[0].step == 2
    assert read_events(path, read_events(path).offset).events == ()


def test_damaged_and_newer_lines_do_not_stop_a_reader(tmp_path):
    path = tmp_path / "e"
    log = EventLog(path)
    log.write(step(1))
    with open(path, "ab") as file:
        file.write(b'{"v":1,"se\xff\n[]\n{"v":2,"seq":9,"t":1,"type":"aurora","glow":3}\n')
    batch = read_events(path)
    assert batch.skipped == 2
    assert type(batch.events[-1]) is Event and batch.events[-1].model_extra == {"glow": 3}


def test_a_killed_writers_half_line_costs_only_itself(tmp_path):
    path = tmp_path / "e"
    log = EventLog(path)
    log.write(step(1))
    log.close()
    with open(path, "ab") as file:
        file.write(b'{"v":1,"seq":2,"t":1,"type":"st')
    EventLog(path).write(step(2))
    batch = read_events(path)
    assert [(event.seq, event.step) for event in batch.events] == [(1, 1), (2, 2)] and batch.skipped == 1


def test_numbers_go_on_after_reopening_and_from_many_threads(tmp_path):
    path = tmp_path / "e"
    EventLog(path).write(step(1))
    log = EventLog(path)
    threads = [threading.Thread(target=lambda: [log.write(step(2)) for _ in range(50)]) for _ in range(4)]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    assert [event.seq for event in read_events(path).events] == list(range(1, 202))
    assert last_seq(path) == 201


def test_a_file_made_anew_is_read_from_its_start(tmp_path):
    path = tmp_path / "e"
    log = EventLog(path)
    [log.write(step(n)) for n in range(5)]
    offset = read_events(path).offset
    log.close()
    path.unlink()
    EventLog(path).write(step(7))
    assert [event.step for event in read_events(path, offset).events] == [7]


def test_history_drops_the_steps_that_a_resume_repeats():
    job = JobEvent(kind="train", name="a", pid=1)
    events = [job, StateEvent(state="running"), *(step(n, 1.0) for n in (1, 2, 3, 4)), WarningEvent(code="w", message="m")]
    events += [job, StateEvent(state="running"), step(3, 0.5), StateEvent(state="finished")]
    history = History.rebuild(events)
    assert history.losses == [(1, 1.0), (2, 1.0), (3, 0.5)]
    assert history.state == "finished" and history.attempts == 2 and len(history.warnings) == 1
