"""Fixtures of a real ComfyUI; without one every test here is skipped, and says so."""

from pathlib import Path

import pytest

from tests.comfyui.host import MODELS, THERE, Server, make_base, workflow

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items):
    if not THERE:
        reason = "no ComfyUI here: set COMFYUI_PATH (its folder) and COMFYUI_PYTHON (its interpreter)"
        for item in items:
            if HERE in Path(item.fspath).parents:
                item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(scope="session")
def server(tmp_path_factory):
    """One ComfyUI for all tests that leave it as it was."""
    server = Server(make_base(tmp_path_factory.mktemp("comfy") / "Comfy UI")).start()
    yield server
    server.stop()


@pytest.fixture(name="workflow")
def workflow_fixture():
    return workflow


@pytest.fixture
def models():
    return MODELS
