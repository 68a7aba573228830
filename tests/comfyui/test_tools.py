"""In a real ComfyUI: a film becomes a trained IC-LoRA through the data nodes alone: scenes, captions, references, encoding, a look into the cache."""

import json

import pytest
import torch
from safetensors.torch import load_file

from ltx_train.data.writers import write_video
from tests.caption_endpoint import saying
from tests.comfyui.host import MODELS

CAPTION = "A square of one colour stands in the middle."


@pytest.fixture
def endpoint():
    with saying(CAPTION) as url:
        yield url


def film(path, scenes=3, frames=20):
    """Scenes of one colour each, with a square that moves."""
    colours = ((200, 30, 30), (30, 30, 200), (20, 160, 40))
    pictures = torch.zeros(scenes * frames, 96, 96, 3, dtype=torch.uint8)
    for number in range(scenes * frames):
        pictures[number] = torch.tensor(colours[number // frames])
        pictures[number, 30:60, (number % frames) * 2 : (number % frames) * 2 + 30] = 255
    write_video(path, pictures, 24)


def chain(endpoint):
    none = "(type a path below)"
    node = lambda kind, **inputs: {"class_type": f"LTXTrain{kind}", "inputs": inputs}  # noqa: E731
    return {
        "1": node("LoadModel", model=MODELS["ltx2.3"], text_encoder="auto", video_vae="auto", audio_vae="auto"),
        "2": node("SplitScenes", film="input/films/film.mp4", folder="datasets/scenes of the film", min_seconds=0.4),
        "3": node("Caption", **{"dataset": none, "path": ["2", 0], "captioner": "endpoint", "captioner.url": endpoint, "captioner.max_frames": 2}),
        "4": node("MakeReferences", **{"dataset": none, "path": ["3", 0], "control": "grey"}),
        "5": node("Dataset", dataset=none, path=["4", 0], buckets="64x64x17"),
        "6": node("Preprocess", ltx_model=["1", 0], ltx_dataset=["5", 0], mode="v2v", with_audio=False),
        "7": node("Decode", ltx_model=["1", 0], ltx_cache=["6", 0], clip=2, count=2),
        "8": node("LoRA", ltx_model=["1", 0], data=["6", 0], run_name="from a film", mode="v2v", rank=4, alpha=8.0, steps=2, learning_rate=0.01, seed=1),
        "9": {"class_type": "PreviewImage", "inputs": {"images": ["7", 0]}},
    }  # fmt: skip


def test_a_film_becomes_a_lora(server, endpoint):
    (server.base / "input" / "films").mkdir()
    film(server.base / "input" / "films" / "film.mp4")
    done = server.run(chain(endpoint)).good()
    scenes = server.base / "datasets" / "scenes of the film"
    assert sorted(path.name for path in scenes.glob("*.mp4")) == [f"film-scene-{n:03d}.mp4" for n in (1, 2, 3)]
    assert [row["caption"] for row in json.loads((scenes / "dataset.json").read_text())] == [CAPTION] * 3
    assert len(list((scenes / ".ltx_references" / "grey").rglob("*.mp4"))) == 3
    assert done.outputs["5"]["ltx_text"][0].startswith("3 of 3 clips usable")
    rows = done.outputs["5"]["ltx_table"][0]
    assert [row["caption"] for row in rows] == [CAPTION] * 3 and all(row["usable"] for row in rows)
    shown = done.outputs["7"]["images"]
    assert len(shown) == 2 and all(one["filename"].endswith(".mp4") for one in shown)
    for one in shown:
        clip = server.base / "output" / one["subfolder"] / one["filename"]
        assert clip.stat().st_size > 500
    assert len(done.outputs["9"]["images"]) == 17, "the second clip's pictures, as IMAGE"
    run = server.run_dir("from a film")
    assert run.status().state == "finished"
    assert load_file(run.checkpoints / "lora_weights_step_00002.safetensors")
    jobs = {path.name.split("-")[0]: (path / "events.jsonl").read_bytes() for path in (server.base / "output" / "ltx_train" / ".jobs").iterdir() if path.is_dir()}
    assert {"split", "caption", "reference", "encode", "decode"} <= set(jobs)
