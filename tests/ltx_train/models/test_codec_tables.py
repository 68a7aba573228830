"""Every tensor of every published VAE and vocoder has its place in the network built from that file's own config."""

from pathlib import Path

import pytest
import torch

from ltx_train.errors import CheckpointError
from ltx_train.models.audio_codec import audio_halves, vocoder_network
from ltx_train.models.audio_codec_keys import audio_vae_arguments
from ltx_train.models.diffusion_decoder import diffusion_network
from ltx_train.models.diffusion_keys import diffusion_parts
from ltx_train.models.families import known_config
from ltx_train.models.video_codec import conv_halves
from ltx_train.models.video_codec_keys import MEAN, STD, VaeLayout, conv_names, read_blocks
from ltx_train.models.weights import WeightSource, check_weights
from tests.tensor_tables import table, write_hollow

CONFIG = {"ltxv-13b-0.9.7": "ltxv-13b", "ltx2-19b": "ltx2", "ltx2.3-22b": "ltx2.3", "ltx2.5-22b": "ltx2.5"}
VIDEO = {
    "ltxv-2b-0.9.0": ("video_vae", "vae."),
    "ltxv-2b-0.9.1": ("video_vae", "vae."),
    "ltxv-2b-0.9.5": ("video_vae", "vae."),
    "ltxv-13b-0.9.7": ("video_vae", "vae."),
    "ltx2-19b": ("video_vae", "vae."),
    "ltx2.3-22b": ("video_vae", "vae."),
    "ltx2.5-22b": ("video_vae_conv", ""),
}
AUDIO = {"ltx2-19b": "", "ltx2.3-22b": "", "ltx2.5-22b": "audio_file."}


def published(tmp_path: Path, name: str, component: str, prefix: str) -> WeightSource:
    """The tensors of one component as a file of full size on paper, without their prefix."""
    entries = {n.rpartition("|")[2]: (shape, dtype) for n, (shape, dtype, c) in table(name).items() if c.startswith(component)}
    assert entries, (name, component)
    return WeightSource.open(write_hollow(tmp_path / "component.safetensors", entries)).subset(prefix)


@pytest.mark.parametrize("name", VIDEO)
def test_video_vae(tmp_path, name: str) -> None:
    source = published(tmp_path, name, *VIDEO[name])
    layout = VaeLayout.of(known_config(CONFIG.get(name, name))["vae"])
    assert layout.factors == (8, 32, 32)
    used = 0
    for module, tensors in conv_halves(source, layout).values():
        used += len(check_weights(module, tensors))
    assert source.info(MEAN).shape == source.info(STD).shape == (layout.latent_channels,)
    assert used == sum(not n.startswith("per_channel_statistics.") for n in source.keys())


def test_diffusion_video_vae(tmp_path) -> None:
    source = published(tmp_path, "ltx2.5-22b", "video_vae_diffusion", "")
    layout = VaeLayout.of(known_config("ltx2.5")["vae_diffusion"])
    ((module, tensors),) = conv_halves(source, layout, decoder=False).values()
    encoder = check_weights(module, tensors)
    network, parts = diffusion_network(source, layout)
    check_weights(network, parts)
    stored = {part.name for part in parts.names.values()}
    assert len(encoder) + len(stored) + 1 == sum(not n.startswith("per_channel") for n in source.keys())  # 1: type_emb, for training only
    assert all(p.is_meta for p in network.parameters())


@pytest.mark.parametrize("name", AUDIO)
def test_audio_vae_and_vocoder(tmp_path, name: str) -> None:
    config = known_config(CONFIG.get(name, name))
    source = published(tmp_path, name, AUDIO[name] + "audio_vae", "audio_vae.")
    arguments = audio_vae_arguments(config["audio_vae"])
    used = sum(len(check_weights(module, tensors)) for module, tensors in audio_halves(source, arguments).values())
    assert used == len(source) - 2 and source.info(MEAN).shape == (128,)
    vocoder = published(tmp_path, name, AUDIO[name] + "vocoder", "vocoder.")
    network, tensors, rate = vocoder_network(vocoder, config["vocoder"], 2 * arguments["mel_bins"])
    assert len(check_weights(network, tensors)) == len(vocoder)
    assert rate == (24000 if name == "ltx2-19b" else 48000)


def test_gates_of_early_diffusion_decoders_fold_into_rows() -> None:
    parts = diffusion_parts(
        [
            "decoder.diff_blocks.0.attn.proj.weight",
            "decoder.diff_blocks.0.gate_msa",
            "decoder.diff_blocks.0.mlp.w_down.weight",
            "decoder.coarse_head.weight",
        ]
    )
    assert parts["decoder.diff_blocks.0.attn.to_out.0.weight"].gate == "decoder.diff_blocks.0.gate_msa"
    assert parts["decoder.diff_blocks.0.mlp.w_down.weight"].gate is None
    assert len(parts) == 2


@pytest.mark.parametrize(
    "blocks, code",
    [
        ([["res_x", {"num_layers": 2}], ["attn_res_x", {"num_layers": 1}], ["res_x", 1]], "codec.attention_blocks"),
        ([["res_x", 1], ["spiral", 1], ["res_x", 1]], "codec.unknown_block"),
        ([["compress_all", 1], ["res_x", 1]], "codec.unknown_layout"),
    ],
)
def test_layouts_that_cannot_be_built_are_refused(blocks: list, code: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        read_blocks(blocks)
    assert caught.value.code == code and caught.value.hint and len(caught.value.message) < 120
    if code == "codec.attention_blocks":
        assert "ComfyUI" in caught.value.hint and "attn_res_x" in caught.value.message


@pytest.mark.parametrize("name", ["ltxv-2b-0.9.0", "ltxv-2b-0.9.1", "ltxv-2b-0.9.5"])
def test_names_agree_with_the_converter_of_diffusers(name: str) -> None:
    """Shapes alone would not see two equal blocks exchanged; diffusers converts these three VAEs itself."""
    from diffusers.loaders.single_file_utils import convert_ltx_vae_checkpoint_to_diffusers as convert

    stored = {n: torch.empty(shape, device="meta") for n, (shape, _, c) in table(name).items() if c.startswith("video_vae")}
    origin = {id(tensor): n.removeprefix("vae.") for n, tensor in stored.items()}
    theirs = {origin[id(tensor)]: n for n, tensor in convert(dict(stored)).items()}
    ours = conv_names((n.removeprefix("vae.") for n in stored), VaeLayout.of(known_config(name)["vae"]))
    assert len(ours) > 180
    assert ours == {n: new for n, new in theirs.items() if n in ours}
