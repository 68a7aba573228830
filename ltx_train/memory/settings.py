"""The ``acceleration`` section of a job: precision, quantisation, and how a model is fitted onto its card."""

from __future__ import annotations

from typing import Literal

import torch
from pydantic import Field, ValidationInfo, field_validator, model_validator

from ..errors import nearest
from ..section import Section
from .capability import Facts, compile_capability, precision_capability

QUANTIZATIONS = ("int8-quanto", "int4-quanto", "int2-quanto", "fp8-quanto", "fp8uz-quanto", "int8", "fp8", "nf4")
"""The official names, then ours; the classes are in memory/quantization.py, which a node must not import."""
DEVICES = r"^(auto|cpu|mps|xpu(:\d+)?|cuda(:\d+)?)$"
"""What any section's ``device`` may be."""

Choice = Literal["auto", "on", "off"]
_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "no": torch.float32, None: torch.float32}


class AccelerationSection(Section):
    """The official ``acceleration`` section and ours. ``auto`` leaves a choice to the planner."""

    mixed_precision_mode: Literal["no", "fp16", "bf16"] | None = Field("bf16", description="Number format of the computation; adapters stay float32.")
    quantization: str | None = Field(
        None, description="Hold the frozen base in fewer bits; none keeps it as its file has it.", json_schema_extra={"enum": [None, *QUANTIZATIONS]}
    )
    load_text_encoder_in_8bit: bool = Field(False, description="Load the text encoder in 8 bits (bitsandbytes).")
    offload_optimizer_during_validation: bool = Field(False, description="Keep the optimizer's state in RAM while samples are made.")
    device: str = Field("auto", description="Device to train on: auto, cuda, cuda:1, mps, cpu.", pattern=DEVICES)
    keep_stored_quantization: bool = Field(True, description="Train on an fp8 or int8 checkpoint as it is, instead of expanding it.")
    activation_checkpointing: Choice = Field("auto", description="Compute block activations again in the backward pass; auto: as enable_gradient_checkpointing says, or if memory asks for it.")
    keep_activations_of: int = Field(0, ge=0, description="With activation checkpointing: blocks at the end whose activations are kept, for speed.")
    activation_budget: float | Literal["auto"] = Field("auto", description="With compiled blocks: share of the activations that is kept instead of computed again, 0 to 0.6; more is faster and larger.")
    offload_activations: Choice = Field("auto", description="Keep the blocks' inputs in RAM between forward and backward pass.")
    stream_blocks: int | Literal["auto"] = Field("auto", description="Blocks whose weights stay in RAM and are uploaded when needed; 0 keeps all on the card.")
    optimizer_in_ram: Choice = Field("auto", description="Keep the optimizer's state in RAM all the time.")
    compile: Choice = Field("auto", description="Compile the transformer's blocks (needs Triton).")
    float8_products: bool = Field(False, description="Multiply in 8-bit floats (with quantization fp8, cards from sm89 on): faster, with about 3 % error a block.")
    pin_limit_gb: float | None = Field(None, ge=0, description="Page-lock at most this much RAM for streaming; the rest is copied more slowly.")
    cuda_graphs: Choice = Field("auto", description="Record passes of up to 3000 tokens as CUDA graphs, where launches are what a step waits for; auto: with compiled blocks on an NVIDIA card.")
    attention: Literal["auto", "sdpa", "cudnn", "flash", "efficient", "math"] = Field("auto", description="Attention kernel.")
    memory_limit_gb: float | None = Field(None, gt=0, description="Use at most this much memory of the card.")
    allow_tf32: bool = Field(True, description="Let float32 matrix products use TF32 where the card has it.")
    accumulate_together: int | Literal["auto"] = Field(
        "auto", description="With gradient accumulation: so many micro-steps pass through a block before the next one, so that a streamed block is uploaded once for all of them; 1: one after another."
    )
    blocks_on_disk: int | Literal["auto"] = Field(
        "auto", description="Of the streamed blocks, so many are read from a file each time instead of resting in RAM; slower, for machines with little RAM."
    )

    @field_validator("quantization")
    @classmethod
    def _known(cls, value: str | None) -> str | None:
        if value in (None, "none", "None", ""):
            return None
        if value not in QUANTIZATIONS:
            near = nearest(value, QUANTIZATIONS)
            raise ValueError(f"quantization {value!r} is not known; " + (f"did you mean {near[0]}? " if near else "") + f"known: {', '.join(QUANTIZATIONS)}")
        return value

    @field_validator("stream_blocks", "blocks_on_disk")
    @classmethod
    def _not_negative(cls, value: int | str, info: ValidationInfo) -> int | str:
        if isinstance(value, int) and value < 0:
            raise ValueError(f"{info.field_name} must be auto or at least 0, not {value}")
        return value

    @field_validator("accumulate_together")
    @classmethod
    def _at_least_one(cls, value: int | str) -> int | str:
        if isinstance(value, int) and value < 1:
            raise ValueError(f"accumulate_together must be auto or at least 1, not {value}")
        return value

    @field_validator("activation_budget")
    @classmethod
    def _a_share(cls, value: float | str) -> float | str:
        if not isinstance(value, str) and not 0 <= value <= 1:
            raise ValueError(f"activation_budget must be auto or between 0 and 1, not {value}")
        return value

    @model_validator(mode="after")
    def _fits_together(self) -> AccelerationSection:
        if self.float8_products and self.quantization not in ("fp8", "fp8-quanto"):
            raise ValueError(f"float8_products needs quantization fp8, not {self.quantization or 'none'}")
        return self

    @property
    def limit_bytes(self) -> float | None:
        """``memory_limit_gb`` in bytes."""
        return None if self.memory_limit_gb is None else self.memory_limit_gb * 1e9

    @property
    def dtype(self) -> torch.dtype:
        """The dtype that mixed_precision_mode names, whatever the machine."""
        return _DTYPES[self.mixed_precision_mode]

    def compute_dtype(self, device: torch.device | str) -> torch.dtype:
        """The dtype of the computation on a device: as asked, or what its card has instead (fp16 for bf16 before sm80)."""
        verdict = precision_capability(self.mixed_precision_mode, Facts.here(device))
        return self.dtype if verdict.action == "use" else _DTYPES[verdict.instead]

    def checkpoints_activations(self, enable_gradient_checkpointing: bool) -> bool:
        """Whether blocks are recomputed, given the official switch in ``optimization``."""
        return self.activation_checkpointing == "on" or (self.activation_checkpointing == "auto" and enable_gradient_checkpointing)

    def compiles(self, device: torch.device | str) -> tuple[bool, str]:
        """(whether blocks are to be compiled, why not when it was asked for or auto)."""
        if self.compile == "off":
            return False, ""
        verdict = compile_capability(Facts.here(device))
        return verdict.action == "use", verdict.reason
