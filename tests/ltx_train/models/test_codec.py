"""EngineCodec: one model at a time, loaded on first use, same numbers as the codecs it composes."""

from pathlib import Path

import pytest
import torch

from ltx_train.models.audio_codec import AudioCodec
from ltx_train.models.checkpoint import Checkpoint
from ltx_train.models.codec import EngineCodec
from ltx_train.models.tiling import Tiling
from ltx_train.models.video_codec import VideoCodec

DATA = Path(__file__).parents[2] / "parity" / "data"


@pytest.fixture
def codec() -> EngineCodec:
    return EngineCodec(Checkpoint.open(DATA / "ltx2.3.checkpoint.safetensors"), device="cpu", dtype=torch.float32)


def test_one_model_at_a_time(codec: EngineCodec, monkeypatch) -> None:
    loads = []
    for kind in (VideoCodec, AudioCodec):
        original = kind.load.__func__
        monkeypatch.setattr(
            kind,
            "load",
            classmethod(lambda cls, *a, original=original, **k: loads.append((cls.__name__, k["encoder"])) or original(cls, *a, **k)),
        )
    frames = torch.zeros(1, 9, 64, 32, 3, dtype=torch.uint8)
    latents = codec.encode_video(frames)
    codec.encode_video(frames)
    assert loads == [("VideoCodec", True)] and latents.shape == (1, 8, 2, 2, 1)
    assert codec.decode_video(latents).shape == frames.shape
    sound = codec.encode_audio(torch.zeros(1, 2, 4000), 16000)
    assert codec._loaded[0] == "audio_vae.encoder"
    waveform, rate = codec.decode_audio(sound)
    assert rate == 48000 and waveform.shape[:2] == (1, 2)
    codec.release("video_vae")
    assert codec._loaded is not None
    codec.release("audio_vae")
    assert codec._loaded is None
    codec.encode_video(frames)
    assert loads == [("VideoCodec", True), ("VideoCodec", False), ("AudioCodec", True), ("AudioCodec", False), ("VideoCodec", True)]


def test_same_numbers_as_the_parts(codec: EngineCodec) -> None:
    frames = torch.randint(0, 256, (1, 9, 64, 64, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    video = VideoCodec.load(codec.checkpoint, device="cpu", dtype=torch.float32)
    latents = codec.encode_video(frames)
    assert torch.equal(latents, video.encode(frames)) and latents.device.type == "cpu"
    assert torch.equal(codec.decode_video(latents), video.decode(latents))
    codec.tiling = Tiling(64, 32, 8, 4)
    assert torch.equal(codec.encode_video(frames), video.encode(frames, Tiling(64, 32, 8, 4)))


def test_kind_and_fingerprints(codec: EngineCodec) -> None:
    assert codec.kind == "engine"
    marks = {codec.fingerprint(component) for component in ("video_vae", "audio_vae")}
    assert len(marks) == 2 and marks == {codec.checkpoint.fingerprint_of(component) for component in ("video_vae", "audio_vae")}


def test_tiles_follow_free_memory(codec: EngineCodec, monkeypatch) -> None:
    monkeypatch.setattr("ltx_train.models.codec.free_bytes", lambda device: 1 << 40)
    video = codec._video("decoder")
    assert codec._tiling(video, 121, 1088, 1920, decode=True) is None
    monkeypatch.setattr("ltx_train.models.codec.free_bytes", lambda device: 1 << 20)
    assert codec._tiling(video, 121, 1088, 1920, decode=True) == Tiling(256, 64, 32, 16)
    codec.tiling = None
    assert codec._tiling(video, 121, 1088, 1920, decode=True) is None
