"""Full fine-tuning: one process and two (FSDP2 shards) train alike, save alike, and go on from one another's snapshots."""

import json
import shutil

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from ltx_train.config import TrainConfig
from ltx_train.errors import CheckpointError, ConfigError
from ltx_train.models.checkpoint import Checkpoint
from ltx_train.models.transformer import load_transformer
from ltx_train.runs.events import LoraEvent, SampleEvent, StatisticsEvent, StepEvent
from ltx_train.runs.run_dir import RunDir
from ltx_train.training.sharded import check_sharded
from tests.end_to_end.corridor import finish, fork, furthest, train

RATE = {"learning_rate": 1e-3, "optimizer_params": {"eps": 1e-4}}  # AdamW's first steps are signs: a larger eps keeps rounding small


def full(home, out, *, steps=3, **sections):
    optimization = {"steps": steps, "batch_size": 1, **RATE, **sections.pop("optimization", {})}
    job = home.job(out, "ltx2.3", optimization=optimization, **sections)
    job["model"]["training_mode"] = "full"
    del job["lora"]
    return TrainConfig.parse(job)


def averaged(home, out, accumulation):
    """Three steps of two samples each, with their snapshots kept: two micro-steps of one process, or one of two."""
    return full(home, out, optimization={"ema": {"decay": 0.9}, "gradient_accumulation_steps": accumulation}, checkpoints={"interval": 1, "keep_last_n": 0})


@pytest.fixture(scope="module")
def alone(home, tmp_path_factory):
    """One process."""
    return train(averaged(home, tmp_path_factory.mktemp("alone") / "run", 2))


@pytest.fixture(scope="module")
def shards(home, tmp_path_factory):
    """Two processes."""
    config = averaged(home, tmp_path_factory.mktemp("shards") / "run", 1)
    return finish(fork(config, ranks=2), config)


def model_file(done):
    return done.run.path / done.events(LoraEvent)[-1].path


def test_two_ranks_in_shards_equal_one_process(alone, shards):
    done = shards
    assert done.losses == pytest.approx(alone.losses, rel=1e-5)
    assert furthest(done.snapshot, alone.snapshot) < 1e-5
    for group in ("optimizer", "ema"):
        assert furthest(done.snapshot, alone.snapshot, group) < 1e-5
    with safe_open(str(model_file(done)), "pt") as ours, safe_open(str(model_file(alone)), "pt") as theirs:
        assert set(ours.keys()) == set(theirs.keys()) and ours.metadata() == theirs.metadata()
        assert max(float((ours.get_tensor(n).float() - theirs.get_tensor(n).float()).abs().max()) for n in ours.keys()) < 1e-5
    (end,) = done.events(StatisticsEvent)
    assert (end.processes, end.global_batch, end.samples, end.steps, end.skipped) == (2, 2, 6, 3, 0) and end.samples_per_second > 0


def test_the_model_file_loads_as_a_checkpoint_with_the_trained_weights(home, alone):
    files = home.model("ltx2.3")
    made, before = Checkpoint.open(model_file(alone)), Checkpoint.open(files["model"])
    assert made.family.name == "ltx2.3" and made.has("connectors") and made.transformer == before.transformer
    assert json.loads(made.metadata["config"])["transformer"] == before.config["transformer"]
    trained = dict(load_transformer(made, dtype=torch.float32, device="cpu").named_parameters())
    ema = alone.snapshot["ema"]
    assert all(torch.equal(trained[name], value) for name, value in ema.items())
    moved = [n for n, p in load_transformer(before, dtype=torch.float32, device="cpu").named_parameters() if not torch.equal(p, trained[n])]
    assert len(moved) > len(ema) * 0.9


