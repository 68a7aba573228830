"""Names and shapes of every tensor of a checkpoint, derived from its config alone, in the vendor's own naming."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

Shapes = dict[str, tuple[int, ...]]
Config = Mapping[str, Any]

_STRIDES = {"compress_space": 4, "compress_time": 2, "compress_all": 8}


def _linear(name: str, out: int, inner: int, bias: bool = True) -> Shapes:
    return {f"{name}.weight": (out, inner)} | ({f"{name}.bias": (out,)} if bias else {})


def _conv(name: str, out: int, inner: int, *kernel: int, bias: bool = True) -> Shapes:
    return {f"{name}.weight": (out, inner, *kernel)} | ({f"{name}.bias": (out,)} if bias else {})


def _embedder(name: str, width: int) -> Shapes:
    inner = f"{name}.timestep_embedder"
    return _linear(f"{inner}.linear_1", width, 256) | _linear(f"{inner}.linear_2", width, width)


# ---- text side


def connector_shapes(config: Config) -> Shapes:
    """Both connectors of ``config.transformer``, as ``video_embeddings_connector...`` and ``audio_embeddings_connector...``."""
    shapes: Shapes = {}
    for stream in ("video", "audio"):
        said = lambda key, stream=stream: config.get(f"{stream}_connector_{key}", config.get(f"connector_{key}"))  # noqa: E731
        heads, width = said("num_attention_heads"), said("num_attention_heads") * said("attention_head_dim")
        top = f"{stream}_embeddings_connector"
        shapes[f"{top}.learnable_registers"] = (said("num_learnable_registers"), width)
        for i in range(said("num_layers")):
            block = f"{top}.transformer_1d_blocks.{i}"
            for name in ("to_q", "to_k", "to_v", "to_out.0"):
                shapes |= _linear(f"{block}.attn1.{name}", width, width)
            shapes |= {f"{block}.attn1.{n}.weight": (width,) for n in ("q_norm", "k_norm")}
            if said("apply_gated_attention"):
                shapes |= _linear(f"{block}.attn1.to_gate_logits", heads, width)
            shapes |= _linear(f"{block}.ff.net.0.proj", 4 * width, width) | _linear(f"{block}.ff.net.2", width, 4 * width)
    return shapes


def projection_shapes(kind: str, inputs: int, video: int, audio: int) -> Shapes:
    """The feature extractor's projection: ``v1`` has one without bias, ``v2`` one for each stream."""
    if kind == "v1":
        return _linear("aggregate_embed", video, inputs, bias=False)
    return _linear("video_aggregate_embed", video, inputs) | _linear("audio_aggregate_embed", audio, inputs)


def t5_shapes(*, layers: int, width: int, inner: int, heads: int, head_dim: int, vocab: int) -> Shapes:
    """The T5 v1.1 encoder, embeddings stored twice as in the published file."""
    shapes: Shapes = {"shared.weight": (vocab, width), "encoder.embed_tokens.weight": (vocab, width)}
    for i in range(layers):
        block = f"encoder.block.{i}.layer"
        shapes |= {f"{block}.0.SelfAttention.{n}.weight": (heads * head_dim, width) for n in "qkv"}
        shapes[f"{block}.0.SelfAttention.o.weight"] = (width, heads * head_dim)
        if i == 0:
            shapes[f"{block}.0.SelfAttention.relative_attention_bias.weight"] = (32, heads)
        shapes |= {f"{block}.1.DenseReluDense.{n}.weight": (inner, width) for n in ("wi_0", "wi_1")}
        shapes[f"{block}.1.DenseReluDense.wo.weight"] = (width, inner)
        shapes |= {f"{block}.{n}.layer_norm.weight": (width,) for n in (0, 1)}
    return shapes | {"encoder.final_layer_norm.weight": (width,)}


