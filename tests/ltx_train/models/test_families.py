"""Families: told apart by tensors alone, whatever their size and whatever the metadata says."""

from __future__ import annotations

import json

import pytest

from ltx_train.errors import CheckpointError
from ltx_train.models.families import FAMILIES, TransformerConfig, known_config, parse_config
from tests.tensor_tables import DATA, detect, shapes

# table, family, known config key; sizes of the published models
PUBLISHED = [
    ("ltxv-2b-0.9.0", "ltxv-2b"),
    ("ltxv-2b-0.9.1", "ltxv-2b"),
    ("ltxv-2b-0.9.5", "ltxv-2b"),
    ("ltxv-13b-0.9.7", "ltxv-13b"),
    ("ltx2-19b", "ltx2"),
    ("ltx2.3-22b", "ltx2.3"),
    ("ltx2.5-22b", "ltx2.5"),
]
AUDIO = dict(audio_num_attention_heads=32, audio_attention_head_dim=64, audio_in_channels=128, audio_out_channels=128, audio_cross_attention_dim=2048)
V2 = dict(gated_attention=True, cross_attention_adaln=True, prompt_adaln_single=True)
LTXV = dict(
    qk_norm_eps=1e-5, rope_type="interleaved", frequencies_precision="float32", use_middle_indices_grid=False, norm_before_cross_attention=False
)
EXPECTED = {
    "ltxv-2b": TransformerConfig(28, 32, 64, 128, 128, 2048, 4096, **LTXV),
    "ltxv-13b": TransformerConfig(48, 32, 128, 128, 128, 4096, 4096, **LTXV),
    "ltx2": TransformerConfig(48, 32, 128, 128, 128, 4096, 3840, **AUDIO),
    "ltx2.3": TransformerConfig(48, 32, 128, 128, 128, 4096, None, **AUDIO, **V2),
    "ltx2.5": TransformerConfig(48, 32, 128, 128, 128, 4096, None, **AUDIO, **V2, ff_bias=False, keyframe_embedding=True),
}


@pytest.mark.parametrize("table, family", PUBLISHED)
def test_published_models_without_any_metadata(table, family):
    found, config = detect(shapes(table, "transformer"), None)
    assert found is FAMILIES[family]
    assert config == EXPECTED[family]


@pytest.mark.parametrize("table, family", PUBLISHED)
def test_with_prefix_other_components_and_their_own_config(table, family):
    """Causal positions follow ``causal_temporal_positioning``, which the 0.9.0 and 0.9.1 configs do not have."""
    sheet = known_config({"ltx2-19b": "ltx2", "ltx2.3-22b": "ltx2.3", "ltx2.5-22b": "ltx2.5", "ltxv-13b-0.9.7": "ltxv-13b"}.get(table, table))
    found, config = detect(shapes(table), {"config": json.dumps(sheet)})
    assert found.name == family
    assert config.causal_positions is (table not in ("ltxv-2b-0.9.0", "ltxv-2b-0.9.1"))


def test_tensors_win_over_stale_metadata():
    """A repack of 2.5 that kept a 2.3 config, or one of another width."""
    stale = known_config("ltx2.3") | {"transformer": known_config("ltx2.3")["transformer"] | {"num_attention_heads": 7, "num_layers": 3, "ff_bias": True}}
    found, config = detect(shapes("ltx2.5-22b", "transformer"), {"config": json.dumps(stale), "model_version": "2.3.0"})
    assert found.name == "ltx2.5" and config == EXPECTED["ltx2.5"]


def test_numbers_no_tensor_tells_come_from_the_config():
    said = {"transformer": {"rope_type": "interleaved", "av_ca_timestep_scale_multiplier": 1.0, "positional_embedding_max_pos": [10, 64, 64]}}
    _, config = detect(shapes("ltx2-19b", "transformer"), {"config": json.dumps(said)})
    assert (config.rope_type, config.av_ca_timestep_scale_multiplier, config.positional_embedding_max_pos) == ("interleaved", 1.0, (10, 64, 64))


def test_heads_come_from_the_gates_else_from_the_config():
    small = {n: tuple(max(1, d // 16) if d > 64 else d for d in s) for n, s in shapes("ltx2-19b", "transformer").items()}
    _, config = detect(small, {"config": {"transformer": {"num_attention_heads": 8, "audio_num_attention_heads": 4}}})
    assert (config.num_attention_heads, config.audio_num_attention_heads, config.dim) == (8, 4, 256)


@pytest.mark.parametrize("metadata", [None, {}, {"config": "{broken"}, {"config": "[1]"}, {"config": json.dumps({"transformer": None})}])
def test_unreadable_config_is_no_config(metadata):
    assert detect(shapes("ltx2-19b", "transformer"), metadata)[1] == EXPECTED["ltx2"]
    assert parse_config(metadata).get("transformer") is None


def test_a_stranger_is_refused():
    with pytest.raises(CheckpointError, match="no LTX model") as caught:
        detect({"img_in.weight": (3072, 64), "double_blocks.0.img_attn.qkv.weight": (9216, 3072)})
    assert caught.value.code == "checkpoint.family"


@pytest.mark.parametrize("family", FAMILIES.values(), ids=list(FAMILIES))
def test_rows_are_complete(family):
    assert set(family.supplies) >= set(family.components)
    sections = {"transformer", "vae"} | ({"audio_vae", "vocoder"} if family.audio else set())
    assert sections <= set(family.config)
    assert family.text in ("t5", "gemma3", "gemma4") and family.feature_kind in ("t5", "v1", "v2")
    assert len(family.features) == (2 if family.feature_kind == "v2" else 1)
    layers = family.config["transformer"]["num_layers"]
    assert all(0 <= b < layers for b in family.sampling.stg_blocks)


def test_known_configs_are_copies():
    known_config("ltx2")["transformer"]["num_layers"] = 1
    assert known_config("ltx2")["transformer"]["num_layers"] == 48


def test_expansion_counts_equal_the_published_ones():
    """Tensor totals of the facts sheets: the lists are expanded whole."""
    totals = {"ltxv-2b-0.9.0": 908, "ltxv-2b-0.9.1": 1012, "ltxv-2b-0.9.5": 944, "ltxv-13b-0.9.7": 1444, "ltx2-19b": 4052, "ltx2.3-22b": 5947}
    assert {t: len(shapes(t)) for t in totals} == totals
    assert len(shapes("ltx2.5-22b", "transformer", "connectors")) == 4349
    assert (DATA / "text_encoders.json").exists()
