"""Numbers and files that leave the run: CSV over a resume, TensorBoard, W&B and the Hub through fakes."""

import csv
import importlib
import json
import sys
import types
from pathlib import Path

import pytest
import yaml

from ltx_train.errors import MissingPackage, RunError
from ltx_train.runs import publish
from ltx_train.runs.events import SampleEvent, StepEvent
from ltx_train.runs.model_card import ModelCard
from ltx_train.runs.publish import HubSection, LoggingSection, Publishers, WandbSection, push_to_hub, scalars
from ltx_train.runs.run_dir import RunDir


@pytest.fixture
def run(tmp_path):
    return RunDir.create(tmp_path / "mein lauf")


@pytest.fixture
def blocked(monkeypatch):
    """A function that lets no import find a package."""

    def block(package):
        def refuse(name, path=None, target=None):
            if name.split(".")[0] == package:
                raise ImportError(f"{name} is blocked")

        monkeypatch.delitem(sys.modules, package, raising=False)
        monkeypatch.setattr(sys, "meta_path", [types.SimpleNamespace(find_spec=refuse), *sys.meta_path])

    return block


def step(n, **fields):
    return StepEvent(step=n, total=9, loss=1 / n, learning_rate=1e-4, **fields)


def opened(run, start_step=0, *, csv=True, tensorboard=False, wandb=None):
    return Publishers.open(run, logging=LoggingSection(csv=csv, tensorboard=tensorboard), wandb=wandb or WandbSection(), config={"seed": 1}, start_step=start_step)


def test_official_fields_and_defaults():
    """Names and defaults of the official hub and wandb sections (reference: official schema 1.8)."""
    assert HubSection().model_dump() == {"push_to_hub": False, "hub_model_id": None, "private": False}
    assert WandbSection().model_dump() == {"enabled": False, "project": "ltxv-trainer", "entity": None, "tags": [], "log_validation_videos": True}
    with pytest.raises(ValueError, match="hub_model_id"):
        HubSection(push_to_hub=True)


def test_csv_goes_on_after_a_resume_without_the_steps_that_repeat(run):
    first = opened(run)
    for n in (1, 2, 3, 4):
        first.step(step(n))
    first.close()
    with open(run.path / "metrics.csv", "a") as file:
        file.write("5,0.")  # killed while writing
    second = opened(run, start_step=2)
    second.step(step(3, audio_loss=0.5))
    second.close()
    with open(run.path / "metrics.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["step"] for row in rows] == ["1", "2", "3"]
    assert float(rows[1]["loss"]) == 0.5 and rows[1]["audio_loss"] == "" and rows[2]["audio_loss"] == "0.5"


def test_tensorboard_holds_the_scalars(run):
    publishers = opened(run, csv=False, tensorboard=True)
    assert publishers.names == ("TensorBoard",)
    for n in (1, 2):
        publishers.step(step(n, sigma_loss={"0.0-0.5": 0.25}))
    publishers.sample(SampleEvent(step=2, path="samples/a.mp4", prompt="a cat"), run.samples / "a.mp4")
    publishers.statistics({"steps_per_second": 2.0})
    publishers.close()
    assert publishers.take_failures() == []
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    read = EventAccumulator(str(run.tensorboard))
    read.Reload()
    assert [(e.step, e.value) for e in read.Scalars("train/loss")] == [(1, 1.0), (2, 0.5)]
    assert read.Scalars("train/loss_sigma_0.0-0.5")[0].value == 0.25 and "stats/steps_per_second" in read.Tags()["scalars"]


def test_numbers_have_the_official_names():
    numbers = scalars(step(2, seconds=3.0, peak_memory=2**31, grad_norm=None))
    assert numbers == {"train/loss": 0.5, "train/learning_rate": 1e-4, "train/step_time": 3.0, "train/peak_memory_gb": 2.0}


@pytest.mark.parametrize(
    ("section", "package"),
    [(WandbSection(enabled=True), "wandb"), (LoggingSection(tensorboard=True), "tensorboard"), (HubSection(push_to_hub=True, hub_model_id="a/b"), "huggingface_hub")],
)
def test_what_is_not_installed_is_said_at_the_start(blocked, section, package):
    blocked(package)
    with pytest.raises(MissingPackage) as caught:
        section.check()
    assert caught.value.package == package and f"pip install {package}" in caught.value.hint
    type(section)().check()


def test_a_package_that_does_not_load_is_said_at_the_start(monkeypatch, tmp_path):
    (tmp_path / "wandb").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "wandb", raising=False)
    with pytest.raises(MissingPackage):
        WandbSection(enabled=True).check()  # a folder that earlier runs left
    (tmp_path / "wandb" / "__init__.py").write_text("raise AttributeError('np.float_ was removed')")
    importlib.invalidate_caches()
    with pytest.raises(RunError, match="wandb, which is installed and does not load") as caught:
        WandbSection(enabled=True).check()
    assert "np.float_" in caught.value.hint


