"""Captions through an OpenAI-compatible chat endpoint (vLLM, llama.cpp, Gemini's, any other), at an allowed address."""

from __future__ import annotations

import http.client
import ipaddress
import json
import os
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit

from pydantic import Field

from ..errors import ConfigError, DataError, LtxTrainError
from ..section import Section
from .answers import AUDIO_INSTRUCTION, IMAGE_INSTRUCTION, VIDEO_INSTRUCTION, NoCaption, parse_caption
from .clips import Excerpt, data_url, jpegs, mp4, read_excerpt, wav

KEY_VARIABLE = "LTX_TRAIN_CAPTION_KEY"
HOSTS_VARIABLE = "LTX_TRAIN_CAPTION_HOSTS"
GEMINI = "https://generativelanguage.googleapis.com/v1beta/openai"
HOST_KEYS = {"generativelanguage.googleapis.com": "GEMINI_API_KEY", "api.openai.com": "OPENAI_API_KEY"}
"""A key made for one service goes to that service alone."""
AGAIN = (408, 409, 425, 429, 500, 502, 503, 504)
HOPELESS = (401, 403, 404, 405)
LARGEST = 64 << 20  # bytes of an answer that are read


class EndpointError(LtxTrainError):
    """The endpoint itself cannot be used: no clip would get a caption from it."""


class EndpointCaptioner(Section):
    """A chat endpoint with sight and hearing. Keys come from the environment alone."""

    kind: Literal["endpoint"] = "endpoint"
    url: str = Field("http://127.0.0.1:8001/v1", description="Base address of the API; its host must be this machine or an allowed one.")
    model: str = Field("Qwen/Qwen3-Omni-30B-A3B-Thinking", description="The model's name at the endpoint.")
    max_tokens: int = Field(4096, ge=16, le=131072, description="Longest answer, thoughts included.")
    thinking: bool | None = Field(None, description="Switch thinking on or off where the server's chat template knows it; None leaves it.")
    send: Literal["frames", "video"] = Field("video", description="video: an inline mp4; frames: pictures, which more servers take.")
    sound: bool = Field(True, description="Send the sound as 16 kHz mono WAV.")
    fps: float = Field(2.0, gt=0, le=60, description="Frames a second that are sent.")
    max_frames: int = Field(64, ge=1, le=1024, description="Most frames that are sent.")
    side: int = Field(512, ge=64, le=4096, description="Longer side of what is sent, in pixels.")
    instruction: str | None = Field(None, description="What is asked of videos and sounds; None is a paragraph of picture and sound.")
    image_instruction: str | None = Field(None, description="What is asked of pictures; None is a paragraph.")
    temperature: float = Field(0.0, ge=0, le=2, description="0 answers the same each time.")
    repetition_penalty: float | None = Field(1.05, gt=0, description="vLLM's repetition_penalty; None leaves it out.")
    timeout: float = Field(300.0, gt=0, description="Seconds to wait for one answer.")
    retries: int = Field(3, ge=0, le=20, description="Times a request is tried again.")
    pause: float = Field(1.0, ge=0, description="Seconds before the first retry; each further one waits twice as long.")

    def build(self, allowed: frozenset[str] = frozenset()) -> Endpoint:
        """The captioner; raises ConfigError when the address is not allowed (see :func:`check_address`)."""
        check_address(self.url, allowed)
        return Endpoint(self)

    @property
    def name(self) -> str:
        return f"{self.model} at {host_of(self.url)}"


def host_of(url: str) -> str:
    """The host of an address; empty where it is no http(s) address with one, a port that can be, and plain letters."""
    try:
        parts = urlsplit(url)
        sound = parts.scheme in ("http", "https") and parts.port != 0 and not (parts.username or parts.password or parts.query or parts.fragment)
        plain = url.isascii() and url.isprintable() and " " not in url
    except ValueError:  # brackets that do not close, a port above 65535 or in letters
        return ""
    return (parts.hostname or "").lower() if sound and plain else ""


def check_address(url: str, allowed: frozenset[str] = frozenset()) -> None:
    """Raise ConfigError unless the address is on this machine, in ``allowed`` (host or host:port) or in LTX_TRAIN_CAPTION_HOSTS.

    Clips leave this machine for it, and a workflow from somebody else must not choose where they go.
    """
    host = host_of(url)
    if not host:
        raise ConfigError("caption.url", f"The address '{url[:60]}' is no http(s) address.", "Write it as http://127.0.0.1:8001/v1, in plain letters without spaces; keys come from the environment.")
    listed = {h.strip().lower() for h in os.environ.get(HOSTS_VARIABLE, "").split(",") if h.strip()} | {h.lower() for h in allowed}
    if _own(host) or host in listed or f"{host}:{urlsplit(url).port}" in listed:
        return
    raise ConfigError(
        "caption.host", f"The captioning host {host} is not allowed: clips would be sent to it.", f"Set {HOSTS_VARIABLE}={host} (several with commas) before starting, if you trust it."
    )


