"""Scenes of a film of three colours: the cuts, and the clips written from them."""

from __future__ import annotations

import sys

import numpy as np
import pytest

from ltx_train.data.media import probe
from ltx_train.data.scenes import SceneSection, find_scenes, split
from ltx_train.errors import DataError, MissingPackage
from ltx_train.tiny import media as tiny


@pytest.fixture(scope="module")
def film(tmp_path_factory):
    """20, 30 and 25 frames at 24 fps; frame numbers in the upper half; a tone from the second scene on."""
    frames = []
    for n in range(75):
        colour = ((200, 30, 30), (20, 60, 220), (30, 200, 40))[(n >= 20) + (n >= 50)]
        frames.append(tiny.counter_frame(n, left=colour, right=colour))
        frames[-1][:48] = np.clip(frames[-1][:48].astype(int) * 0.06 + np.array(colour) * 0.94, 0, 255)
    return tiny.encode(tmp_path_factory.mktemp("film") / "film.mp4", frames, 24, sound=tiny.tone(75 / 24, 48000, onset=20 / 24))


def starts(film, **fields):
    return [round(s.start * 24) for s in find_scenes(film, SceneSection(min_seconds=0.3, **fields))]


@pytest.mark.parametrize("detector", ["simple", "content", "adaptive"])
def test_cuts_are_found(film, detector):
    assert starts(film, detector=detector) == [0, 20, 50]


def test_limits(film):
    assert starts(film, threshold=250) == [0]
    assert starts(film, filter_shorter_than=1.1) == [20]
    assert starts(film, max_scenes=2) == [0, 20]
    assert starts(film, max_seconds=1.1) == [0, 20, 35, 50]
    assert [round(s.start * 24) for s in find_scenes(film, SceneSection(min_seconds=1.0))] == [0, 50]


def test_written_scenes(film, tmp_path):
    made = split(film, tmp_path, SceneSection(min_seconds=0.3))
    assert [p.name for p in made] == [f"film-scene-{n:03d}.mp4" for n in (1, 2, 3)]
    found = [probe(p) for p in made]
    assert [p.frames for p in found] == [20, 30, 25] and all(p.fps == 24 and p.sound for p in found)
    stamp = made[0].stat().st_mtime_ns
    assert split(film, tmp_path, SceneSection(min_seconds=0.3)) == made and made[0].stat().st_mtime_ns == stamp
    assert sorted(p.name for p in film.parent.iterdir()) == ["film.mp4"]


def test_without_the_package_the_way_out_is_named(film, monkeypatch):
    monkeypatch.setitem(sys.modules, "scenedetect", None)
    with pytest.raises(MissingPackage, match="simple"):
        find_scenes(film, SceneSection(detector="content"))


def test_stills_have_no_scenes(tmp_path):
    from ltx_train.data.media import write_png

    with pytest.raises(DataError, match="not a video"):
        find_scenes(write_png(tmp_path / "a.png", tiny.counter_frame(1)))
