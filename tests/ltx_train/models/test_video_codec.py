"""VideoCodec beside the recorded numbers (tests/parity/test_codecs.py): tiles, sizes, dtypes, noise, refusals."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from ltx_train.errors import CheckpointError, DataError
from ltx_train.geometry import VideoFactors
from ltx_train.models.checkpoint import Checkpoint
from ltx_train.models.families import known_config
from ltx_train.models.tiling import Tiling
from ltx_train.models.video_codec import VideoCodec
from ltx_train.models.video_codec_keys import VaeLayout, constructor_arguments

DATA = Path(__file__).parents[2] / "parity" / "data"


def opened(name: str, **files: str) -> Checkpoint:
    return Checkpoint.open(DATA / f"{name}.checkpoint.safetensors", **{role: DATA / file for role, file in files.items()})


def load(name: str, **options) -> VideoCodec:
    return VideoCodec.load(opened(name), device="cpu", **{"dtype": torch.float32, **options})


def clip(frames: int, height: int, width: int, seed: int = 0) -> Tensor:
    """A smooth random clip [1, F, H, W, 3] uint8."""
    coarse = torch.rand(1, 3, frames // 4 + 2, height // 16 + 1, width // 16 + 1, generator=torch.Generator().manual_seed(seed))
    return (
        (F.interpolate(coarse, (frames, height, width), mode="trilinear") * 255).round().to(torch.uint8).permute(0, 2, 3, 4, 1).contiguous()
    )


def pixels(codec: VideoCodec, latents: Tensor, tiling: Tiling | None = None, **options) -> Tensor:
    return torch.cat(list(codec.decode_stretches(latents, tiling, **options)), dim=2)


# A random network's influence does not fade with distance as a trained one's does, so equality needs overlaps of
# several times its reach (about 8 latent cells); the weights drop the outer quarter of an overlap.
@pytest.mark.parametrize("name", ["ltx2", "ltx2.3", "ltxv0.9.5"])
def test_tiled_in_time_equals_untiled(name: str) -> None:
    codec = load(name)
    codec.decode_noise = 0.0
    frames = clip(8 * 84 + 1, 32, 32)
    tiling = Tiling(0, 0, 8 * 64, 8 * 32)
    latents = codec.encode(frames)
    assert latents.shape == (1, 8, 85, 1, 1)
    assert torch.allclose(codec.encode(frames, tiling), latents, atol=1e-5)
    assert torch.allclose(pixels(codec, latents, tiling), pixels(codec, latents), atol=2e-5)


@pytest.mark.parametrize("name", ["ltx2.3", "ltxv0.9.5"])
def test_tiled_in_space_equals_untiled(name: str) -> None:
    codec = load(name)
    codec.decode_noise = 0.0
    frames = clip(1, 32 * 84, 32)
    tiling = Tiling(32 * 64, 32 * 32, 0, 0)
    latents = codec.encode(frames)
    assert torch.allclose(codec.encode(frames, tiling), latents, atol=1e-5)
    assert torch.allclose(pixels(codec, latents, tiling), pixels(codec, latents), atol=2e-5)


def test_narrow_overlaps_stay_near_untiled() -> None:
    """With the usual few cells of overlap even a random network is off by a part of its spread only, on average."""
    codec = load("ltx2.3")
    frames = clip(33, 192, 160)
    latents = codec.encode(frames)
    off = (codec.encode(frames, Tiling(128, 64, 32, 16)) - latents).abs()
    assert off[:, :, :4, :2, :2].max() < 1.0 and off.mean() < 0.35 * latents.std()
    whole = pixels(codec, latents)
    tiled = pixels(codec, latents, Tiling(128, 64, 32, 16))
    assert tiled.shape == whole.shape and (tiled - whole).abs().mean() < 0.6 * whole.std()


def test_one_cell_wide_latents_decode_with_mirrored_borders() -> None:
    """LTX-2's decoder mirrors at the borders, which takes two cells: a thinner one is doubled and cropped."""
    codec = load("ltx2", encoder=False)
    latents = torch.randn(1, 8, 2, 3, 1, generator=torch.Generator().manual_seed(2))
    assert codec.layout.decoder_padding == "reflect"
    thin = pixels(codec, latents)
    assert thin.shape == (1, 3, 9, 96, 32)
    assert torch.equal(thin, pixels(codec, latents.expand(-1, -1, -1, -1, 2))[..., :32])


