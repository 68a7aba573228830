"""Reading: the official resize and crop, crops, references, masks, sound cuts, downmix, writers, read-ahead."""

from __future__ import annotations

import os
import sys
import threading
from dataclasses import replace
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from ltx_train.data.buckets import ClipOptions, parse_buckets, plan
from ltx_train.data.colour import hlg_to_nits, pq_to_nits, roll_off, tone_map
from ltx_train.data.decode import resize
from ltx_train.data.findings import MediaError
from ltx_train.data.media import (
    downmix,
    fill_motion,
    prepare,
    probe,
    read_audio_mask,
    read_clip,
    read_image,
    read_mask,
    read_reference_audio,
    write_png,
    write_video,
    write_wav,
)  # fmt: skip
from ltx_train.data.sources import MemoryClip, Sample
from ltx_train.geometry import VideoFactors
from ltx_train.tiny import media as tiny

FACTORS = VideoFactors()


def planned(path, buckets="128x96x9", roles=None, memory=None, **options):
    found = plan(Sample("a", path, "c", roles or {}, in_memory=memory), probe(memory or path), parse_buckets(buckets), ClipOptions(**options))
    return found[0]


def lossless(path, frames, rate=24):
    return tiny.encode(path, frames, rate, tiny.Coding("ffv1", "bgr0", {}))


def test_resize_and_crop_are_the_officials(tmp_path):
    """Reference: float32 antialiased bicubic over the whole frame, then the centre crop, as official_trainer.md 3.4."""
    noise = np.random.default_rng(0).integers(60, 196, (9, 27, 48, 3), dtype=np.uint8)
    frames = [np.repeat(np.repeat(f, 8, 0), 8, 1) for f in noise]  # 384x216
    clip = read_clip(planned(lossless(tmp_path / "a.mkv", frames), "128x96x9"))
    whole = torch.from_numpy(np.stack(frames)).permute(0, 3, 1, 2).float()
    width = 384 * 96 // 216
    official = F.interpolate(whole, size=(96, width), mode="bicubic", antialias=True).clamp(0, 255)
    left = (width - 128) // 2
    error = (clip.frames.float() - official[..., left : left + 128].permute(0, 2, 3, 1)).abs()
    assert error.max() <= 3 and error.mean() < 0.5


def test_resize_of_equal_size_is_untouched():
    pixels = np.random.default_rng(1).integers(0, 256, (8, 12, 3), dtype=np.uint8)
    assert torch.equal(resize(pixels, (12, 8)), torch.from_numpy(pixels))


@pytest.mark.parametrize("rate", [Fraction(24), Fraction(30000, 1001), Fraction(24000, 1001), 12.5])
def test_written_rate_is_true_and_pictures_come_back(tmp_path, rate):
    frames = torch.from_numpy(np.stack([tiny.counter_frame(n) for n in range(17)]))
    path = write_video(tmp_path / "o.mp4", frames, rate)
    found = probe(path)
    assert found.timeline.rate == Fraction(rate) and found.frames == 17
    clip = read_clip(planned(path, "128x96x17"))
    assert [tiny.read_counter(f) for f in clip.frames] == list(range(17))
    assert (clip.frames.float() - frames.float()).abs().mean() < 3
    assert [p.name for p in tmp_path.iterdir()] == ["o.mp4"]


def test_written_sound_and_odd_sizes(tmp_path):
    frames = torch.zeros(25, 31, 33, 3, dtype=torch.uint8)
    wave = torch.from_numpy(tiny.tone(25 / 24, 44100, onset=0.5))
    path = write_video(tmp_path / "o.mp4", frames, 24, wave, 44100)
    found = probe(path)
    assert (found.width, found.height, found.sound.sample_rate, found.sound.channels) == (34, 32, 44100, 2)
    clip = read_clip(planned(path, "32x32x25"))
    assert clip.waveform.shape == (2, round(25 / 24 * 44100))
    assert tiny.onset(clip.waveform[0], 44100) == pytest.approx(0.5, abs=0.003)


