"""Snapshots: killed at every point of a save, damaged in every way, disk full, retention, official states."""

from __future__ import annotations

import errno
import json
import os
import resource
import signal
from pathlib import Path

import pytest
import safetensors.torch
import torch

from ltx_train import tensorfile
from ltx_train.errors import RunError
from ltx_train.tensorfile import Lazy, atomic_file, save_tensors
from ltx_train.training import snapshots as room
from ltx_train.training.snapshots import (
    CheckpointsSection,
    damage,
    load_snapshot,
    newest_valid,
    read_official_state,
    retain,
    save_snapshot,
    snapshot_path,
    snapshots,
)  # fmt: skip


def content(value: float, big: int = 64) -> tuple[dict, dict]:
    tensors = {"adapter": {"a.lora_A.weight": torch.full((4, big), value), "n": torch.tensor(3)}, "optimizer": {"0.exp_avg": torch.full((big,), value, dtype=torch.bfloat16)}}
    return tensors, {"step": int(value), "text": "ä", "lr": 0.1 + 0.2}


def save(run: Path, step: int, value: float | None = None) -> Path:
    tensors, state = content(step if value is None else value)
    return save_snapshot(snapshot_path(run, step), tensors, state)


def value_of(run: Path) -> float | None:
    path = newest_valid(run)
    return None if path is None else load_snapshot(path).tensors("adapter")["a.lora_A.weight"][0, 0].item()


def test_round_trip(tmp_path):
    path = save(tmp_path, 500)
    assert path == tmp_path / "checkpoints" / "state_step_00500" and newest_valid(tmp_path) == path
    snapshot = load_snapshot(path)
    tensors, state = content(500)
    assert (snapshot.step, snapshot.state, set(snapshot.groups)) == (500, state, {"adapter", "optimizer"})
    for group, values in tensors.items():
        loaded = snapshot.tensors(group)
        assert all(torch.equal(loaded[k], v) and loaded[k].dtype == v.dtype for k, v in values.items())
    with pytest.raises(RunError, match="holds no ema"):
        snapshot.tensors("ema")
    assert not [p for p in path.parent.iterdir() if p.name.startswith(".")]


@pytest.mark.parametrize("dtype", list(tensorfile.DTYPE_NAMES))
def test_file_is_what_safetensors_reads(tmp_path, dtype):
    tensors = {"b": torch.arange(6).reshape(2, 3).to(dtype), "scalar": torch.tensor(1).to(dtype), "none": torch.empty(0, 4).to(dtype), "odd": torch.ones(3, dtype=torch.uint8)}
    written = save_tensors(tmp_path / "x.safetensors", {**tensors, "lazy": Lazy((2,), torch.float32, lambda: torch.tensor([1.0, 2.0]))}, {"k": "v ü"})
    with safetensors.safe_open(tmp_path / "x.safetensors", "pt") as file:
        assert file.metadata() == {"k": "v ü"}
        for name, value in tensors.items():
            got = file.get_tensor(name)
            assert got.dtype == dtype or name == "odd"
            assert got.shape == value.shape and torch.equal(got.reshape(-1).view(torch.uint8), value.reshape(-1).view(torch.uint8))
        assert file.get_tensor("lazy").tolist() == [1.0, 2.0]
    assert written.size == (tmp_path / "x.safetensors").stat().st_size


def in_child(action) -> int:
    """Run in a forked process; its exit code."""
    pid = os.fork()
    if pid == 0:
        try:
            action()
        except BaseException:  # a kill of its own too: the fork must not run on as the tests do
            os._exit(1)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])




