"""TrainStep on tiny models: the loss against plain formulas, keyed randomness, silent clips, streams left out."""

from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from ltx_train.conditioning.modes import MODES, TrainingStrategySection, mode
from ltx_train.data.batches import Batch
from ltx_train.errors import DataError
from ltx_train.geometry import AudioGrid, Latents, VideoGrid
from ltx_train.models.checkpoint import Checkpoint
from ltx_train.models.families import TransformerConfig
from ltx_train.models.transformer import load_transformer
from ltx_train.text import Context
from ltx_train.training.flow_matching import FlowMatchingSection, ModalityBalance, ShiftedLogitNormalSampler
from ltx_train.training.metrics import StepMeter, summarise
from ltx_train.training.randomness import key_of, keyed_generator
from ltx_train.training.step import TrainStep

DATA = Path(__file__).parents[2] / "parity" / "data"
VIDEO, AUDIO = VideoGrid(3, 2, 4, fps=24.0), AudioGrid(6, 2, 3)
CONFIG = TransformerConfig(3, 1, 4, 4, 4, 4, None, 1, 4, 6, 6, 4, keyframe_embedding=True)


class FakeTransformer(nn.Module):
    """Velocity = weight * tokens + timestep; keeps what it was given."""

    def __init__(self):
        super().__init__()
        self.config = CONFIG
        self.weight = nn.Parameter(torch.tensor(0.5))

    def forward(self, video, audio, perturbations=None):
        self.seen = (video, audio, perturbations)
        return tuple(None if m is None else self.weight * m.tokens + m.timesteps[..., None] for m in (video, audio))


def batch(size=2, seed=0, pick=None, channels=4, width=4, audio_width=4, video_grid=VIDEO, audio_grid=AUDIO):
    """A batch of ``size`` samples, or those of it in ``pick``."""
    g = torch.Generator().manual_seed(seed)
    pick = list(range(size)) if pick is None else pick
    video = torch.randn(size, channels, video_grid.frames, video_grid.height, video_grid.width, generator=g)[pick]
    audio = torch.randn(size, audio_grid.channels, audio_grid.steps, audio_grid.bins, generator=g)[pick]
    v_mask = (torch.rand(size, video_grid.tokens, generator=g) > 0.5).float().view(size, video_grid.frames, video_grid.height, video_grid.width)[pick]
    a_mask = (torch.rand(size, audio_grid.tokens, generator=g) > 0.5).float()[pick]
    context = Context(torch.randn(size, 7, width, generator=g)[pick], torch.randn(size, 7, audio_width, generator=g)[pick])
    v, a = Latents(video, video_grid), Latents(audio, audio_grid)
    return Batch(
        v,
        a,
        context,
        {"reference_video": v, "reference_audio": a, "video_mask": v_mask, "audio_mask": a_mask},
        torch.ones(len(pick), dtype=torch.bool),
        torch.ones(len(pick)),
        tuple(f"clip{i}" for i in pick),
    )


def noise_of(seed, step, slot, modality, tokens, channels):
    return torch.randn(tokens, channels, generator=keyed_generator(seed, step, slot, modality))


def test_loss_equals_the_plain_formula():
    model, data = FakeTransformer(), batch()
    step = TrainStep(model, mode("t2v_audio").strategy(), FlowMatchingSection())
    out = step(data, seed=5, step=9, slot=4)
    total = 0.0
    for b in range(2):
        for name, latents, tokens in (("video", data.video, 24), ("audio", data.audio, 6)):
            clean = latents.tokens[b]
            noise = noise_of(5, 9, 4 + b, name, tokens, clean.shape[1])
            sigma = ShiftedLogitNormalSampler().sample(tokens, keyed_generator(5, 9, 4 + b, name, "sigma"))
            assert getattr(out, f"{name}_sigma")[b].item() == pytest.approx(sigma, abs=1e-6)
            noisy = (1 - sigma) * clean + sigma * noise
            loss = ((0.5 * noisy + sigma - (noise - clean)) ** 2).mean()
            torch.testing.assert_close(getattr(out, f"{name}_loss")[b], loss)
            total += loss / 2
    torch.testing.assert_close(out.loss, total)
    assert out.tokens == 2 * (24 + 6) and out.video_sigma[0] != out.audio_sigma[0]
    out.loss.backward()
    assert model.weight.grad is not None and not out.video_loss.requires_grad


