"""Preprocessing killed at random moments and on a full disk ends with the bytes of an undisturbed one, and encodes nothing twice but the batch in hand.

The compact form runs always; ``LTX_TRAIN_LONG=1`` runs 200 clips (pieces of the real films among them) and 20 kills.
"""

import hashlib
import multiprocessing
import os
import random
import shutil
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest
import torch

from ltx_train.data.dataset import DataSection
from ltx_train.data.manifest import Manifest
from ltx_train.encode import Target
from ltx_train.errors import DataError
from ltx_train.geometry import AudioGrid, VideoFactors
from ltx_train.preprocess import preprocess
from ltx_train.text import TextFeatures
from ltx_train.tiny import media
from tests.end_to_end.corridor import Quiet

TARGET = Target("ltx2.3", VideoFactors(), AudioGrid(1))
BATCH = 3
LONG = os.environ.get("LTX_TRAIN_LONG") == "1"


class Noting:
    """A codec that makes latents by pooling and notes in a file what it is given, before it works for a moment."""

    kind, cut = "engine", {}

    def __init__(self, log, delay=0.0, on_encode=None):
        self.log, self.delay, self.on_encode, self.calls = log, delay, on_encode, 0

    def note(self, kind, values):
        line = f"{kind} {hashlib.sha256(values).hexdigest()[:16]}\n"
        handle = os.open(self.log, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        os.write(handle, line.encode())
        os.close(handle)

    def work(self):
        self.calls += 1
        if self.on_encode:
            self.on_encode(self.calls)
        time.sleep(self.delay)

    def fingerprint(self, component):
        return f"noting {component}"

    def encode_video(self, frames):
        for clip in frames:
            self.note("video", clip.numpy().tobytes())
        self.work()
        pooled = torch.nn.functional.avg_pool2d(frames.flatten(0, 1).permute(0, 3, 1, 2).float() / 255, 32).unflatten(0, frames.shape[:2])
        means = torch.stack([pooled[:, 0], *(p.mean(1) for p in pooled[:, 1:].split(8, dim=1))], dim=2)
        return means.repeat(1, 43, 1, 1, 1)[:, :128]

    def encode_audio(self, waveform, sample_rate):
        self.note("audio", waveform.numpy().tobytes())
        self.work()
        steps = max(1, round(waveform.shape[-1] / sample_rate * 25))
        return torch.nn.functional.adaptive_avg_pool1d(waveform.abs(), steps).mean(1)[:, None, :, None].repeat(1, 8, 1, 16)

    def encode_text(self, captions):
        for caption in captions:
            self.note("text", caption.encode())
        self.work()
        return [TextFeatures("v1", torch.tensor([[float(b) for b in c.encode()[:8].ljust(8)]])) for c in captions]

    def release(self, component=None):
        pass


def draw(folder, count, film=None):
    """``count`` different clips with sound and a caption each; with ``film`` (name -> path) a fifth of them pieces of real films."""
    real = count // 5 if film else 0
    for n in range(count - real):
        sound = media.tone(9 / 24, 48000, (300.0 + 7 * n, 900.0 - 3 * n)) if n % 2 == 0 else None
        media.encode(folder / f"clip{n:03d}.mp4", (media.counter_frame(n + k, 64, 64) for k in range(9)), 24, sound=sound)
        (folder / f"clip{n:03d}.txt").write_text(f"clip number {n}", encoding="utf-8")
    if film:
        from ltx_train.data.probe import probe
        from ltx_train.data.scenes import Scene, write_scene

        for n in range(real):
            name = ("earth", "bunny")[n % 2]
            start = n // 2 * (0.5 if name == "earth" else 0.2)
            write_scene(probe(film(name)), Scene(start, start + 0.5), folder / f"real{n:03d}.mp4")
            (folder / f"real{n:03d}.txt").write_text(f"piece {n} of {name}", encoding="utf-8")
    return folder


def section(dataset, cache):
    return DataSection(dataset=str(dataset), resolution_buckets="64x64x9", cache_dir=str(cache), preprocess_batch_size=BATCH, preprocess_workers=2)


def encode(dataset, cache, log, delay=0.0, on_encode=None):
    return preprocess(section(dataset, cache), TARGET, Noting(log, delay, on_encode), Quiet(), texts=["", "a prompt"])


def contents(cache):
    """Every file of a cache with its bytes' digest, but for half-written ones of killed processes."""
    return {p.relative_to(cache).as_posix(): hashlib.sha256(p.read_bytes()).hexdigest() for p in Path(cache).rglob("*") if p.is_file() and p.parent.name != "tmp"}


def noted(log):
    return Path(log).read_text().splitlines() if Path(log).is_file() else []


def child(dataset, cache, log, delay):
    torch.set_num_threads(1)
    encode(dataset, cache, log, delay)
    os._exit(0)


def begun(log):
    """Notes of pictures and sounds: captions are one batch."""
    return [line for line in noted(log) if not line.startswith("text")]


def killed_at_random(dataset, folder, kills, total, seed=0, delay=0.02):
    """Kill preprocessing ``kills`` times, each when a random number of further encodings were begun and a moment later; then let it end.

    total: pictures and sounds there are. Returns the notes of all encodings; after every kill each entry there is opened.
    """
    from ltx_train.data.cache import Cache

    random_ = random.Random(seed)
    forks = multiprocessing.get_context("forkserver")
    forks.set_forkserver_preload(["torch", "ltx_train.preprocess", "ltx_train.data.media", "tests.end_to_end.test_interrupted_preprocessing"])
    cache, log = folder / "killed", folder / "killed.log"
    done, last, share = 0, 0, 2.0 * total / (kills + 1)
    for number in range(kills):
        process = forks.Process(target=child, args=(dataset, cache, log, delay))
        process.start()
        # the first at the captions, the others spread over pictures and sounds
        wanted, deadline = (1 if number == 0 else last + random_.random() * share), time.monotonic() + 240
        while process.is_alive() and len(noted(log) if number == 0 else begun(log)) < wanted and time.monotonic() < deadline:
            time.sleep(0.002)
        time.sleep(random_.random() * 2 * delay)
        done += process.is_alive()
        process.kill()  # SIGKILL; one that has just ended by itself is left
        process.join()
        last = len(begun(log))
        entries = Cache(cache)
        for path in cache.rglob("*.safetensors") if cache.exists() else ():
            entries.get(f"{path.relative_to(cache).parts[0]}-{path.stem}")
    assert done >= kills - 1, "nearly every kill came while it worked"
    process = forks.Process(target=child, args=(dataset, cache, log, 0.0))
    process.start()
    process.join(300)
    assert process.exitcode == 0
    return noted(log)


def again(notes, whole, kind):
    """How many encodings of a kind are more than an undisturbed run makes (real films have pieces that are alike)."""
    return sum(n for line, n in (Counter(notes) - Counter(whole)).items() if line.startswith(kind))


def assert_unharmed_by_kills(dataset, folder, kills):
    encode(dataset, folder / "whole", folder / "whole.log")
    whole = noted(folder / "whole.log")
    clips = len(list(dataset.glob("*.mp4")))
    assert [sum(line.startswith(kind) for line in whole) for kind in ("text", "video")] == [clips + 2, clips], "an undisturbed run encodes everything once"
    notes = killed_at_random(dataset, folder, kills, len(begun(folder / "whole.log")))
    assert set(notes) == set(whole)
    assert contents(folder / "killed") == contents(folder / "whole")
    assert list((folder / "killed" / "tmp").glob("*")) == [], "what killed processes left half written is removed"
    repeated = {kind: again(notes, whole, kind) for kind in ("text", "video", "audio")}
    assert repeated["video"] + repeated["audio"] <= kills * BATCH and repeated["audio"] <= kills
    assert repeated["text"] <= sum(line.startswith("text") for line in whole), "captions are one batch here, and one kill came at them"
    before = len(notes)
    encode(dataset, folder / "killed", folder / "killed.log")
    assert len(noted(folder / "killed.log")) == before, "another run encodes nothing"
    return repeated


def test_killed_preprocessing_ends_as_an_undisturbed_one(tmp_path):
    assert_unharmed_by_kills(draw(tmp_path / "clips", 12), tmp_path, 3)


@pytest.mark.skipif(not LONG, reason="LTX_TRAIN_LONG=1 runs 200 clips and 20 kills")
def test_two_hundred_real_and_synthetic_clips_killed_twenty_times(tmp_path, request, record_property):
    from tests.end_to_end.test_real_clips import fetch

    folder = request.config.cache.mkdir("ltx_train_media")
    repeated = assert_unharmed_by_kills(draw(tmp_path / "clips", 200, lambda name: fetch(folder, name)), tmp_path, 20)
    for kind, count in repeated.items():
        record_property(f"{kind}_encoded_again", count)
    print(f"200 clips, 20 kills: encoded again {repeated}")


def fill_the_disk(folder):
    """Leave no byte free."""
    with open(folder / "filler", "wb", buffering=0) as file:
        try:
            while True:
                file.write(b"\0" * 4096)
        except OSError:
            pass


def on_a_small_disk(dataset, folder, clips):
    """Runs inside a mount namespace of its own, where ``folder``/disk is a tmpfs of a few MB: fills up in mid work, is freed, goes on."""
    from ltx_train.data.cache import Cache

    disk, log = folder / "disk", folder / "full.log"

    def at(call):
        if call == clips // BATCH // 2:
            fill_the_disk(disk)

    try:
        encode(dataset, disk / "cache", log, on_encode=at)
    except DataError as error:
        assert error.code == "cache.disk_full" and "free some space" in error.hint, error
    else:
        raise AssertionError("the disk was not full")
    found = list((disk / "cache").rglob("*.safetensors"))
    assert found and not (disk / "cache" / "index.json").exists()
    for path in found:
        Cache(disk / "cache").get(f"{path.relative_to(disk / 'cache').parts[0]}-{path.stem}")
    (disk / "filler").unlink()
    encode(dataset, disk / "cache", log)
    shutil.copytree(disk / "cache", folder / "full", ignore=shutil.ignore_patterns("tmp"))


def test_a_full_disk_leaves_whole_entries_and_goes_on(tmp_path):
    small = ["unshare", "-rm"]
    if shutil.which("unshare") is None or subprocess.run([*small, "mount", "-t", "tmpfs", "none", str(tmp_path)], capture_output=True).returncode:
        pytest.skip("no small disk can be made here: that needs unshare and mounts in a user namespace")
    clips = 200 if LONG else 15
    dataset = draw(tmp_path / "clips", clips)
    encode(dataset, tmp_path / "whole", tmp_path / "whole.log")
    (tmp_path / "disk").mkdir()
    code = f"from pathlib import Path; from {__name__} import on_a_small_disk; on_a_small_disk(Path({str(dataset)!r}), Path({str(tmp_path)!r}), {clips})"
    script = f"mount -t tmpfs -o size={max(4, clips // 10)}m none '{tmp_path}/disk' && exec '{sys.executable}' -c \"$CODE\""
    root = Path(__file__).parents[2]
    done = subprocess.run([*small, "sh", "-c", script], capture_output=True, text=True, cwd=root, env={**os.environ, "CODE": code.replace(__name__, "tests.end_to_end.test_interrupted_preprocessing"), "PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr[-2000:]
    assert contents(tmp_path / "full") == contents(tmp_path / "whole")
    notes = noted(tmp_path / "full.log")
    repeated = [again(notes, noted(tmp_path / "whole.log"), kind) for kind in ("video", "audio", "text")]
    assert repeated[0] <= BATCH and repeated[1] <= 1 and repeated[2] == 0
    assert len(Manifest.read(tmp_path / "full").entries) == clips
