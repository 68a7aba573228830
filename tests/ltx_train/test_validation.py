"""Previews that cannot hurt a run: equal losses under every fault, the right weights, files as they should be, latents kept."""

import errno
from fractions import Fraction
from pathlib import Path
from types import SimpleNamespace

import av
import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file

from ltx_train import validation
from ltx_train.checks import check_config
from ltx_train.conditioning.state import LatentState
from ltx_train.config import LoraUse, SampleJob
from ltx_train.decode import decode_kept, keep_latents, read_kept, side_by_side
from ltx_train.errors import ConfigError, DataError, LtxTrainError
from ltx_train.geometry import AudioGrid, Latents, VideoGrid
from ltx_train.lora.files import read_lora, write_modules
from ltx_train.lora.metadata import LoraMetadata
from ltx_train.lora.module import LoraModule
from ltx_train.memory.settings import AccelerationSection
from ltx_train.memory.stores import RowScaled
from ltx_train.models.codec import EngineCodec
from ltx_train.models.linear import Linear
from ltx_train.models.tiling import Tiling
from ltx_train.models.transformer import LTXTransformer
from ltx_train.models.video_codec import VideoCodec
from ltx_train.network import load_network
from ltx_train.room import Room, decode_needs
from ltx_train.runs.events import SampleEvent, WarningEvent
from ltx_train.runs.live import LiveRun
from ltx_train.runs.run_dir import RunDir
from ltx_train.sample_job import check_loras
from ltx_train.sample_job import run as run_sample_job
from ltx_train.sample_media import read_noise
from ltx_train.sampling.recipe import start_states
from ltx_train.text import Context
from ltx_train.tiny.checkpoints import open_tiny
from ltx_train.tiny.media import tone, write_pcm
from tests.end_to_end.corridor import Home, train

STEPS = 2
WIDTH, SOUND = 32, 16  # of the tiny transformer
SILENT = {"samples": [{"prompt": "a ball"}], "video_dims": [64, 64, 9], "inference_steps": 2, "interval": 1, "seed": 3, "frame_rate": 23.976, "generate_audio": False}
PREVIEW = {**SILENT, "samples": [*SILENT["samples"], {"prompt": "a dog, it barks"}], "generate_audio": True}


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    return Home(tmp_path_factory.mktemp("home"))


@pytest.fixture(autouse=True, scope="module")
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def job(home, out, preview=None, **sections):
    """Two steps with dropout, so that a disturbed random state would show."""
    optimization = {"steps": STEPS, "batch_size": 1, "learning_rate": 1e-2, **sections.pop("optimization", {})}
    return home.config(out, lora={"rank": 2, "alpha": 4, "dropout": 0.3}, optimization=optimization, validation=preview or {"samples": []}, **sections)


@pytest.fixture(scope="module")
def plain(home, tmp_path_factory):
    """The run without previews."""
    return train(job(home, tmp_path_factory.mktemp("plain") / "run"))


def codes(done):
    return [w.code for w in done.events(WarningEvent)]


# ---- in a run


def test_previews_leave_the_training_bit_equal(home, plain, tmp_path):
    done = train(job(home, tmp_path / "run", PREVIEW))
    assert done.losses == plain.losses and len(done.losses) == STEPS
    for name, value in load_file(plain.lora).items():
        assert torch.equal(value, load_file(done.lora)[name])
    made = done.events(SampleEvent)
    assert [(e.step, e.index) for e in made] == [(s, i) for s in (0, 1, 2) for i in (0, 1)]
    with av.open(str(done.run.path / made[0].path)) as clip:
        video, audio = clip.streams.video[0], clip.streams.audio[0]
        assert video.average_rate == Fraction(24000, 1001) and audio.codec_context.sample_rate in (44100, 48000)
        assert sum(1 for _ in clip.decode(video)) == 9
    assert codes(done) == codes(plain)


def no_room(*args, **more):
    raise OSError(errno.ENOSPC, "No space left on device", "x.mp4")


