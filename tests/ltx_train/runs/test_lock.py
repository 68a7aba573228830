"""The lock: refused while its owner lives, taken over after a kill, handed over by token, never held twice."""

import subprocess
import sys
import threading
from dataclasses import replace

import pytest

from ltx_train.errors import RunError
from ltx_train.runs.lock import ProcessId, RunLock, write_atomic

OWN = ProcessId.of()


def test_refused_while_the_owner_lives_and_taken_over_after_its_death(tmp_path):
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    lock = RunLock(tmp_path)
    lock.take(ProcessId.of(child.pid))
    with pytest.raises(RunError, match=f"in use by process {child.pid}") as caught:
        lock.take(OWN)
    assert caught.value.code == "run.locked" and lock.held()
    child.kill()
    child.wait()
    assert not lock.held()
    lock.take(OWN)
    assert lock.owner() == OWN


def test_handed_over_by_token_and_released_only_by_it(tmp_path):
    lock = RunLock(tmp_path)
    token = lock.take(OWN)
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    try:
        assert lock.take(ProcessId.of(child.pid), token) == token
        assert lock.owner().pid == child.pid
        lock.release("another")
        assert lock.held()
        lock.release(token)
        assert lock.owner() is None and not lock.held()
    finally:
        child.kill()
        child.wait()


def test_a_pid_used_again_does_not_hold(tmp_path):
    lock = RunLock(tmp_path)
    lock.take(replace(OWN, created=OWN.created - 1000, ticks=None))
    assert not lock.held()


def test_a_damaged_lock_file_does_not_hold(tmp_path):
    (tmp_path / "run.lock").write_text("{")
    assert RunLock(tmp_path).owner() is None
    RunLock(tmp_path).take(OWN)


def test_another_machines_lock_holds_while_it_is_refreshed(tmp_path):
    lock = RunLock(tmp_path, foreign_timeout=100)
    lock.take(replace(OWN, host="elsewhere"))
    assert lock.held() and not lock.owner().alive()
    lock.foreign_timeout = -1
    assert not lock.held()


@pytest.mark.parametrize("attempt", range(5))
def test_of_many_takers_of_a_stale_lock_one_wins(tmp_path, attempt):
    RunLock(tmp_path).take(replace(OWN, created=1.0, ticks=None))
    winner, refused = [], []
    barrier = threading.Barrier(4)

    def take():
        barrier.wait()
        try:
            winner.append(RunLock(tmp_path).take(OWN))
        except RunError:
            refused.append(1)

    threads = [threading.Thread(target=take) for _ in range(4)]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    assert len(winner) == 1 and len(refused) == 3


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells a process's start apart from the wall clock")
def test_a_clock_that_is_set_does_not_make_a_live_owner_look_dead(tmp_path, monkeypatch):
    import psutil

    lock = RunLock(tmp_path)
    lock.take(OWN)
    shifted = psutil.Process.create_time
    monkeypatch.setattr(psutil.Process, "create_time", lambda self: shifted(self) + 3600)  # the boot time has moved with the clock
    assert lock.held() and OWN.alive()
    assert not replace(OWN, ticks=OWN.ticks - 1).alive(), "a reused pid started at another tick"
    assert not replace(OWN, ticks=None).alive(), "what an older version wrote is told by its time"


def test_a_write_that_fails_says_where(tmp_path, monkeypatch):
    def full(*args, **kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("pathlib.Path.write_text", full)
    with pytest.raises(OSError) as caught:
        write_atomic(tmp_path / "status.json", "{}")
    assert caught.value.filename == str(tmp_path / "status.json") and list(tmp_path.iterdir()) == []