def test_diffusion_decoder_tiled_equals_untiled() -> None:
    """Its last stages reach 2 cells of their grid, which an overlap of 2 latent cells covers; noise is shared by tiles."""
    checkpoint = opened("ltx2.5", video_vae="ltx2.5.video_vae_diffusion.safetensors")
    codec = VideoCodec.load(checkpoint, device="cpu", dtype=torch.float32, encoder=False)
    latents = torch.randn(1, 8, 3, 3, 9, generator=torch.Generator().manual_seed(3))
    whole = pixels(codec, latents, seed=5)
    assert whole.shape == (1, 3, 17, 96, 288)
    assert torch.allclose(pixels(codec, latents, Tiling(5 * 32, 2 * 32, 0, 0), seed=5), whole, atol=1e-5)
    assert not torch.allclose(pixels(codec, latents, seed=6), whole, atol=1e-2)
    long = torch.randn(1, 8, 9, 3, 3, generator=torch.Generator().manual_seed(4))
    whole = pixels(codec, long)
    tiled = list(codec.decode_stretches(long, Tiling(0, 0, 6 * 8, 3 * 8)))
    assert len(tiled) > 1 and torch.allclose(torch.cat(tiled, dim=2), whole, atol=1e-5)


def test_production_floor_of_the_diffusion_decoder() -> None:
    """(3, 7, 7) latent cells, as the official helper gives for the published decoder."""
    from ltx_train.models.diffusion_decoder import DiffusionDecoder

    arguments = VaeLayout.of(known_config("ltx2.5")["vae_diffusion"]).diffusion
    kernels = [*arguments["decoder_stage_kernels"], arguments["decoder_stage5_kernel"]]
    assert DiffusionDecoder(torch.nn.Identity(), kernels, list(arguments["decoder_upsample_strides"])).floor == (3, 7, 7)


def test_bfloat16_is_near_float32() -> None:
    exact, rough = load("ltx2.3"), load("ltx2.3", dtype=torch.bfloat16)
    frames = clip(9, 64, 96)
    latents = exact.encode(frames)
    ours = rough.encode(frames)
    assert ours.dtype == torch.float32 and (ours - latents).abs().mean() < 0.03 * latents.std()
    assert (rough.decode(latents).float() - exact.decode(latents).float()).abs().mean() < 3


def test_batches_are_single_clips_side_by_side() -> None:
    codec = load("ltxv0.9.5")
    codec.decode_noise = 0.0
    frames = torch.cat([clip(9, 64, 32, seed) for seed in (1, 2)])
    latents = codec.encode(frames)
    assert torch.allclose(latents[1:], codec.encode(frames[1:]), atol=1e-6)
    assert torch.allclose(pixels(codec, latents)[1:], pixels(codec, latents[1:]), atol=1e-5)


def test_conditioned_decoders_add_a_little_seeded_noise() -> None:
    """z <- (1 - 0.025) z + 0.025 noise on the denormalised latents, timestep 0.05 (LTX-Video's defaults)."""
    codec = load("ltxv0.9.5", encoder=False)
    assert (codec.decode_timestep, codec.decode_noise) == (0.05, 0.025)
    assert load("ltx2", encoder=False).decode_noise == 0.0
    latents = torch.randn(1, 8, 2, 2, 2, generator=torch.Generator().manual_seed(0))
    noised = pixels(codec, latents, seed=7)
    assert torch.equal(pixels(codec, latents, seed=7), noised) and not torch.equal(pixels(codec, latents, seed=8), noised)
    noise = torch.randn(latents.shape, generator=torch.Generator().manual_seed(7))
    raw = 0.975 * (latents * codec._std + codec._mean) + 0.025 * noise
    by_hand = codec.decoder(raw, torch.tensor([0.05]))
    assert torch.allclose(by_hand, noised, atol=1e-6)


