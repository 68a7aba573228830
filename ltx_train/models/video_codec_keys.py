"""Video VAE layouts: a checkpoint's block list to diffusers' constructor arguments and tensor names."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from ..errors import CheckpointError

STATISTICS = "per_channel_statistics."
MEAN = STATISTICS + "mean-of-means"
STD = STATISTICS + "std-of-means"

_STRIDES = {"compress_space": (1, 2, 2), "compress_time": (2, 1, 1), "compress_all": (2, 2, 2)}
_KINDS = {"compress_space": "spatial", "compress_time": "temporal", "compress_all": "spatiotemporal"}


@dataclass(frozen=True)
class Block:
    """One entry of a block list: ``res_x``, ``res_x_y``, ``compress_<axes>`` or ``compress_<axes>_res``."""

    name: str
    layers: int = 1
    multiplier: int = 1
    residual: bool = False
    inject_noise: bool = False

    @property
    def compresses(self) -> bool:
        return self.name.startswith("compress_")

    @property
    def axes(self) -> str:
        return self.name.removesuffix("_res")

    @property
    def grows(self) -> int:
        """The factor by which the block widens the channels towards the latent."""
        return 2 if self.name == "res_x_y" else self.multiplier if self.compresses else 1


def read_blocks(entries: Iterable) -> list[Block]:
    """The block list of a config: [name, number] (LTX-Video 0.9.0) or [name, {options}] entries.

    Raises CheckpointError for blocks that diffusers' classes cannot build (the attention of a 16x16x4 VAE).
    """
    blocks = []
    for name, options in entries:
        options = dict(options) if isinstance(options, Mapping) else {"num_layers": options}
        if name.startswith("attn"):
            raise CheckpointError(
                "codec.attention_blocks",
                f"This video VAE has '{name}' blocks (a 16x16x4 VAE), which the engine's codec cannot build.",
                "Inside ComfyUI, connect the VAE socket of Preprocess: ComfyUI's own VAE reads this file.",
            )
        axes = name.removesuffix("_res")
        if name not in ("res_x", "res_x_y") and axes not in _STRIDES:
            raise CheckpointError(
                "codec.unknown_block",
                f"The video VAE has a block '{name}', which is not known.",
                f"Known: res_x, res_x_y, {', '.join(_STRIDES)}, each also with _res.",
            )
        widens = options.get("multiplier", 2 if name.endswith("_res") else 1) if axes in _STRIDES else 1
        blocks.append(Block(name, options.get("num_layers", 1), widens, bool(options.get("residual")), bool(options.get("inject_noise"))))
    if not blocks or blocks[0].name != "res_x" or blocks[-1].name != "res_x":
        raise CheckpointError(
            "codec.unknown_layout",
            "The video VAE's block list does not begin and end with res_x.",
            "The file's config may be damaged; use the published file.",
        )
    return blocks


@dataclass(frozen=True)
class VaeLayout:
    """How one video VAE is built: the two block lists, widths and flags.

    encoder, decoder: block lists in pixel-to-latent order; decoder is empty for the 2.5 diffusion decoder.
    diffusion: that decoder's constructor arguments, else empty.
    """

    latent_channels: int
    patch_size: int
    encoder: list[Block]
    decoder: list[Block]
    encoder_width: int
    decoder_width: int
    encoder_padding: str
    decoder_padding: str
    timestep_conditioning: bool
    causal_decoder: bool
    diffusion: dict = field(default_factory=dict)

    @classmethod
    def of(cls, config: Mapping) -> VaeLayout:
        """Read ``config.vae`` of any published file (flat conv VAEs and the nested 2.5 diffusion VAE)."""
        if "encoder" in config:
            return cls._nested(config)
        old = config.get("blocks")
        encoder, decoder = read_blocks(config.get("encoder_blocks", old)), read_blocks(config.get("decoder_blocks", old))
        conditioned = bool(config.get("timestep_conditioning", False))
        video_only = conditioned or any(b.name == "res_x_y" for b in encoder)
        padding = config.get("spatial_padding_mode", "zeros" if video_only else "reflect")
        return cls(
            latent_channels=config.get("latent_channels", 128),
            patch_size=config.get("patch_size", 4),
            encoder=encoder,
            decoder=decoder,
            encoder_width=config.get("encoder_base_channels", 128),
            decoder_width=config.get("decoder_base_channels", 128),
            encoder_padding=config.get("encoder_spatial_padding_mode", "zeros"),
            decoder_padding=padding,
            timestep_conditioning=conditioned,
            causal_decoder=bool(config.get("causal_decoder", False)),
        )

    @classmethod
    def _nested(cls, config: Mapping) -> VaeLayout:
        encoder, decoder = config["encoder"], config["decoder"]
        return cls(
            latent_channels=encoder.get("out_channels", 128),
            patch_size=encoder.get("patch_size", 4),
            encoder=read_blocks(encoder["blocks"]),
            decoder=[],
            encoder_width=encoder.get("base_channels", 128),
            decoder_width=decoder["stage_channels"][-1],
            encoder_padding=encoder.get("spatial_padding_mode", "zeros"),
            decoder_padding=decoder.get("spatial_padding_mode", "zeros"),
            timestep_conditioning=False,
            causal_decoder=False,
            diffusion=_diffusion_arguments(decoder, config.get("model_output_type", "x0")),
        )

    @property
    def ltx_video(self) -> bool:
        """Built with diffusers' LTX-Video class (plain strided or timestep-conditioned) instead of its LTX-2 class."""
        return any(b.name == "res_x_y" for b in self.encoder) or self.timestep_conditioning

    @property
    def factors(self) -> tuple[int, int, int]:
        """(time, height, width) pixels of one latent cell, by the encoder's strides and patches."""
        time, space = 1, self.patch_size
        for block in self.encoder:
            stride = _STRIDES.get(block.axes, (1, 1, 1))
            time, space = time * stride[0], space * stride[1]
        return time, space, space

    @property
    def injects_noise(self) -> bool:
        return any(b.inject_noise for b in self.decoder)


