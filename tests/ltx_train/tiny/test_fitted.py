"""The fitted set in the package: size, what its codecs keep, what its base knows and does not; and the parts that made it."""

import pytest
import torch
from safetensors import safe_open

from ltx_train.models.modality import Modality
from ltx_train.models.transformer import LTXTransformer, load_transformer
from ltx_train.text import Context
from ltx_train.tiny import drawing, fit_base, measures
from ltx_train.tiny.drawing import FPS, KNOWN, NEW, RATE, Scenes, captions, draw, sound
from ltx_train.tiny.fit_codecs import WORDS
from ltx_train.tiny.fit_loop import Loop, pick
from ltx_train.tiny.fit_report import asked, codec_quality, sample, text_contexts
from ltx_train.tiny.fitted_layout import fitted_config
from ltx_train.tiny.fitted_set import STATED, FittedSet
from ltx_train.tiny.shapes import audio_vae_shapes, connector_shapes, video_vae_shapes, vocoder_shapes


@pytest.fixture(scope="module", autouse=True)
def _few_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def checkpoint():
    return FittedSet.at().open()


def test_it_is_a_whole_model_of_at_most_8_mb(checkpoint):
    assert FittedSet.at().size <= 8_000_000
    assert checkpoint.family.name == "ltx2.3" and checkpoint.model_version == "2.3.0"
    assert set(checkpoint.components) == set(checkpoint.family.components)
    factors, grid = checkpoint.video_factors, checkpoint.audio_grid
    assert (factors.time, factors.height, factors.width) == (8, 32, 32) and (grid.channels, grid.bins) == (8, 16)
    assert checkpoint.transformer.in_channels == checkpoint.transformer.audio_in_channels == 128


def test_its_names_are_those_of_its_config():
    config = fitted_config()
    wanted = {f"vae.{n}" for n in video_vae_shapes(config["vae"])} | {f"audio_vae.{n}" for n in audio_vae_shapes(config["audio_vae"])}
    wanted |= {f"vocoder.{n}" for n in vocoder_shapes(config["vocoder"])} | {f"model.diffusion_model.{n}" for n in connector_shapes(config["transformer"])}
    with safe_open(FittedSet.at().model, "pt") as file:
        found = set(file.keys())
        tables = [n for n in found if "scale_shift_table" in n]
        assert {file.get_slice(n).get_dtype() for n in tables} == {"F32"} and {file.get_slice(n).get_dtype() for n in found - set(tables)} == {"BF16"}
    rest = found - wanted
    assert wanted <= found and all(n.startswith(("model.diffusion_model.", "text_embedding_projection.")) for n in rest)


def test_codecs_keep_drawn_clips(checkpoint):
    found = codec_quality(checkpoint, clips=6, seed=3)
    assert found.psnr > STATED.video_psnr - 1  # six clips instead of 64; single clips differ by several dB
    assert found.wave_snr > STATED.wave_snr - 4
    assert found.pitch_error <= STATED.pitch_error


def test_latents_are_normalised(checkpoint):
    from ltx_train.models.audio_codec import AudioCodec
    from ltx_train.models.video_codec import VideoCodec

    scenes = Scenes.random(16, torch.Generator().manual_seed(4), WORDS)
    video = VideoCodec.load(checkpoint, device="cpu", dtype=torch.float32, decoder=False).encode((draw(scenes, 9, 64, 64) * 255).to(torch.uint8))
    audio = AudioCodec.load(checkpoint, device="cpu", decoder=False).encode(sound(scenes, 17 / FPS), RATE)
    for latents in (video, audio):
        assert abs(float(latents.mean())) < 0.3 and 0.5 < float(latents.std()) < 1.3


def test_text_features_tell_captions_apart(checkpoint):
    texts = captions((("red", "blue"), ("circle", "star"), ("left", "right"), ("low", "high")))
    contexts = text_contexts(checkpoint, texts, torch.device("cpu"))
    for stream in (contexts.video, contexts.audio):
        words = stream[:, :16].flatten(1)
        distance = torch.cdist(words, words) + 1e9 * torch.eye(len(texts))
        assert float(distance.min()) > 0.1 * float(words.norm(dim=1).mean())


