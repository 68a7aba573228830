"""bench train: a tiny real run with previews, a resume and a pause; the full-size files' layout."""

import json
import math
import os
import signal
import time
from types import SimpleNamespace

import pytest
import torch

from ltx_train import launch
from ltx_train.__main__ import main
from ltx_train.bench import full_model
from ltx_train.bench.full_model import write_clips, write_full
from ltx_train.bench.step import StepCase
from ltx_train.bench.train import TrainCase, around, followed, run_train, standing, terminated_as_interrupt
from ltx_train.errors import ConfigError
from ltx_train.models.checkpoint import Checkpoint
from ltx_train.models.families import FAMILIES
from ltx_train.runs.events import PhaseEvent, ProgressEvent, StepEvent, WarningEvent
from ltx_train.tensorfile import DTYPE_NAMES, writing_order
from tests.end_to_end.corridor import Forked


def test_a_tiny_run_is_told_with_its_resume(capsys, tmp_path, monkeypatch):
    monkeypatch.setattr(launch, "spawn", Forked)
    assert main(["bench", "train", "--tiny", "--steps", "6", "--resume", "1", "--folder", str(tmp_path)]) == 0
    first, resumed, step = map(json.loads, capsys.readouterr().out.splitlines())
    assert first["steps"] == [1, 6] and first["snapshots"] and first["step_s"] > 0 and "warnings" not in first
    assert resumed["steps"] == [7, 7] and resumed["resumed_at"] == 6
    assert step["train_over_bench_step"] > 0


def test_steps_around_previews():
    seconds = {1: 9.0, 2: 5.0, 3: 1.0, 4: 1.0, 5: 1.0, 6: 1.0, 7: 3.0, 8: 1.1, 9: 1.1}
    steps = [StepEvent(step=n, total=9, loss=1.0, seconds=s) for n, s in seconds.items()]
    found = around(steps, {6})
    assert found == {"before_preview_s": 1.0, "after_preview_s": 1.1, "next_step_s": [3.0], "after_over_before": 1.1}
    assert around(steps[:5], {5}) == {}, "nothing after it was timed"


def test_the_full_files_have_the_published_layout(tmp_path, monkeypatch):
    """Headers of the published sizes; the values themselves are left out, as they take 46 GB."""
    written = {}

    def header_alone(file, tensors, metadata, *, checksum):
        header, offset = {"__metadata__": dict(metadata)}, 0
        for name in writing_order(tensors):
            size = tensors[name].dtype.itemsize * math.prod(tensors[name].shape)
            header[name] = {"dtype": DTYPE_NAMES[tensors[name].dtype], "shape": list(tensors[name].shape), "data_offsets": [offset, offset + size]}
            offset += size
        text = json.dumps(header).encode()
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + offset)  # a hole
        written[file.name] = offset

    thin = lambda place, seed, gemma: {"text_encoder_folder": place / f"{gemma['hidden_size']}x{gemma['num_hidden_layers']}"}  # noqa: E731
    monkeypatch.setattr(full_model, "write_tensors", header_alone)
    monkeypatch.setattr(full_model, "write_gemma3", thin)
    for family in ("ltx2.3", "ltx2.5"):
        paths = write_full(tmp_path / family, family, torch.device("cpu"))
        opened = Checkpoint.open(paths["model_path"], video_vae=paths.get("video_vae_path"), audio_vae=paths.get("audio_vae_path"))
        assert opened.family.name == family and opened.transformer.num_layers == 48
        assert all(opened.has(name) for name in ("transformer", "connectors", "video_vae", "audio_vae", "vocoder"))
        assert family == "ltx2.5" or paths["text_encoder_path"].name == "3840x48"
    assert 38e9 < max(written.values()) < 60e9


