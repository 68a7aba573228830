"""Run by ComfyUI's interpreter: loads a LoRA as LoraLoaderModelOnly does and compares every patched weight with (alpha / rank) B A.

usage: check_lora.py COMFYUI MODEL LORA SNAPSHOT_WEIGHTS SCALE KIND     KIND: checkpoint or unet
"""

import json
import logging
import sys


def main() -> None:
    comfyui, model_path, lora_path, snapshot_path, scale, kind = sys.argv[1:]
    sys.path.insert(0, comfyui)
    sys.argv = ["check", "--cpu"]
    import comfy.options

    comfy.options.enable_args_parsing()
    import comfy.lora
    import comfy.sd
    import comfy.utils
    from safetensors.torch import load_file

    warnings = []

    class Listen(logging.Handler):
        def emit(self, record):
            if record.levelno >= logging.WARNING:
                warnings.append(record.getMessage())

    logging.getLogger().addHandler(Listen())
    if kind == "checkpoint":
        model = comfy.sd.load_checkpoint_guess_config(model_path, output_vae=False, output_clip=False)[0]
    else:
        model = comfy.sd.load_diffusion_model(model_path)
    warnings.clear()
    lora = comfy.utils.load_torch_file(lora_path, safe_load=True)
    patched, _ = comfy.sd.load_lora_for_models(model, None, lora, 1.0, 0)
    trained = load_file(snapshot_path)
    modules = sorted({name.split(".lora_")[0] for name in trained})
    state = model.model.state_dict()
    worst, moved = 0.0, 0
    for name in modules:
        key = f"diffusion_model.{name}.weight"
        weight = state[key].float()
        got = comfy.lora.calculate_weight(patched.patches[key], weight.clone(), key) - weight
        want = float(scale) * trained[f"{name}.lora_B.weight"].float() @ trained[f"{name}.lora_A.weight"].float()
        moved += bool(want.abs().max() > 0)
        worst = max(worst, ((got - want).norm() / want.norm().clamp(min=1e-12)).item())
    print(json.dumps({"warnings": warnings, "patched": len(patched.patches), "modules": len(modules), "moved": moved, "worst": worst}))


main()
