"""Where files may come from and where ours go: ComfyUI's folders, and the roots that the server's owner allows."""

from __future__ import annotations

import ipaddress
import json
import logging
import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import folder_paths

from ..ltx_train.data.listing import MEDIA_EXTENSIONS, VIDEO_EXTENSIONS
from ..ltx_train.errors import DataError, RunError
from ..ltx_train.runs.run_dir import check_name

SHARD = re.compile(r"-\d{5}-of-\d{5}\.")
"""A part of a Hugging Face folder's weights: no model by itself."""
TABLES = frozenset({".csv", ".json", ".jsonl"})
PACK = Path(__file__).resolve().parents[1]
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Settings:
    """The server-side settings file: ``<user>/__ltx_train/settings.json``, which no workflow and no HTTP route can write.

    roots: further folders that datasets may lie in. engine_python: the interpreter that trains, if not ComfyUI's own.
    free_paths: whether a server that listens on this machine alone takes any absolute path. caption_hosts: where captioning
    may send clips beside this machine.
    """

    roots: tuple[Path, ...] = ()
    engine_python: str | None = None
    free_paths: bool = True
    caption_hosts: tuple[str, ...] = ()

    @classmethod
    def read(cls) -> Settings:
        """The settings as the file says now; defaults where there is none or it cannot be read (said in the log)."""
        path = settings_path()
        try:
            data = json.loads(path.read_text(encoding="utf-8-sig"))
            roots = tuple(Path(root).expanduser().absolute() for root in data.get("roots", ()))
            hosts = tuple(str(host) for host in data.get("caption_hosts", ()))
            return cls(roots, data.get("engine_python") or None, bool(data.get("free_paths", True)), hosts)
        except FileNotFoundError:
            return cls()
        except (OSError, ValueError, AttributeError, TypeError) as error:
            log.warning("LTX Train: %s cannot be read and is passed over: %s", path, error)
            return cls()


def settings_path() -> Path:
    return Path(folder_paths.get_system_user_directory("ltx_train")) / "settings.json"


def only_this_machine() -> bool:
    """Whether the server listens on loopback addresses alone, so that every caller sits at this machine."""
    from comfy.cli_args import args

    hosts = [host.strip() for host in str(args.listen).split(",") if host.strip()]
    return bool(hosts) and all(_is_loopback(host) for host in hosts)


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"


def roots() -> list[tuple[str, Path]]:
    """(label, folder) of all places that a workflow may name files in."""
    found = [("input", Path(folder_paths.get_input_directory()))]
    found += [("datasets", Path(path)) for path in folder_paths.get_folder_paths("datasets")]
    found += [("output", Path(folder_paths.get_output_directory()))]
    return found + [(path.name or str(path), path) for path in Settings.read().roots]


def inside(root: Path | str, path: Path | str) -> bool:
    """Whether ``path`` really lies below ``root``, links followed."""
    return folder_paths.is_within_directory(str(root), str(path))


def resolve(text: str, *, what: str = "dataset") -> Path:
    """The file or folder that a workflow's text names: ``input/clips``, ``datasets/mine/data.csv``, or a full path.

    Raises DataError ``path.refused`` outside the allowed roots and ``path.missing`` where nothing is.
    """
    text = text.strip().strip('"')
    if not text:
        raise DataError("path.empty", f"No {what} is chosen.", "Choose one in the list, or type a path below input, output or datasets.")
    if "\0" in text:
        raise DataError("path.refused", f"This is no path of a {what}.", "It holds a zero byte.")
    plain = Path(text).expanduser()
    found = plain if plain.is_absolute() else _labelled(text)
    if found is None or not found.exists():
        searched = ", ".join(str(path) for _, path in roots())
        raise DataError("path.missing", f"There is no {what} at {text[:80]}.", f"Folders searched: {searched}")
    if any(inside(root, found) for _, root in roots()) or (only_this_machine() and Settings.read().free_paths and plain.is_absolute()):
        return found
    raise DataError(
        "path.refused", f"{text[:80]} lies outside the folders that workflows may use.",
        f"Put the {what} below input, output or datasets, or list its folder under roots in {settings_path()}.",
    )  # fmt: skip


