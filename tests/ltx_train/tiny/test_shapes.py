"""Shapes from configs: at the published configs they are the published tensor lists, name for name."""

from __future__ import annotations

import json

import pytest

from ltx_train.models.families import known_config
from ltx_train.tiny.shapes import (
    audio_vae_shapes,
    connector_shapes,
    gemma3_tower_shapes,
    gemma4_tower_shapes,
    gemma_shapes,
    projection_shapes,
    t5_shapes,
    video_vae_shapes,
    vocoder_shapes,
)
from tests.tensor_tables import DATA, shapes

FIVE = ("std-of-means", "mean-of-means", "channel", "mean-of-stds", "mean-of-stds_over_std-of-means")
SHEETS = json.loads((DATA / "text_encoders.json").read_text())


def published(table: str, component: str, prefix: str) -> dict[str, tuple[int, ...]]:
    return {n.removeprefix(prefix): s for n, s in shapes(table, component).items()}


@pytest.mark.parametrize(
    "table, config, statistics",
    [("ltxv-2b-0.9.0", "ltxv-2b-0.9.0", FIVE), ("ltxv-2b-0.9.1", "ltxv-2b-0.9.1", FIVE), ("ltxv-2b-0.9.5", "ltxv-2b-0.9.5", FIVE), ("ltxv-13b-0.9.7", "ltxv-13b", FIVE), ("ltx2-19b", "ltx2", FIVE), ("ltx2.3-22b", "ltx2.3", FIVE[:2])],
)
def test_unified_video_vaes(table, config, statistics):
    assert video_vae_shapes(known_config(config)["vae"], statistics) == published(table, "video_vae", "vae.")


def test_the_split_vaes_of_ltx_25():
    config = known_config("ltx2.5")
    assert video_vae_shapes(config["vae"]) == published("ltx2.5-22b", "video_vae_conv", "")
    mine = {n.rpartition("|")[2]: s for n, s in shapes("ltx2.5-22b", "video_vae_diffusion").items()}
    assert video_vae_shapes(config["vae_diffusion"]) == mine


@pytest.mark.parametrize("table, config", [("ltx2-19b", "ltx2"), ("ltx2.3-22b", "ltx2.3")])
def test_sound_and_connectors(table, config):
    config = known_config(config)
    assert audio_vae_shapes(config["audio_vae"]) == published(table, "audio_vae", "audio_vae.")
    assert vocoder_shapes(config["vocoder"]) == published(table, "vocoder", "vocoder.")
    assert connector_shapes(config["transformer"]) == published(table, "connectors", "model.diffusion_model.")
    kind, streams = ("v1", (3840, 0)) if table == "ltx2-19b" else ("v2", (4096, 2048))
    assert projection_shapes(kind, 49 * 3840, *streams) == published(table, "text_projection", "text_embedding_projection.")


def test_sound_and_connectors_of_ltx_25():
    config = known_config("ltx2.5")
    assert audio_vae_shapes(config["audio_vae"]) == published("ltx2.5-22b", "audio_file.audio_vae", "audio_vae.")
    assert vocoder_shapes(config["vocoder"]) == published("ltx2.5-22b", "audio_file.vocoder", "vocoder.")
    assert connector_shapes(config["transformer"]) == published("ltx2.5-22b", "connectors", "model.diffusion_model.")


def test_text_encoders():
    t5 = SHEETS["t5xxl"]["config"]
    found = t5_shapes(layers=t5["num_layers"], width=t5["d_model"], inner=t5["d_ff"], heads=t5["num_heads"], head_dim=t5["d_kv"], vocab=t5["vocab_size"])
    assert found == published("t5xxl", "t5", "")
    gemma3 = SHEETS["gemma3-12b"]["config"]
    found = gemma_shapes(gemma3["text_config"]) | gemma3_tower_shapes(3840, gemma3["vision_config"])
    assert found == {n.removeprefix("language_model.").removeprefix("vision_tower."): s for n, s in shapes("gemma3-12b").items()}
    gemma4 = SHEETS["gemma4-12b-ltx"]["metadata"]["gemma_config"]
    found = gemma_shapes(gemma4["text_config"]) | gemma4_tower_shapes(gemma4)
    assert found == published("gemma4-12b-ltx", "gemma4", "")
