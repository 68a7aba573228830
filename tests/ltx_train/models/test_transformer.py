"""The transformer as a piece of machinery: streams, hooks, dtypes, compact timesteps, compiling, recomputing."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from ltx_train.errors import CheckpointError
from ltx_train.geometry import AudioGrid, VideoGrid
from ltx_train.models.blank import blank
from ltx_train.models.checkpoint import Checkpoint
from ltx_train.models.families import TransformerConfig
from ltx_train.models.linear import LoraWeights, linears
from ltx_train.models.modality import Modality
from ltx_train.models.transformer import LTXTransformer, Perturbations, load_transformer, run_block, strength_bias

DATA = Path(__file__).parents[2] / "parity" / "data"
CONFIG = TransformerConfig(
    num_layers=3,
    num_attention_heads=4,
    attention_head_dim=8,
    in_channels=8,
    out_channels=8,
    cross_attention_dim=32,
    caption_channels=None,
    audio_num_attention_heads=4,
    audio_attention_head_dim=4,
    audio_in_channels=16,
    audio_out_channels=16,
    audio_cross_attention_dim=16,
    gated_attention=True,
    cross_attention_adaln=True,
    prompt_adaln_single=True,
)
FULL = replace(
    CONFIG,
    num_layers=48,
    num_attention_heads=32,
    attention_head_dim=128,
    in_channels=128,
    out_channels=128,
    cross_attention_dim=4096,
    audio_num_attention_heads=32,
    audio_attention_head_dim=64,
    audio_in_channels=128,
    audio_out_channels=128,
    audio_cross_attention_dim=2048,
)


def build(**streams) -> LTXTransformer:
    torch.manual_seed(3)
    return LTXTransformer(CONFIG, **streams).requires_grad_(False).eval()


def streams(frames: int = 2, steps: int = 6, batch: int = 2) -> tuple[Modality, Modality]:
    g = torch.Generator().manual_seed(4)
    randn = lambda *shape: torch.randn(*shape, generator=g)  # noqa: E731
    grid, sound = VideoGrid(frames, 2, 2), AudioGrid(steps)
    sigma = torch.linspace(0.8, 0.3, batch)
    times = sigma.unsqueeze(1).repeat(1, grid.tokens)
    times[:, :4] = 0.0
    video = Modality(
        randn(batch, grid.tokens, 8), sigma, times, grid.positions().expand(batch, -1, -1, -1), randn(batch, 5, 32)
    )
    audio_times = sigma.unsqueeze(1).expand(-1, steps)
    audio = Modality(randn(batch, steps, 16), sigma, audio_times, sound.positions().expand(batch, -1, -1, -1), randn(batch, 5, 16))
    return video, audio


def same(a, b) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b))


@pytest.mark.parametrize("kind", [{}, {"audio": False}, {"video": False}])
def test_full_size_on_meta_is_quick_and_of_the_known_size(kind):
    """Parameter counts of the 22B transformer, whole and single streams: measured on the published layout."""
    with blank():
        model = LTXTransformer(FULL, **kind)
    expected = {(): 18.99e9, ("audio",): 13.12e9, ("video",): 3.286e9}[tuple(kind)]
    assert sum(p.numel() for p in model.parameters()) == pytest.approx(expected, rel=1e-3)
    assert all(p.is_meta for p in model.parameters())


def test_streams_that_were_not_built_are_refused():
    video, audio = streams()
    with pytest.raises(AssertionError):
        build(audio=False)(video, audio)
    with pytest.raises(AssertionError):
        build(video=False)(video, None)
    with pytest.raises(AssertionError):
        build()(None, None)
    with pytest.raises(AssertionError):
        LTXTransformer(CONFIG, video=False, audio=False)


def test_outputs_are_in_the_transformers_dtype():
    model = build().to(torch.bfloat16)
    video, audio = model(*streams())
    assert video.dtype == audio.dtype == model.dtype == torch.bfloat16
    assert video.isfinite().all()
    assert audio.isfinite().all()


def test_compact_timesteps_equal_found_ones():
    """rows [B, 2] and an index give bitwise what searching gives; a wrong index does not."""
    model, (video, audio) = build(), streams()
    rows = torch.stack([torch.zeros(2), video.sigma], dim=1)
    index = (video.timesteps != 0).long()
    compact = replace(video, timestep_rows=rows, row_index=index)
    sound = replace(audio, timestep_rows=audio.sigma.unsqueeze(1))
    expected = model(video, audio)
    for a, b in zip(model(compact, sound), expected):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-6)
    wrong = model(replace(compact, row_index=1 - index), sound)
    assert (wrong[0] - expected[0]).abs().max() > 1e-3


def test_compact_timesteps_are_not_searched(monkeypatch):
    """The search waits for the accelerator, so the compact form must avoid it."""
    video, audio = streams()
    monkeypatch.setattr(torch, "unique", lambda *a, **k: pytest.fail("searched"))
    compact = replace(video, timestep_rows=torch.stack([torch.zeros(2), video.sigma], dim=1), row_index=(video.timesteps != 0).long())
    values, index = compact.distinct_timesteps()
    assert torch.equal(values[index], video.timesteps)
    assert audio.distinct_timesteps()[1] is None
    with pytest.raises(AssertionError):
        replace(compact, row_index=None).distinct_timesteps()


def test_every_block_passes_through_the_runner():
    model, (video, audio) = build(), streams()
    expected, seen = model(video, audio), []

    def runner(block, index, *inputs):
        assert block is model.transformer_blocks[index]
        seen.append(index)
        return run_block(block, index, *inputs)

    model.block_runner = runner
    assert same(model(video, audio), expected)
    assert seen == [0, 1, 2]


def with_lora(model: LTXTransformer) -> list[torch.Tensor]:
    for name, layer in linears(model):
        if name.endswith(("to_q", "to_out.0", "net.2")):
            layer.lora = LoraWeights(layer.in_features, layer.out_features, rank=2)
            torch.nn.init.normal_(layer.lora.B, std=0.1)
    return [p for p in model.parameters() if p.requires_grad]


def gradients(model: LTXTransformer, parameters: list[torch.Tensor]) -> list[torch.Tensor]:
    out = model(*streams())
    return torch.autograd.grad(sum(o.square().mean() for o in out), parameters)


def test_recomputed_blocks_give_the_same_gradients():
    model = build()
    parameters = with_lora(model)
    expected = gradients(model, parameters)
    calls = []

    def recomputing(block, index, *inputs):
        calls.append(index)
        return checkpoint(block, *inputs, use_reentrant=False)

    model.block_runner = recomputing
    assert same(gradients(model, parameters), expected)
    assert calls == [0, 1, 2]
    assert all(g.abs().max() > 0 for g in expected)


def test_base_weights_get_gradients_when_asked():
    """Full fine-tuning: every parameter that takes part has a gradient, tables and embedders too."""
    model = build().requires_grad_(True)
    torch.nn.init.normal_(model.audio_proj_out.bias)
    sum(o.square().mean() for o in model(*streams())).backward()
    assert [n for n, p in model.named_parameters() if p.grad is None or not p.grad.abs().max() > 0] == []


def test_perturbed_blocks_only():
    keep = torch.ones(3, 2)
    keep[1, 0] = 0
    blocks = Perturbations(skip_video_self_attn=keep).blocks(3, torch.device("cpu"))
    assert blocks[0] is None
    assert blocks[2] is None
    assert torch.equal(blocks[1].video_self_attn, torch.tensor([0.0, 1.0]))
    assert blocks[1].audio_self_attn is None
    with pytest.raises(AssertionError):
        Perturbations(skip_video_self_attn=keep).blocks(4, torch.device("cpu"))


def test_perturbation_touches_its_sample_alone():
    model, (video, audio) = build(), streams()
    keep = torch.ones(3, 2)
    keep[1, 0] = 0
    plain, perturbed = model(video, audio), model(video, audio, Perturbations(skip_video_self_attn=keep))
    assert (plain[0][0] - perturbed[0][0]).abs().max() > 1e-4
    torch.testing.assert_close(plain[0][1], perturbed[0][1])


def test_strength_bias():
    bias = strength_bias(torch.tensor([1.0, 0.35, 0.0]), torch.float32)
    assert bias[0] == 0
    assert bias[1] == pytest.approx(-1.0498221, abs=1e-6)  # ln 0.35
    assert bias[2] == torch.finfo(torch.float32).min
    assert strength_bias(torch.tensor([0, 1]), torch.bfloat16).isfinite().all()


def test_a_token_that_may_attend_to_nothing_gives_no_nan():
    model, (video, audio) = build(), streams()
    mask = torch.ones(2, 8, 8)
    mask[:, 3] = 0
    out, _ = model(replace(video, attention_mask=mask, context_mask=torch.zeros(2, 5)), audio)
    assert out.isfinite().all()


def test_keyframes_are_ignored_without_the_embedding():
    model, (video, audio) = build(), streams()
    marked = replace(video, keyframes=torch.ones(2, 8, dtype=torch.bool))
    assert same(model(marked, audio), model(video, audio))


def test_load_is_frozen_in_the_asked_dtype_with_float32_tables():
    opened = Checkpoint.open(DATA / "ltx2.5.checkpoint.safetensors")
    model = load_transformer(opened, dtype=torch.bfloat16, device="cpu")
    assert not model.training
    assert not any(p.requires_grad for p in model.parameters())
    dtypes = {("table" in n, p.dtype) for n, p in model.named_parameters()}
    assert dtypes == {(True, torch.float32), (False, torch.bfloat16)}
    meta = load_transformer(opened, dtype=torch.bfloat16, device="meta")
    assert all(p.is_meta for p in meta.parameters())
    assert {n: p.dtype for n, p in meta.named_parameters()} == {n: p.dtype for n, p in model.named_parameters()}


def test_a_file_without_transformer_says_which_file_has_it():
    opened = Checkpoint.open(DATA / "ltx2.5.video_vae_diffusion.safetensors")
    for device in ("cpu", "meta"):
        with pytest.raises(CheckpointError, match="transformer"):
            load_transformer(opened, dtype=torch.float32, device=device)


@pytest.mark.parametrize("kind", [{"audio": False}, {"video": False}])
def test_single_streams_still_refuse_what_no_stream_knows(kind, monkeypatch):
    opened = Checkpoint.open(DATA / "ltx2.3.checkpoint.safetensors")
    source = opened.source("transformer")
    alien = source.renamed({"transformer_blocks.0.attn1.to_q.bias": "transformer_blocks.0.attn1.to_q.wrong"})
    monkeypatch.setattr(Checkpoint, "source", lambda self, component: alien)
    with pytest.raises(CheckpointError, match="unexpected") as caught:
        load_transformer(opened, dtype=torch.float32, device="cpu", **kind)
    assert "to_q.wrong" in caught.value.hint