def _labelled(text: str) -> Path | None:
    """The first existing place of ``label/rest``; the bare rest is looked for in every root."""
    text = text.replace("\\", "/")
    label, _, rest = text.partition("/")
    named = [root / rest for name, root in roots() if name == label]
    every = [root / text for _, root in roots()]
    return next((path for path in (*named, *every) if path.exists()), None)


def label_of(path: Path) -> str:
    """The short form that :func:`resolve` takes back, or the full path."""
    for name, root in roots():
        if inside(root, path):
            rest = Path(os.path.relpath(path, root)).as_posix()
            return name if rest == "." else f"{name}/{rest}"
    return str(path)


DEPTH, MOST = 2, 500
"""Levels below a root, and entries, that a dropdown shows."""


def datasets() -> list[str]:
    """Folders with clips and dataset files below input, datasets and the extra roots, for a dropdown."""
    return _listed(_walk)


def films() -> list[str]:
    """Video files and folders with some, below input, datasets and the extra roots, for a dropdown."""
    return _listed(_videos)


def _listed(walk: Callable[[Path, int], Iterator[Path]]) -> list[str]:
    found: dict[str, None] = {}
    for label, root in roots():
        if label == "output":
            continue
        for path in walk(root, DEPTH):
            found[f"{label}/{path.relative_to(root).as_posix()}"] = None
            if len(found) >= MOST:
                return list(found)
    return list(found)


def _videos(root: Path, depth: int) -> Iterator[Path]:
    """Video files at most ``depth`` levels down, each folder that holds some before them."""
    if depth == 0 or not root.is_dir():
        return
    for entry in sorted(_entries(root), key=lambda e: e.name.lower()):
        path = Path(entry.path)
        if entry.is_dir():
            inner = list(_videos(path, depth - 1))
            if any(other.parent == path and other.is_file() for other in inner):
                yield path
            yield from inner
        elif path.suffix.lower() in VIDEO_EXTENSIONS:
            yield path


def new_folder(text: str) -> Path:
    """The folder for something made: ``datasets/scenes``, ``input/scenes``, or a bare name, which lands in datasets.

    It need not be there. Raises RunError for names that are none, DataError outside input, datasets and the extra roots.
    """
    label, _, rest = text.strip().replace("\\", "/").strip("/").partition("/")
    places = [(name, root) for name, root in roots() if name != "output"]
    root = next((root for name, root in places if name == label and rest), None)
    parts = (rest if root is not None else text.strip().replace("\\", "/").strip("/")).split("/")
    root = root or next((root for name, root in places if name == "datasets"), places[0][1])
    for part in parts:
        check_name(part)
    found = root.joinpath(*parts)
    if not inside(root, found):
        raise DataError("path.refused", f"{text[:80]} lies outside the folders that workflows may use.", "Give a name, or input/name or datasets/name.")
    return found


def _walk(root: Path, depth: int) -> Iterator[Path]:
    """Folders that hold media, and dataset files, at most ``depth`` levels down; the root itself is left out."""
    if depth == 0 or not root.is_dir():
        return
    for entry in sorted(_entries(root), key=lambda e: e.name.lower()):
        path = Path(entry.path)
        if entry.is_dir():
            if any(Path(child.name).suffix.lower() in MEDIA_EXTENSIONS or child.is_dir() for child in _entries(path)):
                yield path
            yield from _walk(path, depth - 1)
        elif path.suffix.lower() in TABLES and (depth > 1 or path.suffix.lower() != ".json"):
            yield path  # deeper down, .json files are captions beside clips


def _entries(folder: Path) -> list[os.DirEntry]:
    try:
        with os.scandir(folder) as entries:
            return [entry for entry in entries if not entry.name.startswith((".", "__"))]
    except OSError:
        return []