@pytest.fixture(scope="module")
def made(checkpoint):
    """Samples of six known and two new captions."""
    known = [text for text in captions(KNOWN)][3::17][:6]
    texts = [*known, *captions(NEW)[:2]]
    model = load_transformer(checkpoint, dtype=torch.float32, device="cpu")
    clips, waves, rate = sample(checkpoint, model, texts, steps=12, cfg=2.5, seed=0)
    return known, texts, clips, waves, rate


def test_base_draws_what_it_knows(made):
    known, _, clips, waves, rate = made
    found = asked(known, clips[:6], waves[:6], rate)
    assert found.colour > 0.8 and found.direction > 0.8 and found.tone == 1


def test_base_does_not_know_what_was_held_back(made):
    _, texts, clips, waves, rate = made
    for text, clip, wave in zip(texts[6:], clips[6:], waves[6:]):
        assert text.startswith("a yellow star")
        assert measures.look(clip).shares["yellow"] < 0.5
        assert measures.tone(measures.pitch(wave, rate)) != "high"


def test_measures_read_every_word_of_drawn_clips():
    scenes = Scenes.random(16, torch.Generator().manual_seed(0), WORDS)
    clips, waves = (draw(scenes, 17, 64, 96) * 255).round().to(torch.uint8), sound(scenes, 17 / FPS)
    for row, (clip, wave) in enumerate(zip(clips, waves)):
        seen = measures.look(clip)
        assert drawing.caption(seen.colour, seen.shape, seen.direction, measures.tone(measures.pitch(wave, RATE))) == scenes.caption(row)
    assert measures.look(torch.zeros(3, 32, 32, 3, dtype=torch.uint8)).colour is None
    assert measures.pitch(torch.zeros(2, 4000), RATE) is None


def test_psnr_and_snr_are_the_textbook_ones():
    one = torch.full((4, 4, 3), 100, dtype=torch.uint8)
    assert measures.psnr(one, one + 5) == pytest.approx(10 * torch.log10(torch.tensor(255.0**2 / 25)).item(), abs=1e-4)
    wave = torch.ones(2, 10)
    assert measures.snr(wave, 0.9 * wave) == pytest.approx(20, abs=1e-3)


def test_the_known_and_the_new_words_are_apart():
    for known, new in zip(KNOWN, NEW):
        assert not set(known) & set(new) or set(new) == set(drawing.DIRECTIONS)


def test_rows_of_captions(checkpoint):
    scenes = Scenes.random(30, torch.Generator().manual_seed(1), KNOWN)
    texts = captions(KNOWN)
    assert [texts[row] for row in fit_base._caption_rows(scenes)] == [scenes.caption(i) for i in range(30)]


def test_a_few_weighted_registers_stand_for_all(checkpoint):
    """With equal registers, 48 of them at a higher attention score give what all 1008 give."""
    torch.manual_seed(0)
    model = LTXTransformer(checkpoint.transformer).eval()
    text = torch.randn(2, 1024, checkpoint.transformer.cross_attention_dim)
    text[:, 16:] = text[:, 16:17]
    sigma = torch.tensor([0.3, 0.8])
    tokens, positions = torch.randn(2, 4, 128), torch.rand(2, 3, 4, 2)
    mask = torch.ones(2, 64)
    mask[:, 16:] = 1008 / 48
    give = lambda words, strength: Modality(tokens, sigma, sigma[:, None].expand(-1, 4), positions, words, strength)  # noqa: E731
    with torch.no_grad():
        whole, _ = model(give(text, None), None)
        short, _ = model(give(fit_base._short(text, torch.randint(16, 1024, (48,))), mask), None)
    assert float((whole - short).abs().max()) < 1e-4 * float(whole.abs().max())
    assert Context(text, None, None).mask is None


def test_the_loop_fits_and_ends_in_time():
    weight = torch.nn.Parameter(torch.zeros(3))
    data = torch.tensor([[1.0, -2.0, 0.5]]).expand(8, -1)
    loss = lambda: (pick([data], 4)[0] - weight).square().mean()  # noqa: E731
    Loop([weight], [loss], (0,), steps=600, rate=0.05).run("test")
    assert float((weight.detach() - data[0]).abs().max()) < 0.02
    endless = Loop([weight], [loss], (0,), steps=10**9, rate=0.05, limit=0.2)
    endless.run("test")
    assert endless.calls[0] < 10**6
