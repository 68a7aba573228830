"""``bench numerics``: outputs and LoRA gradients of every fast path beside the eager float32 path, on a few full-width blocks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace

import torch
from torch import Tensor

from ..lora.adapters import LoraSection, attach
from ..memory.attention import prefer_attention
from ..memory.engine import BlockEngine, EngineSettings
from ..memory.quantization import QUANTIZERS, is_excluded
from ..models.families import FAMILIES
from ..models.linear import linears
from ..models.transformer import LTXTransformer, keeps_float32
from ..training.flow_matching import FlowMatchingSection
from ..training.step import TrainStep
from .networks import empty_transformer, fill, plain_adapter
from .step import StepCase, random_batch, strategy_of

COMPILED = EngineSettings(compile=True)
PATHS: dict[str, tuple[EngineSettings | None, str | None]] = {
    "plain way, autocast bf16": (None, None),
    "eager bf16": (EngineSettings(), None),
    "compiled bf16": (COMPILED, None),
    "compiled bf16, budget 0.4": (replace(COMPILED, budget=0.4), None),
    "compiled bf16, streamed, inputs in RAM": (replace(COMPILED, streamed=99, offload=True), None),
    "compiled int8": (COMPILED, "int8"),
    "compiled int8, streamed": (replace(COMPILED, streamed=99), "int8"),
    "compiled fp8 weights": (COMPILED, "fp8"),
    "compiled fp8 products": (replace(COMPILED, float8=True), "fp8"),
    "compiled fp8 products, streamed": (replace(COMPILED, float8=True, streamed=99), "fp8"),
}


WEIGHTS = ("untrained", "normal")
"""What the blocks are filled with, see :func:`.networks.fill`: as torch begins its layers, or about as large as trained ones, where each
layer adds more to the stream and so do its errors."""


def compare(case: StepCase, device: torch.device, weights: str, only: str = "") -> Iterator[dict[str, object]]:
    """A record a path: relative error (of the whole vector) and cosine of outputs and of LoRA gradients.

    weights: one of ``WEIGHTS``. only: the paths with these letters in their names.
    """
    config = replace(case.config(), num_layers=case.layers or 3)
    torch.manual_seed(0)
    prefer_attention(case.attention, device)
    model = empty_transformer(config, audio=True)
    fill(model, device, torch.float32, untrained=weights == "untrained")
    values = {name: p.detach() for name, p in model.named_parameters()}
    expected = run(case, config, model, adapt(model, case.rank), device, torch.float32)
    del model
    for name, (settings, quantization) in PATHS.items():
        if only not in name:
            continue
        torch._dynamo.reset()
        if settings is not None and case.tiny:
            settings = replace(settings, backend="aot_eager_decomp_partition")
        found = of_path(case, config, values, settings, quantization, device)
        yield {"path": name, "weights": weights, "blocks": config.num_layers, "size": case.size, "rank": case.rank, "loss": found[2], "loss_fp32": expected[2], **errors(expected, found)}


def of_path(case: StepCase, config, values: dict[str, Tensor], settings: EngineSettings | None, quantization: str | None, device: torch.device):
    model = empty_transformer(config, audio=True)
    for name, value in values.items():
        owner = model.get_submodule(name.rpartition(".")[0])
        kept = value.clone() if keeps_float32(name) else value.to(torch.bfloat16)
        setattr(owner, name.rpartition(".")[2], torch.nn.Parameter(kept, requires_grad=False))
    if settings is None:
        parameters = plain_adapter(model, case.rank, FAMILIES[case.family].target_modules)
        draw(parameters)
        return run(case, config, model, parameters, device, torch.bfloat16, autocast=True)
    engine = BlockEngine(model, settings, device, torch.bfloat16)
    for index, block in enumerate(model.transformer_blocks):
        for name, layer in linears(block):
            if quantization is not None and not is_excluded(name):
                layer.set_quantized(QUANTIZERS[quantization]().quantize(layer.weight.detach()))
        engine.take(index, block)
    model.block_runner = engine
    found = run(case, config, model, adapt(model, case.rank), device, torch.bfloat16)
    engine.close()
    return found


def adapt(model: LTXTransformer, rank: int) -> list[torch.nn.Parameter]:
    parameters = attach(model, LoraSection(rank=rank, alpha=rank), seed=0).parameters()
    draw(parameters)
    return parameters


@torch.no_grad()
def draw(parameters: list[torch.nn.Parameter]) -> None:
    """The same values for every path: A and B about as large as after some training."""
    g = torch.Generator().manual_seed(7)
    for p in parameters:
        p.copy_(torch.randn(p.shape, generator=g) * (0.02 if p.shape[0] < p.shape[1] else 0.01))


def run(case: StepCase, config, model: LTXTransformer, parameters, device: torch.device, dtype: torch.dtype, autocast: bool = False):
    """(velocities as one vector, gradients as one vector, loss) of one step with fixed noise."""
    batch = random_batch(case, config, device, dtype)
    outputs: list[Tensor] = []

    def watched(video, audio, perturbations=None):
        found = model(video, audio, perturbations)
        outputs.extend(part.detach().float().flatten() for part in found if part is not None)
        return found

    with torch.autocast(device.type, torch.bfloat16) if autocast else nullcontext():
        out = TrainStep(watched, strategy_of(True), FlowMatchingSection(), config=config)(batch, seed=0, step=0, slot=0, sigma=0.6)
    out.loss.backward()
    return torch.cat(outputs), torch.cat([p.grad.float().flatten() for p in parameters]), round(out.loss.item(), 5)


def errors(expected, found) -> dict[str, float]:
    result = {}
    for name, a, b in (("output", expected[0], found[0]), ("gradient", expected[1], found[1])):
        result[f"{name}_error"] = float(f"{((a - b).norm() / a.norm()).item():.3g}")
        result[f"{name}_cosine"] = round(torch.nn.functional.cosine_similarity(a, b, dim=0).item(), 6)
    return result
