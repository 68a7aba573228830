"""Recorded passes: the same gradients as launched ones, alone and in groups, accumulated, streamed, and around other passes."""

from dataclasses import replace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ltx_train.geometry import AudioGrid, VideoGrid
from ltx_train.lora.adapters import LoraSection, attach
from ltx_train.memory import graphs
from ltx_train.memory.engine import BlockEngine, EngineSettings
from ltx_train.memory.graphs import GraphedPasses
from ltx_train.memory.quantization import QUANTIZERS, quantize_linears
from ltx_train.memory.streaming import BlockStore
from ltx_train.models.families import TransformerConfig
from ltx_train.models.modality import Modality
from ltx_train.models.transformer import LTXTransformer, Perturbations

CONFIG = TransformerConfig(
    num_layers=6, num_attention_heads=4, attention_head_dim=64, in_channels=8, out_channels=8, cross_attention_dim=256, caption_channels=None,
    audio_num_attention_heads=4, audio_attention_head_dim=64, audio_in_channels=16, audio_out_channels=16, audio_cross_attention_dim=256,
    gated_attention=True, cross_attention_adaln=True, prompt_adaln_single=True,
)  # fmt: skip
SMALL = replace(
    CONFIG, num_layers=2, num_attention_heads=1, attention_head_dim=128, cross_attention_dim=128, audio_num_attention_heads=1, audio_attention_head_dim=128, audio_cross_attention_dim=128
)  # fmt: skip
# steps of groups of passes, a pass by its seed, which tells its size too (see `one_pass`)
STEPS = (((1, 2, 3),), ((4, 5, 6), (9, 7, 8)), ((1, 2, 3), (5, 4)), ((6,),), ((3, 6), (3, 2, 1)), ((6,), (3,)))
SHORT = (((1, 2), (5, 4)), ((2, 1), (3,)))


def modalities(device: str, seed: int, longer: int = 0, width: int = 256) -> tuple[Modality, Modality]:
    g = torch.Generator().manual_seed(seed)
    randn = lambda *shape: torch.randn(*shape, generator=g)  # noqa: E731
    grid, sound, sigma = VideoGrid(2 + longer, 4, 4), AudioGrid(6 + longer), torch.tensor([0.2 + 0.1 * seed])
    whole = lambda tokens, positions, width: Modality(  # noqa: E731
        tokens, sigma, sigma.expand(1, tokens.shape[1]), positions.unsqueeze(0), randn(1, 5, width), timestep_rows=sigma.unsqueeze(1)
    )
    made = whole(randn(1, grid.tokens, 8), grid.positions(), width), whole(randn(1, sound.steps, 16), sound.positions(), width)
    return tuple(replace(m, **{k: v.to(device) for k, v in vars(m).items() if isinstance(v, torch.Tensor)}) for m in made)


def one_pass(model: LTXTransformer, device: str, seed: int) -> tuple[Modality, Modality, None]:
    return (*modalities(device, seed, seed % 3, model.config.cross_attention_dim), None)


def network(device: str, settings: EngineSettings, dtype: torch.dtype, config: TransformerConfig = CONFIG) -> tuple[LTXTransformer, list[torch.nn.Parameter]]:
    torch.manual_seed(3)
    model = LTXTransformer(config).requires_grad_(False).eval().to(dtype).to(device)
    quantize_linears(model, QUANTIZERS["int8"]())
    engine = BlockEngine(model, settings, torch.device(device, 0) if device == "cuda" else torch.device(device), dtype)
    for index, block in enumerate(model.transformer_blocks):
        engine.take(index, block)
    model.block_runner = engine
    parameters = attach(model, LoraSection(rank=4), seed=0).parameters()
    with torch.no_grad():
        for p in parameters:
            p.add_(0.02)
    return model, parameters


def loss_of(velocities) -> torch.Tensor:
    return sum(x.float().square().sum() for pair in velocities for x in pair)


def taken(parameters) -> torch.Tensor:
    """The gradients, which are then gone."""
    found = torch.cat([p.grad.flatten() for p in parameters])
    for p in parameters:
        p.grad = None
    return found


def gradients(model: LTXTransformer, parameters, device: str, seeds: tuple[int, ...]) -> torch.Tensor:
    for seed in seeds:
        loss_of([model(*modalities(device, seed))]).backward()
    return taken(parameters)


