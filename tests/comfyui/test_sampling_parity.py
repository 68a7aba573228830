"""Our sample job against the stock nodes of a real ComfyUI: same checkpoint, LoRA, noise, steps and guidance, all families.

Needs COMFYUI_PATH (a checkout of 0.33 or newer) and COMFYUI_PYTHON (its interpreter, with torch and ComfyUI's packages).
"""

import json
import os
import subprocess
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from ltx_train.config import SampleJob
from ltx_train.lora.adapters import LoraSection, attach
from ltx_train.lora.files import write_lora
from ltx_train.lora.metadata import LoraMetadata
from ltx_train.models.blocks import TransformerBlock, add_gated, modulate, rms_norm, table_rows
from ltx_train.models.codec import EngineCodec
from ltx_train.models.transformer import load_transformer
from ltx_train.runs.live import LiveRun
from ltx_train.runs.run_dir import RunDir
from ltx_train.sample_job import run
from ltx_train.sampling.schedule import sigma_schedule
from ltx_train.tiny.checkpoints import open_tiny, write_tiny

COMFY, PYTHON = os.environ.get("COMFYUI_PATH"), os.environ.get("COMFYUI_PYTHON")
pytestmark = pytest.mark.skipif(not (COMFY and PYTHON), reason="needs a real ComfyUI: set COMFYUI_PATH and COMFYUI_PYTHON")

FAMILIES = ("ltxv-2b", "ltx2", "ltx2.3", "ltx2.5")
SIZE, RATE, STEPS, SEED, SOUND = (96, 64, 17), 24.0, 4, 11, 18
TOKENS = 3 * 2 * 3
POSITIVE, NEGATIVE = "a red ball rolls over the grass, birds sing", "blurry, noise"
LORAS = (("first", 0.8), ("second", -0.4))
# name -> the scales; cases with sound make both streams
CASES = {
    "cfg": {"cfg": 3.0},
    "stg": {"cfg": 3.0, "stg": 1.0},
    "sound": {"cfg": 3.0, "audio_cfg": 7.0},
    "sound_all": {"cfg": 3.0, "audio_cfg": 7.0, "stg": 1.0, "modality": 3.0},
}
WANTED = [(family, case) for family in FAMILIES for case in CASES if family != "ltxv-2b" or "sound" not in case]


def own_shift(family):
    """Whether the schedule is shifted for the sample's own tokens: LTX-Video's graphs give the scheduler the latent."""
    return family.startswith("ltxv")


