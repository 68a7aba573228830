"""HTTP routes for the web client: runs, events, samples, what a model file is; stop, save, sample. No path leaves ComfyUI's folders."""

from __future__ import annotations

import asyncio
import errno
import logging
from pathlib import Path
from typing import Any
from urllib.parse import quote

from aiohttp import web

from ..ltx_train.errors import LtxTrainError
from ..ltx_train.runs.event_log import finite, read_events
from ..ltx_train.runs.run_dir import CONTROLS, RunDir, Status, list_runs
from . import paths
from .follow import plain

log = logging.getLogger(__name__)
BATCH = 4 * 2**20
"""Bytes of events in one answer; the client asks again from the offset it got."""
TOLD = {"state", "kind", "phase", "step", "total", "loss", "started", "ended", "error", "hint", "attempt", "notch"}
SAMPLE_TYPES = {".mp4": "video/mp4", ".png": "image/png", ".wav": "audio/wav"}


def register() -> None:
    """Add the routes to ComfyUI's server."""
    from server import PromptServer

    add(PromptServer.instance.routes)
    if quote(paths.PACK.name) != paths.PACK.name:
        serve_web(PromptServer.instance.routes, paths.PACK)


def serve_web(routes: web.RouteTableDef, pack: Path) -> None:
    """The pack's scripts and help pages where its folder's name has a space or an umlaut.

    ComfyUI serves them as static files; newer aiohttp (seen with 3.14) compares a static prefix in its quoted form with
    the path in its plain form, and finds nothing for such names.
    """

    @routes.get("/extensions/{pack}/{file:.+}")
    async def file(request: web.Request) -> web.StreamResponse:
        folder = pack / "web"
        path = folder / request.match_info["file"]
        try:
            found = request.match_info["pack"] == pack.name and paths.inside(folder, path) and path.is_file()
        except OSError:  # a name that no disk takes
            found = False
        if not found:
            raise web.HTTPNotFound
        return web.FileResponse(path)


def add(routes: web.RouteTableDef) -> None:
    """The table of routes; kept apart from the server so that tests can serve it."""

    @routes.get("/ltx_train/runs")
    async def runs(_: web.Request) -> web.Response:
        return await _answer(lambda: {"runs": _runs()})

    @routes.get("/ltx_train/runs/{name}/events")
    async def events(request: web.Request) -> web.Response:
        offset = _offset(request.query.get("offset", "0"))
        return await _answer(lambda: _events(request.match_info["name"], offset))

    @routes.get("/ltx_train/runs/{name}/samples/{file}")
    async def sample(request: web.Request) -> web.StreamResponse:
        try:
            path = await asyncio.to_thread(_sample, request.match_info["name"], request.match_info["file"])
        except LtxTrainError as error:
            return _refused(error, 404)
        except OSError as error:
            return _unusable(error)
        return web.FileResponse(path, headers={"Content-Type": SAMPLE_TYPES[path.suffix], "X-Content-Type-Options": "nosniff"})

    @routes.post("/ltx_train/runs/{name}/{control}")
    async def control(request: web.Request) -> web.Response:
        return await _answer(lambda: _control(request.match_info["name"], request.match_info["control"]))

    @routes.get("/ltx_train/inspect")
    async def inspect(request: web.Request) -> web.Response:
        given = {name: str(request.query.get(name, ""))[:500] for name in ("model", "text_encoder", "video_vae", "audio_vae")}
        return await _answer(lambda: _inspect(given))


async def _answer(work: Any) -> web.Response:
    """The work's result as JSON, done beside the event loop; our errors as 4xx with their words."""
    try:
        return web.json_response(await asyncio.to_thread(work))
    except LtxTrainError as error:
        return _refused(error, 404 if error.code.endswith(("missing", "name")) else 400)
    except OSError as error:
        return _unusable(error)


def _refused(error: LtxTrainError, status: int) -> web.Response:
    return web.json_response({"error": error.code, "message": error.message, "hint": error.hint}, status=status)


def _unusable(error: OSError) -> web.Response:
    """A file that the disk refuses, told by its name alone: 404 for a name under which nothing can be, else 400."""
    name, gone = Path(str(error.filename or "a file")).name[:60], error.errno in (errno.ENAMETOOLONG, errno.ENOENT, errno.ENOTDIR)
    words = f"There is no {name}." if gone else f"{name} cannot be read: {error.strerror or 'the disk refused'}."
    return _refused(LtxTrainError("file.missing" if gone else "file.unusable", words, "Look into the run's folder on the server."), 404 if gone else 400)


def _offset(text: str) -> int:
    return int(text) if text.isascii() and text.isdigit() and len(text) < 16 else 0


def told(status: Status) -> dict[str, Any]:
    """A status for the web client: no host names, no process numbers."""
    return status.model_dump(mode="json", include=TOLD)


def _runs() -> list[dict[str, Any]]:
    found = []
    for run in list_runs(paths.runs_root()):
        if run.name.startswith(".") or not paths.inside(paths.runs_root(), run.path):
            continue
        try:
            found.append({"name": run.name, **told(run.status())})
        except (LtxTrainError, OSError) as error:
            log.debug("LTX Train: %s", error)
    return found


def _events(name: str, offset: int) -> dict[str, Any]:
    run = RunDir(paths.existing_run(name))
    batch = read_events(run.events_path, offset)
    return {"run": run.name, "offset": batch.offset, "events": finite([plain(event) for event in batch.events]), "status": told(run.status())}


def _sample(name: str, file: str) -> Path:
    folder = RunDir(paths.existing_run(name)).samples
    path = folder / file
    if "/" in file or "\\" in file or path.suffix not in SAMPLE_TYPES or not path.is_file() or not paths.inside(folder, path):
        raise LtxTrainError("sample.missing", "There is no such sample.")
    path.open("rb").close()  # what may not be read is told here
    return path


def _control(name: str, control: str) -> dict[str, Any]:
    if control not in CONTROLS:
        raise LtxTrainError("control.name", f"A run can be asked to {', '.join(CONTROLS)}.")
    run = RunDir(paths.existing_run(name))
    if not run.live():
        raise LtxTrainError("run.not_live", f"The run {run.name} is not at work.")
    run.request(control)
    return {"run": run.name, "asked": control}


def _inspect(given: dict[str, str]) -> dict[str, Any]:
    from .model import AUTO, choose

    found = choose(given["model"], *(given[name] or AUTO for name in ("text_encoder", "video_vae", "audio_vae")))
    return {"family": found.family, "title": found.title, "audio": found.audio, "missing": dict(found.missing), "text": found.summary}
