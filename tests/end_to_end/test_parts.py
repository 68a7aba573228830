"""A run in parts: parked between them, gone on with, killed, stopped, left alone; the same as in one go, bit for bit."""

import os
import subprocess
import sys
import threading
import time
from contextlib import contextmanager
from dataclasses import asdict, replace
from types import SimpleNamespace

import pytest
import torch

from ltx_train import launch, network, parking
from ltx_train.__main__ import main
from ltx_train.errors import StopRequested
from ltx_train.launch import attach
from ltx_train.memory.pinned import HostMemory
from ltx_train.memory.saved import SavedTensors
from ltx_train.parking import Asked, Lot, Parking, tensors_within
from ltx_train.room import Parked
from ltx_train.run_setup import find_run, launch_job, open_training, same_job
from ltx_train.runs.events import JobEvent, LoraEvent, PhaseEvent, SampleEvent, SnapshotEvent, StateEvent
from ltx_train.runs.exits import OUT_OF_MEMORY
from ltx_train.runs.lock import ProcessId
from ltx_train.runs.run_dir import RunDir, Status
from tests.end_to_end.corridor import Done, Forked, finish, fork, same, train
from tests.end_to_end.test_resume import settings

STEPS = 6


def until(what, text, seconds=60):
    deadline = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < deadline, f"{text} did not come about"
        time.sleep(0.01)


def until_parked(run, step):
    """Wait until the child waits after this step."""
    until(lambda: run.read_status().state == "parked" and run.read_status().step == step, f"the pause after step {step}", 120)


def asked(run, steps, **more):
    run.control.mkdir(parents=True, exist_ok=True)
    run.request("go_on", steps=steps, **more)


@contextmanager
def in_parts(live, sizes, look=None):
    """Someone who has a run go on whenever it is parked; ``look`` is called while it is."""
    failed = []

    def work():
        at = 0
        try:
            for size, after in zip(sizes, [*sizes[1:], None]):
                at += size
                if after is None:
                    return
                until_parked(live.dir, at)
                if look is not None:
                    look()
                asked(live.dir, after)
        except BaseException as error:  # told where the test's own thread asserts
            failed.append(error)
            live.stop.request("the test failed")

    asked(live.dir, sizes[0])
    other = threading.Thread(target=work)
    other.start()
    yield
    other.join()
    assert not failed, failed


@pytest.fixture(scope="module")
def straight(home, tmp_path_factory):
    """Uninterrupted runs by optimizer, each made once."""
    made = {}

    def get(optimizer, **more):
        if optimizer not in made:
            made[optimizer] = train(settings(home, tmp_path_factory.mktemp("straight") / "run", optimizer, **more))
        return made[optimizer]

    return get


@pytest.fixture
def moved(monkeypatch):
    """The processor's memory stands for a card's: everything leaves it, and the lots that did are kept."""
    monkeypatch.setattr(parking, "MOVED", ("cuda", "cpu"))
    lots, original = [], Lot.leave_device
    monkeypatch.setattr(Lot, "leave_device", lambda lot: (lots.append(lot), original(lot)))
    return lots


@pytest.mark.parametrize("optimizer", ["adamw8bit", "prodigy", "adamw_schedulefree"])
def test_three_parts_are_one_run_bit_for_bit(home, tmp_path, straight, moved, optimizer):
    """Weights, optimizer, EMA, losses and file; in each pause nothing that the loop keeps is left where it was."""
    seen = []

    def look():
        parts = moved[-1].parts
        kept = [*parts.trainable.parameters(), *parts.step.transformer.parameters(), *tensors_within(parts.optimizer, parts.ema)]
        seen.append(max(t.untyped_storage().nbytes() for t in kept if t.untyped_storage().resizable()))

    whole = straight(optimizer)
    done = train(settings(home, tmp_path / "parts", optimizer), lambda live: in_parts(live, (2, 1, 3), look))
    assert seen == [0, 0] and all(lot.size > 100_000 and not lot.parked for lot in moved)
    assert same(whole.snapshot, done.snapshot)
    assert whole.losses == done.losses and len(done.losses) == STEPS
    assert [(e.grad_norm, e.loss_average) for e in whole.steps.values()] == [(e.grad_norm, e.loss_average) for e in done.steps.values()]
    assert whole.lora.read_bytes() == done.lora.read_bytes()
    assert [e.step for e in done.events(LoraEvent)] == [2, 3, 4, 6] and [e.final for e in done.events(LoraEvent)].count(True) == 1
    assert [e.reason for e in done.events(SnapshotEvent)] == ["interval", "part", "interval", "end"]
    assert [e.phase for e in done.events(PhaseEvent) if e.state == "start"].count("load the model") == 1


