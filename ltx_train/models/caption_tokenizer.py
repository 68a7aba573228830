"""Captions to token ids: tokenizer.json or a sentencepiece model, from the encoder file, its folder or a given path."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from ..errors import CheckpointError, MissingPackage
from ..text import TOKEN_LIMITS
from .weights import WeightSource

_JSON = "tokenizer.json"
_PIECES = ("tokenizer.model", "spiece.model", "sentencepiece.model", "spm.model")


@dataclass(frozen=True)
class Tokens:
    """One caption's ids, and how many there would be without the limit."""

    ids: tuple[int, ...]
    full: int


@dataclass(frozen=True)
class CaptionTokenizer:
    """A caption to ids by the family's rule, at most ``limit`` of them.

    Gemma: stripped text, the start token exactly once in front (whatever the tokenizer adds), no end token.
    T5: stripped text and one end token, which survives the cut.
    """

    raw: Callable[[str], list[int]]  # text to ids without start and end tokens
    kind: str
    bos: int
    eos: int
    limit: int

    @classmethod
    def load(cls, kind: str, source: WeightSource, path: str | Path | None = None) -> CaptionTokenizer:
        """From ``path`` (file or folder), else the tensors of ``source``, else the folder of its files.

        Raises CheckpointError naming what to pass when there is none; nothing is downloaded.
        """
        if path is not None:
            found = _in_path(Path(path))
            if found is None:
                raise CheckpointError("tokenizer.missing", f"The tokenizer path {str(path)[-60:]} holds no tokenizer.", _where(kind))
            return cls._of_file(kind, found)
        for name, build in (("tokenizer_json", cls._of_json), ("spiece_model", cls._of_pieces)):
            stored = next((n for n in source.keys() if n == name or n.endswith(f".{name}")), None)
            if stored is not None:
                return build(kind, source.get(stored).contiguous().numpy().tobytes())
        if packed := source.metadata.get("tokenizer_json"):
            return cls._of_json(kind, packed.encode())
        for folder in dict.fromkeys(Path(p).parent for p in source.paths):
            shards = len(source.paths) > 1 or source.paths[0].name.startswith("model")
            for place in (folder, folder.parent / "tokenizer") if shards else ():
                if found := _in_path(place):
                    return cls._of_file(kind, found)
        file = source.paths[0].name if len(source.paths) == 1 else source.paths[0].parent.name
        raise CheckpointError("tokenizer.missing", f"{file[:60]} holds no tokenizer, and no tokenizer path was given.", _where(kind))

    def __call__(self, caption: str) -> Tokens:
        ids = self.raw(caption.strip())
        if self.kind == "t5":
            return Tokens((*ids[: self.limit - 1], self.eos), len(ids) + 1)
        ids = ids if ids[:1] == [self.bos] else [self.bos, *ids]
        return Tokens(tuple(ids[: self.limit]), len(ids))

    @classmethod
    def _of_file(cls, kind: str, file: Path) -> CaptionTokenizer:
        content = file.read_bytes()
        return cls._of_json(kind, content) if file.suffix == ".json" else cls._of_pieces(kind, content)

    @classmethod
    def _of_json(cls, kind: str, content: bytes) -> CaptionTokenizer:
        try:
            from tokenizers import Tokenizer
        except ImportError as error:
            raise MissingPackage("tokenizers", "Reading tokenizer.json") from error
        try:
            tokenizer = Tokenizer.from_str(content.decode("utf-8"))
        except Exception as error:  # the library raises bare Exception for every fault of the file
            raise CheckpointError("tokenizer.damaged", "The tokenizer.json of the text encoder cannot be read.", f"{error}. {_where(kind)}") from error
        tokenizer.no_truncation()
        tokenizer.no_padding()
        special = lambda token, default: default if (found := tokenizer.token_to_id(token)) is None else found  # noqa: E731
        bos, eos = special("<bos>", 2), special("</s>" if kind == "t5" else "<eos>", 1)
        return cls(lambda text: tokenizer.encode(text, add_special_tokens=False).ids, kind, bos, eos, TOKEN_LIMITS[kind])

    @classmethod
    def _of_pieces(cls, kind: str, content: bytes) -> CaptionTokenizer:
        try:
            from sentencepiece import SentencePieceProcessor
        except ImportError as error:
            raise MissingPackage("sentencepiece", "Reading the encoder's tokenizer", "Or pass a tokenizer path with a tokenizer.json") from error
        pieces = SentencePieceProcessor()
        try:
            pieces.LoadFromSerializedProto(content)
        except RuntimeError as error:
            raise CheckpointError("tokenizer.damaged", "The sentencepiece model of the text encoder cannot be read.", f"{error}. {_where(kind)}") from error
        bos, eos = (default if found < 0 else found for found, default in ((pieces.bos_id(), 2), (pieces.eos_id(), 1)))
        return cls(lambda text: pieces.EncodeAsIds(text), kind, bos, eos, TOKEN_LIMITS[kind])


def _in_path(path: Path) -> Path | None:
    """The tokenizer file at ``path``, or inside the folder ``path`` or its ``tokenizer`` folder."""
    if path.is_file():
        return path if path.suffix in (".json", ".model") and _is_tokenizer(path) else None
    for folder in (path, path / "tokenizer"):
        for name in (_JSON, *_PIECES):
            if (folder / name).is_file():
                return folder / name
    return None


def _is_tokenizer(path: Path) -> bool:
    if path.suffix == ".model":
        return True
    try:
        return "model" in json.loads(path.read_text(encoding="utf-8"))
    except ValueError:
        return False


def _where(kind: str) -> str:
    if kind == "t5":
        return (
            "Pass a tokenizer path: ComfyUI's comfy/text_encoders/t5_tokenizer folder, or a folder or file with the T5 v1.1"
            " tokenizer.json or spiece.model. T5 weight files hold no tokenizer, and nothing is downloaded."
        )
    name = "gemma-3-12b-it" if kind == "gemma3" else "LTX Gemma 4 encoder"
    return f"Pass a tokenizer path: a folder or file with the tokenizer.json or tokenizer.model of {name}. ComfyUI's own files hold one inside."
