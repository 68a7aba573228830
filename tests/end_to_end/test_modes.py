"""Every mode on every family that has it: two steps, the right modules, clean tokens that cost nothing, the plain loss."""

import shutil
from contextlib import contextmanager

import pytest
import torch
from safetensors import safe_open

from ltx_train.checks import check_config
from ltx_train.conditioning.modes import MODES
from ltx_train.conditioning.state import LatentState
from ltx_train.errors import ConfigError, DataError
from ltx_train.models.families import FAMILIES
from ltx_train.training.step import TrainStep
from tests.end_to_end.corridor import TINY_FAMILIES, train

# the tiny clips have 3 latent frames of 2 x 2 and 18 steps of sound: modes that count are told smaller numbers
SMALLER = {"temporal_boundary": 1, "temporal_boundary_max": 2, "spatial_region": [0, 0, 32, 32], "count": [1, 2]}


def strategy_of(mode):
    def fitted(stream):
        if stream is None:
            return None
        return {**stream, "conditions": [{k: SMALLER.get(k, v) for k, v in c.items()} for c in stream.get("conditions", [])]}

    return {"name": "flexible", "video": fitted(mode.video), "audio": fitted(mode.audio)}


def cases():
    for mode in MODES.values():
        for family in TINY_FAMILIES:
            if FAMILIES[family].audio or mode.audio is None:
                yield pytest.param(mode.name, family, id=f"{mode.name}-{family}")


def test_every_size_of_the_data_is_checked_whichever_comes_first(home, tmp_path):
    """Stills among clips: a given first latent frame is all of a still, which would then cost nothing and teach nothing."""
    for source in (home.clips, home.stills):
        shutil.copytree(source, tmp_path / "mixed", dirs_exist_ok=True)
    cache = str(home.cache("ltx2.3", tmp_path / "mixed", "64x64x17;64x64x1"))
    strategy = {"name": "flexible", "video": {"is_generated": True, "conditions": [{"type": "prefix", "temporal_boundary": 1}]}}
    for seed in (0, 1):  # one begins with a clip, one with a still
        config = home.config(tmp_path / f"{seed}", training_strategy=strategy, seed=seed, data={"preprocessed_data_root": cache}, optimization={"batch_size": 1})
        for look in (check_config, train):
            with pytest.raises(ConfigError) as caught:
                look(config)
            assert caught.value.code == "condition.covers_all" and "p0.png" in caught.value.hint


@contextmanager
def watched(calls):
    """Keep of every step the batch, what the network was given, and what it gave."""
    original = TrainStep.__call__

    def call(self, batch, **key):
        network, given = self.transformer, {}

        def run(video, audio, perturbations=None):
            out = network(video, audio, perturbations)
            given.update(video=(video, out[0]), audio=(audio, out[1]), network=network)
            return out

        self.transformer = run
        try:
            out = original(self, batch, **key)
        finally:
            self.transformer = network
        calls.append((batch, given, out))
        return out

    TrainStep.__call__ = call
    try:
        yield
    finally:
        TrainStep.__call__ = original


def plain_loss(latents, modality, velocity):
    """[B] mean squared error over the tokens with a timestep, from the network's own input: x = clean + t * (noise - clean)."""
    clean = latents.tokens.float()
    count = clean.shape[1]
    t, x, v = modality.timesteps[:, :count, None].float(), modality.tokens[:, :count].float(), velocity[:, :count].float()
    given = t == 0
    assert torch.equal(torch.where(given, x, 0), torch.where(given, clean, 0)), "a given token is not clean"
    assert not (t == 0).all(), "nothing is generated"
    target = torch.where(given, 0, (x - clean) / t.clamp_min(1e-6))
    error = torch.where(given, 0, (v - target) ** 2).sum((1, 2))
    return error / ((~given).sum((1, 2)) * clean.shape[2])


def expected_modules(network, targets, streams):
    """Written out: linear layers that end in a target and belong to the streams that were loaded."""
    linears = [n for n, m in network.named_modules() if isinstance(m, torch.nn.Linear) and "transformer_blocks" in n]
    found = {n for n in linears if any(n.endswith("." + t) for t in targets)}
    if "audio" not in streams:
        found = {n for n in found if "audio" not in n}
    if "video" not in streams:
        found = {n for n in found if ".audio_attn" in n or ".audio_ff" in n}
    return found