@pytest.mark.parametrize("memory", [{"quantization": "int8-quanto", "stream_blocks": 1, "offload_activations": "on"}, {"quantization": "nf4"}, {"compile": "on"}])
def test_streamed_quantised_and_compiled_blocks_come_back(home, tmp_path, moved, monkeypatch, memory):
    if "compile" in memory:  # without a card it has no use, but works
        chosen = network.engine_settings
        monkeypatch.setattr(network, "engine_settings", lambda *args, **more: replace(chosen(*args, **more), compile=True, backend="eager"))
    job = {"optimization": {"steps": 2}, "acceleration": memory, "training_strategy": {"name": "flexible", "video": {"is_generated": True}}}
    whole = train(home.config(tmp_path / "whole", **job))
    done = train(home.config(tmp_path / "parts", **job), lambda live: in_parts(live, (1, 1)))
    assert len(moved) == 1 and same(whole.snapshot, done.snapshot) and whole.losses == done.losses
    engine = moved[0].parts.step.transformer.block_runner
    assert engine.settings.compile == ("compile" in memory) and engine.store.streams == ("stream_blocks" in memory)


def test_shared_buffers_are_known_wherever_they_stand():
    """A saved view of a ring buffer is kept by name also after a pause has moved the buffer; its old address means nothing then."""
    ring = torch.zeros(1 << 12, dtype=torch.uint8)
    saved = SavedTensors(lambda index: ring, [ring], torch.device("cpu"), offload=False, memory=HostMemory(pin=False))
    parked = Parked.take(ring.untyped_storage())
    others = [torch.zeros(1 << 12, dtype=torch.uint8) for _ in range(64)]  # one of them may stand where the ring stood
    parked.give_back()
    saved.start()
    assert not isinstance(saved._pack(ring.view(64, 64)), torch.Tensor)
    assert all(saved._pack(one) is one for one in others)


def test_previews_between_parts(home, tmp_path, moved):
    """Previews of the average after a pause are those of a run in one go."""
    job = {
        "optimization": {"steps": 2, "ema": {"decay": 0.5}}, "training_strategy": {"name": "flexible", "video": {"is_generated": True}},
        "validation": {"samples": [{"prompt": "a ball"}], "video_dims": [64, 64, 9], "inference_steps": 1, "interval": 1, "generate_audio": False, "skip_initial_validation": True},
    }  # fmt: skip
    whole = train(home.config(tmp_path / "whole", **job))
    done = train(home.config(tmp_path / "parts", **job), lambda live: in_parts(live, (1, 1)))
    made = [(e.step, e.path) for e in done.events(SampleEvent)]
    assert [step for step, _ in made] == [1, 2] and len(moved) == 1 and whole.losses == done.losses
    assert all((done.run.path / path).read_bytes() == (whole.run.path / path).read_bytes() for _, path in made)


