"""Full fine-tuning over several processes: FSDP2 shards of float32 masters, gathered tensor by tensor for files."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ..errors import CheckpointError, ConfigError, LtxTrainError
from ..memory.pinned import PIECE, HostMemory, host_threads
from ..models.checkpoint import Checkpoint
from ..models.families import TRANSFORMER_PREFIX
from ..models.transformer import LTXTransformer, keeps_float32, load_transformer, transformer_source
from ..models.weights import WeightSource, check_weights
from ..tensorfile import Lazy, writing_order
from .full import FullWeights
from .parallel import Parallel
from .trainable import Groups

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

ELEMENTWISE = ("adamw", "adamw_schedulefree")
"""Optimizers whose update of a number needs that number's own gradient alone, so that a shard can be moved by itself."""
READERS = 4
"""Threads that read a tensor together."""


def check_sharded(optimizer: str, dtype: torch.dtype, *, quantization: str | None, stored_quantised: bool) -> None:
    """Raise ConfigError, with the reason, for what cannot be trained in shards."""
    if quantization or stored_quantised:
        raise ConfigError(
            "full.quantized", "A quantised base cannot be fully fine-tuned, and FSDP2 would dequantise it without a word.",
            "Use the bf16 checkpoint without acceleration.quantization, or train a LoRA: its frozen base may be quantised on every GPU.",
        )  # fmt: skip
    if optimizer not in ELEMENTWISE:
        raise ConfigError(
            "full.optimizer", f"The optimizer {optimizer} cannot train shards: it looks at whole tensors or at blocks of them.", f"Use {' or '.join(ELEMENTWISE)} on several GPUs."
        )  # fmt: skip
    if dtype == torch.float16:
        raise ConfigError("full.fp16", "Full fine-tuning on several GPUs computes in bf16 or float32, not in fp16.", "Set acceleration.mixed_precision_mode to bf16.")