def _own(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


class Endpoint:
    """A checked endpoint: ``caption(path, sound=None) -> str``. Safe for several threads."""

    def __init__(self, settings: EndpointCaptioner, wait: Callable[[float], None] = time.sleep) -> None:
        self.settings, self.wait = settings, wait
        host = host_of(settings.url)
        own = HOST_KEYS.get(host)
        self.key = _key(KEY_VARIABLE) or (_key(own) if own else "")
        handlers: list[Any] = [_NoRedirect()]
        if _own(host):
            handlers.append(urllib.request.ProxyHandler({}))
        self.opener = urllib.request.build_opener(*handlers)

    def caption(self, path: Path, sound: Path | None = None) -> str:
        """The caption of one file; raises DataError for this clip's faults, EndpointError when no clip would fare better."""
        s = self.settings
        excerpt = read_excerpt(path, fps=s.fps, most=s.max_frames, side=s.side, with_sound=s.sound, sound=sound)
        body = self.body(excerpt)
        for attempt in range(s.retries + 1):
            try:
                return parse_caption(self.ask(body))
            except NoCaption:
                if attempt == s.retries:
                    raise
                body = {**body, "temperature": max(s.temperature, 0.3)}  # the same question at 0 has the same answer
        raise AssertionError("the last attempt returns or raises")

    def body(self, excerpt: Excerpt) -> dict[str, Any]:
        """The request about an excerpt."""
        s = self.settings
        question = {"image": s.image_instruction or IMAGE_INSTRUCTION, "audio": s.instruction or AUDIO_INSTRUCTION}.get(excerpt.kind, s.instruction or VIDEO_INSTRUCTION)
        content: list[dict[str, Any]] = []
        if excerpt.kind == "video" and s.send == "video":
            content.append({"type": "video_url", "video_url": {"url": data_url("video/mp4", mp4(excerpt.frames, excerpt.fps))}})
        elif excerpt.frames is not None:
            content += [{"type": "image_url", "image_url": {"url": data_url("image/jpeg", picture)}} for picture in jpegs(excerpt.frames)]
        if excerpt.kind == "video" and s.send == "frames":
            question = f"The {len(excerpt.frames)} pictures are frames of one clip, {1 / excerpt.fps:.2f} seconds apart.\n{question}"
        if excerpt.sound is not None:
            content.append({"type": "input_audio", "input_audio": {"data": data_url("", wav(excerpt.sound)).split(",", 1)[1], "format": "wav"}})
        content.append({"type": "text", "text": question})
        body: dict[str, Any] = {"model": s.model, "messages": [{"role": "user", "content": content}], "max_tokens": s.max_tokens, "temperature": s.temperature}
        if s.repetition_penalty is not None:
            body["repetition_penalty"] = s.repetition_penalty
        if s.thinking is not None:
            body["chat_template_kwargs"] = {"enable_thinking": s.thinking}
        return body

    def ask(self, body: dict[str, Any]) -> str:
        """The text of the endpoint's answer, tried again after busy and broken connections."""
        s = self.settings
        request = urllib.request.Request(f"{s.url.rstrip('/')}/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json", "User-Agent": "ltx-train"})
        if self.key:
            request.add_unredirected_header("Authorization", f"Bearer {self.key}")
        pause = s.pause
        for attempt in range(s.retries + 1):
            last = attempt == s.retries
            try:
                with self.opener.open(request, timeout=s.timeout) as response:
                    return _content(response.read(LARGEST))
            except urllib.error.HTTPError as error:
                if error.code not in AGAIN or last:
                    raise self.refused(error) from error
                pause = _retry_after(error, pause)
            except (urllib.error.URLError, OSError, http.client.HTTPException) as error:
                if last:
                    reason = "not as a web server does" if isinstance(error, http.client.HTTPException) and not isinstance(error, OSError) else getattr(error, "reason", error)
                    raise EndpointError("caption.unreachable", f"The captioning endpoint {s.url} does not answer: {reason}"[:118], "Start its server, or correct the address.") from error
            self.wait(pause)
            pause *= 2
        raise AssertionError("the last attempt returns or raises")

    def refused(self, error: urllib.error.HTTPError) -> LtxTrainError:
        """What an HTTP error means: for this clip, or for all."""
        said = " ".join(error.read(4096).decode("utf-8", "replace").split())[:300]
        if 300 <= error.code < 400:
            return EndpointError("caption.redirect", f"The endpoint sends elsewhere (HTTP {error.code}); that is not followed.", "Give the final address, and allow its host.")
        if error.code in HOPELESS:
            hint = f"Set the key in the environment variable {KEY_VARIABLE}." if error.code in (401, 403) else "Check the address (it usually ends in /v1) and the model's name."
            return EndpointError("caption.refused", f"The captioning endpoint refuses (HTTP {error.code}).", f"{hint} It says: {said}")
        return DataError("caption.refused", f"The endpoint refuses this clip (HTTP {error.code}): {said}"[:118], "Send frames instead of video, fewer or smaller ones, or no sound.")


def _key(variable: str) -> str:
    """A key of the environment, without the line break that a file of one ends in."""
    key = os.environ.get(variable, "").strip()
    if not (key.isascii() and key.isprintable()):
        raise ConfigError("caption.key", f"The key in {variable} holds letters that no key has.", "Set the variable again, to the key alone.")
    return key


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """A redirect could take clips and keys to a host nobody allowed."""

    def redirect_request(self, *args: Any, **kwargs: Any) -> None:
        return None


def _retry_after(error: urllib.error.HTTPError, pause: float) -> float:
    said = error.headers.get("Retry-After", "")
    return max(pause, min(float(said), 120.0)) if said.strip().isdigit() else pause


def _content(raw: bytes) -> str:
    """The text of a chat completion; raises NoCaption when it has none."""
    try:
        message = json.loads(raw)["choices"][0]["message"]
        content = message.get("content")
    except (json.JSONDecodeError, UnicodeDecodeError, KeyError, IndexError, TypeError, AttributeError) as error:
        raise NoCaption(raw[:200].decode("utf-8", "replace")) from error
    if isinstance(content, list):  # parts, as some servers give them
        content = "".join(str(part.get("text", "")) for part in content if isinstance(part, dict))
    return str(content or "")