def test_what_leaves_the_device_and_comes_back(monkeypatch):
    """Weights with their views, states, and a tensor that two share; recordings are forgotten, connectors put away first."""
    monkeypatch.setattr(parking, "MOVED", ("cpu",))
    called = []
    model = torch.nn.Linear(3, 3)
    model.pass_runner = SimpleNamespace(forget=lambda: called.append("forget"))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    shared = torch.arange(5.0)
    step = torch.nn.Module()
    step.transformer, step.cached = model, [shared, shared[2:]]
    contexts = SimpleNamespace(leave=lambda: called.append("leave"))
    parts = SimpleNamespace(step=step, trainable=None, optimizer=optimizer, scaler=None, ema=None, data=SimpleNamespace(batches=SimpleNamespace(contexts=contexts)))
    before = [t.clone() for t in tensors_within(step, optimizer)]
    lot = Lot(torch.device("cpu"), parts)
    assert lot.fits() and lot.size == sum(t.nbytes for t in before) - shared[2:].nbytes
    lot.leave_device()
    assert called == ["leave", "forget"] and all(t.untyped_storage().nbytes() == 0 for t in tensors_within(step, optimizer))
    lot.come_back()
    assert all(torch.equal(a, b) for a, b in zip(before, tensors_within(step, optimizer)))
    monkeypatch.setattr(parking, "HOST_RESERVE", 1 << 60)
    one_rank = SimpleNamespace(any=bool)
    for sharded, why in ((False, "no room"), (True, "shards")):
        waiting = Parking(None, one_rank, SimpleNamespace(trainable=SimpleNamespace(sharded=sharded)), 30.0)
        assert why in waiting._why_not(lot)


def test_killed_while_parked(home, tmp_path, straight):
    """kill -9 in the pause: the next start goes on from the part's snapshot."""
    whole = straight("prodigy")
    config = settings(home, tmp_path / "killed", "prodigy", interval=None)
    run = RunDir(tmp_path / "killed")
    asked(run, 3)
    (child,) = fork(config)
    until_parked(run, 3)
    child.kill()
    child.join()
    assert run.status().state == "lost"
    done = finish(fork(config), config)
    assert same(whole.snapshot, done.snapshot) and whole.losses == done.losses and whole.lora.read_bytes() == done.lora.read_bytes()
    assert len(done.events(JobEvent)) == 2 and [e.step for e in done.events(SnapshotEvent)] == [3, 6]


def test_a_parked_run_is_stopped_from_outside(home, tmp_path):
    """`stop` ends it within a second as a stopped run, its heartbeat going until then; nothing is saved twice."""
    config = home.config(tmp_path / "run", optimization={"steps": 4})
    run = RunDir(tmp_path / "run")
    asked(run, 1)
    (child,) = fork(config)
    until_parked(run, 1)
    beat = run.read_status().heartbeat
    until(lambda: run.read_status().heartbeat > beat, "a heartbeat", 5)
    status = run.status()
    assert status.live and status.part == 1 and status.part_done
    started = time.monotonic()
    outcome = attach(run.path).stop()
    assert (outcome.state, outcome.exit_code) == ("stopped", 3) and outcome.part_done and time.monotonic() - started < 5
    child.join()
    done = Done(run)
    assert [e.reason for e in done.events(SnapshotEvent)] == ["part"] and len(done.events(LoraEvent)) == 1
    assert [e.state for e in done.events(StateEvent)][-3:] == ["parked", "stopping", "stopped"]


def test_nobody_comes(home, tmp_path):
    """After park_minutes it ends as a stopped run that says why; with 0 it does not wait at all."""
    for minutes in (0.005, 0.0):
        config = home.config(tmp_path / f"{minutes}", optimization={"steps": 4}, checkpoints={"park_minutes": minutes})
        with pytest.raises(StopRequested, match="park_minutes" if minutes == 0 else "nobody asked"):
            train(config, lambda live: in_parts(live, (1,)))
        states = [e.state for e in Done(RunDir(tmp_path / f"{minutes}")).events(StateEvent)]
        assert ("parked" in states) == (minutes > 0) and states[-1] == "stopping"


def test_the_program_it_trains_for_dies(home, tmp_path):
    other = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    owner = asdict(ProcessId.of(other.pid))
    config, run = home.config(tmp_path / "run", optimization={"steps": 4}), RunDir(tmp_path / "run")
    asked(run, 1, owner=owner)

    @contextmanager
    def watch(live):
        ended = threading.Thread(target=lambda: (until_parked(run, 1), time.sleep(0.5), states.append(run.read_status().state), other.kill(), other.wait()))
        ended.start()
        yield

    states = []
    with pytest.raises(StopRequested, match="has gone"):
        train(config, watch)
    assert states == ["parked"] and run.read_status().part_done is False and Done(run).events(StateEvent)[-1].state == "stopping"


