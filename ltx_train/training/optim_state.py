"""An optimizer's state as tensors and JSON, without pickle, and exactly back; its state on the host for a while."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from ..errors import RunError

# What an optimizer counts in its parameter groups. Everything else there is a setting, and settings come from the config.
_PROGRESS: dict[str, tuple[str, ...]] = {
    "Prodigy": ("d", "d_max", "d_hat", "d_denom", "d_numerator", "k"),
    "AdamWScheduleFree": ("k", "weight_sum", "lr_max", "scheduled_lr", "train_mode"),
}


def _kind(optimizer: torch.optim.Optimizer) -> str:
    """The name under which a state is saved: where it rests (AdamW or HostAdamW) is no part of it."""
    return type(optimizer).__name__.removeprefix("Host")


def _parameters(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def optimizer_state(optimizer: torch.optim.Optimizer) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """(tensors named ``<parameter index>.<key>``, a JSON-able rest) of any optimizer whose state is tensors and numbers.

    Tensors shared between parameters (the code books of 8-bit states) are kept once.
    """
    tensors: dict[str, Tensor] = {}
    scalars: dict[str, dict[str, Any]] = {}
    shared: dict[str, str] = {}
    seen: dict[int, str] = {}
    parameters = _parameters(optimizer)
    for index, parameter in enumerate(parameters):
        for key, value in optimizer.state.get(parameter, {}).items():
            name = f"{index}.{key}"
            if not isinstance(value, Tensor):
                scalars.setdefault(str(index), {})[key] = _plain(value)
            elif id(value) in seen:
                shared[name] = seen[id(value)]
            else:
                seen[id(value)] = name
                tensors[name] = value.detach()
    progress = _PROGRESS.get(type(optimizer).__name__, ())
    rest = {
        "optimizer": _kind(optimizer),
        "shapes": [list(p.shape) for p in parameters],
        "scalars": scalars,
        "shared": shared,
        "groups": [{key: _plain(group[key]) for key in progress if key in group} for group in optimizer.param_groups],
    }
    return tensors, rest


def restore_optimizer(optimizer: torch.optim.Optimizer, tensors: Mapping[str, Tensor], rest: Mapping[str, Any]) -> None:
    """Give a freshly built optimizer the state saved by :func:`optimizer_state`, dtypes and bits as they were.

    Raises RunError when the state is of another optimizer or of other parameters.
    """
    parameters = _parameters(optimizer)
    if rest["optimizer"] != _kind(optimizer):
        raise RunError("snapshot.optimizer", f"The snapshot holds the state of {rest['optimizer']}, the config asks for {_kind(optimizer)}.", _HINT)
    if rest["shapes"] != [list(p.shape) for p in parameters] or len(rest["groups"]) != len(optimizer.param_groups):
        raise RunError("snapshot.optimizer", "The snapshot's optimizer state is of other parameters than this adapter's.", _HINT)
    optimizer.state.clear()
    placed: dict[str, Tensor] = {}
    owners = {index: group for group, index in _owners(optimizer)}
    for name in list(tensors) + list(rest["shared"]):
        index, _, key = name.partition(".")
        parameter = parameters[int(index)]
        if name in tensors:
            placed[name] = _place(optimizer, owners[int(index)], parameter, key, tensors[name])
        optimizer.state[parameter][key] = placed[name] if name in tensors else placed[rest["shared"][name]]
    for index, values in rest["scalars"].items():
        optimizer.state[parameters[int(index)]].update({k: _python(v) for k, v in values.items()})
    for group, saved in zip(optimizer.param_groups, rest["groups"]):
        group.update({k: _python(v) for k, v in saved.items()})


_HINT = "Start a new run under another name, or go back to the config that the snapshot was made with."


def _owners(optimizer: torch.optim.Optimizer) -> Iterator[tuple[dict[str, Any], int]]:
    index = 0
    for group in optimizer.param_groups:
        for _ in group["params"]:
            yield group, index
            index += 1


def _place(optimizer: torch.optim.Optimizer, group: dict[str, Any], parameter: Tensor, key: str, value: Tensor) -> Tensor:
    """The tensor where the optimizer expects it: a torch step counter on the host unless fused, pages for paged states."""
    if key == "step" and not (group.get("fused") or group.get("capturable")):
        return value.cpu().clone()
    if hasattr(optimizer, "host"):
        return value  # it takes the numbers over into its own host buffers at the next step
    if getattr(optimizer, "is_paged", False) and key in ("state1", "state2") and value.shape == parameter.shape:
        buffer = optimizer.get_state_buffer(parameter, dtype=value.dtype)
        buffer.copy_(value)
        return buffer
    return value.to(parameter.device, copy=True)


def _plain(value: Any) -> Any:
    """A JSON form that comes back to the same Python value: infinities, tensors of one element and tuples are marked."""
    if isinstance(value, Tensor):
        return {"tensor": value.item(), "dtype": str(value.dtype).removeprefix("torch.")}
    if isinstance(value, float) and not math.isfinite(value):
        return {"float": repr(value)}
    if isinstance(value, tuple | list):
        return {"list" if isinstance(value, list) else "tuple": [_plain(v) for v in value]}
    assert value is None or isinstance(value, bool | int | float | str), type(value)
    return value


def _python(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    if "tensor" in value:
        return torch.tensor(value["tensor"], dtype=getattr(torch, value["dtype"]))
    if "float" in value:
        return float(value["float"])
    return [_python(v) for v in value["list"]] if "list" in value else tuple(_python(v) for v in value["tuple"])


@contextmanager
def optimizer_on_host(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Inside, the optimizer's device tensors rest in host memory (``offload_optimizer_during_validation``)."""
    moved: list[tuple[dict[str, Any], str, torch.device]] = []
    for state in optimizer.state.values():
        for key, value in state.items():
            if isinstance(value, Tensor) and value.device.type != "cpu" and not getattr(value, "is_paged", False):
                moved.append((state, key, value.device))
                state[key] = value.cpu()
    try:
        yield
    finally:
        for state, key, device in moved:
            state[key] = state[key].to(device)
