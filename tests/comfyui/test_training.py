"""In a real ComfyUI: workflows of all families run through /prompt, and stock ComfyUI plays the LoRA at the trained strength."""

import json
import subprocess
from pathlib import Path

import pytest
from safetensors.torch import load_file

from tests.comfyui.host import ABSENT, COMFYUI, MODELS, PYTHON

HERE = Path(__file__).parent
NODES = {
    "LTXTrainLoadModel", "LTXTrainDataset", "LTXTrainPreprocess", "LTXTrainLoRA", "LTXTrainSample", "LTXTrainSaveLoRA", "LTXTrainLoadRun",
    "LTXTrainAdapterSettings", "LTXTrainOptimizerSettings", "LTXTrainObjectiveSettings", "LTXTrainValidationSettings", "LTXTrainMemorySettings",
    "LTXTrainCheckpointSettings", "LTXTrainModeSettings", "LTXTrainClipSettings", "LTXTrainDistributionSettings", "LTXTrainSplitScenes",
    "LTXTrainCaption", "LTXTrainMakeReferences", "LTXTrainDecode",
}  # fmt: skip
WIDTHS = {"ltx2.3": 48, "ltx2": 16, "ltx2.5": 48, "ltxv-2b": 16}


def test_all_nodes_appear_without_our_packages(server):
    """This ComfyUI finds none of the packages that only the child needs (see host.py)."""
    asked = server.run({"1": {"class_type": "LtxTestPackages", "inputs": {"names": " ".join([*ABSENT, "torch"])}}}).good()
    assert asked.outputs["1"]["found"] == ["torch"]
    found = server.get("/object_info")
    assert {name for name in found if name.startswith("LTXTrain")} == NODES
    assert all(found[name]["category"].startswith("LTX Train") and found[name]["description"] for name in NODES)


def test_help_examples_and_translations_are_served(server):
    from urllib.parse import quote
    from urllib.request import urlopen

    pack = next(path for path in (server.base / "custom_nodes").iterdir() if "LTX" in path.name).name
    for node in NODES:
        with urlopen(f"{server.url}/extensions/{quote(pack)}/docs/{node}.md", timeout=30) as answer:
            assert answer.read().decode().startswith("# LTX")
    assert any(quote(pack) in name or pack in name for name in server.get("/extensions"))
    listed = server.get("/workflow_templates")[pack]
    assert "LTX-2.3 - 1 Character LoRA" in listed and len(listed) >= 8
    told = server.get("/i18n")
    assert told["zh"]["nodeDefs"]["LTXTrainLoRA"]["display_name"] == "LTX 训练 LoRA"
    assert set(told["en"]["nodeDefs"]) >= NODES


def train(server, workflow, family, run_name, **changes):
    prompt = workflow("train", MODEL=MODELS[family], RUN=run_name, MODE="t2v" if family == "ltxv-2b" else "t2v_audio")
    for place, value in changes.items():
        node, name = place.split("_", 1)
        prompt[node.removeprefix("n")]["inputs"][name] = value
    return prompt


@pytest.mark.parametrize("family", list(MODELS))
def test_a_lora_is_trained_and_stock_nodes_play_it(server, workflow, family):
    run_name = f"lora of {family}"
    prompt = train(server, workflow, family, run_name)
    unet = family == "ltx2.5"
    loader, field = ("UNETLoader", "unet_name") if unet else ("CheckpointLoaderSimple", "ckpt_name")
    stock = {"MODEL": MODELS[family], "LOADER": loader, "WIDTH": WIDTHS[family], "AUDIO": family != "ltxv-2b"}
    for part, strength in (("with", 1.0), ("without", 0.0)):
        sample = json.loads(json.dumps(workflow("stock_sample", **stock, LORA=["4", 2], STRENGTH=strength, PREFIX=f"{family}/{part}")).replace('"INPUT"', json.dumps(field)))
        if unet:
            sample["20"]["inputs"]["weight_dtype"] = "default"
        renamed = json.loads(json.dumps(sample).replace('["2', f'["{part}2')) if part == "without" else sample
        prompt |= {(f"{part}{key}" if part == "without" else key): value for key, value in renamed.items()}
    before = server.log.stat().st_size
    server.run(prompt).good()
    said = server.log.read_bytes()[before:].decode(errors="replace")
    assert "lora key not loaded" not in said

    run = server.run_dir(run_name)
    assert run.status().state == "finished"
    published = server.base / "output" / "loras" / "ltx_train" / f"{run_name}.safetensors"
    assert published.read_bytes() == (run.checkpoints / "lora_weights_step_00004.safetensors").read_bytes()
    latents = {part: load_file(next((server.base / "output" / family).glob(f"{part}_*.latent")))["latent_tensor"] for part in ("with", "without")}
    difference = (latents["with"] - latents["without"]).norm() / latents["without"].norm()
    assert difference > 1e-3

    model = server.base / "models" / ("diffusion_models" if unet else "checkpoints") / MODELS[family]
    snapshot = run.checkpoints / "state_step_00004" / "weights.safetensors"
    command = [PYTHON, str(HERE / "check_lora.py"), str(COMFYUI), str(model), str(published), str(snapshot), "2.0", "unet" if unet else "checkpoint"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=180)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["warnings"] == []
    assert found["patched"] == found["modules"] == found["moved"] > 0
    assert found["worst"] < 0.01, "rank 4, alpha 8: the file must play at twice B A, to the rounding of bfloat16"


