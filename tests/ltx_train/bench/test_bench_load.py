"""bench load and bench sample: tiny runs of both, the high-water mark, the full-size file's layout, a held-back link."""

import json
import time
from dataclasses import replace

import pytest
import torch

from ltx_train.__main__ import main
from ltx_train.bench.full_model import write_random
from ltx_train.bench.link import hold_back
from ltx_train.bench.load import HighWater, _apart, run_load
from ltx_train.bench.sample import tiny_case
from ltx_train.memory.streaming import BlockStore
from ltx_train.models.checkpoint import Checkpoint
from ltx_train.models.families import FAMILIES
from ltx_train.tiny.checkpoints import tiny_config

CPU = torch.device("cpu")


def test_loading_is_watched_and_the_first_steps_are_timed():
    case = replace(tiny_case(), quantization="int8", resident=0, link=5.0)
    records = run_load([case], second="64x96x9", file=None, command="bench load", apart=False)
    record = next(records)  # the warm one is the same again
    records.close()
    assert record["compile_cache"] == "cold" and record["file_gib"] > 0
    assert record["anonymous_gib"] > 0 and record["first_step_s"] > 0 and record["ready_s"] >= record["load_s"] and record["load_gb_s"] >= 0
    assert record["setting"]["link"] == 5.0 and record["second_size"] == "64x96x9" and record["new_bucket_s"] >= 0


def test_a_measurement_in_a_process_of_its_own_tells_how_it_failed():
    assert "CheckpointError" in _apart({}, ("nowhere/x.safetensors", tiny_case(), "64x64x9"))["error"]


def test_the_high_water_mark_sees_what_is_gone_again():
    with HighWater() as water:
        before = water.most
        torch.ones(40 << 20, dtype=torch.float32)[0].item()
        block = torch.ones(40 << 20, dtype=torch.float32)
        time.sleep(0.05)
        del block
    assert water.most - before > 100 << 20


def test_the_random_file_is_a_model_of_its_family(tmp_path):
    config = tiny_config(FAMILIES["ltx2.3"])["transformer"]
    path = write_random(tmp_path / "m.safetensors", "ltx2.3", CPU, config)
    opened = Checkpoint.open(path)
    assert opened.family.name == "ltx2.3" and opened.transformer.num_layers == config["num_layers"]
    stamp = path.stat().st_mtime_ns
    assert write_random(path, "ltx2.3", CPU).stat().st_mtime_ns == stamp, "one that is there is used again"


def test_uploads_take_as_long_as_on_a_slower_link():
    store = BlockStore(4, 1 << 20, CPU, resident=0, slots=2)
    for index in range(4):
        store.rest(index).fill_(index)
    hold_back(store, 0.1, CPU)  # 1 MiB at 0.1 GB/s: 10 ms
    started = time.perf_counter()
    for index in range(4):
        assert bool((store.enter(index) == index).all())
    assert time.perf_counter() - started > 0.03


def test_previews_batched_and_one_by_one(capsys):
    assert main(["bench", "sample", "--tiny"]) == 0
    apart, batched, ratio = map(json.loads, capsys.readouterr().out.splitlines())
    assert (apart["passes"], batched["passes"], ratio["passes"]) == ("one by one", "batched", "ratio")
    assert apart["preview_s"] == pytest.approx(30 * apart["step_s"], abs=0.1) and batched["step_s"] > 0
    assert ratio["batched_is_faster_by"] == pytest.approx(apart["step_s"] / batched["step_s"], rel=0.1)


def test_a_sample_is_measured_over_the_link_that_the_case_names(monkeypatch):
    from ltx_train.bench import sample, step
    from ltx_train.memory.pinned import HostMemory

    held = []
    monkeypatch.setattr(step, "hold_back", lambda store, link, device: held.append(link))
    case = replace(tiny_case(), quantization="int8", resident=0, link=25.0)
    assert sample.measure_sample(case, CPU, HostMemory(pin=False), batched=True)["step_s"] > 0 and held == [25.0]
