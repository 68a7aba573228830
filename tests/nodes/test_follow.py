"""Following a child: what the node shows, how an interrupt is answered, and that a failure is never green."""

import threading
import time

import pytest


class Recorder:
    """A screen that keeps what it is told; ``interrupts`` holds the number of events after which the user presses."""

    node_id = "7"

    def __init__(self, *interrupts):
        self.texts, self.bars, self.pushed, self.pressed = [], [], [], list(interrupts)
        self.looks = 0

    def progress(self, value, total, preview=None):
        self.bars.append((value, total, preview))

    def text(self, text):
        self.texts.append(text)

    def push(self, data):
        self.pushed.append(data)

    def take_interrupt(self):
        self.looks += 1
        if self.pressed and self.looks >= self.pressed[0]:
            self.pressed.pop(0)
            return True
        return False

    def interrupted(self):
        return KeyboardInterrupt()


class FakeChild:
    """A child that says the given events; ``leaves`` tells whether it obeys a stop."""

    def __init__(self, pack, folder, events, outcome, *, hold=False, leaves=True):
        run_dir = pack.engine("runs.run_dir")
        self.run = run_dir.RunDir.create(folder)
        self.run.write_status(run_dir.Status(state="running", step=3))
        self._events, self._outcome, self._hold, self._leaves = events, outcome, hold, leaves
        self.stopped = self.killed = False
        self.offset = 0
        self._gone = threading.Event()

    def follow(self, poll=0.1):
        yield from self._events
        if self._hold:
            self._gone.wait(20)

    def request_stop(self):
        self.stopped = True
        if self._leaves:
            self._gone.set()

    def kill(self):
        self.killed = True
        self._gone.set()

    def alive(self):
        return self._hold and not self._gone.is_set()

    def outcome(self):
        return self._outcome


@pytest.fixture
def made(pack, tmp_path):
    events, launch = pack.engine("runs.events"), pack.engine("launch")

    def make(*, state="finished", code=0, message="", hint="", said=None, **more):
        said = said if said is not None else [events.StepEvent(step=n, total=4, loss=1.0 / n, loss_average=0.5, seconds=1.5, eta=60.0) for n in (1, 2, 3)]
        return FakeChild(pack, tmp_path / "run", said, launch.Outcome(state, code, message, hint), **more)

    return make


def follow(pack, child, screen, **more):
    return pack.follow.follow(child, screen, **more)


def test_progress_text_and_news_of_a_run(pack, made):
    screen = Recorder()
    outcome = follow(pack, made(), screen)
    assert outcome.ok
    assert screen.bars[-1][:2] == (3, 4)
    assert screen.texts[-1] == "step 3 of 4 · loss 0.3333 · mean 0.5000 · 1.50 s a step · 1 min left"
    assert {"run": "run"} in screen.pushed


@pytest.mark.parametrize("code, name", [(2, "RunError"), (1, "RunError"), (4, "OutOfMemory"), (-9, "RunError")])
def test_a_failed_child_raises_its_own_words(pack, made, code, name):
    with pytest.raises(getattr(pack.engine("errors"), name)) as told:
        follow(pack, made(state="failed", code=code, message="The clip a.mp4 has 5 frames.", hint="Use a smaller bucket."), Recorder())
    assert str(told.value).splitlines()[0] == "The clip a.mp4 has 5 frames."
    assert "smaller bucket" in str(told.value)


def test_a_run_that_somebody_else_stopped_is_not_green(pack, made):
    with pytest.raises(pack.engine("errors").RunError, match="was stopped at step 3"):
        follow(pack, made(state="stopped", code=3), Recorder())


def test_an_interrupt_asks_for_a_stop_and_tells_it_at_once(pack, made):
    child, screen = made(state="stopped", code=3, hold=True), Recorder(5)
    started = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        follow(pack, child, screen)
    assert child.stopped and not child.killed
    assert time.monotonic() - started < 3
    assert any(text.startswith("Stopping") for text in screen.texts)
    assert screen.texts[-1].startswith("Interrupted at step 3")


def test_a_second_interrupt_ends_it_by_force(pack, made):
    child = made(state="failed", code=-9, hold=True, leaves=False)
    with pytest.raises(KeyboardInterrupt):
        follow(pack, child, Recorder(5, 8))
    assert child.stopped and child.killed


def test_a_child_that_does_not_obey_is_ended_after_the_deadline(pack, made):
    child = made(state="failed", code=-9, hold=True, leaves=False)
    with pytest.raises(KeyboardInterrupt):
        follow(pack, child, Recorder(5), deadline=0.5)
    assert child.killed


def test_an_error_while_reading_is_raised_on_the_nodes_thread(pack, made):
    child = made()
    child.follow = lambda poll: (_ for _ in ()).throw(OSError("the share is away"))
    with pytest.raises(OSError, match="share is away"):
        follow(pack, child, Recorder())


def test_the_newest_sample_is_shown_and_a_broken_one_ends_nothing(pack, made, tmp_path):
    from PIL import Image

    events = pack.engine("runs.events")
    child = made(said=[events.StepEvent(step=1, total=4, loss=1.0), events.SampleEvent(step=1, path="samples/a.png", prompt="a cat")])
    child.run.samples.mkdir(parents=True)
    Image.new("RGB", (1024, 256), "red").save(child.run.samples / "a.png")
    screen = Recorder()
    follow(pack, child, screen)
    assert screen.bars[-1][2].size == (512, 128)
    (child.run.samples / "a.png").write_bytes(b"no picture")
    assert pack.follow.picture_of(child.run.samples / "a.png") is None
    assert pack.follow.picture_of(child.run.samples / "gone.mp4") is None


def test_a_clips_middle_frame_is_its_preview(pack, tmp_path):
    from ltx_train.tiny.media import counter_clip, read_counter

    path = counter_clip(tmp_path / "clip.mp4", 25)
    import numpy as np

    assert read_counter(np.asarray(pack.follow.picture_of(path))) == 12


def test_comfyuis_screen(pack):
    screen = pack.follow.Screen.of("7")
    screen.progress(2, None)
    screen.text("hello")
    screen.push({"run": "a"})
    host = pack.host
    assert host.progress == [{"value": 2, "max_value": 2, "node_id": "7", "preview_image": None}]
    assert host.texts == [("7", "hello")]
    assert host.sent == [("ltx_train.events", {"node": "7", "run": "a"})]
    assert not screen.take_interrupt()
    host.interrupt = True
    assert screen.take_interrupt() and not screen.take_interrupt()
    assert type(screen.interrupted()).__name__ == "Interrupted"


def test_events_for_people(pack):
    events, describe = pack.engine("runs.events"), pack.follow.describe
    assert describe(events.ProgressEvent(phase="encode video", done=3, total=20, unit="clips")) == "encode video: 3 of 20 clips"
    assert describe(events.StepEvent(step=1, total=2, loss=None)) == "step 1 of 2 · loss not finite"
    assert describe(events.PhaseEvent(phase="load the model", state="start")) == "load the model"
    assert describe(events.PhaseEvent(phase="load the model", state="end")) == ""
    assert [pack.follow.duration(s) for s in (3, 61, 3600, 7265)] == ["3 s", "1 min", "1 h 0 min", "2 h 1 min"]


def test_a_traceback_is_not_sent_to_the_browser(pack):
    events = pack.engine("runs.events")
    plain = pack.follow.plain(events.ErrorEvent(code="crash", message="boom", traceback="/home/me/secret.py"))
    assert plain["message"] == "boom" and "traceback" not in plain