class Work:
    """The files of one family: checkpoint, two LoRAs, text features; and where results go."""

    def __init__(self, root, family):
        self.root, self.family = root / family, family
        self.paths = write_tiny(self.root, family, seed=5)
        self.checkpoint = open_tiny(self.paths)
        self.text = self.root / "features.safetensors"
        self.loras = [self.lora(name, seed) for seed, (name, _) in enumerate(LORAS)]

    def lora(self, name, seed):
        """A LoRA on every attention and feed-forward with weights that matter (alpha other than rank)."""
        network = load_transformer(self.checkpoint, dtype=torch.float32, device="cpu")
        adapters = attach(network, LoraSection(rank=4, alpha=8, target_modules=["to_q", "to_k", "to_v", "to_out.0", "net.0.proj"]), seed=seed)
        generator = torch.Generator().manual_seed(seed)
        for key, parameter in adapters.named_parameters().items():
            if "lora_B" in key or key.endswith(".B"):
                parameter.data = 0.05 * torch.randn(parameter.shape, generator=generator)
        return write_lora(self.root / "loras" / f"{self.family}_{name}.safetensors", adapters, LoraMetadata(family=self.family), torch.float32)

    def write_text(self):
        """Features of both prompts by our text encoder, for both sides."""
        codec = EngineCodec(self.checkpoint, device="cpu", dtype=torch.float32)
        found = {"t5": torch.tensor(self.family.startswith("ltxv"))}
        for sign, feature in zip(("positive", "negative"), codec.encode_text([POSITIVE, NEGATIVE])):
            found[f"{sign}.video"] = feature.video[None].float().contiguous()
            if feature.audio is not None:
                found[f"{sign}.audio"] = feature.audio[None].float().contiguous()
        save_file(found, self.text)

    def out(self, case):
        return self.root / f"stock_{case}.safetensors"

    def request(self, case):
        """The case for ComfyUI's side."""
        scales = dict(CASES[case])
        split = self.family == "ltx2.5"
        return scales | {
            "own_shift": own_shift(self.family), "loader": "unet" if split else "checkpoint", "model": self.paths["model"].name, "vae": self.paths["video_vae"].name if split else None,
            "loras": [[path.name, strength] for path, (_, strength) in zip(self.loras, LORAS)], "text": str(self.text), "rate": RATE, "size": SIZE, "steps": STEPS,
            "seed": SEED, "stg_blocks": [1], "audio": SOUND if "audio_cfg" in scales else None, "decode": case == "cfg" and self.family != "ltxv-2b", "out": str(self.out(case)),
        }  # fmt: skip

    def ours(self, case, out):
        """Our sample job's latents by stream, from ComfyUI's own noise."""
        stock, scales = load_file(self.out(case)), CASES[case]
        out.mkdir(exist_ok=True)
        noise = out / "noise.safetensors"
        save_file({k.removeprefix("noise."): v for k, v in stock.items() if k.startswith("noise.")}, noise)
        model = {"model_path": "model", "text_encoder_path": "text_encoder", "video_vae_path": "video_vae", "audio_vae_path": "audio_vae", "tokenizer_path": "tokenizer"}
        job = SampleJob.parse(
            {
                "model": {name: str(self.paths[key]) for name, key in model.items() if key in self.paths},
                "loras": [{"path": str(path), "strength": strength} for path, (_, strength) in zip(self.loras, LORAS)],
                "acceleration": {"mixed_precision_mode": "no", "device": "cpu"},
                "output_dir": str(out),
                "validation": {
                    "samples": [{"prompt": POSITIVE, "noise": str(noise)}], "negative_prompt": NEGATIVE, "video_dims": SIZE, "frame_rate": RATE, "inference_steps": STEPS,
                    "video_cfg_scale": scales["cfg"], "audio_cfg_scale": scales.get("audio_cfg", 1.0), "video_stg_scale": scales.get("stg", 0.0),
                    "audio_stg_scale": scales.get("stg", 0.0), "stg_blocks": [1], "guidance_rescale": 0.0, "generate_audio": "audio_cfg" in scales,
                    "video_modality_guidance_scale": scales.get("modality", 1.0), "audio_modality_guidance_scale": scales.get("modality", 1.0), "decode": "later",
                },
            }
        )  # fmt: skip
        with LiveRun(RunDir.create(out)) as live:
            run(job, live)
        return {p.name.split(".")[-2]: load_file(p)["latent_tensor"] for p in (out / "samples").glob("*.latent")}


@pytest.fixture(scope="module")
def stock(tmp_path_factory):
    """Every case sampled by ComfyUI, in one process; by family."""
    root = tmp_path_factory.mktemp("parity")
    works = {family: Work(root, family) for family in FAMILIES}
    for work in works.values():
        work.write_text()
    folders = {kind: [str(w.root / kind) for w in works.values()] for kind in ("checkpoints", "diffusion_models", "vae", "loras")}
    request = root / "request.json"
    request.write_text(json.dumps({"folders": folders, "cases": [works[f].request(c) for f, c in WANTED]}), encoding="utf-8")
    script = Path(__file__).with_name("stock_sampler.py")
    done = subprocess.run([PYTHON, str(script), COMFY, str(request)], capture_output=True, text=True, timeout=1800)
    assert done.returncode == 0, done.stderr[-4000:]
    return works


def difference(ours, stock, stream):
    return (ours[stream] - load_file(stock)[f"latents.{stream}"]).abs().max().item()


@pytest.mark.parametrize("family, case", [w for w in WANTED if "sound" not in w[1] and w != ("ltxv-2b", "stg")])
def test_video_agrees(stock, tmp_path, family, case):
    """Checkpoint, two LoRAs at strengths, the scheduler's levels, Euler, CFG (and STG): one sample, two programs."""
    ours = stock[family].ours(case, tmp_path)
    result = load_file(stock[family].out(case))
    assert result["sigmas"].tolist() == pytest.approx(sigma_schedule(STEPS, tokens=TOKENS if own_shift(family) else 4096), abs=1e-6)
    print(f"{family} {case}: largest difference in latents {difference(ours, stock[family].out(case), 'video'):.1e}")
    assert set(ours) == {"video"} and difference(ours, stock[family].out(case), "video") < 1e-3
    assert (result["latents.video"] - result["noise.video"]).std() > 0.05


