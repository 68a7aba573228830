"""Ranks as one trainer: N ranks take the step of one rank on N times the batch; accelerate's configs are taken over."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from ltx_train.errors import RunError
from ltx_train.runs.command import free_port
from ltx_train.training.parallel import BUCKET_ELEMENTS, DistributedSection, Parallel, _backend, _buckets, keep_global_batch

ROOT = Path(__file__).parents[3]

# one AdamW step of two LoRA-like matrices and one parameter that only rank 0's data reaches; prints what came out
SCRIPT = """
import json, sys, torch
from ltx_train.training.parallel import Parallel
parallel = Parallel.start(device="cpu")
torch.manual_seed(0)
a, b, only, never = (torch.nn.Parameter(torch.randn(8, 8)) for _ in range(4))
frozen = torch.nn.Parameter(torch.ones(2), requires_grad=False)
data = torch.randn(6, 8)
share = {1: [slice(0, 6)], 2: [slice(0, 2), slice(2, 6)]}[parallel.world][parallel.rank]
optimizer = torch.optim.AdamW([a, b, only, never], lr=1e-2)
losses = []
for step in range(3):
    x = data[share] + step
    loss = ((x @ a @ b) ** 2).mean()
    if parallel.rank == 0:
        loss = loss + (6 / len(x)) * (only ** 2).mean()
    loss.backward()
    parallel.average_gradients([a, b, only, never, frozen], weight=len(x))
    losses.append(parallel.mean(loss, weight=len(x)))
    optimizer.step()
    optimizer.zero_grad()
odd = torch.nn.Parameter(torch.full((2,), float(parallel.rank)))
agreed = parallel.agree([a, b]), parallel.agree([odd])
parallel.share([odd], source=parallel.world - 1)
out = dict(
    a=a.tolist(), only=only.tolist(), never=never.tolist(), losses=losses, agreed=agreed, odd=odd.tolist(),
    any=[parallel.any(False), parallel.any(parallel.rank == parallel.world - 1)], gather=parallel.gather((parallel.rank, "ü")),
    object=parallel.broadcast_object({"from": parallel.rank}), sum=parallel.sum([1, parallel.rank]),
    nan=parallel.mean(float("nan") if parallel.rank else 2.0, weight=0.0 if parallel.rank else 1.0),
    empty=str(parallel.mean(float("nan"), weight=0.0)), tensor=parallel.broadcast(torch.full((2,), float(parallel.rank))).tolist(),
    preflight=parallel.preflight(), backend=parallel.backend, heavy="accelerate" in sys.modules,
)
parallel.barrier()
parallel.close()
print(json.dumps(out))
"""


# the children of one process that has loaded torch: what else they load is their own affair
FORKS = """
import json, os, sys, torch, torch._dynamo
script, environments = json.loads(sys.stdin.read())
children = []
for environment, path in environments:
    pid = os.fork()
    if pid == 0:
        os.environ.update(environment)
        sys.stdout = open(path, "w")
        try:
            exec(compile(script, "ranks", "exec"), {"__name__": "__main__"})
            sys.stdout.flush()
            os._exit(0)
        except BaseException:  # whatever it is, a forked rank must not run on as the parent does
            import traceback
            traceback.print_exc()
            os._exit(1)
    children.append(pid)