@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.parametrize("same_step", [False, True], ids=["next-step", "same-step-again"])
def test_killed_between_any_two_files(tmp_path, same_step):
    """kill -9 before each action of a save: what is found afterwards is the old snapshot or the whole new one, never less."""
    seen = set()
    for kill_at in range(40):
        run = tmp_path / str(kill_at)
        save(run, 1, 1.0)
        target = 1 if same_step else 2

        def action(run=run, kill_at=kill_at, target=target):
            count = [0]

            def killing(function):
                def wrapper(*args, **kwargs):
                    if count[0] == kill_at:
                        os.kill(os.getpid(), signal.SIGKILL)
                    count[0] += 1
                    return function(*args, **kwargs)

                return wrapper

            for name in ("write_tensors", "sync_file", "sync_folder", "_delete"):
                setattr(room, name, killing(getattr(room, name)))
            room.os.replace = killing(os.replace)
            save(run, target, 2.0)

        code = in_child(action)
        found = value_of(run)
        assert found in (1.0, 2.0)
        seen.add(found)
        after = save(run, 3, 3.0)  # and the next save works and clears the rubbish
        assert value_of(run) == 3.0 and not list(after.parent.glob(".state*"))
        if code == 0:
            break
        assert code == -signal.SIGKILL
    assert seen == {1.0, 2.0} and code == 0 and kill_at > 8


DAMAGE = {
    "manifest gone": lambda p: (p / "MANIFEST.json").unlink(),
    "manifest cut": lambda p: (p / "MANIFEST.json").write_text('{"format": 1'),
    "manifest of another format": lambda p: (p / "MANIFEST.json").write_text('{"format": 99, "files": {}}'),
    "state gone": lambda p: (p / "state.json").unlink(),
    "tensors gone": lambda p: (p / "adapter.safetensors").unlink(),
    "tensors cut": lambda p: (p / "adapter.safetensors").write_bytes((p / "adapter.safetensors").read_bytes()[:-1]),
    "one bit": lambda p: (p / "optimizer.safetensors").write_bytes((p / "optimizer.safetensors").read_bytes()[:-1] + b"\x55"),
}


@pytest.mark.parametrize("how", DAMAGE)
def test_damaged_newest_is_passed_over_and_told(tmp_path, how):
    save(tmp_path, 1)
    newer = save(tmp_path, 2)
    DAMAGE[how](newer)
    told = []
    assert newest_valid(tmp_path, lambda path, why: told.append((path, why))).name == "state_step_00001"
    assert told and told[0][0] == newer and told[0][1]
    with pytest.raises(RunError) as error:
        load_snapshot(newer)
    assert error.value.code == "snapshot.damaged" and len(error.value.message) < 120


def test_nothing_there(tmp_path):
    assert newest_valid(tmp_path) is None and snapshots(tmp_path) == [] and retain(tmp_path, 1) == []


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.parametrize("limit", [100, 5_000, 300_000])
def test_disk_full_keeps_the_last_good_one(tmp_path, limit):
    """A real failing write: the system refuses files longer than ``limit`` bytes (EFBIG)."""
    save(tmp_path, 1)

    def action():
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
        tensors, state = content(2.0, big=100_000)
        try:
            save_snapshot(snapshot_path(tmp_path, 2), tensors, state)
        except RunError as error:
            assert error.code == "run.disk_full" and "untouched" in error.hint
            os._exit(7)

    assert in_child(action) == 7
    assert value_of(tmp_path) == 1.0 and [p.name for p in (tmp_path / "checkpoints").iterdir()] == ["state_step_00001"]


def test_too_little_room_is_seen_before_writing(tmp_path, monkeypatch):
    save(tmp_path, 1)
    usage = type("Usage", (), {"free": 100})
    monkeypatch.setattr(room.shutil, "disk_usage", lambda path: usage)
    with pytest.raises(RunError, match="a snapshot needs"):
        save(tmp_path, 2)
    assert value_of(tmp_path) == 1.0


def test_other_errors_pass_through(tmp_path, monkeypatch):
    def broken(*args):
        raise OSError(errno.EIO, "input/output error")

    monkeypatch.setattr(room, "write_tensors", broken)
    with pytest.raises(OSError, match="input/output"):
        save(tmp_path, 1)
    assert list((tmp_path / "checkpoints").iterdir()) == []


