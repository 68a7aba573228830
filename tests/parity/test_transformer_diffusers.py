"""The transformer against diffusers on the same random weights: LTX-2, 2.3, 2.5, their flag variants, and LTX-Video.

diffusers computes the audio-video gates with an older timestep rule; two hooks feed it the other stream's sigma, as
the official code does, which makes it an exact oracle for everything it can express.
"""

from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch

from ltx_train.geometry import AudioGrid, VideoGrid
from ltx_train.models.families import TransformerConfig
from ltx_train.models.linear import LoraWeights
from ltx_train.models.modality import Modality
from ltx_train.models.transformer import LTXTransformer, Perturbations

FORWARD, GRADIENT = 1e-5, 1e-4
HEADS, BATCH, TEXT = 4, 2, 7
LTX2 = TransformerConfig(
    num_layers=3,
    num_attention_heads=HEADS,
    attention_head_dim=20,  # width 80 is no multiple of 6: the RoPE table is padded
    in_channels=8,
    out_channels=8,
    cross_attention_dim=80,
    caption_channels=24,
    audio_num_attention_heads=HEADS,
    audio_attention_head_dim=8,
    audio_in_channels=12,
    audio_out_channels=12,
    audio_cross_attention_dim=32,
    av_ca_timestep_scale_multiplier=500.0,  # unlike 1000, so that the factor shows
)
LTX23 = replace(LTX2, caption_channels=None, gated_attention=True, cross_attention_adaln=True, prompt_adaln_single=True)
LTX25 = replace(LTX23, ff_bias=False, keyframe_embedding=True)
CONFIGS = {
    "ltx2": LTX2,
    "ltx2.3": LTX23,
    "ltx2.5": LTX25,
    "ltx2.5-static-prompt": replace(LTX25, prompt_adaln_single=False),
    "ltx2.3-audio-bias": replace(LTX23, audio_ff_bias=False),
    "ltx2-interleaved-float32": replace(LTX2, rope_type="interleaved", frequencies_precision="float32"),
}
LTXV = replace(
    LTX2,
    audio_num_attention_heads=0,
    qk_norm_eps=1e-5,
    rope_type="interleaved",
    frequencies_precision="float32",
    use_middle_indices_grid=False,
    norm_before_cross_attention=False,
)
RENAMES = [
    ("audio_proj_in.", "audio_patchify_proj."),
    ("proj_in.", "patchify_proj."),
    ("audio_time_embed.", "audio_adaln_single."),
    ("time_embed.", "adaln_single."),
    ("audio_prompt_adaln.", "audio_prompt_adaln_single."),
    ("prompt_adaln.", "prompt_adaln_single."),
    ("av_cross_attn_video_scale_shift.", "av_ca_video_scale_shift_adaln_single."),
    ("av_cross_attn_audio_scale_shift.", "av_ca_audio_scale_shift_adaln_single."),
    ("av_cross_attn_video_a2v_gate.", "av_ca_a2v_gate_adaln_single."),
    ("av_cross_attn_audio_v2a_gate.", "av_ca_v2a_gate_adaln_single."),
]
INNER = [
    ("video_a2v_cross_attn_scale_shift_table", "scale_shift_table_a2v_ca_video"),
    ("audio_a2v_cross_attn_scale_shift_table", "scale_shift_table_a2v_ca_audio"),
    (".norm_q.", ".q_norm."),
    (".norm_k.", ".k_norm."),
]
TARGETS = ("attn1.to_q", "attn2.to_k", "audio_attn1.to_v", "audio_to_video_attn.to_out.0", "video_to_audio_attn.to_k", "ff.net.2", "audio_ff.net.0.proj")


def official_name(name: str) -> str:
    for old, new in RENAMES:
        if name.startswith(old):
            name = new + name.removeprefix(old)
            break
    for old, new in INNER:
        name = name.replace(old, new)
    return name


