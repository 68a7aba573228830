"""Captions to text features: T5 (LTX-Video), Gemma 3 (LTX-2, 2.3) or LTX Gemma 4 (2.5), plus the feature extractor.

One driver serves all: captions are tokenised, sorted by length and batched without empty columns; then every
layer passes over all batches of a wave, so that a streamed model is read once for thousands of tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..text import TextFeatures
from .caption_tokenizer import CaptionTokenizer
from .feature_extractor import FeatureExtractor, FeatureSum
from .gemma import GemmaConfig, GemmaLayer, GemmaNorm, gemma_tables
from .layer_store import LayerPlan, LayerStore, choose_placement
from .t5 import RELATIVE_BIAS, T5Block, T5Config, T5Norm, t5_bias
from .text_keys import EncoderWeights, check_encoder, check_layers, read_encoder, required_version

if TYPE_CHECKING:
    from .checkpoint import Checkpoint

WAVE_TOKENS = 32768  # between two reads of a streamed layer: about 1 GB of states and sums for a 12B Gemma


@dataclass(frozen=True)
class Truncated:
    """A caption longer than the limit: its place in the list, its tokens, and how many were kept."""

    index: int
    tokens: int
    kept: int


@dataclass
class _Batch:
    """Captions of similar length on their way through the layers; padded on the right."""

    rows: list[int]
    lengths: Tensor  # [B]
    state: Tensor  # [B, n, hidden]
    shared: object  # what every layer reads: GemmaTables, or T5's bias
    features: FeatureSum | None


class TextEncoder:
    """A frozen text model and its feature extractor. Build with :meth:`load`.

    kind: ``t5``, ``gemma3``, ``gemma4``. feature_kind: ``t5``, ``v1``, ``v2``. placement: ``resident`` or ``stream``.
    truncated: captions of the last :meth:`encode` that were cut to ``limit`` tokens.
    """

    def __init__(
        self,
        weights: EncoderWeights,
        tokenizer: CaptionTokenizer,
        extractor: FeatureExtractor | None,
        *,
        device: torch.device,
        dtype: torch.dtype,
        eight_bit: bool = False,
        placement: str = "auto",
    ) -> None:
        self.kind, self.tokenizer, self.extractor, self.device = weights.kind, tokenizer, extractor, device
        # T5's feed-forward overflows float16.
        self.dtype = torch.bfloat16 if weights.kind == "t5" and dtype == torch.float16 else dtype
        self.feature_kind = extractor.kind if extractor is not None else "t5"
        self.truncated: tuple[Truncated, ...] = ()
        self._source = weights.source
        self._config = T5Config.derive(weights.shapes) if self.kind == "t5" else GemmaConfig.derive(self.kind, weights.shapes, weights.settings)
        plan = self._plan(eight_bit)
        self._layers = LayerStore(plan, choose_placement(plan, placement, beside=_bytes_of(extractor)))
        self._norm = self._final_norm()
        self._embedding: Tensor | None = None  # on the host: a lookup needs few rows, the table is 2 GB

    @classmethod
    def load(
        cls,
        checkpoint: Checkpoint,
        *,
        device: torch.device | str,
        dtype: torch.dtype,
        load_in_8bit: bool = False,
        placement: str = "auto",
    ) -> TextEncoder:
        """The text encoder that the checkpoint's family reads, from the file given with it.

        placement: ``resident`` (all layers on the device), ``stream`` (one layer at a time from disk: a 12B Gemma
        in about 5 GB), ``auto`` (resident when it fits). load_in_8bit: bitsandbytes, CUDA only.
        Raises CheckpointError for a wrong, damaged or missing encoder, projection or tokenizer; ConfigError; MissingPackage.
        """
        family, device = checkpoint.family, torch.device(device)
        raw = checkpoint.source("text_encoder")
        weights = read_encoder(raw)
        check_encoder(weights, wanted=family.text, family=family.title, version=required_version(checkpoint.metadata))
        check_layers(weights)
        tokenizer = CaptionTokenizer.load(weights.kind, raw, getattr(checkpoint, "tokenizer_path", None))
        extractor = None
        if family.feature_kind != "t5":
            config = GemmaConfig.derive(weights.kind, weights.shapes, weights.settings)
            extractor = FeatureExtractor.load(
                checkpoint.source("text_projection"),
                family.feature_kind,
                hidden=config.hidden,
                states=config.states,
                device=device,
                dtype=dtype,
                encoder=raw.paths[0].name[:30],
            )
        return cls(weights, tokenizer, extractor, device=device, dtype=dtype, eight_bit=load_in_8bit, placement=placement)

    @property
    def placement(self) -> str:
        return self._layers.placement

    @property
    def limit(self) -> int:
        """The most tokens of a caption that are read."""
        return self.tokenizer.limit

    @torch.no_grad()
    def encode(self, captions: list[str], progress: Callable[[int, int], None] | None = None) -> list[TextFeatures]:
        """Features of the valid tokens of every caption, on the CPU, in the encoder's dtype, in the given order.

        Give many captions at once: a streamed encoder reads all its layers once for each 32768 tokens.
        progress: called with (layers done, layers in all). Over-long captions are cut and listed in ``truncated``.
        """
        tokens = [self.tokenizer(caption) for caption in captions]
        self.truncated = tuple(Truncated(i, t.full, len(t.ids)) for i, t in enumerate(tokens) if t.full > len(t.ids))
        distinct = list(dict.fromkeys(t.ids for t in tokens))
        waves = plan_waves([len(ids) for ids in distinct])
        done: dict[tuple[int, ...], TextFeatures] = {}
        layers = self._layers.plan.count
        tell = progress or (lambda done, total: None)
        for number, wave in enumerate(waves):
            steps = self._encode_wave(distinct, wave, lambda layer, start=number * layers: tell(start + layer, len(waves) * layers))
            done |= {distinct[row]: features for row, features in steps}
        return [done[t.ids] for t in tokens]

    def hidden_states(self, ids: list[int]) -> list[Tensor]:
        """All states [n, hidden] of one token sequence: embedding, each layer, the last one normalised (for checks)."""
        with torch.no_grad():
            batch = self._begin([tuple(ids)], [0])
            states = [batch.state]
            for layer in self._layers.each():
                states.append(layer(states[-1], batch.shared))
            states[-1] = self._norm(states[-1])
        return [state[0] for state in states]

    def _encode_wave(self, ids: list[tuple[int, ...]], wave: list[list[int]], tell: Callable[[int], None]) -> list[tuple[int, TextFeatures]]:
        batches = [self._begin(ids, rows) for rows in wave]
        for number, layer in enumerate(self._layers.each()):
            for batch in batches:
                if batch.features is not None:
                    batch.features.add(number, batch.state)
                batch.state = layer(batch.state, batch.shared)
            tell(number + 1)
        found = []
        for batch in batches:
            found += zip(batch.rows, self._finish(batch))
        return found

    def _begin(self, ids: list[tuple[int, ...]], rows: list[int]) -> _Batch:
        lengths = torch.tensor([len(ids[row]) for row in rows])
        width = int(lengths.max())
        padded = torch.zeros(len(rows), width, dtype=torch.long)
        for place, row in enumerate(rows):
            padded[place, : len(ids[row])] = torch.tensor(ids[row])
        state = self._embed(padded)
        features = None if self.extractor is None else self.extractor.begin(lengths, width)
        if self.kind == "t5":
            shared: object = t5_bias(self._relative, lengths, width)
        else:
            shared = gemma_tables(self._config, self.limit - lengths, width, self.device, self.dtype)
        return _Batch(rows, lengths, state, shared, features)

    def _finish(self, batch: _Batch) -> list[TextFeatures]:
        last = self._norm(batch.state)
        if batch.features is None:
            return [TextFeatures("t5", row[:n].to("cpu").clone()) for row, n in zip(last, batch.lengths.tolist())]
        batch.features.add(len(self._config.layers), last)
        streams = batch.features.finish(self.dtype)
        audio = streams.get("audio", [None] * len(batch.rows))
        return [TextFeatures(self.feature_kind, video, sound) for video, sound in zip(streams["video"], audio)]

    def _embed(self, ids: Tensor) -> Tensor:
        """[B, n] ids to [B, n, hidden] on the device; Gemma scales by sqrt(hidden) rounded to the dtype."""
        if self._embedding is None:
            self._embedding = self._source.get("embed_tokens.weight")
        state = self._embedding[ids].to(self.device, self.dtype)
        return state if self.kind == "t5" else state * torch.tensor(self._config.hidden**0.5, dtype=self.dtype, device=self.device)

    def _plan(self, eight_bit: bool) -> LayerPlan:
        config = self._config
        if self.kind != "t5":
            return LayerPlan(lambda i: GemmaLayer(config, i), "layers.{}.", len(config.layers), self._source, self.device, self.dtype, eight_bit)
        self._relative = self._source.get(RELATIVE_BIAS, self.dtype, self.device)
        blocks = self._source.renamed(lambda name: None if name == RELATIVE_BIAS else name)
        return LayerPlan(lambda i: T5Block(config), "block.{}.", config.blocks, blocks, self.device, self.dtype, eight_bit)

    def _final_norm(self) -> torch.nn.Module:
        name = "final_layer_norm.weight" if self.kind == "t5" else "norm.weight"
        if self.kind == "t5":
            norm: torch.nn.Module = T5Norm(self._config.hidden, self._config.eps)
        else:
            norm = GemmaNorm(self._config.hidden, self._config.eps, offset=1.0 if self.kind == "gemma3" else 0.0)
        norm.weight = torch.nn.Parameter(self._source.get(name, self.dtype, self.device), requires_grad=False)
        return norm


def plan_waves(lengths: list[int]) -> list[list[list[int]]]:
    """Waves of batches of row numbers, longest first, waves within WAVE_TOKENS.

    A batch is one caption: kernels round otherwise in another batch, and an entry of the cache must not hang on what
    else was missing when it was made. With a caption's 100 to 1000 tokens the products are large enough.
    """
    waves: list[list[list[int]]] = []
    used = WAVE_TOKENS
    for row in sorted(range(len(lengths)), key=lambda r: (-lengths[r], r)):
        if not waves or used + lengths[row] > WAVE_TOKENS:
            waves.append([])
            used = 0
        waves[-1].append([row])
        used += lengths[row]
    return waves


def _bytes_of(extractor: FeatureExtractor | None) -> int:
    weights = [] if extractor is None else [p.weight for p in extractor.projections.values()]
    return sum(2 * w.numel() * w.element_size() for w in weights)
