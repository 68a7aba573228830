"""What is installed here and what is missing for what; makes a separate environment to be the engine python."""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import re
import shlex
import shutil
import site
import subprocess
import sys
import sysconfig
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from .errors import RunError

ROOT = Path(__file__).resolve().parents[1]

# package, what needs it, whether training cannot do without it, version from which it serves, condition
_NEEDS: tuple[tuple[str, str, bool, str, str], ...] = (
    ("torch", "everything", True, "2.4", ""),
    ("safetensors", "reading and writing weights", True, "", ""),
    ("pydantic", "settings", True, "2", ""),
    ("PyYAML", "job files", True, "", ""),
    ("psutil", "starting and watching the trainer", True, "", ""),
    ("einops", "latents and codecs", True, "", ""),
    ("numpy", "media", True, "", ""),
    ("Pillow", "images", True, "", ""),
    ("av", "reading and writing video", True, "14", ""),
    ("peft", "adapters", True, "0.14", ""),
    ("transformers", "text encoders (T5, Gemma 3)", True, "4.50.3", ""),
    ("transformers", "Gemma 4 (LTX-2.5) in the engine; else use ComfyUI's CLIP", False, "5.10", ""),
    ("diffusers", "the engine's VAEs and vocoder", True, "0.36", ""),
    ("accelerate", "several processes", True, "1.2", ""),
    ("rich", "the command line's progress bars", True, "", ""),
    ("sentencepiece", "the tokenizer of ComfyUI's single-file Gemma 3", False, "", ""),
    ("optimum-quanto", "quantization int8-quanto, int4-quanto, fp8-quanto", False, "0.2.6", ""),
    ("bitsandbytes", "8-bit optimizers and nf4", False, "0.45", "not darwin"),
    ("prodigyopt", "optimizer prodigy", False, "", ""),
    ("schedulefree", "schedule-free optimizers", False, "", ""),
    ("triton", "torch.compile on Linux GPUs", False, "", "linux"),
    ("triton-windows", "torch.compile on Windows GPUs", False, "", "win32"),
    ("tensorboard", "TensorBoard files", False, "", ""),
    ("wandb", "Weights & Biases", False, "", ""),
    ("huggingface_hub", "pushing to the Hugging Face Hub", False, "", ""),
    ("scenedetect", "cutting long videos into scenes", False, "", ""),
    ("pillow-heif", "HEIC photos", False, "", ""),
)


@dataclass(frozen=True)
class Package:
    """One package and what it is for; ``state``: ok, missing, or old (installed below ``minimum``)."""

    name: str
    purpose: str
    required: bool
    minimum: str
    installed: str | None
    state: str


@dataclass(frozen=True)
class Environment:
    """An interpreter and what it can do."""

    python: str
    executable: str
    platform: str
    torch: str | None
    cuda: str | None
    devices: tuple[str, ...]
    ram_gb: float | None
    packages: tuple[Package, ...] = field(default_factory=tuple)

    @property
    def missing(self) -> tuple[Package, ...]:
        """Required packages that are absent or too old."""
        return tuple(package for package in self.packages if package.required and package.state != "ok")

    def as_dict(self) -> dict:
        return asdict(self) | {"missing": [package.name for package in self.missing]}

    def text(self) -> str:
        """The report for people: what is there, then what is missing for what and how to get it."""
        head = [f"Python {self.python}  {self.executable}", f"{self.platform}{'' if self.ram_gb is None else f', {self.ram_gb:.0f} GB RAM'}", f"torch {self.torch or 'not installed'}, CUDA {self.cuda or 'none'}"]
        head += [f"  {device}" for device in self.devices] or ["  no GPU that torch can use"]
        width = max(len(package.name) for package in self.packages)
        marks = {"ok": "ok     ", "missing": "missing", "old": "too old"}
        rows = []
        for package in self.packages:
            version = package.installed or "-"
            wanted = f" (needs {package.minimum})" if package.state == "old" else ""
            rows.append(f"  {marks[package.state]}  {package.name:<{width}}  {version:<14} {package.purpose}{wanted}{'' if package.required else ', optional'}")
        tail = ["Everything that training needs is installed."]
        if self.missing:
            names = " ".join(f'"{p.name}>={p.minimum}"' if p.minimum else p.name for p in self.missing)
            tail = ["Missing for training:", f"  {shell_line([self.executable])} -m pip install {names}", "or a separate environment: python -m ltx_train env create FOLDER"]
        return "\n".join([*head, "", *rows, "", *tail])


