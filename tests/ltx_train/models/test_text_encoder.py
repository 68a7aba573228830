"""Text encoders: our layers against transformers, every file form, captions, batches, streaming, wrong files."""

from __future__ import annotations

import io
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from ltx_train.errors import CheckpointError, ConfigError
from ltx_train.models import text_encoder as module
from ltx_train.models.caption_tokenizer import CaptionTokenizer
from ltx_train.models.checkpoint import Checkpoint
from ltx_train.models.gemma import GemmaConfig, GemmaLayer
from ltx_train.models.layer_store import _to_eight_bit
from ltx_train.models.t5 import T5Block, T5Config
from ltx_train.models.text_encoder import TextEncoder, plan_waves
from ltx_train.models.text_keys import check_encoder, read_encoder
from ltx_train.models.weights import WeightSource
from ltx_train.text import TextFeatures

ROOT = Path(__file__).parents[2]
PARITY = ROOT / "parity" / "data"
TABLES = ROOT / "data" / "checkpoints"
WORDS = "a cat walks over the red roof while slow rain falls and someone sings".split()
CAPTIONS = ["a cat walks", "  the red roof\n", "", "slow rain falls and someone sings while a cat walks over the roof"]
VERSION = "gemma4-12b-ltx-v1"

# ---------------------------------------------------------------- tiny models (16 wide, 2 layers: what the parity checkpoints read)

GEMMA3 = dict(
    vocab_size=64, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1, head_dim=8,
    query_pre_attn_scalar=8, max_position_embeddings=2048, layer_types=["sliding_attention", "sliding_attention"], sliding_window=1024,
    rope_parameters={
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1_000_000.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
    },
)  # fmt: skip
GEMMA4 = dict(
    vocab_size=64, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1, head_dim=8,
    global_head_dim=16, num_global_key_value_heads=1, attention_k_eq_v=True, layer_types=["sliding_attention", "full_attention"],
    sliding_window=1024, num_kv_shared_layers=0, hidden_size_per_layer_input=0, use_bidirectional_attention="vision",
    rope_parameters={
        "full_attention": {"partial_rotary_factor": 0.25, "rope_theta": 1_000_000.0, "rope_type": "proportional"},
        "sliding_attention": {"rope_theta": 10_000.0, "rope_type": "default"},
    },
)  # fmt: skip
T5 = dict(vocab_size=64, d_model=16, d_kv=4, d_ff=24, num_layers=2, num_heads=4, feed_forward_proj="gated-gelu", dropout_rate=0.0)


def random_weights(model: nn.Module, seed: int, dtype: torch.dtype) -> nn.Module:
    """Every tensor drawn, norms around their neutral value, rounded to ``dtype`` so that files of it lose nothing."""
    draw = torch.Generator().manual_seed(seed)
    for name, value in list(model.named_parameters()) + [(n, b) for n, b in model.named_buffers() if "layer_scalar" in n]:
        fan = value.shape[-1] ** -0.5 if value.ndim > 1 and "embed" not in name else 0.3
        centre = 1.0 if "layer_scalar" in name or (value.ndim == 1 and "Gemma3" not in type(model).__name__) else 0.0
        value.data.copy_((centre + fan * torch.randn(value.shape, generator=draw)).to(dtype).float())
    return model.eval()


def gemma3(**changes: object) -> nn.Module:
    from transformers import Gemma3TextConfig, Gemma3TextModel

    return random_weights(Gemma3TextModel(Gemma3TextConfig(**(GEMMA3 | changes))), 1, torch.bfloat16)


def gemma4(**changes: object) -> nn.Module:
    from transformers.models.gemma4_unified import Gemma4UnifiedTextConfig, Gemma4UnifiedTextModel

    return random_weights(Gemma4UnifiedTextModel(Gemma4UnifiedTextConfig(**(GEMMA4 | changes))), 2, torch.bfloat16)