def test_the_setting_becomes_the_config(tmp_path):
    setting = StepCase.parse("quantization=int8,resident=0,cap=16,optimizer=host,offload=1,budget=0.2", StepCase())
    found = TrainCase(setting).acceleration(48)
    assert (found["stream_blocks"], found["optimizer_in_ram"], found["offload_activations"], found["activation_budget"]) == (48, "on", "on", 0.2)
    assert round(found["memory_limit_gb"], 2) == 17.18
    published = FAMILIES["ltx2.3"].config["transformer"]
    clips = write_clips(tmp_path, "64x64x9", video_width=published["cross_attention_dim"], audio_width=published["audio_cross_attention_dim"], count=1)
    assert sorted(p.parent.name for p in clips.rglob("*.pt")) == ["audio_latents", "conditions", "latents"]


def way(began: float) -> list:
    """Events of a run that is at its second step."""
    said = [
        PhaseEvent(phase="load the model", state="start"), *(ProgressEvent(phase="load the model", done=n, total=3, unit="weights") for n in (1, 2, 3)),
        PhaseEvent(phase="load the model", state="end", seconds=6.04), PhaseEvent(phase="train", state="start"), WarningEvent(code="x", message="odd"),
        StepEvent(step=1, total=9, loss=1.0, seconds=2.0), StepEvent(step=2, total=9, loss=1.0, seconds=1.0),
    ]  # fmt: skip
    return [event.model_copy(update={"t": began + n}) for n, event in enumerate(said)]


def test_a_run_tells_its_way():
    lines, killed = [], []
    child = SimpleNamespace(follow=lambda: iter(way(100.0)), wait=lambda: "over", kill=lambda: killed.append(True))
    assert followed(child, 100.0, lines.append, None) == "over" and not killed
    assert [{k: v for k, v in line.items() if k not in ("bench", "at_s")} for line in lines] == [
        {"phase": "load the model"}, {"phase": "load the model", "done": 1, "of": 3, "unit": "weights"}, {"phase": "load the model", "done": 3, "of": 3, "unit": "weights"},
        {"phase": "load the model", "seconds": 6.0}, {"phase": "train"}, {"event": "warning", "message": "odd"}, {"step": 1, "seconds": 2.0}, {"step": 2, "seconds": 1.0},
    ]  # fmt: skip
    assert lines[-1]["at_s"] == 8.0
    lines.clear()
    assert followed(child, 100.0, lines.append, 1) is None and killed and lines[-1]["step"] == 1


def test_where_a_run_stands():
    now = time.time()
    found = standing(way(now - 20.0), now - 20.0)
    assert found["stands_in"] == {"train": pytest.approx(15.0, abs=0.5)} and found["after_s"] == pytest.approx(20.0, abs=0.5)
    assert found["last"][-1] == {"step": 2, "seconds": 1.0, "at_s": 8.0} and len(found["last"]) == 4


@pytest.mark.skipif(os.name == "nt", reason="Windows ends a process without asking it")
def test_a_time_limit_interrupts_once():
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(KeyboardInterrupt), terminated_as_interrupt():
        try:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(5)
        finally:
            os.kill(os.getpid(), signal.SIGTERM)  # what ends the child is not cut short
    assert signal.getsignal(signal.SIGTERM) == before


def test_an_interrupted_run_is_told_as_far_as_it_got(tmp_path, monkeypatch):
    from ltx_train.bench import train

    killed = []

    def cut(child, *words):
        raise KeyboardInterrupt

    monkeypatch.setattr(train, "launch_job", lambda opened, **options: SimpleNamespace(kill=lambda: killed.append(True)))
    monkeypatch.setattr(train, "followed", cut)
    case = TrainCase(StepCase(size="64x64x9", rank=4, tiny=True, compile=False), steps=2, processes=2)
    (record,) = run_train(case, folder=tmp_path, step_too=True, command="x")
    assert killed and record["error"] == "interrupted" and record["stands_in"] == {} and record["last"] == []


def test_a_run_without_a_result_has_nothing_to_resume():
    with pytest.raises(ConfigError):
        next(run_train(TrainCase(StepCase(), resumed=1, result=False), folder=None, step_too=False, command="x"))
