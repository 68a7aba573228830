"""Recorded passes: the same gradients as launched ones, also accumulated, streamed, and around a pass without gradients."""

from dataclasses import replace

import pytest
import torch

from ltx_train.geometry import AudioGrid, VideoGrid
from ltx_train.lora.adapters import LoraSection, attach
from ltx_train.memory.engine import BlockEngine, EngineSettings
from ltx_train.memory.graphs import GraphedPasses
from ltx_train.memory.quantization import QUANTIZERS, quantize_linears
from ltx_train.models.families import TransformerConfig
from ltx_train.models.modality import Modality
from ltx_train.models.transformer import LTXTransformer

CONFIG = TransformerConfig(
    num_layers=6, num_attention_heads=4, attention_head_dim=64, in_channels=8, out_channels=8, cross_attention_dim=256, caption_channels=None,
    audio_num_attention_heads=4, audio_attention_head_dim=64, audio_in_channels=16, audio_out_channels=16, audio_cross_attention_dim=256,
    gated_attention=True, cross_attention_adaln=True, prompt_adaln_single=True,
)  # fmt: skip


def modalities(device: str, seed: int) -> tuple[Modality, Modality]:
    g = torch.Generator().manual_seed(seed)
    randn = lambda *shape: torch.randn(*shape, generator=g)  # noqa: E731
    grid, sound, sigma = VideoGrid(2, 4, 4), AudioGrid(6), torch.tensor([0.2 + 0.1 * seed])
    whole = lambda tokens, positions, width: Modality(  # noqa: E731
        tokens, sigma, sigma.expand(1, tokens.shape[1]), positions.unsqueeze(0), randn(1, 5, width), timestep_rows=sigma.unsqueeze(1)
    )
    made = whole(randn(1, grid.tokens, 8), grid.positions(), 256), whole(randn(1, 6, 16), sound.positions(), 256)
    return tuple(replace(m, **{k: v.to(device) for k, v in vars(m).items() if isinstance(v, torch.Tensor)}) for m in made)


def network(device: str, settings: EngineSettings, dtype: torch.dtype) -> tuple[LTXTransformer, list[torch.nn.Parameter]]:
    torch.manual_seed(3)
    model = LTXTransformer(CONFIG).requires_grad_(False).eval().to(dtype).to(device)
    quantize_linears(model, QUANTIZERS["int8"]())
    engine = BlockEngine(model, settings, torch.device(device, 0) if device == "cuda" else torch.device(device), dtype)
    for index, block in enumerate(model.transformer_blocks):
        engine.take(index, block)
    model.block_runner = engine
    parameters = attach(model, LoraSection(rank=4), seed=0).parameters()
    with torch.no_grad():
        for p in parameters:
            p.add_(0.02)
    return model, parameters


def gradients(model: LTXTransformer, parameters, device: str, seeds: tuple[int, ...]) -> torch.Tensor:
    for seed in seeds:
        v, a = model(*modalities(device, seed))
        (v.float().square().sum() + a.float().square().sum()).backward()
    found = torch.cat([p.grad.flatten() for p in parameters])
    for p in parameters:
        p.grad = None
    return found


def test_without_a_card_passes_run_as_they_are():
    model, parameters = network("cpu", EngineSettings(), torch.float32)
    expected = gradients(model, parameters, "cpu", (1,))
    model.pass_runner = GraphedPasses(model, model.block_runner, lambda *a: pytest.fail("warned"))
    assert torch.equal(gradients(model, parameters, "cpu", (1,)), expected)
    assert not model.pass_runner.recordings


@pytest.mark.skipif(not torch.cuda.is_available(), reason="CUDA graphs need a CUDA card")
@pytest.mark.parametrize("streamed", [0, 4, 6])
def test_recorded_equals_launched(streamed):
    torch._dynamo.reset()
    model, parameters = network("cuda", EngineSettings(compile=True, streamed=streamed), torch.bfloat16)
    expected = [gradients(model, parameters, "cuda", seeds) for seeds in ((1,), (2,), (3, 4))]
    warned = []
    model.pass_runner = GraphedPasses(model, model.block_runner, lambda *a: warned.append(a))
    for _ in range(2):
        gradients(model, parameters, "cuda", (7,))
    for seeds, launched in zip(((1,), (2,), (3, 4)), expected):
        with torch.no_grad():
            model(*modalities("cuda", 5))
        recorded = gradients(model, parameters, "cuda", seeds)
        assert (recorded - launched).norm() <= 1e-3 * launched.norm()
    assert not warned
    assert len(model.pass_runner.recordings) == 1
