"""The sample node: its inputs as a job, and what the job said of its LoRA on the node."""

import pytest


@pytest.fixture
def sample(pack, monkeypatch):
    """sample(**inputs) -> (job, texts on the node); the job is not done: it warns of its LoRA and leaves a picture."""
    from PIL import Image

    events, run_dir, log = (pack.engine(f"runs.{name}") for name in ("events", "run_dir", "event_log"))
    model = pack.sockets.LtxModel(pack.engine("config").ModelSection(model_path="m.safetensors"), "ltx2.3", "LTX-2.3 22B", True, "v2", (4096, 2048), "f")
    jobs = []

    def carry_out(job, screen):
        jobs.append(job)
        run = run_dir.RunDir.create(job.output_dir)
        run.samples.mkdir()
        Image.new("RGB", (64, 64)).save(run.samples / "a.png")
        made = log.EventLog(run.events_path)
        for event in (events.WarningEvent(code="lora.other_family", message="a was trained on LTX-2 19B."), events.SampleEvent(step=0, path="samples/a.png", prompt="a cat")):
            made.write(event)
        made.close()
        run.write_status(run_dir.Status(state="finished", kind="sample"))

    def sample(**inputs):
        plain = {"width": 64, "height": 64, "frames": 1, "seed": 1, "frame_rate": 24.0}
        pack.host.texts.clear()
        pack.nodes["LTXTrainSample"].execute(model, "a cat", **{**plain, **inputs})
        return jobs, [text for _, text in pack.host.texts]

    monkeypatch.setattr(pack.jobs, "carry_out", carry_out)
    return sample


def test_what_was_said_of_the_lora_stands_on_the_node(pack, sample):
    (pack.host.base / "models" / "loras" / "a.safetensors").write_bytes(b"lora")
    for _ in range(2):  # the second time nothing is made anew, and it is said all the same
        jobs, texts = sample(lora_name="a.safetensors", strength=0.5)
        assert texts[-1] == "a was trained on LTX-2 19B." and len(jobs) == 1
    assert [(use.path.rsplit("/", 1)[-1], use.strength) for use in jobs[0].loras] == [("a.safetensors", 0.5)]


@pytest.mark.parametrize("inputs, said", [({"frame_rate": 1e-6}, "frame_rate"), ({"lora_name": "../x.safetensors"}, "x.safetensors"), ({"lora_name": "none.safetensors"}, "none.safetensors")])
def test_inputs_that_no_sample_can_be_made_with(pack, sample, inputs, said):
    with pytest.raises(pack.engine("errors").LtxTrainError, match=said):
        sample(**inputs)
