"""A run that is stopped, killed or extended goes on as if nothing had happened, bit for bit."""

import random
import shutil

import pytest
import torch

from ltx_train.checks import check_config
from ltx_train.errors import ConfigError, RunError, StopRequested
from ltx_train.runs.events import LoraEvent, SnapshotEvent
from ltx_train.training import snapshots
from tests.end_to_end.corridor import Killed, at_step, same, train

STEPS = 6

# everything that has a state or draws at random, spread over the optimizers
SETTINGS = {
    "adamw": {
        "optimization": {"gradient_accumulation_steps": 2, "scheduler_type": "cosine", "warmup_steps": 2},
        "lora": {"dropout": 0.3}, "data": {"caption_dropout": 0.5}, "flow_matching": {"balance": "auto"},
    },
    "adamw8bit": {"optimization": {"ema": {"decay": 0.9}, "optimizer_params": {"min_8bit_size": 16}}, "lora": {"kind": "dora", "dropout": 0.2}},
    "prodigy": {"optimization": {"gradient_accumulation_steps": 2}, "training_strategy": {"name": "flexible", "video": {"is_generated": True, "conditions": [{"type": "random_mask", "probability": 0.5}]}}},
    "adamw_schedulefree": {"optimization": {"ema": None}, "lora": {"dropout": 0.2}, "training_strategy": {"name": "text_to_video", "with_audio": True, "first_frame_conditioning_p": 0.5}},
    "adafactor": {"optimization": {"ema": {"decay": 0.5, "warmup": False}}, "training_strategy": {"name": "flexible", "audio": {"is_generated": True}}},
}  # fmt: skip


def settings(home, out, optimizer, steps=STEPS, interval=2, **more):
    """A job with everything that has a state; ``more`` are further fields of its sections."""
    cache = str(home.cache("ltx2.3", home.clips, caption_dropout=0.5))
    base = {"optimization": {"steps": steps, "optimizer_type": optimizer}, "data": {"preprocessed_data_root": cache}, "checkpoints": {"interval": interval, "keep_last_n": 0}}
    sections = dict(base)
    for given in (SETTINGS[optimizer], more):
        for name, fields in given.items():
            sections[name] = fields if name == "training_strategy" else {**sections.get(name, {}), **fields}
    return home.config(out, **sections)


@pytest.fixture(scope="module")
def straight(home, tmp_path_factory):
    """Uninterrupted runs by optimizer and steps, each made once."""
    made = {}

    def get(optimizer, steps=STEPS):
        if (optimizer, steps) not in made:
            made[optimizer, steps] = train(settings(home, tmp_path_factory.mktemp("straight") / "run", optimizer, steps=steps))
        return made[optimizer, steps]

    return get


def stopped_at(live, step):
    return at_step(live, step, lambda: live.stop.request("the test"))


def killed_at(live, step):
    def die():
        raise Killed

    return at_step(live, step, die)


@pytest.mark.parametrize(("optimizer", "stop", "kill"), [("adamw", 1, 3), ("adamw8bit", 3, 4), ("prodigy", 1, 5), ("adamw_schedulefree", 3, 5), ("adafactor", 1, 4)])
def test_stopped_and_killed(home, tmp_path, straight, optimizer, stop, kill):
    """N steps at once equal N steps with a stop after ``stop`` and a kill after ``kill`` of them: weights, optimizer, EMA, losses, file."""
    whole = straight(optimizer)
    config = settings(home, tmp_path / "broken", optimizer)
    with pytest.raises(StopRequested):
        train(config, lambda live: stopped_at(live, stop))
    with pytest.raises(Killed):
        train(config, lambda live: killed_at(live, kill))
    resumed = train(config)
    assert same(whole.snapshot, resumed.snapshot)
    assert whole.losses == resumed.losses and len(whole.losses) == STEPS
    assert [(e.grad_norm, e.loss_average) for e in whole.steps.values()] == [(e.grad_norm, e.loss_average) for e in resumed.steps.values()]
    assert whole.lora.read_bytes() == resumed.lora.read_bytes()
    assert [e.reason for e in resumed.events(SnapshotEvent)].count("stop") == 1


@pytest.mark.parametrize("cut", ["weights", "manifest", "rename"])
def test_killed_while_saving(home, tmp_path, straight, monkeypatch, cut):
    """A kill within the writing of a snapshot costs that snapshot only; what it left behind is no hindrance."""
    config = settings(home, tmp_path / "broken", "adamw")
    spots = {"weights": "_write_group", "manifest": "_write_json", "rename": "_take_name"}
    original = getattr(snapshots, spots[cut])

    def dying(*args):
        if saving["step"] == 4:
            raise Killed
        return original(*args)

    saving = {"step": 0}
    save_whole = snapshots.save_snapshot

    def save(directory, tensors, state):
        saving["step"] = state["step"]
        return save_whole(directory, tensors, state)

    monkeypatch.setattr("ltx_train.saves.save_snapshot", save)
    monkeypatch.setattr(snapshots, spots[cut], dying)
    with pytest.raises(Killed):
        train(config)
    monkeypatch.undo()
    assert [s.name for s in snapshots.snapshots(tmp_path / "broken")] == ["state_step_00002"]
    resumed = train(config)
    assert same(straight("adamw").snapshot, resumed.snapshot)
    assert sorted(p.name for p in (tmp_path / "broken" / "checkpoints").glob("*state*")) == [f"state_step_0000{n}" for n in (2, 4, 6)]


