"""The fitted model learns what its clips say: the kept record of all five modes against the stated margins; one mode for real (LTX_TRAIN_LONG=1).

Each whole suite trains text to video for real in test_demo.py.
"""

import json
import os
from pathlib import Path

import pytest
import torch

import ltx_train.bench
from ltx_train.bench.learning import describe, fingerprint, job, measure, shortfalls, smaller
from ltx_train.bench.learning_tasks import TASKS, Margins, draw_clips, told_wrongly, write_table

RESULTS = Path(ltx_train.bench.__file__).parent / "results" / "learning_cpu.jsonl"


def records():
    """The last record of every mode."""
    return {record["mode"]: record for line in RESULTS.read_text(encoding="utf-8").splitlines() for record in (json.loads(line),)}


@pytest.mark.parametrize("name", TASKS)
def test_the_kept_record_meets_the_margins(name):
    """Recorded by ``python -m ltx_train bench learning --out ltx_train/bench/results/learning_cpu.jsonl``, with today's settings and fitted set."""
    record, task = records()[name], TASKS[name]
    assert record["made_with"] == fingerprint(name), f"{name} was measured with other settings: run bench learning --mode {name} again"
    assert shortfalls(record, task) == [] and record["passed"]
    assert record["command"] == f"python -m ltx_train bench learning --mode {name}" and record["samples"] == task.held_out
    assert task.chance <= task.margins.control < task.margins.following


@pytest.mark.skipif(os.environ.get("LTX_TRAIN_LONG") != "1", reason="LTX_TRAIN_LONG=1 trains and samples for half a minute")
def test_a_reference_is_learnt_from_its_clips(tmp_path):
    """Video to video, smaller: a yellow star on the way of a white circle. Told wrongly, the way is lost."""
    task = smaller("v2v", steps=20, clips=8, held_out=4, margins=Margins(0.5, 0.5, 0.25, 1.3))
    record = measure("v2v", task, tmp_path)
    assert shortfalls(record, task) == [], record
    assert record["by_word"]["direction"] == 1.0 and record["control_by_word"]["direction"] <= 0.5, record
    assert len(list((tmp_path / "v2v" / "right" / "samples").glob("step_000020_*.mp4"))) == 4


# -- the measure itself --


@pytest.mark.parametrize("name", TASKS)
def test_drawn_clips_show_what_they_are_said_to(tmp_path, name):
    clips = draw_clips(TASKS[name], tmp_path, 4, 1)
    for clip in clips:
        files = [clip.media, *(p for role, p in clip.roles.items() if role == "audio")]
        found = {key: value for path in files for key, value in describe(path).items() if value is not None}
        assert found and all(clip.kind[key] == value for key, value in found.items()), (clip, found)
        assert set(TASKS[name].asked) <= set(found)


def test_a_first_frame_does_not_tell_the_way(tmp_path):
    from PIL import Image

    firsts = [torch.tensor(list(Image.open(c.first_frame).getdata())).float().amax(-1) > 70 for c in draw_clips(TASKS["i2v"], tmp_path, 4, 1)]
    centre = [((m.nonzero() % 64).float().mean(), (m.nonzero() // 64).float().mean()) for m in firsts]
    assert all(abs(float(v) - 31.5) < 1.0 for pair in centre for v in pair), centre


@pytest.mark.parametrize(("name", "moved"), [("t2v", "caption"), ("v2v", "reference_video"), ("a2v", "audio")])
def test_the_control_moves_nothing_else(tmp_path, name, moved):
    clips = draw_clips(TASKS[name], tmp_path, 8, 1)
    wrong = told_wrongly(TASKS[name], clips)
    rows, other = [c.row() for c in clips], [c.row() for c in wrong]
    assert sorted(r[moved] for r in rows) == sorted(r[moved] for r in other) and [r[moved] for r in rows] != [r[moved] for r in other]
    assert all({k: v for k, v in a.items() if k != moved} == {k: v for k, v in b.items() if k != moved} for a, b in zip(rows, other))
    assert len(write_table(tmp_path / "wrong.jsonl", wrong).read_text(encoding="utf-8").splitlines()) == 8


def test_shortfalls_are_told():
    task = smaller("v2v", margins=Margins(0.5, 0.75, 0.5, 1.5))
    good = {"fall": 0.8, "high_noise": [2.0, 0.2], "control_high_noise": 0.4, "following": [0.0, 1.0], "control": 0.25}
    assert shortfalls(good, task) == []
    for field, value, said in (("fall", 0.4, "fell by 40%"), ("following", [0.0, 0.5], "50% of the samples"), ("following", [0.6, 1.0], "already"), ("control", 0.6, "above 50%"), ("control_high_noise", 0.25, "1.5 times")):
        (found,) = shortfalls({**good, field: value}, task)
        assert said in found


def test_the_job_is_the_modes_own(tmp_path):
    config = job(TASKS["v2v"], tmp_path, tmp_path / "right.jsonl", [])
    assert config.lora.target_modules == list(TASKS["v2v"].mode.target_modules) and config.training_strategy == TASKS["v2v"].mode.strategy()
