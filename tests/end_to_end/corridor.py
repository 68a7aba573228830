"""Tiny models, datasets and caches for the end-to-end tests, and jobs carried out here or in forked children."""

import gc
import json
import multiprocessing
import os
import time
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from ltx_train import trainer
from ltx_train.config import TrainConfig
from ltx_train.data.batches import Batches
from ltx_train.data.dataset import DataSection
from ltx_train.encode import Target
from ltx_train.models.codec import EngineCodec
from ltx_train.models.families import FAMILIES
from ltx_train.preprocess import preprocess
from ltx_train.runs.command import TOKEN_VARIABLE, free_port
from ltx_train.runs.events import LoraEvent, StepEvent, WarningEvent
from ltx_train.runs.live import LiveRun
from ltx_train.runs.run_dir import RunDir
from ltx_train.tiny import media
from ltx_train.tiny.checkpoints import open_tiny, write_tiny
from ltx_train.training.snapshots import newest_valid

TINY_FAMILIES = ("ltxv-2b", "ltx2", "ltx2.3", "ltx2.5")
BUCKET = "64x64x17"


class CheapCodec(EngineCodec):
    """The tiny model's text encoder; pictures and sounds become latents by pooling and a fixed mixing, in no time."""

    def encode_video(self, frames):
        factors, (batch, count, height, width, _) = self.checkpoint.video_factors, frames.shape
        pooled = torch.nn.functional.avg_pool2d(frames.reshape(-1, height, width, 3).permute(0, 3, 1, 2).float() / 127.5 - 1, factors.height)
        pooled = pooled.reshape(batch, count, 3, *pooled.shape[-2:])
        groups = [pooled[:, :1], *(pooled[:, 1:].split(factors.time, dim=1) if count > 1 else ())]
        means = torch.stack([g.mean(1) for g in groups], dim=2)
        mix = torch.randn(128, 3, generator=torch.Generator().manual_seed(0))
        return torch.einsum("ck,bkfhw->bcfhw", mix, means)

    def encode_audio(self, waveform, sample_rate):
        steps = max(1, round(waveform.shape[-1] / sample_rate * 25))
        level = torch.nn.functional.adaptive_avg_pool1d(waveform.abs(), steps) * 4
        mix = torch.randn(2, 8, 16, generator=torch.Generator().manual_seed(1))
        return torch.einsum("bkt,kcm->bctm", level, mix)


class Quiet:
    """A reporter that keeps the warnings."""

    def __init__(self):
        self.warnings = []

    def phase(self, name, message=""):
        return nullcontext()

    def progress(self, *args, **more):
        pass

    def warn(self, code, message, hint=""):
        self.warnings.append((code, message))

    def check(self):
        pass


