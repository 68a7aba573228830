"""LoRA files: the trained strength in every reader, every layout read, self-check, warm start."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest
import safetensors.torch
import torch

from ltx_train.errors import LtxTrainError
from ltx_train.lora.adapters import LoraSection, attach
from ltx_train.lora.files import base_shapes, read_lora, self_check, warm_start, write_lora, write_modules
from ltx_train.lora.layouts import LAYOUTS, Names, written_key
from ltx_train.lora.metadata import LoraMetadata
from ltx_train.lora.module import LoraModule

_spec = importlib.util.spec_from_file_location("lora_stand_in", Path(__file__).with_name("stand_in.py"))
_stand_in = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(_stand_in)
net, KINDS = _stand_in.net, _stand_in.KINDS
SNAPSHOTS = Path(__file__).parents[2] / "snapshots"


def trained(kind: str = "lora", seed: int = 5, **fields):
    """A model with adapters whose weights are not at their start."""
    model = net(seed)
    adapters = attach(model, LoraSection(**{"rank": 4, "alpha": 10, "kind": kind, **fields}), seed=0)
    g = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for p in adapters.parameters():
            p.add_(0.1 * torch.randn(p.shape, generator=g))
    return model, adapters


def comfyui_weight(base: torch.Tensor, sd: dict, key: str, strength: float) -> torch.Tensor:
    """ComfyUI 0.33's rules written out: comfy/weight_adapter/{lora,loha,lokr}.py and weight_decompose."""
    alpha = sd.get(f"{key}.alpha")
    alpha = None if alpha is None else alpha.item()
    get = lambda part: sd[f"{key}.{part}"].float()  # noqa: E731
    if f"{key}.lora_A.weight" in sd:
        a, b = get("lora_A.weight"), get("lora_B.weight")
        delta = (1.0 if alpha is None else alpha / a.shape[0]) * (b @ a)
        if f"{key}.dora_scale" in sd:
            dora = get("dora_scale")
            assert dora.shape == (base.shape[0], 1)
            full = base + delta
            return base + strength * (full * (dora / full.norm(dim=1, keepdim=True)) - base)
        return base + strength * delta
    if f"{key}.hada_w1_a" in sd:
        scale = 1.0 if alpha is None else alpha / sd[f"{key}.hada_w1_b"].shape[0]
        return base + strength * scale * ((get("hada_w1_a") @ get("hada_w1_b")) * (get("hada_w2_a") @ get("hada_w2_b")))
    dim, factors = None, []
    for part in ("lokr_w1", "lokr_w2"):
        if f"{key}.{part}" in sd:
            factors.append(get(part))
        else:
            dim = sd[f"{key}.{part}_b"].shape[0]
            factors.append(get(f"{part}_a") @ get(f"{part}_b"))
    scale = 1.0 if alpha is None or dim is None else alpha / dim
    return base + strength * scale * torch.kron(*factors).reshape(base.shape)


def ltx_core_weight(base: torch.Tensor, sd: dict, key: str, strength: float) -> torch.Tensor:
    """ltx-core 1.2's rule: B times strength, times A; .alpha is never read (official_trainer.md 6.2)."""
    return base + (sd[f"{key}.lora_B.weight"].float() * strength) @ sd[f"{key}.lora_A.weight"].float()


def played(rule, path: Path, seed: int = 5):
    """The base model with a file applied at strength 1 by a rule."""
    model = net(seed)
    sd = safetensors.torch.load_file(path)
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear) and any(k.startswith(f"diffusion_model.{name}.") for k in sd):
            module.weight.data = rule(module.weight.data, sd, f"diffusion_model.{name}", 1.0)
    return model


X = torch.randn(2, 5, 12, generator=torch.Generator().manual_seed(2))