def build(config: TransformerConfig):
    """diffusers' model with random weights of a size that makes every part matter, and ours with the same."""
    import diffusers

    torch.manual_seed(5)
    common = dict(
        in_channels=config.in_channels,
        out_channels=config.out_channels,
        num_attention_heads=HEADS,
        attention_head_dim=config.attention_head_dim,
        cross_attention_dim=config.cross_attention_dim,
        num_layers=config.num_layers,
        caption_channels=config.caption_channels or 1,
    )
    if not config.has_audio:
        oracle = diffusers.LTXVideoTransformer3DModel(**common)
    else:
        oracle = diffusers.LTX2VideoTransformer3DModel(
            **common,
            gated_attn=config.gated_attention,
            cross_attn_mod=config.cross_attention_adaln,
            audio_gated_attn=config.gated_attention,
            audio_cross_attn_mod=config.cross_attention_adaln,
            audio_in_channels=config.audio_in_channels,
            audio_out_channels=config.audio_out_channels,
            audio_num_attention_heads=HEADS,
            audio_attention_head_dim=config.audio_attention_head_dim,
            audio_cross_attention_dim=config.audio_cross_attention_dim,
            rope_type=config.rope_type,
            rope_double_precision=config.frequencies_precision == "float64",
            cross_attn_timestep_scale_multiplier=config.av_ca_timestep_scale_multiplier,
            use_prompt_embeddings=config.caption_channels is not None,
            perturbed_attn=True,
            ff_bias=config.ff_bias,
            audio_ff_bias=config.audio_ff_bias,
            use_prompt_adaln_single=config.prompt_adaln_single,
            use_keyframes_abs_pos_embedding=config.keyframe_embedding,
        )
    with torch.no_grad():
        for name, parameter in oracle.named_parameters():
            parameter += 0.2 * torch.randn_like(parameter) if "norm" in name or "table" in name else 0.05 * torch.randn_like(parameter)
    ours = LTXTransformer(config).requires_grad_(False)
    ours.load_state_dict({official_name(k): v for k, v in oracle.state_dict().items()}, strict=True)
    return oracle.requires_grad_(False).eval(), ours.eval()


@pytest.fixture(scope="module", params=CONFIGS)
def pair(request):
    return build(CONFIGS[request.param])


@pytest.fixture(scope="module")
def ltxv_pair():
    return build(LTXV)


def inputs(config: TransformerConfig, *, references: bool = False) -> tuple[Modality, Modality]:
    g = torch.Generator().manual_seed(9)
    randn = lambda *shape: torch.randn(*shape, generator=g)  # noqa: E731
    positions = VideoGrid(3, 2, 3, fps=25.0).positions()
    if references:  # a half-size clip, its positions stretched over the target
        positions = torch.cat([positions, VideoGrid(3, 1, 2, fps=25.0).positions() * torch.tensor([1.0, 2.0, 2.0]).view(3, 1, 1)], dim=1)
    tokens = positions.shape[1]
    video = Modality(
        tokens=randn(BATCH, tokens, config.in_channels),
        sigma=torch.full((BATCH,), 0.7),
        timesteps=torch.full((BATCH, tokens), 0.7),
        positions=positions.expand(BATCH, -1, -1, -1),
        context=randn(BATCH, TEXT, config.caption_channels or config.dim),
    )
    audio = Modality(
        tokens=randn(BATCH, 5, config.audio_in_channels),
        sigma=torch.full((BATCH,), 0.7),
        timesteps=torch.full((BATCH, 5), 0.7),
        positions=AudioGrid(5).positions().expand(BATCH, -1, -1, -1),
        context=randn(BATCH, TEXT, config.caption_channels or config.audio_dim),
    )
    return video, audio


@contextmanager
def gates_by_other_sigma(oracle, video: Modality, audio: Modality):
    factor = oracle.config.cross_attn_timestep_scale_multiplier
    handles = []
    for module, sigma in ((oracle.av_cross_attn_video_a2v_gate, audio.sigma), (oracle.av_cross_attn_audio_v2a_gate, video.sigma)):
        hook = lambda _, args, kwargs, t=sigma * factor: ((t, *args[1:]), kwargs)  # noqa: E731
        handles.append(module.register_forward_pre_hook(hook, with_kwargs=True))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def ask_oracle(oracle, video: Modality, audio: Modality, **kwargs):
    with gates_by_other_sigma(oracle, video, audio):
        return oracle(
            hidden_states=video.tokens,
            audio_hidden_states=audio.tokens,
            encoder_hidden_states=video.context,
            audio_encoder_hidden_states=audio.context,
            encoder_attention_mask=video.context_mask,
            audio_encoder_attention_mask=audio.context_mask,
            timestep=video.timesteps * 1000,
            audio_timestep=audio.timesteps * 1000,
            sigma=video.sigma * 1000,
            audio_sigma=audio.sigma * 1000,
            video_coords=video.positions,
            audio_coords=audio.positions,
            video_self_attention_mask=video.attention_mask,
            video_keyframes_mask=None if video.keyframes is None else video.keyframes.unsqueeze(-1).float(),
            return_dict=False,
            **kwargs,
        )