def draw_everything(folder, clips=2):
    """Clips with sound and every role: reference video and sound, picture and sound masks; the table that lists them."""
    media.dataset(folder, clips, frames=17, width=64, height=64)
    rows = []
    for n in range(clips):
        media.counter_clip(folder / "references" / f"r{n}.mp4", 17, width=64, height=64, first=40 + n)
        media.write_pcm(_made(folder / "sounds" / f"s{n}.wav"), media.tone(0.75, 16000, (330.0, 550.0)), 16000)
        _mask_picture(_made(folder / "masks" / f"m{n}.png"), n)
        envelope = media.tone(0.75, 16000, (200.0, 200.0))
        envelope[:, : envelope.shape[1] // 2] = 0  # the second half of the sound is kept
        media.write_pcm(_made(folder / "sound_masks" / f"m{n}.wav"), envelope, 16000)
        caption = (folder / f"clip{n}.txt").read_text(encoding="utf-8")
        rows.append({
            "video": f"clip{n}.mp4", "caption": caption, "reference_video": f"references/r{n}.mp4", "reference_audio": f"sounds/s{n}.wav",
            "video_mask": f"masks/m{n}.png", "audio_mask": f"sound_masks/m{n}.wav",
        })  # fmt: skip
    table = folder / "clips.jsonl"
    table.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return table


def _made(path):
    path.parent.mkdir(parents=True, exist_ok=True)
    return path


def _mask_picture(path, n):
    from PIL import Image

    pixels = np.zeros((64, 64), np.uint8)
    pixels[:, 32:] = 255  # the right half is given
    Image.fromarray(pixels if n % 2 == 0 else pixels[:, ::-1].copy()).save(path)


class Home:
    """Models, datasets and caches of one test session, each made when first asked for."""

    def __init__(self, root):
        self.root, self._models, self._caches = Path(root), {}, {}

    def model(self, family):
        """The files of the family's tiny model."""
        if family not in self._models:
            self._models[family] = write_tiny(self.root / "models" / family, family)
        return self._models[family]

    @cached_property
    def table(self):
        """A table of two clips with sound and every role."""
        return draw_everything(self.root / "everything")

    @cached_property
    def silent(self):
        """A folder of two clips without sound."""
        return media.dataset(self.root / "silent", 2, frames=17, width=64, height=64, sound=False)

    @cached_property
    def clips(self):
        """A folder of five clips with sound."""
        return media.dataset(self.root / "clips", 5, frames=17, width=64, height=64)

    @cached_property
    def stills(self):
        """A folder of three pictures."""
        from PIL import Image

        for n in range(3):
            Image.fromarray(media.counter_frame(n, 64, 64)).save(_made(self.root / "stills" / f"p{n}.png"))
            (self.root / "stills" / f"p{n}.txt").write_text(f"picture {n}", encoding="utf-8")
        return self.root / "stills"

    def cache(self, family, source=None, buckets=BUCKET, **data):
        """The cache of a dataset for a family, made with :class:`CheapCodec` (every stream and role)."""
        source = source or self.table
        key = (family, str(source), buckets, json.dumps(data, sort_keys=True))
        if key not in self._caches:
            checkpoint = open_tiny(self.model(family))
            folder = self.root / "caches" / f"{len(self._caches)}"
            section = DataSection(dataset=str(source), resolution_buckets=buckets, cache_dir=str(folder), **data)
            codec = CheapCodec(checkpoint, device="cpu", dtype=torch.float32)
            self._caches[key] = preprocess(section, Target.of(checkpoint), codec, Quiet(), texts=[""], with_audio=FAMILIES[family].audio)
        return self._caches[key]

    def job(self, out, family="ltx2.3", **sections):
        """A training job on a tiny model as plain data; sections given are merged into the defaults."""
        files = self.model(family)
        names = {"model_path": "model", "text_encoder_path": "text_encoder", "video_vae_path": "video_vae", "audio_vae_path": "audio_vae", "tokenizer_path": "tokenizer"}
        data = {
            "model": {field: str(files[key]) for field, key in names.items() if key in files},
            "lora": {"rank": 2, "alpha": 4},
            "training_strategy": {"name": "flexible", "video": {"is_generated": True}, "audio": {"is_generated": True}},
            "optimization": {"learning_rate": 1e-2, "steps": 2, "batch_size": 2},
            "acceleration": {"device": "cpu", "mixed_precision_mode": "no"},
            "checkpoints": {"precision": "float32"},
            "logging": {"tensorboard": False, "csv": False},
            "output_dir": str(out),
        }
        for name, value in sections.items():
            data[name] = {**data.get(name, {}), **value} if isinstance(value, dict) and name != "training_strategy" else value
        if "data" not in data:
            data["data"] = {"preprocessed_data_root": str(self.cache(family))}
        return data

    def config(self, out, family="ltx2.3", **sections):
        return TrainConfig.parse(self.job(out, family, **sections))


@dataclass(frozen=True)
class Done:
    """What a run left behind."""

    run: RunDir

    def events(self, kind):
        return [e for e in self.run.events(0).events if isinstance(e, kind)]

    @property
    def steps(self):
        """The last step event of every step, in order."""
        return {e.step: e for e in self.events(StepEvent)}

    @property
    def losses(self):
        return [e.loss for _, e in sorted(self.steps.items())]

    @property
    def warnings(self):
        return [e.code for e in self.events(WarningEvent)]

    @property
    def lora(self):
        return self.run.path / self.events(LoraEvent)[-1].path

    @property
    def snapshot(self):
        path = newest_valid(self.run.path)
        return {group.stem: {n: t.clone() for n, t in load_file(group).items()} for group in path.glob("*.safetensors")}

    @property
    def modules(self):
        """Module names in the LoRA file."""
        with safe_open(str(self.lora), "pt") as file:
            return {k.removeprefix("diffusion_model.").removesuffix(".lora_A.weight") for k in file.keys() if k.endswith("lora_A.weight")}


def train(config, watch=None):
    """Carry out a training in this process. watch(live) -> context manager around it, to interfere."""
    run = RunDir.create(Path(config.output_dir))
    config.save(run.job_path("train"))
    with LiveRun(run) as live, watch(live) if watch else nullcontext():
        trainer.run(config, live)
    return Done(run)


@contextmanager
def at_step(live, step, act):
    """Call ``act()`` after the event of an optimizer step was written."""
    emit = live.emit

    def wrapped(event):
        emit(event)
        if isinstance(event, StepEvent) and event.step == step:
            act()

    live.emit = wrapped
    yield


class Killed(BaseException):
    """Stands for a kill -9: nothing may catch it."""


def same(one, other):
    """Whether two snapshots (groups of tensors) are equal bit for bit."""
    assert one.keys() == other.keys(), (one.keys(), other.keys())
    for group in one:
        assert one[group].keys() == other[group].keys(), group
        for name, value in one[group].items():
            theirs = other[group][name]
            assert value.dtype == theirs.dtype and torch.equal(value, theirs), f"{group} {name} differs by {(value.double() - theirs.double()).abs().max()}"
    return True


def furthest(one, other, group="weights"):
    """The largest difference between two snapshots' tensors of a group."""
    assert one[group].keys() == other[group].keys()
    return max(float((v.double() - other[group][n].double()).abs().max()) for n, v in one[group].items())


# -- children by fork: the engine is imported once, so a child starts in milliseconds ---------------------------------

FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(
    [
        "torch", "ltx_train.trainer", "ltx_train.worker", "ltx_train.validation", "ltx_train.models.connectors", "tests.end_to_end.corridor",
        "peft", "bitsandbytes.optim", "diffusers.models.autoencoders.autoencoder_kl_ltx2",
    ]
)  # fmt: skip


ORDER = "LTX_TEST_ORDER"
"""A child with this variable notes in that file which samples it trained on."""


@contextmanager
def noted_order(path):
    """Note every micro-batch's samples in a file: step, micro-step, rank, ids; one line each, whole whatever happens."""
    original = Batches.get

    def get(self, step, micro=0):
        batch = original(self, step, micro)
        line = json.dumps([step, micro, self.rank, self.world, batch.ids]) + "\n"
        handle = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        os.write(handle, line.encode())
        os.close(handle)
        return batch

    Batches.get = get
    try:
        yield
    finally:
        Batches.get = original


def order(path):
    """The samples of every step in the order of their places in the global batch; fails where a step was given others when it came again."""
    seen = {}
    for line in Path(path).read_text().splitlines():
        step, micro, rank, world, ids = json.loads(line)
        assert seen.setdefault((step, micro * world + rank), ids) == ids, "a step that came again was given other samples"
    steps = {}
    for (step, _), ids in sorted(seen.items()):
        steps.setdefault(step, []).extend(ids)
    return steps


def _work(run, environment):
    os.environ.update(environment)
    torch.set_num_threads(1)
    from ltx_train.worker import main

    gc.freeze()  # what the fork server has loaded stays: no collection needs to look through it
    with open(Path(run) / "train.log", "ab", buffering=0) as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    with noted_order(environment[ORDER]) if ORDER in environment else nullcontext():
        os._exit(main([str(run), "train"]))


def fork(config, ranks=1, **environment):
    """Start the worker's own entry on a training, in forked processes; the list of them, rank 0 first."""
    run = RunDir.create(Path(config.output_dir))
    config.save(run.job_path("train"))
    common = {"OMP_NUM_THREADS": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks)}
    started = [FORKS.Process(target=_work, args=(str(run.path), {**common, "RANK": str(r), "LOCAL_RANK": str(r), **environment} if ranks > 1 else environment)) for r in range(ranks)]
    for process in started:
        process.start()
    return started


class Forked:
    """A child of the fork server where the launcher expects a Popen; put it in ``launch.spawn``'s place."""

    def __init__(self, run, launch, token):
        assert launch.num_processes == 1 and launch.kind == "train", launch
        self.process = FORKS.Process(target=_work, args=(str(run.path), {TOKEN_VARIABLE: token, "OMP_NUM_THREADS": "1"}))
        self.process.start()
        self.pid = self.process.pid

    def poll(self):
        return self.process.exitcode

    def wait(self, timeout=None):
        self.process.join(timeout)
        return self.process.exitcode


def finish(processes, config, timeout=120):
    """Wait for forked ranks; what they left. Fails with the log when one did not end well."""
    run = RunDir(Path(config.output_dir))
    deadline = time.monotonic() + timeout
    for process in processes:
        process.join(max(0.1, deadline - time.monotonic()))
    codes = [p.exitcode for p in processes]
    assert codes == [0] * len(codes), f"{codes}\n" + "\n".join(run.tail(40))
    return Done(run)
