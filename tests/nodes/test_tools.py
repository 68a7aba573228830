"""The nodes that make a dataset (scenes, captions, references) and look into a cache: widgets to jobs, the jobs done here instead of in a child."""

import json

import pytest
import torch

from ltx_train.tiny.media import counter_clip
from tests.caption_endpoint import saying


@pytest.fixture
def clips(pack):
    folder = pack.host.base / "input" / "clips"
    folder.mkdir()
    for name in ("a", "b"):
        counter_clip(folder / f"{name}.mp4", 9)
    return folder


@pytest.fixture
def here(pack, monkeypatch):
    """Jobs are done in this process; the kinds of those that were started."""
    tools, live, run_dir = pack.engine("tools"), pack.engine("runs.live"), pack.engine("runs.run_dir")
    started = []

    def carry_out(job, screen):
        started.append(job.task.kind)
        again = type(job).parse(__import__("yaml").safe_load(job.to_yaml()))
        assert again == job, "the job survives its YAML"
        run = run_dir.RunDir.create(job.output_dir)
        with live.LiveRun(run) as one:
            tools.run(job, one)
            one.set_state("finished", exit_code=0)
        return run

    monkeypatch.setattr(pack.jobs, "carry_out", carry_out)
    return started


def cuts(path):
    """A film of two scenes of a second each."""
    from ltx_train.data.writers import write_video

    frames = torch.zeros(48, 64, 64, 3, dtype=torch.uint8)
    frames[24:, ..., 0] = 220
    write_video(path, frames, 24)


def test_a_film_becomes_clips_and_their_place(pack, here):
    cuts(pack.host.base / "input" / "film.mp4")
    node = pack.nodes["LTXTrainSplitScenes"]
    assert "input/film.mp4" in next(i for i in node.define_schema().inputs if i.id == "film").options
    done = node.execute("input/film.mp4", "datasets/my scenes", min_seconds=0.5, threshold=0.0)
    place, text = done.args
    assert place == "datasets/my scenes" and text.splitlines()[0] == "2 made"
    assert sorted(p.name for p in (pack.host.base / "datasets" / "my scenes").glob("*.mp4")) == ["film-scene-001.mp4", "film-scene-002.mp4"]
    node.execute("input/film.mp4", "datasets/my scenes", min_seconds=0.5, threshold=0.0)
    assert here == ["split"], "the same is not done twice"
    with pytest.raises(pack.engine("errors").LtxTrainError, match="cut another way"):
        node.execute("input/film.mp4", "datasets/my scenes", min_seconds=0.5, threshold=0.0, max_seconds=0.5)
    node.execute("input/film.mp4", "datasets/shorter scenes", min_seconds=0.5, threshold=0.0, max_seconds=0.5)
    assert here == ["split", "split", "split"] and len(list((pack.host.base / "datasets" / "shorter scenes").glob("*.mp4"))) == 4


@pytest.mark.parametrize("folder", ["../away", "datasets/../../away", "output/x", "input/", "", "/etc"])
def test_made_things_land_only_where_they_may(pack, folder):
    errors = pack.engine("errors")
    try:
        found = pack.paths.new_folder(folder)
    except errors.LtxTrainError:
        return
    assert folder in ("output/x", "input/", "/etc") and (pack.host.base / "datasets") in found.parents


def test_references_are_made_and_paired(pack, here, clips):
    node = pack.nodes["LTXTrainMakeReferences"]
    place, text = node.execute("input/clips", {"control": "blur", "strength": 0.1}).args
    assert place == "input/clips/.ltx_references/blur/dataset.jsonl" and text.startswith("2 made")
    dataset = pack.nodes["LTXTrainDataset"].execute("(type a path below)", place, buckets="64x64x9", missing="file_name").args[0]
    samples = dataset.data.samples()
    assert [s.id for s in samples] and all(s.roles["reference_video"].is_file() for s in samples)
    node.execute("input/clips", {"control": "blur", "strength": 0.1})
    assert here == ["reference"]


@pytest.fixture
def endpoint():
    with saying("A square counts.") as url:
        yield url


def test_captions_are_written_beside_the_clips(pack, here, clips, endpoint):
    (clips / "a.txt").write_text("my own words")
    captioner = {"captioner": "endpoint", "url": endpoint, "model": "m", "max_frames": 2}
    place, text = pack.nodes["LTXTrainCaption"].execute("input/clips", captioner, override=False).args
    assert place == "input/clips/dataset.json" and text.splitlines()[0] == "1 made, 1 kept as they were"
    dataset = pack.nodes["LTXTrainDataset"].execute("(type a path below)", place, buckets="64x64x9").args[0]
    assert {s.caption for s in dataset.data.samples()} == {"my own words", "A square counts."}