def step(model: LTXTransformer, parameters, device: str, groups: tuple[tuple[int, ...], ...]) -> list[torch.Tensor]:
    """Every velocity of a step's groups, and its gradients."""
    found = []
    for seeds in groups:
        velocities = model.passes([one_pass(model, device, seed) for seed in seeds])
        found += [x.detach().clone() for pair in velocities for x in pair]
        loss_of(velocities).backward()
    return [*found, taken(parameters)]


def other_pass(model: LTXTransformer, device: str) -> torch.Tensor:
    with torch.no_grad():
        return model(*one_pass(model, device, 5))[0]


def close(found: list[torch.Tensor], expected: list[torch.Tensor], within: float) -> None:
    for a, b in zip(found, expected, strict=True):
        assert (a - b).norm() <= within * b.norm() > 0


def assert_groups_agree(model: LTXTransformer, parameters, device: str, runner: GraphedPasses, steps, within: float) -> None:
    """Groups of different sizes, accumulated, with a smaller last one, in another order; other passes before, between and behind."""
    expected = [step(model, parameters, device, groups) for groups in steps]
    plain = other_pass(model, device)
    model.pass_runner = runner
    for _ in range(graphs.WARM_UP):
        for size in sorted({tuple(sorted(seed % 3 for seed in seeds)) for groups_of in steps for seeds in groups_of}):
            step(model, parameters, device, (size,))
    assert not runner.recordings
    for groups, launched in (*zip(steps, expected), (steps[0], expected[0])):  # the later groups of a step are recorded with gradients there
        close([other_pass(model, device)], [plain], within)
        close(step(model, parameters, device, groups), launched, within)
    assert len(runner.recordings) == len(runner.seen)

    first = lambda: runner([one_pass(model, device, seed) for seed in steps[0][0]])  # noqa: E731
    loss_of(first()).backward()
    alone = taken(parameters)
    velocities = first()
    close([other_pass(model, device)], [plain], within)  # between the two halves
    loss_of(velocities).backward()
    close([taken(parameters)], [alone], within)
    loss_of(model.compute_together([one_pass(model, device, 3)])).backward()
    assert taken(parameters).norm() > 0
    first()  # a pass that never comes back
    close([other_pass(model, device)], [plain], within)
    model.pass_runner = None
    close(step(model, parameters, device, steps[-1]), expected[-1], within)


class Tape(TorchDispatchMode):
    """What a CUDA graph is, on the CPU: a capture changes no memory, a replay does the same on the same tensors, without Python."""

    def __init__(self) -> None:
        super().__init__()
        self.launched, self.before, self.made = [], {}, []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten._local_scalar_dense.default:
            raise RuntimeError("operation not permitted when stream is capturing")
        kwargs, given = kwargs or {}, {t.untyped_storage().data_ptr() for t in tensors((args, kwargs))}
        written = [t for argument, value in zip(func._schema.arguments, args) if argument.alias_info and argument.alias_info.is_write for t in tensors(value)]
        for storage in (t.untyped_storage() for t in written):
            self.before.setdefault(storage.data_ptr(), (storage, storage.clone()))
        out = func(*args, **kwargs)
        made = [None if t.untyped_storage().data_ptr() in given else t for t in tensors(out)]
        if written or any(t is not None for t in made):  # a view needs nothing done
            self.launched.append((func, args, kwargs, made))
        return out

    def __exit__(self, *error) -> None:
        super().__exit__(*error)
        for made in (t for *_, found in self.launched for t in found if t is not None and t.is_floating_point()):
            made.data.fill_(torch.nan)  # nothing of it has been computed
        for storage, bytes_before in self.before.values():
            storage.copy_(bytes_before)

    def pool(self) -> int:
        return 1

    @torch.no_grad()
    def replay(self) -> None:
        for func, args, kwargs, made in self.launched:
            out = func(*args, **kwargs)
            for old, new in zip(made, (out,) if isinstance(out, torch.Tensor) else out or ()):
                if old is not None:
                    old.data.copy_(new)


def tensors(tree) -> list[torch.Tensor]:
    if isinstance(tree, torch.Tensor):
        return [tree]
    parts = tree.values() if isinstance(tree, dict) else tree if isinstance(tree, (list, tuple)) else ()
    return [t for part in parts for t in tensors(part)]


