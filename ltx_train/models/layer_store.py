"""The layers of a big frozen model, one after the other: all in memory, in 8 bits, or read from disk as they are needed."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch
from torch import nn

from ..errors import ConfigError, MissingPackage
from .blank import blank
from .weights import WeightSource, load_weights

PLACEMENTS = ("auto", "resident", "stream")
_SPARE = 3 << 30  # bytes left for activations, the projection's working copy and the allocator


@dataclass(frozen=True)
class LayerPlan:
    """How the layers of one model are held.

    build: index -> the layer as an empty module (called under the meta device). prefix: such as ``layers.{}.``.
    """

    build: Callable[[int], nn.Module]
    prefix: str
    count: int
    source: WeightSource
    device: torch.device
    dtype: torch.dtype
    eight_bit: bool = False

    def bytes(self) -> int:
        """Memory of all layers as computed with."""
        width = 1 if self.eight_bit else torch.empty((), dtype=self.dtype).element_size()
        start = self.prefix.partition("{")[0]
        return sum(torch.Size(self.source.info(n).shape).numel() * width for n in self.source.keys() if n.startswith(start))

    def read(self, index: int, device: torch.device | str) -> nn.Module:
        """Layer ``index`` with its weights on ``device``, checked strictly against the file."""
        with blank():
            layer = self.build(index)
        load_weights(layer, self.source.subset(self.prefix.format(index)), dtype=self.dtype, device=device)
        return layer.requires_grad_(False).eval()


def choose_placement(plan: LayerPlan, placement: str, beside: int) -> str:
    """``resident`` or ``stream``; auto takes what fits the free memory next to ``beside`` bytes of other weights.

    Raises ConfigError for an unknown placement and for 8 bits where they cannot be had.
    """
    if placement not in PLACEMENTS:
        raise ConfigError("text_encoder.placement", f"Text encoder placement {placement!r} is not one of {', '.join(PLACEMENTS)}.")
    if plan.eight_bit and plan.device.type != "cuda":
        raise ConfigError(
            "text_encoder.8bit", f"The 8-bit text encoder needs a CUDA device, not {plan.device.type}.", "Set load_text_encoder_in_8bit to false."
        )
    if plan.eight_bit and placement == "stream":
        raise ConfigError("text_encoder.8bit", "An 8-bit text encoder cannot be streamed.", "Streaming computes in full precision and needs less memory: drop 8 bits.")
    if placement != "auto":
        return placement
    free = _free_memory(plan.device)
    return "resident" if free is None or plan.bytes() + beside + _SPARE <= free else "stream"


class LayerStore:
    """Gives the layers in order, again and again. placement: ``resident`` or ``stream``."""

    def __init__(self, plan: LayerPlan, placement: str) -> None:
        self.plan = plan
        self.placement = placement
        self._kept: list[nn.Module] = []
        if placement == "resident":
            convert = _to_eight_bit if plan.eight_bit else lambda layer, device: layer
            home = "cpu" if plan.eight_bit else plan.device
            self._kept = [convert(plan.read(i, home), plan.device) for i in range(plan.count)]

    def each(self) -> Iterator[nn.Module]:
        """The layers on the device in order; streamed ones are read one ahead and forgotten after their turn."""
        if self._kept:
            yield from self._kept
            return
        with ThreadPoolExecutor(max_workers=1, thread_name_prefix="text-encoder-read") as reader:
            ahead = reader.submit(self.plan.read, 0, "cpu")
            for index in range(self.plan.count):
                layer = ahead.result()
                if index + 1 < self.plan.count:
                    ahead = reader.submit(self.plan.read, index + 1, "cpu")
                yield layer.to(self.plan.device)
                del layer


def _to_eight_bit(layer: nn.Module, device: torch.device) -> nn.Module:
    """Every Linear as a bitsandbytes Linear8bitLt (threshold 6, as the official trainer), moved to ``device``."""
    try:
        from bitsandbytes.nn import Int8Params, Linear8bitLt
    except ImportError as error:
        raise MissingPackage("bitsandbytes", "An 8-bit text encoder", "Or set load_text_encoder_in_8bit to false: the encoder is then streamed") from error
    # It warns at every product that its input is rounded to float16 on the way to int8: thousands of lines a caption.
    logging.getLogger("bitsandbytes.autograd._functions").setLevel(logging.ERROR)
    for parent in list(layer.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, nn.Linear):
                small = Linear8bitLt(child.in_features, child.out_features, bias=False, has_fp16_weights=False, threshold=6.0, device="meta")
                small.weight = Int8Params(child.weight.data.to(torch.float16), requires_grad=False, has_fp16_weights=False)
                setattr(parent, name, small)
    return layer.to(device)


def _free_memory(device: torch.device) -> int | None:
    """Free bytes of the device (of the host for cpu); None where it cannot be known."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    if device.type != "cpu":
        return None
    try:
        import psutil
    except ImportError:
        return None
    return psutil.virtual_memory().available
