"""Feature extractor and connectors against the official numbers (ltx-core 1.2.0, float32; see data/README.md)."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from ltx_train.models.connectors import Connectors, load_connector
from ltx_train.models.feature_extractor import FeatureExtractor
from ltx_train.models.weights import WeightSource
from ltx_train.text import TextFeatures

DATA = Path(__file__).parent / "data"
FAMILIES = {"ltx2": "v1", "ltx2.3": "v2", "ltx2.5": "v2"}
TOLERANCE = 5e-5
CPU = torch.device("cpu")


def inputs() -> tuple[torch.Tensor, torch.Tensor]:
    """Hidden states [L, B, n, hidden] and mask [B, n], padded on the left as the official encoder does."""
    tensors = load_file(DATA / "codec_inputs.safetensors")
    return tensors["text_hidden_states"], tensors["text_attention_mask"].bool()


def extractor(family: str) -> FeatureExtractor:
    source = WeightSource.open(DATA / f"{family}.checkpoint.safetensors")
    return FeatureExtractor.load(source, FAMILIES[family], hidden=16, states=3, device=CPU, dtype=torch.float32)


def features(family: str) -> list[TextFeatures]:
    """Our features of the valid tokens, all captions in one batch padded on the right."""
    states, mask = inputs()
    lengths = mask.sum(dim=1)
    order = torch.argsort((~mask).int(), dim=1, stable=True)
    right = states.gather(2, order[None, :, :, None].expand_as(states))[:, :, : int(lengths.max())]
    total = extractor(family).begin(lengths, right.shape[2])
    for layer, state in enumerate(right):
        total.add(layer, state)
    streams = total.finish(torch.float32)
    audio = streams.get("audio", [None] * len(lengths))
    return [TextFeatures(FAMILIES[family], v, a) for v, a in zip(streams["video"], audio)]


def connectors(family: str) -> Connectors:
    source = WeightSource.open(DATA / f"{family}.checkpoint.safetensors")
    settings = json.loads(source.metadata["config"])["transformer"]
    networks = {s: load_connector(source, settings, s, device=CPU, dtype=torch.float32) for s in ("video", "audio")}
    return Connectors(FAMILIES[family], networks, device=CPU, dtype=torch.float32)


@pytest.mark.parametrize("family", FAMILIES)
def test_features_equal_the_official_ones(family: str) -> None:
    recorded = load_file(DATA / f"{family}.codecs.safetensors")
    _, mask = inputs()
    for row, ours in enumerate(features(family)):
        if FAMILIES[family] == "v1":
            assert ours.audio is None
            torch.testing.assert_close(ours.video, recorded["text.features"][row][mask[row]], atol=TOLERANCE, rtol=0)
        else:
            torch.testing.assert_close(ours.video, recorded["text.video_features"][row][mask[row]], atol=TOLERANCE, rtol=0)
            torch.testing.assert_close(ours.audio, recorded["text.audio_features"][row][mask[row]], atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("family", FAMILIES)
def test_contexts_equal_the_official_ones(family: str) -> None:
    recorded = load_file(DATA / f"{family}.codecs.safetensors")
    context = connectors(family).contexts(features(family), minimum=128)
    assert context.mask is None and bool(recorded["text.context_mask"].all())  # registers fill every slot
    torch.testing.assert_close(context.video, recorded["text.video_context"], atol=TOLERANCE, rtol=0)
    torch.testing.assert_close(context.audio, recorded["text.audio_context"], atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("precision,rope", [("float64", "split"), ("float32", "split"), ("float64", "interleaved")])
def test_connectors_equal_diffusers_at_full_length(family: str, precision: str, rope: str) -> None:
    """1024 slots, both rotary layouts: LTX2ConnectorTransformer1d of diffusers on the same weights."""
    from diffusers.pipelines.ltx2.connectors import LTX2ConnectorTransformer1d

    source = WeightSource.open(DATA / f"{family}.checkpoint.safetensors")
    settings = json.loads(source.metadata["config"])["transformer"] | {"frequencies_precision": precision, "rope_type": rope}
    ours = load_connector(source, settings, "audio", device=CPU, dtype=torch.float32)
    theirs = LTX2ConnectorTransformer1d(
        ours.config.heads, ours.config.head_dim, ours.config.blocks, rope_double_precision=precision == "float64", rope_type=rope, gated_attention=ours.config.gated
    )
    renamed = {k.replace("transformer_1d_blocks", "transformer_blocks").replace("q_norm", "norm_q").replace("k_norm", "norm_k"): v for k, v in ours.state_dict().items()}
    theirs.load_state_dict(renamed, strict=True)
    tokens = torch.randn(2, 70, ours.config.dim, generator=torch.Generator().manual_seed(5))
    padded = torch.cat([tokens, torch.full((2, 1024 - 70, ours.config.dim), 9.0)], dim=1)
    mask = torch.where(torch.arange(1024) < 70, 0.0, -1e9).expand(2, 1, 1, -1)
    with torch.no_grad():
        expected, _ = theirs(padded, mask)
        found = ours(ours.padded(list(tokens), 1024))
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)
