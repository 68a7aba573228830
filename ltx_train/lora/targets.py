"""Which modules an adapter touches: named groups, patterns, the stream that a module belongs to."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from ..errors import ConfigError, nearest

_QKVO = ("to_q", "to_k", "to_v", "to_out.0")
_FF = ("net.0.proj", "net.2")


def _of(parts: Iterable[str], leaves: Iterable[str]) -> tuple[str, ...]:
    leaves = tuple(leaves)
    return tuple(f"{part}.{leaf}" for part in parts for leaf in leaves)


_VIDEO_ATTENTION = _of(("attn1", "attn2"), _QKVO)
_AUDIO_ATTENTION = _of(("audio_attn1", "audio_attn2"), _QKVO)
_CROSS = _of(("audio_to_video_attn", "video_to_audio_attn"), _QKVO)

TARGET_GROUPS: dict[str, tuple[str, ...]] = {
    "attention": _QKVO,
    "ff": _of(("ff", "audio_ff"), _FF),
    "text": _of(("attn2", "audio_attn2"), _QKVO),
    "self_attention": _of(("attn1", "audio_attn1"), _QKVO),
    "video": _VIDEO_ATTENTION + _of(("ff",), _FF),
    "video_attention": _VIDEO_ATTENTION,
    "video_ff": _of(("ff",), _FF),
    "audio": _AUDIO_ATTENTION + _of(("audio_ff",), _FF),
    "audio_attention": _AUDIO_ATTENTION,
    "audio_ff": _of(("audio_ff",), _FF),
    "cross_modal": _CROSS,
    "gates": ("to_gate_logits",),
}
"""Names that may stand in target_modules for a list of patterns."""

STREAMS = ("video", "audio")


def matches(name: str, pattern: str) -> bool:
    """Whether a module name fits a pattern: exactly, or as its last path parts (the rule of the official trainer and peft).

    A group name stands for its patterns; ``re:...`` is a regular expression over the whole name.
    """
    if pattern.startswith("re:"):
        try:
            return re.fullmatch(pattern[3:], name) is not None
        except re.error as error:
            raise ConfigError("lora.target_pattern", f"lora.target_modules: {pattern} is no regular expression: {error}.", "A dot, a bracket or a star that is meant itself needs a backslash.") from error
    if pattern in TARGET_GROUPS:
        return any(matches(name, part) for part in TARGET_GROUPS[pattern])
    return name == pattern or name.endswith("." + pattern)


def stream_of(name: str) -> str:
    """``video``, ``audio``, or ``cross`` (needs both streams), from the module's name alone."""
    parts = name.split(".")
    if any(part in ("audio_to_video_attn", "video_to_audio_attn") or part.startswith("av_ca_") for part in parts):
        return "cross"
    return "audio" if any(part.startswith("audio_") for part in parts) else "video"


def in_streams(name: str, streams: Iterable[str]) -> bool:
    """Whether a module works when only these streams are there: cross-modal ones need both."""
    have = set(streams)
    assert have and have <= set(STREAMS), streams
    return have == set(STREAMS) or stream_of(name) in have


def select(names: Iterable[str], targets: Iterable[str], exclude: Iterable[str], streams: Iterable[str]) -> list[str]:
    """The names that some target matches and no exclusion does, within the streams that are there, in module order.

    Raises ConfigError ``lora.no_match`` naming the nearest modules when nothing matches.
    """
    names, targets, exclude, streams = list(names), list(targets), list(exclude), list(streams)
    found = [n for n in names if any(matches(n, t) for t in targets) and not any(matches(n, e) for e in exclude)]
    kept = [n for n in found if in_streams(n, streams)]
    if kept:
        return kept
    if found:
        raise ConfigError(
            "lora.no_match",
            f"lora.target_modules match only modules of a stream that is not trained ({stream_of(found[0])}).",
            f"Trained streams: {', '.join(streams)}. Matched: {', '.join(found[:3])}. Target the group video or attention, or use data with sound.",
        )
    raise ConfigError("lora.no_match", f"No module of this model matches lora.target_modules {_short(targets)}.", _near(targets, names))


def unmatched(names: Iterable[str], targets: Iterable[str]) -> list[str]:
    """Targets that match no name at all, to warn about."""
    names = list(names)
    return [t for t in targets if not any(matches(n, t) for n in names)]


def without_effect(names: Iterable[str], chosen: Iterable[str], fields: Mapping[str, Iterable[str]]) -> list[str]:
    """Patterns that change nothing, each with its field, to warn about: ``rank_pattern: to_kk``.

    fields: patterns by field name; those of target and exclude_modules count all ``names``, the others what is ``chosen``.
    """
    names, chosen = list(names), list(chosen)
    return [f"{field}: {p}" for field, patterns in fields.items() for p in unmatched(names if field.endswith("_modules") else chosen, patterns)]


def _short(targets: list[str]) -> str:
    text = ", ".join(targets)
    return text if len(text) <= 50 else text[:47] + "..."


def _near(targets: list[str], names: list[str]) -> str:
    """The nearest things one can write: groups and the ends of module names, block numbers left out."""
    ends: dict[str, None] = dict.fromkeys(TARGET_GROUPS)
    for name in names:
        parts = re.sub(r"^transformer_blocks\.\d+\.", "", name).split(".")
        for start in range(len(parts)):
            ends[".".join(parts[start:])] = None
    lines = [f"{target}: {', '.join(nearest(target.rpartition(':')[2], list(ends), 4)) or 'nothing near'}" for target in targets[:5]]
    return "Nearest names: " + "; ".join(lines) + f". Groups: {', '.join(TARGET_GROUPS)}."
