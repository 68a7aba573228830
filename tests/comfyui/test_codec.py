"""The engine's codec against ComfyUI's VAE and CLIP behind our encoding node: the same clip and caption, the same cache entries.

All in float32, the text encoder's file too: of a bfloat16 file ComfyUI 0.33 adds 1 to the norms' weights in bfloat16, Hugging Face's
Gemma and the engine in float32, which makes text features differ by 0.4 % (test_modes.py has that). Video latents and text features of
all families agree within 1e-3 (measured: video 2.5e-6; T5 7.3e-6, with ComfyUI's own tokenizer; Gemma 3 3.3e-6; Gemma 4 5.6e-6), an empty
caption, one with spaces, brackets and backslashes, and one that is longer than the encoder reads among them. Sound does not go the same
way: ComfyUI takes it at 44.1 kHz and brings it to the VAE's 16 kHz by itself, the engine resamples once. Its latents agree with a
signal-to-noise ratio of at least 15 dB (measured: 18 to 19.5).
"""

import json
import os
import subprocess
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from ltx_train.config import PreprocessJob
from ltx_train.data.cache import Cache
from ltx_train.data.manifest import Manifest
from ltx_train.models.codec import EngineCodec
from ltx_train.preprocess import run
from ltx_train.runs.live import LiveRun
from ltx_train.runs.run_dir import RunDir
from ltx_train.tiny.checkpoints import open_tiny, write_tiny
from ltx_train.tiny.media import dataset
from ltx_train.tiny.text_encoders import GEMMA3, GEMMA4, TEXT_WIDTH
from tests.comfyui.host import COMFYUI, PYTHON, ROOT