@pytest.mark.parametrize(("first", "then"), [(2, 1), (1, 2)])
def test_other_process_counts_go_on_with_the_same_global_batch(home, tmp_path, alone, shards, first, then):
    """A copy of a run as if it had ended after two steps, gone on with by another number of processes."""
    shutil.copytree((shards if first == 2 else alone).run.path, tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "state_step_00003")
    config = averaged(home, tmp_path / "run", 2 // first)
    done = finish(fork(config, then), config)
    assert "distributed.global_batch" in done.warnings and [e.step for e in done.events(StepEvent)] == [1, 2, 3, 3]
    assert done.losses == pytest.approx(alone.losses, rel=1e-5) and furthest(done.snapshot, alone.snapshot) < 1e-5


def test_bf16_computes_with_rounded_copies_of_float32_masters(home, tmp_path, alone):
    done = train(full(home, tmp_path / "run", optimization={"ema": {"decay": 0.9}, "gradient_accumulation_steps": 2}, acceleration={"mixed_precision_mode": "bf16"}))
    weights = done.snapshot["weights"]
    assert all(v.dtype == torch.float32 for v in weights.values())
    assert any(not torch.equal(v, v.bfloat16().float()) for v in weights.values()), "masters keep what bf16 would round away"
    assert done.losses == pytest.approx(alone.losses, rel=0.02)
    assert furthest(done.snapshot, alone.snapshot) < 4 * RATE["learning_rate"]


def test_bf16_in_shards_with_recomputing_state_on_the_host_and_previews_equals_bf16_alone(home, tmp_path):
    alone = train(full(home, tmp_path / "alone", steps=2, optimization={"gradient_accumulation_steps": 2}, acceleration={"mixed_precision_mode": "bf16"}))
    previews = {"samples": [{"prompt": "a red block"}], "video_dims": [64, 64, 9], "inference_steps": 1, "interval": 1, "decode": "later", "skip_initial_validation": True}
    config = full(
        home, tmp_path / "two", steps=2, acceleration={"mixed_precision_mode": "bf16", "optimizer_in_ram": "on"},
        optimization={"enable_gradient_checkpointing": True}, validation=previews,
    )  # fmt: skip
    done = finish(fork(config, ranks=2), config)
    assert [s.step for s in done.events(SampleEvent)] == [1, 2] and not any("fail" in w for w in done.warnings)
    assert done.losses == pytest.approx(alone.losses, rel=1e-2)
    assert furthest(done.snapshot, alone.snapshot) < 2e-3


@pytest.mark.parametrize("prefix", ["model.diffusion_model.", "diffusion_model.", ""])
def test_warm_start_from_a_model_file(home, tmp_path, alone, prefix):
    path = tmp_path / "model_weights_step_00003.safetensors"
    tensors = {n.replace("model.diffusion_model.", prefix, 1): t for n, t in load_file(model_file(alone)).items() if prefix or "connector" not in n}
    save_file(tensors, path)
    done = train(full(home, tmp_path / "run", steps=1, optimization={"learning_rate": 1e-12}, model={"load_checkpoint": str(path)}))
    assert furthest(done.snapshot, {"weights": alone.snapshot["ema"]}) < 1e-9 and "full.warm_start" in done.warnings


def test_a_damaged_file_to_start_from_is_refused(home, tmp_path):
    path = tmp_path / "cut.safetensors"
    path.write_bytes(home.model("ltx2.3")["model"].read_bytes()[:5000])
    with pytest.raises(CheckpointError) as caught:
        train(full(home, tmp_path / "run", steps=1, model={"load_checkpoint": str(path)}))
    assert "cut.safetensors" in caught.value.message


def test_what_cannot_be_sharded_is_refused_with_its_reason(home, tmp_path):
    config = full(home, tmp_path / "run", optimization={"optimizer_type": "adafactor", "optimizer_params": {}})
    ranks = fork(config, ranks=2)
    for rank in ranks:
        rank.join(60)
    assert [r.exitcode for r in ranks] == [2, 2] and RunDir(config.output_dir).history().error.code == "full.optimizer"
    with pytest.raises(ConfigError, match="fp16"):
        check_sharded("adamw", torch.float16, quantization=None, stored_quantised=False)


def test_quantised_full_fine_tuning_is_refused(home, tmp_path):
    with pytest.raises(ConfigError, match="quantised"):
        full(home, tmp_path / "run", acceleration={"quantization": "int8-quanto"})
    for case in ({"quantization": "int8-quanto", "stored_quantised": False}, {"quantization": None, "stored_quantised": True}):
        with pytest.raises(ConfigError) as refused:
            check_sharded("adamw", torch.bfloat16, **case)
        assert refused.value.code == "full.quantized" and "FSDP2 would dequantise" in str(refused.value)
