"""Full fine-tuning: every weight of the transformer is trained, and saved as a model file that ComfyUI loads."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from torch import Tensor, nn

from ..errors import ConfigError, LtxTrainError
from ..memory.pinned import HostMemory, Through
from ..models.checkpoint import Checkpoint
from ..models.families import TRANSFORMER_PREFIX
from ..models.safetensors_file import SafetensorsFile
from ..models.transformer import LTXTransformer, keeps_float32, transformer_source
from ..tensorfile import Lazy, atomic_file, write_tensors
from .snapshots import LazyTensors
from .trainable import Trainable

PREFIXES = (TRANSFORMER_PREFIX, "diffusion_model.", "")
"""How a model file may begin its transformer's names: the published files', some exporters', the official trainer's."""


class FullWeights(Trainable):
    """All weights of a transformer as float32 masters.

    Where the network computes in bfloat16 it does so with rounded copies: their gradients are added up in float32, the
    optimizer moves the masters, and :meth:`publish` rounds again. Modulation tables are float32 in both.
    The result file is the source checkpoint with its transformer replaced: same prefix, config metadata and connectors.
    dtype: number format of the result file (modulation tables stay float32, as in the published files).
    """

    def __init__(self, transformer: LTXTransformer, checkpoint: Checkpoint, dtype: torch.dtype) -> None:
        if any(getattr(m, "quantized", None) is not None for m in transformer.modules()):
            raise ConfigError("full.quantized", "A quantised base cannot be fully fine-tuned.", "Remove acceleration.quantization, or train a LoRA.")
        self.transformer, self.checkpoint, self.dtype = transformer, checkpoint, dtype
        transformer.requires_grad_(True)
        self.shapes = {name: tuple(p.shape) for name, p in transformer.named_parameters()}
        self.masters = self._masters()
        self._copies = [(self.masters[name], p) for name, p in transformer.named_parameters() if p.dtype != torch.float32]

    def _masters(self) -> dict[str, nn.Parameter]:
        """Float32 parameters: the network's own, or what the file holds where its own are not float32; read again only where they are rounded."""
        source = transformer_source(self.checkpoint, self.transformer)
        stored = lambda name, p: source.format(name) is None and source.info(name).dtype == p.dtype  # noqa: E731
        exact = lambda name, p: p.detach().float() if stored(name, p) else source.get(name, dtype=torch.float32, device=p.device)  # noqa: E731
        return {name: p if p.dtype == torch.float32 else nn.Parameter(exact(name, p)) for name, p in self.transformer.named_parameters()}

    def named_parameters(self) -> dict[str, nn.Parameter]:
        return self.masters

    @torch.no_grad()
    def take_gradients(self) -> None:
        """See :class:`Trainable`: the copies' gradients go to the masters, added in float32."""
        for master, copy in self._copies:
            if copy.grad is not None:
                master.grad = copy.grad.float() if master.grad is None else master.grad.add_(copy.grad)
                copy.grad = None

    @torch.no_grad()
    def publish(self) -> None:
        for master, copy in self._copies:
            copy.copy_(master)

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Take over saved weights, strictly."""
        _refuse(state, self.shapes)
        for name, master in self.masters.items():
            master.copy_(self._part(name, state))
        self.publish()

    def warm_start(self, path: Path) -> str:
        """See :class:`Trainable`: a model file, ours or the official trainer's. Raises CheckpointError for a damaged file, ConfigError when it does not fit."""
        self.load_state_dict(_transformer_of(path, self.shapes))
        return f"{len(self.masters)} tensors taken over"

    def _part(self, name: str, state: Mapping[str, Tensor]) -> Tensor:
        """What this process holds of a saved tensor."""
        return state[name]

    def _whole(self, name: str, part: Tensor) -> Tensor:
        """The whole tensor of what this process holds of it."""
        return part

    def write(self, path: Path, step: int) -> int:
        """Write the model file, one tensor at a time, and open it again; the number of its transformer tensors.

        Raises LtxTrainError ``full.not_finite`` naming the tensor with NaN or infinity; nothing is written then.
        """
        self.check_finite()
        memory = HostMemory(pin=next(iter(self.masters.values())).device.type == "cuda")
        tensors = self.entries(Through(memory) if memory.pin else Tensor.cpu)
        try:
            with self.writing({"model": tensors}) as groups, atomic_file(path, f"the model {path.name}") as file:
                write_tensors(file, groups["model"], self._metadata(step), checksum=False)  # nobody asks for it, and it takes as long as the writing
        finally:
            memory.close()
        written = {n for n in SafetensorsFile.open(path).spans}
        assert written == set(tensors)
        return len(self.masters)

    def check_finite(self) -> None:
        """Raise where a master holds NaN or infinity."""
        for name, master in self.masters.items():
            if not bool(torch.isfinite(master).all()):
                raise LtxTrainError("full.not_finite", f"The model is not saved: {name[-70:]} has NaN or infinite values.", "Go on from the last good snapshot with a lower learning rate.")

    def entries(self, to_host: Callable[[Tensor], Tensor] = Tensor.cpu) -> dict[str, Tensor | Lazy]:
        """The tensors of the result file by their names in it, each made when it is written; connectors as they were.

        to_host: how one that is made comes to the host. They are rounded before they are gathered and moved: half the bytes.
        """
        tensors: dict[str, Tensor | Lazy] = {}
        for name, master in self.masters.items():
            kind = torch.float32 if keeps_float32(name) else self.dtype
            make = lambda n=name, p=master, k=kind: to_host(self._whole(n, p.detach().to(k)))  # noqa: E731
            tensors[TRANSFORMER_PREFIX + name] = Lazy(self.shapes[name], kind, make)
        if self.checkpoint.has("connectors"):
            source = self.checkpoint.source("connectors")
            for name in source.keys():
                info = source.info(name)
                tensors[TRANSFORMER_PREFIX + name] = Lazy(tuple(info.shape), info.dtype, lambda n=name: source.get(n))
        return tensors

    def _metadata(self, step: int) -> dict[str, str]:
        kept = {k: v for k, v in self.checkpoint.metadata.items() if k not in ("config", "_quantization_metadata")}
        sections = {k: v for k, v in self.checkpoint.config.items() if k in ("transformer", "scheduler")}
        return {**kept, "config": json.dumps(sections), "ltx_train.steps": str(step), "ltx_train.base": self.checkpoint.fingerprint_of("transformer")}


