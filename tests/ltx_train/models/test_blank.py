"""Networks without numbers: the same modules as on torch's meta device; tensors that have numbers are filled as ever."""

import torch
from torch import nn

from ltx_train.models.blank import blank
from ltx_train.models.blocks import TransformerBlock
from ltx_train.models.families import TransformerConfig

CONFIG = TransformerConfig(
    num_layers=1, num_attention_heads=2, attention_head_dim=8, in_channels=4, out_channels=4, cross_attention_dim=16, caption_channels=None,
    audio_num_attention_heads=2, audio_attention_head_dim=8, audio_in_channels=4, audio_out_channels=4, audio_cross_attention_dim=16, gated_attention=True, cross_attention_adaln=True,
)  # fmt: skip


def described(module):
    return [(name, t.shape, t.dtype, t.device, isinstance(t, nn.Parameter)) for name, t in [*module.named_parameters(), *module.named_buffers()]]


def test_the_same_modules_as_on_the_meta_device():
    made = lambda: nn.ModuleList([TransformerBlock(CONFIG, video=True, audio=True), nn.Conv3d(2, 3, 3), nn.BatchNorm1d(4), nn.Embedding(3, 2), nn.GroupNorm(2, 4)])  # noqa: E731
    before = torch.get_rng_state()
    with blank():
        ours = made()
    assert torch.equal(torch.get_rng_state(), before)
    with torch.device("meta"):
        theirs = made()
    assert described(ours) == described(theirs) and all(t.is_meta for t in ours.state_dict().values())


def test_tensors_with_numbers_are_filled():
    with blank():
        assert torch.empty(1).is_meta
        real = torch.zeros(3, device="cpu")
        nn.init.ones_(real)
        assert real.tolist() == [1, 1, 1] and real.fill_(2).tolist() == [2, 2, 2] and real.zero_().tolist() == [0, 0, 0]
        assert real.normal_(generator=torch.Generator().manual_seed(0)).abs().sum() > 0
    assert not torch.empty(1).is_meta
    assert nn.Linear(2, 2).weight.abs().sum() > 0