def test_the_cases_matter(stock):
    """LoRAs, guidance and STG each move the stock result by far more than the tolerance, so agreement says something."""
    latents = {f: {c: load_file(stock[f].out(c))["latents.video"] for g, c in WANTED if g == f} for f in FAMILIES}
    for family in ("ltx2", "ltx2.3", "ltx2.5"):
        assert (latents[family]["cfg"] - latents[family]["stg"]).abs().max() > 1e-2
        assert (latents[family]["sound"] - latents[family]["sound_all"]).abs().max() > 1e-2
    # ComfyUI 0.33 knows STG in its audio-video model only: on LTX-Video the node does nothing, ours does
    assert torch.equal(latents["ltxv-2b"]["cfg"], latents["ltxv-2b"]["stg"])


@pytest.mark.parametrize("family", [f for f in FAMILIES if f != "ltxv-2b"])  # LTX-Video's decoder draws noise of its own
def test_decoded_pictures_agree(stock, family):
    """Latents of the stock sampler through its VAE decode and ours: the same 8-bit pictures but for rounding."""
    work = stock[family]
    result = load_file(work.out("cfg"))
    ours = EngineCodec(work.checkpoint, device="cpu", dtype=torch.float32, tiling=None).decode_video(result["latents.video"])[0]
    apart = (ours.float() - result["pictures"] * 255).abs()
    assert ours.shape == result["pictures"].shape and ours.float().std() > 1
    assert apart.max() < 1.01


def video_first(block, video, audio, v, a, keep):
    """ComfyUI 0.33's order: the video-to-audio attention reads the video after the audio-to-video update."""
    eps = block.config.norm_eps
    v_table, a_table = block.scale_shift_table_a2v_ca_video, block.scale_shift_table_a2v_ca_audio
    v_rows, a_rows = (table_rows(t[:4], s.cross_rows, video.dtype) for t, s in ((v_table, v), (a_table, a)))
    v_gate, a_gate = (table_rows(t[4:], s.cross_gate_rows, video.dtype)[:, 0] for t, s in ((v_table, v), (a_table, a)))
    if keep.a2v_cross_attn is not None:
        v_gate = v_gate * keep.a2v_cross_attn.unsqueeze(-1)
    if keep.v2a_cross_attn is not None:
        a_gate = a_gate * keep.v2a_cross_attn.unsqueeze(-1)
    heard = rms_norm(audio, eps)
    query, source = modulate(rms_norm(video, eps), v_rows[:, 0], v_rows[:, 1], v.row_index), modulate(heard, a_rows[:, 0], a_rows[:, 1], a.row_index)
    video = add_gated(video, block.audio_to_video_attn(query, source, rope=v.cross_rope, context_rope=a.cross_rope), v_gate, None)
    query, source = modulate(heard, a_rows[:, 2], a_rows[:, 3], a.row_index), modulate(rms_norm(video, eps), v_rows[:, 2], v_rows[:, 3], v.row_index)
    return video, add_gated(audio, block.video_to_audio_attn(query, source, rope=a.cross_rope, context_rope=v.cross_rope), a_gate, None)


@pytest.mark.parametrize("family, case", [w for w in WANTED if "sound" in w[1]])
def test_sound_agrees_once_the_order_is_switched(stock, tmp_path, monkeypatch, family, case):
    """We follow the official order (both directions read before either updates); with the one order switched, both agree."""
    official = stock[family].ours(case, tmp_path / "official")
    monkeypatch.setattr(TransformerBlock, "_cross", video_first)
    switched = stock[family].ours(case, tmp_path / "switched")
    apart = {s: difference(official, stock[family].out(case), s) for s in ("video", "audio")}
    same = {s: difference(switched, stock[family].out(case), s) for s in ("video", "audio")}
    rounded = lambda found: {s: f"{value:.1e}" for s, value in found.items()}  # noqa: E731
    print(f"{family} {case}: largest difference in latents: official order {rounded(apart)}, order switched {rounded(same)}")
    assert all(value < 1e-3 for value in same.values())
    assert all(value > 2e-3 for value in apart.values())