def gemma_shapes(config: Config) -> Shapes:
    """The language model of a Gemma 3 or 4 ``text_config``, under ``model.``; Gemma 4 by its ``layer_types``."""
    width, wide, kinds = config["hidden_size"], config["intermediate_size"], config.get("layer_types")
    shapes: Shapes = {"model.embed_tokens.weight": (config["vocab_size"], width), "model.norm.weight": (width,)}
    for i in range(config["num_hidden_layers"]):
        full = kinds is not None and kinds[i] == "full_attention"
        dim = config["global_head_dim"] if full else config["head_dim"]
        queries = config["num_attention_heads"] * dim
        keys = (config["num_global_key_value_heads"] if full else config["num_key_value_heads"]) * dim
        layer = f"model.layers.{i}"
        shapes |= {f"{layer}.self_attn.q_proj.weight": (queries, width), f"{layer}.self_attn.k_proj.weight": (keys, width)}
        if not full:
            shapes[f"{layer}.self_attn.v_proj.weight"] = (keys, width)
        shapes[f"{layer}.self_attn.o_proj.weight"] = (width, queries)
        shapes |= {f"{layer}.self_attn.{n}.weight": (dim,) for n in ("q_norm", "k_norm")}
        shapes |= {f"{layer}.mlp.{n}.weight": (wide, width) for n in ("gate_proj", "up_proj")}
        shapes[f"{layer}.mlp.down_proj.weight"] = (width, wide)
        norms = ("input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm")
        shapes |= {f"{layer}.{n}.weight": (width,) for n in norms}
        if kinds is not None:
            shapes[f"{layer}.layer_scalar"] = (1,)
    return shapes


