"""Which run a training becomes: returned, gone on with, attached to, or a new one beside. Real children, few."""

import shutil
import time
from dataclasses import replace

import pytest

from ltx_train import launch
from ltx_train.config import TrainConfig
from ltx_train.data.cache import Cache
from ltx_train.data.manifest import Manifest
from ltx_train.errors import RunError, StopRequested
from ltx_train.run_setup import launch_job, open_training
from ltx_train.runs.events import LoraEvent
from ltx_train.runs.run_dir import RunDir
from ltx_train.tiny import media
from tests.end_to_end.corridor import Done, Forked, at_step, furthest, train


def opened_and_trained(config):
    """Open as the command line and the node do, and train here unless it is finished."""
    opened = open_training(config)
    if not opened.finished:
        done = train(opened.job)
        done.run.update_status(state="finished", exit_code=0)
    return opened


def test_same_extended_changed(home, tmp_path):
    first = opened_and_trained(home.config(tmp_path / "run"))
    assert first.verdict is None and first.run.path == tmp_path / "run"

    again = opened_and_trained(home.config(tmp_path / "run"))
    assert again.finished and again.run.path == first.run.path
    assert len(Done(again.run).events(LoraEvent)) == 1, "nothing trained again"

    more = opened_and_trained(home.config(tmp_path / "run", optimization={"steps": 4}))
    assert more.verdict.relation == "extend" and more.verdict.fields == ("steps",)
    assert list(Done(more.run).steps) == [1, 2, 3, 4]

    aside = {"logging": {"csv": True}, "checkpoints": {"interval": 1}, "optimization": {"steps": 4}, "distributed": {"num_processes": 1}, "acceleration": {"compile": "off"}}
    free = open_training(home.config(tmp_path / "run", validation={"samples": [{"prompt": "a red block"}]}, **aside))
    assert free.verdict.relation == "continue" and not free.finished and free.run.path == first.run.path
    assert free.job.checkpoints.interval == 1

    for number, change in enumerate([{"lora": {"rank": 4}}, {"seed": 7}, {"optimization": {"learning_rate": 0.5, "steps": 4}}], 2):
        other = opened_and_trained(home.config(tmp_path / "run", **{"optimization": {"steps": 4}, **change}))
        assert other.run.path == tmp_path / f"run_{number:03d}" and other.verdict is None
    data = {"preprocessed_data_root": str(home.cache("ltx2.3", home.clips))}
    assert open_training(home.config(tmp_path / "run", data=data)).run.path == tmp_path / "run_005"
    assert opened_and_trained(home.config(tmp_path / "run", lora={"rank": 4}, optimization={"steps": 4})).finished, "found again beside"
    assert TrainConfig.load(tmp_path / "run_002" / "training_config.yaml").output_dir == str(tmp_path / "run_002")


def test_a_changed_dataset_under_the_same_config_is_refused(home, tmp_path):
    """The cache behind an unchanged config holds other clips now: the snapshot is not mixed with them."""
    root = home.cache("ltx2.3", home.clips)
    train(home.config(tmp_path / "run", data={"preprocessed_data_root": str(root)}))
    index = root / "index.json"
    kept = index.read_text(encoding="utf-8")
    changed = home.cache("ltx2.3", home.clips, captions={"trigger": "zzt"})
    try:
        index.write_text((changed / "index.json").read_text(encoding="utf-8"), encoding="utf-8")
        (root / "text").rename(root / "text_kept")
        (root / "text").symlink_to(changed / "text")
        with pytest.raises(RunError) as caught:
            train(home.config(tmp_path / "run", data={"preprocessed_data_root": str(root)}, optimization={"steps": 3}))
    finally:
        (root / "text").unlink(missing_ok=True)
        (root / "text_kept").rename(root / "text")
        index.write_text(kept, encoding="utf-8")
    assert caught.value.code == "run.identity" and "dataset" in caught.value.message


