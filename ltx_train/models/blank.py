"""Networks without numbers: built on the meta device, with no start value drawn."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

# nn.init's functions, and the drawing ones of a tensor, which work in place
_FILLS = {function for name, function in vars(nn.init).items() if name.endswith("_") and not name.startswith("_") and callable(function)}
_FILLS |= {torch.Tensor.normal_, torch.Tensor.uniform_, torch.Tensor.fill_, torch.Tensor.zero_}


class _NothingFilled(TorchFunctionMode):
    """Leaves out what would only set the values of tensors that have none.

    For meta tensors torch runs the drawing through its compiler's Python: 0.4 ms a layer, and seconds to import it.
    """

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func in _FILLS:
            tensor = args[0] if args else kwargs.get("tensor")
            if isinstance(tensor, torch.Tensor) and tensor.is_meta:
                return tensor
        return func(*args, **kwargs)


@contextmanager
def blank() -> Iterator[None]:
    """Within it, modules are made on the meta device: shapes and dtypes alone, to be filled by ``load_weights``."""
    with torch.device("meta"), _NothingFilled():
        yield