def t5(**changes: object) -> nn.Module:
    from transformers import T5Config as Config
    from transformers import T5EncoderModel

    return random_weights(T5EncoderModel(Config(**(T5 | changes))), 3, torch.float16)


BUILD: dict[str, Callable[..., nn.Module]] = {"gemma3": gemma3, "gemma4": gemma4, "t5": t5}
FAMILY = {"gemma3": "ltx2.3", "gemma4": "ltx2.5", "t5": "ltxv0.9.5"}


def tensors_of(model: nn.Module, dtype: torch.dtype = torch.bfloat16) -> dict[str, torch.Tensor]:
    return {name: value.to(dtype).clone() for name, value in model.state_dict().items()}


def towers() -> dict[str, torch.Tensor]:
    """Vision parts that a real file carries beside the language model, layers of the same inner names among them."""
    inner = {f"encoder.layers.0.self_attn.{n}_proj.weight": torch.zeros(2, 2, dtype=torch.bfloat16) for n in "qkv"}
    inner = {f"vision_tower.vision_model.{n}": v for n, v in inner.items()}
    return inner | {"multi_modal_projector.mm_soft_emb_norm.weight": torch.zeros(2, dtype=torch.bfloat16)}


# ---------------------------------------------------------------- tokenizers


def json_tokenizer(*, bos: bool = True) -> str:
    """A word tokenizer whose own rule adds the start token when ``bos``, as Gemma 3's does, and cuts at 4 tokens."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors

    vocab = {t: i for i, t in enumerate(["<pad>", "<eos>", "<bos>", "<unk>", "</s>", *dict.fromkeys(WORDS)])}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens(["<bos>", "<eos>", "</s>"])
    if bos:
        tokenizer.post_processor = processors.TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", 2)])
    tokenizer.enable_truncation(4)
    return tokenizer.to_str()


@pytest.fixture(scope="session")
def pieces() -> bytes:
    """A sentencepiece model with Gemma's special ids."""
    from sentencepiece import SentencePieceTrainer

    written = io.BytesIO()
    SentencePieceTrainer.train(
        sentence_iterator=iter([" ".join(WORDS)] * 4), model_writer=written, vocab_size=48, model_type="bpe", pad_id=0, eos_id=1, bos_id=2, unk_id=3,
        add_dummy_prefix=False, minloglevel=2, hard_vocab_limit=False,
    )  # fmt: skip
    return written.getvalue()


def u8(content: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(content), dtype=torch.uint8)


# ---------------------------------------------------------------- files


