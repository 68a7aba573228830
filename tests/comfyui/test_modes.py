"""In a real ComfyUI: the examples of the mode groups on tiny models, ComfyUI's own models as encoders, and what is made of a run."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.comfyui.host import MODELS, ROOT

HERE = Path(__file__).parent
TWINS = sorted((HERE / "workflows" / "examples").glob("*.api.json"))
LINES = {"LTX-2.3": "ltx2.3", "LTX-2.5": "ltx2.5", "LTX-2": "ltx2", "LTX-Video": "ltxv-2b"}


def small(path, run_name):
    """An example's graph with a tiny model, the drawn clips, two steps and no previews."""
    prompt = json.loads(path.read_text(encoding="utf-8"))
    of = {node["class_type"]: node["inputs"] for node in prompt.values()}
    line = path.name.split(" - ")[0]
    of["LTXTrainLoadModel"]["model"] = MODELS[LINES[line]]
    dataset = of["LTXTrainDataset"]
    dataset |= {"dataset": "input/drawn clips", "buckets": "64x64x1" if dataset["buckets"] == "768x512;512x768;640x640" else "64x64x17"}
    if dataset["reference_video"]:
        dataset["reference_video"] = "input/drawn clips"
    if "LTXTrainModeSettings" in of:  # as long a beginning as a clip of 3 latent frames leaves room for
        given = of["LTXTrainModeSettings"]["video_conditions"]
        of["LTXTrainModeSettings"]["video_conditions"] = given.replace("temporal_boundary_max: 4", "temporal_boundary_max: 2")
    of["LTXTrainLoRA"] |= {"run_name": run_name, "steps": 2, "rank": 4, "validation_prompt": ""}
    if "SamplerCustom" in of:  # ComfyUI's own nodes sample with the LoRA
        for kind in ("CheckpointLoaderSimple", "LTXAVTextEncoderLoader", "LTXVAudioVAELoader"):
            of[kind]["ckpt_name"] = MODELS[LINES[line]]
        of["LTXAVTextEncoderLoader"]["text_encoder"] = "gemma_3_tiny.safetensors"
        of["EmptyLTXVLatentVideo"] |= {"width": 64, "height": 64, "length": 17}
        of["LTXVEmptyLatentAudio"]["frames_number"] = 17
        of["LTXVScheduler"]["steps"] = 2
    return prompt


@pytest.mark.parametrize("path", TWINS, ids=lambda path: path.name.removesuffix(".api.json"))
def test_the_examples_train_on_tiny_models(server, path):
    run_name = f"example {TWINS.index(path)}"
    server.run(small(path, run_name)).good()
    run = server.run_dir(run_name)
    assert run.status().state == "finished"
    lora = load_file(run.checkpoints / "lora_weights_step_00002.safetensors")
    names = " ".join(lora)
    if "Sound" in path.name:
        assert "audio_attn1" in names and ".attn1." not in names
    if "Images" in path.name or "Video" in path.name.split(" - ")[0]:
        assert "audio" not in names


def test_a_graph_and_its_api_twin_are_the_same():
    """The twin posts what the graph would."""
    for path in TWINS:
        graph = json.loads((ROOT / "example_workflows" / path.name.replace(".api", "")).read_text(encoding="utf-8"))
        twin = json.loads(path.read_text(encoding="utf-8"))
        types = sorted(node["type"] for node in graph["nodes"] if node["type"] != "MarkdownNote")
        assert types == sorted(node["class_type"] for node in twin.values())
        for node in twin.values():
            plain = [v for v in node["inputs"].values() if not isinstance(v, list)]
            values = next(n for n in graph["nodes"] if n["type"] == node["class_type"]).get("widgets_values", [])
            assert all(value in values for value in plain), path.name


def entries(run, kind):
    """The latents that a run's cache holds, by the clip's id."""
    from ltx_train.config import TrainConfig
    from ltx_train.data.cache import Cache

    data = TrainConfig.load(run.job_path("train")).data
    index = json.loads((data.data_root() / data.index).read_text(encoding="utf-8"))
    return {entry["id"]: load_file(Cache(data.data_root()).path(entry[kind])) for entry in index["entries"]}


def test_comfyuis_own_models_encode_the_same_numbers(server, workflow):
    """VAE and text features of ComfyUI's nodes agree with the engine's, so that a cache of either trains the same.

    Pictures to rounding; text to bfloat16; sound goes through two resamplings in ComfyUI (to 44.1 kHz, then to 16 kHz), ours through one.
    """
    server.run(workflow("train_with_comfy_models", MODEL=MODELS["ltx2.3"], ENCODER="gemma_3_tiny.safetensors", RUN="encoded here")).good()
    server.run(workflow("train", MODEL=MODELS["ltx2.3"], RUN="encoded there", MODE="t2v_audio")).good()
    here, there = server.run_dir("encoded here"), server.run_dir("encoded there")
    for kind, limit in (("video", 1e-4), ("audio", 0.15), ("text", 0.02)):
        ours, theirs = entries(there, kind), entries(here, kind)
        assert set(ours) == set(theirs) and ours
        for name, tensors in ours.items():
            for part, value in tensors.items():
                if not value.is_floating_point():
                    continue
                other = theirs[name][part]
                assert other.shape == value.shape, (kind, name, part)
                error = (other.float() - value.float()).norm() / value.float().norm().clamp(min=1e-9)
                assert error < limit, (kind, name, part, float(error))


def test_what_is_made_of_a_run(server, workflow):
    prompt = workflow("train_with_previews", MODEL=MODELS["ltx2.3"], RUN="a run to use")
    prompt["2"]["inputs"]["buckets"] = "64x64x9"
    prompt["4"]["inputs"]["steps"] = 2
    server.run(prompt).good()
    used = server.run(workflow("use_run", MODEL=MODELS["ltx2.3"], RUN="a run to use", NAME="made/small")).good()
    made = server.base / "output"
    small = load_file(made / "loras" / "made" / "small.safetensors")
    source = load_file(server.run_dir("a run to use").checkpoints / "lora_weights_step_00002.safetensors")
    assert {k for k in small} == {k for k in source}
    downs = [k for k in small if k.endswith("lora_A.weight")]
    assert downs and all(small[k].shape[0] == 2 and small[k].dtype == torch.float32 for k in downs)
    core = load_file(next((made / "made").glob("core_lora*.safetensors")))
    assert {k: v.shape for k, v in core.items()} == {k: v.shape for k, v in source.items()}
    assert used.outputs["37"]["images"], "the core node draws the loss curve, as a preview"
    for name in ("sample", "from_run", "sound"):
        assert next((made / "made").glob(f"{name}*")).stat().st_size > 100, name
    jobs = [p for p in (made / "ltx_train" / ".jobs").glob("sample-*")]
    assert len(jobs) == 1
    before = (jobs[0] / "events.jsonl").read_bytes()
    again = workflow("use_run", MODEL=MODELS["ltx2.3"], RUN="a run to use", NAME="made/again")
    again["34"]["inputs"]["filename_prefix"] = "made/again"
    server.post("/free", {"free_memory": True})
    server.run(again).good()
    assert (jobs[0] / "events.jsonl").read_bytes() == before, "the same sample is not made twice"