@pytest.mark.parametrize("name", MODES)
def test_every_mode_clean_tokens_have_timestep_zero_and_no_loss(name):
    frames = VideoGrid(9, 10, 20, fps=24.0)
    data = batch(video_grid=frames, audio_grid=AudioGrid(12, 2, 3))
    model = FakeTransformer()
    strategy = mode(name).strategy()
    out = TrainStep(model, strategy, FlowMatchingSection())(data, seed=1, step=3, slot=0)
    expected = torch.zeros(2)
    for modality, given in zip(("video", "audio"), model.seen):
        kind = strategy.streams()[modality]
        assert (given is None) == (kind == "absent")
        if given is None:
            continue
        clean = getattr(data, modality).tokens
        count = clean.shape[1]
        loss, sigma = getattr(out, f"{modality}_loss"), getattr(out, f"{modality}_sigma")
        if kind == "frozen":
            assert loss is None and given.timesteps.eq(0).all() and given.sigma.eq(0).all() and torch.equal(given.tokens, clean)
            continue
        assert torch.equal(given.sigma, sigma)  # sigma stays the drawn one, however many tokens are clean
        assert given.timesteps[:, count:].eq(0).all()
        assert (given.keyframes is None) == (modality == "audio")
        for b in range(2):
            noise = noise_of(1, 3, b, modality, count, clean.shape[2])
            level = given.timesteps[b, :count, None]
            assert set(level.unique().tolist()) <= {0.0, sigma[b].item()}
            torch.testing.assert_close(given.tokens[b, :count], (1 - level) * clean[b] + level * noise, atol=1e-5, rtol=0)
            error = (0.5 * given.tokens[b, :count] + level - (noise - clean[b])) ** 2
            torch.testing.assert_close(loss[b], error[level[:, 0] > 0].mean(), atol=1e-5, rtol=1e-5)
        expected += loss
    torch.testing.assert_close(out.loss.detach(), expected.mean())


def test_batches_split_in_any_way_agree():
    step = TrainStep(FakeTransformer(), mode("i2v_audio").strategy(), FlowMatchingSection())
    whole = step(batch(4), seed=0, step=2, slot=0)
    parts = [step(batch(4, pick=[i]), seed=0, step=2, slot=i) for i in range(4)]
    scattered = step(batch(4, pick=[3, 1]), seed=0, step=2, slot=(3, 1))
    for name in ("video_loss", "audio_loss", "video_sigma", "audio_sigma"):
        values = getattr(whole, name)
        torch.testing.assert_close(values, torch.cat([getattr(p, name) for p in parts]))
        torch.testing.assert_close(values[[3, 1]], getattr(scattered, name))
    torch.testing.assert_close(whole.loss, torch.stack([p.loss for p in parts]).mean())


def test_draws_differ_by_step_seed_slot_and_stream():
    keys = {key_of(*parts) for parts in [(0, 0, 0, "video"), (1, 0, 0, "video"), (0, 1, 0, "video"), (0, 0, 1, "video"), (0, 0, 0, "audio"), (0, 10, "video"), (0, 1, 0)]}
    assert len(keys) == 7
    one = {"seed": 0, "step": 0, "slot": 0, "modality": "video", "purpose": "noise"}
    other = {"seed": 1, "step": 1, "slot": 1, "modality": "audio", "purpose": "sigma"}
    drawn = {keyed_generator(**parts).initial_seed() for parts in (one, *({**one, name: value} for name, value in other.items()))}
    assert len(drawn) == 6, "each part of the key changes what is drawn"
    step = TrainStep(FakeTransformer(), mode("t2v").strategy(), FlowMatchingSection())
    again = [step(batch(), seed=0, step=7, slot=0).loss.item() for _ in range(2)]
    assert again[0] == again[1] != step(batch(), seed=0, step=8, slot=0).loss.item()