def test_a_tracker_that_cannot_be_opened_is_left_out(monkeypatch, run):
    """No login or no network must not end a run whose model is loaded."""
    fake = FakeWandb()
    fake.init = lambda **options: (_ for _ in ()).throw(ConnectionError("no network"))
    monkeypatch.setitem(sys.modules, "wandb", fake)
    monkeypatch.setattr(publish, "_installed", lambda name: True)
    publishers = opened(run, wandb=WandbSection(enabled=True))
    publishers.step(step(1))
    assert publishers.names == ("metrics.csv",) and "Weights & Biases could not be opened" in publishers.take_failures()[0]
    publishers.close()


def test_tensorboard_is_left_out_quietly_when_nobody_asked(monkeypatch, run):
    monkeypatch.setattr(publish, "_installed", lambda name: False)
    assert Publishers.open(run, logging=LoggingSection(), wandb=WandbSection(), config={}).names == ("metrics.csv",)


def test_a_tracker_that_fails_is_named_once_and_the_others_go_on(run):
    publishers = opened(run)

    class Broken:
        def step(self, event):
            raise ConnectionError("no network")

    publishers._trackers["W&B"] = Broken()
    publishers.step(step(1))
    publishers.step(step(2))
    failures = publishers.take_failures()
    assert len(failures) == 1 and "W&B" in failures[0] and "no network" in failures[0] and publishers.take_failures() == []
    publishers.close()
    assert len((run.path / "metrics.csv").read_text().splitlines()) == 3


class FakeWandb(types.ModuleType):
    def __init__(self):
        super().__init__("wandb")
        self.inits, self.logged, self.summary, self.finished = [], [], {}, 0
        for kind in ("Video", "Image", "Audio"):
            setattr(self, kind, lambda path, caption, kind=kind: (kind, path, caption))

    def init(self, **options):
        self.inits.append(options)
        outer = self

        class Run:
            id = options["id"] or "new-id"
            summary = outer.summary

            def define_metric(self, *arguments, **options):
                pass

            def log(self, values):
                outer.logged.append(values)

            def finish(self):
                outer.finished += 1

        return Run()


def test_wandb_logs_scalars_and_media_and_goes_on_with_its_run(run, monkeypatch):
    fake = FakeWandb()
    monkeypatch.setitem(sys.modules, "wandb", fake)
    monkeypatch.setattr(publish, "_installed", lambda name: True)
    section = WandbSection(enabled=True, entity="me", tags=["x"])
    for _ in range(2):
        publishers = opened(run, csv=False, wandb=section)
        publishers.step(step(2))
        publishers.sample(SampleEvent(step=2, path="samples/s.mp4", index=1, prompt="a cat"), Path("s.mp4"))
        publishers.statistics({"minutes": 3.0})
        publishers.close()
        assert publishers.take_failures() == []
    assert [options["id"] for options in fake.inits] == [None, "new-id"] and fake.inits[0]["name"] == "mein lauf" and fake.inits[0]["config"] == {"seed": 1}
    assert fake.logged[0]["train/loss"] == 0.5 and fake.logged[0]["train/global_step"] == 2
    assert fake.logged[1]["validation_samples/1"] == ("Video", "s.mp4", "a cat") and fake.summary == {"stats/minutes": 3.0} and fake.finished == 2
    other = opened(run, csv=False, wandb=WandbSection(enabled=True, project="another"))
    assert fake.inits[-1]["id"] is None, "another project has another run"
    other.close()


