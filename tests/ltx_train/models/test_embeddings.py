"""Timestep features, adaLN, RoPE: against closed forms written out in float64."""

import math

import pytest
import torch

from ltx_train.geometry import AudioGrid, Latents, VideoGrid
from ltx_train.models.embeddings import AdaLNSingle, CaptionProjection, Rope, RotaryEmbedding, rotate, timestep_features


def test_timestep_features_are_cosines_then_sines():
    features = timestep_features(torch.tensor([0.0, 700.0]))
    assert features.shape == (2, 256)
    assert torch.equal(features[0], torch.cat([torch.ones(128), torch.zeros(128)]))
    for k in (0, 1, 64, 127):
        angle = 700.0 * 10000.0 ** (-k / 128)
        assert features[1, k] == pytest.approx(math.cos(angle), abs=2e-4)  # float32 angles up to 700
        assert features[1, 128 + k] == pytest.approx(math.sin(angle), abs=2e-4)


def test_adaln_rows_follow_their_timestep():
    torch.manual_seed(0)
    adaln = AdaLNSingle(16, 4)
    rows, embedded = adaln(torch.tensor([0.0, 500.0, 500.0]), torch.float32)
    assert rows.shape == (3, 4, 16)
    assert embedded.shape == (3, 16)
    assert torch.equal(rows[1], rows[2])
    assert not torch.allclose(rows[0], rows[1])
    flat = torch.nn.functional.linear(torch.nn.functional.silu(embedded), adaln.linear.weight, adaln.linear.bias)
    torch.testing.assert_close(rows.flatten(1), flat)
    assert sorted(adaln.state_dict())[0] == "emb.timestep_embedder.linear_1.bias"


def test_adaln_takes_the_compute_dtype():
    rows, embedded = AdaLNSingle(16, 4).to(torch.bfloat16)(torch.tensor([500.0]), torch.bfloat16)
    assert rows.dtype == embedded.dtype == torch.bfloat16


def test_caption_projection_shapes():
    assert CaptionProjection(6, 8)(torch.randn(2, 3, 6)).shape == (2, 3, 8)


