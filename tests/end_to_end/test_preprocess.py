"""Encoding a dataset: nothing twice, exactly what changed again, and the same bytes whatever interrupted it."""

import hashlib
import os
import random
import shutil
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from ltx_train.data.dataset import DataSection
from ltx_train.data.manifest import Manifest
from ltx_train.encode import Preprocessor, Target
from ltx_train.errors import DataError, StopRequested
from ltx_train.preprocess import preprocess
from ltx_train.runs.event_log import EventLog, read_events
from ltx_train.runs.events import ProgressEvent
from ltx_train.tiny import media
from ltx_train.tiny.checkpoints import open_tiny, write_tiny
from tests.end_to_end.corridor import BUCKET, FORKS, CheapCodec, Quiet, draw_everything


class Counting(CheapCodec):
    """Counts what is encoded; dawdles so that a kill can fall anywhere."""

    delay = 0.0

    def __init__(self, checkpoint):
        super().__init__(checkpoint, device="cpu", dtype=torch.float32)
        self.counts = {"video": 0, "audio": 0, "text": 0}

    def encode_video(self, frames):
        self.counts["video"] += len(frames)
        time.sleep(self.delay)
        return super().encode_video(frames)

    def encode_audio(self, waveform, rate):
        self.counts["audio"] += len(waveform)
        time.sleep(self.delay)
        return super().encode_audio(waveform, rate)

    def encode_text(self, captions):
        self.counts["text"] += len(captions)
        return super().encode_text(captions)


def encode(model, source, cache, *, report=None, texts=(), codec=None, **section):
    """Preprocess; how many pictures, sounds and texts were encoded."""
    checkpoint = open_tiny(model)
    codec = codec or Counting(checkpoint)
    data = DataSection(**{"dataset": str(source), "cache_dir": str(cache), "resolution_buckets": BUCKET, **section})
    preprocess(data, Target.of(checkpoint), codec, report or Quiet(), texts=texts)
    return tuple(codec.counts.values())


def content(root):
    """Relative path -> hash of every file."""
    return {p.relative_to(root).as_posix(): hashlib.sha256(p.read_bytes()).hexdigest() for p in sorted(root.rglob("*")) if p.is_file()}


@pytest.fixture
def clips(tmp_path):
    return media.dataset(tmp_path / "clips", 3, frames=17, width=64, height=64)


def test_nothing_is_encoded_twice_and_what_changed_once(home, tmp_path, clips):
    model, cache = home.model("ltx2.3"), tmp_path / "cache"
    assert encode(model, clips, cache, texts=["a prompt"]) == (3, 3, 4)
    before = content(cache)
    assert encode(model, clips, cache, texts=["a prompt"]) == (0, 0, 0) and content(cache) == before
    assert encode(model, clips, cache, texts=["a prompt"], caption_dropout=0.1) == (0, 0, 1), "the empty caption"
    (clips / "clip1.txt").write_text("another caption", encoding="utf-8")
    assert encode(model, clips, cache) == (0, 0, 1)
    assert Manifest.read(cache).entries[1].caption == "another caption"
    assert encode(model, clips, cache, captions={"trigger": "zzt"}) == (0, 0, 3)
    assert encode(model, clips, cache, resolution_buckets="32x32x17") == (3, 0, 0), "the sound is as long as before"
    assert encode(model, clips, cache, resolution_buckets="64x64x9") == (3, 3, 0)
    media.counter_clip(clips / "clip3.mp4", 17, width=64, height=64, sound=True, first=50)
    (clips / "clip3.txt").write_text("one more", encoding="utf-8")
    assert encode(model, clips, cache) == (1, 1, 1)
    os.replace(clips / "clip3.mp4", clips / "clip9.mp4")
    os.replace(clips / "clip3.txt", clips / "clip9.txt")
    assert encode(model, clips, cache) == (0, 0, 0), "a renamed clip is the same clip"
    (cache / "video").rename(tmp_path / "gone")
    assert encode(model, clips, cache) == (4, 0, 0), "what was deleted"


def test_a_caption_that_is_cut_is_told(home, tmp_path):
    report, checkpoint = Quiet(), open_tiny(home.model("ltx2.3"))
    section = DataSection(dataset=str(tmp_path), cache_dir=str(tmp_path / "cache"))
    worker = Preprocessor(section, Target.of(checkpoint), Counting(checkpoint), report)
    worker.encode_texts(["short", "word " * 400])
    worker.encode_texts(["short", "word " * 400])
    assert report.warnings == [("caption.cut", "Captions longer than the 1024 tokens that are read, their ends cut off: 1.")]


