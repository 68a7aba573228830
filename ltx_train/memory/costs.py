"""What a training step costs in device memory, host memory and time: a model fitted to measurements (bench/results)."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from torch import nn

from ..models.blank import blank
from ..models.blocks import TransformerBlock
from ..models.families import TransformerConfig
from ..models.transformer import LTXTransformer
from .disk import AHEAD as DISK_BUFFERS
from .keeping import MOST_TOKENS
from .quantization import QUANTIZERS

GIB = 1 << 30
CONTEXT = 0.9 * GIB
"""CUDA context, library workspaces and what the allocator holds back, on Linux."""
WORKING_SET = {True: 44, False: 55}
"""Token tensors alive inside one block at most, compiled or not (a unit: one [tokens, dim] tensor of each stream)."""
PLAIN_BLOCK = 14.5
"""So many fewer in the blocks of LTX-Video, which have no gates and no other stream: fitted to measurements at 4992 and 6120 tokens."""
KEPT_UNITS = ((0.0, 1.1), (0.1, 4.6), (0.2, 7.3), (0.3, 9.8), (0.4, 12.0), (0.5, 14.3), (0.6, 16.2))
"""Activation budget -> units kept a block: fitted to measurements at 0, 0.4 and 0.5 with 2268 and 6120 tokens; those between and beyond are carried over from them."""
PLAIN_KEPT = 0.6
"""The share of them, beyond the block's input, that LTX-Video's blocks keep."""
KEPT_TEXT_UNITS = 12.0
"""The same of the text's side (a unit: one [text tokens, dim] tensor of each stream), times the budget."""
SPARED = ((0.0, 0.0), (0.1, 0.24), (0.2, 0.44), (0.3, 0.64), (0.4, 0.84), (0.5, 1.0), (0.6, 1.0))
"""Activation budget -> share of the recomputed matrix products that is spared."""
FLOAT8_GAIN = 1.38
LAUNCHING = {True: (0.0044, 0.00021), False: (0.0115, 0.00054)}
"""Seconds that a host takes to launch a block's forward and backward pass, for the block and for each of its matrices, compiled or not: what small clips wait for, unless passes are recorded."""
FITTED_MATRICES = 48 * 34
"""Matrices in all blocks of the network that :class:`Speeds` was fitted to (LTX-2.3)."""
SIDE_STREAM = 0.9 * GIB
"""What the allocator cannot use beside block inputs that come and go on a stream of their own."""
RECORDING = 0.55 * GIB
"""What recorded passes hold, and what the allocator cannot use beside them."""
OPTIMIZER_CHUNKS = 4 * 4 * (1 << 25)
"""Bytes on the card of running means that pass over it."""


@dataclass(frozen=True)
class Work:
    """What is trained: the network, the largest micro-batch in tokens, and the adapter's numbers."""

    config: TransformerConfig
    video_tokens: int
    audio_tokens: int = 0
    text_tokens: int = 1024
    batch: int = 1
    accumulation: int = 1
    lora: int = 0

    @property
    def audio(self) -> bool:
        return self.audio_tokens > 0 and self.config.has_audio


@dataclass(frozen=True)
class Fit:
    """One way to fit it: the settings that cost memory or time."""

    quantization: str | None = None
    streamed: int = 0
    budget: float = 0.0
    offload: bool = False
    optimizer_in_ram: bool = False
    compiled: bool = True
    float8: bool = False
    together: int = 1
    on_disk: int = 0
    graphs: bool = False

    def recorded(self, work: Work) -> bool:
        """Whether the passes of this work, alone or together, are recorded as CUDA graphs (see ``memory/graphs.py``)."""
        tokens = work.batch * max(work.video_tokens, work.audio_tokens if work.audio else 0)
        return self.graphs and self.compiled and not self.offload and not self.on_disk and tokens <= MOST_TOKENS

    def words(self, layers: int) -> str:
        """In words for people."""
        parts = [f"{self.quantization or 'plain'} weights"]
        parts.append("all blocks on the card" if not self.streamed else f"{self.streamed} of {layers} blocks streamed from RAM")
        parts += [f"{self.on_disk} of them on the disk"] if self.on_disk else []
        parts.append("activations recomputed" if self.budget == 0 else f"{self.budget:.0%} of the activations kept")
        parts += ["block inputs in RAM"] if self.offload else []
        parts += [f"{self.together} micro-steps together"] if self.together > 1 else []
        parts += ["optimizer in RAM"] if self.optimizer_in_ram else []
        return ", ".join(parts) + ("" if self.compiled else ", not compiled")


@dataclass(frozen=True)
class Speeds:
    """Rates of a card: tflops of dense 16-bit products by its maker, upload and disk in bytes a second, seconds of launches a step of LTX-2.3."""

    tflops: float
    upload: float
    launches: float = 0.076
    disk: float = 2e9

    @property
    def sustained(self) -> float:
        """Operations a second that a training step reaches: 54 % of the maker's number on the H200."""
        return self.tflops * 0.54e12


@dataclass(frozen=True)
class Cost:
    """device, host: bytes. seconds: of one optimizer step. upload_bound: the link is what it waits for."""

    device: float
    host: float
    seconds: float
    upload_bound: bool


@lru_cache(maxsize=16)
def block_layers(config: TransformerConfig, audio: bool) -> tuple[tuple[str, int, int], ...]:
    """(name, out, in) of every matrix of a block."""
    with blank():
        block = TransformerBlock(config, video=True, audio=audio)
    return tuple((name, layer.out_features, layer.in_features) for name, layer in block.named_modules() if isinstance(layer, nn.Linear))