def _diffusion_arguments(decoder: Mapping, output_type: str) -> dict:
    """Constructor arguments of diffusers' LTX2VideoDiffusionDecoderModel from ``config.vae.decoder``."""
    kernels = [tuple(k) for k in decoder["stage_kernels"]]
    return {
        "out_channels": decoder.get("out_channels", 3),
        "latent_channels": decoder.get("in_channels", 128),
        "patch_size": decoder.get("patch_size", 4),
        "decoder_head_dim": decoder.get("head_dim", 64),
        "decoder_stage_channels": tuple(decoder["stage_channels"]),
        "decoder_stage_depths": tuple(decoder["stage_depths"]),
        "decoder_stage_kernels": tuple(kernels[: len(decoder["upsamples"])]),
        "decoder_upsample_strides": tuple(tuple(stride) for stride, _ in decoder["upsamples"]),
        "decoder_upsample_channel_reductions": tuple(reduction for _, reduction in decoder["upsamples"]),
        "decoder_stage5_kernel": tuple(decoder.get("stage5_kernel", kernels[-1])),
        "decoder_t_emb_dim": decoder.get("t_emb_dim", 384),
        "decoder_timestep_scale_multiplier": decoder.get("timestep_scale_multiplier", 1000.0),
        "decoder_model_output_type": output_type,
        "decoder_num_inference_steps": decoder.get("default_num_inference_steps", 2),
    }


def _widths(blocks: list[Block], start: int) -> list[int]:
    """The channel width behind each block, walking from pixels to latent."""
    widths = []
    for block in blocks:
        start *= block.grows
        widths.append(start)
    return widths


@dataclass
class _Group:
    """A residual stack with the resampling that belongs to it (diffusers' down or up block)."""

    stack: Block
    resample: Block | None = None
    widen: Block | None = None
    width: int = 0  # of the stack


def _groups(blocks: list[Block], start: int) -> list[_Group]:
    """Residual stacks in pixel-to-latent order, each with the compress and widen blocks that follow it."""
    groups: list[_Group] = []
    for block, width in zip(blocks, _widths(blocks, start)):
        if block.name == "res_x":
            groups.append(_Group(block, width=width))
        elif block.compresses and groups[-1].resample is None and groups[-1].widen is None:
            groups[-1].resample = block
        elif block.name == "res_x_y" and groups[-1].widen is None:
            groups[-1].widen = block
        else:
            raise CheckpointError(
                "codec.unknown_layout",
                f"The video VAE has '{block.name}' in a place that is not known.",
                "The engine reads the published LTX VAEs; inside ComfyUI its VAE socket may read this one.",
            )
    return groups


def constructor_arguments(layout: VaeLayout) -> dict:
    """Keyword arguments of AutoencoderKLLTXVideo or AutoencoderKLLTX2Video (both halves) for a conv VAE.

    For the diffusion VAE the decoder half is a placeholder of one layer that nobody keeps.
    """
    down = _groups(layout.encoder, layout.encoder_width)
    strided = layout.ltx_video and not any(b.name.endswith("_res") for b in layout.encoder)
    arguments = {
        "latent_channels": layout.latent_channels,
        "patch_size": layout.patch_size,
        "layers_per_block": tuple(g.stack.layers for g in down),
        "encoder_causal": True,
        "decoder_causal": layout.causal_decoder,
        "timestep_conditioning": layout.timestep_conditioning,
        "spatio_temporal_scaling": tuple(g.resample is not None for g in down[:-1]),
        "downsample_type": tuple("conv" if strided else _KINDS[g.resample.axes] for g in down[:-1]),
    }
    if not layout.ltx_video:
        _same_width(layout)
        arguments["block_out_channels"] = tuple(g.width for g in down[1:])
        arguments["down_block_types"] = ("LTX2VideoDownBlock3D",) * (len(down) - 1)
        arguments["encoder_spatial_padding_mode"] = layout.encoder_padding
        arguments["decoder_spatial_padding_mode"] = layout.decoder_padding
    elif strided:
        arguments["block_out_channels"] = tuple(g.width for g in down[:-1])
        arguments["down_block_types"] = ("LTXVideoDownBlock3D",) * (len(down) - 1)
    else:
        arguments["block_out_channels"] = tuple(g.width for g in down)
        arguments["down_block_types"] = ("LTXVideo095DownBlock3D",) * (len(down) - 1)
    return arguments | _decoder_arguments(layout)