def test_damaged_snapshot_is_passed_over(home, tmp_path):
    whole = train(settings(home, tmp_path / "run", "adamw", steps=4)).snapshot
    newest = tmp_path / "run" / "checkpoints" / "state_step_00004" / "weights.safetensors"
    content = bytearray(newest.read_bytes())
    content[-5] ^= 1
    newest.write_bytes(content)
    again = train(settings(home, tmp_path / "run", "adamw", steps=4))
    assert "snapshot.damaged" in again.warnings and same(whole, again.snapshot)


def test_disk_full_while_saving(home, tmp_path, straight, monkeypatch):
    """The run ends and says so; the last good snapshot and LoRA stay, and it goes on from there when there is room."""
    config = settings(home, tmp_path / "run", "adamw", checkpoints={"keep_last_n": 1})
    original = snapshots.write_tensors

    def full(file, values, *rest):
        if "state_step_00004" in file.name:
            file.write(b"half")
            raise OSError(28, "No space left on device", file.name)
        return original(file, values, *rest)

    monkeypatch.setattr(snapshots, "write_tensors", full)
    with pytest.raises(RunError) as caught:
        train(config)
    monkeypatch.undo()
    assert caught.value.code == "run.disk_full"
    left = sorted(p.name for p in (tmp_path / "run" / "checkpoints").iterdir())
    assert left == ["lora_weights_step_00002.safetensors", "state_step_00002"]
    assert same(straight("adamw").snapshot, train(config).snapshot)


def test_more_steps(home, tmp_path):
    """A constant rate: 3 steps raised to 6 are the same 6 steps. Each end is marked final."""
    constant = {"optimization": {"scheduler_type": "constant", "gradient_accumulation_steps": 1}}
    whole = train(settings(home, tmp_path / "straight", "adamw", **constant))
    train(settings(home, tmp_path / "run", "adamw", steps=3, **constant))
    longer = train(settings(home, tmp_path / "run", "adamw", **constant))
    assert same(whole.snapshot, longer.snapshot)
    assert [(e.step, e.final) for e in longer.events(LoraEvent) if e.final] == [(3, True), (6, True)]


def test_a_snapshot_is_all_that_a_resume_needs(home, tmp_path, straight):
    """Random state of the process plays no part: a resumed run draws the same from a spoilt one."""
    config = settings(home, tmp_path / "run", "adamw")
    with pytest.raises(StopRequested):
        train(config, lambda live: stopped_at(live, 3))
    torch.manual_seed(987)
    random.seed(987)
    assert same(straight("adamw").snapshot, train(config).snapshot)


def test_load_checkpoint_goes_on_where_the_other_run_stood(home, tmp_path, straight):
    """The official way of resuming: a new run from the files of another one, by its whole state, its weights, or not at all."""
    half = train(settings(home, tmp_path / "half", "adamw", steps=STEPS))
    for name in ("lora_weights_step_00006.safetensors", "state_step_00006"):
        path = tmp_path / "half" / "checkpoints" / name
        path.unlink() if path.is_file() else shutil.rmtree(path)
    source = {"load_checkpoint": str(half.run.checkpoints)}
    went_on = train(settings(home, tmp_path / "on", "adamw", model=source))
    assert went_on.warnings[-1] == "resume.taken_up" and list(went_on.steps) == [5, 6]
    assert same(straight("adamw").snapshot, went_on.snapshot)

    afresh = train(settings(home, tmp_path / "afresh", "adamw", model=source, checkpoints={"no_resume": True}))
    assert list(afresh.steps) == list(range(1, STEPS + 1)) and afresh.losses != straight("adamw").losses
    other = train(settings(home, tmp_path / "other", "adamw", model=source, lora={"rank": 4}))
    assert "resume.weights_only" in other.warnings and list(other.steps)[0] == 1
    for look in (check_config, train):
        with pytest.raises(ConfigError) as caught:
            look(settings(home, tmp_path / "short", "adamw", steps=4, model=source))
        assert caught.value.code == "optimization.steps"


def test_an_official_run_is_gone_on_with(home, tmp_path):
    """Its LoRA file (no alpha) and training state: the step and with it the schedule go on; another optimizer starts at 0."""
    from safetensors.torch import load_file, save_file

    folder = tmp_path / "official" / "checkpoints"
    folder.mkdir(parents=True)
    made = train(settings(home, tmp_path / "ours", "adamw", steps=3))
    tensors = {n: t.clone() for n, t in load_file(made.lora).items() if "lora_" in n}
    save_file(tensors, folder / "lora_weights_step_00004.safetensors")
    fingerprint = {"optimizer_type": "adamw", "scheduler_type": "cosine", "training_mode": "lora", "lora_rank": 2}
    state = {"global_step": 4, "config_fingerprint": fingerprint, "rng_states": {"torch_state": torch.get_rng_state()}}
    torch.save(state, folder / "training_state_step_00004.pt")
    model = {"load_checkpoint": str(tmp_path / "official")}
    done = train(settings(home, tmp_path / "on", "adamw", model=model))
    assert list(done.steps) == [5, 6] and done.steps[5].learning_rate == pytest.approx(straight_rate(home, tmp_path, 4))
    torch.save({**state, "config_fingerprint": {**fingerprint, "optimizer_type": "adamw8bit"}}, folder / "training_state_step_00004.pt")
    again = train(settings(home, tmp_path / "again", "adamw", model=model))
    assert "resume.weights_only" in again.warnings and list(again.steps)[0] == 1


def straight_rate(home, tmp_path, step):
    return settings(home, tmp_path / "unused", "adamw").optimization.lr_at(step)