def load_sharded(
    checkpoint: Checkpoint, parallel: Parallel, *, dtype: torch.dtype, video: bool = True, audio: bool = True, progress: Callable[[int, int], None] | None = None
) -> LTXTransformer:
    """The checkpoint's transformer with float32 weights in shards over the ranks, computing in ``dtype``.

    A rank reads its own rows alone, and turns them into float32 on its device: the host never holds more than a tensor.
    The modulation tables are small and float32 in the computation too: every rank holds them.
    progress: told how many tensors are there, and of how many.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    model = load_transformer(checkpoint, dtype=torch.float32, device="meta", video=video, audio=audio).requires_grad_(True)
    source = transformer_source(checkpoint, model)
    names = check_weights(model, source)
    mesh = init_device_mesh(parallel.device.type, (parallel.world,))
    policy = MixedPrecisionPolicy(param_dtype=None if dtype == torch.float32 else dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)
    whole: set[nn.Parameter] = set()

    def shard(module: nn.Module, **options: Any) -> None:
        whole.update(p for name, p in module.named_parameters() if keeps_float32(name))
        fully_shard(module, mesh=mesh, mp_policy=policy, ignored_params=whole, **options)

    for block in model.transformer_blocks:
        shard(block, reshard_after_forward=True)
    shard(model, reshard_after_forward=False)
    model.to_empty(device=parallel.device)
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    assert set(tensors) == set(names), "every tensor comes from the file"
    with RowReader(source, parallel.device) as reader:
        for done, name in enumerate(names, 1):
            own = tensors[name].detach()
            reader.fill(name, own.to_local() if _is_sharded(own) else own, own_rows(own, parallel) if _is_sharded(own) else None)
            if progress is not None:
                progress(done, len(names))
    warnings.filterwarnings("ignore", message=r"(?s)FSDP2-wrapped module .* returned a view tensor")  # the loss never writes into it
    return model.eval()


def own_rows(parameter: Tensor, parallel: Parallel) -> tuple[int, int]:
    """[first, last) rows of a tensor on this rank: equal chunks, the last ones shorter or empty."""
    rows, chunk = parameter.shape[0], -(-parameter.shape[0] // parallel.world)
    first, last = (min(rows, chunk * n) for n in (parallel.rank, parallel.rank + 1))
    return first, last


class RowReader:
    """Tensors of a source, or some of their rows, read into one page-locked buffer by several threads and given to the device as stored."""

    def __init__(self, source: WeightSource, device: torch.device) -> None:
        self.source, self.memory = source, HostMemory(pin=device.type == "cuda")
        infos = [source.info(name) for name in source.keys()]
        self.buffer = self.memory.take(max(math.prod(info.shape) * info.dtype.itemsize for info in infos))
        self.pool = ThreadPoolExecutor(min(READERS, host_threads()), "rows")

    def __enter__(self) -> RowReader:
        return self

    def __exit__(self, *_: object) -> None:
        self.pool.shutdown()
        self.buffer = torch.empty(0, dtype=torch.uint8)
        self.memory.close()

    @torch.no_grad()
    def fill(self, name: str, into: Tensor, rows: tuple[int, int] | None = None) -> None:
        """Copy the tensor, or its rows [first, last), into ``into``, whose format it takes."""
        if not into.numel():
            return
        if self.source.format(name) is not None:
            value = self.source.get(name, device=into.device)
            into.copy_(value if rows is None else value[rows[0] : rows[1]])
            return
        into.copy_(self._stored(name, into.shape, rows).to(into.device))  # the device converts: the host would take longer to than to read

    def _stored(self, name: str, shape: torch.Size, rows: tuple[int, int] | None) -> Tensor:
        """The numbers as the file has them, in the buffer."""
        stored = self.source.names[name]
        file = self.source.store.where[stored]
        span = file.spans[stored]
        size = math.prod(shape) * span.info.dtype.itemsize
        begin = span.begin + (rows[0] * size // (rows[1] - rows[0]) if rows is not None else 0)
        pieces = [(file.path, begin + at, self.buffer[at : min(size, at + PIECE)]) for at in range(0, size, PIECE)]
        if not all(self.pool.map(_read_into, pieces)):
            raise CheckpointError("checkpoint.truncated", f"{file.path.name[:40]} ends inside the tensor {name[-60:]}.", "The file changed on disk. Download the file again, whole.")
        return self.buffer[:size].view(span.info.dtype).view(shape)


def _read_into(piece: tuple[Path, int, Tensor]) -> bool:
    path, begin, into = piece
    with path.open("rb", buffering=0) as file:
        file.seek(begin)
        view, done = memoryview(into.numpy()), 0
        while done < len(view) and (got := file.readinto(view[done:])):
            done += got
        return done == len(view)


class ShardedWeights(FullWeights):
    """:class:`FullWeights` of which every rank holds, moves and keeps the optimizer state of its own rows.

    The optimizer sees plain tensors: this rank's rows, which FSDP2 gathers from in the next forward pass. Saving gathers one
    tensor at a time; what is saved is whole, so that any number of processes may go on with it.
    """

    sharded = True

    def __init__(self, transformer: LTXTransformer, checkpoint: Checkpoint, dtype: torch.dtype, parallel: Parallel) -> None:
        self.parallel = parallel
        super().__init__(transformer, checkpoint, dtype)
        self.network = dict(transformer.named_parameters())
        self.split = {name: self._rows(p) for name, p in self.network.items() if _is_sharded(p)}
        self.names = list(self.masters)
        flags = [name in self.split for name in self.names]
        self._in_shards = torch.tensor(flags, device=parallel.device)

    def _masters(self) -> dict[str, nn.Parameter]:
        local = lambda p: nn.Parameter(p.detach().to_local()) if _is_sharded(p) else p  # noqa: E731
        return {name: local(p) for name, p in self.transformer.named_parameters()}

    def _rows(self, parameter: DTensor) -> tuple[int, int]:
        """See :func:`own_rows`."""
        first, last = own_rows(parameter, self.parallel)
        assert parameter.to_local().shape[0] == last - first
        return first, last

    # -- steps --
    @torch.no_grad()
    def take_gradients(self) -> None:
        """Gradients arrive as shards, averaged over the ranks in float32; those of the tables are each rank's own."""
        for name in self.split:
            parameter, master = self.network[name], self.masters[name]
            if parameter.grad is not None:
                arrived = parameter.grad.to_local()
                master.grad = arrived if master.grad is None else master.grad.add_(arrived)
                parameter.grad = None

    def average_gradients(self, parallel: Parallel) -> None:
        parallel.average_gradients(p for name, p in self.masters.items() if name not in self.split)

    def share(self, parallel: Parallel) -> None:
        parallel.share(p for name, p in self.masters.items() if name not in self.split)

    def whole_squares(self, squares: Tensor) -> Tensor:
        total = squares.clone()
        torch.distributed.all_reduce(total)
        return torch.where(self._in_shards, total, squares)

    # -- files --
    def _whole(self, name: str, part: Tensor) -> Tensor:
        """The whole tensor, on every rank: all of them must ask for it. Ranks with fewer rows than others fill up with zeros, which are cut off."""
        if name not in self.split:
            return part
        rows, *rest = self.shapes[name]
        chunk = -(-rows // self.parallel.world)
        moved = part.detach().to(self.parallel.device).contiguous()
        if moved.shape[0] < chunk:
            moved = torch.cat([moved, moved.new_zeros(chunk - moved.shape[0], *rest)])
        whole = moved.new_empty(chunk * self.parallel.world, *rest)
        torch.distributed.all_gather_into_tensor(whole, moved)  # DTensor.full_tensor ends in a segmentation fault where gloo moves GPU tensors
        return whole[:rows]

    def _part(self, name: str, state: Mapping[str, Tensor]) -> Tensor:
        if name not in self.split:
            return state[name]
        first, last = self.split[name]
        return state.rows(name, first, last) if hasattr(state, "rows") else state[name][first:last]

    def check_finite(self) -> None:
        bad = [name for name, master in self.masters.items() if not bool(torch.isfinite(master).all())]
        everywhere = [name for part in self.parallel.gather(bad[:1]) for name in part]
        if everywhere:
            raise LtxTrainError("full.not_finite", f"The model is not saved: {everywhere[0][-70:]} has NaN or infinite values.", "Go on from the last good snapshot with a lower learning rate.")

    def write(self, path: Path, step: int) -> int:
        if self.parallel.is_main:
            return super().write(path, step)
        self.check_finite()
        own = {name: entry for name, entry in self.entries(lambda value: value).items() if name.removeprefix(TRANSFORMER_PREFIX) in self.masters}
        self.take_part({"model": own})
        return len(self.masters)

    def whole(self, groups: Groups, state: dict[str, Any]) -> tuple[Groups, dict[str, Any]]:
        def entry(group: str, name: str, value: Tensor) -> Tensor | Lazy:
            owner = self._owner(group, name)
            if owner not in self.split or value.dim() == 0:
                return value
            return Lazy(self.shapes[owner], value.dtype, lambda: self._whole(owner, value))

        made = {group: {name: entry(group, name, value) for name, value in tensors.items()} for group, tensors in groups.items()}
        if "optimizer" in state:
            state = {**state, "optimizer": {**state["optimizer"], "shapes": [list(self.shapes[name]) for name in self.names]}}
        return made, state

    def _owner(self, group: str, name: str) -> str:
        """The parameter that a tensor of a group belongs to: an optimizer's are numbered."""
        return self.names[int(name.partition(".")[0])] if group == "optimizer" else name

    @contextmanager
    def writing(self, groups: Groups) -> Iterator[Groups]:
        """Every rank gathers every tensor in the order of writing. Where rank 0 cannot write on (a full disk), it gathers the rest all
        the same: the others would wait for it for ever."""
        ahead = {(group, name): tensors[name] for group, tensors in groups.items() for name in writing_order(tensors) if isinstance(tensors[name], Lazy)}

        def counted(group: str, name: str) -> Tensor | Lazy:
            lazy = groups[group][name]
            return Lazy(lazy.shape, lazy.dtype, lambda: ahead.pop((group, name)).make()) if isinstance(lazy, Lazy) else lazy

        try:
            yield {group: {name: counted(group, name) for name in tensors} for group, tensors in groups.items()}
        except (LtxTrainError, OSError):
            for lazy in ahead.values():
                lazy.make()
            raise

    def take_part(self, groups: Groups) -> None:
        for tensors in groups.values():
            for name in writing_order(tensors):
                if isinstance(tensors[name], Lazy):
                    tensors[name].make()

    def own_part(self, tensors: Mapping[str, Tensor], rest: Mapping[str, Any]) -> tuple[Mapping[str, Tensor], Mapping[str, Any]]:
        group = "optimizer" if rest else "weights"
        if rest and rest["shapes"] == [list(self.shapes[name]) for name in self.names]:
            rest = {**rest, "shapes": [list(p.shape) for p in self.masters.values()]}
        return _OwnRows(tensors, lambda name: self.split.get(self._owner(group, name))), rest


class _OwnRows(Mapping[str, Tensor]):
    """Saved tensors of which a rank reads its own rows alone; ``rows_of(name)`` is None for what every rank holds."""

    def __init__(self, tensors: Mapping[str, Tensor], rows_of: Any) -> None:
        self._tensors, self._rows_of = tensors, rows_of

    def __getitem__(self, name: str) -> Tensor:
        rows = self._rows_of(name)
        if rows is None or not self._tensors.shape(name):
            return self._tensors[name]
        return self._tensors.rows(name, *rows)

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)


def _is_sharded(parameter: Tensor) -> bool:
    from torch.distributed.tensor import DTensor

    return isinstance(parameter, DTensor)
