"""Paths from workflows stay inside ComfyUI's folders and the roots that the server's owner allows."""

import json
import sys

import pytest


@pytest.fixture
def clips(pack):
    folder = pack.host.base / "input" / "my clips"
    folder.mkdir()
    (folder / "a.mp4").write_bytes(b"x")
    (pack.host.base / "datasets" / "set").mkdir()
    (pack.host.base / "datasets" / "set" / "b.png").write_bytes(b"x")
    (pack.host.base / "datasets" / "rows.jsonl").write_text("{}\n")
    return folder


def refused(pack, text):
    error = pack.engine("errors").DataError
    with pytest.raises(error) as told:
        pack.paths.resolve(text)
    assert len(told.value.message) < 120
    return told.value.code


def test_the_dropdown_lists_folders_with_media_and_dataset_files(pack, clips):
    (pack.host.base / "input" / "empty").mkdir()
    (pack.host.base / "datasets" / ".ltx_cache").mkdir()
    (pack.host.base / "datasets" / ".ltx_cache" / "c.mp4").write_bytes(b"x")
    assert pack.paths.datasets() == ["input/my clips", "datasets/rows.jsonl", "datasets/set"]


@pytest.mark.parametrize("text", ["input/my clips", "my clips", "input\\my clips", '"input/my clips"', " input/my clips/a.mp4 "])
def test_labels_resolve(pack, clips, text):
    assert pack.paths.resolve(text) in (clips, clips / "a.mp4")


def test_a_label_and_its_path_go_back_and_forth(pack, clips):
    for label in pack.paths.datasets():
        assert pack.paths.label_of(pack.paths.resolve(label)) == label


@pytest.mark.parametrize("text", ["../secret", "input/../../secret", "input/my clips/../../../secret", "datasets/../../secret"])
def test_steps_up_are_refused(pack, clips, text):
    secret = pack.host.base.parent / "secret"
    secret.mkdir(exist_ok=True)
    (pack.host.base / "secret").mkdir(exist_ok=True)
    assert refused(pack, text) in ("path.refused", "path.missing")


def test_a_link_that_leads_out_is_refused(pack, clips, tmp_path_factory):
    outside = tmp_path_factory.mktemp("outside")
    (pack.host.base / "input" / "link").symlink_to(outside)
    sys.modules["comfy.cli_args"].args.listen = "0.0.0.0"
    assert refused(pack, "input/link") == "path.refused"


def test_free_paths_only_where_every_caller_sits_at_this_machine(pack, clips, tmp_path_factory):
    outside = tmp_path_factory.mktemp("outside")
    listen = sys.modules["comfy.cli_args"].args
    for host in ("127.0.0.1", "localhost", "127.0.0.1,::1"):
        listen.listen = host
        assert pack.paths.resolve(str(outside)) == outside
    for host in ("0.0.0.0", "127.0.0.1,192.168.0.5", "::", ""):
        listen.listen = host
        assert refused(pack, str(outside)) == "path.refused"


def test_the_owner_can_close_free_paths_and_open_roots(pack, clips, tmp_path_factory):
    outside = tmp_path_factory.mktemp("outside")
    settings = pack.paths.settings_path()
    settings.write_text(json.dumps({"free_paths": False}))
    assert refused(pack, str(outside)) == "path.refused"
    settings.write_text(json.dumps({"roots": [str(outside)], "free_paths": False}))
    (outside / "sub").mkdir()
    assert pack.paths.resolve(str(outside / "sub")) == outside / "sub"
    sys.modules["comfy.cli_args"].args.listen = "0.0.0.0"
    assert pack.paths.resolve(str(outside / "sub")) == outside / "sub"


@pytest.mark.parametrize("text", ["[1, 2]", "not json", '{"roots": 5}'])
def test_a_damaged_settings_file_opens_nothing(pack, clips, text):
    pack.paths.settings_path().write_text(text)
    assert pack.paths.Settings.read().roots == ()


@pytest.mark.parametrize("text, code", [("", "path.empty"), ("  ", "path.empty"), ("input/a\0b", "path.refused"), ("input/nothing", "path.missing"), ("/nowhere/at/all", "path.missing")])
def test_what_cannot_be_a_dataset_is_told(pack, clips, text, code):
    assert refused(pack, text) == code


@pytest.mark.parametrize("name", ["", "..", "a/b", "a\\b", "con", "a:b", "x" * 200, "dot."])
def test_run_names_are_folder_names(pack, name):
    with pytest.raises(pack.engine("errors").RunError):
        pack.paths.run_path(name)


def test_only_a_run_that_is_there_is_opened(pack, tmp_path_factory):
    root = pack.paths.runs_root()
    (root / "mine").mkdir(parents=True)
    assert pack.paths.existing_run("mine") == root / "mine"
    outside = tmp_path_factory.mktemp("outside")
    (root / "link").symlink_to(outside)
    for name in ("other", "link", "..", ""):
        with pytest.raises(pack.engine("errors").RunError):
            pack.paths.existing_run(name)


def test_a_digest_changes_with_the_files_and_not_with_hidden_ones(pack, clips):
    before = pack.paths.digest_of(clips)
    (clips / ".ltx_cache").mkdir()
    (clips / ".ltx_cache" / "x").write_bytes(b"1")
    assert pack.paths.digest_of(clips) == before
    (clips / "b.mp4").write_bytes(b"2")
    assert pack.paths.digest_of(clips) != before


def test_caches_lie_in_the_datasets_root_or_the_output_folder(pack, clips):
    base = pack.host.base
    assert pack.paths.cache_root(base / "datasets" / "set") == base / "datasets" / ".ltx_cache"
    assert pack.paths.cache_root(clips) == base / "output" / "ltx_train" / ".cache"


def test_model_files_are_listed_without_shards(pack):
    folder = pack.host.base / "models" / "checkpoints"
    for name in ("a.safetensors", "b.ckpt", "c-00001-of-00002.safetensors"):
        (folder / name).write_bytes(b"x")
    assert pack.paths.model_files("checkpoints") == ["a.safetensors"]
    assert pack.paths.model_file("a.safetensors", "diffusion_models", "checkpoints") == folder / "a.safetensors"
    with pytest.raises(pack.engine("errors").DataError):
        pack.paths.model_file("../a.safetensors", "vae")