def test_decode_settings_of_the_config_win() -> None:
    checkpoint = opened("ltxv0.9.5")
    config = {**checkpoint.config, "vae": {**checkpoint.config["vae"], "decode_timestep": 0.1, "decode_noise_scale": 0.0}}
    codec = VideoCodec.load(replace(checkpoint, config=config), device="cpu", dtype=torch.float32, encoder=False)
    assert (codec.decode_timestep, codec.decode_noise) == (0.1, 0.0)


@pytest.mark.parametrize("name", ["ltxv-2b-0.9.0", "ltxv-2b-0.9.1"])
def test_first_ltx_video_vaes_run_and_repeat(name: str) -> None:
    """Their layouts at a sixteenth of the width, random weights: shapes, and noise injection that a seed repeats."""
    from diffusers.models.autoencoders.autoencoder_kl_ltx import AutoencoderKLLTXVideo

    torch.manual_seed(0)
    config = known_config(name)["vae"] | {"encoder_base_channels": 8, "decoder_base_channels": 8, "latent_channels": 8}
    layout = VaeLayout.of(config)
    vae = AutoencoderKLLTXVideo(**constructor_arguments(layout)).eval().requires_grad_(False)
    for parameter in vae.parameters():
        if parameter.ndim == 3:  # the injection scales begin at zero
            parameter.fill_(0.5)
    codec = VideoCodec(layout, VideoFactors(), vae.encoder, vae.decoder, torch.zeros(8), torch.ones(8), torch.float32)
    latents = codec.encode(clip(9, 64, 96))
    assert latents.shape == (1, 8, 2, 2, 3)
    first, state = pixels(codec, latents, seed=1), torch.get_rng_state()
    assert first.shape == (1, 3, 9, 64, 96)
    assert torch.equal(pixels(codec, latents, seed=1), first) and torch.equal(torch.get_rng_state(), state)
    assert torch.equal(pixels(codec, latents, seed=2), first) is not layout.injects_noise
    assert layout.injects_noise is (name == "ltxv-2b-0.9.1")


@pytest.mark.parametrize(
    "shape, code, said",
    [
        ((1, 9, 48, 64, 3), "codec.frame_size", "64x64"),
        ((1, 10, 64, 64, 3), "codec.frame_count", "9 or 17"),
        ((1, 9, 64, 64), "codec.frames", "uint8"),
        ((1, 9, 64, 64, 4), "codec.frames", "uint8"),
    ],
)
def test_wrong_sizes_are_clear_errors(shape, code: str, said: str) -> None:
    codec = load("ltx2.3", decoder=False)
    with pytest.raises(DataError) as caught:
        codec.encode(torch.zeros(shape, dtype=torch.uint8))
    assert caught.value.code == code and said in caught.value.hint
    with pytest.raises(DataError, match="float32"):
        codec.encode(torch.zeros(1, 9, 64, 64, 3))


def test_latents_of_another_vae_are_refused() -> None:
    with pytest.raises(DataError) as caught:
        load("ltx2.3", encoder=False).decode(torch.zeros(1, 128, 1, 2, 2))
    assert caught.value.code == "codec.latents" and "8" in caught.value.hint


def test_vae_with_attention_is_refused_by_name() -> None:
    checkpoint = opened("ltx2.3")
    blocks = [["res_x", 1], ["attn_res_x", {"num_layers": 1}], *checkpoint.config["vae"]["encoder_blocks"][1:]]
    config = {**checkpoint.config, "vae": {**checkpoint.config["vae"], "encoder_blocks": blocks}}
    with pytest.raises(CheckpointError) as caught:
        VideoCodec.load(replace(checkpoint, config=config), device="cpu")
    assert caught.value.code == "codec.attention_blocks" and "ComfyUI" in caught.value.hint


def test_halves_are_loaded_alone() -> None:
    assert load("ltx2", decoder=False).decoder is None
    codec = load("ltx2", encoder=False)
    assert codec.encoder is None and not any(p.requires_grad or p.is_meta for p in codec.decoder.parameters())
