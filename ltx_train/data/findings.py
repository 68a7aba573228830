"""Findings: what the report says about a clip, as permanent codes with a fix each."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from ..errors import DataError


class Kind(NamedTuple):
    """refused: the clip cannot be used. fix: what the user can do."""

    refused: bool
    fix: str


CODES: dict[str, Kind] = {
    # sources
    "media.missing": Kind(True, "Correct the path in the dataset file; relative paths start at the folder of that file."),
    "role.missing": Kind(True, "Correct the path of the role, or remove the column."),
    "role.unpaired": Kind(True, "Add a file of the same stem to the role's folder, or remove the clip."),
    "row.no_media": Kind(True, "Give each row a video (media_path), an image or an audio file."),
    "row.broken": Kind(True, "Correct this line of the dataset file."),
    "caption.missing": Kind(True, "Write a caption (.txt beside the clip or the caption column), or choose another caption policy."),
    "caption.guessed_encoding": Kind(False, "The text is not UTF-8: it was read as Windows-1252. Save it as UTF-8 to be sure."),
    "caption.long": Kind(False, "The text encoder reads 1,024 tokens (T5: 256); the rest of the caption is cut off."),
    "repeats.folder": Kind(False, "Repeats come from the folder's name (N_name); set kohya_repeats to false if that is not meant."),
    # files
    "media.empty": Kind(True, "The file has 0 bytes: copy it again."),
    "media.unreadable": Kind(True, "No decoder knows this file: open it in a player, convert it to mp4, or remove it."),
    "media.heif": Kind(True, "Install it (pip install pillow-heif) into the Python that trains, or save the photo as JPEG or PNG."),
    "media.too_large": Kind(True, "Make the picture smaller: a bucket's size is all that is used of it."),
    "media.truncated": Kind(True, "The file ends before its index says it does: copy or download it again."),
    "media.no_frames": Kind(True, "The file holds neither pictures nor sound that can be decoded."),
    "media.decode": Kind(True, "Decoding stopped with an error: the file is damaged; convert or copy it again."),
    "media.short": Kind(True, "Fewer frames could be decoded than the header says: the file is damaged or cut off."),
    "media.extension": Kind(False, "The content is of another kind than the extension says; the content is used."),
    "media.streams": Kind(False, "The file has several streams of a kind; the default one is used."),
    "media.rotated": Kind(False, "The clip is stored rotated; it is turned upright."),
    "media.variable_rate": Kind(False, "The frame rate varies; frames are picked by their timestamps at a constant rate."),
    "media.timestamps": Kind(False, "Timestamps run backwards or are missing; frames are taken in order at the nominal rate."),
    "media.interlaced": Kind(False, "The clip is interlaced; it is deinterlaced."),
    "media.sample_aspect": Kind(False, "Pixels are not square; the picture is stretched to its true shape."),
    "media.hdr": Kind(False, "HDR (HLG or PQ) is tone-mapped to standard range."),
    "media.wide_gamut": Kind(False, "The colours are of a wider gamut (BT.2020 or P3); they are converted to BT.709."),
    "media.hdr_refused": Kind(True, "HDR clips are refused by the data settings: set hdr to tone_map, or convert the clip."),
    "media.alpha": Kind(False, "Transparency is composited on the chosen colour, or used as loss mask, as set."),
    "media.grey": Kind(False, "The picture has no colour."),
    # sound
    "audio.none": Kind(False, "The clip has no sound; it counts for the video loss only."),
    "audio.short": Kind(False, "The sound ends before the picture; the rest is silence."),
    "audio.silent": Kind(False, "The sound is all silence: it teaches silence. Set audio to off, or remove the sound of this clip."),
    "audio.decode": Kind(True, "The sound cannot be decoded: convert it, or leave sound out (audio: off)."),
    "audio.values": Kind(True, "The file was damaged or wrongly converted: export its sound again as 16-bit or float with a peak of 1."),
    "audio.too_short": Kind(True, "The sound is shorter than every duration asked for: add a shorter duration."),
    # buckets
    "bucket.too_short": Kind(True, "Add a bucket with fewer frames (8n+1), or lower the target rate."),
    "bucket.no_still": Kind(True, "Add a bucket of one frame, such as 768x512x1 (or 768x512)."),
    "bucket.as_still": Kind(False, "The clip is too short for every bucket of several frames; one frame of it is used as a still."),
    "bucket.upscaled": Kind(False, "The clip is smaller than its bucket and is enlarged; a smaller bucket would be sharper."),
    "bucket.crop": Kind(False, "More than a third of the picture is cropped away: add a bucket of the clip's shape."),
    "frames.unused": Kind(False, "Only part of the clip is used: frame_selection all, uniform or sliding uses more."),
    "frames.repeated": Kind(False, "The clip has fewer frames a second than clips.fps: some are shown twice, which teaches stutter. Lower clips.fps, or leave it out."),
    # what the model makes of it
    "latents.values": Kind(True, "The VAE gave values that are no numbers: try acceleration.mixed_precision_mode bf16 or no, and another copy of the VAE's file."),
    # roles
    "reference.short": Kind(False, "The reference ends before the clip; its last frame is held."),
    "reference.shape": Kind(False, "The reference has another shape than the clip; it is cropped by itself."),
    "reference.grid": Kind(True, "Choose downscale and temporal factors that keep the reference on the latent grid."),
    "mask.shape": Kind(True, "Save the mask on the latent grid of the clip's bucket, or give it as a picture or video."),
    "mask.empty": Kind(False, "The mask is all black or all white on the latent grid."),
}
"""Every finding code with its severity and fix; codes are permanent."""


@dataclass(frozen=True)
class Finding:
    """One thing worth knowing about a clip: a code of :data:`CODES` and a sentence with this clip's values."""

    code: str
    message: str

    def __post_init__(self) -> None:
        assert self.code in CODES, self.code

    @property
    def refused(self) -> bool:
        """True when the clip cannot be used."""
        return CODES[self.code].refused

    @property
    def fix(self) -> str:
        return CODES[self.code].fix


class MediaError(DataError):
    """A file cannot be used; its code is a finding code."""

    def __init__(self, code: str, message: str) -> None:
        assert code in CODES, code
        super().__init__(code, message, CODES[code].fix)

    @property
    def finding(self) -> Finding:
        return Finding(self.code, self.message)
