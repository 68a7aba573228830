"""A small tokenizer in both forms that text encoders carry: a sentencepiece model and a tokenizer.json, with the same ids."""

from __future__ import annotations

import json
import struct

VOCABULARY = 512
_SPACE = "\u2581"
_CHARACTERS = _SPACE + "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789.,;:!?'\"-()"
_WORDS = """a an the and of in on at with to from over under behind near through across by is are was be it its as for into out up down this that while
person woman man child girl boy people cat dog bird horse fish robot car train boat city street house room window door table chair tree forest field
mountain river lake sea ocean beach sky sun moon cloud rain snow fire smoke light shadow night day morning evening summer winter red green blue white
black yellow golden dark bright small large old young slow fast soft loud quiet warm cold walks runs sits stands looks turns moves jumps plays sings
speaks smiles opens closes holds falls flies swims drives camera shot scene video music sound voice wind water hand face hair eyes background close
wide still style film cartoon painting animation circle square triangle star tone high low middle left right""".split()

# Where each encoder keeps its special tokens; the rest of the vocabulary is the same.
_SPECIAL = {
    "gemma": ("<pad>", "<eos>", "<bos>", "<unk>"),
    "t5": ("<pad>", "</s>", "<unk>"),
}
_NORMAL, _UNKNOWN, _CONTROL, _BYTE = 1, 2, 3, 6  # SentencePiece.Type of sentencepiece_model.proto


def pieces(kind: str) -> list[tuple[str, float, int]]:
    """(piece, score, type) of every id: special tokens, bytes, characters, words; fewer than 512 in all.

    A word scores above the sum of its characters, so the unigram model takes it whole.
    """
    special = [(p, 0.0, _UNKNOWN if p == "<unk>" else _CONTROL) for p in _SPECIAL[kind]]
    if kind == "gemma":  # ids that Gemma's own tokenizer and ComfyUI's stop token hold
        special += [(f"<unused{i}>", 0.0, _CONTROL) for i in range(3)]
    found = special + [(f"<0x{b:02X}>", -100.0, _BYTE) for b in range(256)]
    found += [(c, -10.0, _NORMAL) for c in _CHARACTERS]
    found += [(_SPACE + word, -8.0 - 0.001 * i, _NORMAL) for i, word in enumerate(dict.fromkeys(_WORDS)) if len(word) > 1]
    assert len(found) <= VOCABULARY, len(found)
    return found


def sentencepiece_model(kind: str) -> bytes:
    """The bytes of a tokenizer.model: a ModelProto in protobuf's wire format (fields of sentencepiece_model.proto)."""
    names = [p for p, _, _ in pieces(kind)]
    body = b"".join(_field(1, _field(1, p.encode()) + _float(2, score) + _int(3, type_)) for p, score, type_ in pieces(kind))
    ids = {"unk": 40, "bos": 41, "eos": 42, "pad": 43}
    place = {"unk": names.index("<unk>"), "bos": names.index("<bos>") if "<bos>" in names else -1, "eos": 1, "pad": 0}
    trainer = _int(3, 1) + _int(4, len(names)) + _int(35, 1) + b"".join(_int(number, place[which]) for which, number in ids.items())
    trainer += b"".join(_field(number, name.encode()) for number, name in ((45, "<unk>"), (46, "<bos>"), (47, _SPECIAL[kind][1]), (48, "<pad>")))
    normalizer = _field(1, b"identity") + _int(3, int(kind == "t5")) + _int(4, 0) + _int(5, 1)
    return body + _field(2, trainer) + _field(3, normalizer)


def _varint(value: int) -> bytes:
    value &= (1 << 64) - 1  # negative numbers go as 64-bit two's complement
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*out, value])


def _field(number: int, content: bytes) -> bytes:
    return _varint(number << 3 | 2) + _varint(len(content)) + content


def _int(number: int, value: int) -> bytes:
    return _varint(number << 3) + _varint(value)


def _float(number: int, value: float) -> bytes:
    return _varint(number << 3 | 5) + struct.pack("<f", value)


def tokenizer_json(kind: str, *, add_bos: bool = True) -> bytes:
    """The bytes of a tokenizer.json of the same pieces. add_bos: Gemma 3's adds the start token, Gemma 4's does not."""
    listed = pieces(kind)
    names = [p for p, _, _ in listed]
    added = [
        {"id": i, "content": p, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
        for i, (p, _, type_) in enumerate(listed)
        if type_ in (_UNKNOWN, _CONTROL)
    ]
    token = lambda name: {"SpecialToken": {"id": name, "type_id": 0}}  # noqa: E731
    text = {"Sequence": {"id": "A", "type_id": 0}}
    extra = "</s>" if kind == "t5" else "<bos>"
    single = [text, token(extra)] if kind == "t5" else [token(extra), text]
    content = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": None if kind == "t5" else {"type": "Replace", "pattern": {"String": " "}, "content": _SPACE},
        "pre_tokenizer": {"type": "Metaspace", "replacement": _SPACE, "prepend_scheme": "always", "split": False} if kind == "t5" else None,
        "post_processor": {
            "type": "TemplateProcessing",
            "single": single,
            "pair": [*single, {"Sequence": {"id": "B", "type_id": 1}}],
            "special_tokens": {extra: {"id": extra, "ids": [names.index(extra)], "tokens": [extra]}},
        }
        if kind == "t5" or add_bos
        else None,
        "decoder": {"type": "Metaspace", "replacement": _SPACE, "prepend_scheme": "always" if kind == "t5" else "never", "split": False},
        "model": {"type": "Unigram", "unk_id": names.index("<unk>"), "vocab": [[p, score] for p, score, _ in listed], "byte_fallback": True},
    }
    return json.dumps(content, ensure_ascii=False).encode()


def tokenizer_config(kind: str) -> bytes:
    """The bytes of a tokenizer_config.json that transformers' AutoTokenizer reads beside the tokenizer.json."""
    special = {"t5": {"eos_token": "</s>"}, "gemma": {"bos_token": "<bos>", "eos_token": "<eos>"}}[kind]
    content = {"tokenizer_class": "PreTrainedTokenizerFast", "pad_token": "<pad>", "unk_token": "<unk>", "model_max_length": 1024, "padding_side": "left"}
    return json.dumps(content | special).encode()
