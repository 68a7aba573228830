"""Tiny models: every family detected, whole, loadable by every loader, and with outputs worth looking at."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch

from ltx_train.errors import ConfigError
from ltx_train.geometry import AudioGrid, VideoFactors, VideoGrid, patchify
from ltx_train.models.audio_codec import AudioCodec
from ltx_train.models.checkpoint import Checkpoint
from ltx_train.models.connectors import Connectors
from ltx_train.models.families import FAMILIES
from ltx_train.models.inspect import inspect_files
from ltx_train.models.modality import Modality
from ltx_train.models.text_encoder import TextEncoder
from ltx_train.models.transformer import load_transformer
from ltx_train.models.video_codec import VideoCodec
from ltx_train.models.weights import WeightSource
from ltx_train.tiny.checkpoints import open_tiny, write_tiny
from ltx_train.tiny.text_encoders import TEXT_WIDTH
from ltx_train.tiny.tokenizers import pieces, sentencepiece_model, tokenizer_json

AV = [n for n, f in FAMILIES.items() if f.audio]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """Family name -> paths of its tiny model, written once."""
    made = {}

    def write(family: str) -> dict:
        if family not in made:
            made[family] = write_tiny(tmp_path_factory.mktemp(family), family)
        return made[family]

    return write


def lively(values: torch.Tensor, low: float, high: float) -> None:
    assert torch.isfinite(values.float()).all()
    assert low < values.float().std().item() < high, values.float().std()


@pytest.mark.parametrize("family", FAMILIES)
def test_detected_and_whole(tiny, family):
    paths = tiny(family)
    checkpoint = open_tiny(paths)
    assert checkpoint.family.name == family and checkpoint.missing == {}
    assert checkpoint.video_factors == VideoFactors(8, 32, 32) and checkpoint.audio_grid == AudioGrid(1)
    assert checkpoint.model_version == {"ltx2.3": "2.3.0", "ltx2.5": "2.5.0"}.get(family)
    assert checkpoint.transformer.in_channels == checkpoint.transformer.out_channels == 128
    size = sum(p.stat().st_size for p in paths.values() if p.is_file())
    assert size < 16e6, f"{size:,} bytes"
    report = inspect_files([paths["model"], *(paths[k] for k in ("text_encoder", "video_vae", "audio_vae") if k in paths)])
    assert report["family"] == family and report["missing"] == {}


@pytest.mark.parametrize("family", FAMILIES)
def test_files_lie_as_comfyui_has_them(tiny, family):
    """The model folder opens as one pack; 2.5 holds two video VAEs, of which one must be chosen."""
    paths = tiny(family)
    root = paths["model"].parent.parent
    chosen = {"video_vae": paths["video_vae_diffusion"]} if family == "ltx2.5" else {}
    checkpoint = Checkpoint.open(root, **chosen)
    assert checkpoint.family.name == family and checkpoint.missing == {}


@pytest.mark.parametrize("family", FAMILIES)
def test_the_same_seed_gives_the_same_files(tiny, family, tmp_path):
    first, again, other = tiny(family), write_tiny(tmp_path / "a", family), write_tiny(tmp_path / "b", family, seed=1)
    for key, path in first.items():
        if path.is_file():
            assert path.read_bytes() == again[key].read_bytes(), key
    assert first["model"].read_bytes() != other["model"].read_bytes()


@pytest.mark.parametrize("family", FAMILIES)
def test_text_to_context_to_velocity(tiny, family):
    checkpoint = open_tiny(tiny(family))
    features = TextEncoder.load(checkpoint, device="cpu", dtype=torch.float32).encode(["a cat sits on the mat", "rain, and a red car at night"])
    lively(features[0].video, 0.3, 3)
    assert not torch.equal(features[0].video[1], features[1].video[1])
    context = Connectors.load(checkpoint, device="cpu", dtype=torch.float32).contexts(features)
    video = _modality(torch.randn(2, 128, 2, 2, 3), VideoGrid(2, 2, 3, 24.0, checkpoint.video_factors), context.video, context.mask)
    audio = _modality(torch.randn(2, 8, 9, 16), AudioGrid(9), context.audio, context.mask) if checkpoint.family.audio else None
    model = load_transformer(checkpoint, dtype=torch.float32, device="cpu")
    with torch.no_grad():
        velocities = model(video, audio)
        without = model(replace(video, context=torch.zeros_like(video.context)), audio)
    lively(velocities[0], 0.5, 4)
    assert (velocities[0] - without[0]).abs().mean() > 0.005, "the text has no say"
    if checkpoint.family.audio:
        lively(velocities[1], 0.5, 4)


def _modality(latents, grid, context, mask) -> Modality:
    tokens = patchify(latents)
    positions = grid.positions().unsqueeze(0).expand(len(tokens), -1, -1, -1)
    return Modality(tokens, torch.full((2,), 0.7), torch.full(tokens.shape[:2], 0.7), positions, context, mask)


@pytest.mark.parametrize("family", FAMILIES)
def test_video_there_and_back(tiny, family):
    codec = VideoCodec.load(open_tiny(tiny(family)), device="cpu", dtype=torch.float32)
    frames = torch.randint(0, 255, (1, 9, 64, 64, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    latents = codec.encode(frames)
    assert latents.shape == (1, 128, 2, 2, 2)
    lively(latents, 0.1, 2)
    pixels = codec.decode(latents)
    assert pixels.shape == frames.shape
    lively(pixels, 10, 90)


def test_both_vaes_of_25_share_their_encoder(tiny):
    paths = tiny("ltx2.5")
    conv, diffusion = open_tiny(paths), Checkpoint.open(paths["model"], video_vae=paths["video_vae_diffusion"])
    names = [n for n in conv.source("video_vae").keys() if not n.startswith("decoder.")]
    assert all(torch.equal(conv.source("video_vae").get(n), diffusion.source("video_vae").get(n)) for n in names) and len(names) > 10
    pixels = VideoCodec.load(diffusion, device="cpu", dtype=torch.float32, encoder=False).decode(torch.randn(1, 128, 2, 2, 2))
    assert pixels.shape == (1, 9, 64, 64, 3)
    lively(pixels, 10, 90)


@pytest.mark.parametrize("family", AV)
def test_sound_there_and_back(tiny, family):
    codec = AudioCodec.load(open_tiny(tiny(family)), device="cpu")
    latents = codec.encode(torch.randn(1, 2, 4000, generator=torch.Generator().manual_seed(0)) * 0.1, 16000)
    assert latents.shape[1] == 8 and latents.shape[3] == 16
    lively(latents, 0.1, 2)
    waveform, rate = codec.decode(latents)
    assert rate == (24000 if family == "ltx2" else 48000) and waveform.abs().max() < 1
    lively(waveform, 0.005, 0.5)


@pytest.mark.parametrize("family", ["ltx2", "ltx2.3"])
def test_gemma_3_as_a_folder_says_the_same(tiny, family):
    paths = tiny(family)
    folder = Checkpoint.open(paths["model"], text_encoder=paths["text_encoder_folder"])
    assert folder.missing == {} and folder.tokenizer_path == paths["text_encoder_folder"]
    captions = ["a person walks through the forest", "Rain falls on the window."]
    encode = lambda c: TextEncoder.load(c, device="cpu", dtype=torch.float32).encode(captions)  # noqa: E731
    for one, other in zip(encode(open_tiny(paths)), encode(folder)):
        assert torch.equal(one.video, other.video)


def test_gemma_3_folder_loads_in_transformers(tiny):
    """Its tensors and tokenizer are what transformers' own classes expect."""
    from transformers import AutoConfig, AutoTokenizer, Gemma3TextModel

    folder = tiny("ltx2")["text_encoder_folder"]
    config = AutoConfig.from_pretrained(folder)
    assert config.text_config.hidden_size == TEXT_WIDTH
    with torch.device("meta"):
        wanted = set(Gemma3TextModel(config.text_config).state_dict())
    stored = WeightSource.open(*sorted(folder.glob("*.safetensors"))).subset("language_model.model.")
    assert set(stored.keys()) == wanted
    assert AutoTokenizer.from_pretrained(folder)("a cat").input_ids[0] == 2