def test_a_stop_is_heard_between_the_text_encoders_layers(home, tmp_path):
    class Impatient(Quiet):
        asked, told = 0, ()

        def check(self):
            self.asked += 1
            if self.asked == 3:
                raise StopRequested("stop")

        def progress(self, phase, done, total=None, **more):
            self.told += ((phase, done, total),)

    report, checkpoint = Impatient(), open_tiny(home.model("ltx2.3"))
    section = DataSection(dataset=str(tmp_path), cache_dir=str(tmp_path / "cache"))
    with pytest.raises(StopRequested):
        Preprocessor(section, Target.of(checkpoint), Counting(checkpoint), report).encode_texts(["one", "two"])
    assert report.told == (("encode text", 1, 2),), "half of the two layers"


def test_silence_that_only_decoding_shows_is_told(home, tmp_path, clips):
    model, cache, report = home.model("ltx2.3"), tmp_path / "cache", Quiet()
    media.encode(clips / "clip1.mp4", media.plain(17, width=64, height=64), 24, sound=media.tone(17 / 24, 48000, (0.0, 0.0)))
    encode(model, clips, cache, report=report)
    assert report.warnings == [("audio.silent", "1 of the clips encoded now: The sound is all silence: it teaches silence.")]


def test_a_sound_that_cannot_be_encoded_costs_its_clip_only(home, tmp_path, clips):
    class Deaf(Counting):
        def encode_audio(self, waveform, rate):
            if self.counts["audio"] == 1:
                self.counts["audio"] += 1
                raise DataError("audio.too_short", "A sound of 300 samples at 16000 Hz is too short to encode.")
            return super().encode_audio(waveform, rate)

    model, cache = home.model("ltx2.3"), tmp_path / "cache"
    encode(model, clips, cache, codec=Deaf(open_tiny(model)))
    manifest = Manifest.read(cache)
    assert len(manifest.entries) == 2 and [s["findings"][0]["code"] for s in manifest.skipped] == ["audio.too_short"]


class Spoiling(Counting):
    """Gives no numbers for the first pictures, the first sound, and one caption."""

    def encode_video(self, frames):
        return super().encode_video(frames) * (float("nan") if self.counts["video"] == 1 else 1.0)

    def encode_audio(self, waveform, rate):
        return super().encode_audio(waveform, rate) * (float("inf") if self.counts["audio"] == 1 else 1.0)

    def encode_text(self, captions):
        return [replace(f, video=f.video * (float("nan") if c == "broken" else 1.0)) for c, f in zip(captions, super().encode_text(captions))]


def test_what_is_no_number_is_never_cached(home, tmp_path, clips):
    model, cache = home.model("ltx2.3"), tmp_path / "cache"
    report = Quiet()
    encode(model, clips, cache, report=report, codec=Spoiling(open_tiny(model)))
    manifest = Manifest.read(cache)
    assert len(manifest.entries) == 1 and [s["findings"][0]["code"] for s in manifest.skipped] == ["latents.values"] * 2
    with pytest.raises(DataError, match="no numbers for 'broken'"):
        encode(model, clips, cache, codec=Spoiling(open_tiny(model)), texts=["broken"])


@pytest.mark.skipif(sys.platform != "linux", reason="other systems have no such names")
def test_a_name_that_is_no_utf8_goes_all_the_way(home, tmp_path, clips):
    odd = Path(os.fsdecode(os.fsencode(clips) + b"/clip\xff\n.mp4"))
    os.replace(clips / "clip1.mp4", odd)
    encode(home.model("ltx2.3"), clips, tmp_path / "cache", captions={"policy": "file_name"})
    entries = Manifest.read(tmp_path / "cache").entries
    assert odd.name in [e.id for e in entries] and "clip\ufffd" in [e.caption for e in entries]
    log = EventLog(tmp_path / "events.jsonl")
    log.write(ProgressEvent(phase="encode", done=1, message=odd.name))
    log.close()
    assert read_events(tmp_path / "events.jsonl").events[0].message == odd.name


def test_a_changed_model_encodes_what_it_must(home, tmp_path, clips):
    """Of another checkpoint only the parts that encode count: a new transformer alone changes nothing."""
    cache = tmp_path / "cache"
    assert encode(home.model("ltx2.5"), clips, cache) == (3, 3, 3)
    other = write_tiny(tmp_path / "other", "ltx2.5", seed=5)
    mixed = {**home.model("ltx2.5"), "model": other["model"]}
    assert encode(mixed, clips, cache) == (0, 0, 0)
    assert encode({**mixed, "video_vae": other["video_vae"]}, clips, cache) == (3, 0, 0)
    assert encode({**mixed, "audio_vae": other["audio_vae"]}, clips, cache) == (0, 3, 0)
    assert encode({**mixed, "text_encoder": other["text_encoder"]}, clips, cache) == (0, 0, 3)