def refuse_misfit(path: Path, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Raise ConfigError ``full.state_mismatch`` for a file whose transformer is not of these tensors (a LoRA, another model); its header is read alone."""
    _refuse(_transformer_of(path, shapes), shapes)


def _refuse(state: Mapping[str, Tensor], shapes: Mapping[str, tuple[int, ...]]) -> None:
    odd = sorted(set(shapes) ^ set(state)) or [n for n, shape in shapes.items() if _shape(state, n) != shape]
    if odd:
        raise ConfigError("full.state_mismatch", f"The saved weights do not fit this model: {odd[0][-70:]}.", f"{len(odd)} tensors differ. Full fine-tuning starts from a model file of this family.")


def _transformer_of(path: Path, shapes: Mapping[str, tuple[int, ...]]) -> _Renamed:
    """The transformer's tensors in a model file, ours or the official trainer's, under the network's names."""
    names = list(SafetensorsFile.open(path).spans)
    prefix = next(p for p in PREFIXES if any(n.startswith(f"{p}transformer_blocks.") for n in names) or not p)
    return _Renamed(LazyTensors(path), prefix, set(shapes))


def _shape(state: Mapping[str, Tensor], name: str) -> tuple[int, ...]:
    return state.shape(name) if isinstance(state, LazyTensors | _Renamed) else tuple(state[name].shape)


class _Renamed(Mapping[str, Tensor]):
    """A file's tensors with ``prefix`` taken off; what belongs to other networks (connectors, VAEs) is left out."""

    def __init__(self, file: LazyTensors, prefix: str, wanted: set[str]) -> None:
        self._file, self._prefix = file, prefix
        own = [n.removeprefix(prefix) for n in file if n.startswith(prefix)]
        self._names = [n for n in own if n in wanted or n.startswith("transformer_blocks.")]

    def __getitem__(self, name: str) -> Tensor:
        return self._file[self._prefix + name]

    def rows(self, name: str, first: int, last: int) -> Tensor:
        return self._file.rows(self._prefix + name, first, last)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._file.shape(self._prefix + name)

    def __iter__(self):
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)
