"""bench step and its results: cases from the command line, a tiny measurement with its baseline, what kept records hold."""

import json
from pathlib import Path

import pytest

import ltx_train.bench
from ltx_train.bench.step import StepCase, run_cases
from ltx_train.memory.keeping import keep_dearest

RESULTS = Path(ltx_train.bench.__file__).parent / "results"


def test_cases_from_the_command_line():
    case = StepCase.parse("size=576x576x49,rank=16,budget=0.4,compile=0,audio=no,cap=16", StepCase(steps=3))
    assert (case.size, case.rank, case.budget, case.compile, case.audio, case.cap, case.steps) == ("576x576x49", 16, 0.4, False, False, 16.0, 3)
    assert case.setting == {"budget": 0.4, "compile": False, "audio": False, "cap": 16.0}
    with pytest.raises(KeyError):
        StepCase.parse("sice=1", StepCase())


def test_a_tiny_step_beside_the_plain_way():
    base = StepCase.parse("size=64x64x9,rank=4,tiny=1,compile=0,steps=1,warmup=1,layers=2", StepCase())
    (streamed,) = run_cases([StepCase.parse("resident=1,quantization=int8,optimizer=host", base)], plain=True, command="bench step")
    for name in ("size", "rank", "setting", "family", "card", "step_s", "plain_step_s", "times_plain", "host_gib", "loss", "command"):
        assert name in streamed, name
    assert streamed["step_s"] > 0


@pytest.mark.parametrize("path", sorted(RESULTS.glob("h200*.jsonl")), ids=lambda p: p.name)
def test_kept_records_say_what_was_measured_where(path):
    lines = path.read_text(encoding="utf-8").splitlines()
    assert lines
    for record in map(json.loads, lines):
        assert {"card", "command", "date", "size", "rank"} <= set(record)
        assert "/root" not in record["command"]
        if "step_s" in record:
            assert {"setting", "family", "device_gib", "host_gib"} <= set(record)


def test_the_dearest_are_kept_first():
    kept, again = keep_dearest([4.0, 2.0, 1.0, 3.0], [10.0, 30.0, 20.0, 40.0], 6.0)
    assert sorted(kept) == [1, 2, 3]
    assert again == [0]
    assert keep_dearest([1.0], [1.0], 0.5) == ([], [0])
