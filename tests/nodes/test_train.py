"""The train node's job, what it hands on from disk, and when ComfyUI's cache of it holds."""

import json

import pytest
import torch
from safetensors.torch import save_file


@pytest.fixture
def parts(pack):
    """A model and a dataset as the nodes before give them."""
    config, sockets = pack.engine("config"), pack.sockets
    folder = pack.host.base / "input" / "clips"
    folder.mkdir()
    model = sockets.LtxModel(config.ModelSection(model_path="m.safetensors"), "ltx2.3", "LTX-2.3 22B", True, "v2", (4096, 2048), "f")
    data = config.DataSection.model_validate({"sources": [{"kind": "folder", "path": str(folder)}], "resolution_buckets": "64x64x9"})
    return model, sockets.LtxDataset(data, "clips")


def widgets(**changes):
    plain = {"run_name": "mine", "mode": "i2v_audio", "rank": 16, "alpha": 0.0, "steps": 100, "learning_rate": 1e-4, "seed": 7, "num_processes": 1, "validation_prompt": ""}
    return {**plain, **changes}


def made(pack, parts, **changes):
    return pack.train.config_of(*parts, widgets(**changes))


def settings(pack, node, **values):
    return pack.nodes[node].execute(**values).args[0]


def test_the_widgets_are_the_job(pack, parts):
    config = made(pack, parts, validation_prompt="a cat\n\n a dog ")
    assert config.lora.rank == config.lora.alpha == 16
    assert config.optimization.steps == 100 and config.optimization.batch_size == 1 and config.seed == 7
    assert config.training_strategy.streams().present == ("video", "audio")
    assert config.training_strategy.video.conditions[0].type == "first_frame"
    assert [s.prompt for s in config.validation.samples] == ["a cat", "a dog"]
    assert config.output_dir == str(pack.host.base / "output" / "ltx_train" / "mine")
    assert config.data.cache_dir == str(pack.host.base / "output" / "ltx_train" / ".cache")
    assert config.checkpoints.interval == 100
    again = pack.engine("config").TrainConfig.parse(__import__("yaml").safe_load(config.to_yaml()))
    assert again == config


def test_a_dataset_and_its_cache_make_the_same_run(pack, parts):
    model, dataset = parts
    cache = pack.sockets.LtxCache(pack.compose.settled_data(dataset, model), "clips", "ltx2.3")
    assert pack.train.config_of(model, cache, widgets()).identity() == made(pack, parts).identity()


def test_a_cache_of_another_family_is_refused(pack, parts):
    model, dataset = parts
    cache = pack.sockets.LtxCache(pack.compose.settled_data(dataset, model), "clips", "ltx2")
    with pytest.raises(pack.engine("errors").RunError, match="encoded for ltx2"):
        pack.train.config_of(model, cache, widgets())


def test_settings_nodes_go_into_their_sections(pack, parts):
    config = made(
        pack,
        parts,
        adapter=settings(pack, "LTXTrainAdapterSettings", kind="rslora", target_modules="to_q\nto_k"),
        optimizer=settings(pack, "LTXTrainOptimizerSettings", optimizer_type={"optimizer_type": "prodigy", "d_coef": 2.0}, batch_size=3, warmup_steps=5),
        objective=settings(pack, "LTXTrainObjectiveSettings", loss="huber", audio_weight=0.5),
        validation=settings(pack, "LTXTrainValidationSettings", prompts="more", width=64, height=64, frames=9, interval=10),
        memory=settings(pack, "LTXTrainMemorySettings", quantization="nf4"),
        checkpoints=settings(pack, "LTXTrainCheckpointSettings", interval=0, keep_last_n=5),
        distribution=settings(pack, "LTXTrainDistributionSettings", devices="0,1"),
        num_processes=2,
        learning_rate=0.0,
    )
    assert config.lora.kind == "rslora" and config.lora.target_modules == ["to_q", "to_k"]
    assert config.optimization.optimizer_type == "prodigy" and config.optimization.optimizer_params == {"d_coef": 2.0}
    assert config.optimization.learning_rate == 1.0 and config.optimization.scheduler_type == "constant", "0 leaves the rate to prodigy"
    assert config.flow_matching.loss == "huber" and config.flow_matching.audio_weight == 0.5
    assert config.validation.video_dims == (64, 64, 9) and [s.prompt for s in config.validation.samples] == ["more"]
    assert config.validation.set_by_hand == ()
    assert config.acceleration.quantization == "nf4"
    assert config.checkpoints.interval is None and config.checkpoints.keep_last_n == 5
    assert config.distributed.num_processes == 2 and config.distributed.devices == "0,1"


def test_a_recipe_by_hand_is_the_users_own(pack, parts):
    hand = settings(pack, "LTXTrainValidationSettings", recipe={"recipe": "by hand", "inference_steps": 8, "video_cfg_scale": -1.0, "stg_blocks": "3, 4"})
    section = made(pack, parts, validation=hand, validation_prompt="x").validation
    assert section.inference_steps == 8 and section.stg_blocks == (3, 4)
    assert set(section.set_by_hand) == {"inference_steps", "stg_blocks"}