def first_frame(m: Modality, count: int = 6) -> Modality:
    timesteps = m.timesteps.clone()
    timesteps[:, :count] = 0.0
    return replace(m, timesteps=timesteps)


def of_sigma(m: Modality, *sigmas: float) -> Modality:
    sigma = torch.tensor(sigmas).expand(BATCH)
    return replace(m, sigma=sigma, timesteps=m.timesteps / 0.7 * sigma.unsqueeze(1))


def sides_apart(tokens: int) -> torch.Tensor:
    mask = torch.ones(BATCH, tokens, tokens)
    mask[:, : tokens // 2, tokens // 2 :] = 0.0
    return mask


def scenarios(config: TransformerConfig) -> dict[str, tuple[Modality, Modality]]:
    video, audio = inputs(config)
    long, _ = inputs(config, references=True)
    reference = replace(long, timesteps=torch.cat([long.timesteps[:, :18], torch.zeros(BATCH, 6)], dim=1))
    text = torch.ones(BATCH, TEXT)
    text[0, 4:], text[1, 6:] = 0, 0
    cases = {
        "uniform": (video, audio),
        "first_frame": (first_frame(video), audio),
        "reference": (reference, audio),
        "sigma_differs": (of_sigma(video, 0.9), of_sigma(audio, 0.3)),
        "all_differ": (first_frame(of_sigma(video, 0.9, 0.4)), first_frame(of_sigma(audio, 0.3, 0.6), 2)),
        "self_mask": (replace(video, attention_mask=sides_apart(18)), audio),
        "text_mask": (replace(video, context_mask=text), replace(audio, context_mask=text)),
    }
    if config.keyframe_embedding:
        marked = torch.zeros(BATCH, 18, dtype=torch.bool)
        marked[:, :6] = True
        cases["keyframes"] = (replace(video, keyframes=marked), audio)
    return cases


def worst(ours, theirs) -> float:
    return max(float((a - b).detach().abs().max()) for a, b in zip(ours, theirs))


def test_scenarios(pair):
    oracle, ours = pair
    seen = []
    with torch.no_grad():
        for name, (video, audio) in scenarios(ours.config).items():
            theirs = ask_oracle(oracle, video, audio)
            assert 0.1 < theirs[0].std() < 3
            assert 0.1 < theirs[1].std() < 3
            assert worst(ours(video, audio), theirs) <= FORWARD, name
            assert all((theirs[0] - other).abs().max() > 1e-3 for other in seen if other.shape == theirs[0].shape), name
            seen.append(theirs[0])


def test_streams_alone(pair):
    """A stream alone is what diffusers gives when it isolates the modalities."""
    oracle, ours = pair
    video, audio = inputs(ours.config)
    with torch.no_grad():
        theirs = ask_oracle(oracle, video, audio, isolate_modalities=True)
        together = ours(video, audio, Perturbations.isolated(3, BATCH))
        alone = ours(video, None)[0], ours(None, audio)[1]
        assert ours(video, None)[1] is None
    assert worst(together, theirs) <= FORWARD
    assert worst(alone, theirs) <= FORWARD
    for kept, out in (("video", alone[0]), ("audio", alone[1])):
        single = LTXTransformer(ours.config, video=kept == "video", audio=kept == "audio").eval()
        single.load_state_dict({k: v for k, v in ours.state_dict().items() if k in single.state_dict()}, strict=True)
        with torch.no_grad():
            answer = single(video, None)[0] if kept == "video" else single(None, audio)[1]
        assert torch.equal(answer, out)


def test_skipped_self_attention(pair):
    """Spatio-temporal guidance in block 1; diffusers can only skip both streams' self-attention."""
    oracle, ours = pair
    video, audio = inputs(ours.config)
    with torch.no_grad():
        theirs = ask_oracle(oracle, video, audio, spatio_temporal_guidance_blocks=[1], perturbation_mask=torch.tensor([1.0, 0.0]))
        keep = torch.ones(3, BATCH)
        keep[1, 1] = 0
        assert worst(ours(video, audio, Perturbations(keep, keep)), theirs) <= FORWARD
        every = ask_oracle(oracle, video, audio, spatio_temporal_guidance_blocks=[1])
        assert worst(ours(video, audio, Perturbations.self_attention(3, BATCH, [1])), every) <= FORWARD


def add_lora(oracle, ours) -> list[tuple[LoraWeights, torch.nn.Module]]:
    """The same LoRA on both: ours inside Linear, diffusers' by a hook on its layer."""
    found = []
    theirs = dict(oracle.named_modules())
    for name, layer in list(ours.named_modules()):
        if name.endswith(tuple(f".{t}" for t in TARGETS)) and name.startswith("transformer_blocks."):
            torch.manual_seed(len(found))
            layer.lora = LoraWeights(layer.in_features, layer.out_features, rank=3, alpha=6)
            torch.nn.init.normal_(layer.lora.B, std=0.1)
            twin = LoraWeights(layer.in_features, layer.out_features, rank=3, alpha=6)
            twin.load_state_dict(layer.lora.state_dict())
            theirs[name].register_forward_hook(lambda _, args, out, lora=twin: out + 2.0 * args[0] @ lora.A.T @ lora.B.T)
            found.append((layer.lora, twin))
    return found


def assert_same_gradients(adapters, ours, theirs) -> None:
    for outputs in (ours, theirs):
        sum((out * torch.linspace(-1, 1, out.numel()).view_as(out)).mean() + out.square().mean() for out in outputs).backward()
    for mine, twin in adapters:
        for a, b in ((mine.A.grad, twin.A.grad), (mine.B.grad, twin.B.grad)):
            assert b.norm() > 0
            assert (a - b).norm() / b.norm() <= GRADIENT


@pytest.mark.parametrize("name", ["ltx2", "ltx2.3", "ltx2.5"])
def test_lora_gradients(name):
    oracle, ours = build(CONFIGS[name])
    adapters = add_lora(oracle, ours)
    assert len(adapters) == 3 * len(TARGETS)
    video, audio = scenarios(ours.config)["all_differ"]
    mine, theirs = ours(video, audio), ask_oracle(oracle, video, audio)
    assert worst(mine, theirs) <= FORWARD
    assert_same_gradients(adapters, mine, theirs)


def ltxv_cases() -> dict[str, Modality]:
    video, _ = inputs(LTXV)
    long, _ = inputs(LTXV, references=True)
    text = torch.ones(BATCH, TEXT)
    text[0, 4:] = 0
    return {
        "uniform": video,
        "first_frame": first_frame(video),
        "reference": replace(long, timesteps=torch.cat([long.timesteps[:, :18], torch.zeros(BATCH, 6)], dim=1)),
        "batch_sigmas": of_sigma(video, 0.9, 0.4),
        "text_mask": replace(video, context_mask=text),
    }


def ask_ltxv(oracle, video: Modality):
    mask = torch.ones(BATCH, TEXT) if video.context_mask is None else video.context_mask
    return oracle(video.tokens, video.context, video.timesteps * 1000, mask, video_coords=video.positions[..., 0], return_dict=False)


@pytest.mark.parametrize("case", ltxv_cases())
def test_ltx_video(ltxv_pair, case):
    oracle, ours = ltxv_pair
    video = ltxv_cases()[case]
    with torch.no_grad():
        theirs = ask_ltxv(oracle, video)
        assert 0.1 < theirs[0].std() < 3
        assert worst(ours(video, None)[:1], theirs) <= FORWARD


def test_ltx_video_lora_gradients():
    oracle, ours = build(LTXV)
    adapters = add_lora(oracle, ours)
    assert len(adapters) == 9
    video = ltxv_cases()["first_frame"]
    mine, theirs = ours(video, None)[:1], ask_ltxv(oracle, video)
    assert worst(mine, theirs) <= FORWARD
    assert_same_gradients(adapters, mine, theirs)