def rope_table(positions, width, heads, max_pos, middle, theta=10000.0):
    """The definition, element by element: (cos, sin) [B, T, heads, width / heads / 2]."""
    batch, axes, tokens, _ = positions.shape
    count = width // (2 * axes)
    pad = width // 2 - count * axes
    out = torch.zeros(batch, tokens, width // 2, dtype=torch.float64)
    for b in range(batch):
        for t in range(tokens):
            for k in range(count):
                for axis in range(axes):
                    start, end = positions[b, axis, t].tolist()
                    p = (start + end) / 2 if middle else start
                    frequency = torch.tensor(theta ** (k / (count - 1)) * math.pi / 2, dtype=torch.float64).float().double()
                    out[b, t, pad + k * axes + axis] = frequency * (2 * p / max_pos[axis] - 1)
    return out.view(batch, tokens, heads, -1)


@pytest.mark.parametrize("middle", [True, False])
@pytest.mark.parametrize(("width", "axes"), [(48, 3), (40, 3), (16, 1)])
def test_rope_is_the_definition(width, axes, middle):
    """Low frequencies to float32 accuracy; the highest turns 15708 radians per unit, where float32 positions give 2e-3."""
    max_pos = (20.0, 2048.0, 2048.0)[:axes]
    grid = VideoGrid(2, 1, 2, fps=25.0) if axes == 3 else AudioGrid(3)
    positions = grid.positions().unsqueeze(0)
    rope = RotaryEmbedding(width, 4, max_pos, theta=10000.0, precision="float64", middle=middle)(positions)
    angles = rope_table(positions, width, 4, max_pos, middle)
    assert rope.cos.shape == angles.shape
    assert rope.cos.dtype == torch.float32
    tolerance = 1e-6 + angles.abs() * 2e-7
    assert ((rope.cos - angles.cos()).abs() <= tolerance).all()
    assert ((rope.sin - angles.sin()).abs() <= tolerance).all()


def test_front_padding_does_not_rotate():
    rope = RotaryEmbedding(40, 4, (20.0, 2048.0, 2048.0), theta=10000.0, precision="float64", middle=True)(VideoGrid(2, 1, 1).positions()[None])
    assert torch.equal(rope.cos[:, :, 0, :2], torch.ones(1, 2, 2))  # 20 - 3 * 6 slots
    assert torch.equal(rope.sin[:, :, 0, :2], torch.zeros(1, 2, 2))
    assert (rope.sin[:, :, 0, 2] != 0).all()


def test_frequencies_by_precision():
    make = lambda precision: RotaryEmbedding(4096, 32, (20.0,), theta=10000.0, precision=precision, middle=True)  # noqa: E731
    exact = 10000.0 ** torch.linspace(0, 1, 2048, dtype=torch.float64) * math.pi / 2
    fine, coarse = (make(p).frequencies(torch.device("cpu")) for p in ("float64", "float32"))
    assert torch.equal(fine, exact.float())
    assert not torch.equal(fine, coarse)
    torch.testing.assert_close(fine, coarse, rtol=1e-5, atol=0)


def test_frequencies_are_real_in_a_model_built_on_meta():
    with torch.device("meta"):
        rope = RotaryEmbedding(16, 4, (20.0,), theta=10000.0, precision="float64", middle=True)
    assert rope(AudioGrid(3).positions()[None]).cos.device.type == "cpu"


def test_split_and_interleaved_rotate_their_pairs():
    x = torch.randn(2, 3, 4, 6)
    angle = torch.randn(2, 3, 4, 3)
    rope = Rope(angle.cos(), angle.sin())
    turn = torch.polar(torch.ones_like(angle), angle)
    split = torch.complex(x[..., :3], x[..., 3:]) * turn
    torch.testing.assert_close(rotate(x, rope, interleaved=False), torch.cat([split.real, split.imag], dim=-1))
    pairs = torch.view_as_complex(x.unflatten(-1, (3, 2)).contiguous()) * turn
    torch.testing.assert_close(rotate(x, rope, interleaved=True), torch.view_as_real(pairs).flatten(-2))
    assert rotate(x.bfloat16(), rope, interleaved=True).dtype == torch.bfloat16


class TestTables:
    """RoPE tables are made once a bucket, and never taken for others' positions."""

    def rotary(self):
        return RotaryEmbedding(64, 4, (20.0, 2048.0, 2048.0), theta=10000.0, precision="float64", middle=True)

    def latents(self, batch=1, fps=24.0):
        grid = VideoGrid(3, 2, 2, fps=fps)
        return Latents(torch.zeros(batch, 128, 3, 2, 2), grid)

    def test_once_a_bucket(self):
        rotary = self.rotary()
        first = rotary(self.latents().positions)
        assert rotary(self.latents().positions) is first, "another clip of the same grid"
        for other in (self.latents(batch=2).positions, self.latents(fps=25.0).positions):
            torch.testing.assert_close(rotary(other), rotary.tables(other), rtol=0, atol=0)
            assert rotary(other) is not first
        with torch.inference_mode():
            assert rotary(self.latents().positions) is first
            shown = self.rotary()(self.latents().positions)
        assert not shown.cos.is_inference(), "what a preview makes may be saved for a backward pass"

    def test_changed_or_freed_positions_are_other_positions(self):
        rotary = self.rotary()
        positions = self.latents().positions.clone()
        rotary(positions)
        positions[..., 1] += 3.0
        torch.testing.assert_close(rotary(positions), rotary.tables(positions), rtol=0, atol=0)
        for n in range(20):  # each is freed before the next is made, and would get its memory
            positions = torch.full((1, 3, 12, 2), float(n))
            torch.testing.assert_close(rotary(positions), rotary.tables(positions), rtol=0, atol=0)

    def test_kept_within_bounds(self, monkeypatch):
        import ltx_train.models.embeddings as embeddings

        rotary = self.rotary()
        one = rotary.tables(self.latents().positions)
        monkeypatch.setattr(embeddings, "TABLE_BYTES", 3 * (one.cos.nbytes + one.sin.nbytes))
        for n in range(9):
            rotary(self.latents(fps=10.0 + n).positions)
            assert len(rotary._tables) == min(n + 1, 3)
        monkeypatch.setattr(embeddings, "TABLE_BYTES", 0)
        rotary(self.latents().positions)
        assert len(rotary._tables) == 1