def test_wav_and_png_are_exact(tmp_path):
    wave = torch.from_numpy(tiny.tone(0.5, 16000))
    got = read_clip(planned(write_wav(tmp_path / "w.wav", wave, 16000))).waveform
    assert (got - wave).abs().max() < 1 / 32000
    frame = tiny.counter_frame(9)
    assert np.array_equal(read_image(write_png(tmp_path / "p.png", frame)).numpy(), frame)


def test_sound_of_a_late_window_is_in_step(tmp_path):
    """A window from frame 100 on: the tone that starts at 5 s is heard 5 s - 100/24 s into it."""
    wave = tiny.tone(8.0, 48000, onset=5.0)
    path = tiny.encode(tmp_path / "a.mp4", (tiny.counter_frame(n) for n in range(192)), 24, tiny.Coding(options={"crf": "12", "preset": "ultrafast", "g": "12"}), sound=wave)
    whole = planned(path, "128x96x49")
    late = replace(whole, first=100, start=100 / 24)
    clip = read_clip(late)
    assert tiny.read_counter(clip.frames[0]) == 100 and tiny.read_counter(clip.frames[48]) == 148
    assert tiny.onset(clip.waveform[0], 48000) == pytest.approx(5 - 100 / 24, abs=0.003)


def test_sound_of_another_file_and_memory(tmp_path):
    video = tiny.counter_clip(tmp_path / "v.mp4", 25)
    song = tiny.write_pcm(tmp_path / "s.wav", tiny.tone(3, 32000, (300.0, 500.0)), 32000)
    clip = read_clip(planned(video, "128x96x17", {"audio": song}))
    assert clip.sample_rate == 32000 and tiny.frequency(clip.waveform[1], 32000) == pytest.approx(500, rel=0.005)
    assert read_clip(planned(video, "128x96x17", {"audio": song}, audio="off")).waveform is None
    frames = torch.from_numpy(np.stack([tiny.counter_frame(n) for n in range(25)])).float() / 255
    memory = MemoryClip("m", frames, 24.0, torch.from_numpy(tiny.tone(2, 8000)), 8000)
    clip = read_clip(planned(None, "128x96x17", memory=memory))
    assert torch.equal(clip.frames, (frames[:17] * 255).round().byte()) and clip.waveform.shape == (2, round(17 / 24 * 8000))
    half = read_clip(planned(None, "128x96x9", memory=memory, fps=12))
    assert [tiny.read_counter(f) for f in half.frames] == [0, 2, 4, 6, 8, 10, 12, 14, 16]


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 1e30])
def test_sound_that_is_none_is_refused(value):
    wave = torch.zeros(2, 8000)
    wave[0, 10] = value
    with pytest.raises(MediaError, match="where 1 is full scale") as error:
        read_clip(planned(None, "128x96x9", memory=MemoryClip("m", torch.zeros(25, 96, 128, 3), 24.0, wave, 8000)))
    assert error.value.code == "audio.values"


