"""The dataset and encoding nodes: widgets to a data section, the report, chains."""

import pytest

from ltx_train.tiny.media import counter_clip


@pytest.fixture
def clips(pack):
    folder = pack.host.base / "datasets" / "people"
    folder.mkdir()
    for name in ("a", "b"):
        counter_clip(folder / f"{name}.mp4", 25, sound=name == "a")
    (folder / "a.txt").write_text("walks")
    return folder


def widgets_of(pack, **changes):
    """The node's widgets at their defaults, as ComfyUI passes them."""
    found = {}
    for one in pack.nodes["LTXTrainDataset"].define_schema().inputs:
        if one.io_type in ("INT", "FLOAT", "STRING", "BOOLEAN", "COMBO"):
            found[one.id] = one.default if one.default is not None else (one.options or [None])[0]
    return {**found, **changes}


def run(pack, **changes):
    return pack.nodes["LTXTrainDataset"].execute(**widgets_of(pack, **changes))


def test_the_node_reports_and_gives_a_section(pack, clips):
    done = run(pack, dataset="datasets/people", buckets="64x64x9", trigger="sks", missing="file_name")
    dataset, text = done.args
    assert dataset.name == "people"
    assert text.splitlines()[0] == "2 of 2 clips usable, 2 pieces, 0.8 s, 1 with sound"
    assert dataset.data.sources[0].captions.trigger == "sks"
    rows = done.ui["ltx_table"][0]
    assert [row["caption"] for row in rows] == ["sks walks", "sks b"]


def test_a_clip_that_is_left_out_stands_first_with_its_reason(pack, clips):
    _, text = run(pack, dataset="datasets/people", buckets="64x64x9").args
    assert "1 of 2 clips usable" in text
    assert "x b.mp4: no caption" in text
    rows = run(pack, dataset="datasets/people", buckets="64x64x9").ui["ltx_table"][0]
    assert [row["usable"] for row in rows] == [False, True]


def test_nothing_usable_is_an_error_with_the_fix(pack, clips):
    (clips / "a.txt").unlink()
    with pytest.raises(pack.engine("errors").DataError, match="None of 2 clips is usable"):
        run(pack, dataset="datasets/people")


def test_a_chain_keeps_each_sets_repeats_and_sizes(pack, clips):
    other = pack.host.base / "input" / "more"
    other.mkdir()
    counter_clip(other / "c.mp4", 25)
    (other / "c.txt").write_text("runs")
    first = run(pack, dataset="datasets/people", buckets="64x64x9", missing="file_name", repeats=3).args[0]
    both = run(pack, dataset="input/more", buckets="96x64x17", previous=first).args[0]
    samples = both.data.samples()
    assert [(s.repeats, s.buckets) for s in samples] == [(3, None), (3, None), (1, "96x64x17")]


def test_clip_settings_join_the_nodes_own(pack, clips):
    more = pack.nodes["LTXTrainClipSettings"].execute(letterbox=True, reference_downscale_factor=2).args[0]
    dataset = run(pack, dataset="datasets/people", buckets="64x64x9", missing="file_name", clips=more, fps=12.0).args[0]
    assert dataset.data.clips.letterbox and dataset.data.clips.reference_downscale_factor == 2 and dataset.data.clips.fps == 12


def test_joined_datasets_are_cut_in_one_way(pack, clips):
    first = run(pack, dataset="datasets/people", buckets="64x64x9", missing="file_name", fps=12.0).args[0]
    joined = run(pack, dataset="datasets/people", missing="file_name", previous=first).args[0]
    assert joined.data.clips.fps == 12
    with pytest.raises(pack.engine("errors").ConfigError, match="fps is 30.0 here and 12.0 in the dataset before"):
        run(pack, dataset="datasets/people", missing="file_name", fps=30.0, previous=first)


def test_role_folders_beside_a_dataset_file_are_refused(pack, clips):
    (clips / "metadata.csv").write_text("video,caption\na.mp4,walks\n")
    with pytest.raises(pack.engine("errors").DataError, match="metadata.csv is a dataset file: it names its clips' video_mask in columns"):
        run(pack, dataset="datasets/people/metadata.csv", buckets="64x64x9", video_mask="datasets/people")


def test_a_dataset_that_is_not_there_is_told_before_the_run(pack, clips):
    node = pack.nodes["LTXTrainDataset"]
    assert node.validate_inputs("datasets/people") is True
    assert "no dataset" in node.validate_inputs("datasets/none")
    assert node.validate_inputs("datasets/none", "datasets/people") is True


def test_the_fingerprint_follows_the_files(pack, clips):
    node = pack.nodes["LTXTrainDataset"]
    before = node.fingerprint_inputs("datasets/people", fps=0)
    (clips / "a.txt").write_text("walks fast")
    assert node.fingerprint_inputs("datasets/people", fps=0) != before


def test_the_cache_has_an_index_of_its_own_for_each_setting_and_model(pack, clips):
    sockets = pack.sockets
    section = pack.engine("config").ModelSection(model_path="m.safetensors")
    model = lambda family: sockets.LtxModel(section, family, family, True, "v2", (4096, 2048), "f")  # noqa: E731
    one = run(pack, dataset="datasets/people", buckets="64x64x9", missing="file_name").args[0]
    two = run(pack, dataset="datasets/people", buckets="64x64x17", missing="file_name").args[0]
    made = [pack.compose.settled_data(d, model(f), e) for d, f, e in ((one, "ltx2", "engine"), (two, "ltx2", "engine"), (one, "ltx2.3", "engine"), (one, "ltx2", "comfyui"))]
    assert len({data.index for data in made}) == 4
    assert {data.cache_dir for data in made} == {str(pack.host.base / "datasets" / ".ltx_cache")}
    assert pack.compose.settled_data(one, model("ltx2"), "engine").index == made[0].index
