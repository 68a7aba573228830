"""The demo as a user runs it: from a copy without tests, on another family, on the user's own clips."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from PIL import Image

from ltx_train import demo as module
from ltx_train import launch
from ltx_train.__main__ import main
from ltx_train.config import TrainConfig
from ltx_train.demo_chart import draw_curve, running_mean
from ltx_train.runs.events import SampleEvent
from ltx_train.runs.history import History
from ltx_train.runs.run_dir import RunDir
from ltx_train.tiny.drawing import NEW
from tests.end_to_end.corridor import Forked

ROOT = Path(__file__).parents[2]


def run(out, *options, cwd=ROOT):
    command = [sys.executable, "-m", "ltx_train", "demo", "--out", str(out), *options]
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, encoding="utf-8", timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def fitted(tmp_path_factory):
    """The demo's output and folder, run with 12 steps from a copy of the package alone."""
    place = tmp_path_factory.mktemp("an archive")
    shutil.copytree(ROOT / "ltx_train", place / "ltx_train", ignore=shutil.ignore_patterns("__pycache__"))
    out = place / "out"
    return run(out, "--steps", "12", cwd=place), out


def test_the_demo_names_its_results(fitted):
    text, out = fitted
    for line, count in (("LoRA: ", 1), ("Loss curve: ", 1), ("Sample at the first step (0): ", 4), ("Sample at the last step (12): ", 4)):
        found = re.findall(rf"^{re.escape(line)}(.+?)(?: \(.*\))?$", text, re.MULTILINE)
        assert len(found) == count and all(Path(f).is_file() and Path(f).stat().st_size > 0 for f in found), (line, text)
    assert "a toy of 8 MB" in text and "It is not LTX-2.3" in text
    assert Image.open(out / "run" / "loss.png").size == (960, 480)
    frames, wave, rate = module.read_back(out / "run" / "samples" / "step_000012_1.mp4")
    assert frames.shape == (17, 64, 64, 3) and wave.shape[0] == 2 and wave.shape[1] / rate == pytest.approx(17 / 24, abs=0.1)


def test_the_demo_teaches(fitted):
    text, out = fitted
    run_dir = RunDir.open(out / "run")
    history = run_dir.history()
    first, last = module.first_and_last({s: e.loss for s, e in history.steps.items()})
    assert last < 0.8 * first
    assert f"Loss: {first:.4f} at first, {last:.4f} at last" in text
    before, after = (module.measure(run_dir.path, events) for events in module.ends(history))
    assert before.yellow < 0.4 and before.high < 0.5
    assert after.yellow > before.yellow + 0.1 or after.high > before.high + 0.4
    assert f"{before.yellow:.0%} before, {after.yellow:.0%} after" in text


def here(capsys, out, *options):
    """The same in this process, which has its libraries loaded."""
    assert main(["demo", "--out", str(out), *options]) == 0
    return capsys.readouterr().out


def test_a_second_demo_shows_the_same_results(fitted, capsys, monkeypatch):
    """From the copy's own files, as the copy would."""
    text, out = fitted
    copied = module.FittedSet.at(out.parent / "ltx_train" / "tiny" / "fitted")
    assert copied.model.is_file()
    monkeypatch.setattr(module.FittedSet, "at", lambda: copied)
    lora = next((out / "run" / "checkpoints").glob("*.safetensors"))
    stamp = lora.stat().st_mtime_ns
    again = here(capsys, out, "--steps", "12")
    assert "run before" in again and lora.stat().st_mtime_ns == stamp and not (out / "run_002").exists()
    assert re.search(r"^Loss: .*$", again, re.MULTILINE)[0] == re.search(r"^Loss: .*$", text, re.MULTILINE)[0]


def test_another_family_on_own_clips(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(launch, "spawn", Forked)
    clips = module.draw_dataset(tmp_path / "my clips", 3)
    text = here(capsys, tmp_path / "out", "--family", "ltxv-2b", "--media", str(clips), "--steps", "2")
    assert "noise" in text and "random weights" in text and "Yellow" not in text
    assert "Sample at the last step (2): " in text and "LoRA: " in text
    job = TrainConfig.load(tmp_path / "out" / "run" / "training_config.yaml")
    assert job.training_strategy.audio is None and Path(job.data.dataset) == clips


def test_plans(tmp_path):
    plan = module.make_plan(tmp_path, None, None, None)
    assert plan.steps == module.STEPS and len(plan.prompts) == 4 and plan.fitted and plan.drawn
    assert {p.with_suffix(".txt").read_text(encoding="utf-8") for p in plan.dataset.glob("*.mp4")} == set(plan.prompts)
    assert all("yellow star" in p and "high" in p for p in plan.prompts) and NEW[0] == ("yellow",)
    own = module.make_plan(tmp_path, 5, None, plan.dataset)
    assert own.steps == 5 and not own.drawn and len(own.prompts) == 2
    job = module.training_job(plan, tmp_path)
    assert TrainConfig.parse(json.loads(json.dumps(job.model_dump(mode="json")))) == job
    stamps = {p: p.stat().st_mtime_ns for p in plan.dataset.iterdir()}
    module.draw_dataset(plan.dataset)
    assert stamps == {p: p.stat().st_mtime_ns for p in plan.dataset.iterdir()}


def test_ends_and_means():
    history = History()
    for step in (4, 0, 2):
        for index in (1, 0):
            history.add(SampleEvent(step=step, path=f"samples/{step}_{index}.mp4", index=index))
    first, last = module.ends(history)
    assert [(e.step, e.index) for e in (*first, *last)] == [(0, 0), (0, 1), (4, 0), (4, 1)]
    assert module.ends(History()) == ([], [])
    assert module.first_and_last({i: float(i) for i in range(16)}) == (0.5, 14.5)
    assert module.first_and_last({1: 3.0}) == (3.0, 3.0)


def test_the_curve_is_drawn(tmp_path):
    falling = {s: 1 / s for s in range(1, 101)}
    picture = Image.open(draw_curve(tmp_path / "a.png", falling, title="loss")).convert("RGB")
    blue = torch.tensor([[picture.getpixel((x, y)) == (28, 92, 200) for x in range(70, 940)] for y in range(40, 431)])
    height = lambda columns: float(torch.nonzero(blue[:, columns])[:, 0].float().mean())  # noqa: E731
    assert height(slice(0, 60)) < height(slice(400, 460)) < height(slice(780, 860))  # lower on the page is further down
    for odd in ({5: 0.25}, {1: 1.0, 2: 1.0}, {1: 0.0}):
        assert Image.open(draw_curve(tmp_path / "b.png", odd, title="loss")).size == (960, 480)
    assert running_mean([1.0, 2.0, 3.0]) == [1.5, 2.0, 2.5]