@pytest.mark.parametrize("kind, bos, eos, pad", [("gemma", 2, 1, 0), ("t5", -1, 1, 0)])
def test_both_tokenizer_forms_agree(kind, bos, eos, pad):
    """The sentencepiece bytes are read by sentencepiece itself, and give the ids of the tokenizer.json."""
    import sentencepiece
    import tokenizers

    model = sentencepiece.SentencePieceProcessor()
    model.LoadFromSerializedProto(sentencepiece_model(kind))
    other = tokenizers.Tokenizer.from_str(tokenizer_json(kind).decode())
    assert (model.bos_id(), model.eos_id(), model.pad_id(), model.vocab_size()) == (bos, eos, pad, len(pieces(kind)))
    for text in ("a cat sits on the mat, while rain falls.", "Zürich 猫 x", "An  odd\tone: 12-34!"):
        assert model.EncodeAsIds(text) == other.encode(text, add_special_tokens=False).ids
    assert model.decode(model.EncodeAsIds("Zürich 猫 x")) == "Zürich 猫 x"
    whole = other.encode("cat").ids
    assert whole[-1] == 1 if kind == "t5" else whole[0] == 2


def test_metadata_is_that_of_the_published_files(tiny):
    """Keys a reader needs: config with the file's own sections, versions, the Gemma it was made with."""
    paths = tiny("ltx2.5")
    said = {k: WeightSource.open(p).metadata for k, p in paths.items()}
    assert set(json.loads(said["model"]["config"])) == {"transformer", "scheduler"}
    assert set(json.loads(said["audio_vae"]["config"])) == {"audio_vae", "vocoder"}
    assert json.loads(said["video_vae_diffusion"]["config"])["vae"]["_class_name"] == "CausalDiffusionVAE"
    asked, given = json.loads(said["model"]["gemma_source_checkpoint"]), json.loads(said["text_encoder"]["gemma_config"])
    assert asked["gemma_version"] == given["gemma_version"] and "model_version" not in said["text_encoder"]
    unified = WeightSource.open(tiny("ltx2")["model"])
    assert set(json.loads(unified.metadata["config"])) == {"transformer", "scheduler", "vae", "audio_vae", "vocoder"}
    tables = [n for n in unified.keys() if "scale_shift_table" in n and n.startswith("model.")]
    assert tables and all(unified.info(n).dtype == torch.float32 for n in tables)


def test_unknown_family_names_the_nearest(tmp_path):
    with pytest.raises(ConfigError, match="no model family 'ltx2.4'") as caught:
        write_tiny(tmp_path, "ltx2.4")
    assert "ltx2.3" in caught.value.hint
