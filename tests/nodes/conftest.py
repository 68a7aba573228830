"""The pack loaded by its path into a stand-in of ComfyUI, once for all tests of this folder."""

import asyncio
import importlib
import sys
from pathlib import Path

import pytest

from tests.nodes.stand_in import Host, load_pack

ROOT = Path(__file__).parents[2]
NAME = "/custom_nodes/LTX Trainer ü"


class Pack:
    """The loaded pack: its nodes by id, and its modules by name."""

    def __init__(self, host: Host) -> None:
        self.host = host
        self.module = load_pack(ROOT, NAME)
        extension = asyncio.run(self.module.comfy_entrypoint())
        self.nodes = {node.define_schema().node_id: node for node in asyncio.run(extension.get_node_list())}

    def __getattr__(self, name):
        return importlib.import_module(f"{NAME}.nodes.{name}")

    def engine(self, name):
        return importlib.import_module(f"{NAME}.ltx_train.{name}")


@pytest.fixture(scope="session")
def _session_pack(tmp_path_factory):
    host = Host(tmp_path_factory.mktemp("host"))
    added = host.modules()
    before = {name: sys.modules.get(name) for name in added}
    sys.modules.update(added)
    yield Pack(host)
    for name in [n for n in sys.modules if n.startswith(NAME)]:
        del sys.modules[name]
    for name, module in before.items():
        sys.modules.pop(name, None)
        if module is not None:
            sys.modules[name] = module


@pytest.fixture
def pack(_session_pack, tmp_path):
    """The pack with empty folders of its own for each test."""
    host = _session_pack.host
    host.__init__(tmp_path)
    sys.modules["comfy.cli_args"].args.listen = "127.0.0.1"
    return _session_pack