def test_silent_clips_have_no_sound_loss_and_no_way_into_the_video():
    data, model = batch(), FakeTransformer()
    step = TrainStep(model, mode("t2v_audio").strategy(), FlowMatchingSection())
    full = step(data, seed=0, step=0, slot=0)
    assert model.seen[2] is None and full.audio_counts.all()
    data = replace(data, audio_present=torch.tensor([True, False]))
    part = step(data, seed=0, step=0, slot=0)
    assert part.audio_loss[1] == 0 and part.audio_loss[0] == full.audio_loss[0] and part.audio_counts.tolist() == [True, False]
    torch.testing.assert_close(part.loss, (full.video_loss.sum() + full.audio_loss[0]) / 2)
    keep = model.seen[2].skip_a2v_cross_attn
    assert keep.tolist() == [[1.0, 0.0]] * 3
    data = replace(data, audio_present=torch.tensor([False, False]))
    step = TrainStep(model, mode("v2a").strategy(), FlowMatchingSection())
    assert step(data, seed=0, step=0, slot=0).loss.item() == 0.0


def test_transparent_parts_do_not_count():
    data, model = batch(), FakeTransformer()
    strategy = mode("t2v").strategy()
    data.roles["loss_mask"] = data.roles["video_mask"]
    out = TrainStep(model, strategy, FlowMatchingSection())(data, seed=0, step=0, slot=0)
    for b in range(2):
        noise = noise_of(0, 0, b, "video", 24, 4)
        error = (0.5 * model.seen[0].tokens[b] + out.video_sigma[b] - (noise - data.video.tokens[b])) ** 2
        torch.testing.assert_close(out.video_loss[b], error[data.roles["loss_mask"][b].flatten() > 0].mean().detach())
    assert set(out.per_modality()) == {"video"} and out.per_modality()["video"][2].tolist() == [True, True]


def test_one_sigma_for_both_streams():
    legacy = TrainingStrategySection.model_validate({"with_audio": True})
    for strategy, objective, same in (
        (legacy, FlowMatchingSection(), True),
        (legacy, FlowMatchingSection(shared_sigma=False), False),
        (mode("t2v_audio").strategy(), FlowMatchingSection(shared_sigma=True), True),
    ):
        out = TrainStep(FakeTransformer(), strategy, objective)(batch(), seed=0, step=0, slot=0)
        assert torch.equal(out.video_sigma, out.audio_sigma) == same


def test_weights_of_streams_samples_and_noise_levels():
    data = replace(batch(), weight=torch.tensor([2.0, 0.5]))
    objective = FlowMatchingSection(video_weight=0.3, audio_weight=3.0, weighting="min_snr", balance="auto")
    balance = ModalityBalance(objective)
    balance.update(1.0, 4.0)
    out = TrainStep(FakeTransformer(), mode("t2v_audio").strategy(), objective, balance=balance)(data, seed=0, step=0, slot=0)
    weigh = lambda s: torch.minimum((1 - s) ** 2, 5 * s**2)  # noqa: E731
    per_sample = 0.3 * weigh(out.video_sigma) * out.video_loss + 3.0 * 0.25 * weigh(out.audio_sigma) * out.audio_loss
    torch.testing.assert_close(out.loss.detach(), (data.weight * per_sample).mean())


class WithAdapter(FakeTransformer):
    """An adapter adds ``extra`` to every velocity; the base model is the rest."""

    def __init__(self):
        super().__init__()
        self.extra, self.on = nn.Parameter(torch.tensor(0.25)), True

    def forward(self, video, audio, perturbations=None):
        return tuple(None if v is None else v + self.extra * self.on for v in super().forward(video, audio, perturbations))

    @contextmanager
    def base(self):
        self.on = False
        yield
        self.on = True


def test_regularisation_clips_are_weighed_and_reported_apart():
    data = replace(batch(3), weight=torch.tensor([1.0, 2.0, 1.0]), regularisation=torch.tensor([False, True, False]))
    out = TrainStep(FakeTransformer(), mode("t2v_audio").strategy(), FlowMatchingSection(regularisation_weight=0.25))(data, seed=0, step=0, slot=0)
    each = out.video_loss + out.audio_loss
    torch.testing.assert_close(out.loss.detach(), (each[0] + 2 * 0.25 * each[1] + each[2]) / 3)
    assert out.video_counts.tolist() == out.audio_counts.tolist() == [True, False, True] and out.regularisation_counts.tolist() == [False, True, False]
    report = StepMeter()
    report.add(out.loss, out.per_modality())
    summary = summarise(report.tensor().tolist(), 1)
    assert summary.video_loss == pytest.approx(float(out.video_loss[[0, 2]].mean())) and summary.regularisation_loss == pytest.approx(float(each[1]))
    assert TrainStep(FakeTransformer(), mode("t2v").strategy(), FlowMatchingSection())(batch(), seed=0, step=0, slot=0).regularisation_loss is None