def write_folder(folder: Path, model: nn.Module, prefix: str, config: dict, tokenizer: tuple[str, bytes], extra: dict | None = None) -> Path:
    """A Hugging Face folder in two shards."""
    folder.mkdir()
    tensors = {f"{prefix}{n}": v for n, v in tensors_of(model, torch.float16 if "T5" in type(model).__name__ else torch.bfloat16).items()} | (extra or {})
    tensors.pop("encoder.embed_tokens.weight", None)  # tied, as the library saves it
    names = sorted(tensors)
    for number, part in enumerate((names[::2], names[1::2]), 1):
        save_file({n: tensors[n].contiguous() for n in part}, folder / f"model-0000{number}-of-00002.safetensors", {"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config))
    (folder / tokenizer[0]).write_bytes(tokenizer[1])
    return folder


def quantise_fp8(tensors: dict[str, torch.Tensor]) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """ComfyUI's scaled fp8 form of the layer weights, and the plain tensors it stands for."""
    stored, plain = {}, dict(tensors)
    for name, value in tensors.items():
        if "_proj.weight" not in name or "projector" in name:
            stored[name] = value
            continue
        scale = value.float().abs().max() / 448
        stored[name] = (value.float() / scale).to(torch.float8_e4m3fn)
        stored[name.replace(".weight", ".scale_weight")] = scale
        plain[name] = stored[name].float() * scale
    return stored | {"scaled_fp8": torch.zeros(0, dtype=torch.float8_e4m3fn)}, plain


def settings_of(model: nn.Module) -> dict:
    return json.loads(model.config.to_json_string(use_diff=False))


def gemma3_folder(tmp: Path, pieces: bytes) -> Path:
    model = gemma3()
    config = {"model_type": "gemma3", "text_config": settings_of(model)}
    return write_folder(tmp / "gemma-3", model, "language_model.model.", config, ("tokenizer.model", pieces), towers())


def gemma3_comfy(tmp: Path, pieces: bytes) -> Path:
    tensors = {f"model.{n}": v for n, v in tensors_of(gemma3()).items()} | {n.replace("vision_tower.", ""): v for n, v in towers().items()}
    save_file(tensors | {"spiece_model": u8(pieces)}, tmp / "gemma_3_12B_it.safetensors")
    return tmp / "gemma_3_12B_it.safetensors"


def packed_gemma4(tmp: Path, version: str | None = VERSION, name: str = "gemma4-12b-with-proj.safetensors", projection: bool = True) -> Path:
    model = gemma4()
    tensors = {f"model.{n}": v for n, v in tensors_of(model).items()} | {"vision_model.pos_embedding": torch.zeros(2)}
    if projection:
        official = load_file(PARITY / "ltx2.5.checkpoint.safetensors")
        tensors |= {n: v for n, v in official.items() if n.startswith("text_embedding_projection.")}
    tensors |= {"tokenizer_json": u8(json_tokenizer(bos=False).encode()), "hf_asset__tokenizer_config.json": u8(b"{}")}
    config = {"architectures": ["Gemma4UnifiedForConditionalGeneration"], "text_config": settings_of(model)} | ({"gemma_version": version} if version else {})
    save_file(tensors, tmp / name, {"format": "pt", "gemma_config": json.dumps(config)})
    return tmp / name


def gemma4_folder(tmp: Path) -> Path:
    model = gemma4()
    config = {"model_type": "gemma4_unified", "gemma_version": VERSION, "text_config": settings_of(model)}
    return write_folder(tmp / "gemma-4", model, "model.language_model.", config, ("tokenizer.json", json_tokenizer().encode()))


def t5_single(tmp: Path) -> Path:
    save_file(tensors_of(t5(), torch.float16), tmp / "t5xxl_fp16.safetensors")
    return tmp / "t5xxl_fp16.safetensors"


def t5_tokenizer(tmp: Path) -> Path:
    (tmp / "t5_words").mkdir(exist_ok=True)
    (tmp / "t5_words" / "tokenizer.json").write_text(json_tokenizer(bos=False))
    return tmp / "t5_words"


def encoder(family: str, path: Path, *, dtype: torch.dtype = torch.float32, tokenizer: Path | None = None, **options: object) -> TextEncoder:
    checkpoint = Checkpoint.open(PARITY / f"{family}.checkpoint.safetensors", text_encoder=path, tokenizer=tokenizer)
    return TextEncoder.load(checkpoint, device="cpu", dtype=dtype, **options)


def assert_same(found: list[TextFeatures], expected: list[TextFeatures], tolerance: float = 0.0) -> None:
    assert len(found) == len(expected)
    for ours, theirs in zip(found, expected):
        assert ours.kind == theirs.kind and ours.video.shape == theirs.video.shape
        torch.testing.assert_close(ours.video, theirs.video, atol=tolerance, rtol=0)
        assert (ours.audio is None) == (theirs.audio is None)
        if ours.audio is not None:
            torch.testing.assert_close(ours.audio, theirs.audio, atol=tolerance, rtol=0)


# ---------------------------------------------------------------- our layers against transformers

SHAPES_OF_ATTENTION = {
    "gemma3": dict(layer_types=["sliding_attention", "full_attention", "sliding_attention"], num_hidden_layers=3, sliding_window=5, num_key_value_heads=2, num_attention_heads=4),
    "gemma4": dict(layer_types=["sliding_attention", "sliding_attention", "full_attention"], num_hidden_layers=3, sliding_window=5, num_attention_heads=4, num_key_value_heads=2),
    "t5": dict(num_layers=3),
}


def in_memory(kind: str, model: nn.Module, tmp: Path, dtype: torch.dtype = torch.float32, limit: int = 1024) -> TextEncoder:
    """Our encoder on a transformers model's weights, without a feature extractor."""
    save_file({n: v.clone() for n, v in model.state_dict().items()}, tmp / "lm.safetensors", {"gemma_config": json.dumps({"text_config": settings_of(model)})})
    weights = read_encoder(WeightSource.open(tmp / "lm.safetensors"))
    assert weights.kind == kind
    tokenizer = CaptionTokenizer(lambda text: [int(t) for t in text.split()], kind, 2, 1, limit)
    return TextEncoder(weights, tokenizer, None, device=torch.device("cpu"), dtype=dtype)


@pytest.mark.parametrize("dtype,tolerance", [(torch.float32, 1e-5), (torch.bfloat16, 0.0)])
@pytest.mark.parametrize("kind", ["gemma3", "gemma4"])
def test_gemma_states_equal_transformers_left_padded_call(kind: str, dtype: torch.dtype, tolerance: float, tmp_path: Path) -> None:
    """The official encoder pads on the left and keeps all states; ours runs the bare tokens at the same positions. Valid tokens agree.

    Positions also agree with an unpadded call: only distances matter, up to rounding.
    """
    model = BUILD[kind](**SHAPES_OF_ATTENTION[kind])
    for value in [*model.parameters(), *(b for n, b in model.named_buffers() if "layer_scalar" in n)]:
        value.data = value.data.to(dtype)  # the rotary buffers stay float32, as after from_pretrained
    ids = torch.randint(3, 64, (1, 23), generator=torch.Generator().manual_seed(4))
    padded = torch.cat([torch.zeros(1, 9, dtype=torch.long), ids], dim=1)
    mask = (torch.arange(32) >= 9).long()[None]
    with torch.no_grad():
        left = model(input_ids=padded, attention_mask=mask, output_hidden_states=True).hidden_states
        bare = model(input_ids=ids, position_ids=torch.arange(9, 32)[None], output_hidden_states=True).hidden_states
        at_zero = model(input_ids=ids, output_hidden_states=True).hidden_states
    ours = in_memory(kind, model, tmp_path, dtype, limit=32).hidden_states(ids[0].tolist())
    assert len(ours) == len(bare) == 4
    for found, unpadded, official, first in zip(ours, bare, left, at_zero):
        scale = float(official.abs().max())
        torch.testing.assert_close(found, unpadded[0], atol=tolerance * scale, rtol=0)
        if dtype == torch.float32:
            torch.testing.assert_close(found, official[0, 9:], atol=1e-5 * scale, rtol=0)
            torch.testing.assert_close(found, first[0], atol=1e-5 * scale, rtol=0)


def t5_of_ids(model: nn.Module, ids: torch.Tensor, tmp: Path, dtype: torch.dtype) -> TextEncoder:
    """Our encoder on the model's weights with a tokenizer that reads numbers and takes the last id for the end token."""
    ours = in_memory("t5", model, tmp, dtype)
    ours.tokenizer = CaptionTokenizer(lambda text: [int(t) for t in text.split()][:-1], "t5", 2, int(ids[0, -1]), 1024)
    return ours


@pytest.mark.parametrize("tokens", [3, 200])
def test_t5_equals_transformers_padded_call(tokens: int, tmp_path: Path) -> None:
    model = t5(**SHAPES_OF_ATTENTION["t5"])
    ids = torch.randint(3, 64, (1, tokens), generator=torch.Generator().manual_seed(4))
    padded = torch.cat([ids, torch.zeros(1, 11, dtype=torch.long)], dim=1)
    with torch.no_grad():
        expected = model(input_ids=padded, attention_mask=(torch.arange(tokens + 11) < tokens).long()[None]).last_hidden_state[0, :tokens]
    found = t5_of_ids(model, ids, tmp_path, torch.float32).encode([" ".join(map(str, ids[0].tolist())), "5 6 7 8"])
    torch.testing.assert_close(found[0].video, expected, atol=1e-5, rtol=0)


def test_t5_in_bfloat16_is_as_near_to_float32_as_transformers(tmp_path: Path) -> None:
    ids = torch.randint(3, 64, (1, 200), generator=torch.Generator().manual_seed(4))
    with torch.no_grad():
        exact = t5()(input_ids=ids).last_hidden_state[0]
        theirs = t5().to(torch.bfloat16)(input_ids=ids).last_hidden_state[0].float()
    found = t5_of_ids(t5(), ids, tmp_path, torch.bfloat16).encode([" ".join(map(str, ids[0].tolist()))])[0].video.float()
    assert float((found - exact).norm()) < 1.1 * float((theirs - exact).norm())


def table(name: str) -> dict[str, tuple[int, ...]]:
    """Names and shapes of a published encoder; ``{0-4,6-10}`` rows are spread out."""
    found: dict[str, tuple[int, ...]] = {}
    for line in (TABLES / f"{name}.tensors.tsv").read_text().splitlines()[1:]:
        tensor, shape, *_ = line.split("\t")
        dims = tuple(int(n) for n in re.findall(r"\d+", shape))
        span = re.search(r"\{([\d,-]+)\}", tensor)
        for group in span[1].split(",") if span else [None]:
            ends = [int(n) for n in group.split("-")] if group else []
            for number in range(ends[0], ends[-1] + 1) if group else [None]:
                found[tensor if number is None else tensor.replace(span[0], str(number))] = dims
    return found


@pytest.mark.parametrize("name,kind", [("gemma3-12b", "gemma3"), ("gemma4-12b-ltx", "gemma4"), ("t5xxl", "t5")])
def test_layers_have_the_names_and_shapes_of_the_published_files(name: str, kind: str) -> None:
    prefix = {"gemma3": "language_model.model.", "gemma4": "model.", "t5": "encoder."}[kind]
    shapes = {n[len(prefix) :]: s for n, s in table(name).items() if n.startswith(prefix)}
    if kind == "t5":
        config: GemmaConfig | T5Config = T5Config.derive(shapes)
        assert config == T5Config(vocab=32128, hidden=4096, intermediate=10240, heads=64, head_dim=64, blocks=24, buckets=32)
        build, stem, count = (lambda i: T5Block(config)), "block", config.blocks
    else:
        said = json.loads((TABLES / "text_encoders.json").read_text())[name]
        settings = said.get("config", said.get("metadata", {}).get("gemma_config"))["text_config"]
        config = GemmaConfig.derive(kind, shapes, settings)
        assert config == GemmaConfig.derive(kind, shapes, {})  # a file without a config means the same
        assert config.states == 49 and config.hidden == 3840 and [i for i, s in enumerate(config.layers) if not s.sliding] == list(range(5, 48, 6))
        build, stem, count = (lambda i: GemmaLayer(config, i)), "layers", len(config.layers)
    made = {}
    for index in range(count):
        with torch.device("meta"):
            made |= {f"{stem}.{index}.{n}": tuple(p.shape) for n, p in build(index).named_parameters()}
    expected = {n: s for n, s in shapes.items() if n.startswith(stem) and "relative_attention_bias" not in n}
    assert made == expected


# ---------------------------------------------------------------- every file form, end to end


def test_gemma3_forms_give_identical_features(tmp_path: Path, pieces: bytes) -> None:
    folder = encoder("ltx2.3", gemma3_folder(tmp_path, pieces))
    expected = folder.encode(CAPTIONS)
    assert [f.kind for f in expected] == ["v2"] * 4 and expected[2].video.shape == (1, 32) and expected[0].audio.shape[1] == 16
    assert_same(encoder("ltx2.3", gemma3_comfy(tmp_path, pieces)).encode(CAPTIONS), expected)
    v1 = encoder("ltx2", gemma3_comfy(tmp_path, pieces)).encode(CAPTIONS)
    assert [f.kind for f in v1] == ["v1"] * 4 and v1[0].audio is None and v1[0].video.shape[1] == 16


def test_scaled_fp8_file_is_read_exactly(tmp_path: Path, pieces: bytes) -> None:
    tensors = load_file(gemma3_comfy(tmp_path, pieces))
    stored, plain = quantise_fp8(tensors)
    save_file(stored, tmp_path / "gemma_3_12B_it_fp8_scaled.safetensors")
    save_file(plain, tmp_path / "plain.safetensors")
    expected = encoder("ltx2.3", tmp_path / "plain.safetensors").encode(CAPTIONS)
    assert_same(encoder("ltx2.3", tmp_path / "gemma_3_12B_it_fp8_scaled.safetensors").encode(CAPTIONS), expected)


def test_gemma4_forms_give_identical_features(tmp_path: Path) -> None:
    packed = encoder("ltx2.5", packed_gemma4(tmp_path))
    expected = packed.encode(CAPTIONS)
    assert packed.tokenizer("a cat").ids[0] == 2 and expected[0].video.shape == (4, 32)  # the start token is put in front
    assert_same(encoder("ltx2.5", gemma4_folder(tmp_path)).encode(CAPTIONS), expected)


def test_t5_forms_give_identical_features(tmp_path: Path) -> None:
    words = t5_tokenizer(tmp_path)
    folder = write_folder(tmp_path / "text_encoder", t5(), "", {"model_type": "t5", "d_model": 16}, ("tokenizer.json", json_tokenizer(bos=False).encode()))
    expected = encoder("ltxv0.9.5", folder).encode(CAPTIONS)
    assert expected[0].kind == "t5" and expected[0].video.shape == (4, 16) and expected[2].video.shape == (1, 16)  # 3 words and the end token
    assert_same(encoder("ltxv0.9.5", t5_single(tmp_path), tokenizer=words).encode(CAPTIONS), expected)
    assert_same(encoder("ltxv0.9.5", t5_single(tmp_path), tokenizer=words / "tokenizer.json").encode(CAPTIONS), expected)
    fp8 = {n: v.to(torch.float8_e4m3fn) if "Dense" in n else v for n, v in load_file(t5_single(tmp_path)).items()}
    save_file(fp8, tmp_path / "t5xxl_fp8_e4m3fn.safetensors")
    rounded = {n: v.to(torch.float16) for n, v in fp8.items()}
    save_file(rounded, tmp_path / "rounded.safetensors")
    assert_same(
        encoder("ltxv0.9.5", tmp_path / "t5xxl_fp8_e4m3fn.safetensors", tokenizer=words).encode(CAPTIONS),
        encoder("ltxv0.9.5", tmp_path / "rounded.safetensors", tokenizer=words).encode(CAPTIONS),
    )
    assert encoder("ltxv0.9.5", folder, dtype=torch.float16).encode(["a"])[0].video.dtype == torch.bfloat16  # T5 overflows float16


@pytest.mark.parametrize("kind", ["gemma3", "gemma4", "t5"])
def test_streaming_reads_one_layer_at_a_time_and_changes_nothing(kind: str, tmp_path: Path, pieces: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    path = {"gemma3": lambda: gemma3_comfy(tmp_path, pieces), "gemma4": lambda: packed_gemma4(tmp_path), "t5": lambda: t5_single(tmp_path)}[kind]()
    words = t5_tokenizer(tmp_path) if kind == "t5" else None
    resident = encoder(FAMILY[kind], path, tokenizer=words, placement="resident")
    expected = resident.encode(CAPTIONS)
    streamed = encoder(FAMILY[kind], path, tokenizer=words, placement="stream")
    assert (resident.placement, streamed.placement) == ("resident", "stream") and not streamed._layers._kept
    assert_same(streamed.encode(CAPTIONS), expected)
    monkeypatch.setattr(module, "WAVE_TOKENS", 6)  # several waves of small batches
    steps: list[tuple[int, int]] = []
    assert_same(streamed.encode(CAPTIONS, lambda done, total: steps.append((done, total))), expected, 1e-5)
    assert steps[-1][0] == steps[-1][1] == len(steps) and len(steps) > 2


# ---------------------------------------------------------------- captions and batches


def test_results_do_not_depend_on_the_batch(tmp_path: Path, pieces: bytes) -> None:
    path = gemma3_comfy(tmp_path, pieces)
    for family in ("ltx2", "ltx2.3"):
        ours = encoder(family, path)
        together = ours.encode(CAPTIONS + CAPTIONS)
        alone = [ours.encode([caption])[0] for caption in CAPTIONS]
        assert_same(together, alone + alone, 1e-5)
    words = t5_tokenizer(tmp_path)
    ours = encoder("ltxv0.9.5", t5_single(tmp_path), tokenizer=words)
    assert_same(ours.encode(CAPTIONS), [ours.encode([caption])[0] for caption in CAPTIONS], 1e-5)


def test_captions_get_one_start_token_are_stripped_and_cut_with_a_report(tmp_path: Path, pieces: bytes) -> None:
    ours = encoder("ltx2.5", packed_gemma4(tmp_path))
    cat = ours.tokenizer("a cat").ids
    assert ours.tokenizer("  a cat \n").ids == cat and ours.tokenizer("<bos> a cat").ids == cat
    assert ours.tokenizer("").ids == (2,) and cat.count(2) == 1 and cat[-1] not in (0, 1)
    own_bos = CaptionTokenizer._of_json("gemma3", json_tokenizer(bos=True).encode())
    assert own_bos("a cat").ids == cat  # a tokenizer that adds the start token itself gives no second one
    long = " ".join(["cat"] * 1500)
    features = ours.encode(["a cat", long])
    assert features[1].video.shape[0] == 1024
    assert [(t.index, t.tokens, t.kept) for t in ours.truncated] == [(1, 1501, 1024)]
    ours.encode(["a cat"])
    assert ours.truncated == ()
    t5_rule = CaptionTokenizer._of_json("t5", json_tokenizer().encode())
    tokens = t5_rule(long)
    assert len(tokens.ids) == 256 and tokens.full == 1501 and tokens.ids[-1] == 4 and 4 not in tokens.ids[:-1]  # </s> survives the cut


def test_waves_cover_every_caption_once_within_the_limits() -> None:
    lengths = [int(n) for n in torch.randint(1, 1025, (300,), generator=torch.Generator().manual_seed(0))]
    waves = plan_waves(lengths)
    assert sorted(row for wave in waves for batch in wave for row in batch) == list(range(300))
    for wave in waves:
        assert sum(lengths[row] for batch in wave for row in batch) <= module.WAVE_TOKENS
        assert all(len(batch) == 1 for batch in wave)
    assert len(waves) == -(-sum(lengths) // module.WAVE_TOKENS)  # layers are read no more often than they must be
    assert plan_waves([]) == []


# ---------------------------------------------------------------- wrong files and settings


def test_wrong_encoders_are_named(tmp_path: Path, pieces: bytes) -> None:
    three, four, t = gemma3_comfy(tmp_path, pieces), packed_gemma4(tmp_path), t5_single(tmp_path)
    for family, path, found in (("ltx2.5", three, "Gemma 3"), ("ltx2.3", four, "Gemma 4"), ("ltx2", t, "T5"), ("ltxv0.9.5", three, "Gemma 3")):
        with pytest.raises(CheckpointError) as caught:
            encoder(family, path)
        assert found in caught.value.message and path.name in caught.value.message and ".safetensors" in caught.value.hint
    for path, wanted, found in ((three, "gemma4", "is Gemma 3"), (four, "gemma3", "is Gemma 4"), (t, "gemma3", "is T5")):
        weights = read_encoder(WeightSource.open(path))
        with pytest.raises(CheckpointError, match=found):
            check_encoder(weights, wanted=wanted, family="LTX", version=None)


@pytest.mark.parametrize("version,words", [(None, "stock Gemma 4"), ("gemma4-12b-it", "gemma4-12b-it")])
def test_a_stock_gemma4_is_refused_by_version(version: str | None, words: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=words):
        encoder("ltx2.5", packed_gemma4(tmp_path, version, "gemma4.safetensors"))


def test_another_language_model_and_another_size_are_named(tmp_path: Path, pieces: bytes) -> None:
    llama = {f"model.layers.0.self_attn.{n}_proj.weight": torch.zeros(2, 2) for n in "qkvo"} | {"model.embed_tokens.weight": torch.zeros(4, 2)}
    save_file(llama, tmp_path / "llama.safetensors")
    with pytest.raises(CheckpointError, match="llama.safetensors holds no T5, Gemma 3 or Gemma 4"):
        read_encoder(WeightSource.open(tmp_path / "llama.safetensors"))
    bigger = gemma3(num_hidden_layers=3, layer_types=["sliding_attention"] * 3)
    save_file({f"model.{n}": v for n, v in tensors_of(bigger).items()} | {"spiece_model": u8(pieces)}, tmp_path / "gemma_3_27B.safetensors")
    with pytest.raises(CheckpointError, match="another size"):
        encoder("ltx2.3", tmp_path / "gemma_3_27B.safetensors")


def test_a_missing_tensor_is_named(tmp_path: Path, pieces: bytes) -> None:
    tensors = load_file(gemma3_comfy(tmp_path, pieces))
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, tmp_path / "cut.safetensors")
    with pytest.raises(CheckpointError, match="1 missing") as caught:
        encoder("ltx2.3", tmp_path / "cut.safetensors")
    assert "mlp.up_proj.weight" in caught.value.hint


def test_a_missing_tokenizer_is_named_with_what_to_pass(tmp_path: Path, pieces: bytes) -> None:
    with pytest.raises(CheckpointError) as caught:
        encoder("ltxv0.9.5", t5_single(tmp_path))
    assert caught.value.code == "tokenizer.missing" and "t5xxl_fp16.safetensors" in caught.value.message and "t5_tokenizer" in caught.value.hint
    tensors = {n: v for n, v in load_file(gemma3_comfy(tmp_path, pieces)).items() if n != "spiece_model"}
    save_file(tensors, tmp_path / "bare.safetensors")
    with pytest.raises(CheckpointError, match="no tokenizer"):
        encoder("ltx2.3", tmp_path / "bare.safetensors")
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(CheckpointError):
        encoder("ltx2.3", tmp_path / "bare.safetensors", tokenizer=tmp_path / "tokenizer.json")


def test_eight_bits_and_placements_are_checked(tmp_path: Path, pieces: bytes) -> None:
    path = gemma3_comfy(tmp_path, pieces)
    with pytest.raises(ConfigError, match="CUDA"):
        encoder("ltx2.3", path, load_in_8bit=True)
    with pytest.raises(ConfigError, match="sideways"):
        encoder("ltx2.3", path, placement="sideways")


@pytest.mark.skipif(sys.platform == "darwin", reason="requirements.txt leaves bitsandbytes out on a Mac")
def test_eight_bit_layers_compute_nearly_the_same() -> None:
    """bitsandbytes' int8 Linear on the CPU: within 2 % of the plain layer (its stated error is below 1 % a product)."""
    draw = torch.Generator().manual_seed(0)
    layer = nn.Sequential(nn.Linear(64, 48, bias=False))
    layer[0].weight.data = torch.randn(48, 64, generator=draw) * 0.1
    x = torch.randn(5, 64, generator=draw)
    expected = layer(x).detach()
    small = _to_eight_bit(layer, torch.device("cpu"))
    assert type(small[0]).__name__ == "Linear8bitLt"
    with torch.no_grad():
        found = small(x.to(torch.bfloat16)).float()
    assert float((found - expected).norm() / expected.norm()) < 0.02
