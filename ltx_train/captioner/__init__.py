"""Captions written for you: through an OpenAI-compatible endpoint or a local audio-visual model, into a file you can edit."""

from .endpoint import EndpointCaptioner
from .job import Captioned, CaptionJob, caption_dataset
from .local import LocalCaptioner

__all__ = ["CaptionJob", "Captioned", "EndpointCaptioner", "LocalCaptioner", "caption_dataset"]