WITHIN = 1e-3
SOUND_DB = 15.0
RATE, SECONDS = 48000, 0.8
BUCKET = "64x64x17"
CAPTIONS = ["a red ball rolls over the grass, birds sing", "sks", "", "  Ein (großer:1.3) Hund,\n\"bellt\" \\(laut\\) 犬 \n", "word " * 400]
FAMILIES = ("ltxv-2b", "ltx2", "ltx2.3", "ltx2.5")
# What ComfyUI's code has of the large text encoders, as the tiny ones have it (see test_pack). The vocabulary of T5 is the large one's:
# ComfyUI brings its tokenizer, and the engine is given that.
T5_SIZES = {"num_layers": 2, "d_model": TEXT_WIDTH, "d_ff": 32, "num_heads": 2, "d_kv": 8}
T5_VOCABULARY = 32128
GEMMA3_SIZES = {k: GEMMA3[k] for k in ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")}
GEMMA4_SIZES = {k: GEMMA4[k] for k in (*GEMMA3_SIZES, "head_dim", "global_head_dim", "num_global_key_value_heads")} | {
    "sliding_attention": [GEMMA4["sliding_window"] if kind == "sliding_attention" else False for kind in GEMMA4["layer_types"]],
    "vision_config": {"patch_size": 2, "pooling_kernel_size": 3, "model_patch_size": 6, "mm_embed_dim": TEXT_WIDTH, "mm_posemb_size": 8, "output_proj_dims": TEXT_WIDTH},
    "audio_config": {"output_proj_dims": 8},
}  # fmt: skip


def media():
    """A moving gradient of 17 frames and two chirping tones: nothing that a codec turns into a constant."""
    f, y, x = torch.meshgrid(torch.arange(17), torch.arange(64), torch.arange(64), indexing="ij")
    frames = torch.stack([(x * 3 + f * 5) % 256, (y * 2 + x) % 256, (f * 13 + y) % 256], -1).to(torch.uint8)
    t = torch.arange(int(RATE * SECONDS)) / RATE
    waveform = torch.stack([0.4 * torch.sin(6.2832 * (300 + 200 * t) * t), 0.3 * torch.sin(6.2832 * (700 - 150 * t) * t)])
    return frames, waveform


def in_float32(path):
    """The file's weights as float32, of the same values; a T5 with as many words as the large one has."""
    with safe_open(path, "pt") as file:
        metadata, tensors = file.metadata(), {name: file.get_tensor(name) for name in file.keys()}
    if "shared.weight" in tensors:
        words = torch.randn(T5_VOCABULARY, TEXT_WIDTH, generator=torch.Generator().manual_seed(5))
        tensors |= {"shared.weight": words, "encoder.embed_tokens.weight": words.clone()}
    save_file({name: t.float() if t.is_floating_point() else t for name, t in tensors.items()}, path, metadata)


class Work:
    """Tiny models of all families in one folder, the request to ComfyUI, and the engine's side of it."""

    def __init__(self, root):
        self.root = root
        self.paths = {family: write_tiny(root / "models", family, seed=3) for family in FAMILIES}
        for paths in self.paths.values():
            in_float32(paths["text_encoder"])
        self.paths["ltxv-2b"]["tokenizer"] = COMFYUI / "comfy" / "text_encoders" / "t5_tokenizer"
        (root / "output").mkdir()
        self.frames, self.waveform = media()
        save_file({"frames": self.frames, "waveform": self.waveform}, root / "media.safetensors")
        self.clips = root / "clips"
        dataset(self.clips, 2, frames=17, width=64, height=64, sound=True)

    def case(self, family):
        paths = self.paths[family]
        case = {"family": family, "model": paths["model"].name, "media": str(self.root / "media.safetensors"), "rate": RATE, "captions": CAPTIONS, "out": str(self.out(family)), "encoder": paths["text_encoder"].name}
        if family == "ltx2.5":
            case |= {"vae": paths["video_vae"].name, "audio_vae": paths["audio_vae"].name}
        if family == "ltx2.3":
            case |= {"clips": str(self.clips), "buckets": BUCKET}
        return case

    def out(self, family):
        return self.root / f"{family}.safetensors"

    def codec(self, family):
        return EngineCodec(open_tiny(self.paths[family]), device="cpu", dtype=torch.float32, tiling=None)


@pytest.fixture(scope="module")
def work(tmp_path_factory):
    """Every family encoded by ComfyUI, in one process."""
    work = Work(tmp_path_factory.mktemp("codec"))
    request = work.root / "request.json"
    request.write_text(json.dumps({"pack": str(ROOT), "base": str(work.root), "cases": [work.case(f) for f in FAMILIES]}), encoding="utf-8")
    env = {**os.environ, "LTX_TINY_GEMMA3": json.dumps(GEMMA3_SIZES), "LTX_TINY_ENCODERS": json.dumps({"t5": T5_SIZES, "gemma4": GEMMA4_SIZES})}
    done = subprocess.run([PYTHON, str(Path(__file__).with_name("codec_entries.py")), str(COMFYUI), str(request)], capture_output=True, text=True, timeout=1200, env=env)
    assert done.returncode == 0, done.stderr[-4000:]
    work.answers = dict(zip(FAMILIES, json.loads(done.stdout.splitlines()[-1])))
    return work


def apart(ours, theirs):
    """The largest difference, and the difference's share of the whole."""
    assert ours.shape == theirs.shape and ours.std() > 1e-3, "a tensor that says something"
    difference = theirs.float() - ours.float()
    return difference.abs().max().item(), (difference.norm() / ours.float().norm()).item()


def decibels(ours, theirs):
    return -20 * torch.log10(torch.tensor(apart(ours, theirs)[1])).item()


@pytest.mark.parametrize("family", FAMILIES)
def test_pictures_agree(work, family):
    largest, share = apart(work.codec(family).encode_video(work.frames[None]), load_file(work.out(family))["video"])
    print(f"{family} video: largest difference {largest:.1e}, share {share:.1e}")
    assert largest < WITHIN and share < WITHIN


@pytest.mark.parametrize("family", [f for f in FAMILIES if f != "ltxv-2b"])
def test_sound_agrees_but_for_the_resampling(work, family):
    ours, theirs = work.codec(family).encode_audio(work.waveform[None], RATE), load_file(work.out(family))["audio"]
    steps = min(ours.shape[2], theirs.shape[2])  # ComfyUI drops the last steps of a sound that is no whole number of them
    assert ours.shape[2] - steps <= 2
    found = decibels(ours[:, :, :steps], theirs[:, :, :steps])
    print(f"{family} audio: {found:.1f} dB over {steps} steps")
    assert found > SOUND_DB


@pytest.mark.parametrize("family", FAMILIES)
def test_captions_agree(work, family):
    theirs = load_file(work.out(family))
    for number, features in enumerate(work.codec(family).encode_text(CAPTIONS)):
        for stream in ("video", "audio"):
            ours = getattr(features, stream)
            if ours is None:
                continue
            largest, share = apart(ours, theirs[f"text.{number}.{stream}"])
            print(f"{family} text {stream}: largest difference {largest:.1e}, share {share:.1e}")
            assert largest < WITHIN and share < WITHIN


def entries(root, index):
    """clip id -> kind -> the tensors of its cache entry."""
    cache = Cache(Path(root))
    found = {}
    for entry in Manifest.read(Path(root) / index).entries:
        found[entry.id] = {kind: load_file(cache.path(getattr(entry, kind))) for kind in ("video", "audio", "text")}
    return found


def test_a_dataset_gives_the_same_cache_entries(work, tmp_path):
    """LTX-2.3, from files on disk to cache entries: clips decoded, cut, scaled, encoded, on either way."""
    paths = work.paths["ltx2.3"]
    model = {"model_path": str(paths["model"]), "text_encoder_path": str(paths["text_encoder"])}
    data = {"sources": [{"path": str(work.clips)}], "resolution_buckets": BUCKET, "cache_dir": str(tmp_path / "cache")}
    job = PreprocessJob.parse({"model": model, "data": data, "acceleration": {"device": "cpu"}, "output_dir": str(tmp_path / "job")})
    with LiveRun(RunDir.create(tmp_path / "job")) as live:
        run(job, live)
    ours, answer = entries(job.data.cache_root(), job.data.index), work.answers["ltx2.3"]
    assert answer["warnings"] == []
    theirs = entries(answer["root"], answer["index"])
    assert set(ours) == set(theirs) and len(ours) == 2
    for name, kinds in ours.items():
        for kind, tensors in kinds.items():
            assert set(tensors) == set(theirs[name][kind])
            for part, value in tensors.items():
                other = theirs[name][kind][part]
                if not value.is_floating_point() or value.std() < 1e-3:
                    assert torch.allclose(value, other, atol=WITHIN), (name, kind, part)
                elif kind == "audio":
                    print(f"{name} audio {part}: {decibels(value, other):.1f} dB")
                    assert decibels(value, other) > SOUND_DB
                else:
                    print(f"{name} {kind} {part}: largest difference {apart(value, other)[0]:.1e}")
                    assert max(apart(value, other)) < WITHIN, (name, kind, part)