class Stopping(Quiet):
    """Asks to stop at the n-th safe point."""

    def __init__(self, after):
        super().__init__()
        self.left = after

    def check(self):
        self.left -= 1
        if self.left < 0:
            raise StopRequested


def test_stopped_anywhere_ends_with_the_same_bytes(home, tmp_path):
    table = draw_everything(tmp_path / "data", 3)
    model = home.model("ltx2.3")
    encode(model, table, tmp_path / "whole")
    whole = content(tmp_path / "whole")
    for after in range(8):
        try:
            encode(model, table, tmp_path / "broken", report=Stopping(after))
        except StopRequested:
            continue
    encode(model, table, tmp_path / "broken")
    assert content(tmp_path / "broken") == whole


def _encode_in_child(model, table, cache, ranks=None):
    torch.set_num_threads(1)
    if ranks is not None:
        os.environ.update(ranks)
    Counting.delay = 0.02
    from ltx_train.training.parallel import Parallel

    checkpoint = open_tiny(model)
    data = DataSection(dataset=str(table), cache_dir=str(cache), resolution_buckets=BUCKET)
    parallel = Parallel.start(device="cpu")
    preprocess(data, Target.of(checkpoint), Counting(checkpoint), Quiet(), parallel=parallel)
    parallel.close()


def test_killed_anywhere_ends_with_the_same_bytes(home, tmp_path):
    """kill -9 at eight random moments: whole entries only, nothing left over, the same files as without a kill."""
    table, draw = draw_everything(tmp_path / "data", 4), random.Random(5)
    model = home.model("ltx2.3")
    encode(model, table, tmp_path / "whole")
    sizes = []
    for _ in range(8):
        child = FORKS.Process(target=_encode_in_child, args=(model, table, tmp_path / "broken"))
        child.start()
        have = len(sizes) and sizes[-1]
        deadline = time.monotonic() + 30
        while child.is_alive() and _entries(tmp_path / "broken") <= have and time.monotonic() < deadline:
            time.sleep(0.002)
        child.join(draw.uniform(0, 0.05))
        child.kill()
        child.join()
        sizes.append(_entries(tmp_path / "broken"))
    assert sizes == sorted(sizes) and sizes[0] < _entries(tmp_path / "whole")
    encode(model, table, tmp_path / "broken")
    assert content(tmp_path / "broken") == content(tmp_path / "whole")


def _entries(root):
    return sum(1 for kind in ("video", "audio", "mask", "text") for _ in (root / kind).rglob("*.safetensors"))


def test_two_ranks_fill_the_same_cache(home, tmp_path):
    """Ranks share the work; every entry is there, with the bytes that one rank writes."""
    from ltx_train.runs.command import free_port

    table = draw_everything(tmp_path / "data", 4)
    encode(home.model("ltx2.3"), table, tmp_path / "whole")
    common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    ranks = [
        FORKS.Process(target=_encode_in_child, args=(home.model("ltx2.3"), table, tmp_path / "shared", {**common, "RANK": str(r), "LOCAL_RANK": str(r)})) for r in range(2)
    ]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join(120)
    assert [r.exitcode for r in ranks] == [0, 0]
    assert content(tmp_path / "shared") == content(tmp_path / "whole")


def test_a_second_disk_full_keeps_whole_entries(home, tmp_path, monkeypatch, clips):
    from ltx_train.data import cache as room
    from ltx_train.errors import DataError

    model, written = home.model("ltx2.3"), []
    original = room.write_tensors

    def full(file, tensors, *rest):
        written.append(1)
        if len(written) == 5:
            file.write(b"half")
            raise OSError(28, "No space left on device")
        return original(file, tensors, *rest)

    monkeypatch.setattr(room, "write_tensors", full)
    with pytest.raises(DataError) as caught:
        encode(model, clips, tmp_path / "cache")
    monkeypatch.undo()
    assert caught.value.code == "cache.disk_full" and _entries(tmp_path / "cache") == 4
    encode(model, clips, tmp_path / "cache")
    shutil.rmtree(tmp_path / "whole", ignore_errors=True)
    encode(model, clips, tmp_path / "whole")
    assert content(tmp_path / "cache") == content(tmp_path / "whole")