def test_a_changed_dataset_makes_another_run(home, tmp_path):
    """A caption rewritten, a clip added or a cache encoded anew: told without opening a clip, before anything starts."""
    clips = media.dataset(tmp_path / "clips", 2, frames=17, width=64, height=64)
    config = home.config(tmp_path / "run", data={"dataset": str(clips), "resolution_buckets": "64x64x17"})
    assert open_training(config).verdict is None
    (tmp_path / "run" / "checkpoints").mkdir()
    (tmp_path / "run" / "checkpoints" / "something").write_text("made", encoding="utf-8")
    assert open_training(config).verdict.relation == "same"
    (clips / "clip1.txt").write_text("a caption told otherwise", encoding="utf-8")
    assert open_training(config).run.path == tmp_path / "run_002"
    media.counter_clip(clips / "clip2.mp4", 17, width=64, height=64)
    assert open_training(config).run.path == tmp_path / "run_002", "nothing was made in it yet"
    root = tmp_path / "cache"
    shutil.copytree(home.cache("ltx2.3", home.clips), root)
    encoded = home.config(tmp_path / "other", data={"preprocessed_data_root": str(root)})
    opened_and_trained(encoded)
    assert opened_and_trained(encoded).finished
    manifest = Manifest.read(root)
    Cache(root).write_index(replace(manifest, entries=manifest.entries[:4]))
    assert open_training(encoded).run.path == tmp_path / "other_002"


def test_other_peoples_folders_stay(home, tmp_path):
    """A folder with files in it that is no run of ours is left alone."""
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "notes.txt").write_text("mine", encoding="utf-8")
    assert open_training(home.config(tmp_path / "run")).run.path == tmp_path / "run_002"


def test_live_run_attaches_stops_and_resumes(home, tmp_path, monkeypatch):
    """A child: a second start attaches, a stop leaves a snapshot, going on ends where an unbroken run ends."""
    monkeypatch.setattr(launch, "spawn", Forked)
    config = home.config(tmp_path / "run", optimization={"steps": 400}, checkpoints={"interval": None})
    opened = open_training(config)
    child = launch_job(opened)
    try:
        end = time.monotonic() + 240
        while child.status().step < 2 and child.alive() and time.monotonic() < end:
            time.sleep(0.1)
        assert child.alive(), "\n".join(opened.run.tail(30))
        second = open_training(config)
        assert second.run.path == opened.run.path
        attached = launch_job(second)
        assert attached.attached and attached.pid == child.pid
        with pytest.raises(RunError) as caught:
            launch_job(second, if_live="refuse")
        assert caught.value.code == "run.locked"
        assert open_training(home.config(tmp_path / "run", lora={"rank": 4}, optimization={"steps": 400})).run.path == tmp_path / "run_002"
    finally:
        outcome = child.stop(deadline=120)
    assert (outcome.state, outcome.exit_code) == ("stopped", 3)
    stopped = Done(RunDir(tmp_path / "run"))
    step = max(stopped.steps)
    assert 2 <= step < 400
    again = open_training(home.config(tmp_path / "run", optimization={"steps": step + 2}, checkpoints={"interval": None}))
    resumed = launch_job(again)
    outcome = resumed.wait(timeout=240)
    assert outcome.ok, outcome
    assert max(stopped.steps) == step + 2 and stopped.events(LoraEvent)[-1].final
    assert open_training(again.job).finished


def test_stop_on_the_first_step_leaves_a_snapshot(home, tmp_path):
    config = home.config(tmp_path / "run", optimization={"warmup_steps": 1, "steps": 3})
    with pytest.raises(StopRequested):
        train(config, lambda live: at_step(live, 1, lambda: live.stop.request("the test")))
    done = train(config)
    assert furthest(done.snapshot, train(home.config(tmp_path / "straight", optimization={"warmup_steps": 1, "steps": 3})).snapshot) == 0
