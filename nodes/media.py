"""Pictures, sound and clips of a run as ComfyUI's own types: a node's outputs, what it shows, and an image kept for a job."""

from __future__ import annotations

import hashlib
import logging
import os
from pathlib import Path
from typing import Any

import folder_paths
import torch
from comfy_api.latest import InputImpl, io

from . import paths

log = logging.getLogger(__name__)


def media_outputs() -> list[io.Output]:
    """The three sockets of a node that gives a clip; :func:`media_of` fills them."""
    return [
        io.Image.Output("images", display_name="images"),
        io.Audio.Output("audio", display_name="audio"),
        io.Video.Output("video", display_name="video"),
    ]


def media_of(path: Path | None) -> tuple[Any, Any, Any]:
    """(IMAGE, AUDIO, VIDEO) of a sample file; what it has not blocks the nodes behind that socket, without an error."""
    from comfy_execution.graph import ExecutionBlocker

    nothing = ExecutionBlocker(None)
    if path is None:
        return nothing, nothing, nothing
    if path.suffix == ".png":
        return read_picture(path), nothing, nothing
    if path.suffix == ".wav":
        return nothing, read_sound(path), nothing
    video = InputImpl.VideoFromFile(str(path))
    parts = video.get_components()
    return parts.images, parts.audio if parts.audio is not None else nothing, video


def read_picture(path: Path) -> torch.Tensor:
    """[1, H, W, 3] in 0..1."""
    import numpy as np
    from PIL import Image

    with Image.open(path) as picture:
        return torch.from_numpy(np.asarray(picture.convert("RGB")).copy()).float()[None] / 255


def read_sound(path: Path) -> dict[str, Any]:
    """ComfyUI's AUDIO of a sound file."""
    import av
    import numpy as np

    with av.open(str(path)) as container:
        stream = container.streams.audio[0]
        resampler = av.AudioResampler(format="fltp", layout=stream.layout.name, rate=stream.rate)
        pieces = [piece.to_ndarray() for frame in container.decode(stream) for piece in resampler.resample(frame)]
        rate = stream.rate
    return {"waveform": torch.from_numpy(np.concatenate(pieces, axis=1))[None], "sample_rate": rate}


def shown(files: list[Path]) -> dict[str, Any]:
    """What ComfyUI's node shows of files in its output folder."""
    output = folder_paths.get_output_directory()
    one = lambda path: {"filename": path.name, "subfolder": os.path.relpath(path.parent, output), "type": "output"}  # noqa: E731
    sounds = [one(path) for path in files if path.suffix == ".wav"]
    seen = [one(path) for path in files if path.suffix != ".wav"]
    moving = any(path.suffix == ".mp4" for path in files)
    return {**({"images": seen, "animated": (moving,)} if seen else {}), **({"audio": sounds} if sounds else {})}


def picture_of(path: Path, size: int = 512) -> Any:
    """A PIL picture of a sample (the middle of a clip), at most ``size`` wide or high; None for sound or an unreadable file."""
    try:
        picture = _frame_of(path)
    except Exception as error:  # PyAV and Pillow raise a dozen kinds for a damaged file, and a preview must not end a training
        log.debug("LTX Train: no preview of %s: %s", path, error)
        return None
    if picture is not None:
        picture.thumbnail((size, size))
    return picture


def _frame_of(path: Path) -> Any:
    from PIL import Image

    if path.suffix.lower() == ".png":
        with Image.open(path) as picture:
            return picture.convert("RGB")
    if path.suffix.lower() != ".mp4":
        return None
    import av

    with av.open(str(path)) as container:
        stream = container.streams.video[0]
        middle, last = (stream.frames or 1) // 2, None
        for number, frame in enumerate(container.decode(stream)):
            last = frame
            if number >= middle:
                break
        return None if last is None else last.to_image()


def keep_image(image: torch.Tensor) -> Path:
    """An IMAGE's first picture as a PNG among the jobs, named by its content."""
    from PIL import Image

    pixels = image[0, ..., :3].clamp(0, 1).mul(255).round().to(torch.uint8).cpu().numpy()
    path = paths.jobs_root() / "images" / f"{hashlib.sha256(pixels.tobytes()).hexdigest()[:16]}.png"
    if not path.is_file():
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels).save(path)
    return path