def test_mode_settings_change_the_conditions(pack, parts):
    node = "LTXTrainModeSettings"
    config = made(pack, parts, mode_settings=settings(pack, node, base="t2v_audio", first_frame_probability=0.3))
    assert [(c.type, c.probability) for c in config.training_strategy.video.conditions] == [("first_frame", 0.3)]
    config = made(pack, parts, mode_settings=settings(pack, node, base="i2v", video_conditions="none"))
    assert config.training_strategy.video.conditions == () and config.training_strategy.audio is None
    config = made(pack, parts, mode_settings=settings(pack, node, base="i2v", video_conditions="{type: prefix, temporal_boundary: 2}\n{type: random_mask}"))
    assert [c.type for c in config.training_strategy.video.conditions] == ["prefix", "random_mask"]
    for values in ({"base": "i2v", "audio_conditions": "{type: prefix}"}, {"base": "i2v", "video_conditions": "{prefix}"}, {"base": "i2v", "video_conditions": "{type: ["}):
        with pytest.raises(pack.engine("errors").ConfigError):
            settings(pack, node, **values)


def test_every_mode_is_a_job(pack, parts):
    for mode in pack.compose.MODE_NAMES:
        assert made(pack, parts, mode=mode).training_strategy.streams().present


@pytest.mark.parametrize("changes, words", [({"steps": 3}, "warmup_steps 5 must be below steps 3"), ({"rank": 1}, "lora.rank"), ({"run_name": "a/b"}, "name of a run")])
def test_what_cannot_be_is_told_in_one_line(pack, parts, changes, words):
    optimizer = settings(pack, "LTXTrainOptimizerSettings", warmup_steps=5)
    with pytest.raises(pack.engine("errors").LtxTrainError) as told:
        made(pack, parts, optimizer=optimizer, **changes)
    assert words in told.value.message and len(told.value.message) < 120


# -- from disk ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def run(pack):
    """A finished run of two steps."""
    run_dir = pack.engine("runs.run_dir")
    run = run_dir.RunDir.create(pack.paths.run_path("mine"))
    run.write_status(run_dir.Status(state="finished", step=2))
    finish(pack, run, 2)
    return run


def finish(pack, run, step):
    events, event_log = pack.engine("runs.events"), pack.engine("runs.event_log")
    run.checkpoints.mkdir(exist_ok=True)
    path = run.checkpoints / f"lora_weights_step_{step:05d}.safetensors"
    save_file({"diffusion_model.a.lora_A.weight": torch.full((2, 4), float(step))}, path)
    log = event_log.EventLog(run.events_path)
    for n in range(1, step + 1):
        log.write(events.StepEvent(step=n, total=step, loss=1.0 / n))
    log.write(events.LoraEvent(step=step, path=f"checkpoints/{path.name}", final=True))
    log.close()
    return path


def test_a_runs_result(pack, run):
    found = pack.train.Result.of(run)
    assert found.lora_name == "ltx_train/mine.safetensors"
    assert found.loss_map() == {"loss": [1.0, 0.5]}
    assert torch.equal(found.lora_model()["diffusion_model.a.lora_A.weight"], torch.full((2, 4), 2.0))
    assert (pack.host.base / "output/loras/ltx_train/mine.safetensors").is_file()


def test_a_longer_run_goes_by_another_name_too(pack, run):
    assert pack.train.Result.of(run).lora_name == "ltx_train/mine.safetensors"
    newer = finish(pack, run, 4)
    folder = pack.host.base / "output/loras/ltx_train"
    for _ in range(2):  # also when it is asked again
        assert pack.train.Result.of(run).lora_name == "ltx_train/mine_step_00004.safetensors"
    assert (folder / "mine.safetensors").read_bytes() == (folder / "mine_step_00004.safetensors").read_bytes() == newer.read_bytes()


def test_a_run_without_its_files_is_no_result(pack, run):
    for path in run.checkpoints.glob("*.safetensors"):
        path.unlink()
    assert not pack.train.Result.there(run)
    with pytest.raises(pack.engine("errors").RunError, match="left no LoRA"):
        pack.train.Result.of(run)


def test_an_event_cannot_name_a_file_outside_the_run(pack, run, tmp_path_factory):
    outside = tmp_path_factory.mktemp("x") / "secret.safetensors"
    outside.write_bytes(b"x")
    record = {"v": 1, "seq": 99, "t": 1, "type": "lora", "step": 99, "path": f"../../../../../../..{outside}"}
    with open(run.events_path, "a") as file:
        file.write(json.dumps(record) + "\n")
    assert pack.train.last_lora(run)[1] == 2