sys.exit(any([os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in children]))
"""


@pytest.fixture(scope="module")
def worlds(tmp_path_factory):
    """What one process alone printed, and what each of two ranks did."""
    folder = tmp_path_factory.mktemp("ranks")
    two = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    environments = [({}, str(folder / "alone")), *(({**two, "RANK": str(r), "LOCAL_RANK": str(r)}, str(folder / f"{r}")) for r in range(2))]
    process = subprocess.Popen(
        [sys.executable, "-c", FORKS], env={**os.environ, "OMP_NUM_THREADS": "1"}, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    output = process.communicate(json.dumps([SCRIPT, environments]), timeout=240)
    assert process.returncode == 0, output
    one, *ranks = [json.loads(Path(path).read_text().strip().splitlines()[-1]) for _, path in environments]
    return one, ranks


def test_two_ranks_with_unequal_batches_take_the_step_of_one(worlds):
    one, two = worlds
    for name in ("a", "losses"):
        expected = torch.tensor(one[name], dtype=torch.float64)
        for rank in two:
            assert torch.allclose(torch.tensor(rank[name], dtype=torch.float64), expected, rtol=1e-6, atol=1e-5)
    assert two[0]["a"] == two[1]["a"]


def test_a_gradient_that_one_rank_lacks_counts_as_zero_and_one_that_all_lack_is_left_alone(worlds):
    one, two = worlds
    assert torch.allclose(torch.tensor(two[1]["only"]), torch.tensor(one["only"]), atol=1e-5)
    assert two[0]["never"] == two[1]["never"] == one["never"], "no weight decay without a gradient, as on one rank"


def test_what_the_ranks_tell_each_other(worlds):
    one, two = worlds
    for rank in two:
        assert rank["any"] == [False, True] and rank["gather"] == [[0, "ü"], [1, "ü"]] and rank["object"] == {"from": 0}
        assert rank["sum"] == [2, 1] and rank["agreed"] == [True, False] and rank["odd"] == [1.0, 1.0] and rank["tensor"] == [0.0, 0.0]
        assert rank["preflight"] == [] and rank["backend"] == "gloo" and rank["empty"] == "nan"
    assert one["gather"] == [[0, "ü"]] and one["any"] == [False, True] and one["agreed"] == [True, True]


def test_one_rank_does_not_import_accelerate(worlds):
    one, two = worlds
    assert not one["heavy"] and all(rank["heavy"] for rank in two)


def test_a_rank_without_weight_may_hold_nan(worlds):
    assert [rank["nan"] for rank in worlds[1]] == [2.0, 2.0]


def test_large_adapters_go_in_buckets_of_bounded_size():
    parameters = [torch.nn.Parameter(torch.empty(size, device="meta")) for size in (BUCKET_ELEMENTS // 2, BUCKET_ELEMENTS // 2, 1, BUCKET_ELEMENTS * 2, 5)]
    assert [len(bucket) for bucket in _buckets(parameters)] == [2, 1, 1, 1]
    assert [parameter for bucket in _buckets(parameters) for parameter in bucket] == parameters
    assert _buckets([]) == []


def test_a_backend_that_cannot_work_is_refused(monkeypatch):
    with pytest.raises(RunError, match="nccl"):
        _backend("nccl", on_cpu=True)
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: True)
    assert _backend("auto", on_cpu=False) == "cuda:nccl,cpu:gloo" and _backend("gloo", on_cpu=False) == "gloo" and _backend("auto", on_cpu=True) == "gloo"
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: False)  # Windows
    assert _backend("auto", on_cpu=False) == "gloo"


def test_fewer_gpus_than_ranks_is_named(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    for name, value in (("WORLD_SIZE", "2"), ("LOCAL_WORLD_SIZE", "2"), ("RANK", "0"), ("LOCAL_RANK", "0")):
        monkeypatch.setenv(name, value)
    with pytest.raises(RunError, match="2 processes need 2 GPUs on this machine; 1 are visible"):
        Parallel.start()


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"num_processes": 3, "num_machines": 2, "main_process_ip": "a", "main_process_port": 1}, "no multiple"),
        ({"num_processes": 2, "num_machines": 2}, "main_process_ip"),
        ({"machine_rank": 1}, "machine_rank 1"),
        ({"num_processes": 3, "devices": "0,1"}, "fewer GPUs"),
        ({"devices": "0, 1"}, "pattern"),
        ({"num_processes": 0}, "greater"),
    ],
)
def test_impossible_sections_are_refused(fields, words):
    with pytest.raises(ValueError, match=words):
        DistributedSection(**fields)


@pytest.mark.parametrize(
    ("accumulation", "batch", "world", "before", "expected", "words"),
    [
        (4, 1, 1, None, 4, ""),  # a new run of one process: as set
        (1, 2, 4, None, 1, ""),
        (4, 2, 4, None, 4, "A step is 32 samples"),  # a proposal, nothing is changed
        (1, 1, 2, 2, 1, ""),  # as before
        (1, 1, 1, 2, 2, "gradient accumulation is 2 instead of 1"),  # 2 processes -> 1
        (4, 2, 4, 8, 1, "stays 8 samples"),  # 1 process -> 4
        (1, 1, 3, 4, 1, "A step was 4 samples and is 3 from here on"),
        (2, 1, 2, 7, 4, "A step was 7 samples and is 8"),
    ],
)
def test_the_global_batch_is_kept_or_its_change_is_said(accumulation, batch, world, before, expected, words):
    found = keep_global_batch(accumulation, batch, world, before)
    assert found.accumulation == expected and words in found.message and bool(words) == bool(found.message)
    if before is None and words:
        assert "gradient_accumulation_steps 1 makes a step of 8 samples" in found.hint


def test_other_packages_and_other_folders_are_refused(monkeypatch, tmp_path):
    parallel = Parallel(rank=0, world=2, local_rank=0, device=torch.device("cpu"))
    monkeypatch.setattr(parallel, "barrier", lambda: None)
    (tmp_path / "checkpoints" / "state_step_00001").mkdir(parents=True)

    def with_peer(change=lambda facts: facts, clock=0.0, names=("state_step_00001",)):
        monkeypatch.setattr(parallel, "gather", lambda value: [value, (change(dict(value[0])), value[1] + clock, list(names))])
        return parallel.preflight(tmp_path)

    assert with_peer() == [] and "clocks differ by 9 s" in with_peer(clock=9.0)[0]
    for name in ("torch", "accelerate", "peft", "ltx_train", "device"):
        with pytest.raises(RunError, match=f"Rank 1 has {name} other, rank 0 has"):
            with_peer(lambda facts, name=name: {**facts, name: "other"})
    with pytest.raises(RunError, match="Rank 1 sees 0 snapshots"):
        with_peer(names=())
    assert Parallel(rank=0, world=1, local_rank=0, device=torch.device("cpu")).preflight(tmp_path) == []


def test_explicit_single_devices():
    assert Parallel.start(device="cpu").device == torch.device("cpu")
    parallel = Parallel.start()
    assert parallel.is_main and parallel.world == 1
    parallel.barrier()
    parallel.close()