@pytest.mark.parametrize("kind", KINDS)
def test_trained_strength_is_played_with_alpha_unlike_rank(kind, tmp_path):
    """The model as trained (alpha 10, rank 4) against the base with the file, by ComfyUI's rule and by ltx-core's."""
    model, adapters = trained(kind)
    path = write_lora(tmp_path / "a.safetensors", adapters, LoraMetadata(), torch.float32)
    with torch.no_grad():
        y, base = model(X), net(5)(X)
        assert (y - base).abs().max() > 1e-2  # the control: the adapter does something
        torch.testing.assert_close(played(comfyui_weight, path)(X), y, rtol=1e-4, atol=1e-5)
        if kind in ("lora", "rslora"):
            torch.testing.assert_close(played(ltx_core_weight, path)(X), y, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_our_own_module_agrees_and_norms_are_right(kind, tmp_path):
    _, adapters = trained(kind)
    path = write_lora(tmp_path / "a.safetensors", adapters, LoraMetadata(), torch.float32)
    sd, base = safetensors.torch.load_file(path), net(5)
    for name, module in read_lora(path).modules.items():
        weight = base.get_submodule(name).weight.data
        for strength in (1.0, 0.3):
            torch.testing.assert_close(module.apply(weight, strength), comfyui_weight(weight, sd, f"diffusion_model.{name}", strength), rtol=1e-5, atol=1e-6)
        assert module.norm() == pytest.approx(module.product().norm().item(), rel=1e-5)
        assert module.shape == tuple(weight.shape)


def test_alpha_per_module_is_rank_and_users_alpha_is_metadata(tmp_path):
    _, adapters = trained(rank_pattern={"to_q": 2})
    path = write_lora(tmp_path / "a.safetensors", adapters, LoraMetadata(family="ltx2.3", trigger="ohwx", steps=7))
    sd = safetensors.torch.load_file(path)
    for key, value in sd.items():
        if key.endswith(".alpha"):
            assert value.item() == sd[key.removesuffix("alpha") + "lora_A.weight"].shape[0]
        else:
            assert value.dtype == torch.bfloat16
    meta = read_lora(path).metadata
    assert (meta.alpha, meta.rank, meta.family, meta.trigger, meta.steps, meta.kind) == (10.0, 4, "ltx2.3", "ohwx", 7, "lora")
    assert meta.targets == ("to_k", "to_q", "to_v", "to_out.0") and meta.version


def test_reference_factors_stand_under_every_key(tmp_path):
    _, adapters = trained()
    path = write_lora(tmp_path / "a.safetensors", adapters, LoraMetadata(reference_spatial=2.0, reference_temporal=4.0))
    with safetensors.safe_open(path, "pt") as file:
        strings = file.metadata()
    assert strings["reference_downscale_factor"] == strings["reference_spatial_scale_factor"] == "2" and strings["reference_temporal_scale_factor"] == "4"
    assert all(isinstance(v, str) for v in strings.values())
    assert "reference_downscale_factor" not in LoraMetadata().to_strings()
    meta = read_lora(path).metadata
    assert (meta.reference_spatial, meta.reference_temporal) == (2.0, 4.0)
    assert LoraMetadata.of({"ss_reference_downscale_factor": "3"}).reference_spatial == 3.0


def test_metadata_round_trip():
    meta = LoraMetadata(
        family="ltx2.5", model_version="2.5.0", kind="dora", rank=8, alpha=4.5, targets=("video", "re:x"), mode="v2v", trigger="ü", steps=9,
        base="a", dataset="b", config="c", reference_spatial=1.5, reference_temporal=1.0, version="1", extra={"author": "me"},
    )  # fmt: skip
    assert LoraMetadata.of(meta.to_strings()) == meta


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_refuses_non_finite_and_names_the_module(bad, tmp_path):
    _, adapters = trained()
    name = adapters.names[3]
    with torch.no_grad():
        adapters.modules[name].tensors["lora_B.weight"][0, 0] = bad
    path = tmp_path / "a.safetensors"
    path.write_bytes(b"older")
    with pytest.raises(LtxTrainError) as error:
        write_lora(path, adapters, LoraMetadata())
    assert error.value.code == "lora.not_finite" and name in error.value.message and path.read_bytes() == b"older"
    assert len(list(tmp_path.iterdir())) == 1


def test_overflow_in_the_saved_dtype_is_seen(tmp_path):
    module = LoraModule("transformer_blocks.0.attn1.to_q", "lora", {"lora_A": torch.ones(2, 3), "lora_B": torch.full((4, 2), 1e6)}, 2.0)
    write_modules(tmp_path / "b.safetensors", {module.name: module}, LoraMetadata(), torch.bfloat16)
    with pytest.raises(LtxTrainError, match="infinite"):
        write_modules(tmp_path / "a.safetensors", {module.name: module}, LoraMetadata(), torch.float16)


# --- layouts ---

ROOT_AND_BLOCK = (
    "transformer_blocks.0.attn1.to_q", "transformer_blocks.11.audio_to_video_attn.to_out.0", "transformer_blocks.3.audio_ff.net.0.proj",
    "transformer_blocks.3.ff.net.2", "transformer_blocks.2.attn1.to_gate_logits", "patchify_proj", "audio_proj_out", "adaln_single.linear",
    "audio_prompt_adaln_single.emb.timestep_embedder.linear_1", "caption_projection.linear_2", "av_ca_a2v_gate_adaln_single.linear",
)  # fmt: skip
RANK, ALPHA = 3, 6.0


def plain_modules() -> dict[str, LoraModule]:
    g = torch.Generator().manual_seed(0)
    return {n: LoraModule(n, "lora", {"lora_A": torch.randn(RANK, 8, generator=g), "lora_B": torch.randn(6, RANK, generator=g)}, ALPHA) for n in ROOT_AND_BLOCK}


def diffusers_name(name: str) -> str:
    table = {
        "patchify_proj": "proj_in", "adaln_single.linear": "time_embed.linear",
        "audio_prompt_adaln_single.emb.timestep_embedder.linear_1": "audio_prompt_adaln.emb.timestep_embedder.linear_1",
        "av_ca_a2v_gate_adaln_single.linear": "av_cross_attn_video_a2v_gate.linear",
    }  # fmt: skip
    return table.get(name, name)


# layout -> (stem of a module, down suffix, up suffix, whether alpha is written)
READ = {
    "comfyui with alpha": ("diffusion_model.{n}", "lora_A.weight", "lora_B.weight", True),
    "official, no alpha": ("diffusion_model.{n}", "lora_A.weight", "lora_B.weight", False),
    "adapter name": ("diffusion_model.{n}", "lora_A.default.weight", "lora_B.default.weight", False),
    "peft": ("base_model.model.{n}", "lora_A.weight", "lora_B.weight", False),
    "peft with prefix": ("base_model.model.diffusion_model.{n}", "lora_A.default.weight", "lora_B.default.weight", False),
    "diffusers": ("transformer.{d}", "lora_A.weight", "lora_B.weight", False),
    "old diffusers": ("transformer.{d}", "lora.down.weight", "lora.up.weight", True),
    "kohya": ("lora_unet_{u}", "lora_down.weight", "lora_up.weight", True),
    "kohya, diffusers names": ("lora_transformer_{du}", "lora_down.weight", "lora_up.weight", True),
    "lycoris": ("lycoris_{u}", "lora_down.weight", "lora_up.weight", True),
    "down and up": ("diffusion_model.{n}", "lora_down.weight", "lora_up.weight", True),
    "checkpoint prefix": ("model.diffusion_model.{n}", "lora_A.weight", "lora_B.weight", True),
    "unprefixed": ("{n}", "lora_A.weight", "lora_B.weight", True),
    "unprefixed, no alpha": ("{n}", "lora_A.weight", "lora_B.weight", False),
}


@pytest.mark.parametrize("layout", READ)
def test_reads_every_layout(layout, tmp_path):
    stem, down, up, with_alpha = READ[layout]
    sd = {}
    for name, module in plain_modules().items():
        d = diffusers_name(name)
        s = stem.format(n=name, d=d, u=name.replace(".", "_"), du=d.replace(".", "_"))
        sd[f"{s}.{down}"], sd[f"{s}.{up}"] = module.tensors["lora_A"], module.tensors["lora_B"]
        if with_alpha:
            sd[f"{s}.alpha"] = torch.tensor(ALPHA)
    safetensors.torch.save_file(sd, tmp_path / "x.safetensors")
    lora = read_lora(tmp_path / "x.safetensors")
    assert set(lora.modules) == set(ROOT_AND_BLOCK) and lora.unknown == ()
    for name, module in plain_modules().items():
        got = lora.modules[name]
        assert got.scale == (ALPHA / RANK if with_alpha else 1.0)
        torch.testing.assert_close(got.product(), got.scale * module.tensors["lora_B"] @ module.tensors["lora_A"])


@pytest.mark.parametrize("layout", LAYOUTS)
def test_written_layouts_read_back_at_the_same_strength(layout, tmp_path):
    modules = plain_modules()
    lora = read_lora(write_modules(tmp_path / "x.safetensors", modules, LoraMetadata(), torch.float32, layout))
    assert set(lora.modules) == set(modules) and lora.layouts == (layout,)
    for name, module in modules.items():
        torch.testing.assert_close(lora.modules[name].product(), module.product())


def test_scale_from_pefts_config(tmp_path):
    (tmp_path / "adapter_config.json").write_text(json.dumps({"r": 4, "lora_alpha": 8, "use_rslora": True}))
    sd = {"base_model.model.transformer_blocks.0.attn1.to_q.lora_A.weight": torch.ones(4, 2), "base_model.model.transformer_blocks.0.attn1.to_q.lora_B.weight": torch.ones(2, 4)}
    safetensors.torch.save_file(sd, tmp_path / "adapter_model.safetensors")
    assert next(iter(read_lora(tmp_path / "adapter_model.safetensors").modules.values())).scale == pytest.approx(8 / 4**0.5)
    sd = {k.replace("base_model.model.", "transformer."): v for k, v in sd.items()}
    safetensors.torch.save_file(sd, tmp_path / "d.safetensors", {"lora_adapter_metadata": json.dumps({"transformer.r": 4, "transformer.lora_alpha": 2})})
    assert next(iter(read_lora(tmp_path / "d.safetensors").modules.values())).scale == 0.5


def test_other_kinds_and_foreign_keys(tmp_path):
    n = "diffusion_model.transformer_blocks.0.attn1.to_"
    sd = {
        f"{n}q.lora_down.weight": torch.ones(2, 4), f"{n}q.lora_up.weight": torch.ones(3, 2), f"{n}q.dora_scale": torch.ones(3, 1), f"{n}q.alpha": torch.tensor(1.0),
        f"{n}k.lokr_w1": torch.ones(1, 2), f"{n}k.lokr_w2_a": torch.ones(3, 2), f"{n}k.lokr_w2_b": torch.ones(2, 2), f"{n}k.alpha": torch.tensor(4.0),
        f"{n}v.hada_w1_a": torch.ones(3, 2), f"{n}v.hada_w1_b": torch.ones(2, 4), f"{n}v.hada_w2_a": torch.ones(3, 2), f"{n}v.hada_w2_b": torch.ones(2, 4),
        f"{n}out.0.diff": torch.ones(3, 4), f"{n}out.0.diff_b": torch.ones(3), "lora_te1_text_model_x.lora_down.weight": torch.ones(1, 1),
    }  # fmt: skip
    safetensors.torch.save_file(sd, tmp_path / "x.safetensors")
    lora = read_lora(tmp_path / "x.safetensors")
    assert lora.kinds == ("dora", "full", "loha", "lokr") and lora.unknown == ("lora_te1_text_model_x.lora_down.weight",)
    assert {m.name[-1] if "out" not in m.name else "o": (m.shape, m.scale) for m in lora.modules.values()} == {
        "q": ((3, 4), 0.5), "k": ((3, 4), 2.0), "v": ((3, 4), 1.0), "o": ((3, 4), 1.0)
    }  # fmt: skip


def test_incomplete_and_empty_files(tmp_path):
    safetensors.torch.save_file({"diffusion_model.transformer_blocks.0.attn1.to_q.lora_A.weight": torch.ones(2, 4)}, tmp_path / "a.safetensors")
    with pytest.raises(LtxTrainError, match="incomplete: lora_A"):
        read_lora(tmp_path / "a.safetensors")
    safetensors.torch.save_file({"vae.conv.weight": torch.ones(2, 4), "vocoder.act.alpha": torch.ones(2)}, tmp_path / "b.safetensors")
    with pytest.raises(LtxTrainError, match="holds no LoRA"):
        read_lora(tmp_path / "b.safetensors")
    a, b = torch.ones(2, 4), torch.ones(3, 2)
    twice = {"diffusion_model.p.lora_A.weight": a, "diffusion_model.p.lora_B.weight": b, "p.lora_A.weight": a + 1}
    safetensors.torch.save_file(twice, tmp_path / "c.safetensors")
    with pytest.raises(LtxTrainError, match="twice"):
        read_lora(tmp_path / "c.safetensors")
    safetensors.torch.save_file({"p.diff": torch.tensor(1.0), "p.diff_b": torch.ones(1)}, tmp_path / "d.safetensors")
    with pytest.raises(LtxTrainError, match=r"diff \[\] make no update"):
        read_lora(tmp_path / "d.safetensors")


@pytest.mark.parametrize("code, changes", [
    ("lora.shape", {"lora_B.weight": torch.ones(8, 2)}),
    ("lora.shape", {"lora_A.weight": torch.ones(8)}),
    ("lora.shape", {"lora_A.weight": torch.ones(0, 8), "lora_B.weight": torch.ones(8, 0)}),
    ("lora.not_finite", {"lora_A.weight": torch.full((4, 8), float("nan"))}),
    ("lora.alpha", {"alpha": torch.tensor(float("inf"))}),
    ("lora.alpha", {"alpha": torch.ones(3)}),
    ("lora.alpha", {"alpha": torch.ones(0)}),
    ("lora.shape", {"lora_A.weight": torch.tensor(1.0)}),
    ("lora.shape", {"dora_scale": torch.ones(3)}),
    ("lora.shape", {"diff_b": torch.ones(2, 8)}),
])  # fmt: skip
def test_a_broken_file_is_refused_before_it_is_used(code, changes, tmp_path):
    tensors = {"lora_A.weight": torch.ones(4, 8), "lora_B.weight": torch.ones(8, 4), "alpha": torch.tensor(4.0)} | changes
    safetensors.torch.save_file({f"diffusion_model.transformer_blocks.0.attn1.to_q.{k}": v for k, v in tensors.items()}, tmp_path / "l.safetensors")
    with pytest.raises(LtxTrainError, match="transformer_blocks.0.attn1.to_q") as error:
        read_lora(tmp_path / "l.safetensors")
    assert error.value.code == code and len(error.value.message) < 120


def test_a_folder_is_no_lora_and_strange_metadata_is_no_fault(tmp_path):
    (tmp_path / "adapter_config.json").mkdir()
    tensors = {"base_model.model.p.lora_A.weight": torch.ones(2, 4), "base_model.model.p.lora_B.weight": torch.ones(3, 2)}
    strange = {"ltx_train.targets": "[", "ltx_train.rank": "inf", "ltx_train.alpha": "nan", "lora_adapter_metadata": "[1]", "reference_downscale_factor": "x"}
    safetensors.torch.save_file(tensors, tmp_path / "a.safetensors", strange)
    safetensors.torch.save_file(tensors, tmp_path / "b.safetensors")
    told = read_lora(tmp_path / "a.safetensors").metadata
    assert (told.targets, told.rank, told.alpha, told.reference_spatial) == ((), None, None, None) and read_lora(tmp_path / "b.safetensors").modules["p"].scale == 1
    with pytest.raises(LtxTrainError, match="is a folder, not a LoRA file") as caught:
        read_lora(tmp_path)
    assert "a.safetensors, b.safetensors" in caught.value.hint


def test_known_names_settle_underscores():
    names = Names(["my_block.sub_layer.to_q"])
    assert names.parse("lora_unet_my_block_sub_layer_to_q.alpha").module == "my_block.sub_layer.to_q"
    assert Names().parse("lora_unet_my_block_sub_layer_to_q.alpha") is None


@pytest.mark.parametrize("kind", KINDS)
def test_golden_keys(kind, tmp_path):
    """The key list of each kind, pinned: a change here breaks files that people have (UR-25)."""
    _, adapters = trained(kind, target_modules=["transformer_blocks.0.attn1.to_q", "transformer_blocks.1.audio_to_video_attn.to_out.0"])
    sd = safetensors.torch.load_file(write_lora(tmp_path / "a.safetensors", adapters, LoraMetadata()))
    got = {key: [list(v.shape), str(v.dtype).removeprefix("torch.")] for key, v in sorted(sd.items())}
    assert got == json.loads((SNAPSHOTS / "lora_keys.json").read_text())[kind]


# --- self-check ---


@pytest.mark.parametrize("kind", KINDS)
def test_self_check_passes_and_reports(kind, tmp_path):
    model, adapters = trained(kind)
    path = write_lora(tmp_path / "a.safetensors", adapters, LoraMetadata(), torch.float32)
    base = net(5)
    found = self_check(path, base_shapes(model), lambda name: base.get_submodule(name).weight.data)
    assert set(found.norms) == set(adapters.names) and found.untrained == ()
    name = adapters.names[0]
    weight = base.get_submodule(name).weight.data
    delta = read_lora(path).modules[name].apply(weight) - weight
    assert found.norms[name] == pytest.approx(delta.norm().item(), rel=1e-4)
    assert found.rms[name] == pytest.approx(delta.square().mean().sqrt().item(), rel=1e-4)
    assert found.relative[name] == pytest.approx((delta.norm() / weight.norm()).item(), rel=1e-4)
    assert f"{len(adapters.names)} modules" in found.summary()
    assert base_shapes(model) == base_shapes(base) if kind in ("lora", "rslora") else set(base_shapes(base)) <= set(base_shapes(model))


def test_self_check_refuses(tmp_path):
    model, adapters = trained()
    shapes = base_shapes(net(5))
    path = write_lora(tmp_path / "a.safetensors", adapters, LoraMetadata())
    for change, code in (
        (lambda s: {n: v for n, v in s.items() if n != adapters.names[0]}, "lora.key_unknown"),
        (lambda s: {**s, adapters.names[0]: (7, 7)}, "lora.shape"),
    ):
        with pytest.raises(LtxTrainError) as error:
            self_check(path, change(shapes))
        assert error.value.code == code and len(error.value.message) < 120
    sd = safetensors.torch.load_file(path)
    broken = {**sd, f"diffusion_model.{adapters.names[0]}.lora_B.weight": torch.full((8, 4), float("nan"))}
    safetensors.torch.save_file(broken, tmp_path / "b.safetensors")
    with pytest.raises(LtxTrainError, match="NaN"):
        self_check(tmp_path / "b.safetensors", shapes)
    safetensors.torch.save_file({k.replace("diffusion_model.", "transformer."): v for k, v in sd.items()}, tmp_path / "c.safetensors")
    with pytest.raises(LtxTrainError, match="would not load"):
        self_check(tmp_path / "c.safetensors", shapes)
    fresh = attach(net(5), LoraSection(rank=4), seed=0)
    with pytest.raises(LtxTrainError, match="changes nothing"):
        self_check(write_lora(tmp_path / "d.safetensors", fresh, LoraMetadata()), shapes)
    with torch.no_grad():
        fresh.modules[fresh.names[1]].tensors["lora_B.weight"].fill_(1)
    assert len(self_check(write_lora(tmp_path / "e.safetensors", fresh, LoraMetadata()), list(shapes)).untrained) == len(fresh.names) - 1


# --- warm start ---


@pytest.mark.parametrize("kind", KINDS)
def test_warm_start_keeps_the_strength(kind, tmp_path):
    """A file trained with alpha 10 goes on under alpha 3: the model computes the same."""
    model, adapters = trained(kind)
    path = write_lora(tmp_path / "a.safetensors", adapters, LoraMetadata(), torch.float32)
    other = net(5)
    fresh = attach(other, LoraSection(rank=4, alpha=3, kind=kind), seed=8)
    report = warm_start(fresh, read_lora(path))
    assert set(report.matched) == set(adapters.names) and not report.missing and not report.unused and not report.fitted
    with torch.no_grad():
        torch.testing.assert_close(other(X), model(X), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("rank", [2, 4, 7])
def test_warm_start_at_another_rank(rank, tmp_path):
    model, adapters = trained()
    path = write_lora(tmp_path / "a.safetensors", adapters, LoraMetadata(), torch.float32)
    other = net(5)
    fresh = attach(other, LoraSection(rank=rank, alpha=3), seed=8)
    report = warm_start(fresh, read_lora(path))
    assert len(report.fitted) == (0 if rank == 4 else len(adapters.names))
    if rank >= 4:
        with torch.no_grad():
            torch.testing.assert_close(other(X), model(X), rtol=1e-4, atol=1e-5)
        assert all(error == 0 for error in report.fitted.values())
    else:
        assert all(0 < error < 1 for error in report.fitted.values())


def test_warm_start_reports_and_refuses(tmp_path):
    _, adapters = trained(target_modules=["attn1.to_q", "attn2.to_q"])
    lora = read_lora(write_lora(tmp_path / "a.safetensors", adapters, LoraMetadata()))
    some = attach(net(5), LoraSection(rank=4, target_modules=["attn1.to_q", "attn1.to_k"]), seed=0)
    report = warm_start(some, lora)
    assert (len(report.matched), len(report.missing), len(report.unused)) == (2, 2, 2) and "2 modules taken over" in report.summary()
    none = attach(net(5), LoraSection(rank=4, target_modules=["ff"]), seed=0)
    with pytest.raises(LtxTrainError) as error:
        warm_start(none, lora)
    assert error.value.code == "lora.no_common_module"
    with pytest.raises(LtxTrainError, match="of kind lora, the adapter dora"):
        warm_start(attach(net(5), LoraSection(rank=4, kind="dora"), seed=0), lora)


def test_every_block_linear_has_an_underscored_name():
    for name in net(0).named_modules():
        if isinstance(name[1], torch.nn.Linear):
            key = written_key(name[0], "lora_A", "kohya")
            assert Names().parse(key).module == name[0]