def inspect_environment(version_of: Callable[[str], str | None] | None = None, system: str = sys.platform) -> Environment:
    """Look at the interpreter that runs this. Imports torch, no other package."""
    version_of = version_of or installed_version
    packages = []
    for name, purpose, required, minimum, condition in _NEEDS:
        if condition and (condition.startswith("not ") == (system == condition.removeprefix("not "))):
            continue
        version = version_of(name)
        state = "missing" if version is None else "old" if minimum and release(version) < release(minimum) else "ok"
        packages.append(Package(name, purpose, required, minimum, version, state))
    torch, cuda, devices = _torch()
    return Environment(
        python=platform.python_version(),
        executable=sys.executable,
        platform=f"{platform.system()} {platform.release()} {platform.machine()}",
        torch=torch,
        cuda=cuda,
        devices=devices,
        ram_gb=_ram(),
        packages=tuple(packages),
    )


def installed_version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def release(version: str) -> tuple[int, ...]:
    """The release numbers of a version: 4.57.1.dev0 -> (4, 57, 1); trailing zeros do not count."""
    numbers = re.match(r"\d+(?:\.\d+)*", version)
    parts = [int(part) for part in numbers.group().split(".")] if numbers else [0]
    while len(parts) > 1 and parts[-1] == 0:
        parts.pop()
    return tuple(parts)


def _torch() -> tuple[str | None, str | None, tuple[str, ...]]:
    try:
        import torch
    except (ImportError, OSError):  # OSError: a DLL of torch is missing
        return None, None, ()
    devices = []
    for index in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        properties = torch.cuda.get_device_properties(index)
        devices.append(f"{properties.name}, {properties.total_memory / 2**30:.0f} GB, sm{properties.major}{properties.minor}")
    if torch.backends.mps.is_available():
        devices.append("Apple GPU (mps)")
    return torch.__version__, torch.version.cuda or torch.version.hip, tuple(devices)


def _ram() -> float | None:
    try:
        import psutil
    except ImportError:
        return None
    return psutil.virtual_memory().total / 2**30


def shell_line(words: Sequence[str]) -> str:
    """A command as this system's shell takes it: a path with spaces stands in quotes."""
    return subprocess.list2cmdline(words) if os.name == "nt" else shlex.join(words)


# -- a separate environment --


def python_of(folder: Path) -> Path:
    """The interpreter of a virtual environment."""
    return folder / ("Scripts/python.exe" if os.name == "nt" else "bin/python")


def creation_commands(folder: Path, *, inherit: bool, torch_version: str | None, index_url: str | None = None) -> list[list[str]]:
    """The commands that fill the environment in ``folder``, as argument lists.

    inherit: our packages stay visible and only what is missing or too old is installed on top.
    Otherwise the same torch is asked for first, from ``index_url`` if given (CUDA builds are on PyTorch's own index).
    """
    python = str(python_of(folder))
    pip = [python, "-m", "pip", "install", "--disable-pip-version-check"]
    commands = []
    if not inherit:
        wanted = f"torch=={torch_version.split('+')[0]}" if torch_version else "torch"
        commands.append([*pip, wanted, *(["--index-url", index_url] if index_url else [])])
    return [*commands, [*pip, "-r", str(ROOT / "requirements.txt")]]


def create_environment(folder: Path, *, inherit: bool = False, install: bool = True, index_url: str | None = None) -> Path:
    """Make a virtual environment to set as engine python, and return its interpreter.

    Raises RunError when the folder is taken, this Python cannot make one, or pip fails; what was begun is then removed again.
    """
    folder = Path(folder).expanduser().absolute()
    if folder.exists() and not folder.is_dir():
        raise RunError("environment.exists", f"This is a file: {folder}", "Give a new folder.")
    if folder.exists() and any(folder.iterdir()):
        raise RunError("environment.exists", f"The folder is not empty: {folder}", "Give a new folder, or delete this one first.")
    folder.mkdir(parents=True, exist_ok=True)  # no permission, a full disk: told as such
    try:
        _make_venv(folder)
        if inherit:
            _inherit(folder)
        if install:
            _fill(folder, inherit, index_url)
    except BaseException:  # an interrupt too: half an environment would stand in the way of the next try
        shutil.rmtree(folder, ignore_errors=True)
        raise
    return python_of(folder)