def test_clips_go_only_to_hosts_that_the_owner_names(pack, here, clips):
    captioner = {"captioner": "endpoint", "url": "http://captions.example/v1", "retries": 0, "timeout": 0.1}
    with pytest.raises(pack.engine("errors").LtxTrainError, match="captions.example is not allowed"):
        pack.nodes["LTXTrainCaption"].execute("input/clips", captioner)
    pack.paths.settings_path().write_text(json.dumps({"caption_hosts": ["captions.example"]}))
    with pytest.raises(pack.engine("errors").LtxTrainError) as told:
        pack.nodes["LTXTrainCaption"].execute("input/clips", captioner)
    assert "not allowed" not in told.value.message


def test_a_local_captioner_and_depth_need_their_folder(pack, clips):
    for node, widgets in (("LTXTrainCaption", {"captioner": {"captioner": "local", "model_path": ""}}), ("LTXTrainMakeReferences", {"control": {"control": "depth", "model_path": ""}})):
        with pytest.raises(pack.engine("errors").ConfigError, match="model is chosen"):
            pack.nodes[node].execute("input/clips", **widgets)
    with pytest.raises(pack.engine("errors").DataError, match="lies outside|is no"):
        pack.paths.resolve("../../etc", what="depth model")


def test_a_path_through_a_link_is_told_later(pack, clips):
    for node in ("LTXTrainCaption", "LTXTrainMakeReferences", "LTXTrainDataset"):
        assert pack.nodes[node].validate_inputs("(type a path below)", None) is True
        assert "no dataset" in pack.nodes[node].validate_inputs("input/none")
    for node, choice in (("LTXTrainCaption", "captioner"), ("LTXTrainMakeReferences", "control")):
        assert pack.nodes[node].validate_inputs("input/clips", **{choice: {choice: "x"}}) is True, "ComfyUI passes these on its own"
        assert pack.nodes[node].fingerprint_inputs("input/clips", None)


def test_what_a_cache_holds_is_shown(pack, here, monkeypatch):
    """The node's job and files; the decoding itself is the engine's (tests of its own)."""
    sockets, config, tools = pack.sockets, pack.engine("config"), pack.engine("tools")
    folder = pack.host.base / "output" / "ltx_train" / ".cache"
    folder.mkdir(parents=True)
    (folder / "index.json").write_text("{}")
    asked = []

    def decode(task, live):
        asked.append((task.first, task.count))
        out = live.dir.path / "clips"
        out.mkdir(exist_ok=True)
        from PIL import Image

        Image.new("RGB", (8, 8), (200, 0, 0)).save(out / "a.png")
        return tools.Outcome(str(out), ["a.png"])

    monkeypatch.setitem(tools.TASKS, tools.DecodeTask, decode)
    model = sockets.LtxModel(config.ModelSection(model_path="m.safetensors"), "ltx2.3", "LTX-2.3", False, "v2", (8, 8), "f")
    data = config.DataSection.model_validate({"preprocessed_data_root": str(folder)})
    node = pack.nodes["LTXTrainDecode"]
    done = [node.execute(model, sockets.LtxCache(data, "clips", "ltx2.3"), clip=2, count=3) for _ in range(2)][1]
    assert asked == [(2, 3)] and here == ["decode"]
    assert done.args[0].shape == (1, 8, 8, 3) and done.args[0][0, 0, 0, 0] > 0.7
    shown = done.ui["images"][0]
    assert shown["filename"] == "a.png" and shown["type"] == "output" and (pack.host.base / "output" / shown["subfolder"] / "a.png").is_file()


def test_a_tool_that_makes_nothing_is_an_error_with_its_reason(pack, here):
    (pack.host.base / "input" / "broken.mp4").write_bytes(b"no film")
    with pytest.raises(pack.engine("errors").DataError, match="Nothing was made"):
        pack.nodes["LTXTrainSplitScenes"].execute("input/broken.mp4", "datasets/scenes")


@pytest.mark.parametrize("tool", ["split", "reference"])
def test_a_stop_ends_a_tool_between_two_frames(pack, clips, tool):
    """And what is half written does not stay."""
    errors, tools = pack.engine("errors"), pack.engine("tools")
    film, out, seen = pack.host.base / "input" / "film.mp4", pack.host.base / "datasets" / "out", []
    cuts(film)

    def check():
        seen.append(1)
        if len(seen) == (60 if tool == "split" else 4):
            raise errors.StopRequested("asked to stop")

    with pytest.raises(errors.StopRequested):
        if tool == "split":
            tools.split(film, out, tools.SceneSection(), check=check)
        else:
            tools.make_references(tools.ReferenceJob(dataset=str(clips), output=str(out), control={"kind": "grey"}), check=check)
    assert [path for path in out.rglob("*") if path.suffix == ".mp4"] == []
