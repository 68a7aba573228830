"""How good a fitted set is: what its codecs keep of drawn clips, and how often samples of its base show what was asked."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..conditioning.state import LatentState
from ..geometry import VideoGrid
from ..models.audio_codec import AudioCodec
from ..models.checkpoint import Checkpoint
from ..models.mel import log_mel, resample
from ..models.transformer import LTXTransformer, load_transformer
from ..models.video_codec import VideoCodec
from ..sampling.denoise import denoise
from ..sampling.guidance import Guidance, StreamGuidance
from ..sampling.schedule import Schedule, sigma_schedule
from .drawing import FPS, RATE, TONES, Scenes, draw, sound
from .fit_base import text_contexts
from .fit_codecs import WORDS
from .measures import look, pitch, psnr, snr, tone


@dataclass(frozen=True)
class CodecQuality:
    """psnr: dB over all pixels of all clips. wave_snr: dB of the wave at 16 kHz, through audio VAE and vocoder. mel_snr: dB
    of the log mel above its floor of 1e-5, through the audio VAE alone. pitch_error: largest relative error of the strongest
    frequency."""

    psnr: float
    wave_snr: float
    mel_snr: float
    pitch_error: float


def codec_quality(checkpoint: Checkpoint, *, clips: int, seed: int, frames: int = 17, height: int = 64, width: int = 64, device: str = "cpu") -> CodecQuality:
    """Measure both codecs on fresh drawn clips of all words."""
    source = torch.Generator().manual_seed(seed)
    scenes = Scenes.random(clips, source, WORDS)
    drawn = (draw(scenes, frames, height, width) * 255).round().to(torch.uint8)
    video = VideoCodec.load(checkpoint, device=device, dtype=torch.float32)
    seen = video.decode(video.encode(drawn.to(device)))
    wave = sound(scenes, frames / FPS)
    audio = AudioCodec.load(checkpoint, device=device)
    latents = audio.encode(wave.to(device), RATE)
    heard, rate = audio.decode(latents)
    heard = resample(heard, rate, RATE)
    length = min(heard.shape[2], wave.shape[2])
    wave, heard = wave[:, :, :length], heard[:, :, :length]
    mels = [log_mel(wave, audio.mel), audio.decode_mel(latents).cpu()]
    frames_both = min(m.shape[2] for m in mels)
    floor = torch.tensor(1e-5).log()
    mels = [m[:, :, :frames_both] - floor for m in mels]
    pitches = [abs((pitch(h, RATE) or 0.0) / list(TONES.values())[int(t)] - 1) for h, t in zip(heard, scenes.tone)]
    return CodecQuality(psnr(seen, drawn), snr(wave, heard), snr(*mels), max(pitches))


@dataclass(frozen=True)
class Asked:
    """Shares of samples that show the asked word."""

    colour: float
    shape: float
    direction: float
    tone: float


def sample(checkpoint: Checkpoint, model: LTXTransformer, texts: Sequence[str], *, steps: int, cfg: float, seed: int, device: str = "cpu", size: tuple[int, int, int] = (17, 64, 64)) -> tuple[Tensor, Tensor, int]:
    """Clips [n, F, H, W, 3] uint8 and sounds [n, 2, N] with their rate, of one prompt each."""
    frames, height, width = size
    contexts = text_contexts(checkpoint, [*texts, ""], torch.device(device))
    count = len(texts)
    rows = lambda c, r: replace(c, video=c.video[r], audio=c.audio[r])  # noqa: E731
    positive, negative = rows(contexts, slice(0, count)), rows(contexts, [count] * count)
    grid = VideoGrid.of_pixels(width, height, frames, FPS, checkpoint.video_factors)
    sounds = checkpoint.audio_grid.of_seconds(frames / FPS)
    blank = [LatentState.blank(g, channels=128, batch=count, device=device) for g in (grid, sounds)]
    guidance = StreamGuidance(Guidance(cfg=cfg), Guidance(cfg=cfg))
    noise = torch.Generator().manual_seed(seed)
    made = denoise(model, video=blank[0], audio=blank[1], positive=positive, negative=negative, schedule=Schedule(sigma_schedule(steps)), guidance=guidance, generator=noise)
    clips = VideoCodec.load(checkpoint, device=device, dtype=torch.float32, encoder=False).decode(made.video.values)
    waves, rate = AudioCodec.load(checkpoint, device=device, encoder=False).decode(made.audio.values)
    return clips, waves, rate


def asked(texts: Sequence[str], clips: Tensor, waves: Tensor, rate: int) -> Asked:
    """How often each word of the captions is seen or heard."""
    hits = torch.zeros(4)
    for text, clip, wave in zip(texts, clips, waves, strict=True):
        words, seen = text.replace(",", "").split(), look(clip)
        found = (seen.colour, seen.shape, seen.direction, tone(pitch(wave, rate)))
        hits += torch.tensor([float(f == words[place]) for f, place in zip(found, (1, 2, 4, 6))])
    return Asked(*(hits / len(texts)).tolist())


def base_quality(checkpoint: Checkpoint, texts: Sequence[str], *, steps: int = 12, cfg: float = 1.0, seed: int = 0, device: str = "cpu") -> Asked:
    """Sample every caption once and measure."""
    model = load_transformer(checkpoint, dtype=torch.float32, device=device)
    return asked(texts, *sample(checkpoint, model, texts, steps=steps, cfg=cfg, seed=seed, device=device))
