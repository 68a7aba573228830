"""Audio VAE and vocoder layouts: a checkpoint's config to diffusers' arguments, and the vocoder's tensor names (the VAE's are the same)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

_VOCODER_PATHS = {"ups": "upsamplers", "resblocks": "resnets", "conv_pre": "conv_in", "conv_post": "conv_out", "act_post": "act_out"}


def audio_vae_arguments(config: Mapping) -> dict:
    """Keyword arguments of diffusers' AutoencoderKLLTX2Audio from ``config.audio_vae``.

    Its own statistics are as many as its width and stay unused: the file's lie over channels x mel bins / 4 (128).
    """
    params = config["model"]["params"]
    dd = params["ddconfig"]
    stft, mel = config["preprocessing"]["stft"], config["preprocessing"]["mel"]
    bins = mel["n_mel_channels"]
    return {
        "base_channels": dd["ch"],
        "output_channels": dd["out_ch"],
        "ch_mult": tuple(dd["ch_mult"]),
        "num_res_blocks": dd["num_res_blocks"],
        "attn_resolutions": tuple(dd.get("attn_resolutions") or ()) or None,
        "in_channels": dd["in_channels"],
        "resolution": dd.get("resolution", 256),
        "latent_channels": dd["z_channels"],
        "norm_type": dd.get("norm_type", "pixel"),
        "causality_axis": dd.get("causality_axis") or "none",
        "dropout": dd.get("dropout", 0.0),
        "mid_block_add_attention": dd.get("mid_block_add_attention", False),
        "sample_rate": params.get("sampling_rate", 16000),
        "mel_hop_length": stft["hop_length"],
        "is_causal": stft.get("causal", True),
        "mel_bins": bins,
        "double_z": dd.get("double_z", True),
    }


def has_extension(config: Mapping) -> bool:
    """Whether ``config.vocoder`` is the one with bandwidth extension (LTX-2.3 and later)."""
    return "bwe" in config


def vocoder_arguments(config: Mapping, mel_channels: int) -> dict:
    """Keyword arguments of diffusers' LTX2Vocoder, or of LTX2VocoderWithBWE when ``config.vocoder`` has ``bwe``.

    mel_channels: stereo x mel bins that enter (128). The first stage's final activation is a clamp: the
    official code clamps its waveform before the extension reads it, which diffusers' default leaves out.
    """
    if not has_extension(config):
        return _generator(config, mel_channels) | {"output_sampling_rate": config.get("output_sampling_rate", 24000)}
    first, bwe = config["vocoder"], config["bwe"]
    extension = {f"bwe_{name}": value for name, value in _generator(bwe, 2 * bwe["num_mels"]).items()}
    return (
        _generator(first, mel_channels)
        | extension
        | {
            "filter_length": bwe["n_fft"],
            "hop_length": bwe["hop_length"],
            "window_length": bwe.get("win_size", bwe["n_fft"]),
            "num_mel_channels": bwe["num_mels"],
            "input_sampling_rate": bwe["input_sampling_rate"],
            "output_sampling_rate": bwe["output_sampling_rate"],
        }
    )


def _generator(config: Mapping, mel_channels: int) -> dict:
    """The arguments one HiFi-GAN or BigVGAN generator takes."""
    periodic = config.get("resblock", "1") == "AMP1"
    final = "tanh" if config.get("use_tanh_at_final", True) else "clamp"
    return {
        "in_channels": mel_channels,
        "hidden_channels": config["upsample_initial_channel"],
        "out_channels": 2 if config.get("stereo", True) else 1,
        "upsample_kernel_sizes": list(config["upsample_kernel_sizes"]),
        "upsample_factors": list(config["upsample_rates"]),
        "resnet_kernel_sizes": list(config["resblock_kernel_sizes"]),
        "resnet_dilations": [list(d) for d in config["resblock_dilation_sizes"]],
        "act_fn": config.get("activation", "snakebeta") if periodic else "leaky_relu",
        "antialias": periodic,
        "final_act_fn": final if config.get("apply_final_activation", True) else None,
        "final_bias": config.get("use_bias_at_final", True),
    }


def vocoder_names(names: Iterable[str]) -> dict[str, str]:
    """Checkpoint name (without the component's ``vocoder.`` prefix) -> diffusers name.

    Renames whole path elements only: ``ups`` is one, ``upsample`` another.
    """
    return {name: _vocoder_name(name) for name in names}


def _vocoder_name(name: str) -> str:
    name = ".".join(_VOCODER_PATHS.get(part, part) for part in name.split("."))
    return name.replace(".downsample.lowpass.filter", ".downsample.filter")
