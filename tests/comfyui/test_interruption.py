"""In a real ComfyUI: interrupt, queueing again, ComfyUI killed in mid-run, a child killed, a run that is at work already."""

import os
import signal
import time

import psutil
import pytest

from tests.comfyui.host import MODELS, Server, make_base

STEPS = 60


@pytest.fixture(scope="module")
def own(tmp_path_factory):
    """A ComfyUI that these tests may kill."""
    server = Server(make_base(tmp_path_factory.mktemp("own") / "ComfyUI", families=("ltx2.3",), pack_name="ltx_train_pack")).start()
    yield server
    server.stop()


def train(workflow, run_name, steps=STEPS):
    prompt = workflow("train", MODEL=MODELS["ltx2.3"], RUN=run_name, MODE="t2v")
    prompt["4"]["inputs"] |= {"steps": steps, "checkpoints": ["9", 0]}
    prompt["9"] = {"class_type": "LTXTrainCheckpointSettings", "inputs": {"interval": 10, "keep_last_n": 2}}
    return prompt


def steps_of(run):
    return [step for step, _ in run.history().losses]


def working(server, run_name, step=3):
    """The run once it has done some steps."""
    run = server.run_dir(run_name)
    server.until(lambda: run.exists() and run.status_path.exists() and run.read_status().step >= step, text=f"step {step}")
    return run


def gone(pid):
    return not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


def interrupt(server):
    import urllib.request

    urllib.request.urlopen(urllib.request.Request(server.url + "/interrupt", b"", method="POST"), timeout=10).read()


def test_interrupt_stops_the_child_and_queueing_again_goes_on(own, workflow):
    asked = own.queue(train(workflow, "stopped"))
    run = working(own, "stopped")
    child = run.lock.owner().pid
    started = time.monotonic()
    interrupt(own)
    own.until(lambda: gone(child), 60)
    seconds = time.monotonic() - started
    busy = max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))  # others may be at work on this machine
    assert seconds < 5 * busy, f"the child took {seconds:.1f} s to go, on a machine {busy:.1f} times busy"
    ended = own.wait(asked)
    assert ended.interrupted and ended.status == "error"
    status = run.status()
    assert status.state == "stopped" and 0 < status.step < STEPS
    assert (run.checkpoints / f"state_step_{status.step:05d}" / "MANIFEST.json").is_file()
    own.run(train(workflow, "stopped")).good()
    assert run.status().state == "finished"
    history = run.history()
    assert history.attempts == 2
    assert steps_of(run) == list(range(1, STEPS + 1))
    again = [event.step for event in run.events().events if event.type == "step"]
    assert len(again) == STEPS, "no step was done twice"


def test_comfyui_killed_in_mid_run_the_same_prompt_attaches(own, workflow):
    own.queue(train(workflow, "survivor", 100_000))
    run = working(own, "survivor")
    child = run.lock.owner().pid
    own.stop(signal.SIGKILL)
    assert not gone(child), "the child survives ComfyUI"
    own.start()
    asked = own.queue(train(workflow, "survivor", 100_000))
    own.until(lambda: own.get("/queue")["queue_running"], text="the prompt running")
    own.until(lambda: "attached to it" in own.log.read_text(errors="replace"), text="the attached node")
    before = run.read_status().step
    own.until(lambda: run.read_status().step > before + 2, text="further steps")
    own.post("/ltx_train/runs/survivor/stop", {})
    ended = own.wait(asked)
    assert "was stopped at step" in ended.error, "a node that follows tells how the run ended"
    assert gone(child) and run.history().attempts == 1, "attached: no second start"
    assert steps_of(run) == list(range(1, run.status().step + 1))


def test_comfyui_and_child_killed_the_same_prompt_takes_the_run_up(own, workflow):
    own.queue(train(workflow, "taken up", 200))
    run = working(own, "taken up", 12)
    child = run.lock.owner().pid
    os.kill(child, signal.SIGKILL)
    own.stop(signal.SIGKILL)
    own.until(lambda: gone(child))
    assert run.status().state == "lost"
    kept = max(int(found.parent.name.rpartition("_")[2]) for found in run.checkpoints.glob("state_step_*/MANIFEST.json"))
    assert kept >= 10
    own.start()
    own.run(train(workflow, "taken up", 200)).good()
    assert run.history().attempts == 2
    assert steps_of(run) == list(range(1, 201))
    events = run.events().events
    second = [place for place, event in enumerate(events) if event.type == "job"][1]
    assert next(event.step for event in events[second:] if event.type == "step") == kept + 1


def test_a_killed_child_is_a_red_node_with_the_cause(own, workflow):
    asked = own.queue(train(workflow, "killed"))
    run = working(own, "killed")
    os.kill(run.lock.owner().pid, signal.SIGKILL)
    ended = own.wait(asked)
    assert ended.status == "error"
    assert "signal 9" in ended.error.splitlines()[0]


def test_a_second_prompt_at_a_live_run_waits_for_it(own, workflow):
    """Another ComfyUI on the same folders, as two browser tabs on two ports have it."""
    first = own.queue(train(workflow, "shared"))
    run = working(own, "shared")
    second = Server(own.base)
    second.log = own.base / "second.log"
    second.start()
    try:
        asked = second.queue(train(workflow, "shared"))
        own.wait(first).good()
        second.wait(asked).good()
    finally:
        second.stop()
    assert run.history().attempts == 1
    assert steps_of(run) == list(range(1, STEPS + 1))
