"""The run directory: status, liveness, control files, names, the log's tail."""

import json
import os
import subprocess
import sys
import time

import pytest

from ltx_train.errors import RunError
from ltx_train.runs.lock import ProcessId
from ltx_train.runs.run_dir import RunDir, Status, check_name, list_runs, versions_of


@pytest.fixture
def run(tmp_path):
    return RunDir.create(tmp_path / "größe 1" / "my run")


def sleeper():
    return subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])


def status_of(pid):
    process = ProcessId.of(pid)
    return Status(state="running", pid=process.pid, created=process.created, host=process.host)


def test_status_comes_back_and_appears_at_once(run):
    run.write_status(Status(state="finished", step=5, total=10, loss=0.25, error="ü"))
    assert run.status() == Status(state="finished", step=5, total=10, loss=0.25, error="ü")
    assert run.update_status(step=6).step == 6 and run.read_status().total == 10
    assert [path.name for path in run.path.iterdir() if path.name.endswith(".tmp")] == []


def test_running_with_a_dead_process_reads_as_lost(run):
    child = sleeper()
    run.write_status(status_of(child.pid))
    assert run.status().state == "running" and run.live()
    child.kill()
    deadline = time.time() + 5
    while run.status().state != "lost" and time.time() < deadline:  # a zombie at first: we have not waited for it
        time.sleep(0.02)
    assert run.status().state == "lost" and not run.live()
    assert child.wait() != 0
    assert run.status().state == "lost" and run.read_status().state == "running"


def test_a_reused_pid_is_another_process(run):
    own = ProcessId.of()
    run.write_status(Status(state="running", pid=own.pid, created=own.created - 100, host=own.host))
    assert run.status().state == "lost"
    run.write_status(Status(state="running", pid=own.pid, created=own.created + 0.5, host=own.host))
    assert run.status().state == "running"


@pytest.mark.parametrize("text", ["", "{", "[]", '{"state": "happy"}', "\0\0\0"])
def test_a_damaged_status_reads_as_lost(run, text):
    run.status_path.write_text(text, encoding="utf-8")
    status = run.status()
    assert (status.state, status.error_code) == ("lost", "run.status") and "snapshot" in status.hint
    assert run.update_status(state="preparing").state == "preparing" and run.read_status().error_code == "run.status"


def test_a_status_that_cannot_be_written_leaves_nothing_behind(run, monkeypatch):
    import errno
    import os

    def full(self, text, **options):
        with open(self, "w") as file:
            file.write(text[:3])
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self))

    monkeypatch.setattr("pathlib.Path.write_text", full)
    with pytest.raises(OSError, match="No space"):
        run.write_status(Status(state="running"))
    assert list(run.path.glob(".*")) == []


def test_control_files_are_asked_and_taken_once(run):
    assert not run.requested("stop") and run.take_request("stop") is None
    run.request("stop", deadline=30)
    assert run.requested("stop") and run.take_request("stop")["deadline"] == 30
    assert run.take_request("stop") is None
    (run.control / "save").touch()
    assert run.take_request("save") == {}
    (run.control / "sample" / "inside").mkdir(parents=True)  # a folder of that name does not end a training
    assert run.take_request("sample") == {} and not run.requested("sample")
    run.request("sample")
    run.clear_requests()
    assert not run.requested("sample")


def test_names_that_some_system_cannot_have_are_refused():
    for name in ("a/b", "a\\b", "a:b", "con", "LPT1.txt", "", "a.", "a ", "x" * 121, "..", "what?"):
        with pytest.raises(RunError):
            check_name(name)
    for name in ("a", "größe 2", "LTX-2.3_v1", "console"):
        assert check_name(name) == name


def test_listing_and_versions(tmp_path):
    for name in ("cat", "cat_002", "cat_010", "catalogue", "dog"):
        RunDir.create(tmp_path / name).write_status(Status(state="finished"))
    (tmp_path / "no run").mkdir()
    (tmp_path / "file").touch()
    assert [run.name for run in list_runs(tmp_path)] == ["cat", "cat_002", "cat_010", "catalogue", "dog"]
    assert [run.name for run in versions_of(tmp_path, "cat")] == ["cat", "cat_002", "cat_010"]
    assert list_runs(tmp_path / "absent") == []
    with pytest.raises(RunError, match="No run"):
        RunDir.open(tmp_path / "no run")


def test_the_tail_of_the_log(run):
    assert run.tail() == []
    run.log_path.write_bytes(b"x" * 70_000 + b"\nfirst\r\n 10%\r 20%\r100%\n\xff bad\n\nlast")
    assert run.tail(3) == ["100%", "\ufffd bad", "last"]


def test_a_directory_that_cannot_be_made_is_a_run_error(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(RunError, match="cannot be made"):
        RunDir.create(tmp_path / "file" / "run")


def test_job_files_have_the_agreed_names(run):
    assert run.job_path("train").name == "training_config.yaml"
    assert run.job_path("sample").name == "sample_config.yaml"
    assert not run.exists()
    run.job_path("preprocess").touch()
    assert run.exists()


def test_status_json_is_plain(run):
    run.write_status(status_of(os.getpid()))
    record = json.loads(run.status_path.read_text(encoding="utf-8"))
    assert record["state"] == "running" and record["pid"] == os.getpid() and {"phase", "step", "total", "heartbeat", "error"} <= record.keys()
