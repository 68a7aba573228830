"""Starting a child, following it, stopping it, losing it, and finding it again."""

import json
import os
import signal
import subprocess
import sys
import time

import psutil
import pytest
import torch

from ltx_train.errors import LtxTrainError, OutOfMemory, RunError, StopRequested
from ltx_train.launch import attach, start
from ltx_train.runs.events import JobEvent, PlanEvent, SnapshotEvent, StateEvent, StepEvent, WarningEvent
from ltx_train.runs.run_dir import RunDir

posix = pytest.mark.skipif(sys.platform == "win32", reason="signals of POSIX")


@pytest.fixture
def ended():
    """Children to end after a test, whatever happened in it."""
    children = []
    yield children
    for child in children:
        if child.alive():
            child.kill()


def until(condition, seconds=15.0):
    deadline = time.time() + seconds
    while not condition():
        assert time.time() < deadline, "not within the time"
        time.sleep(0.02)


def running(run, step=1):
    return lambda: RunDir(run).read_status().step >= step or any(isinstance(e, StepEvent) and e.step >= step for e in RunDir(run).events().events)


def test_a_job_runs_to_its_end_in_an_odd_path_isolated_and_from_another_folder(engine, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run = engine.run(steps=6, end="argv")
    child = start(run, python_flags=("-I",))
    events = list(child.follow(poll=0.05))
    assert [event.step for event in events if isinstance(event, StepEvent)] == [1, 2, 3, 4, 5, 6]
    assert [event.state for event in events if isinstance(event, StateEvent)] == ["preparing", "running", "finished"]
    outcome = child.wait()
    assert outcome.ok and outcome.exit_code == 0 and outcome.log == ()
    log = RunDir(run).log_path.read_text(encoding="utf-8")
    assert "größe ✓ output of the child" in log and "(1, " in log
    assert not (run / "run.lock").exists() and RunDir(run).status().state == "finished"


def test_the_job_file_may_be_named_instead_of_the_run(engine):
    run = engine.run(steps=1)
    assert start(run / "training_config.yaml").wait(20).ok
    other = run / "another name.yaml"
    other.write_text("steps: 2\n")
    assert start(other).wait(20).ok
    assert RunDir(run).history().steps.keys() == {1, 2}
    with pytest.raises(RunError, match="no job to start"):
        start(run, kind="sample")


def test_a_stop_is_acknowledged_at_once_and_leaves_a_snapshot(engine, ended):
    run = engine.run(steps=10_000, delay=0.02)
    child = start(run)
    ended.append(child)
    until(running(run, 2))
    asked = time.time()
    child.request_stop()
    until(lambda: any(isinstance(e, StateEvent) and e.control == "stop" for e in RunDir(run).events().events), 1.5)
    outcome = child.stop(deadline=10)
    assert time.time() - asked < 5
    assert (outcome.state, outcome.exit_code) == ("stopped", 3)
    with pytest.raises(StopRequested):
        outcome.raise_for_error()
    events = RunDir(run).events().events
    assert any(isinstance(event, SnapshotEvent) and event.reason == "stop" for event in events)
    assert not RunDir(run).lock.held()


def test_a_child_that_does_not_stop_is_ended_after_the_deadline(engine, ended):
    run = engine.run(steps=10_000, delay=0.02, deaf=True)
    child = start(run)
    ended.append(child)
    until(running(run))
    with pytest.raises(TimeoutError):
        child.stop(deadline=0.5, force=False)
    pid = child.pid
    outcome = child.stop(deadline=0.5)
    assert (outcome.state, outcome.exit_code) == ("stopped", 3) and "ended at once" in outcome.message  # it was asked for: nothing is lost by surprise
    assert child.run.status().state == "stopped" and not psutil.pid_exists(pid)


@posix
def test_a_killed_child_is_lost_and_the_next_start_takes_over(engine):
    run = engine.run(steps=40, delay=0.02)
    child = start(run)
    until(running(run, 6))
    os.kill(child.pid, signal.SIGKILL)
    child._popen.wait(10)
    assert RunDir(run).status().state == "lost", "before any parent looked"
    assert (run / "run.lock").exists() and not RunDir(run).lock.held()
    outcome = child.wait()
    assert outcome.exit_code == -9 and "SIGKILL" in outcome.message and "RAM" in outcome.hint
    assert outcome.log[-1].startswith("größe")
    again = start(run)
    events = list(again.follow())
    steps = [event.step for event in events if isinstance(event, StepEvent)]
    assert 1 < steps[0] <= 11 and steps[-1] == 40, "from the snapshot on, and no event of the first start"
    assert again.wait().ok
    history = RunDir(run).history()
    assert history.attempts == 2 and list(history.steps) == list(range(1, 41)) and history.state == "finished"


def test_save_now_is_obeyed(engine, ended):
    run = engine.run(steps=10_000, delay=0.02)
    child = start(run)
    ended.append(child)
    until(running(run))
    RunDir(run).request("save")
    until(lambda: any(isinstance(e, SnapshotEvent) and e.reason == "asked for" for e in RunDir(run).events().events), 3)
    assert child.alive(), "saving does not end the run"
    child.stop(10)


def test_a_second_start_attaches_or_is_refused(engine, ended):
    run = engine.run(steps=10_000, delay=0.02)
    child = start(run)
    ended.append(child)
    with pytest.raises(RunError, match="in use") as caught:
        start(run, if_live="refuse")
    assert caught.value.code == "run.locked"
    second = start(run)
    assert second.attached and second.alive()
    until(running(run))
    assert second.pid == child.pid
    assert second.stop(10).exit_code == 3
    assert child.wait(5).exit_code == 3
    assert attach(run) is None
    assert RunDir(run).history().attempts == 1


@posix
def test_the_child_outlives_its_parent_and_is_attached_to(engine, ended):
    run = engine.run(steps=10_000, delay=0.02)
    parent = subprocess.Popen(
        [sys.executable, "-c", f"import sys, time; sys.path.insert(0, {str(engine.root)!r})\nfrom ltx_train.launch import start\nstart({str(run)!r})\ntime.sleep(60)"],
        start_new_session=True,
    )
    until(running(run))
    os.killpg(parent.pid, signal.SIGKILL)
    parent.wait()
    step = RunDir(run).history().losses[-1][0]
    child = attach(run)
    ended.append(child)
    assert child.attached and child.status().state == "running"
    until(running(run, step + 5))
    child.request_stop()
    events = list(child.follow())
    assert isinstance(events[0], JobEvent) and events[-1].state == "stopped"
    assert child.wait().exit_code == 3


def test_out_of_memory_starts_again_lower_at_most_three_times(engine):
    run = engine.run(steps=8, end="oom", enough=2)
    asked = []

    def lower(directory, notch):
        asked.append(notch)
        return f"stream {notch * 8} blocks"

    child = start(run, lower_plan=lower)
    events = list(child.follow())
    plans = [event for event in events if isinstance(event, PlanEvent)]
    assert asked == [1, 2] and [plan.notch for plan in plans] == [1, 2] and "stream 16 blocks" in plans[1].message
    assert [event.attempt for event in events if isinstance(event, JobEvent)] == [0, 1, 2]
    assert child.wait().ok and RunDir(run).status().notch == 2

    run = engine.run("never", steps=8, end="oom")
    asked.clear()
    outcome = start(run, lower_plan=lower).wait(60)
    assert asked == [1, 2, 3] and (outcome.state, outcome.exit_code, outcome.code) == ("failed", 4, "memory.out")
    with pytest.raises(OutOfMemory, match="Out of memory"):
        outcome.raise_for_error()


def test_nothing_lower_ends_the_restarts(engine):
    outcome = start(engine.run(steps=5, end="oom"), lower_plan=lambda run, notch: None).wait(20)
    assert outcome.exit_code == 4 and "CUDA error: out of memory" in outcome.hint


ENDS = {
    "data": ("data", 2, "failed", "data.empty", "The dataset holds no clip."),
    "crash": ("crash", 1, "failed", "crash", "ValueError: a bug ü"),
    "disk": ("disk", 2, "failed", "disk.full", "The disk is full: x.safetensors."),
    "import": ("import", 2, "failed", "package.missing", "The package a_package_that_is_not_there is not installed."),
}


@pytest.mark.parametrize("how", ENDS)
def test_the_real_error_reaches_the_parent(engine, how):
    end, exit_code, state, code, message = ENDS[how]
    child = start(engine.run(steps=5, end=end))
    outcome = child.wait(20)
    assert (outcome.exit_code, outcome.state, outcome.code, outcome.message) == (exit_code, state, code, message)
    assert len(outcome.message) < 120
    status = child.status()
    assert (status.error, status.error_code, status.exit_code) == (message, code, exit_code)
    with pytest.raises(LtxTrainError) as caught:
        outcome.raise_for_error()
    assert caught.value.exit_code == exit_code, "the command line ends with what the child ended with"
    with pytest.raises(RunError) as caught:
        outcome.raise_for_error()
    assert caught.value.message == message
    if how == "crash":
        assert 'raise ValueError("a bug ü")' in caught.value.hint and "Traceback" in "\n".join(outcome.log)


def test_a_config_error_is_told(engine):
    outcome = start(engine.run(rang=3)).wait(20)
    assert (outcome.exit_code, outcome.message, outcome.hint) == (2, "lora.rang is no field of a job.", "Did you mean lora.rank?")


@posix
def test_a_native_death_is_named(engine):
    child = start(engine.run(steps=5, end="SIGSEGV"))
    events = list(child.follow())
    outcome = child.wait()
    assert outcome.exit_code == -11 and "SIGSEGV" in outcome.message
    assert any("trainer.py" in line for line in outcome.log), "faulthandler's stack is in the log"
    assert events[-1].state == "lost" and RunDir(child.run.path).status().error == outcome.message


def test_a_child_that_cannot_even_start_is_reported(engine):
    (engine.root / "ltx_train" / "worker.py").write_text("raise SyntaxError('no worker')\n")
    child = start(engine.run())
    outcome = child.wait(20)
    assert outcome.exit_code == 1 and outcome.state == "failed" and "SyntaxError: no worker" in outcome.log[-1]
    assert not child.run.lock.held() and child.status().state == "failed"


def test_an_engine_python_that_is_not_there(engine, tmp_path):
    run = engine.run()
    with pytest.raises(RunError, match="engine python"):
        start(run, engine_python=tmp_path / "python")
    assert not RunDir(run).lock.held()


def test_two_ranks_average_and_stop_at_the_same_step(engine, ended):
    """Through torchrun and gloo, isolated: the gradients 1 and 2 average to 1.5. Two that run to their end: end_to_end/test_launched.py."""
    run = engine.run(steps=100_000, parallel=True, delay=0.01)
    child = start(run, num_processes=2, launcher="torchrun", python_flags=("-I",))
    ended.append(child)
    until(running(run, 6), 120)
    outcome = child.stop(deadline=30)
    assert (outcome.state, outcome.exit_code) == ("stopped", 3), outcome
    history = RunDir(run).history()
    assert history.job.num_processes == 2 and history.attempts == 1
    assert len(history.losses) >= 6 and history.losses == [(step + 1, 1.5) for step in range(len(history.losses))]
    assert (run / "train.rank1.log").read_text(encoding="utf-8").startswith("größe")


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("flags", [(), ("-I",)])
def test_accelerate_starts_two_real_gpus(engine, flags, monkeypatch):
    """The product's launcher; ComfyUI's choice of one GPU in our environment does not reach the ranks."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    run = engine.run(steps=6, parallel=True, device="auto")
    outcome = start(run, num_processes=2, launcher="accelerate", python_flags=flags).wait(240)
    assert outcome.ok, outcome
    assert RunDir(run).history().losses == [(step, 1.5) for step in range(1, 7)]


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_two_gpus_stop_together_and_a_killed_rank_is_named(engine, ended):
    run = engine.run(steps=10**6, parallel=True, device="auto", delay=0.01)
    child = start(run, num_processes=2)
    ended.append(child)
    until(running(run, 3), 120)
    asked = time.time()
    outcome = child.stop(deadline=30)
    assert (outcome.state, outcome.exit_code) == ("stopped", 3) and time.time() - asked < 5
    run = engine.run("other", steps=10**6, parallel=True, device="auto", delay=0.01, end="SIGKILL", rank=1)
    outcome = start(run, num_processes=2).wait(200)
    assert outcome.exit_code == -9 and outcome.message.startswith("Rank 1"), outcome


def test_another_ranks_error_is_told(engine):
    run = engine.run(steps=10**6, delay=0.05, end="oom", rank=1)
    outcome = start(run, num_processes=2, launcher="torchrun").wait(180)
    assert (outcome.exit_code, outcome.code, outcome.state) == (4, "memory.out", "failed") and outcome.error.rank == 1


@posix
def test_a_rank_that_is_killed_ends_the_others_and_is_named(engine):
    run = engine.run(steps=10**6, delay=0.05, end="SIGKILL", rank=1)  # rank 0 must not reach its end before torchrun looks
    outcome = start(run, num_processes=2, launcher="torchrun").wait(180)
    assert outcome.exit_code == -9 and outcome.message.startswith("Rank 1: The trainer was ended by signal 9")
    assert RunDir(run).status().state == "lost" and not RunDir(run).live()


@posix
def test_other_ranks_leave_when_rank_0_and_the_launcher_are_killed(engine):
    run = engine.run(steps=10_000, delay=0.05)
    child = start(run, num_processes=2, launcher="torchrun")
    until(running(run), 60)
    ranks = psutil.Process(child._popen.pid).children(recursive=True)
    assert len(ranks) == 2
    main = child.run.lock.owner().pid
    child._popen.kill()
    os.kill(main, signal.SIGKILL)
    other = next(rank for rank in ranks if rank.pid != main)
    until(lambda: not other.is_running() or other.status() == psutil.STATUS_ZOMBIE, 10)
    assert "Rank 0 has gone" in (run / "train.rank1.log").read_text(encoding="utf-8")


def test_following_starts_where_the_start_was(engine):
    run = engine.run(steps=2)
    assert start(run).wait(20).ok
    (run / "counter").write_text("1")
    child = start(run)
    events = list(child.follow())
    assert isinstance(events[0], JobEvent) and [e.step for e in events if isinstance(e, StepEvent)] == [2]
    assert not any(isinstance(event, WarningEvent) for event in events)
    assert json.loads((run / "status.json").read_text())["state"] == "finished"