def _same_width(layout: VaeLayout) -> None:
    """diffusers' LTX-2 encoder takes the latent channels as its first width."""
    if layout.encoder_width != layout.latent_channels:
        raise CheckpointError(
            "codec.unknown_layout",
            f"The video VAE's encoder width {layout.encoder_width} is not its {layout.latent_channels} latent channels.",
            "The engine reads the published LTX VAEs, where both are 128.",
        )


def _decoder_arguments(layout: VaeLayout) -> dict:
    if layout.diffusion:
        up = [_Group(Block("res_x"), Block("compress_all"), width=8), _Group(Block("res_x"), width=8)]
    else:
        up = _groups(layout.decoder, layout.decoder_width)
    scaled = up[:-1]
    if any(g.resample is not None and g.resample.name.endswith("_res") for g in scaled):
        raise CheckpointError(
            "codec.unknown_layout", "The video VAE's decoder has compress_*_res blocks, which are not known.", "Use the published VAE file."
        )
    arguments = {
        # the width that enters each upsampler: that of the stack nearer the latent, already narrowed by a res_x_y between
        "decoder_block_out_channels": tuple(nxt.width // (g.widen.grows if g.widen else 1) for g, nxt in zip(scaled, up[1:])),
        "decoder_layers_per_block": tuple(g.stack.layers for g in up),
        "decoder_spatio_temporal_scaling": tuple(g.resample is not None for g in scaled),
        "decoder_inject_noise": tuple(g.stack.inject_noise for g in up),
        "upsample_residual": tuple(bool(g.resample and g.resample.residual) for g in scaled),
        "upsample_factor": tuple(g.resample.multiplier if g.resample else 1 for g in scaled),
    }
    if not layout.ltx_video:
        # alone among these, diffusers reads this one from the latent on
        arguments["upsample_type"] = tuple(_KINDS[g.resample.axes] for g in reversed(scaled))
    return arguments


def conv_names(names: Iterable[str], layout: VaeLayout) -> dict[str, str]:
    """Checkpoint name -> diffusers name for every ``encoder.`` and ``decoder.`` tensor of a conv VAE half."""
    prefixes = {f"encoder.down_blocks.{i}.": p for i, p in enumerate(_encoder_places(layout.encoder))}
    prefixes |= {f"decoder.up_blocks.{i}.": p for i, p in enumerate(_decoder_places(layout.decoder))}
    return {name: _inner(_placed(name, prefixes), layout) for name in names if name.startswith(("encoder.", "decoder."))}


def _encoder_places(blocks: list[Block]) -> list[str]:
    places, group = [], -1
    for i, block in enumerate(blocks):
        if block.name == "res_x":
            group += 1
            places.append("encoder.mid_block." if i == len(blocks) - 1 else f"encoder.down_blocks.{group}.")
        else:
            places.append(f"encoder.down_blocks.{group}." + ("downsamplers.0." if block.compresses else "conv_out."))
    return places


def _decoder_places(blocks: list[Block]) -> list[str]:
    """The checkpoint numbers the decoder's blocks from the latent on."""
    places, group = [], -1
    for block in reversed(blocks):
        if block.name == "res_x":
            places.append("decoder.mid_block." if group < 0 else f"decoder.up_blocks.{group}.")
            group += 1
        else:
            places.append(f"decoder.up_blocks.{group}." + ("upsamplers.0." if block.compresses else "conv_in."))
    return places


def _placed(name: str, prefixes: Mapping[str, str]) -> str:
    parts = name.split(".", 3)
    if len(parts) < 4 or parts[1] not in ("down_blocks", "up_blocks"):
        return name
    prefix = ".".join(parts[:3]) + "."
    return prefixes.get(prefix, prefix) + parts[3]


def _inner(name: str, layout: VaeLayout) -> str:
    name = name.replace(".res_blocks.", ".resnets.").replace(".norm3.norm.", ".norm3.")
    name = name.replace(".last_time_embedder.", ".time_embedder.").replace(".last_scale_shift_table", ".scale_shift_table")
    return name.replace(".conv_shortcut.", ".conv_shortcut.conv.") if layout.ltx_video else name
