"""Packed, streamed, expanded, compiled and offloaded blocks: the same outputs and LoRA gradients as the plain network."""

import gc
import threading
import weakref
from dataclasses import replace

import pytest
import torch

from ltx_train.errors import ConfigError
from ltx_train.geometry import AudioGrid, VideoGrid
from ltx_train.lora.adapters import LoraSection, attach
from ltx_train.memory.disk import DiskBlocks
from ltx_train.memory.engine import BlockEngine, EngineSettings
from ltx_train.memory.pinned import HostMemory
from ltx_train.memory.quantization import QUANTIZERS, quantize_linears
from ltx_train.memory.streaming import BlockStore, spread
from ltx_train.models.families import TransformerConfig
from ltx_train.models.linear import lora_disabled
from ltx_train.models.modality import Modality
from ltx_train.models.transformer import LTXTransformer

CPU = torch.device("cpu")
CONFIG = TransformerConfig(
    num_layers=3, num_attention_heads=4, attention_head_dim=32, in_channels=8, out_channels=8, cross_attention_dim=128, caption_channels=None,
    audio_num_attention_heads=4, audio_attention_head_dim=32, audio_in_channels=16, audio_out_channels=16, audio_cross_attention_dim=128,
    gated_attention=True, cross_attention_adaln=True, prompt_adaln_single=True,
)  # fmt: skip
PLAIN = EngineSettings(recompute=False)


def modalities(frames: int = 2, steps: int = 6) -> tuple[Modality, Modality]:
    g = torch.Generator().manual_seed(4)
    randn = lambda *shape: torch.randn(*shape, generator=g)  # noqa: E731
    grid, sound, sigma = VideoGrid(frames, 2, 2), AudioGrid(steps), torch.tensor([0.7])
    index = (torch.arange(grid.tokens) >= 4).long().unsqueeze(0)
    rows = torch.tensor([[0.0, 0.7]])
    video = Modality(randn(1, grid.tokens, 8), sigma, rows[0][index], grid.positions().unsqueeze(0), randn(1, 5, 128), timestep_rows=rows, row_index=index)
    audio = Modality(randn(1, steps, 16), sigma, sigma.expand(1, steps), sound.positions().unsqueeze(0), randn(1, 5, 128), timestep_rows=sigma.unsqueeze(1))
    return video, audio


def network(quantization: str | None = None, dtype: torch.dtype = torch.float32) -> LTXTransformer:
    torch.manual_seed(3)
    model = LTXTransformer(CONFIG).requires_grad_(False).eval().to(dtype)
    if quantization:
        quantize_linears(model, QUANTIZERS[quantization]())
    return model


def adapt(model: LTXTransformer, **section) -> list[torch.nn.Parameter]:
    adapters = attach(model, LoraSection(rank=4, alpha=6, **section), seed=0)
    g = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for p in adapters.parameters():
            p.add_(0.05 * torch.randn(p.shape, generator=g))
    return adapters.parameters()


def engaged(model: LTXTransformer, settings: EngineSettings, dtype: torch.dtype = torch.float32) -> BlockEngine:
    engine = BlockEngine(model, settings, CPU, dtype)
    for index, block in enumerate(model.transformer_blocks):
        engine.take(index, block)
    model.block_runner = engine
    return engine


def trained(model: LTXTransformer, parameters, inputs=None, times: int = 1):
    """Outputs, and gradients summed over ``times`` forward and backward passes."""
    for _ in range(times):
        found = [x for x in model(*(inputs or modalities())) if x is not None]
        sum(x.float().square().sum() for x in found).backward()
    grads = [p.grad.clone() for p in parameters]
    for p in parameters:
        p.grad = None
    return tuple(x.detach() for x in found), grads


_expected: dict = {}


def both(settings: EngineSettings, quantization: str | None = None, **section):
    key = (quantization, str(section))
    if key not in _expected:
        plain = network(quantization)
        _expected[key] = trained(plain, adapt(plain, **section), times=2)
    expected, fast = _expected[key], network(quantization)
    engine = engaged(fast, settings)
    parameters = adapt(fast, **section)
    found = trained(fast, parameters, times=2)
    return expected, found, engine, fast, parameters


def assert_same(expected, found, rtol: float = 2e-5) -> None:
    for a, b in zip((*expected[0], *expected[1]), (*found[0], *found[1])):
        assert a.norm() > 0
        assert (a - b).norm() <= rtol * a.norm()


COMPILED = EngineSettings(compile=True, backend="aot_eager_decomp_partition")
CASES = {
    "packed": (PLAIN, None),
    "quantised, kept in part": (EngineSettings(kept=1), "int8"),
    "packed bits, recomputed": (EngineSettings(), "int4-quanto"),
    "streamed, nothing recomputed": (replace(PLAIN, streamed=3, slots=2), None),
    "part streamed, kept in part": (EngineSettings(streamed=2, slots=2, kept=1), "int8"),
    "streamed and offloaded": (EngineSettings(streamed=3, slots=2, offload=True), "int8"),
}


