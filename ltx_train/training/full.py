"""Full fine-tuning: every weight of the transformer is trained, and saved as a model file that ComfyUI loads."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor, nn

from ..errors import ConfigError, LtxTrainError
from ..models.checkpoint import Checkpoint
from ..models.families import TRANSFORMER_PREFIX
from ..models.safetensors_file import SafetensorsFile
from ..models.transformer import LTXTransformer, keeps_float32
from ..tensorfile import Lazy, save_tensors


class FullWeights:
    """All weights of a transformer as float32 masters.

    The result file is the source checkpoint with its transformer replaced: same prefix, config metadata and connectors.
    dtype: number format of the result file (modulation tables stay float32, as in the published files).
    """

    def __init__(self, transformer: LTXTransformer, checkpoint: Checkpoint, dtype: torch.dtype) -> None:
        if any(getattr(m, "quantized", None) is not None for m in transformer.modules()):
            raise ConfigError("full.quantized", "A quantised base cannot be fully fine-tuned.", "Remove acceleration.quantization, or train a LoRA.")
        self.transformer, self.checkpoint, self.dtype = transformer, checkpoint, dtype
        for parameter in transformer.parameters():
            parameter.data = parameter.data.float()
            parameter.requires_grad_(True)

    def named_parameters(self) -> dict[str, nn.Parameter]:
        return dict(self.transformer.named_parameters())

    def parameters(self) -> list[nn.Parameter]:
        return list(self.transformer.parameters())

    def state_dict(self) -> dict[str, Tensor]:
        return {name: p.detach() for name, p in self.transformer.named_parameters()}

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Take over saved weights, strictly."""
        own = self.named_parameters()
        odd = sorted(set(own) ^ set(state)) or [n for n, p in own.items() if p.shape != state[n].shape]
        if odd:
            raise ConfigError("full.state_mismatch", f"The saved weights do not fit this model: {odd[0][-70:]}.", f"{len(odd)} tensors differ.")
        for name, parameter in own.items():
            parameter.copy_(state[name])

    def write(self, path: Path, step: int) -> int:
        """Write the model file, one tensor at a time, and open it again; the number of its transformer tensors.

        Raises LtxTrainError ``full.not_finite`` naming the tensor with NaN or infinity; nothing is written then.
        """
        tensors: dict[str, Tensor | Lazy] = {}
        for name, parameter in self.transformer.named_parameters():
            if not bool(torch.isfinite(parameter).all()):
                raise LtxTrainError("full.not_finite", f"The model is not saved: {name[-70:]} has NaN or infinite values.", "Go on from the last good snapshot with a lower learning rate.")
            kind = torch.float32 if keeps_float32(name) else self.dtype
            tensors[TRANSFORMER_PREFIX + name] = Lazy(tuple(parameter.shape), kind, lambda p=parameter, k=kind: p.detach().to("cpu", k))
        if self.checkpoint.has("connectors"):
            source = self.checkpoint.source("connectors")
            for name in source.keys():
                info = source.info(name)
                tensors[TRANSFORMER_PREFIX + name] = Lazy(tuple(info.shape), info.dtype, lambda n=name: source.get(n))
        save_tensors(path, tensors, self._metadata(step), f"the model {path.name}")
        written = {n for n in SafetensorsFile.open(path).spans}
        assert written == set(tensors)
        return len(self.named_parameters())

    def _metadata(self, step: int) -> dict[str, str]:
        kept = {k: v for k, v in self.checkpoint.metadata.items() if k not in ("config", "_quantization_metadata")}
        sections = {k: v for k, v in self.checkpoint.config.items() if k in ("transformer", "scheduler")}
        return {**kept, "config": json.dumps(sections), "ltx_train.steps": str(step), "ltx_train.base": self.checkpoint.fingerprint_of("transformer")}
