"""Bucket text, checks, the official choice, windows, crops and references."""

from __future__ import annotations

import itertools
import math
from fractions import Fraction
from pathlib import Path

import pytest

from ltx_train.data.buckets import Bucket, ClipOptions, check, choose, encode_batches, parse_buckets, plan
from ltx_train.data.findings import Finding
from ltx_train.data.probe import Probe, SoundInfo, Timeline
from ltx_train.data.proposals import propose
from ltx_train.data.references import check_references, plan_reference, reference_bucket
from ltx_train.data.sources import Sample
from ltx_train.errors import ConfigError
from ltx_train.geometry import VideoFactors

FACTORS = VideoFactors()


def video(width=1920, height=1080, frames=100, rate=24, sound=None):
    return Probe(Path("a.mp4"), "video", 1, width, height, width, height, Timeline(0.0, Fraction(rate), frames, frames / rate), sound=sound)


def still(width=640, height=480):
    return Probe(Path("a.png"), "image", 1, width, height, width, height, Timeline(0.0, Fraction(24), 1, 1 / 24))


def planned(probe, text, roles=None, **options):
    return plan(Sample("a", probe.path, "c", roles or {}), probe, parse_buckets(text), ClipOptions(**options))


def test_parse():
    assert parse_buckets("960x544x49; 512X512 ;960x544x49") == (Bucket(960, 544, 49), Bucket(512, 512, 1))
    for bad in ("960x544x49;foo", "", "960", "0x64x9", "64x64x0", "64x-64x9"):
        with pytest.raises(ConfigError):
            parse_buckets(bad)


@pytest.mark.parametrize(("text", "near"), [("960x540x49", "960x544x49"), ("960x544x48", "960x544x49"), ("100x100x2", "96x96x1")])
def test_off_grid_buckets_name_the_nearest(text, near):
    with pytest.raises(ConfigError, match=near):
        check(parse_buckets(text), FACTORS)
    check(parse_buckets(near), FACTORS)


def official(buckets, aspect, frames):
    """The rule as official_trainer.md 3.4 states it."""
    fitting = [b for b in buckets if b.frames <= frames]
    return min(fitting, key=lambda b: (abs(math.log(b.width / b.height) - math.log(aspect)), -b.frames, -b.width * b.height)) if fitting else None


def test_choice_is_the_official_one():
    buckets = [Bucket(w, h, f) for w, h, f in itertools.product((448, 768, 960), (448, 544, 768), (9, 49, 89))]
    for aspect, frames in itertools.product((0.3, 0.5625, 0.7, 1.0, 1.12, 1.7778, 2.4), (8, 9, 48, 49, 200)):  # 0.7, 1.12: the nearest by ratio, not by difference
        assert choose(buckets, aspect, frames, True) == official(buckets, aspect, frames)


def test_a_video_takes_a_still_bucket_only_when_nothing_else_fits():
    found = planned(video(512, 512, 20), "512x512x1;768x448x9")[0]
    assert found.bucket == Bucket(768, 448, 9)
    short = planned(video(512, 512, 5), "512x512x1;768x448x9")[0]
    assert short.bucket.frames == 1 and "bucket.as_still" in {f.code for f in short.notes}


def test_too_short_and_no_still_bucket_are_findings():
    assert planned(video(frames=8), "768x448x9").code == "bucket.too_short"
    assert planned(still(), "768x448x9").code == "bucket.no_still"
    assert planned(still(), "768x448x9;512x512")[0].fps == 24


