"""The example workflows: beside what each is meant to set, every value is the node's own default."""

import json
from pathlib import Path

import pytest

TWINS = sorted((Path(__file__).parents[1] / "comfyui" / "workflows" / "examples").glob("*.api.json"))
EVERY = {"LTXTrainLoadModel.model", "LTXTrainDataset.dataset", "LTXTrainDataset.buckets", "LTXTrainLoRA.run_name"}
USUAL = EVERY | {
    "LTXTrainPreprocess.mode", "LTXTrainLoRA.mode", "LTXTrainLoRA.steps", "LTXTrainLoRA.rank", "LTXTrainLoRA.validation_prompt",
    "LTXTrainValidationSettings.width", "LTXTrainValidationSettings.height", "LTXTrainValidationSettings.frames", "LTXTrainValidationSettings.interval",
}  # fmt: skip
MORE = {
    "Character": {"LTXTrainDataset.trigger"},
    "Style": {"LTXTrainDataset.trigger"},
    "Control": {"LTXTrainDataset.reference_video", "LTXTrainLoRA.learning_rate"},
    "Sound": {"LTXTrainValidationSettings.generate_video", "LTXTrainLoRA.learning_rate"},
    "Inpaint": {"LTXTrainModeSettings.base", "LTXTrainModeSettings.video_conditions"},
}


@pytest.mark.parametrize("path", TWINS, ids=lambda path: path.name.removesuffix(".api.json"))
def test_an_example_sets_what_it_is_meant_to(pack, path):
    """One graph is built after the other in one page: values of the one before must not stay in the next."""
    changed = set()
    for node in json.loads(path.read_text(encoding="utf-8")).values():
        if node["class_type"] not in pack.nodes or "Parts" in path.name:
            continue
        known = {one.id: one for one in pack.nodes[node["class_type"]].define_schema().inputs}
        for name, value in node["inputs"].items():
            one = known.get(name)
            if one is None or isinstance(value, list) or one.io_type.startswith("COMFY_DYN"):
                continue
            default = one.default if one.default is not None else one.options[0] if one.options else ""
            if value != default:
                changed.add(f"{node['class_type']}.{name}")
    assert changed <= USUAL.union(*(names for word, names in MORE.items() if word in path.name))
