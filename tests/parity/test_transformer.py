"""The transformer against the official implementation's recorded outputs and LoRA gradients (data/README.md)."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from ltx_train.models.checkpoint import Checkpoint
from ltx_train.models.linear import LoraWeights
from ltx_train.models.modality import Modality
from ltx_train.models.transformer import Perturbations, load_transformer

DATA = Path(__file__).parent / "data"
AV_FAMILIES = ("ltx2", "ltx2.3", "ltx2.5")
TOLERANCE = 2e-5  # README: other CPU types or kernels differ by about 1e-6
AV_SCENARIOS = (
    "uniform",
    "first_frame",
    "reference",
    "reference_temporal",
    "sigma_differs",
    "first_frame_audio_prefix_sigma_differs",
    "batch_sigmas",
    "frozen_audio",
    "video_only",
    "audio_only",
    "mask_binary",
    "mask_fractional",
    "context_mask",
    "perturb_skip_video_self_attn",
    "perturb_skip_audio_self_attn",
    "perturb_skip_a2v_cross_attn",
    "perturb_skip_v2a_cross_attn",
    "isolate_modalities",
)
CASES = [(family, name) for family in AV_FAMILIES for name in AV_SCENARIOS]
CASES += [("ltx2.5", "keyframes"), ("ltx2.5", "keyframes_first_frame")]
_loaded: dict = {}


def open_checkpoint(family: str) -> Checkpoint:
    return Checkpoint.open(DATA / f"{family}.checkpoint.safetensors")


def transformer(family: str, **streams):
    key = (family, *sorted(streams.items()))
    if key not in _loaded:
        _loaded[key] = load_transformer(open_checkpoint(family), dtype=torch.float32, device="cpu", **streams)
    return _loaded[key]


def recorded(family: str) -> dict[str, torch.Tensor]:
    if family not in _loaded:
        _loaded[family] = load_file(DATA / f"{family}.transformer.safetensors")
    return _loaded[family]


def modality(data: dict, scenario: str, stream: str, *, compact: bool = False) -> Modality | None:
    get = lambda name: data.get(f"{scenario}.{name}")  # noqa: E731
    if get(f"{stream}_tokens") is None:
        return None
    timesteps, keyframes, rows, index = get(f"{stream}_timesteps"), get(f"{stream}_keyframes_mask"), None, None
    if compact:
        found = [torch.unique(t, return_inverse=True) for t in timesteps]
        rows = torch.stack([torch.nn.functional.pad(values, (0, 3 - len(values))) for values, _ in found])
        index = torch.stack([inverse for _, inverse in found])
    return Modality(
        tokens=get(f"{stream}_tokens"),
        sigma=get(f"{stream}_sigma"),
        timesteps=timesteps,
        positions=get(f"{stream}_positions"),
        context=get(f"{stream}_context"),
        context_mask=get("context_mask"),
        keyframes=None if keyframes is None else keyframes.squeeze(-1) > 0,
        attention_mask=get(f"{stream}_attention_mask"),
        timestep_rows=rows,
        row_index=index,
    )


def run(model, data: dict, scenario: str, **kwargs):
    keep = data.get(f"{scenario}.perturbation_keep_mask")
    perturbations = None if keep is None else Perturbations(*keep)
    return model(modality(data, scenario, "video", **kwargs), modality(data, scenario, "audio", **kwargs), perturbations)


def assert_outputs(outputs, data: dict, scenario: str) -> None:
    checked = 0
    for stream, value in zip(("video", "audio"), outputs):
        expected = data.get(f"{scenario}.{stream}_out")
        assert (value is None) == (expected is None), stream
        if value is not None:
            assert (value - expected).abs().max() <= TOLERANCE, stream
            checked += 1
    assert checked


@pytest.mark.parametrize("family", AV_FAMILIES)
def test_every_recorded_scenario_is_listed(family):
    names = {key.split(".")[0] for key in recorded(family)} - {"lora"}
    assert names == {name for of, name in CASES if of == family}


@pytest.mark.parametrize(("family", "scenario"), CASES)
def test_outputs_equal_official(family, scenario):
    data = recorded(family)
    with torch.no_grad():
        assert_outputs(run(transformer(family), data, scenario), data, scenario)


@pytest.mark.parametrize("family", AV_FAMILIES)
@pytest.mark.parametrize("scenario", ["uniform", "first_frame_audio_prefix_sigma_differs", "batch_sigmas"])
def test_compact_timesteps_give_the_same(family, scenario):
    data = recorded(family)
    with torch.no_grad():
        assert_outputs(run(transformer(family), data, scenario, compact=True), data, scenario)


@pytest.mark.parametrize("family", AV_FAMILIES)
@pytest.mark.parametrize("stream", ["video", "audio"])
def test_single_stream_models_equal_official(family, stream):
    data, other = recorded(family), {"video": "audio", "audio": "video"}[stream]
    model = transformer(family, **{other: False})
    assert not [name for name, _ in model.named_parameters() if ("audio" in name) != (stream == "audio")]
    with torch.no_grad():
        assert_outputs(run(model, data, f"{stream}_only"), data, f"{stream}_only")


@pytest.mark.parametrize("family", AV_FAMILIES)
@pytest.mark.parametrize("scenario", ["uniform", "first_frame"])
def test_lora_outputs_and_gradients_equal_official(family, scenario):
    data = recorded(family)
    model = load_transformer(open_checkpoint(family), dtype=torch.float32, device="cpu")
    adapters = {}
    for key in data:
        if key.startswith("lora.") and key.endswith(".lora_A.weight"):
            name = key.removeprefix("lora.diffusion_model.").removesuffix(".lora_A.weight")
            layer = model.get_submodule(name)
            layer.lora = LoraWeights(layer.in_features, layer.out_features, rank=2)
            layer.lora.A.data.copy_(data[key])
            layer.lora.B.data.copy_(data[key.replace("lora_A", "lora_B")])
            adapters[name] = layer.lora
    assert len(adapters) == 6
    outputs = run(model, data, scenario)
    assert_outputs(outputs, {k.replace(".lora.", ".", 1): v for k, v in data.items() if k.startswith(f"{scenario}.lora.")}, scenario)
    loss = sum(out.square().mean() for out in outputs)
    assert abs(loss - data[f"{scenario}.lora.loss"]) <= TOLERANCE
    loss.backward()
    for name, lora in adapters.items():
        for side in "AB":
            expected = data[f"{scenario}.lora.grad.{name}.lora_{side}.weight"]
            assert expected.abs().max() > 1e-5
            assert (getattr(lora, side).grad - expected).abs().max() <= TOLERANCE, (name, side)


@pytest.mark.parametrize("scenario", ["uniform", "first_frame", "no_padding"])
def test_ltx_video_equals_diffusers_recording(scenario):
    data = {k.removeprefix(f"{scenario}."): v for k, v in recorded("ltxv0.9.5").items() if k.startswith(f"{scenario}.")}
    starts = data["positions"]
    video = Modality(
        data["tokens"], data["sigma"], data["timesteps"], torch.stack([starts, starts + 1], -1), data["context"], context_mask=data["context_mask"]
    )
    with torch.no_grad():
        out, audio = transformer("ltxv0.9.5")(video, None)
    assert audio is None
    assert (out - data["video_out"]).abs().max() <= TOLERANCE


@pytest.mark.parametrize("family", AV_FAMILIES)
def test_bfloat16_stays_near_official(family):
    """0.8 % is what bfloat16 costs the official code itself; three blocks, outputs of order 1."""
    data = recorded(family)
    model = load_transformer(open_checkpoint(family), dtype=torch.bfloat16, device="cpu")
    assert {p.dtype for n, p in model.named_parameters() if "scale_shift_table" in n} == {torch.float32}
    for scenario in ("uniform", "first_frame"):
        with torch.no_grad():
            outputs = run(model, data, scenario)
        for stream, value in zip(("video", "audio"), outputs):
            expected = data[f"{scenario}.{stream}_out"]
            assert value.dtype == torch.bfloat16
            assert (value.float() - expected).norm() / expected.norm() < 0.02