@pytest.mark.parametrize(("size", "fit"), [((1920, 1080), (796, 448)), ((1080, 1920), (768, 1365)), ((768, 448), (768, 448))])
def test_fit_is_the_official_one(size, fit):
    """int(width * H / height) where too wide, else int(height * W / width); crop offsets halved by floor."""
    place = planned(video(*size), "768x448x49")[0].placement
    assert (place.fit_width, place.fit_height) == fit
    assert (place.left, place.top) == ((fit[0] - 768) // 2, (fit[1] - 448) // 2)


def test_letterbox_shows_everything():
    place = planned(video(1000, 1000), "768x448x49", letterbox=True)[0].placement
    assert (place.fit_width, place.fit_height, place.left, place.top) == (448, 448, -160, 0)


def test_random_crops_are_seeded():
    places = [planned(video(), "448x448x49", crop="random", selection_seed=s)[0].placement.left for s in (1, 1, 2, 3)]
    assert places[0] == places[1] and len(set(places)) > 1 and all(0 <= p <= 796 - 448 for p in places)


def starts(frames, **options):
    return [p.first for p in planned(video(frames=frames), "768x448x25", **options)]


def test_windows():
    assert starts(100) == [0]
    assert starts(100, frame_selection="all") == [0, 25, 50, 75]
    assert starts(99, frame_selection="all") == [0, 25, 50]
    assert starts(60, frame_selection="sliding", window_stride=10) == [0, 10, 20, 30]
    assert starts(100, frame_selection="uniform", windows=3) == [0, 38, 75]
    assert starts(100, frame_selection="uniform") == [37]
    picked = starts(100, frame_selection="random", windows=4)
    assert picked == starts(100, frame_selection="random", windows=4) and all(0 <= p <= 75 for p in picked)
    assert len({p.id for p in planned(video(), "768x448x25", frame_selection="all")}) == 4


def test_rate_and_step():
    """Positions keep the true rate; another rate is a resampling by time; a step lowers the rate."""
    assert planned(video(rate=30, frames=32), "768x448x25", fps=24)[0].fps == 24
    assert planned(video(), "768x448x25", fps=23.976)[0].fps == Fraction(24000, 1001)
    stepped = planned(video(frames=100, rate=30), "768x448x25", frame_step=2)[0]
    assert stepped.fps == 15 and stepped.slots()[:3] == [0, 2, 4] and stepped.seconds == pytest.approx(25 / 15)



def test_resampled_length_is_by_time():
    assert isinstance(planned(video(rate=30, frames=29), "768x448x25", fps=24), Finding)
    assert planned(video(rate=60, frames=63), "768x448x25", fps=24)[0].frames == 25


def test_frames_that_a_higher_rate_repeats_are_told():
    codes = lambda rate, fps: [n.code for n in planned(video(rate=rate, frames=200), "768x448x25", fps=fps)[0].notes]  # noqa: E731
    assert "frames.repeated" in codes(12, 24) and "frames.repeated" not in codes(24, 24) + codes(30, 24) + codes(Fraction(24000, 1001), 24) + codes(12, None)


def test_sound_only_durations():
    probe = Probe(Path("a.wav"), "audio", 1, sound=SoundInfo(0, 44100, 2, "stereo", 5.0))
    assert planned(probe, "64x64x9", audio_durations="2;4;8")[0].seconds == 4
    assert planned(probe, "64x64x9", audio_durations="8").code == "audio.too_short"
    assert planned(probe, "64x64x9")[0].seconds == 5.0 and planned(probe, "64x64x9")[0].bucket is None
    for bad in ("two", "2;-1", "0", "inf", "2;x"):
        with pytest.raises(ValueError, match="no list of seconds"):  # before any clip is looked at
            ClipOptions(audio_durations=bad)


def test_reference_geometry():
    options = ClipOptions(reference_downscale_factor=2, reference_temporal_scale_factor=3)
    assert reference_bucket(Bucket(768, 448, 49), options, FACTORS) == Bucket(384, 224, 17)
    assert reference_bucket(Bucket(768, 416, 49), options, FACTORS) is None
    with pytest.raises(ConfigError):
        check_references([Bucket(768, 416, 49)], FACTORS, options)
    clip = planned(video(frames=60), "768x448x49", roles={"reference_video": Path("r.mp4")}, reference_downscale_factor=2, reference_temporal_scale_factor=3)[0]
    found = plan_reference(clip, video(960, 540, 60), FACTORS)
    assert found.fps == 8 and found.slots() == [0, *range(1, 49, 3)] and len(found.slots()) == 17
    assert (found.placement.fit_width, found.placement.fit_height, found.placement.left) == (398, 224, 7)
    short = plan_reference(clip, video(960, 540, 20), FACTORS)
    assert [f.code for f in short.notes] == ["reference.short"] and short.hold


def test_reference_shows_the_clips_part():
    clip = planned(video(frames=60), "448x448x49", roles={"reference_video": Path("r.mp4")}, crop="random", selection_seed=5)[0]
    found = plan_reference(clip, video(frames=60), FACTORS)
    assert found.placement == clip.placement


def test_encode_batches_depend_on_the_plans_alone():
    plans = [p for n in range(5) for p in planned(video(), "768x448x25")] + planned(still(), "512x512")
    sizes = [[str(p.bucket) for p in b] for b in encode_batches(plans, 2)]
    assert sizes == [["768x448x25"] * 2, ["768x448x25"] * 2, ["768x448x25"], ["512x512x1"]]


def test_proposed_buckets_fit_the_budget():
    probes = [video(1920, 1080, 130)] * 5 + [video(1080, 1920, 60)] * 3 + [still(4000, 3000)] * 2
    found = propose(probes, FACTORS, 4096)
    check(found, FACTORS)
    assert all(0.6 * 4096 < b.tokens(FACTORS) <= 4096 for b in found)
    assert {b.frames for b in found} == {57, 1}
    for probe in probes:
        chosen = choose(found, probe.width / probe.height, probe.frames, probe.kind == "video")
        assert abs(math.log(chosen.aspect) - math.log(probe.width / probe.height)) < 0.15
    assert propose([video(320, 240, 9)], FACTORS, 100_000) == (Bucket(320, 256, 9),)
