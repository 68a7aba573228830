"""Runs inside a real ComfyUI's Python: samples with the stock nodes alone, as a JSON file asks, latents into safetensors files.

    python stock_sampler.py COMFYUI REQUEST.json

REQUEST: {"folders": {kind: [path]}, "cases": [case]}; a case names files as the loaders list them, see ``sample``.
"""

import json
import sys
from pathlib import Path


def boot(root):
    """ComfyUI's modules on the CPU in float32, without its server."""
    sys.path.insert(0, root)
    sys.argv = ["main.py", "--cpu", "--force-fp32"]
    import comfy.options

    comfy.options.enable_args_parsing()
    import nodes

    return nodes


def conditioning(file, prefix, frame_rate):
    """CONDITIONING as CLIPTextEncode gives it for LTX: features of the valid tokens, with a mask for T5."""
    import torch
    from safetensors.torch import load_file

    found = load_file(file)
    video, audio = found[f"{prefix}.video"], found.get(f"{prefix}.audio")
    if audio is not None:
        video = torch.cat([video, audio], dim=-1)
    extra = {"attention_mask": torch.ones(video.shape[:2])} if found["t5"].item() else {"unprocessed_ltxav_embeds": True}
    return [[video, {"pooled_output": None, "frame_rate": frame_rate, **extra}]]


def load_model(nodes, case):
    """MODEL and VAE of the stock loaders, with the LoRAs of the stock LoRA loader."""
    vae = None
    if case["loader"] == "checkpoint":
        model, _, vae = nodes.CheckpointLoaderSimple().load_checkpoint(case["model"])
    else:
        (model,) = nodes.UNETLoader().load_unet(case["model"], "default")
    if case.get("vae"):
        (vae,) = nodes.VAELoader().load_vae(case["vae"])
    for name, strength in case.get("loras", []):
        (model,) = nodes.LoraLoaderModelOnly().load_lora_model_only(model, name, strength)
    return model, vae


def sample(nodes, case):
    """The noise and the latents of one case: {steps, cfg, audio_cfg?, stg?, stg_blocks?, modality?, size, audio?, seed, text, rate, out}."""
    import torch
    from comfy.nested_tensor import NestedTensor
    from comfy_extras import nodes_custom_sampler as custom
    from comfy_extras import nodes_lt

    model, vae = load_model(nodes, case)
    if case.get("stg"):
        blocks = ",".join(map(str, case["stg_blocks"]))
        (model,) = nodes_lt.LTXVSpatioTemporalGuidance.execute(model, case["stg"], blocks, 0.0, 1.0).result
    if case.get("modality"):
        (model,) = nodes_lt.LTXVModalityGuidance.execute(model, case["modality"], 0.0, 1.0).result
    positive, negative = (conditioning(case["text"], sign, case["rate"]) for sign in ("positive", "negative"))
    width, height, frames = case["size"]
    (latent,) = nodes_lt.EmptyLTXVLatentVideo.execute(width, height, frames, 1).result
    if case.get("audio"):
        sound = torch.zeros(1, 8, case["audio"], 16)
        latent = {"samples": NestedTensor((latent["samples"], sound))}
    (sigmas,) = nodes_lt.LTXVScheduler.execute(case["steps"], 2.05, 0.95, True, 0.1, latent if case["own_shift"] else None).result
    (sampler,) = custom.KSamplerSelect.execute("euler").result
    random = custom.Noise_RandomNoise(case["seed"])
    if case.get("audio"):
        (guider,) = nodes_lt.LTXVDualCFGGuider.execute(model, positive, negative, case["cfg"], case["audio_cfg"]).result
        out = custom.SamplerCustomAdvanced.execute(random, guider, sampler, sigmas, latent).result[0]
    else:
        out = custom.SamplerCustom.execute(model, True, case["seed"], case["cfg"], positive, negative, sampler, sigmas, latent).result[0]
    parts = {"noise": random.generate_noise(latent), "latents": out["samples"]}
    found = {}
    for name, value in parts.items():
        streams = value.unbind() if value.is_nested else [value]
        found |= {f"{name}.{stream}": tensor.float().contiguous() for stream, tensor in zip(("video", "audio"), streams)}
    if case.get("decode"):
        (pictures,) = nodes.VAEDecode().decode(vae, {"samples": found["latents.video"]})
        found["pictures"] = pictures.float().reshape(-1, *pictures.shape[-3:]).contiguous()
    found["sigmas"] = sigmas.float()
    return found


def main():
    root, request = sys.argv[1:3]
    request = json.loads(Path(request).read_text(encoding="utf-8"))
    nodes = boot(root)
    import folder_paths
    import torch
    from safetensors.torch import save_file

    for kind, paths in request["folders"].items():
        for path in paths:
            folder_paths.add_model_folder_path(kind, path)
    for case in request["cases"]:
        with torch.inference_mode():
            found = sample(nodes, case)
        save_file({name: t.clone() for name, t in found.items()}, case["out"])


if __name__ == "__main__":
    main()