@pytest.fixture(autouse=True)
def fresh_compiler():
    yield
    torch._dynamo.reset()


@pytest.mark.parametrize("case", CASES)
def test_same_outputs_and_gradients(case):
    settings, quantization = CASES[case]
    expected, found, engine, _, _ = both(settings, quantization)
    assert_same(expected, found)
    assert (engine.plain is not None) == (quantization is not None)


@pytest.mark.parametrize("section", [
    {"target_modules": ["to_q", "to_v"]}, {"target_modules": ["re:.*attn1.to_k$", "ff"], "rank_pattern": {"to_k": 2}}, {"kind": "rslora"},
    {"target_modules": ["to_k", "patchify_proj", "to_gate_logits"]},
])  # fmt: skip
def test_any_choice_of_layers(section):
    assert_same(*both(EngineSettings(streamed=2), "int8", **section)[:2])


def test_one_graph_for_all_blocks_and_sizes():
    torch._dynamo.utils.counters.clear()
    expected, found, _, model, parameters = both(replace(COMPILED, budget=0.4))
    assert_same(expected, found)
    trained(model, parameters, modalities(frames=4, steps=9))
    assert_together_as_apart(replace(COMPILED, budget=0.4, streamed=3, slots=2, offload=True), "int8")
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1, "micro-batches together, streamed and offloaded, run through the same one"


def test_the_base_alone_and_back():
    model = network("int8")
    with torch.no_grad():
        base = model(*modalities())
        engaged(model, EngineSettings(streamed=1))
        parameters = adapt(model)
        lora = model(*modalities())
        with lora_disabled(model):
            again = model(*modalities())
        torch.testing.assert_close(again[0], base[0], rtol=1e-4, atol=1e-5)
        assert (lora[0] - base[0]).norm() > 1e-3 * base[0].norm()
        parameters[0].add_(1.0)
        assert (model(*modalities())[0] - lora[0]).norm() > 0


def test_each_pass_uploads_what_the_ring_does_not_hold():
    store = BlockStore(6, 512, CPU, resident=0, slots=3)
    for index in range(6):
        store.rest(index).fill_(index)
    for _ in range(3):
        for index in [*range(6), *reversed(range(6))]:
            assert bool((store.enter(index) == index).all())
        store.leave()
    assert store.uploaded <= 512 * (6 + 3 * (12 - 3) - 3 + 3)
    for index in [0, 1, 2, 0, 5, 3]:  # out of order
        assert bool((store.enter(index) == index).all())


def test_spread():
    assert spread(48, 48) == frozenset(range(48))
    assert spread(48, 0) == frozenset()
    for count in (1, 7, 20, 47):
        assert len(spread(48, count)) == count


def test_fp8_products_are_near_the_plain_ones():
    """6e-2 is the issue's limit for fp8 products; the rounding of weights alone gives about 2.5e-2."""
    plain = network()
    expected = trained(plain, adapt(plain))
    fast = network("fp8")
    engaged(fast, EngineSettings(float8=True, streamed=2))
    found = trained(fast, adapt(fast))
    for a, b in zip((*expected[0],), (*found[0],)):
        assert 1e-4 < (a - b).norm() / a.norm() < 6e-2


TOGETHER = {
    "streamed, recomputed": (EngineSettings(streamed=3, slots=2), None),
    "nothing recomputed, part streamed": (replace(PLAIN, streamed=2, slots=2), "int8"),
    "offloaded": (EngineSettings(streamed=3, slots=2, offload=True), "int8"),
}


def watch_saved(engine):
    """Everything that the engine is given to save for backward, as it keeps it."""
    packed, original = [], engine.saved._pack
    engine.saved._pack = lambda t: packed.append(original(t)) or packed[-1]
    return packed


def check_saved(engine, packed):
    """Nothing saved for backward stands in a shared buffer: those would be overwritten or held."""
    shared = {engine.plain.untyped_storage().data_ptr(), *(b.untyped_storage().data_ptr() for b in engine.store.buffers())}
    assert any(not isinstance(p, torch.Tensor) for p in packed)
    assert not any(p.untyped_storage().data_ptr() in shared for p in packed if isinstance(p, torch.Tensor))


@pytest.mark.parametrize("case", TOGETHER)
def test_micro_batches_that_go_through_each_block_together(case):
    assert_together_as_apart(*TOGETHER[case])


