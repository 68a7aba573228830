"""Connectors: names and shapes of the real files, registers, batch independence, the LTX-Video pad, wrong features."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from ltx_train.errors import CheckpointError, DataError
from ltx_train.models.checkpoint import Checkpoint
from ltx_train.models.connectors import Connector, ConnectorConfig, Connectors
from ltx_train.models.families import FAMILIES
from ltx_train.models.weights import TensorInfo
from ltx_train.text import TextFeatures

ROOT = Path(__file__).parents[2]
TABLES = ROOT / "data" / "checkpoints"
REAL = {"ltx2-19b": "ltx2", "ltx2.3-22b": "ltx2.3", "ltx2.5-22b": "ltx2.5"}


def table(name: str, mark: str) -> dict[str, tuple[int, ...]]:
    """Names and shapes of a published file whose name holds ``mark``; ``{0-7}`` rows are spread out."""
    found: dict[str, tuple[int, ...]] = {}
    for line in (TABLES / f"{name}.tensors.tsv").read_text().splitlines()[1:]:
        tensor, shape, *_ = line.split("\t")
        if mark not in tensor:
            continue
        dims = tuple(int(n) for n in re.findall(r"\d+", shape))
        span = re.search(r"\{(\d+)-(\d+)\}", tensor)
        numbers = range(int(span[1]), int(span[2]) + 1) if span else [None]
        for number in numbers:
            found[tensor if number is None else tensor.replace(span[0], str(number))] = dims
    return found


class Names:
    """A weight source that knows names and shapes only."""

    def __init__(self, shapes: dict[str, tuple[int, ...]]) -> None:
        self.shapes = shapes

    def keys(self) -> list[str]:
        return list(self.shapes)

    def info(self, name: str) -> TensorInfo:
        return TensorInfo(self.shapes[name], torch.bfloat16)


@pytest.mark.parametrize("stream", ["video", "audio"])
@pytest.mark.parametrize("file", REAL)
def test_module_names_and_shapes_are_those_of_the_published_files(file: str, stream: str) -> None:
    prefix = f"model.diffusion_model.{stream}_embeddings_connector."
    expected = {n[len(prefix) :]: s for n, s in table(file, prefix).items()}
    config = ConnectorConfig.derive(Names(expected), FAMILIES[REAL[file]].config["transformer"], stream)
    with torch.device("meta"):
        network = Connector(config)
    assert {n: tuple(p.shape) for n, p in network.named_parameters()} == expected
    heads = {"ltx2-19b": 30}.get(file, 32)  # reference: connector_num_attention_heads of the published configs
    assert (config.heads, config.registers, config.max_position, config.double_precision) == (heads, 128, 4096, True)


@pytest.fixture(scope="module", params=["ltx2", "ltx2.3"])
def checkpoint(request: pytest.FixtureRequest) -> Checkpoint:
    return Checkpoint.open(ROOT / "parity" / "data" / f"{request.param}.checkpoint.safetensors")


def features_for(checkpoint: Checkpoint, lengths: tuple[int, ...]) -> list[TextFeatures]:
    draw = torch.Generator().manual_seed(3)
    widths = (16, None) if checkpoint.family.feature_kind == "v1" else (32, 16)
    make = lambda n, w: None if w is None else torch.randn(n, w, generator=draw)  # noqa: E731
    return [TextFeatures(checkpoint.family.feature_kind, make(n, widths[0]), make(n, widths[1])) for n in lengths]


def test_every_context_is_1024_long_and_independent_of_its_batch(checkpoint: Checkpoint) -> None:
    network = Connectors.load(checkpoint, device="cpu", dtype=torch.float32)
    features = features_for(checkpoint, (1, 130, 1024, 7))
    together = network.contexts(features)
    assert together.mask is None and together.video.shape[:2] == (4, 1024) and not together.video.requires_grad
    for row, alone in enumerate(features):
        single = network.contexts([alone])
        torch.testing.assert_close(single.video[0], together.video[row], atol=1e-5, rtol=0)
        torch.testing.assert_close(single.audio[0], together.audio[row], atol=1e-5, rtol=0)


def test_padding_is_whole_sets_of_registers_by_slot() -> None:
    config = ConnectorConfig(heads=2, head_dim=2, blocks=1, registers=4, gated=False, ff_bias=True)
    network = Connector(config)
    with torch.no_grad():
        network.learnable_registers.copy_(torch.arange(16.0).view(4, 4))
    x = network.padded([torch.full((3, 4), -1.0), torch.full((9, 4), -2.0)], minimum=5)
    assert x.shape == (2, 12, 4)  # 9 tokens -> 3 sets of 4 registers
    assert x[0, :3].eq(-1).all() and x[1, :9].eq(-2).all()
    for row, start in ((0, 3), (1, 9)):
        for slot in range(start, 12):
            assert torch.equal(x[row, slot], network.learnable_registers[slot % 4])


def test_only_the_asked_streams_are_loaded(checkpoint: Checkpoint) -> None:
    network = Connectors.load(checkpoint, audio=False, device="cpu", dtype=torch.bfloat16)
    assert network.streams == ("video",)
    features = [TextFeatures(f.kind, f.video) for f in features_for(checkpoint, (5,))]
    context = network.contexts(features)
    assert context.audio is None and context.video.dtype == torch.bfloat16
    assert all(not p.requires_grad for p in network.networks["video"].parameters())


def test_wrong_features_are_named(checkpoint: Checkpoint) -> None:
    network = Connectors.load(checkpoint, device="cpu", dtype=torch.float32)
    with pytest.raises(DataError, match="kind t5"):
        network.contexts([TextFeatures("t5", torch.zeros(3, 32))])
    with pytest.raises(DataError, match="24 wide"):
        network.contexts([TextFeatures(network.kind, torch.zeros(3, 24), torch.zeros(3, 24))])
    if network.kind == "v2":
        with pytest.raises(DataError, match="no audio part"):
            network.contexts([TextFeatures("v2", torch.zeros(3, 32))])


def test_a_file_without_connectors_is_named() -> None:
    empty = SimpleNamespace(
        family=FAMILIES["ltx2.3"], config={}, source=lambda name: SimpleNamespace(keys=lambda: [], paths=(Path("pruned.safetensors"),))
    )
    with pytest.raises(CheckpointError, match="pruned.safetensors holds no video text connector"):
        Connectors.load(empty, device="cpu", dtype=torch.float32)


def test_ltx_video_pads_t5_features_with_a_mask() -> None:
    checkpoint = Checkpoint.open(ROOT / "parity" / "data" / "ltxv0.9.5.checkpoint.safetensors")
    network = Connectors.load(checkpoint, device="cpu", dtype=torch.float32)
    features = [TextFeatures("t5", torch.ones(n, 16)) for n in (3, 9)]
    context = network.contexts(features)
    assert network.streams == () and context.audio is None
    assert context.video.shape == (2, 256, 16)  # LTX-Video's own token limit, so contexts of any caption stack
    assert context.mask.sum(dim=1).tolist() == [3, 9] and context.video.sum(dim=(1, 2)).tolist() == [48, 144]
