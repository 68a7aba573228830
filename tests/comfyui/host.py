"""A real ComfyUI for the tests of this folder: COMFYUI_PATH names its folder, COMFYUI_PYTHON its interpreter."""


import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
import uuid
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
COMFYUI = Path(os.environ.get("COMFYUI_PATH", ""))
PYTHON = os.environ.get("COMFYUI_PYTHON", sys.executable)
THERE = bool(os.environ.get("COMFYUI_PATH")) and (COMFYUI / "main.py").is_file()
MODELS = {"ltx2.3": "ltx-2.3-tiny.safetensors", "ltx2": "ltx-2-tiny.safetensors", "ltx2.5": "ltx-2.5-tiny-transformer-bf16.safetensors", "ltxv-2b": "ltxv-2b-0.9.5-tiny.safetensors"}


ABSENT = ("accelerate", "peft", "diffusers", "optimum", "bitsandbytes", "wandb", "tensorboard", "prodigyopt", "schedulefree", "scenedetect", "rich")
"""Packages of ours that no ComfyUI of these tests finds (its children do): all that requirements.txt asks for beyond ComfyUI's own."""

WITHOUT = """
import importlib.machinery, sys

if any(part.endswith("main.py") for part in getattr(sys, "orig_argv", ())):
    class Without(importlib.machinery.PathFinder):
        @classmethod
        def find_spec(cls, name, path=None, target=None):
            return None if name.split(".")[0] in {absent!r} else super().find_spec(name, path, target)

    sys.meta_path[:] = [Without if finder is importlib.machinery.PathFinder else finder for finder in sys.meta_path]
"""


class Server:
    """A ComfyUI on a base directory of its own."""

    def __init__(self, base: Path) -> None:
        self.base = base
        with socket.socket() as found:
            found.bind(("127.0.0.1", 0))
            self.port = found.getsockname()[1]
        self.log = base / "server.log"
        self.process = None

    def start(self) -> "Server":
        from ltx_train.tiny.text_encoders import GEMMA3

        sizes = {k: GEMMA3[k] for k in ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")}
        command = [PYTHON, str(COMFYUI / "main.py"), "--cpu", "--listen", "127.0.0.1", "--port", str(self.port), "--base-directory", str(self.base), "--disable-api-nodes"]
        without = self.base / "without" / "sitecustomize.py"
        without.parent.mkdir(exist_ok=True)
        without.write_text(WITHOUT.format(absent=ABSENT))
        env = {**os.environ, "LTX_TINY_GEMMA3": json.dumps(sizes), "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", "PYTHONPATH": str(without.parent)}
        with open(self.log, "ab") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=env, start_new_session=True)
        deadline = time.monotonic() + 400
        while time.monotonic() < deadline:
            assert self.process.poll() is None, self.tail()
            try:
                self.get("/system_stats")
                return self
            except (urllib.error.URLError, ConnectionError, TimeoutError):
                time.sleep(0.5)
        raise AssertionError(f"ComfyUI did not start:\n{self.tail()}")

    def stop(self, number: int = signal.SIGTERM) -> None:
        if self.process is not None and self.process.poll() is None:
            self.process.send_signal(number)
            self.process.wait(timeout=60)

    def tail(self, lines: int = 60) -> str:
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def get(self, path: str):
        for attempt in range(3):  # a machine with much to do answers late
            try:
                with urllib.request.urlopen(self.url + path, timeout=60) as answer:
                    return json.loads(answer.read())
            except TimeoutError:
                if attempt == 2:
                    raise
        raise AssertionError("not reached")

    def post(self, path: str, data: dict):
        request = urllib.request.Request(self.url + path, json.dumps(data).encode(), {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=60) as answer:
            body = answer.read()
        return json.loads(body) if body else None

    def queue(self, prompt: dict) -> str:
        try:
            answer = self.post("/prompt", {"prompt": prompt, "client_id": uuid.uuid4().hex})
        except urllib.error.HTTPError as error:
            raise AssertionError(f"the prompt was refused: {error.read().decode()[:3000]}") from error
        assert not answer.get("node_errors"), answer["node_errors"]
        return answer["prompt_id"]

    def wait(self, prompt_id: str, timeout: float = 900) -> "History":
        deadline = time.monotonic() + timeout
        while time.monotonic() < deadline:
            found = self.get(f"/history/{prompt_id}").get(prompt_id)
            if found is not None and found["status"]["completed"] | (found["status"]["status_str"] == "error"):
                return History(found)
            time.sleep(0.2)
        raise AssertionError(f"the prompt did not end in {timeout} s:\n{self.tail()}")

    def run(self, prompt: dict, timeout: float = 900) -> "History":
        return self.wait(self.queue(prompt), timeout)

    # -- what our runs say --
    def run_dir(self, name: str):
        from ltx_train.runs.run_dir import RunDir

        return RunDir(self.base / "output" / "ltx_train" / name)

    def until(self, what, timeout: float = 600, text: str = ""):
        """Wait until ``what()`` is true; its value."""
        deadline = time.monotonic() + timeout
        while time.monotonic() < deadline:
            found = what()
            if found:
                return found
            time.sleep(0.05)
        raise AssertionError(f"{text or 'it'} did not come about in {timeout} s:\n{self.tail()}")


class History:
    """How a prompt ended."""

    def __init__(self, record: dict) -> None:
        self.record = record
        self.status = record["status"]["status_str"]
        self.outputs = record["outputs"]
        self.messages = {kind: data for kind, data in record["status"]["messages"]}

    @property
    def error(self) -> str:
        return self.messages.get("execution_error", {}).get("exception_message", "")

    @property
    def interrupted(self) -> bool:
        return "execution_interrupted" in self.messages

    def good(self) -> "History":
        assert self.status == "success", json.dumps(self.messages)[-4000:]
        return self


def make_base(base: Path, *, families=tuple(MODELS), pack_name: str = "LTX Trainer ü") -> Path:
    """A base directory: our pack copied under a name with a space and an umlaut, the test pack, tiny models, clips."""
    from ltx_train.tiny.checkpoints import write_tiny
    from ltx_train.tiny.media import dataset

    for name in ("custom_nodes", "models", "input", "output", "temp", "user", "datasets"):
        (base / name).mkdir(parents=True)
    keep = shutil.ignore_patterns(".git", "__pycache__", "tests", ".pytest_cache", ".ruff_cache", "node_modules")
    shutil.copytree(ROOT, base / "custom_nodes" / pack_name, ignore=keep)
    shutil.copytree(HERE / "test_pack", base / "custom_nodes" / "test_pack", ignore=keep)
    for family in families:
        write_tiny(base / "models", family)
    dataset(base / "input" / "drawn clips", 3, frames=17, width=96, height=96, sound=True)
    return base


def workflow(name: str, **values) -> dict:
    """An API-format workflow of workflows/, its words in capitals replaced."""
    text = (HERE / "workflows" / f"{name}.api.json").read_text(encoding="utf-8")
    for word, value in values.items():
        text = text.replace(json.dumps(word), json.dumps(value))
    return json.loads(text)