class FakeHub:
    def __init__(self, error=None):
        self.error, self.files = error, {}

    def create_repo(self, name, *, exist_ok, private):
        assert exist_ok
        self.private = private
        return f"https://huggingface.co/{name}"

    def upload_folder(self, *, folder_path, repo_id, commit_message):
        if self.error:
            raise self.error
        self.files = {path.relative_to(folder_path).as_posix(): path.read_bytes() for path in Path(folder_path).rglob("*") if path.is_file()}


@pytest.fixture
def card(run):
    run.samples.mkdir()
    (run.samples / "step_000010_1.mp4").write_bytes(b"video")
    samples = ((run.samples / "step_000010_1.mp4", 'a "cat": on a\nmat'), (run.samples / "gone.mp4", "x"))
    return ModelCard("My LoRA", "Lightricks/LTX-2", trigger="sks: cat", rank=32, alpha=16, steps=10, mode="t2v", samples=samples)


def test_the_hub_gets_the_file_a_card_samples_and_the_config_without_this_machines_folders(run, card):
    lora = run.path / "lora.safetensors"
    lora.write_bytes(b"weights")
    config = {"model": {"model_path": "/home/someone/models/ltx.safetensors", "text_encoder_path": "D:\\models\\gemma"}, "output_dir": "~/runs/x", "seed": 3}
    run.job_path("train").write_text(yaml.safe_dump(config), encoding="utf-8")
    hub = FakeHub()
    address = push_to_hub(run, HubSection(push_to_hub=True, hub_model_id="me/cat", private=True), card, lora, api=hub)
    assert address == "https://huggingface.co/me/cat" and hub.private
    assert hub.files.keys() == {"lora.safetensors", "README.md", "samples/step_000010_1.mp4", "training_config.yaml"}
    assert yaml.safe_load(hub.files["training_config.yaml"]) == {
        "model": {"model_path": "ltx.safetensors", "text_encoder_path": "gemma"},
        "output_dir": "x",
        "seed": 3,
    }


def test_the_card_is_valid_front_matter_whatever_the_prompt(card):
    _, head, body = card.text("me/cat", "lora.safetensors").split("---\n", 2)
    fields = yaml.safe_load(head)
    assert fields["base_model"] == "Lightricks/LTX-2" and fields["instance_prompt"] == "sks: cat" and "lora" in fields["tags"]
    assert fields["widget"][0] == {"text": 'a "cat": on a\nmat', "output": {"url": "samples/step_000010_1.mp4"}}
    assert "| Rank | 32 |" in body and "lora.safetensors" in body


def test_a_failed_push_says_where_the_file_is(run, card):
    lora = run.path / "lora.safetensors"
    lora.write_bytes(b"weights")
    with pytest.raises(RunError, match="The push to me/cat failed") as caught:
        push_to_hub(run, HubSection(push_to_hub=True, hub_model_id="me/cat"), card, lora, api=FakeHub(PermissionError("403 Forbidden")))
    assert "403 Forbidden" in caught.value.hint and str(lora) in caught.value.hint


def test_a_push_without_a_token_is_refused_at_the_start(monkeypatch, tmp_path):
    import huggingface_hub

    monkeypatch.setattr(huggingface_hub, "get_token", lambda: None)
    with pytest.raises(RunError, match="no Hugging Face token"):
        HubSection(push_to_hub=True, hub_model_id="a/b").check()
    assert json.dumps(HubSection().model_dump())