def test_atomic_file_leaves_nothing_on_error(tmp_path):
    (tmp_path / "a").write_text("old")
    with pytest.raises(ValueError), atomic_file(tmp_path / "a") as file:
        file.write(b"half")
        raise ValueError
    assert (tmp_path / "a").read_text() == "old" and len(list(tmp_path.iterdir())) == 1
    with pytest.raises(RunError, match="disk is full"), atomic_file(tmp_path / "a") as file:
        raise OSError(errno.ENOSPC, "no space")
    assert (tmp_path / "a").read_text() == "old" and len(list(tmp_path.iterdir())) == 1


def weights(run: Path, step: int) -> Path:
    path = run / "checkpoints" / f"lora_weights_step_{step:05d}.safetensors"
    save_tensors(path, {"x": torch.zeros(1)})
    return path


@pytest.mark.parametrize(("keep", "left"), [(1, [30]), (2, [20, 30]), (0, [10, 20, 30]), (-1, [10, 20, 30]), (9, [10, 20, 30])])
def test_retention(tmp_path, keep, left):
    for step in (10, 20, 30):
        save(tmp_path, step)
        weights(tmp_path, step)
    gone = retain(tmp_path, keep)
    assert [load_snapshot(p).step for p in reversed(snapshots(tmp_path))] == left
    assert sorted(int(p.stem[-5:]) for p in (tmp_path / "checkpoints").glob("lora_*")) == left
    assert len(gone) == 2 * (3 - len(left))


def test_retention_never_deletes_the_last_good_one(tmp_path):
    for step in (1, 2, 3):
        save(tmp_path, step)
    for step in (2, 3):
        (snapshot_path(tmp_path, step) / "state.json").unlink()
    retain(tmp_path, 1)
    assert value_of(tmp_path) == 1.0
    assert [p.name for p in snapshots(tmp_path)] == ["state_step_00003", "state_step_00001"]


def test_steps_beyond_five_digits_sort_as_numbers(tmp_path):
    save(tmp_path, 99_999)
    save(tmp_path, 100_000)
    assert load_snapshot(newest_valid(tmp_path)).step == 100_000


def test_section_defaults():
    section = CheckpointsSection()
    dump = section.model_dump()
    assert dump == {"interval": None, "keep_last_n": 1, "precision": "bfloat16", "no_resume": False, "save_training_state": "full", "park_minutes": 30.0}
    assert section.dtype == torch.bfloat16 and CheckpointsSection(precision="float32").dtype == torch.float32
    for bad in ({"interval": 0}, {"keep_last_n": -2}, {"precision": "fp16"}, {"save_training_state": "half"}):
        with pytest.raises(ValueError):
            CheckpointsSection(**bad)


def test_official_state(tmp_path):
    path = tmp_path / "training_state_step_00250.pt"
    torch.save(
        {"global_step": 250, "config_fingerprint": {"lora_rank": 32}, "rng_states": {"torch_state": torch.get_rng_state()}, "optimizer_state_dict": {}}, path
    )
    state = read_official_state(path)
    assert (state.step, dict(state.fingerprint), state.wandb_run_id, state.has_optimizer) == (250, {"lora_rank": 32}, None, True)

    class Evil:
        def __reduce__(self):
            return (os.mkdir, (str(tmp_path / "ran"),))

    torch.save({"global_step": 1, "x": Evil()}, path)
    with pytest.raises(RunError, match="cannot be read"):
        read_official_state(path)
    assert not (tmp_path / "ran").exists()
    path.write_bytes(b"nonsense")
    with pytest.raises(RunError, match="cannot be read"):
        read_official_state(path)
    with pytest.raises(RunError, match="no training state"):
        read_official_state(tmp_path / "absent.pt")


def test_state_is_plain_json(tmp_path):
    path = save(tmp_path, 5)
    assert json.loads((path / "state.json").read_text())["lr"] == 0.1 + 0.2
    assert damage(path) is None and damage(path, quick=True) is None