def test_the_same_finished_run_is_returned(server, workflow):
    prompt = train(server, workflow, "ltx2.3", "finished once")
    server.run(prompt).good()
    run = server.run_dir("finished once")
    events = run.events_path.read_bytes()
    prompt["2"]["inputs"]["token_budget"] = 4000  # another dataset node for ComfyUI's cache, the same bucket and clips
    prompt["4"]["inputs"]["validation_prompt"] = ""
    server.post("/free", {"free_memory": True, "unload_models": True})
    server.run(train(server, workflow, "ltx2.3", "finished once")).good()
    assert run.events_path.read_bytes() == events


def test_a_changed_rank_makes_another_run(server, workflow):
    server.run(train(server, workflow, "ltx2.3", "two ranks")).good()
    server.run(train(server, workflow, "ltx2.3", "two ranks", n4_rank=2)).good()
    assert server.run_dir("two ranks_002").status().state == "finished"
    names = {path.name for path in (server.base / "output" / "loras" / "ltx_train").glob("two ranks*")}
    assert names == {"two ranks.safetensors", "two ranks_002.safetensors"}


def test_more_steps_go_on_with_the_run(server, workflow):
    server.run(train(server, workflow, "ltx2.3", "longer")).good()
    server.run(train(server, workflow, "ltx2.3", "longer", n4_steps=6)).good()
    run = server.run_dir("longer")
    assert [step for step, _ in run.history().losses] == [1, 2, 3, 4, 5, 6]
    assert not server.run_dir("longer_002").exists()
    folder = server.base / "output" / "loras" / "ltx_train"
    newest = (run.checkpoints / "lora_weights_step_00006.safetensors").read_bytes()
    assert (folder / "longer.safetensors").read_bytes() == newest
    assert (folder / "longer_step_00006.safetensors").read_bytes() == newest, "LoraLoader keeps a path that it has read"


def test_the_childs_real_error_reaches_the_user(server, workflow):
    prompt = train(server, workflow, "ltxv-2b", "no sound here", n4_mode="t2a")
    prompt["3"]["inputs"]["mode"] = "t2v"
    ended = server.run(prompt)
    assert ended.status == "error"
    first = ended.error.splitlines()[0]
    assert "sound" in first and len(first) < 120


def test_what_does_not_fit_is_refused_with_what_would(server, workflow):
    """Everything is left to the planner, within a limit that no setting meets."""
    prompt = train(server, workflow, "ltx2.3", "too large")
    prompt["4"]["inputs"]["memory"] = ["6", 0]
    prompt["6"] = {"class_type": "LTXTrainMemorySettings", "inputs": {"memory_limit_gb": 0.7}}
    ended = server.run(prompt)
    assert ended.status == "error"
    first, *rest = ended.error.splitlines()
    assert first.startswith("This training does not fit") and len(first) < 120
    assert "The least it needs so is" in rest[0] and "int8" in rest[0]
    assert not list(server.run_dir("too large").checkpoints.glob("*")), "refused before anything was trained"


def test_wrong_values_are_told_before_anything_runs(server, workflow):

    prompt = train(server, workflow, "ltx2.3", "bad/name")
    with pytest.raises(AssertionError, match="cannot be the name of a run"):
        server.queue(prompt)
    prompt = train(server, workflow, "ltx2.3", "outside", n2_path="../../etc")
    with pytest.raises(AssertionError, match="no dataset at|lies outside"):
        server.queue(prompt)