@pytest.mark.skipif(os.name == "nt", reason="Windows has no such names")
def test_a_name_with_a_colon_is_no_protocol(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    os.replace(tiny.counter_clip(Path("a.mp4"), 9), "concat:a|b.mp4")
    assert len(read_clip(planned(Path("concat:a|b.mp4"), "128x96x9")).frames) == 9


@pytest.mark.parametrize("brands", [b"heic\0\0\0\0mif1heic", b"mif1\0\0\0\0mif1heicmiaf"])
def test_a_heic_photo_is_not_read_as_a_video_of_one_tile(tmp_path, monkeypatch, brands):
    path = tmp_path / "IMG_0001.heic"
    path.write_bytes(b"\0\0\0\x20ftyp" + brands + bytes(200))
    monkeypatch.setitem(sys.modules, "pillow_heif", None)
    with pytest.raises(MediaError, match="pillow-heif") as refused:
        probe(path)
    assert refused.value.code == "media.heif" and "JPEG" in refused.value.hint


def test_reference_sound(tmp_path):
    video = tiny.counter_clip(tmp_path / "v.mp4", 25)
    song = tiny.write_pcm(tmp_path / "s.wav", tiny.tone(0.2, 8000), 8000)
    sound = read_reference_audio(planned(video, "128x96x17", {"reference_audio": song}))
    assert sound.waveform.shape == (2, round(17 / 24 * 8000)) and [f.code for f in sound.notes] == ["audio.short"]


def test_official_downmix():
    """official_trainer.md 3.5, channel by channel."""
    eye = torch.eye(6)
    left, right = downmix(eye)
    assert torch.allclose(left, torch.tensor([1, 0, 0.707, 0, 0.707, 0]) / 2.414) and torch.allclose(right, torch.tensor([0, 1, 0.707, 0, 0, 0.707]) / 2.414)
    left, right = downmix(torch.eye(8))
    assert torch.allclose(left, torch.tensor([1, 0, 0.707, 0, 0.707, 0, 0.707, 0]) / 3.121)
    assert torch.allclose(right, torch.tensor([0, 1, 0.707, 0, 0, 0.707, 0, 0.707]) / 3.121)
    assert torch.equal(downmix(torch.ones(1, 3)), torch.ones(2, 3)) and torch.allclose(downmix(torch.eye(4)), torch.full((2, 4), 0.25))


def test_motion_crop_follows_the_motion(tmp_path):
    frames = [np.full((96, 256, 3), 90, np.uint8) for _ in range(9)]
    for n, frame in enumerate(frames):
        frame[30:60, 200 + 4 * n : 220 + 4 * n] = 255
    path = lossless(tmp_path / "a.mkv", frames)
    found = fill_motion(planned(path, "96x96x9", crop="motion"))
    assert found.placement.left + 96 >= 248 and found.placement.left <= 200
    quiet = lossless(tmp_path / "b.mkv", frames[:1] * 9)
    assert fill_motion(planned(quiet, "96x96x9", crop="motion")).placement == planned(quiet, "96x96x9").placement


def test_letterbox_has_borders(tmp_path):
    path = lossless(tmp_path / "a.mkv", [np.full((64, 64, 3), 200, np.uint8)] * 9)
    frame = read_clip(planned(path, "128x64x9", letterbox=True, alpha_colour=(1, 2, 3))).frames[0]
    assert frame[5, 10].tolist() == [1, 2, 3] and frame[5, 64].tolist() == [200] * 3 and frame[5, 120].tolist() == [1, 2, 3]


def test_masks_are_cropped_like_the_clip_and_pooled_causally(tmp_path):
    """384x192 into 192x192: the middle half. The mask's white right half becomes the right half of that."""
    video = tiny.counter_clip(tmp_path / "v.mp4", 20, width=384, height=192)
    mask = np.zeros((192, 384, 3), np.uint8)
    mask[:, 192:] = 255
    still = write_png(tmp_path / "m.png", mask)
    got = read_mask(planned(video, "192x192x17", {"video_mask": still}), FACTORS)
    assert got.shape == (3, 6, 6) and torch.equal(got, torch.tensor([0, 0, 0, 1, 1, 1.0]).expand(3, 6, 6))
    moving = lossless(tmp_path / "m.mkv", [np.full((192, 384, 3), 255 if n in (0, 9) else 0, np.uint8) for n in range(20)])
    got = read_mask(planned(video, "192x192x17", {"video_mask": moving}), FACTORS)
    assert got[:, 0, 0].tolist() == [1, 0, 1], "groups 0 | 1-8 | 9-16"
    other_size = write_png(tmp_path / "small.png", mask[::4, ::4])
    assert torch.equal(read_mask(planned(video, "192x192x17", {"video_mask": other_size}), FACTORS)[0], torch.tensor([0, 0, 0, 1, 1, 1.0]).expand(6, 6))


def test_sound_masks(tmp_path):
    video = tiny.counter_clip(tmp_path / "v.mp4", 25)
    loud = tiny.write_pcm(tmp_path / "m.wav", np.where(np.arange(8000) < 4000, 0.0, 0.9)[None].astype(np.float32), 8000)
    got = read_audio_mask(planned(video, "128x96x25", {"audio_mask": loud}), 26)
    assert got.tolist() == [0.0] * 12 + [1.0] * 13 + [0.0], "loud from 0.5 s on, and silent after its end"
    torch.save({"mask": torch.tensor([0.0, 1.0])}, tmp_path / "m.pt")
    assert read_audio_mask(planned(video, "128x96x25", {"audio_mask": tmp_path / "m.pt"}), 4).tolist() == [0, 0, 1, 1]


def test_references_are_read_at_the_clips_moments(tmp_path):
    video = tiny.counter_clip(tmp_path / "v.mp4", 40)
    double = tiny.counter_clip(tmp_path / "r.mp4", 80, 48)
    start = replace(planned(video, "128x96x17", {"reference_video": double}), first=5, start=5 / 24)
    item = next(prepare([[start]], FACTORS, workers=1))[0]
    assert [tiny.read_counter(f) for f in item.clip.frames] == list(range(5, 22))
    assert [tiny.read_counter(f) for f in item.reference.frames] == list(range(10, 44, 2))
    factors = planned(video, "128x96x17", {"reference_video": double}, reference_temporal_scale_factor=2)
    item = next(prepare([[factors]], FACTORS, workers=1))[0]
    assert [tiny.read_counter(f) for f in item.reference.frames] == [0] + [2 * n for n in range(1, 17, 2)] and item.reference.fps == 12
    short = tiny.counter_clip(tmp_path / "s.mp4", 10)
    item = next(prepare([[planned(video, "128x96x17", {"reference_video": short})]], FACTORS, workers=1))[0]
    assert [tiny.read_counter(f) for f in item.reference.frames] == [*range(10), *[9] * 7]
    assert [f.code for f in item.notes] == ["reference.short"]
    still = write_png(tmp_path / "p.png", tiny.counter_frame(3))
    item = next(prepare([[planned(video, "128x96x17", {"reference_video": still})]], FACTORS, workers=1))[0]
    assert item.reference.frames.shape[0] == 1 and tiny.read_counter(item.reference.frames[0]) == 3


def test_read_ahead_keeps_order_names_errors_and_ends(tmp_path):
    paths = [tiny.counter_clip(tmp_path / f"{n}.mp4", 12, first=10 * n) for n in range(6)]
    plans = [planned(p) for p in paths]
    data = paths[2].read_bytes()
    paths[2].write_bytes(data[: len(data) // 2])
    before = threading.active_count()
    batches = [plans[:2], plans[2:4], plans[4:]]
    for workers in (0, 3):
        got = list(prepare(batches, FACTORS, workers=workers, ahead=1))
        assert [[p.plan.media for p in b] for b in got] == [[p.media for p in b] for b in batches]
        firsts = [None if p.error else tiny.read_counter(p.clip.frames[0]) for b in got for p in b]
        assert firsts == [0, 10, None, 30, 40, 50]
        assert isinstance(got[1][0].error, MediaError)
    reading = prepare(batches, FACTORS, workers=2)
    next(reading)
    reading.close()
    assert threading.active_count() == before


def test_tone_mapping_formulas():
    """ST 2084 and BT.2100 anchor points: PQ 0.5081 is 100 nits, 0.5807 is 203; HLG 0.75 is 203 nits, 1.0 is 1000, 0.5 is 50.6."""
    assert pq_to_nits(np.float32([0.5081, 0.5807, 1.0])) == pytest.approx([100, 203, 10000], rel=2e-3)
    grey = hlg_to_nits(np.repeat(np.float32([[0.75], [1.0], [0.5]]), 3, 1))
    assert grey[:, 0] == pytest.approx([203, 1000, 1000 * (1 / 12) ** 1.2], rel=3e-3)
    assert roll_off(np.array([0.2, 0.5, 1000 / 203])) == pytest.approx([0.2, 0.5, 1.0])
    ramp = tone_map(np.repeat(np.linspace(0, 1, 64, dtype=np.float32)[:, None], 3, 1), "pq").astype(int)
    assert (np.diff(ramp[:, 0]) >= 0).all() and np.ptp(ramp, axis=1).max() <= 1, "monotone, and grey stays grey"


def test_colours_keep_their_hue_in_hdr():
    red = tone_map(np.float32([0.75, 0.05, 0.05]), "hlg")
    assert red[0] > 200 and red[1] < 60 and red[2] < 60