def starve(*args, **more):
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9.00 GiB")


def broken(*args, **more):
    raise ValueError("the codec is in a state it should not be in")


FAULTS = {
    "full disk": ("ltx_train.decode.write_video", no_room, "sample.failed"),
    "decoder out of memory": ("ltx_train.models.video_codec.VideoCodec.decode", starve, "sample.decode_memory"),
    "vocoder out of memory": ("ltx_train.models.audio_codec.AudioCodec.load", starve, "sample.decode_memory"),
    "denoising out of memory": ("ltx_train.validation.denoise", starve, "sample.failed"),
    "decoder broken": ("ltx_train.models.video_codec.VideoCodec.load", broken, "sample.failed"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_failing_preview_is_a_warning_and_nothing_else(home, plain, tmp_path, monkeypatch, name):
    target, fault, code = FAULTS[name]
    monkeypatch.setattr(target, fault)
    done = train(job(home, tmp_path / "run", {**SILENT, "generate_audio": "vocoder" in name}))
    assert done.losses == plain.losses
    assert codes(done).count(code) == 3 and done.run.status().state != "failed"
    files = sorted(p.name for p in (done.run.path / "samples").glob("*.*"))
    if code == "sample.decode_memory":
        assert len(done.events(SampleEvent)) == 3 and files.count("step_000002_1.video.latent") == 1
        assert files.count("step_000002_1.audio.latent") == ("vocoder" in name)
    else:
        assert not done.events(SampleEvent) and not files


def test_a_corrupt_condition_image_costs_its_sample_only(home, plain, tmp_path):
    bad = tmp_path / "first.png"
    bad.write_bytes(b"\x89PNG\r\n\x1a\n" + b"garbage" * 50)
    preview = {**SILENT, "interval": 9, "samples": [{"prompt": "a ball", "conditions": [{"type": "first_frame", "image_or_video": str(bad)}]}, PREVIEW["samples"][1]]}
    done = train(job(home, tmp_path / "run", preview))
    assert done.losses == plain.losses and codes(done).count("sample.condition") == 1
    assert {e.index for e in done.events(SampleEvent)} == {1}


def test_a_missing_condition_file_is_said_before_anything_runs(home, tmp_path):
    preview = {**SILENT, "samples": [{"prompt": "a ball", "conditions": [{"type": "first_frame", "image_or_video": str(tmp_path / "gone.png")}]}]}
    with pytest.raises(ConfigError, match="no file gone.png"):
        train(job(home, tmp_path / "run", preview))


def test_out_of_memory_once_is_tried_with_smaller_tiles(home, plain, tmp_path, monkeypatch):
    seen, real = [], VideoCodec.decode

    def once(self, latents, tiling=None, seed=0):
        seen.append(tiling)
        if len(seen) % 2:
            starve()
        return real(self, latents, tiling, seed)

    monkeypatch.setattr(VideoCodec, "decode", once)
    done = train(job(home, tmp_path / "run", {**SILENT, "interval": 9}))
    assert done.losses == plain.losses and len(done.events(SampleEvent)) == 2 and "sample.decode_memory" not in codes(done)
    assert seen[::2] == [None] * 2 and all(isinstance(t, Tiling) for t in seen[1::2])


def test_passes_that_do_not_fit_together_run_one_by_one(home, plain, tmp_path, monkeypatch):
    batches, real = [], LTXTransformer.forward

    def forward(self, video, audio, perturbations=None):
        if not torch.is_grad_enabled():
            batches.append(video.tokens.shape[0])
            if video.tokens.shape[0] > 1:
                starve()
        return real(self, video, audio, perturbations)

    monkeypatch.setattr(LTXTransformer, "forward", forward)
    done = train(job(home, tmp_path / "run", {**SILENT, "interval": 9, "decode": "later"}))
    assert done.losses == plain.losses and len(done.events(SampleEvent)) == 2
    assert batches[0] == 3 and set(batches[1:]) == {1}  # found out once, remembered


def test_the_weights_of_a_preview(home, tmp_path, monkeypatch):
    """Step 0 is the base model even after a warm start; later the EMA is sampled; dropout is off."""
    first = train(job(home, tmp_path / "first"))
    seen, real = [], validation.denoise

    def spy(transformer, **more):
        layer = transformer.transformer_blocks[0].attn1.to_q
        seen.append((layer.lora_enabled, layer.lora.B.detach().clone()))
        return real(transformer, **more)

    monkeypatch.setattr(validation, "denoise", spy)
    config = job(home, tmp_path / "run", {**SILENT, "decode": "later"}, model={"load_checkpoint": str(first.lora)}, checkpoints={"no_resume": True}, optimization={"ema": {"decay": 0.9, "warmup": False}})
    done = train(config)
    assert [enabled for enabled, _ in seen] == [False, True, True]
    name = "transformer_blocks.0.attn1.to_q.B"
    snapshot = done.snapshot
    average = next(v for k, v in snapshot["ema"].items() if k.endswith(name) or "blocks.0.attn1.to_q" in k and k.endswith("B") or k.endswith("to_q.lora_B.weight") and "blocks.0.attn1" in k)
    assert torch.equal(seen[-1][1], average) and any(not torch.equal(seen[-1][1], v) for v in snapshot["weights"].values() if v.shape == average.shape)


# ---- the job


def sample_job(home, out, **validation_fields):
    files = home.model("ltx2.3")
    fields = {"inference_steps": 2, "video_dims": [64, 64, 9], "samples": [{"prompt": "a ball"}], **validation_fields}
    model = {"model_path": str(files["model"]), "text_encoder_path": str(files["text_encoder"])}
    return SampleJob.parse({"model": model, "acceleration": {"device": "cpu", "mixed_precision_mode": "no"}, "validation": fields, "output_dir": str(out)})


def carry_out(found):
    run = RunDir.create(Path(found.output_dir))
    with LiveRun(run) as live:
        run_sample_job(found, live)
    return [run.path / e.path for e in run.events(0).events if isinstance(e, SampleEvent)]


@pytest.mark.parametrize("fields", [{"video_dims": [64, 63, 9]}, {"video_dims": [64, 64, 8]}, {"stg_blocks": [99]}])
def test_an_impossible_sample_is_told_before_a_text_encoder_is_read(home, tmp_path, monkeypatch, fields):
    monkeypatch.setattr(EngineCodec, "encode_text", lambda *_: pytest.fail("the encoder was read first"))
    with pytest.raises(ConfigError, match=next(iter(fields))):
        carry_out(sample_job(home, tmp_path / "out", **fields))


@pytest.fixture
def lora(tmp_path):
    """lora(name, out=width, family=...) -> a LoRA file of one update of that module."""

    def lora(name="transformer_blocks.0.attn1.to_q", out=None, width=None, family="ltx2.3", more=()):
        shape = (out or WIDTH, width or WIDTH)
        modules = {n: LoraModule(n, "lora", {"lora_A": torch.ones(2, shape[1]), "lora_B": torch.ones(shape[0], 2)}) for n in (name, *more)}
        return str(write_modules(tmp_path / "l.safetensors", modules, LoraMetadata(family=family)))

    return lora


@pytest.mark.parametrize("made, fields, said", [
    ({"out": WIDTH + 1}, {}, "does not fit"), ({"name": "other.to_q"}, {}, "changes no module"),
    ({"name": "transformer_blocks.0.audio_attn1.to_q", "out": SOUND, "width": SOUND}, {"generate_audio": False}, "changes no module"),
])  # fmt: skip
def test_a_lora_that_fits_not_is_told_before_a_text_encoder_is_read(home, tmp_path, monkeypatch, lora, made, fields, said):
    monkeypatch.setattr(EngineCodec, "encode_text", lambda *_: pytest.fail("the encoder was read first"))
    job = sample_job(home, tmp_path / "out", **fields)
    with pytest.raises(LtxTrainError, match=said) as caught:
        carry_out(job.model_copy(update={"loras": [LoraUse(path=lora(**made))]}))
    assert "l.safetensors" in caught.value.message and len(caught.value.message) < 120


def test_a_lora_of_another_family_that_fits_is_warned_of(home, lora):
    told = []
    file = read_lora(Path(lora(family="ltx2", more=("transformer_blocks.99.attn1.to_q",))))
    check_loras([file], open_tiny(home.model("ltx2.3")), {"video"}, SimpleNamespace(warn=lambda code, message, hint: told.append(message)))
    assert told == ["l.safetensors was trained on LTX-2 19B, not on LTX-2.3 22B.", "l.safetensors: 1 of its 2 modules are not in this model."]


@pytest.mark.parametrize("fields, said", [
    ({"stg_blocks": [99]}, "stg_blocks"), ({"video_dims": [64, 0, 9]}, "video_dims"), ({"schedule_tokens": 10**9}, "schedule_tokens"),
    ({"samples": [{"prompt": "a", "conditions": [{"type": "keyframe", "image": __file__, "frame": 9}]}]}, "frame 9"),
    ({"samples": [{"prompt": "a", "conditions": [{"type": "reference", "video": __file__, "downscale_factor": 3}]}]}, "divided by 3"),
])  # fmt: skip
def test_an_impossible_preview_is_told_by_a_check_and_before_the_dataset_is_encoded(home, tmp_path, monkeypatch, fields, said):
    monkeypatch.setattr("ltx_train.parts.open_data", lambda *_: pytest.fail("the dataset was opened first"))
    config = job(home, tmp_path / "run", {**PREVIEW, **fields})
    for look in (check_config, train):
        with pytest.raises((ConfigError, DataError), match=said):
            look(config)


@pytest.mark.parametrize("fields, condition, said", [
    ({}, {"type": "keyframe", "frame": 9}, "frame 9"), ({}, {"type": "suffix", "num_frames": 1}, "not 8n"), ({}, {"type": "prefix", "num_frames": 9}, "leave nothing"),
    ({"generate_video": False}, {"type": "first_frame"}, "no video"), ({"generate_audio": False}, {"type": "prefix", "duration": 0.1}, "no audio"),
])  # fmt: skip
def test_a_condition_that_no_sample_can_have_is_told_first(home, tmp_path, fields, condition, said):
    file = tmp_path / "x"
    file.touch()
    name = {"keyframe": "image", "first_frame": "image_or_video"}.get(condition["type"], "audio" if "duration" in condition else "video")
    section = sample_job(home, tmp_path, samples=[{"prompt": "a", "conditions": [{**condition, name: str(file)}]}], **fields).validation
    with pytest.raises((ConfigError, DataError), match=said):
        validation.plan_samples(section, open_tiny(home.model("ltx2.3")))


def test_video_to_a_given_sound_that_is_longer_than_it(home, tmp_path):
    write_pcm(tmp_path / "long.wav", tone(1.0, 44100, (330.0, 550.0)), 44100)
    files = carry_out(sample_job(home, tmp_path / "out", samples=[{"prompt": "a", "conditions": [{"type": "audio_to_video", "audio": str(tmp_path / "long.wav")}]}], decode="later"))
    sound = read_kept(files[0].with_name("step_000000_1.audio.latent"))
    assert sound.values.shape[2] == sound.grid.steps == 9 and sound.values.std() > 0  # of 9 frames


def test_a_sample_that_is_no_number_is_said_so(home, tmp_path):
    with pytest.raises(LtxTrainError, match="1 of 1 samples failed"):
        carry_out(sample_job(home, tmp_path / "out", video_cfg_scale=1e30, audio_cfg_scale=1e30))
    (warning,) = [e for e in RunDir(tmp_path / "out").events(0).events if isinstance(e, WarningEvent)]
    assert "no finite numbers" in warning.message and not list((tmp_path / "out" / "samples").glob("step*"))


@pytest.mark.parametrize("fields, suffix", [({}, ".mp4"), ({"video_dims": [64, 64, 1]}, ".png"), ({"generate_video": False}, ".wav")])
def test_what_a_sample_becomes(home, tmp_path, fields, suffix):
    (path,) = carry_out(sample_job(home, tmp_path / "out", **fields))
    assert path.suffix == suffix and path.stat().st_size > 100


def test_noise_from_a_file_is_the_seeds_own_when_equal(home, tmp_path):
    """The noise of seed 7, given as a tensor, gives the sample of seed 7; another noise another one."""
    generator = torch.Generator().manual_seed(7)
    grid = VideoGrid(2, 2, 2)
    tokens = torch.randn(1, grid.tokens, 128, generator=generator)
    drawn = Latents(torch.zeros(1, 128, 2, 2, 2), grid).with_tokens(tokens).values.contiguous()
    given = {"decode": "later", "generate_audio": False}
    save_file({"video": drawn}, tmp_path / "noise.safetensors")
    save_file({"video": drawn.flip(1).contiguous()}, tmp_path / "other.safetensors")
    sample = lambda name, **fields: read_kept(carry_out(sample_job(home, tmp_path / name, **given, samples=[{"prompt": "a ball", **fields}]))[0]).values  # noqa: E731
    seeded = sample("seeded", seed=7)
    assert torch.equal(sample("given", noise=str(tmp_path / "noise.safetensors")), seeded)
    assert not torch.allclose(sample("other", noise=str(tmp_path / "other.safetensors")), seeded)


def test_noise_that_does_not_fit_is_told_first(home, tmp_path):
    """By the header, with the shapes that sampling then wants."""
    checkpoint = open_tiny(home.model("ltx2.3"))
    section = sample_job(home, tmp_path, samples=[{"prompt": "a", "noise": str(tmp_path / "n.safetensors")}]).validation
    for given, said in (({"video": torch.ones(1, 128, 1, 2, 2)}, "video must be"), ({"video": torch.ones(1, 128, 2, 2, 2)}, "audio must be .1, 8, 9, 16.; the file has none")):
        save_file(given, tmp_path / "n.safetensors")
        with pytest.raises(DataError, match=said):
            validation.plan_samples(section, checkpoint)
    save_file({**given, "audio": torch.ones(1, 8, 9, 16)}, tmp_path / "n.safetensors")
    ((streams, grid, _),) = validation.plan_samples(section, checkpoint)
    states = start_states(section.samples[0], [], streams=streams, video_grid=grid, audio_grid=checkpoint.audio_grid, video_channels=128, audio_channels=128)
    assert read_noise(section.samples[0], states).audio.shape == (1, 9, 128)


def test_a_job_with_a_corrupt_image_is_an_error(home, tmp_path):
    bad = tmp_path / "first.png"
    bad.write_bytes(b"garbage")
    found = sample_job(home, tmp_path / "out", samples=[{"prompt": "x", "conditions": [{"type": "first_frame", "image_or_video": str(bad)}]}])
    with pytest.raises(LtxTrainError):
        carry_out(found)


def test_the_reference_is_shown_at_the_left(home, tmp_path):
    picture = np.zeros((64, 64, 3), np.uint8)
    picture[..., 0] = 250
    Image.fromarray(picture).save(tmp_path / "red.png")
    condition = {"type": "reference", "video": str(tmp_path / "red.png"), "include_in_output": True}
    (path,) = carry_out(sample_job(home, tmp_path / "out", samples=[{"prompt": "x", "conditions": [condition]}], generate_audio=False))
    with av.open(str(path)) as clip:
        frame = next(clip.decode(video=0)).to_ndarray(format="rgb24")
    assert frame.shape == (64, 64 + 8 + 64, 3)
    assert frame[20:40, 10:50, 0].mean() > 230 and frame[20:40, 10:50, 1].mean() < 30 and frame[:, 67:69].mean() > 230


def test_a_slow_reference_keeps_its_timing():
    reference = torch.arange(5, dtype=torch.uint8).view(5, 1, 1, 1).expand(5, 4, 4, 3)
    shown = side_by_side(reference, torch.full((17, 4, 6, 3), 9, dtype=torch.uint8), gap=2)
    assert shown.shape == (17, 4, 12, 3)
    assert shown[:, 0, 0, 0].tolist() == [0] * 4 + [1] * 4 + [2] * 4 + [3] * 4 + [4]


# ---- kept latents


def test_kept_latents_come_back_and_decode(home, tmp_path):
    video = Latents(torch.randn(1, 128, 2, 2, 2), VideoGrid(2, 2, 2, fps=23.976))
    audio = Latents(torch.randn(1, 8, 9, 16), AudioGrid(9))
    first = keep_latents(tmp_path / "step_000002_1", video, audio)
    assert first.name == "step_000002_1.video.latent" and read_kept(first).grid == video.grid and torch.equal(read_kept(first).values, video.values)
    stored = load_file(first)  # what ComfyUI's LoadLatent reads
    assert torch.equal(stored["latent_tensor"], video.values) and "latent_format_version_0" in stored
    codec = EngineCodec(open_tiny(home.model("ltx2.3")), device="cpu", dtype=torch.float32)
    (path,) = decode_kept(tmp_path, codec, tmp_path / "out")
    with av.open(str(path)) as clip:
        assert path.name == "step_000002_1.mp4" and clip.streams.video[0].average_rate == Fraction(24000, 1001) and clip.streams.audio
    assert [p.name for p in decode_kept(first, codec, tmp_path / "again")] == ["step_000002_1.mp4"]
    save_file({"x": torch.zeros(1)}, tmp_path / "foreign.video.latent")
    with pytest.raises(DataError, match="no kept latents"):
        read_kept(tmp_path / "foreign.video.latent")
    with pytest.raises(DataError, match="no kept latents"):
        list(decode_kept(tmp_path / "empty", codec, tmp_path / "out"))


def test_the_command_line_decodes_what_was_kept(home, tmp_path):
    from ltx_train.__main__ import main

    files = home.model("ltx2.3")
    keep_latents(tmp_path / "run" / "samples" / "step_000002_1", Latents(torch.randn(1, 128, 1, 2, 2), VideoGrid(1, 2, 2)), None)
    assert main(["decode", str(tmp_path / "run"), str(tmp_path / "out"), "--model-path", str(files["model"]), "--device", "cpu"]) == 0
    assert (tmp_path / "out" / "step_000002_1.png").is_file()


# ---- room on the card


class Card(torch.nn.Module):
    """Blocks of 8 x 8 weights (one with a quantised layer), as if they lay on a card of ``size`` bytes."""

    def __init__(self, count, quantised=()):
        super().__init__()
        self.transformer_blocks = torch.nn.ModuleList(Linear(8, 8, bias=False) for _ in range(count))
        for index in quantised:
            self.transformer_blocks[index].set_quantized(RowScaled(torch.randint(-9, 9, (8, 8), dtype=torch.int8), torch.rand(8, 1)))

    @property
    def away(self):
        """Numbers of the blocks whose bytes are gone."""
        held = lambda b: b.weight if b.quantized is None else b.quantized.data  # noqa: E731
        return [i for i, b in enumerate(self.transformer_blocks) if held(b).untyped_storage().nbytes() == 0]

    def room(self, free=10, optimizer=None):
        room = Room(torch.device("cpu"), self, optimizer, free=lambda: free + 5 * len(self.away))
        room.moves = True
        return room


def test_blocks_leave_only_as_far_as_needed_and_come_back_bit_for_bit(monkeypatch):
    card = Card(6, quantised=[4])
    before = [b.base_weight(torch.float32).detach().clone() for b in card.transformer_blocks]
    views = [b.weight.view(-1) if b.quantized is None else b.quantized.data.view(-1) for b in card.transformer_blocks]
    room = card.room()
    with room.for_work(22):
        assert card.away == [3, 4, 5]
    with room.for_work(10_000):
        assert len(card.away) == 6
    with pytest.raises(ValueError), room.for_work(22):
        broken()
    assert card.away == []
    for block, value, view in zip(card.transformer_blocks, before, views):
        assert torch.equal(block.base_weight(torch.float32), value)
        assert view.data_ptr() == (block.weight if block.quantized is None else block.quantized.data).data_ptr()  # views follow
    with card.room(free=30).for_work(22):
        assert card.away == []
    monkeypatch.setattr("ltx_train.room.HOST_RESERVE", 1 << 60)  # a host without memory takes nothing
    with room.for_work(10_000):
        assert card.away == []


def test_blocks_of_an_engine_leave_and_sample_the_same_after(home):
    """Packed weights are views of one buffer a block: they are right again when it is back, and recordings are forgotten."""
    checkpoint = open_tiny(home.model("ltx2.3"))
    acceleration = AccelerationSection(mixed_precision_mode="no", device="cpu", compile="off")
    transformer = load_network(checkpoint, acceleration, torch.device("cpu"), streams=("video",), live=quiet())
    forgotten = []
    transformer.pass_runner = Passes(transformer, forgotten)
    grid = VideoGrid(1, 2, 2)
    state = LatentState.of(Latents(torch.randn(1, 128, 1, 2, 2), grid))
    context = Context(torch.randn(1, 8, transformer.config.cross_attention_dim), None)
    velocity = lambda: transformer(state.modality(state.clean, torch.tensor([0.5]), context), None)[0]  # noqa: E731
    before = velocity()
    assert transformer.block_runner.store.device_buffers
    room = Room(torch.device("cpu"), transformer, free=lambda: 0)
    room.moves = True
    with room.for_work(1):
        assert all(b.untyped_storage().nbytes() == 0 for b in transformer.block_runner.store.device_buffers.values())
    assert torch.equal(velocity(), before) and forgotten == [True]


class Passes:
    """A runner of whole passes that notes when it is told to forget its recordings."""

    def __init__(self, transformer, forgotten):
        self.transformer, self.forgotten = transformer, forgotten

    def __call__(self, inputs):
        return self.transformer.compute_together(inputs)

    def forget(self):
        self.forgotten.append(True)


def quiet():
    return SimpleNamespace(warn=lambda *a: None, progress=lambda *a, **m: None)


def test_the_optimizers_state_waits_in_host_memory():
    card = Card(2)
    optimizer = torch.optim.AdamW(card.parameters())
    card.transformer_blocks[0](torch.ones(1, 8)).sum().backward()
    optimizer.step()
    moment = optimizer.state[card.transformer_blocks[0].weight]["exp_avg"]
    before = moment.clone()
    with card.room(optimizer=optimizer).without_optimizer():
        assert moment.untyped_storage().nbytes() == 0
    assert torch.equal(moment, before) and moment is optimizer.state[card.transformer_blocks[0].weight]["exp_avg"]


def test_what_decoding_asks_for_grows_with_the_clip_up_to_a_tile(home):
    checkpoint = open_tiny(home.model("ltx2.3"))
    small, large, larger = (decode_needs(checkpoint, torch.bfloat16, pixels, sound=False) for pixels in (64 * 64 * 9, 512 * 512 * 66, 10**9))
    assert 0 < small < large == larger
    assert decode_needs(checkpoint, torch.bfloat16, 0, sound=False) == 0 < decode_needs(checkpoint, torch.bfloat16, 0, sound=True)


def test_room_is_nothing_without_a_card():
    model = Card(2)
    with Room(torch.device("cpu"), model).without_optimizer(), Room(torch.device("cpu"), model, free=lambda: 0).for_work(1 << 60):
        assert model.away == []
