"""What a captioning model is asked, and its caption taken out of what it answers, however it is wrapped or cut off."""

from __future__ import annotations

import json
import re

from ..errors import DataError

KEYS = ("combined_caption_english", "combined_caption", "caption", "description", "text")
"""Names the caption may have in a JSON answer; the official one first."""

VIDEO_INSTRUCTION = """\
Describe this clip in one paragraph of plain English, in the present tense, for training a model that makes video with sound.
Begin with the main subject or action, without an opening such as "The video shows". Say what happens in the order in which it happens:
people and things with their looks, their movements, the place, the light and colours, the framing, angle and movement of the camera,
and the style of the picture. Weave in what is heard at the moment it is heard: speech with its words in quotation marks, the language
and the tone of the voice, music, noises, and silence where there is none. Write only what can be seen or heard; guess nothing.
Answer with JSON alone: {"combined_caption_english": "..."}"""

IMAGE_INSTRUCTION = """\
Describe this picture in one paragraph of plain English, in the present tense, for training a model that makes pictures.
Begin with the main subject, without an opening such as "The image shows". Cover the looks of people and things, the pose, the place,
the light and colours, the framing and angle, and the style. Write only what can be seen; say nothing of sound or movement.
Answer with JSON alone: {"combined_caption_english": "..."}"""

AUDIO_INSTRUCTION = """\
Describe this sound in one paragraph of plain English, in the present tense, for training a model that makes sound.
Cover speech with its words in quotation marks, the language and the tone of the voice, music with its instruments and mood, noises and
the room they are in, in the order in which they are heard. Write only what can be heard; guess nothing.
Answer with JSON alone: {"combined_caption_english": "..."}"""


class NoCaption(DataError):
    """An answer holds no caption; asking again may help."""

    def __init__(self, answer: str) -> None:
        shown = " ".join(answer.split())[:60] or "nothing"
        super().__init__("caption.answer", f"The model's answer holds no caption: {shown}", "Raise max_tokens, switch thinking off, or use another model.")


def parse_caption(answer: str) -> str:
    """The caption in a model's answer: thoughts removed; JSON in a fence or in text, also cut off; else the plain text.

    Raises NoCaption when there is none.
    """
    text = without_thoughts(answer)
    caption = _from_json(text)
    if caption is None:
        caption = _from_cut_json(text)
    if caption is None and "{" not in text[:40]:
        caption = _unfenced(text)
    caption = " ".join((caption or "").split()).strip().strip('"').strip()
    if not caption:
        raise NoCaption(answer)
    return caption


def without_thoughts(answer: str) -> str:
    """Text without <think> parts; one that never ends is all thought, one that never began ends at its mark."""
    text = re.sub(r"<think(?:ing)?>.*?</think(?:ing)?>", "", answer, flags=re.DOTALL | re.IGNORECASE)
    text = re.split(r"</think(?:ing)?>", text, flags=re.IGNORECASE)[-1]
    return re.split(r"<think(?:ing)?>", text, flags=re.IGNORECASE)[0].strip()


def _unfenced(text: str) -> str:
    fenced = re.search(r"```(?:\w+)?\s*\n(.*?)(?:```|$)", text, flags=re.DOTALL)
    return fenced[1] if fenced else text


def _from_json(text: str) -> str | None:
    decoder = json.JSONDecoder(strict=False)  # models put real line breaks into strings
    for match in re.finditer(r"\{", text):
        try:
            value, _ = decoder.raw_decode(text, match.start())
        except json.JSONDecodeError:
            continue
        if isinstance(value, dict) and (found := _caption_of(value)):
            return found
    return None


def _caption_of(value: dict[str, object]) -> str | None:
    lower = {str(k).lower(): v for k, v in value.items()}
    for key in KEYS:
        if isinstance(lower.get(key), str):
            return str(lower[key])
    texts = [v for v in lower.values() if isinstance(v, str)]
    return texts[0] if len(texts) == 1 else None


def _from_cut_json(text: str) -> str | None:
    """The caption of JSON that ends in the middle of it: what is there, to its last whole sentence."""
    for key in KEYS:
        match = re.search(rf'"{key}"\s*:\s*"((?:[^"\\]|\\.)*)', text, flags=re.DOTALL | re.IGNORECASE)
        if match is None or not match[1].strip():
            continue
        cut = match.end() >= len(text.rstrip())
        body = re.sub(r"\\(?:u[0-9a-fA-F]{0,3})?$", "", match[1])  # half an escape at the very end
        value = json.loads(f'"{body}"', strict=False)
        return _whole_sentences(value) if cut else value
    return None


def _whole_sentences(text: str) -> str:
    ends = [m.end() for m in re.finditer(r"[.!?][\"')\]]*(?=\s|$)", text)]
    return text[: ends[-1]] if ends else text