@pytest.mark.parametrize(("name", "family"), cases())
def test_two_steps(home, tmp_path, name, family):
    mode, calls = MODES[name], []
    config = home.config(tmp_path / "run", family, training_strategy=strategy_of(mode), lora={"rank": 2, "alpha": 4, "target_modules": list(mode.target_modules)})
    with watched(calls):
        done = train(config)
    streams = [m for m in ("video", "audio") if getattr(mode, m) is not None]
    generated = [m for m in streams if getattr(mode, m)["is_generated"]]

    assert len(calls) == 2 and list(done.steps) == [1, 2]
    for (batch, given, out), loss in zip(calls, done.losses):
        total = 0.0
        for stream in ("video", "audio"):
            modality, velocity = given[stream]
            assert (modality is not None) == (stream in streams)
            if modality is None:
                continue
            references = modality.timesteps[:, getattr(batch, stream).tokens.shape[1] :]
            assert not references.any(), "reference tokens have a timestep"
            if stream in generated:
                total = total + plain_loss(getattr(batch, stream), modality, velocity)
            else:
                assert not modality.timesteps.any() and not modality.sigma.any() and torch.equal(modality.tokens, getattr(batch, stream).tokens)
        assert float(total.mean().detach()) == pytest.approx(loss, rel=1e-4)
        assert (out.video_loss is None) == ("video" not in generated) and (out.audio_loss is None) == ("audio" not in generated)

    network = calls[0][1]["network"]
    wanted = expected_modules(network, mode.target_modules, streams)
    assert done.modules == wanted and wanted
    with safe_open(str(home.model(family)["model"]), "pt") as base:
        keys = set(base.keys())
    assert all(f"model.diffusion_model.{n}.weight" in keys for n in done.modules)
    names = {n for n, _ in network.named_parameters()}
    assert ("patchify_proj.weight" in names) == ("video" in streams) and ("audio_patchify_proj.weight" in names) == ("audio" in streams)
    loaded = {n.split(".")[2] for n in names if n.startswith("transformer_blocks.")}
    assert "audio" in streams or not any("audio" in n for n in loaded)
    assert "video" in streams or not ({"attn1", "attn2", "ff"} | {n for n in loaded if "_to_" in n}) & loaded


@pytest.mark.parametrize("family", ["ltx2.3"])
def test_clips_without_sound(home, tmp_path, family):
    """Sound beside video is left out, said once, and adapts nothing; a mode that is about sound refuses silent clips."""
    data = {"preprocessed_data_root": str(home.cache(family, home.silent))}
    calls = []
    with watched(calls):
        done = train(home.config(tmp_path / "both", family, data=data))
    assert done.warnings == ["data.no_sound"] and done.modules and not any("audio" in n for n in done.modules)
    assert calls[0][1]["audio"] == (None, None) and "audio_patchify_proj.weight" not in dict(calls[0][1]["network"].named_parameters())
    for name in ("v2a", "t2a", "a2v"):
        with pytest.raises(DataError) as caught:
            train(home.config(tmp_path / name, family, data=data, training_strategy=strategy_of(MODES[name])))
        assert caught.value.code == "mode.silent_clips"


def test_marker_of_the_first_frame(home, tmp_path):
    """2.5 has a marker for first-frame tokens; it is applied while training, to clip and reference alike as inference does."""
    calls = []
    with watched(calls):
        train(home.config(tmp_path / "run", "ltx2.5", training_strategy=strategy_of(MODES["i2v"])))
    video = calls[0][1]["video"][0]
    assert video.keyframes is not None and video.keyframes[:, :4].all() and not video.keyframes[:, 4:].any()
    state = LatentState.of(calls[0][0].video, keyframe_marker=True)
    assert torch.equal(video.keyframes[0], state.keyframes[0])


@pytest.mark.parametrize("name", ["images", "i2v"])
def test_stills(home, tmp_path, name):
    """Images are clips of one frame at 24 frames a second; a first-frame condition would leave nothing of them and is skipped."""
    folder = home.stills
    calls = []
    data = {"preprocessed_data_root": str(home.cache("ltx2.3", folder, buckets="64x64"))}
    with watched(calls):
        done = train(home.config(tmp_path / "run", data=data, training_strategy=strategy_of(MODES[name])))
    batch, given, _ = calls[0]
    assert batch.video.grid.frames == 1 and batch.video.grid.fps == 24
    assert given["video"][0].timesteps.all() and len(done.losses) == 2