def test_prior_clips_train_towards_the_base_models_own_prediction():
    model = WithAdapter()
    data = replace(batch(2), regularisation=torch.tensor([False, True]), prior=torch.tensor([False, True]))
    step = TrainStep(model, mode("t2v_audio").strategy(), FlowMatchingSection(), base=model.base)
    out = step(data, seed=0, step=0, slot=0)
    plain = TrainStep(model, mode("t2v_audio").strategy(), FlowMatchingSection())(batch(2), seed=0, step=0, slot=0)
    for name in ("video_loss", "audio_loss"):
        assert getattr(out, name)[0] == getattr(plain, name)[0]
        torch.testing.assert_close(getattr(out, name)[1], torch.tensor(0.25**2))  # base + 0.25 against base
    out.loss.backward()
    assert model.on and model.extra.grad is not None
    model.zero_grad()
    only = replace(data, regularisation=torch.tensor([True, True]), prior=torch.tensor([True, True]))
    model.extra.data.zero_()
    step(only, seed=0, step=0, slot=0).loss.backward()
    assert model.extra.grad == 0, "an adapter that changes nothing yet is where it should be"


def test_fixed_levels_for_held_out_losses():
    step = TrainStep(FakeTransformer(), mode("t2v_audio").strategy(), FlowMatchingSection())
    assert step(batch(), seed=0, step=0, slot=0, sigma=0.5).audio_sigma.tolist() == [0.5, 0.5]
    out = step(batch(), seed=0, step=0, slot=0, sigma={"video": 0.25, "audio": 0.75})
    assert out.video_sigma.tolist() == [0.25] * 2 and out.audio_sigma.tolist() == [0.75] * 2


def test_the_shift_counts_targets_without_references():
    objective = FlowMatchingSection(timestep_sampling_params={"uniform_prob": 0.0})
    plain = TrainStep(FakeTransformer(), mode("t2v").strategy(), objective)(batch(), seed=0, step=0, slot=0)
    model = FakeTransformer()
    strategy = TrainingStrategySection.model_validate({"name": "flexible", "video": {"is_generated": True, "conditions": [{"type": "reference"}]}})
    paired = TrainStep(model, strategy, objective)(batch(), seed=0, step=0, slot=0)
    assert model.seen[0].tokens.shape[1] == 48 and torch.equal(plain.video_sigma, paired.video_sigma)
    assert torch.equal(plain.video_loss, paired.video_loss)  # the fake model is blind to the reference


def test_missing_stream_is_named():
    data = replace(batch(), audio=None)
    with pytest.raises(DataError, match="uses audio, but the samples clip0, clip1 have none"):
        TrainStep(FakeTransformer(), mode("a2v").strategy(), FlowMatchingSection())(data, seed=0, step=0, slot=0)


@pytest.mark.parametrize("name", ["t2v_audio", "i2v", "v2v", "v2a", "t2a", "av2av"])
def test_gradients_flow_on_a_real_tiny_model(name):
    model = load_transformer(Checkpoint.open(DATA / "ltx2.5.checkpoint.safetensors"), dtype=torch.float32, device="cpu")
    model.requires_grad_(True)
    data = batch(channels=8, width=32, audio_width=16, video_grid=VideoGrid(3, 2, 3, fps=24.0), audio_grid=AudioGrid(6, 1, 16))
    streams = mode(name).strategy().streams()
    out = TrainStep(model, mode(name).strategy(), FlowMatchingSection())(data, seed=0, step=0, slot=0)
    out.loss.backward()
    assert torch.isfinite(out.loss)
    for stream, prefix in (("video", ""), ("audio", "audio_")):
        grad = getattr(model, f"{prefix}proj_out").weight.grad
        assert (grad is not None and bool(grad.any())) == (streams[stream] == "generated")
    if streams.video == "generated":
        assert model.keyframes_abs_pos_embedding.grad.any()  # the 2.5 marker is set in training