@pytest.fixture
def taped(monkeypatch):
    """A runner for a network on the CPU that records on tapes."""
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Tape)
    monkeypatch.setattr(torch.cuda, "graph", lambda graph, *, pool, capture_error_mode: graph)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)

    def make(model, warn=lambda *a: pytest.fail("warned")):
        runner = GraphedPasses(model, model.block_runner, warn)
        runner.usable = True
        return runner

    return make


def test_without_a_card_passes_run_as_they_are():
    model, parameters = network("cpu", EngineSettings(), torch.float32)
    expected = gradients(model, parameters, "cpu", (1,))
    model.pass_runner = GraphedPasses(model, model.block_runner, lambda *a: pytest.fail("warned"))
    assert torch.equal(gradients(model, parameters, "cpu", (1,)), expected)
    assert not model.pass_runner.recordings


def small_network(streamed: int):
    return network("cpu", EngineSettings(recompute=False, streamed=streamed, slots=1), torch.float32, SMALL)


def test_what_is_python_at_recording_is_right_at_replay(taped, monkeypatch):
    monkeypatch.setattr(graphs, "WARM_UP", 0)
    model, parameters = small_network(streamed=2)
    assert_groups_agree(model, parameters, "cpu", taped(model), SHORT, 1e-5)


def test_a_capture_that_fails_leaves_everything_as_it_was(taped, monkeypatch):
    monkeypatch.setattr(graphs, "WARM_UP", 1)
    model, parameters = small_network(streamed=2)
    expected = step(model, parameters, "cpu", ((1,), (1,)))
    warned = []
    model.pass_runner = taped(model, lambda *a: warned.append(a))
    monkeypatch.setattr(BlockStore, "join", lambda store: [b.sum().item() for b in store.ring])  # waits for the card
    close(step(model, parameters, "cpu", ((1,), (1,))), expected, 1e-5)  # the second is tried with gradients there
    assert [code for code, _ in warned] == ["graphs.off"] and not model.pass_runner.recordings


def test_recordings_end_somewhere_and_passes_that_skip_are_not_recorded(taped, monkeypatch):
    monkeypatch.setattr(graphs, "MOST_PASSES", 1)
    monkeypatch.setattr(graphs, "WARM_UP", 0)
    model, parameters = small_network(streamed=0)
    skipping = (*one_pass(model, "cpu", 2)[:2], Perturbations.isolated(2, 1))
    model.pass_runner = taped(model)
    for passes in [one_pass(model, "cpu", 1)], [one_pass(model, "cpu", 1)], [skipping], [one_pass(model, "cpu", 2)]:
        loss_of(model.passes(passes)).backward()
    assert (len(model.pass_runner.recordings), len(model.pass_runner.seen)) == (1, 2)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="CUDA graphs need a CUDA card and LTX_TRAIN_GPU=1")
@pytest.mark.parametrize("streamed", [0, 4, 6])
def test_recorded_equals_launched(streamed):
    torch._dynamo.reset()
    model, parameters = network("cuda", EngineSettings(compile=True, streamed=streamed), torch.bfloat16)
    expected = [gradients(model, parameters, "cuda", seeds) for seeds in ((1,), (2,), (3, 4))]
    warned = []
    model.pass_runner = GraphedPasses(model, model.block_runner, lambda *a: warned.append(a))
    for _ in range(2):
        gradients(model, parameters, "cuda", (7,))
    for seeds, launched in zip(((1,), (2,), (3, 4)), expected):
        with torch.no_grad():
            model(*modalities("cuda", 5))
        recorded = gradients(model, parameters, "cuda", seeds)
        assert (recorded - launched).norm() <= 1e-3 * launched.norm()
    assert not warned
    assert len(model.pass_runner.recordings) == 1


@pytest.mark.skipif(not torch.cuda.is_available(), reason="CUDA graphs need a CUDA card and LTX_TRAIN_GPU=1")
@pytest.mark.parametrize("streamed", [0, 4, 6])
def test_recorded_groups_equal_launched(streamed):
    torch._dynamo.reset()
    model, parameters = network("cuda", EngineSettings(compile=True, streamed=streamed), torch.bfloat16)
    assert_groups_agree(model, parameters, "cuda", GraphedPasses(model, model.block_runner, lambda *a: pytest.fail(str(a))), STEPS, 1e-3)