def assert_together_as_apart(settings, quantization):
    """The gradients are those of one after another, and of the plain network; each block comes once forward and once back for all of them."""
    batches = [modalities(), modalities(frames=4, steps=9), modalities(frames=1, steps=3)]
    loss = lambda outputs: sum(x.square().sum() for x in outputs if x is not None)  # noqa: E731

    def apart(model):
        found = []
        for batch in batches:
            found.append(model(*batch))
            loss(found[-1]).backward()
        return found

    def together(model):
        found = model.compute_together([(*batch, None) for batch in batches])
        sum(map(loss, found)).backward()
        return found

    def results(model, way, steps):
        parameters = adapt(model)
        for _ in range(steps):
            for p in parameters:
                p.grad = None
            before = 0 if steps == 1 else model.block_runner.store.uploaded
            outputs = way(model)
        return [v.detach() for v, _ in outputs] + [p.grad for p in parameters], before

    expected, _ = results(network(quantization), apart, 1)
    uploads = []
    for way in (apart, together):
        model = network(quantization)
        engine = engaged(model, settings)
        packed = watch_saved(engine)
        found, before = results(model, way, 2)  # the first step fills the ring
        uploads.append(engine.store.uploaded - before)
        for a, b in zip(expected, found, strict=True):
            assert (a - b).norm() <= 2e-5 * a.norm() > 0
        if settings.offload:
            check_saved(engine, packed)
    assert uploads[1] <= 2 * settings.streamed * engine.store.size
    assert uploads[0] >= 2 * uploads[1], "three micro-batches one after another"


def test_a_single_pass_after_several_is_as_before():
    model = network("int8")
    engaged(model, EngineSettings(streamed=3, slots=2, offload=True))
    parameters = adapt(model)
    first = trained(model, parameters)
    outputs = model.compute_together([(*modalities(), None)] * 2)
    sum(v.sum() + a.sum() for v, a in outputs).backward()
    for p in parameters:
        p.grad = None
    assert_same(first, trained(model, parameters), rtol=0)


class TestDisk:
    """Blocks that rest in a file: the same bytes, read ahead, one file that goes with the store."""

    def store(self, tmp_path, on_disk=4, layers=6):
        store = BlockStore(layers, 4096, CPU, resident=0, slots=2, on_disk=on_disk, folder=tmp_path)
        for index in range(layers):
            store.rest(index).fill_(index + 1)
        return store

    def test_the_bytes_come_back_in_any_order(self, tmp_path):
        store = self.store(tmp_path)
        for index in [*range(6), *reversed(range(6)), *range(6), 3, 0, 5, 1]:
            assert bool((store.enter(index) == index + 1).all()), index
        assert store.disk.reader.done >= 4 * 4096
        assert [f.stat().st_size for f in tmp_path.iterdir()] == [4 * 4096]
        store.disk.close()
        assert list(tmp_path.iterdir()) == []

    def test_host_memory_holds_a_few_of_them_only(self, tmp_path):
        memory = HostMemory(pin=False)
        store = BlockStore(12, 4096, CPU, resident=0, slots=2, on_disk=12, memory=memory, folder=tmp_path)
        for index in range(12):
            store.rest(index).fill_(index)
        assert memory.size == 4 * 4096
        store.disk.close()

    def test_they_are_read_before_their_turn(self, tmp_path):
        store = self.store(tmp_path, on_disk=6)
        store.enter(0)
        for slot in store.disk.slots:
            slot.reading.result()
        assert {slot.index for slot in store.disk.slots} >= {2, 3}, "beyond those that the ring holds"
        store.disk.close()

    def test_the_file_goes_with_the_last_reference_while_a_block_is_read(self, tmp_path):
        """The reading thread knows the file alone: were it the last to let go of the blocks, it could not wait for its own end."""
        blocks, waits, uploaded = DiskBlocks(range(2), 4096, memory=HostMemory(pin=False), folder=tmp_path, ahead=1), threading.Event(), threading.Event()
        blocks.take(0)
        blocks.sending(0, type("Upload", (), {"synchronize": lambda self: waits.set() or uploaded.wait(10)})())
        blocks.ask([1])  # is read once the upload from the buffer is over
        assert waits.wait(10)
        threading.Timer(0.05, uploaded.set).start()
        del blocks
        assert uploaded.is_set() and list(tmp_path.iterdir()) == []

    def test_a_full_disk_is_told_before_anything_is_loaded(self, tmp_path, monkeypatch):
        monkeypatch.setattr("shutil.disk_usage", lambda path: type("U", (), {"free": 100})())
        with pytest.raises(ConfigError, match="4 blocks on the disk need"):
            self.store(tmp_path)

    def test_training_from_the_disk(self, tmp_path, monkeypatch):
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
        expected, found, engine, _, _ = both(EngineSettings(streamed=3, slots=2, on_disk=2), "int8")
        assert_same(expected, found)
        assert engine.store.disk.reader.done > 0
        engine.close()


def test_a_network_that_is_let_go_leaves_nothing():
    """A LoRA's working copies and the node that made them must not hold each other where the collector cannot see."""
    model = network("int8")
    engine = engaged(model, EngineSettings(streamed=2))
    adapt(model)
    sum(part.sum() for part in model(*modalities())).backward()
    left = [weakref.ref(thing) for thing in (*engine.loras, model, engine)]
    del model, engine
    gc.collect()
    assert [ref() for ref in left if ref() is not None] == []