@lru_cache(maxsize=16)
def outside_numbers(config: TransformerConfig, audio: bool) -> int:
    """Parameters that are in no block."""
    with blank():
        model = LTXTransformer(config, audio=audio)
    return sum(p.numel() for name, p in model.named_parameters() if not name.startswith("transformer_blocks."))


def _interpolate(table: tuple[tuple[float, float], ...], at: float) -> float:
    for (x0, y0), (x1, y1) in zip(table, table[1:]):
        if at <= x1:
            return y0 + (y1 - y0) * (at - x0) / (x1 - x0)
    return table[-1][1]


def flops(work: Work) -> tuple[float, float, float]:
    """(forward, backward, matrix products among the forward) operations of one micro-batch: frozen products have one backward."""
    c, counts = work.config, {"v": work.video_tokens, "a": work.audio_tokens, "s": work.text_tokens}
    forward = backward = 0.0
    for name, out, inputs in block_layers(c, work.audio):
        kind = _tokens_of(name)
        one = 2.0 * counts[kind] * out * inputs
        forward += one
        backward += 0.0 if kind == "s" else one
    products = forward
    video, audio, text = counts["v"], counts["a"] if work.audio else 0, counts["s"]
    attention = 4.0 * c.dim * video * (video + text) + 4.0 * c.audio_dim * (audio * (audio + text) + 2 * video * audio)
    scale = c.num_layers * work.batch
    return scale * (forward + attention), scale * (backward + 2.5 * attention), scale * products


def _tokens_of(name: str) -> str:
    """Whose tokens a layer reads: v(ideo), a(udio) or t(e)xt."""
    from_context = name.endswith(("to_k", "to_v"))
    if "attn2" in name and from_context:
        return "s"
    if name.startswith("audio_to_video"):
        return "a" if from_context else "v"
    if name.startswith("video_to_audio"):
        return "v" if from_context else "a"
    return "a" if name.startswith("audio_") else "v"


def cost(work: Work, fit: Fit, speeds: Speeds) -> Cost:
    """What a step costs with this fit on such a card."""
    c, layers = work.config, work.config.num_layers
    matrices = block_layers(c, work.audio)
    numbers = sum(out * inputs for _, out, inputs in matrices)
    bits = 16.0 if fit.quantization is None else QUANTIZERS[fit.quantization].bits
    block = numbers * bits / 8
    unit = 2.0 * work.batch * (work.video_tokens * c.dim + (work.audio_tokens * c.audio_dim if work.audio else 0))
    resident = layers - fit.streamed
    kept, working = _interpolate(KEPT_UNITS, fit.budget), WORKING_SET[fit.compiled]
    if not c.has_audio:
        kept, working = KEPT_UNITS[0][1] + PLAIN_KEPT * (kept - KEPT_UNITS[0][1]), working - PLAIN_BLOCK
    device = CONTEXT + 2.0 * outside_numbers(c, work.audio) + resident * block + min(3, fit.streamed) * block
    device += 2.0 * numbers if fit.quantization is not None and not fit.float8 else 0.0
    device += 10.0 * work.lora + (min(OPTIMIZER_CHUNKS, 8.0 * work.lora) if fit.optimizer_in_ram else 8.0 * work.lora)
    text = 2.0 * work.batch * work.text_tokens * (c.dim + (c.audio_dim if work.audio else 0))
    device += unit * (fit.together * (3 if fit.offload else layers * kept) + working) + fit.together * layers * KEPT_TEXT_UNITS * fit.budget * text
    device += (SIDE_STREAM if fit.offload else 0.0) + GIB / 4 * (fit.together - 1)
    if fit.recorded(work):  # a recording writes its gradients over those before, which stand aside meanwhile
        device += RECORDING + (4.0 * work.lora if work.accumulation > fit.together else 0.0)
    host = 4 * GIB + (fit.streamed - fit.on_disk + min(DISK_BUFFERS, fit.on_disk)) * block + (fit.together * layers * unit if fit.offload else 0.0) + (8.0 * work.lora if fit.optimizer_in_ram else 0.0)

    forward, backward, products = flops(work)
    down = sum(2.0 * work.video_tokens * out * inputs for name, out, inputs in matrices if name == "ff.net.2") * layers * work.batch
    again = forward - down - _interpolate(SPARED, fit.budget) * (products - down)
    total = forward + backward + again
    if fit.float8:
        share = (2 * products + products - down - _interpolate(SPARED, fit.budget) * (products - down)) / total
        total *= 1 - share + share / FLOAT8_GAIN
    seconds = total / speeds.sustained * (1.0 if fit.compiled else 1.6) + speeds.launches * layers * len(matrices) / FITTED_MATRICES
    expansion = 0.027 * (989 / speeds.tflops) ** 0.5 if fit.quantization is not None and not fit.float8 else 0.0
    if not fit.recorded(work):
        each, matrix = LAUNCHING[fit.compiled]
        seconds = max(seconds, layers * (each + matrix * len(matrices)) * (speeds.launches / Speeds.launches))
    group = fit.together * seconds + expansion  # micro-steps that share an upload and an expansion of each block
    upload = max(2.0 * max(0, fit.streamed - 3) * block / speeds.upload, 2.0 * fit.on_disk * block / speeds.disk)
    side = (8.0 * work.lora * 2 / speeds.upload * 0.6 if fit.optimizer_in_ram else 0.0) + (0.02 if fit.offload else 0.0)
    return Cost(device, host, -(-work.accumulation // fit.together) * max(group, upload) + side, upload > group)