def digest_of(path: Path, limit: int = 20000) -> str:
    """A text that changes when a file or anything in a folder (hidden things left out) changes."""
    import hashlib

    seen = hashlib.sha256()
    files = [path] if path.is_file() else _below(path)
    for number, file in enumerate(files):
        if number >= limit:
            break
        try:
            stat = file.stat()
        except OSError:
            continue
        seen.update(f"{file}|{stat.st_size}|{stat.st_mtime_ns}\n".encode("utf-8", "surrogatepass"))
    return seen.hexdigest()


def _below(folder: Path) -> Iterator[Path]:
    for here, folders, files in os.walk(folder, followlinks=True):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        yield from (Path(here) / name for name in sorted(files) if not name.startswith("."))


# -- where ours go ---------------------------------------------------------------------------------------------------


def runs_root() -> Path:
    """``output/ltx_train``: one folder a run."""
    return Path(folder_paths.get_output_directory()) / "ltx_train"


def run_path(name: str) -> Path:
    """The folder of a run by its name. Raises RunError for a name that is no folder's name."""
    return runs_root() / check_name(name.strip())


def existing_run(name: str) -> Path:
    """The folder of a run that is there, for routes and dropdowns. Raises RunError ``run.missing``."""
    path = run_path(name)
    if not path.is_dir() or not inside(runs_root(), path):
        raise RunError("run.missing", f"There is no run {name[:60]}.", f"Runs lie in {runs_root()}.")
    return path


def jobs_root() -> Path:
    """Where jobs without a name of their own keep their status and log."""
    return runs_root() / ".jobs"


def cache_root(dataset: Path | None) -> Path:
    """Where a dataset's cache lies: in its datasets root, else in the output folder."""
    if dataset is not None:
        for root in folder_paths.get_folder_paths("datasets"):
            if inside(root, dataset):
                return Path(root) / ".ltx_cache"
    return runs_root() / ".cache"


def loras_root() -> Path:
    """``output/loras``: ComfyUI lists it in LoraLoader since it started."""
    return Path(folder_paths.get_output_directory()) / "loras"


# -- ComfyUI's model folders -----------------------------------------------------------------------------------------


def model_files(*folders: str) -> list[str]:
    """Names of model files in ComfyUI's folders, in the order of the folders, each once."""
    found: dict[str, None] = {}
    for folder in folders:
        for name in folder_paths.get_filename_list(folder):
            if name.lower().endswith((".safetensors", ".sft")) and not SHARD.search(name):
                found[name] = None
    return list(found)


def model_file(name: str, *folders: str) -> Path:
    """The full path of a name from :func:`model_files`. Raises DataError ``model.missing``."""
    for folder in folders:
        path = folder_paths.get_full_path(folder, name)
        if path is not None:
            return Path(path)
    raise DataError("model.missing", f"The model file {name[:80]} is not "
        f"there.", f"Put it into ComfyUI's folder {' or '.join(folders)} and press R, or choose another one.")


def encoder_folders() -> list[str]:
    """Hugging Face folders (with a config.json) in ComfyUI's text_encoders roots, written with a slash at the end."""
    found = []
    for root in folder_paths.get_folder_paths("text_encoders"):
        found += [f"{entry.name}/" for entry in _entries(Path(root)) if entry.is_dir() and (Path(entry.path) / "config.json").is_file()]
    return sorted(dict.fromkeys(found))


def encoder_path(name: str) -> Path:
    """The file or folder of a text encoder in the dropdown."""
    if name.endswith("/"):
        for root in folder_paths.get_folder_paths("text_encoders"):
            path = Path(root) / name.rstrip("/")
            if path.is_dir() and inside(root, path):
                return path
    return model_file(name, "text_encoders")


@lru_cache(maxsize=1)
def host_t5_tokenizer() -> Path | None:
    """The T5 tokenizer that ComfyUI ships, as its T5 file holds none."""
    from comfy import model_management

    folder = Path(model_management.__file__).parent / "text_encoders" / "t5_tokenizer"
    return folder if (folder / "tokenizer.json").is_file() else None