def _fill(folder: Path, inherit: bool, index_url: str | None) -> None:
    torch, _, _ = _torch()
    for command in creation_commands(folder, inherit=inherit, torch_version=torch, index_url=index_url):
        if subprocess.run(command, stdin=subprocess.DEVNULL).returncode != 0:
            hint = "pip's last lines above say why; the folder is removed again (what was downloaded stays in pip's cache).\n"
            raise RunError("environment.pip", f"pip could not fill the environment {folder.name}.", f"{hint}Command: {shell_line(command)}")


def _make_venv(folder: Path) -> None:
    """With the venv module; with uv or virtualenv where Python comes without it (Windows portable)."""
    attempts: list[Sequence[str]] = [[sys.executable, "-m", "venv", str(folder)], [sys.executable, "-m", "virtualenv", str(folder)]]
    uv = shutil.which("uv")
    if uv:
        attempts.insert(1, [uv, "venv", "--seed", "--python", sys.executable, str(folder)])
    said = []
    for command in attempts:
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, encoding="utf-8", errors="replace")
        if done.returncode == 0 and python_of(folder).exists():
            return
        said.append((done.stderr or done.stdout).strip().splitlines()[-1:] or [f"exit code {done.returncode}"])
        shutil.rmtree(folder, ignore_errors=True)
    hint = "Install virtualenv (pip install virtualenv) or use a full Python from python.org. " + "; ".join(line[0] for line in said)
    raise RunError("environment.venv", "This Python cannot make a virtual environment.", hint)


def _inherit(folder: Path) -> None:
    """Let the environment see our packages behind its own; a venv's own switch reaches the base Python's only."""
    asked = subprocess.run(
        [str(python_of(folder)), "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"], capture_output=True, text=True, encoding="utf-8", check=True
    )
    ours = [sysconfig.get_path("purelib"), sysconfig.get_path("platlib"), *(site.getsitepackages() if hasattr(site, "getsitepackages") else [])]
    lines = list(dict.fromkeys(path for path in ours if path and os.path.isdir(path)))
    # read in the locale's encoding before Python 3.13: refuse to guess where the path is not ASCII there
    try:
        (Path(asked.stdout.strip()) / "ltx_train_inherited.pth").write_text("\n".join(lines) + "\n", encoding="utf-8" if sys.version_info >= (3, 13) else None)
    except UnicodeEncodeError as error:
        hint = f"Leave --inherit out, or use a Python in a folder with plain letters: {error.object[error.start : error.start + 40]}"
        raise RunError("environment.inherit", "An environment cannot inherit from packages in a folder of this name.", hint) from error


def main(argv: list[str] | None = None) -> int:
    """``env [--json]`` or ``env create FOLDER [--inherit] [--index-url URL]``; exit code 2 if something needed is missing."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if arguments[:1] == ["create"]:
        arguments[0] = "--create"
    parser = argparse.ArgumentParser(prog="python -m ltx_train env", description=__doc__)
    parser.add_argument("--json", action="store_true", help="print the report as JSON")
    parser.add_argument("--create", type=Path, metavar="FOLDER", help="make a separate environment there")
    parser.add_argument("--inherit", action="store_true", help="with --create: keep this Python's packages visible, install only what is missing")
    parser.add_argument("--index-url", help="with --create: where pip gets torch, such as https://download.pytorch.org/whl/cu128")
    options = parser.parse_args(arguments)
    if options.create is None and (options.inherit or options.index_url):
        parser.error("--inherit and --index-url are for `env create FOLDER`")
    if options.create is not None and options.json:
        parser.error("--json is for the report; `env create FOLDER` makes none")
    if options.create is not None:
        python = create_environment(options.create, inherit=options.inherit, index_url=options.index_url)
        sys.stdout.write(f"Made. Set this as the engine python:\n{python}\n")
        sys.stdout.write(f"For the nodes, in ComfyUI's user/__ltx_train/settings.json: {json.dumps({'engine_python': str(python)})}\n")
        return 0
    environment = inspect_environment()
    sys.stdout.write((json.dumps(environment.as_dict(), indent=1) if options.json else environment.text()) + "\n")
    return 2 if environment.missing else 0
