"""Geometry against closed forms: causal frame spans, audio spans, patch order, mask pooling."""

import torch

from ltx_train.geometry import AudioGrid, Latents, VideoFactors, VideoGrid, patchify, pool_mask, unpatchify


def test_causal_spans_cover_one_then_eight_frames():
    grid = VideoGrid.of_pixels(64, 32, 17, fps=25.0, factors=VideoFactors())
    time = grid.positions()[0] * 25.0
    spans = [tuple(round(v) for v in s) for s in time[:: grid.tokens_per_frame].tolist()]
    assert spans == [(0, 1), (1, 9), (9, 17)]
    assert grid.positions()[1:, :2].tolist() == [[[0, 32], [0, 32]], [[0, 32], [32, 64]]]
    plain = VideoGrid(3, 1, 2, 25.0, VideoFactors(causal_positions=False)).positions()[0] * 25.0
    assert [round(v) for v in plain[::2, 0].tolist()] == [0, 8, 16]


def test_audio_spans_follow_the_causal_mel_groups():
    grid = AudioGrid(3)
    spans = (grid.positions()[0] * 100).round().tolist()  # in mel frames of 10 ms
    assert spans == [[0, 1], [1, 5], [5, 9]]
    assert grid.of_seconds(89 / 24).steps == 93  # 89 frames at 24 fps: the figure of the inference pipelines


def test_patchify_orders():
    video = torch.arange(2 * 3 * 2 * 2 * 2).view(2, 3, 2, 2, 2).float()
    tokens = patchify(video)
    assert torch.equal(tokens[1, 5], video[1, :, 1, 0, 1])
    assert torch.equal(unpatchify(tokens, VideoGrid(2, 2, 2)), video)
    audio = torch.arange(8 * 5 * 16).view(1, 8, 5, 16).float()
    tokens = patchify(audio)
    assert torch.equal(tokens[0, 2], audio[0, :, 2, :].reshape(-1))
    assert torch.equal(Latents(audio, AudioGrid(5)).with_tokens(tokens).values, audio)


def test_pool_mask_groups_as_the_causal_vae_does():
    mask = torch.zeros(17, 64, 64)
    mask[1, :32, 32:] = 1  # frame 1 belongs to the second latent frame, not to the first
    mask[16, 32:, :20] = 1  # 20 of 32 columns: more than half of the cell
    mask[0, 32:, 32:48] = 1  # exactly half: does not count
    pooled = pool_mask(mask, VideoFactors())
    assert pooled.shape == (3, 2, 2)
    assert pooled.nonzero().tolist() == [[1, 0, 1], [2, 1, 0]]