def test_comfyuis_cache_holds_until_the_disk_says_otherwise(pack, run):
    results = pack.train.Results()
    first = results.generation("mine")
    results.remember("mine")
    assert results.generation("mine") == first, "its own run does not make the node run again"
    finish(pack, run, 4)
    second = results.generation("mine")
    assert second != first, "somebody else has moved the run"
    results.remember("mine")
    assert results.generation("mine") == second
    (pack.host.base / "output/loras/ltx_train").mkdir(parents=True)
    (pack.host.base / "output/loras/ltx_train/mine.safetensors").write_bytes(b"x")
    assert results.generation("mine") != second
    assert results.generation("bad/name") == "0"


def test_a_finished_run_is_returned_and_nothing_is_started(pack, parts, monkeypatch):
    config = made(pack, parts)
    setup, status = pack.engine("run_setup"), pack.engine("runs.run_dir").Status
    opened = setup.open_training(config)
    finish(pack, opened.run, 4)
    opened.run.write_status(status(state="finished", step=4))
    monkeypatch.setattr(pack.compose, "start_child", lambda opened, part: pytest.fail("a child was started"))
    assert pack.train.train(config, pack.follow.Screen()).path == opened.run.path


def test_a_run_that_does_not_end_is_not_tried_for_ever(pack, parts, monkeypatch):
    started = []
    monkeypatch.setattr(pack.compose, "start_child", lambda opened, part: started.append(opened) or type("Child", (), {"attached": False}))
    monkeypatch.setattr(pack.train, "follow", lambda child, screen: pack.engine("launch").Outcome("finished", 0, ""))
    with pytest.raises(pack.engine("errors").RunError, match="ends before"):
        pack.train.train(made(pack, parts), pack.follow.Screen(), {"workflow": {"nodes": []}})
    assert len(started) == pack.train.MAX_ROUNDS
    assert json.loads((started[0].run.path / "workflow.json").read_text()) == {"nodes": []}


def test_a_part_is_handed_on_by_its_step_and_asks_to_be_run_again(pack, parts, monkeypatch):
    """While the child is parked the node has more to do each time; the finished run's result then stays. Others that wait are ended."""
    config, setup, status = made(pack, parts, steps=4), pack.engine("run_setup"), pack.engine("runs.run_dir").Status
    run, other = (setup.open_training(made(pack, parts, steps=4, run_name=name)).run for name in ("mine", "other"))
    ended, sizes = [], []
    monkeypatch.setattr(pack.train, "parked", lambda one: one.read_status().state == "parked")
    monkeypatch.setattr(pack.train, "end_parked", lambda one: ended.append(one.name))
    other.write_status(status(state="parked", step=1, part=1))

    def trained(opened, part):
        sizes.append(part)
        step = opened.run.read_status().step + part
        finish(pack, opened.run, step)
        opened.run.write_status(status(state="finished" if step == 4 else "parked", step=step, total=4, part=None if step == 4 else step))
        return type("Child", (), {"attached": False})

    monkeypatch.setattr(pack.compose, "start_child", trained)
    monkeypatch.setattr(pack.train, "follow", lambda child, screen: pack.engine("launch").Outcome("parked", None, "", part_done=run.read_status().part_done))
    monkeypatch.setattr(pack.train, "results", pack.train.Results())
    node, keys, names = pack.nodes["LTXTrainLoRA"], [], []
    monkeypatch.setattr(pack.train, "config_of", lambda *given: config)
    for _ in range(3):
        keys.append(node.fingerprint_inputs(run_name="mine"))
        found = node.execute(*parts, run_name="mine", steps_this_run=2)
        names.append(found.args[2])
    assert sizes == [2, 2] and ended == ["other", "other"]
    assert names == ["ltx_train/mine_step_00002.safetensors", *["ltx_train/mine_step_00004.safetensors"] * 2]
    assert keys[0] != keys[1] == keys[2] == node.fingerprint_inputs(run_name="mine")
    assert "2 steps done of 4; queue it again" not in found.ui["ltx_text"][0]


def test_save_names_stay_below_the_loras_folder(pack):
    target = pack.runs.target_of
    root = pack.host.base / "output" / "loras"
    assert target("a/b", "output/loras", False) == root / "a" / "b.safetensors"
    assert target("a.safetensors", "models/loras", False) == pack.host.base / "models" / "loras" / "a.safetensors"
    for name in ("", "../x", "a/../../x", "con", "a:b"):
        with pytest.raises(pack.engine("errors").RunError):
            target(name, "output/loras", False)
    (root / "a").mkdir(parents=True)
    (root / "a" / "b.safetensors").write_bytes(b"x")
    assert target("a/b", "output/loras", False).name == "b_002.safetensors"
    assert target("a/b", "output/loras", True).name == "b.safetensors"


def test_runs_are_listed_newest_first_without_jobs(pack, parts):
    import os

    setup = pack.engine("run_setup")
    for number, name in enumerate(("old", "new")):
        opened = setup.open_training(made(pack, parts, run_name=name))
        os.utime(opened.run.job_path("train"), (1000 + number, 1000 + number))
    (pack.paths.jobs_root() / "encode-x").mkdir(parents=True)
    assert pack.runs.run_names() == ["new", "old"]
