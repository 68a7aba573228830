"""The command that starts a child: its arguments pinned, understood by accelerate itself, refused where machines cannot meet."""

import os
import sys
from pathlib import Path

import pytest

from ltx_train.errors import RunError
from ltx_train.runs.run_dir import RunDir
from ltx_train.spawn import Launch, build_command


def test_the_argument_list_of_several_processes_is_pinned(tmp_path):
    run = RunDir.create(tmp_path / "a b")
    launch = Launch(num_processes=2, launcher="accelerate", engine_python="/opt/py thon/bin/python", main_process_port=None)
    command = build_command(run, launch)
    port = command[command.index("--main_process_port") + 1]
    from ltx_train.runs.command import BOOTSTRAP

    python = ["/opt/py thon/bin/python", "-X", "utf8", "-u"] if os.name != "nt" else [str(launch.python), "-X", "utf8", "-u"]
    assert 1024 <= int(port) <= 65535
    assert command == [
        *python,
        *("-m", "accelerate.commands.launch", "--config_file", str(run.path / "accelerate.yaml"), "--multi_gpu"),
        *("--num_processes", "2", "--num_machines", "1", "--machine_rank", "0", "--main_process_port", port),
        *("--mixed_precision", "no", "--dynamo_backend", "no", "--max_restarts", "0", "--no_python"),
        *python,
        *(str(BOOTSTRAP), "worker", str(run.path), "train"),
    ]
    assert Path(BOOTSTRAP).is_absolute()


def test_accelerate_itself_understands_the_argument_list(tmp_path):
    from accelerate.commands.launch import _validate_launch_command, launch_command_parser

    run = RunDir.create(tmp_path / "a b")
    command = build_command(run, Launch(num_processes=2, launcher="accelerate"))
    arguments = command[command.index("accelerate.commands.launch") + 1 :]
    parsed, defaults, _ = _validate_launch_command(launch_command_parser().parse_args(arguments))
    assert (parsed.num_processes, parsed.multi_gpu, parsed.no_python, parsed.mixed_precision) == (2, True, True, "no")
    assert not parsed.use_fsdp and not parsed.use_deepspeed and defaults is not None
    assert parsed.training_script == sys.executable and parsed.training_script_args[-1] == "train"


def test_several_machines_need_a_meeting_point_and_a_free_port(tmp_path):
    import socket

    run = RunDir.create(tmp_path / "r")
    with pytest.raises(RunError, match="main_process_ip"):
        build_command(run, Launch(num_processes=2, num_machines=2, launcher="accelerate"))
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(RunError, match=f"Port {port}"):
            build_command(run, Launch(num_processes=2, launcher="torchrun", main_process_port=port))
