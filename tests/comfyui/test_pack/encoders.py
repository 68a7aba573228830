"""Tiny T5 and Gemma 4 files in a ComfyUI whose code has the sizes of the large ones: recognised by what they hold, built in the given sizes."""

import comfy.sd
import comfy.text_encoders.gemma4 as gemma4
import comfy.text_encoders.sd3_clip as sd3_clip

T5_MARK, GEMMA4_MARK = "encoder.block.0.layer.1.DenseReluDense.wi_1.weight", "model.layers.0.layer_scalar"


def shrink(sizes):
    """sizes: {"t5": fields of t5_config_xxl.json, "gemma4": fields of Gemma4_12B_Config}."""
    _recognise()
    _shrink_t5(sizes["t5"])
    _shrink_gemma4(sizes["gemma4"])


def _recognise():
    original, kinds = comfy.sd.detect_te_model, comfy.sd.TEModel

    def detect(sd):
        return kinds.T5_XXL if T5_MARK in sd else kinds.GEMMA_4_12B if GEMMA4_MARK in sd else original(sd)

    comfy.sd.detect_te_model = detect


def _shrink_t5(fields):
    original = sd3_clip.T5XXLModel.__init__

    def init(self, *args, model_options={}, **kwargs):  # noqa: B006  the host's own signature
        original(self, *args, model_options={**model_options, "t5xxl_model_config": fields}, **kwargs)

    sd3_clip.T5XXLModel.__init__ = init


def _shrink_gemma4(fields):
    original = gemma4.Gemma4_12B_Config

    def shrunk(**overrides):
        config = original(**overrides)
        for name, value in fields.items():
            assert hasattr(config, name), name
            setattr(config, name, value)
        return config

    gemma4.Gemma4_12B_Config = shrunk
