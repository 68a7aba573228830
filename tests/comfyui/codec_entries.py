"""Runs inside a real ComfyUI's Python: our encoding node's codec (nodes/codec.py) around the models that the stock loaders give.

    python codec_entries.py COMFYUI REQUEST.json

REQUEST: {"pack": folder, "base": folder with models/, "cases": [{"family", "model", "vae"?, "audio_vae"?, "encoder"?, "media", "clips"?, "out"}]}.
media: a safetensors file with frames [F, H, W, 3] uint8 and waveform [2, N]. clips: a dataset to put into a cache. The answer is the
cache's folder and index a case, as JSON in the last line.
"""

import importlib
import importlib.util
import json
import logging
import sys
from pathlib import Path


def boot(root):
    """ComfyUI's modules on the CPU in float32, without its server."""
    sys.path.insert(0, root)
    sys.argv = ["main.py", "--cpu", "--force-fp32", "--fp32-text-enc", "--fp32-vae"]
    import comfy.options

    comfy.options.enable_args_parsing()
    import nodes

    return nodes


def load(path, name):
    """A pack by its folder, as the host loads it."""
    spec = importlib.util.spec_from_file_location(name, Path(path) / "__init__.py", submodule_search_locations=[str(path)])
    sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(sys.modules[name])
    return lambda part: importlib.import_module(f"{name}.{part}")


def models(nodes, case):
    """(vae, audio_vae, clip) of the stock loader nodes; None for what the case does not name."""
    from comfy_extras import nodes_lt_audio as sound

    vae = nodes.VAELoader().load_vae(case["vae"])[0] if case.get("vae") else nodes.CheckpointLoaderSimple().load_checkpoint(case["model"])[2]
    audio = clip = None
    if case.get("audio_vae"):
        audio = nodes.VAELoader().load_vae(case["audio_vae"])[0]
    elif case["family"] != "ltxv-2b":
        audio = sound.LTXVAudioVAELoader.execute(case["model"]).result[0]
    if case.get("encoder") and case["family"] in ("ltxv-2b", "ltx2.5"):
        clip = nodes.CLIPLoader().load_clip(case["encoder"], "ltxv")[0]
    elif case.get("encoder"):
        clip = sound.LTXAVTextEncoderLoader.execute(case["encoder"], case["model"]).result[0]
    return vae, audio, clip


def encoded(pack, nodes, case):
    """What the codec makes of the case's clip, sound and captions, saved; and the cache of its dataset."""
    from safetensors.torch import load_file, save_file

    vae, audio, clip = models(nodes, case)
    model = pack("nodes.model").choose(case["model"], video_vae=case.get("vae", "auto"))
    codec = pack("nodes.codec").ComfyCodec(model, vae=vae, audio_vae=audio, clip=clip)
    media = load_file(case["media"])
    found = {"video": codec.encode_video(media["frames"][None])}
    if audio is not None:
        found["audio"] = codec.encode_audio(media["waveform"][None], case["rate"])
    for number, features in enumerate(codec.encode_text(case["captions"]) if clip is not None else []):
        found[f"text.{number}.video"] = features.video
        if features.audio is not None:
            found[f"text.{number}.audio"] = features.audio
    save_file({name: tensor.clone().contiguous() for name, tensor in found.items()}, case["out"])
    if not case.get("clips"):
        return None
    dataset = pack("nodes.dataset").describe(Path(case["clips"]), {"buckets": case["buckets"]})
    data = pack("nodes.compose").settled_data(dataset, model, "comfyui", "test")
    folder, warnings = pack("nodes.codec").encode_here(model, data, codec, pack("nodes.follow").Screen(), mode_name="", prompts=[], with_audio=True)
    return {"root": str(folder), "index": data.index, "warnings": warnings}


def main():
    root, request = sys.argv[1:3]
    request = json.loads(Path(request).read_text(encoding="utf-8"))
    nodes = boot(root)
    import folder_paths
    import torch

    logging.getLogger().setLevel(logging.ERROR)
    base = Path(request["base"])
    for kind in ("checkpoints", "diffusion_models", "vae", "text_encoders"):
        folder_paths.add_model_folder_path(kind, str(base / "models" / kind), is_default=True)
    folder_paths.set_output_directory(str(base / "output"))
    load(Path(__file__).with_name("test_pack"), "tiny_gemma")
    pack = load(request["pack"], "ltx_train_pack")
    answers = []
    for case in request["cases"]:
        with torch.inference_mode():
            answers.append(encoded(pack, nodes, case))
    print(json.dumps(answers))


if __name__ == "__main__":
    main()
