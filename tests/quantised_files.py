"""Model files with some of their weights as fp8-scaled or int8, as repacks for ComfyUI have them."""

import json
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file


def repacked(source: Path, target: Path, kind: str, wanted: Callable[[str], bool]) -> dict[str, torch.Tensor]:
    """Write ``source`` with the matrices whose key is wanted quantised (kind: fp8 or int8); layer -> its exact numbers."""
    tensors, layers, numbers = load_file(source), {}, {}
    with safe_open(str(source), "pt") as file:
        metadata = dict(file.metadata())
    for key in [k for k in tensors if k.endswith(".weight") and tensors[k].ndim == 2 and wanted(k)]:
        layer, wide = key.removesuffix(".weight"), tensors[key].float()
        if kind == "fp8":
            scale = wide.abs().max() / 448
            tensors[key] = (wide / scale).to(torch.float8_e4m3fn)
            layers[layer] = {"format": "float8_e4m3fn"}
        else:
            scale = wide.abs().amax(1, keepdim=True) / 127
            tensors[key] = (wide / scale).round().to(torch.int8)
            tensors[f"{layer}.comfy_quant"] = torch.tensor(list(json.dumps({"format": "int8_tensorwise"}).encode()), dtype=torch.uint8)
        tensors[f"{layer}.weight_scale"] = scale
        numbers[layer] = tensors[key].float() * scale
    if layers:
        metadata["_quantization_metadata"] = json.dumps({"format_version": "1.0", "layers": layers})
    save_file(tensors, target, metadata)
    return numbers
