"""Which directory a job takes: nothing is mixed, nothing is written over, a run that made nothing is taken again."""

import pytest

from ltx_train.config import SampleJob, TrainConfig
from ltx_train.errors import RunError
from ltx_train.run_setup import find_run, open_other, open_training
from ltx_train.runs.run_dir import RunDir, Status


def training(place, rank=4, steps=10, **more):
    return TrainConfig.parse(
        {"model": {"model_path": str(place / "m.safetensors")}, "lora": {"rank": rank}, "data": {"dataset": str(place / "d")}, "optimization": {"steps": steps},
         "output_dir": str(place / "run"), **more}
    )  # fmt: skip


def ended(run, state="failed", step=0, **fields):
    run.write_status(Status(state=state, step=step, **fields))


def test_looking_writes_nothing(tmp_path):
    assert find_run(training(tmp_path)).run.path == tmp_path / "run" and list(tmp_path.iterdir()) == []


def test_a_run_that_made_nothing_is_taken_by_the_corrected_config(tmp_path):
    first = open_training(training(tmp_path, model={"model_path": "a typo"}))
    ended(first.run)
    second = open_training(training(tmp_path))
    assert second.run.path == first.run.path == tmp_path / "run" and second.verdict is None
    assert TrainConfig.load(second.run.job_path("train")).model.model_path == str(tmp_path / "m.safetensors")


@pytest.mark.parametrize("made", ["step", "snapshot", "sample"])
def test_a_run_that_made_something_is_never_mixed(tmp_path, made):
    run = open_training(training(tmp_path)).run
    ended(run, step=3 if made == "step" else 0)
    if made != "step":
        place = run.checkpoints / "state_step_00000" if made == "snapshot" else run.samples
        place.mkdir(parents=True)
        (place / "x").touch()
    assert open_training(training(tmp_path, rank=8)).run.name == "run_002"


def test_a_damaged_status_does_not_hide_what_was_made(tmp_path):
    run = open_training(training(tmp_path)).run
    (run.checkpoints / "state_step_00002").mkdir(parents=True)
    run.status_path.write_text("")
    assert open_training(training(tmp_path, rank=8)).run.name == "run_002"
    assert open_training(training(tmp_path)).verdict.relation == "same"


def test_a_run_cannot_go_back_to_fewer_steps(tmp_path):
    run = open_training(training(tmp_path, steps=10)).run
    ended(run, "finished", 10)
    with pytest.raises(RunError) as caught:
        open_training(training(tmp_path, steps=6))
    assert caught.value.code == "run.steps" and "10 steps already" in caught.value.message
    assert TrainConfig.load(run.job_path("train")).optimization.steps == 10
    assert open_training(training(tmp_path, steps=12)).verdict.relation == "extend"


def sampling(place, prompt="a cat"):
    return SampleJob.parse({"model": {"model_path": str(place / "m")}, "validation": {"samples": [{"prompt": prompt}]}, "output_dir": str(place / "out")})


def test_samples_of_another_job_and_other_files_are_not_written_over(tmp_path):
    first = open_other(sampling(tmp_path)).run
    first.samples.mkdir()
    (first.samples / "step_000000_1.mp4").touch()
    ended(first, "finished")
    assert open_other(sampling(tmp_path)).run.name == "out", "the same job makes the same files"
    second = open_other(sampling(tmp_path, "a dog"))
    assert second.run.name == "out_002" and second.job.output_dir == str(second.run.path)
    (tmp_path / "holiday").mkdir()
    (tmp_path / "holiday" / "photo.jpg").touch()
    assert open_other(sampling(tmp_path).model_copy(update={"output_dir": str(tmp_path / "holiday")})).run.name == "holiday_002"


def test_relative_paths_are_absolute_in_the_saved_job(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run = open_training(TrainConfig.parse({"model": {"model_path": "m"}, "lora": {}, "data": {"dataset": "d"}, "output_dir": "o/run"})).run
    saved = TrainConfig.load(run.job_path("train"))
    assert run.path == tmp_path / "o" / "run" and (saved.model.model_path, saved.data.dataset) == (str(tmp_path / "m"), str(tmp_path / "d"))
    monkeypatch.chdir("/")
    assert open_training(saved).verdict.relation == "same" and RunDir(saved.output_dir).path == run.path
