"""Decoded frames to 8-bit RGB: matrices and ranges, wide gamuts, HLG and PQ tone mapping, transparency."""

from __future__ import annotations

from typing import Any

import numpy as np

BT709, BT601 = 1, 5
_SWS_MATRIX = {1: 1, 4: 4, 5: 5, 6: 5, 7: 7, 9: 9, 10: 9}  # AVColorSpace -> SWS_CS_*
REFERENCE_WHITE = 203.0  # nits of HDR reference white (ITU-R BT.2408)
PEAK = 1000.0
KNEE = 0.5
_BT2020_TO_709 = np.array([[1.660491, -0.587641, -0.072850], [-0.124550, 1.132900, -0.008349], [-0.018151, -0.100579, 1.118730]], np.float32)
"""Linear light, ITU-R BT.2087."""
_P3_TO_709 = np.array([[1.224940, -0.224940, 0.0], [-0.042057, 1.042057, 0.0], [-0.019638, -0.078636, 1.098274]], np.float32)
"""Linear light, from the primaries of SMPTE EG 432-1 (Display P3) and BT.709, both of white D65."""
GAMUTS = {"bt2020": _BT2020_TO_709, "p3": _P3_TO_709}
_LUMA_2020 = np.array([0.2627, 0.6780, 0.0593], np.float32)


def source_matrix(frame: Any) -> int:
    """swscale's name of the frame's matrix; untagged is BT.709 from 720 lines on, else BT.601 (what players assume)."""
    return _SWS_MATRIX.get(int(frame.colorspace), BT709 if frame.height >= 720 else BT601)


def source_range(frame: Any) -> int:
    """1 = limited, 2 = full."""
    if int(frame.color_range) == 2 or frame.format.name.startswith("yuvj"):
        return 2
    return 1


def _convert(frame: Any, form: str, width: int | None = None, height: int | None = None) -> np.ndarray:
    from av.video.reformatter import Interpolation

    # swscale's quick way truncates and doubles chroma: 3 levels off on average, darker by 1.3; this one is 0.7 off and unbiased
    exact = Interpolation.ACCURATE_RND | Interpolation.FULL_CHR_H_INT
    arguments: dict[str, Any] = {"format": form, "width": width, "height": height, "interpolation": Interpolation.BILINEAR | exact, "threads": 1}
    if not frame.format.is_rgb and not frame.format.name.startswith(("gray", "pal", "mono")):
        arguments |= {"src_colorspace": source_matrix(frame), "src_color_range": source_range(frame), "dst_color_range": 2}
    elif frame.format.name.startswith("gray"):
        arguments |= {"src_color_range": source_range(frame), "dst_color_range": 2}
    if width is not None:
        arguments["interpolation"] = Interpolation.BICUBIC | exact
    return frame.reformat(**arguments).to_ndarray()


def rgb(frame: Any, width: int | None = None, height: int | None = None) -> np.ndarray:
    """[H, W, 3] uint8 full-range RGB of a decoded standard-range frame, scaled (antialiased bicubic) on the way if a size is given."""
    return _convert(frame, "rgb24", width, height)


def rgba(frame: Any) -> np.ndarray:
    """[H, W, 4] uint8."""
    return _convert(frame, "rgba")


def composite(pixels: np.ndarray, colour: tuple[int, int, int]) -> np.ndarray:
    """[H, W, 4] uint8 over a colour -> [H, W, 3] uint8, rounded."""
    alpha = pixels[..., 3:].astype(np.uint32)
    mixed = pixels[..., :3] * alpha + np.array(colour, np.uint32) * (255 - alpha)
    return ((mixed + 127) // 255).astype(np.uint8)


def hdr_to_rgb(frame: Any, transfer: str, width: int, height: int) -> np.ndarray:
    """[height, width, 3] uint8 standard range of an HLG or PQ frame, scaled on the way so that little is in float."""
    signal = _convert(frame, "rgb48le", width, height).astype(np.float32) / 65535.0
    return tone_map(signal, transfer)


def wide_to_rgb(frame: Any, gamut: str, width: int, height: int) -> np.ndarray:
    """[height, width, 3] uint8 BT.709 of a standard-range frame in a wider gamut, scaled on the way."""
    return narrow(_convert(frame, "rgb48le", width, height).astype(np.float32) / 65535.0, gamut)


def narrow(signal: np.ndarray, gamut: str) -> np.ndarray:
    """Non-linear signal [..., 3] in 0..1 of a wide gamut ("bt2020" or "p3") -> uint8 BT.709; what lies outside is clipped, grey stays grey."""
    light = np.clip(signal, 0.0, 1.0) ** 2.4 @ GAMUTS[gamut].T
    return np.rint(255.0 * np.clip(light, 0.0, 1.0) ** (1 / 2.4)).astype(np.uint8)


def tone_map(signal: np.ndarray, transfer: str) -> np.ndarray:
    """Non-linear BT.2020 signal [..., 3] in 0..1 -> uint8 BT.709 for a display of gamma 2.4.

    Light in nits over the reference white of 203; up to half of it is kept, above it rolls off so that the peak
    (1000 nits; what is brighter clips) becomes white. The roll-off works on the largest channel, which keeps hues.
    """
    nits = hlg_to_nits(signal) if transfer == "hlg" else pq_to_nits(signal)
    light = np.maximum(nits / REFERENCE_WHITE @ _BT2020_TO_709.T, 0.0)
    top = np.maximum(light.max(axis=-1, keepdims=True), 1e-9)
    light = light * (roll_off(top) / top)
    return np.rint(255.0 * np.clip(light, 0.0, 1.0) ** (1 / 2.4)).astype(np.uint8)


def roll_off(light: np.ndarray) -> np.ndarray:
    """Identity to the knee, then (x-k)/(1+c(x-k)) above it: slope 1 at the knee, 1 at the peak."""
    over = np.maximum(light - KNEE, 0.0)
    bend = 1 / (1 - KNEE) - 1 / (PEAK / REFERENCE_WHITE - KNEE)
    return np.where(light <= KNEE, light, KNEE + over / (1 + bend * over))


def pq_to_nits(signal: np.ndarray) -> np.ndarray:
    """SMPTE ST 2084 EOTF."""
    m1, m2, c1, c2, c3 = 2610 / 16384, 2523 / 32, 3424 / 4096, 2413 / 128, 2392 / 128
    power = np.clip(signal, 0, 1) ** np.float32(1 / m2)
    return 10000.0 * (np.maximum(power - c1, 0) / (c2 - c3 * power)) ** np.float32(1 / m1)


def hlg_to_nits(signal: np.ndarray) -> np.ndarray:
    """ARIB STD-B67 inverse OETF, then the BT.2100 OOTF of a 1000 nit display (gamma 1.2)."""
    a, b, c = 0.17883277, 0.28466892, 0.55991073
    signal = np.clip(signal, 0, 1)
    scene = np.where(signal <= 0.5, signal**2 / 3, (np.exp((signal - c) / a) + b) / 12).astype(np.float32)
    luminance = np.maximum(scene @ _LUMA_2020, 1e-9)[..., None]
    return PEAK * scene * luminance**0.2
