"""A small network with the module names of the audio-video transformer, for the adapter tests."""

from __future__ import annotations

import torch
from torch import nn

from ltx_train.models.linear import Linear

KINDS = ("lora", "rslora", "dora", "loha", "lokr")
ATTENTIONS = ("attn1", "attn2", "audio_attn1", "audio_attn2", "audio_to_video_attn", "video_to_audio_attn")


class Attention(nn.Module):
    def __init__(self, width: int = 12, inner: int = 8) -> None:
        super().__init__()
        self.to_q, self.to_k, self.to_v = (Linear(width, inner) for _ in range(3))
        self.to_gate_logits = Linear(width, 2)
        self.to_out = nn.ModuleList([Linear(inner, width), nn.Identity()])

    def forward(self, x):
        return self.to_out[0](torch.tanh(self.to_q(x)) * self.to_k(x) + self.to_v(x))


class Activation(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.proj = Linear(12, 24)


class Feed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.ModuleList([Activation(), nn.Identity(), Linear(24, 12)])


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        for name in ATTENTIONS:
            setattr(self, name, Attention())
        self.ff, self.audio_ff = Feed(), Feed()

    def forward(self, x):
        return x + self.audio_to_video_attn(self.attn2(self.attn1(x)))


class Net(nn.Module):
    """A stand-in with the names of the audio-video transformer."""

    def __init__(self, blocks: int = 2) -> None:
        super().__init__()
        self.patchify_proj, self.audio_patchify_proj = Linear(12, 12), Linear(12, 12)
        self.transformer_blocks = nn.ModuleList([Block() for _ in range(blocks)])
        self.proj_out = Linear(12, 12)

    def forward(self, x):
        x = self.patchify_proj(x)
        for block in self.transformer_blocks:
            x = block(x)
        return self.proj_out(x)


def net(seed: int = 0, blocks: int = 2) -> Net:
    torch.manual_seed(seed)
    return Net(blocks)
