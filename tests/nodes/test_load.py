"""The pack loads as ComfyUI loads it, with nothing that ComfyUI has not, and its nodes are what workflows count on."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.nodes.stand_in import described

ROOT = Path(__file__).parents[2]
SNAPSHOT = ROOT / "tests" / "snapshots" / "nodes.json"
PERMANENT = {"LTXTrainLoadModel", "LTXTrainDataset", "LTXTrainPreprocess", "LTXTrainLoRA", "LTXTrainSample", "LTXTrainSaveLoRA", "LTXTrainLoadRun"}
FOLDER_LISTS = {"film", "model", "text_encoder", "video_vae", "audio_vae", "dataset", "lora_name", "run"}
"""Inputs whose choices are the files of the day."""

WITHOUT = """
import asyncio, sys
sys.path.insert(0, {root!r})
class Block:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {heavy!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}} (blocked)", name=name)
sys.meta_path.insert(0, Block())
from pathlib import Path
from tests.nodes.stand_in import Host, load_pack
sys.modules.update(Host(Path({base!r})).modules())
pack = load_pack(Path({root!r}), "/custom_nodes/pack")
print(len(asyncio.run(asyncio.run(pack.comfy_entrypoint()).get_node_list())))
"""


def schemas(pack):
    found = {name: described(node) for name, node in sorted(pack.nodes.items())}
    for node in found.values():
        for name, one in node["inputs"].items():
            if name in FOLDER_LISTS:
                one.pop("options", None)
    return json.loads(json.dumps(found))


def test_the_permanent_ids_are_there(pack):
    assert PERMANENT <= set(pack.nodes)
    assert all(name.startswith("LTXTrain") for name in pack.nodes)


def test_schemas_are_those_of_the_snapshot(pack):
    """A change here changes users' workflows: look at it, then write the snapshot anew (delete it and run this twice).

    Settings nodes may get further inputs, as their sections do; what they have stays, with its type.
    """
    now = schemas(pack)
    if not SNAPSHOT.exists():
        SNAPSHOT.write_text(json.dumps(now, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
        raise AssertionError(f"{SNAPSHOT} was written; look at it and run again")
    known = json.loads(SNAPSHOT.read_text(encoding="utf-8"))
    assert set(now) == set(known)
    for name in known:
        if name in PERMANENT:
            assert now[name] == known[name], name
            continue
        assert now[name]["outputs"] == known[name]["outputs"], name
        types = {key: one["type"] for key, one in now[name]["inputs"].items()}
        assert {key: one["type"] for key, one in known[name]["inputs"].items()}.items() <= types.items(), name


def test_every_input_says_what_it_is_for(pack):
    silent = []
    for name, node in pack.nodes.items():
        schema = node.define_schema()
        assert schema.description and schema.category.startswith("LTX Train")
        silent += [f"{name}.{one.id}" for one in schema.inputs if not one.tooltip]
        silent += [f"{name}.{one.id}.{i.id}" for one in schema.inputs if one.io_type.startswith("COMFY_DYN") for o in one.options for i in o.inputs if not i.tooltip]
    assert silent == []


def test_nodes_that_take_widgets_from_sections_run_without_them(pack):
    """A workflow of an older version, posted without fields that came later, is not refused."""
    for name, node in pack.nodes.items():
        if not name.endswith("Settings"):
            continue
        required = [one.id for one in node.define_schema().inputs if not one.optional and not one.io_type.startswith("COMFY_DYN")]
        assert set(required) <= {"prompts", "first_frames", "width", "height", "frames", "base", "first_frame_probability", "video_conditions", "audio_conditions"}, name


def test_nodes_load_with_none_of_the_heavy_packages(tmp_path):
    heavy = {"accelerate", "peft", "diffusers", "transformers", "optimum", "bitsandbytes", "wandb", "huggingface_hub", "tensorboard", "prodigyopt", "schedulefree", "scenedetect", "rich"}
    code = WITHOUT.format(root=str(ROOT), heavy=heavy, base=str(tmp_path))
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=180)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) == 20


def test_every_node_has_its_help(pack):
    missing = [name for name in pack.nodes if not (ROOT / "web" / "docs" / f"{name}.md").is_file()]
    assert missing == []


def labelled(schema):
    """The keys of a node's inputs in nodeDefs.json; an input that a choice brings has the choice's name before its own, as the browser asks for it."""
    of_choices = {f"{one.id}_{i.id}" for one in schema.inputs if one.io_type.startswith("COMFY_DYN") for o in one.options for i in o.inputs}
    return {one.id for one in schema.inputs} | of_choices


@pytest.mark.parametrize("language", ["en", "zh", "ja"])
def test_every_input_and_output_has_its_label_in_every_language(pack, language):
    """And nothing is named that is not there. A new input needs a name in locales/<language>/nodeDefs.json."""
    told = json.loads((ROOT / "locales" / language / "nodeDefs.json").read_text(encoding="utf-8"))
    assert set(told) == set(pack.nodes)
    for name, node in pack.nodes.items():
        schema = node.define_schema()
        inputs = told[name]["inputs"]
        assert {"missing": labelled(schema) - set(inputs), "too many": set(inputs) - labelled(schema)} == {"missing": set(), "too many": set()}, name
        assert set(told[name]["outputs"]) == {str(n) for n in range(len(schema.outputs))}, name
        texts = [told[name]["display_name"], told[name]["description"], *(one["name"] for one in inputs.values())]
        assert all(text.strip() for text in texts), name


def test_the_memory_settings_explain_themselves_in_every_language(pack):
    for language in ("zh", "ja"):
        told = json.loads((ROOT / "locales" / language / "nodeDefs.json").read_text(encoding="utf-8"))
        assert [key for key, one in told["LTXTrainMemorySettings"]["inputs"].items() if not one.get("tooltip")] == [], language
