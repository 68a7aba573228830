"""The corpus of awkward kinds: each file is read right to the pixel and sample within codec error, or one finding names it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from ltx_train.data.buckets import ClipOptions, parse_buckets, plan
from ltx_train.data.findings import Finding, MediaError
from ltx_train.data.media import probe, read_clip
from ltx_train.data.sources import Sample
from ltx_train.geometry import VideoFactors
from ltx_train.tiny import media as tiny

BUCKETS = parse_buckets("128x96x9;128x96x1")
KINDS = {kind.name: kind for kind in tiny.corpus()}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("corpus")


@pytest.mark.parametrize("name", KINDS)
def test_each_kind_is_right_or_named(name, folder):
    kind = KINDS[name]
    path = folder / name
    kind.write(path)
    before = sorted(p.name for p in folder.iterdir())
    expected = kind.expected
    try:
        found = probe(path)
    except MediaError as error:
        assert error.code == expected.refused, f"{error}"
        return
    buckets = BUCKETS[:1] if expected.refused == "bucket.too_short" else BUCKETS
    planned = plan(Sample(name, path, "caption"), found, buckets, ClipOptions())
    if isinstance(planned, Finding):
        assert planned.code == expected.refused, planned
        return
    if expected.refused:
        with pytest.raises(MediaError) as caught:
            read_clip(planned[0])
        assert caught.value.code == expected.refused
        return
    clip = read_clip(planned[0])
    codes = {f.code for f in (*found.findings, *planned[0].notes, *clip.notes)}
    assert set(expected.notes) <= codes, codes
    unexpected = {c for c in codes if c.startswith("media.")} - set(expected.notes)
    assert not unexpected, unexpected
    if expected.counters:
        assert (found.width, found.height) == expected.shape
        assert clip.fps == pytest.approx(expected.fps, rel=1e-6)
        assert tuple(tiny.read_counter(f) for f in clip.frames) == expected.counters[: len(clip.frames)]
        _check_colours(clip.frames[0].numpy(), expected)
    _check_sound(clip, expected)
    assert sorted(p.name for p in folder.iterdir()) == before, "nothing is written beside the user's files"


def _check_colours(frame, expected):
    left, right = tiny.corner_colours(frame)
    for got, want in ((left, expected.left), (right, expected.right)):
        if want is not None:
            assert np.abs(got - np.array(want)).max() <= expected.tolerance, (got, want)


def _check_sound(clip, expected):
    if expected.tones is None:
        assert clip.waveform is None and not clip.audio_present
        return
    assert clip.audio_present and clip.waveform.shape[0] == 2
    rate = clip.sample_rate
    start = round((expected.onset + 0.01) * rate)
    for channel, hertz in zip(clip.waveform.numpy(), expected.tones):
        if not hertz:
            assert np.abs(channel).max() < 1e-3
            continue
        assert tiny.onset(channel, rate) == pytest.approx(expected.onset, abs=0.006)
        heard = channel[start:]
        heard = heard[: np.flatnonzero(np.abs(heard) > 0.02)[-1] + 1]
        assert tiny.frequency(heard, rate) == pytest.approx(hertz, rel=0.01)


def test_counter_survives_scaling():
    for number in (0, 1, 77, 200, 255):
        assert tiny.read_counter(tiny.counter_frame(number, 64, 64)) == number


def test_hdr_refused_by_choice(tmp_path):
    path = tmp_path / "hlg.mp4"
    KINDS["hlg.mp4"].write(path)
    refused = plan(Sample("a", path, ""), probe(path), BUCKETS, ClipOptions(hdr="refuse"))
    assert isinstance(refused, Finding) and refused.code == "media.hdr_refused"


def test_alpha_on_a_colour_and_as_mask(tmp_path):
    from ltx_train.data.media import loss_mask

    path = tmp_path / "vp9_alpha.webm"
    KINDS["vp9_alpha.webm"].write(path)
    options = ClipOptions(alpha="mask", alpha_colour=(0, 255, 0))
    clip = read_clip(plan(Sample("a", path, ""), probe(path), BUCKETS, options)[0])
    left, _ = tiny.corner_colours(clip.frames[3].numpy())
    assert np.abs(left - [0, 255, 0]).max() < 12
    mask = loss_mask(clip.alpha, VideoFactors())
    assert mask.shape == (2, 3, 4)
    assert mask[0].tolist() == [[1, 1, 1, 1], [0, 0, 1, 1], [0, 0, 1, 1]]  # row 1 is half transparent: not above one half


def test_a_restarted_clock_does_not_stop_the_film(tmp_path):
    path = tmp_path / "a.ts"
    KINDS["restarted.ts"].write(path)
    clip = read_clip(plan(Sample("a", path, ""), probe(path), parse_buckets("128x96x49"), ClipOptions())[0])
    assert [tiny.read_counter(f) for f in clip.frames] == list(range(49))


def test_hold_and_seek_agree(tmp_path):
    """A late window read by seeking equals the same frames read from the start."""
    path = tiny.encode(tmp_path / "long.mp4", (tiny.counter_frame(n) for n in range(150)), 24, tiny.Coding(options={"crf": "10", "preset": "ultrafast", "g": "24"}))
    found = probe(path)
    first = plan(Sample("a", path, ""), found, BUCKETS, ClipOptions())[0]
    late = replace(first, first=110, start=110 / 24)
    assert [tiny.read_counter(f) for f in read_clip(late).frames] == list(range(110, 119))