def test_two_ranks_park_together(home, tmp_path, straight):
    def config(name):
        return home.config(tmp_path / name, optimization={"steps": 2, "batch_size": 1})

    whole = finish(fork(config("whole"), 2), config("whole"))
    run = RunDir(tmp_path / "parts")
    asked(run, 1)
    ranks = fork(config("parts"), 2)
    until_parked(run, 1)
    asked(run, 0)
    done = finish(ranks, config("parts"))
    assert same(whole.snapshot, done.snapshot) and whole.losses == done.losses


def test_the_launcher_has_a_parked_child_go_on(home, tmp_path, monkeypatch, capsys):
    """The second part starts without loading anything; changed settings make it start anew; the command line says how to go on."""
    monkeypatch.setattr(launch, "spawn", Forked)
    config = home.config(tmp_path / "run", optimization={"steps": 6, "scheduler_type": "constant"})
    owner = ProcessId.of(os.getpid())
    child = launch_job(open_training(config), steps_this_run=1, owner=owner)
    events = list(child.follow())
    assert child.outcome().parked and child.wait().part_done and [e.step for e in events if isinstance(e, LoraEvent)] == [1]
    child.outcome().raise_for_error()
    pid = child.pid

    started = time.monotonic()
    again = launch_job(open_training(config), steps_this_run=1, owner=owner)
    events = list(again.follow())
    seconds = time.monotonic() - started
    assert again.pid == pid and again.outcome().parked and [e.step for e in events if isinstance(e, LoraEvent)] == [2]
    assert not [e for e in events if isinstance(e, JobEvent | PhaseEvent)] and seconds < 10, seconds

    assert main(["resume", str(child.run.path), "--steps-this-run", "2"]) == 0
    told = capsys.readouterr().out
    assert "lora_weights_step_00004.safetensors" in told and "--steps-this-run N; end it:" in told and child.pid == pid

    longer = home.config(tmp_path / "run", optimization={"steps": 7, "scheduler_type": "constant"})
    assert same_job(config, find_run(config)) and not same_job(longer, find_run(longer))
    last = launch_job(open_training(longer))
    assert last.pid != pid and last.wait(120).ok and last.run.read_status().step == 7
    done = Done(child.run)
    assert len(done.losses) == 7 and len(done.events(JobEvent)) == 2


def test_a_part_that_runs_out_of_memory_ends_where_it_was_to_end(tmp_path, monkeypatch):
    """The start with less memory gets the same end of the part, wherever its snapshot lies."""
    run = RunDir.create(tmp_path / "run")
    run.write_status(Status(state="failed", step=7, part=9, exit_code=OUT_OF_MEMORY))
    child, started = launch.Child(run, launch.Launch(lower_plan=lambda run, notch: "less", steps_this_run=4)), []
    monkeypatch.setattr(launch, "start", lambda path, **given: started.append(given["launch"]) or child)
    assert child._start_lower()
    started[0].ask(run)
    assert Asked.read(run.take_request("go_on")).end(6, 20) == 9


def test_what_a_control_file_may_say():
    assert Asked.read(None) == Asked.read({"steps": "x", "owner": {"pid": 1}}) == Asked.read({"steps": -3}) == Asked()
    assert [Asked(2).end(3, 9), Asked(0).end(3, 9), Asked(6).end(3, 9), Asked(until=5).end(3, 9), Asked(until=2).end(3, 9)] == [5, None, None, 5, 4]


def test_tensors_are_found_wherever_they_are_kept():
    class Wrapped(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.one, self.cached = torch.nn.Linear(2, 2), {"a": [torch.zeros(1)]}

    model = Wrapped()
    optimizer = torch.optim.AdamW(model.one.parameters())
    model.one(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    assert len({id(t) for t in tensors_within(model, optimizer)}) == 2 + 2 + 1 + 2 * 3
