"""The child's environment and argument list."""

import pytest

from ltx_train.errors import RunError
from ltx_train.runs.command import BOOTSTRAP, check_port, child_command, child_environment, free_port, write_launch_config


def env(base, **options):
    return child_environment(base, platform=options.pop("platform", "linux"), **options)


def test_what_comfyui_sets_for_itself_is_not_passed_on():
    ours = env({"PATH": "/bin", "PYTORCH_CUDA_ALLOC_CONF": "backend:cudaMallocAsync", "CUBLAS_WORKSPACE_CONFIG": ":4096:8"})
    assert ours["PYTORCH_CUDA_ALLOC_CONF"] == "expandable_segments:True" and "CUBLAS_WORKSPACE_CONFIG" not in ours and ours["PATH"] == "/bin"


def test_the_users_own_allocator_settings_stay():
    assert env({"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:512"})["PYTORCH_CUDA_ALLOC_CONF"] == "max_split_size_mb:512"
    assert env({"PYTORCH_ALLOC_CONF": "max_split_size_mb:512"})["PYTORCH_CUDA_ALLOC_CONF"] == "max_split_size_mb:512"


def test_windows():
    ours = env({"PYTORCH_CUDA_ALLOC_CONF": "backend:cudaMallocAsync"}, platform="win32")
    assert ours["USE_LIBUV"] == "0" and "PYTORCH_CUDA_ALLOC_CONF" not in ours
    assert "USE_LIBUV" not in env({})


@pytest.mark.parametrize(
    ("now", "first", "processes", "expected"),
    [
        (None, None, 2, None),
        ("0", None, 1, "0"),  # ComfyUI on Windows with two GPUs, one process: the same GPU
        ("0", None, 2, None),  # two processes: all GPUs
        ("1", "2,3", 2, "2,3"),  # ComfyUI was started with 2,3 and then chose one
        ("1", "2,3", 1, "1"),
        ("2,3", "2,3", 2, "2,3"),
        ("1,0," + ",".join(map(str, range(2, 32))), None, 2, "1,0," + ",".join(map(str, range(2, 32)))),
        ("", None, 1, ""),  # no GPU on purpose
    ],
)
def test_devices_are_restored(now, first, processes, expected):
    base = {} if now is None else {"CUDA_VISIBLE_DEVICES": now}
    start = {} if first is None else {"CUDA_VISIBLE_DEVICES": first}
    assert env(base, first=start, num_processes=processes).get("CUDA_VISIBLE_DEVICES") == expected
    assert env(base, devices="5,6", num_processes=processes)["CUDA_VISIBLE_DEVICES"] == "5,6"


def test_leftovers_of_a_launcher_are_removed():
    left = {name: "1" for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "ACCELERATE_USE_FSDP", "FSDP_VERSION")}
    assert left.keys().isdisjoint(env(left)) and env({"RANKING": "1"})["RANKING"] == "1"


def test_another_python_gets_none_of_our_paths():
    ours = {"PYTHONPATH": "/x", "PYTHONHOME": "/y", "VIRTUAL_ENV": "/z"}
    assert ours.keys() <= env(ours).keys()
    assert ours.keys().isdisjoint(env(ours, other_python=True))


def test_nothing_is_downloaded_unless_allowed():
    assert env({})["HF_HUB_OFFLINE"] == "1" == env({})["TRANSFORMERS_OFFLINE"]
    assert "HF_HUB_OFFLINE" not in env({"HF_HUB_OFFLINE": "1"}, network=True)
    assert env({}, network=True)["HF_HUB_DISABLE_TELEMETRY"] == "1"


def test_extra_variables_win():
    assert env({}, extra={"HF_HUB_OFFLINE": "0"})["HF_HUB_OFFLINE"] == "0"


def test_one_process_is_plain_python():
    assert child_command(["b.py", "worker"], python="/p y/python", flags=("-I",)) == ["/p y/python", "-I", "-X", "utf8", "-u", "b.py", "worker"]
    assert BOOTSTRAP.is_absolute() and BOOTSTRAP.is_file()


def test_torchrun_on_one_and_two_machines():
    one = child_command(["b.py"], python="py", num_processes=4, launcher="torchrun")
    assert one == ["py", "-X", "utf8", "-u", "-m", "torch.distributed.run", "--no-python", "--nproc-per-node", "4", "--max-restarts", "0", "--standalone"] + [
        "py",
        "-X",
        "utf8",
        "-u",
        "b.py",
    ]
    two = child_command(["b.py"], python="py", num_processes=4, launcher="torchrun", num_machines=2, machine_rank=1, main_process_ip="10.0.0.1", port=29501)
    assert two[7:] == [
        *("--nproc-per-node", "2", "--max-restarts", "0", "--nnodes", "2", "--node-rank", "1"),
        *("--master-addr", "10.0.0.1", "--master-port", "29501", "py", "-X", "utf8", "-u", "b.py"),
    ]


def test_the_launch_config_is_placement_only(tmp_path):
    import yaml

    fields = yaml.safe_load(write_launch_config(tmp_path / "a.yaml", num_processes=2).read_text(encoding="utf-8"))
    assert fields["num_processes"] == 2 and fields["mixed_precision"] == "no" and fields["distributed_type"] == "MULTI_GPU"
    assert not {"fsdp_config", "deepspeed_config", "dynamo_config"} & fields.keys()


def test_a_taken_port_is_named():
    import socket

    port = free_port()
    check_port(port)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", port))
        taken.listen()
        with pytest.raises(RunError, match=str(port)):
            check_port(port)