def gemma3_tower_shapes(text: int, vision: Config) -> Shapes:
    """Gemma 3's vision tower and projector in ComfyUI's naming (``vision_model.``, ``multi_modal_projector.``)."""
    width, wide, patch = vision["hidden_size"], vision["intermediate_size"], vision["patch_size"]
    shapes = _conv("vision_model.embeddings.patch_embedding", width, 3, patch, patch)
    shapes["vision_model.embeddings.position_embedding.weight"] = ((vision["image_size"] // patch) ** 2, width)
    for i in range(vision["num_hidden_layers"]):
        layer = f"vision_model.encoder.layers.{i}"
        for name in ("q_proj", "k_proj", "v_proj", "out_proj"):
            shapes |= _linear(f"{layer}.self_attn.{name}", width, width)
        shapes |= _linear(f"{layer}.mlp.fc1", wide, width) | _linear(f"{layer}.mlp.fc2", width, wide)
        shapes |= {f"{layer}.{n}.{p}": (width,) for n in ("layer_norm1", "layer_norm2") for p in ("weight", "bias")}
    shapes |= {f"vision_model.post_layernorm.{p}": (width,) for p in ("weight", "bias")}
    return shapes | {"multi_modal_projector.mm_input_projection_weight": (width, text), "multi_modal_projector.mm_soft_emb_norm.weight": (width,)}


def gemma4_tower_shapes(config: Config) -> Shapes:
    """Gemma 4 12B's encoder-free image and sound inputs in ComfyUI's naming, from ``gemma_config``."""
    text, vision = config["text_config"]["hidden_size"], config["vision_config"]
    width, patch = vision["mm_embed_dim"], 3 * (vision["patch_size"] * vision["pooling_kernel_size"]) ** 2
    shapes: Shapes = {"vision_model.pos_embedding": (vision["mm_posemb_size"], 2, width)}
    shapes |= {f"vision_model.{n}.{p}": (size,) for n, size in (("patch_ln1", patch), ("patch_ln2", width), ("pos_norm", width)) for p in ("weight", "bias")}
    shapes |= _linear("vision_model.patch_dense", width, patch)
    shapes |= _linear("multi_modal_projector.embedding_projection", text, vision["output_proj_dims"], bias=False)
    return shapes | _linear("audio_projector.embedding_projection", text, config["audio_config"]["audio_embed_dim"], bias=False)


# ---- video VAE


def _options(entry: list) -> tuple[str, dict[str, Any]]:
    name, options = entry
    return name, dict(options) if isinstance(options, Mapping) else {"num_layers": options}


def _stack(name: str, width: int, options: Mapping[str, Any], conditioned: bool) -> Shapes:
    """A ``res_x`` block: residual pairs of convolutions; with timestep conditioning, tables and an embedder."""
    shapes = _embedder(f"{name}.time_embedder", 4 * width) if conditioned else {}
    for j in range(options.get("num_layers", 1)):
        inner = f"{name}.res_blocks.{j}"
        shapes |= _conv(f"{inner}.conv1.conv", width, width, 3, 3, 3) | _conv(f"{inner}.conv2.conv", width, width, 3, 3, 3)
        if conditioned:
            shapes[f"{inner}.scale_shift_table"] = (4, width)
        if options.get("inject_noise"):
            shapes |= {f"{inner}.per_channel_scale{n}": (width, 1, 1) for n in (1, 2)}
    return shapes


def _widen(name: str, out: int, inner: int) -> Shapes:
    """A ``res_x_y`` block: one residual pair that changes the width."""
    shapes = _conv(f"{name}.conv1.conv", out, inner, 3, 3, 3) | _conv(f"{name}.conv2.conv", out, out, 3, 3, 3)
    return shapes | _conv(f"{name}.conv_shortcut", out, inner, 1, 1, 1) | {f"{name}.norm3.norm.{p}": (inner,) for p in ("weight", "bias")}


def vae_encoder_shapes(blocks: list, *, base: int, latent: int, patch: int) -> Shapes:
    """The causal encoder of all LTX VAEs (``encoder.``)."""
    width = base
    shapes = _conv("encoder.conv_in.conv", base, 3 * patch**2, 3, 3, 3)
    for i, entry in enumerate(blocks):
        (kind, options), name = _options(entry), f"encoder.down_blocks.{i}"
        grown = width * (options.get("multiplier", 2) if kind.endswith("_res") else 2 if kind == "res_x_y" else 1)
        if kind == "res_x":
            shapes |= _stack(name, width, options, False)
        elif kind == "res_x_y":
            shapes |= _widen(name, grown, width)
        elif kind.endswith("_res"):
            shapes |= _conv(f"{name}.conv.conv", grown // _STRIDES[kind.removesuffix("_res")], width, 3, 3, 3)
        else:
            shapes |= _conv(f"{name}.conv", width, width, 3, 3, 3)
        width = grown
    return shapes | _conv("encoder.conv_out.conv", latent + 1, width, 3, 3, 3)


def vae_decoder_shapes(blocks: list, *, base: int, latent: int, patch: int, conditioned: bool) -> Shapes:
    """The convolutional decoder (``decoder.``); ``blocks`` from pixels to latent, numbered from the latent on."""
    width = base
    for kind, options in map(_options, blocks):
        width *= 2 if kind == "res_x_y" else options.get("multiplier", 1)
    shapes = _conv("decoder.conv_in.conv", width, latent, 3, 3, 3)
    for i, (kind, options) in enumerate(map(_options, reversed(blocks))):
        name = f"decoder.up_blocks.{i}"
        if kind == "res_x":
            shapes |= _stack(name, width, options, conditioned)
        elif kind == "res_x_y":
            shapes |= _widen(name, width // 2, width)
            width //= 2
        else:
            narrow = options.get("multiplier", 1)
            shapes |= _conv(f"{name}.conv.conv", width * _STRIDES[kind] // narrow, width, 3, 3, 3)
            width //= narrow
    if conditioned:
        shapes |= {"decoder.timestep_scale_multiplier": (), "decoder.last_scale_shift_table": (2, width)}
        shapes |= _embedder("decoder.last_time_embedder", 2 * width)
    return shapes | _conv("decoder.conv_out.conv", 3 * patch**2, width, 3, 3, 3)


def diffusion_decoder_shapes(config: Config) -> Shapes:
    """The neighbourhood-attention diffusion decoder of 2.5 (``config.vae.decoder``)."""
    widths, depths, time = config["stage_channels"], config["stage_depths"], config.get("t_emb_dim", 384)
    pixels, last = config["out_channels"] * config["patch_size"] ** 2, widths[-1]
    shapes = _linear("decoder.conv_in", widths[0], config["in_channels"])
    for i, width in enumerate(widths[:-1]):
        for j in range(depths[i]):
            shapes |= _attention_block(f"decoder.det_stages.{i}.{j}", width, config["head_dim"])
        stride, narrow = config["upsamples"][i]
        shapes |= _linear(f"decoder.upsamples.{i}.proj", width * stride[0] * stride[1] * stride[2] // narrow, width)
    for j in range(depths[-1]):
        name = f"decoder.diff_blocks.{j}"
        shapes |= _attention_block(name, last, config["head_dim"]) | _linear(f"{name}.context_proj", last, last)
        shapes[f"{name}.scale_shift_table"] = (7, last)
    shapes |= _linear("decoder.t_embedder.mlp.0", time, 256) | _linear("decoder.t_embedder.mlp.2", time, time)
    shapes |= _linear("decoder.conv_in_x_t", last, pixels) | _linear("decoder.shared_adaln.proj", 7 * last, time)
    return shapes | _linear("decoder.conv_out", pixels, last) | {"decoder.norm_out.weight": (last,), "decoder.type_emb": (config["in_channels"],)}


def _attention_block(name: str, width: int, head_dim: int) -> Shapes:
    shapes = _linear(f"{name}.attn.qkv", 3 * width, width) | _linear(f"{name}.attn.proj", width, width)
    shapes |= {f"{name}.attn.{n}.weight": (head_dim,) for n in ("q_norm", "k_norm")} | {f"{name}.{n}.weight": (width,) for n in ("norm1", "norm2")}
    shapes |= {f"{name}.mlp.{n}.weight": (4 * width, width) for n in ("w_up", "w_gate")}
    return shapes | {f"{name}.mlp.w_down.weight": (width, 4 * width)}


def video_vae_shapes(config: Config, statistics: tuple[str, ...] = ("std-of-means", "mean-of-means")) -> Shapes:
    """A video VAE of ``config.vae``: conv (flat config, ``blocks`` in 0.9.0) or diffusion (nested config)."""
    if isinstance(config.get("encoder"), Mapping):
        encoder = config["encoder"]
        latent = encoder["out_channels"]
        shapes = vae_encoder_shapes(encoder["blocks"], base=encoder["base_channels"], latent=latent, patch=encoder["patch_size"])
        shapes |= diffusion_decoder_shapes(config["decoder"])
    else:
        latent, patch, old = config["latent_channels"], config["patch_size"], config.get("blocks")
        shapes = vae_encoder_shapes(config.get("encoder_blocks", old), base=config.get("encoder_base_channels", 128), latent=latent, patch=patch)
        shapes |= vae_decoder_shapes(
            config.get("decoder_blocks", old), base=config.get("decoder_base_channels", 128), latent=latent, patch=patch, conditioned=bool(config.get("timestep_conditioning"))
        )
    return shapes | {f"per_channel_statistics.{n}": (latent,) for n in statistics}


# ---- sound


def _audio_pair(name: str, out: int, inner: int) -> Shapes:
    shapes = _conv(f"{name}.conv1.conv", out, inner, 3, 3) | _conv(f"{name}.conv2.conv", out, out, 3, 3)
    return shapes | (_conv(f"{name}.nin_shortcut.conv", out, inner, 1, 1) if out != inner else {})


def audio_vae_shapes(config: Config) -> Shapes:
    """The audio VAE of ``config.audio_vae`` (no attention, as published)."""
    dd = config["model"]["params"]["ddconfig"]
    widths, depth = [dd["ch"] * m for m in dd["ch_mult"]], dd["num_res_blocks"]
    shapes = _conv("encoder.conv_in.conv", dd["ch"], dd["in_channels"], 3, 3)
    for i, (inner, width) in enumerate(zip([dd["ch"], *widths], widths)):
        for j in range(depth):
            shapes |= _audio_pair(f"encoder.down.{i}.block.{j}", width, inner if j == 0 else width)
        if i < len(widths) - 1:
            shapes |= _conv(f"encoder.down.{i}.downsample.conv", width, width, 3, 3)
    top = widths[-1]
    for part, inner, out in (("encoder", top, dd["z_channels"] * 2), ("decoder", dd["z_channels"], top)):
        shapes |= {k: v for n in (1, 2) for k, v in _audio_pair(f"{part}.mid.block_{n}", top, top).items()}
        shapes |= _conv(f"{part}.{'conv_out' if part == 'encoder' else 'conv_in'}.conv", out, inner, 3, 3)
    for i in reversed(range(len(widths))):
        inner = widths[min(i + 1, len(widths) - 1)]
        for j in range(depth + 1):
            shapes |= _audio_pair(f"decoder.up.{i}.block.{j}", widths[i], inner if j == 0 else widths[i])
        if i > 0:
            shapes |= _conv(f"decoder.up.{i}.upsample.conv.conv", widths[i], widths[i], 3, 3)
    shapes |= _conv("decoder.conv_out.conv", dd["out_ch"], dd["ch"], 3, 3)
    values = dd["z_channels"] * config["preprocessing"]["mel"]["n_mel_channels"] // 2 ** (len(widths) - 1)
    return shapes | {f"per_channel_statistics.{n}": (values,) for n in ("std-of-means", "mean-of-means")}


def _generator(config: Config, name: str, mels: int) -> Shapes:
    """A HiFi-GAN generator (``resblock`` "1") or a BigVGAN one (AMP1: snake activations with filters)."""
    periodic, width = config["resblock"] == "AMP1", config["upsample_initial_channel"]
    shapes = _conv(f"{name}conv_pre", width, mels, 7)
    kernels, block = config["resblock_kernel_sizes"], 0
    for i, kernel in enumerate(config["upsample_kernel_sizes"]):
        shapes |= {f"{name}ups.{i}.weight": (width, width // 2, kernel), f"{name}ups.{i}.bias": (width // 2,)}
        width //= 2
        for size, dilations in zip(kernels, config["resblock_dilation_sizes"]):
            inner = f"{name}resblocks.{block}"
            for which in (1, 2):
                for j in range(len(dilations)):
                    shapes |= _conv(f"{inner}.convs{which}.{j}", width, width, size)
                    shapes |= _snake(f"{inner}.acts{which}.{j}", width) if periodic else {}
            block += 1
    shapes |= _snake(f"{name}act_post", width) if periodic else {}
    return shapes | _conv(f"{name}conv_post", 2 if config.get("stereo", True) else 1, width, 7, bias=config.get("use_bias_at_final", True))


def _snake(name: str, width: int) -> Shapes:
    filters = {f"{name}.{n}": (1, 1, 12) for n in ("upsample.filter", "downsample.lowpass.filter")}
    return {f"{name}.act.alpha": (width,), f"{name}.act.beta": (width,)} | filters


def vocoder_shapes(config: Config, mels: int = 128) -> Shapes:
    """The vocoder of ``config.vocoder`` without its first ``vocoder.``: plain, or with bandwidth extension. mels: stereo x bins."""
    if "bwe" not in config:
        return _generator(config, "", mels)
    bwe = config["bwe"]
    shapes = _generator(config["vocoder"], "vocoder.", mels) | _generator(bwe, "bwe_generator.", 2 * bwe["num_mels"])
    window = bwe.get("win_size", bwe["n_fft"])
    basis = (2 * (bwe["n_fft"] // 2 + 1), 1, window)
    shapes |= {f"mel_stft.stft_fn.{n}_basis": basis for n in ("forward", "inverse")}
    return shapes | {"mel_stft.mel_basis": (bwe["num_mels"], bwe["n_fft"] // 2 + 1)}
