"""Pictures through Pillow: EXIF orientation, palettes, 16 bits, colour profiles, animations."""

from __future__ import annotations

import io
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .findings import MediaError
from .orientation import Orientation, exif_orientation
from .probe import animation_times


@dataclass(frozen=True)
class Timed:
    """A decoded frame with its start in seconds on the file's clock."""

    seconds: float
    frame: Any


def read_still(path: Path) -> np.ndarray:
    """[H, W, 3 or 4] uint8 sRGB, upright; 4 channels when the picture has transparency."""
    from PIL import Image, UnidentifiedImageError

    try:
        with Image.open(path) as image:
            image.load()
            turn = exif_orientation(image)
            pixels = to_array(image)
    except UnidentifiedImageError as error:
        raise MediaError("media.unreadable", f"{path.name} is no picture that can be read.") from error
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        code = "media.truncated" if "truncated" in str(error).lower() else "media.decode"
        raise MediaError(code, f"{path.name} cannot be read: {str(error)[:70]}") from error
    return upright(torch.from_numpy(pixels), turn).contiguous().numpy()


def to_array(image: Any) -> np.ndarray:
    """One Pillow image as [H, W, 3 or 4] uint8 sRGB."""
    if image.mode.startswith("I") or image.mode == "F":
        values = np.nan_to_num(np.asarray(image).astype(np.float32), nan=0.0)
        scale = 1.0 if image.mode == "F" and values.max() > 1.0 else (255.0 if image.mode == "F" else 255.0 / 65535.0)
        grey = np.rint(np.clip(values * scale, 0, 255)).astype(np.uint8)
        return np.repeat(grey[..., None], 3, axis=-1)
    transparent = "A" in image.getbands() or "transparency" in image.info
    converted = _to_srgb(image).convert("RGBA" if transparent else "RGB")
    return np.array(converted)


def _to_srgb(image: Any) -> Any:
    """Colours of a wide profile (Display P3 of phones, CMYK of print) brought to sRGB; unknown profiles are left."""
    profile = image.info.get("icc_profile")
    if not profile or image.mode not in ("RGB", "RGBA", "CMYK"):
        return image
    from PIL import ImageCms

    try:
        source = ImageCms.ImageCmsProfile(io.BytesIO(profile))
        if "srgb" in ImageCms.getProfileDescription(source).lower():
            return image
        return ImageCms.profileToProfile(image, source, ImageCms.createProfile("sRGB"), outputMode="RGBA" if image.mode == "RGBA" else "RGB")
    except (ImageCms.PyCMSError, OSError):
        return image  # a damaged profile: the numbers as they are, as viewers do


def animation_frames(path: Path) -> Iterator[Timed]:
    """Frames of a GIF, WebP or APNG with their times; each [H, W, 3 or 4] uint8."""
    from PIL import Image

    try:
        with Image.open(path) as image:
            times = animation_times(image, image.n_frames)
            for n, seconds in enumerate(times[:-1]):
                image.seek(n)
                yield Timed(seconds, to_array(image))
    except (OSError, SyntaxError, ValueError, EOFError) as error:
        raise MediaError("media.decode", f"{path.name}: decoding stopped: {str(error)[:60]}") from error


def upright(image: Tensor, turn: Orientation) -> Tensor:
    """[H, W, C] mirrored and turned clockwise as ``turn`` says."""
    if turn.mirrored:
        image = image.flip(1)
    return torch.rot90(image, -turn.degrees // 90 % 4, (0, 1)) if turn.degrees else image
