"""For tests only, a ComfyUI pack: lets tiny text encoders load (their sizes are in ComfyUI's code), and gives random conditioning."""

import importlib.util
import json
import os

import comfy.text_encoders.llama as llama
import torch

_original = llama.Gemma3_12B_Config
_sizes = json.loads(os.environ.get("LTX_TINY_GEMMA3", "{}"))


def _shrunk(**overrides):
    config = _original(**{**_sizes, **overrides})
    tower = {"num_hidden_layers": 1, "hidden_size": _sizes["hidden_size"], "intermediate_size": 32, "num_attention_heads": 1}
    config.vision_config = {**config.vision_config, **tower}
    return config


if _sizes:
    llama.Gemma3_12B_Config = _shrunk
if os.environ.get("LTX_TINY_ENCODERS"):
    from .encoders import shrink

    shrink(json.loads(os.environ["LTX_TINY_ENCODERS"]))


class LtxTestConditioning:
    """Random text features as ComfyUI's text encoders give them: seeded, so that two prompts are the same."""

    CATEGORY, FUNCTION, RETURN_TYPES = "test", "make", ("CONDITIONING",)

    @classmethod
    def INPUT_TYPES(cls):
        return {"required": {"width": ("INT", {"default": 48, "min": 1, "max": 8192}), "seed": ("INT", {"default": 0}), "audio_model": ("BOOLEAN", {"default": True})}}

    def make(self, width, seed, audio_model):
        features = torch.randn(1, 12, width, generator=torch.Generator().manual_seed(seed))
        extra = {"unprocessed_ltxav_embeds": True} if audio_model else {"attention_mask": torch.ones(1, 12)}
        return ([[features, {"pooled_output": None, **extra}]],)


class LtxTestPackages:
    """Which of the packages in a text this ComfyUI finds."""

    CATEGORY, FUNCTION, RETURN_TYPES, OUTPUT_NODE = "test", "look", (), True

    @classmethod
    def INPUT_TYPES(cls):
        return {"required": {"names": ("STRING", {"default": ""})}}

    def look(self, names):
        return {"ui": {"found": [name for name in names.split() if importlib.util.find_spec(name) is not None]}}


NODE_CLASS_MAPPINGS = {"LtxTestConditioning": LtxTestConditioning, "LtxTestPackages": LtxTestPackages}
