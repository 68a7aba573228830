"""Identity of a run: what makes another run, what extends one, what does not matter."""

from pathlib import Path

from ltx_train.runs.identity import Identity, Verdict, differing

OLD = Identity(
    identity={"lora": {"rank": 32, "target_modules": ["to_k", "to_q"]}, "model": {"model_path": "a.safetensors"}, "seed": 42},
    extendable={"optimization": {"steps": 100}},
    free={"validation": {"interval": 50}, "num_processes": 1},
)


def changed(**parts):
    return Identity(**({"identity": OLD.identity, "extendable": OLD.extendable, "free": OLD.free} | parts))


def test_the_strongest_difference_decides():
    rank = {**OLD.identity, "lora": {"rank": 16, "target_modules": ["to_k", "to_q"]}}
    steps = {"optimization": {"steps": 200}}
    free = {"validation": {"interval": None}, "num_processes": 2}
    assert changed().against(OLD) == Verdict("same")
    assert changed(free=free).against(OLD) == Verdict("continue", ("num_processes", "validation.interval"))
    assert changed(free=free, extendable=steps).against(OLD) == Verdict("extend", ("optimization.steps",))
    assert changed(free=free, extendable=steps, identity=rank).against(OLD) == Verdict("different", ("lora.rank",))


def test_what_yaml_does_to_values_is_no_difference():
    assert differing({"a": (1, 2), "b": Path("x/y"), "c": {}}, {"a": [1, 2], "b": "x/y", "c": {}}) == ()


def test_absent_differs_from_null_and_lists_keep_their_order():
    assert differing({"a": None, "b": [1, 2]}, {"b": [2, 1]}) == ("a", "b")
