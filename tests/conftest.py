"""For all tests: one thread a process, no GPU unless asked for, and no collection of garbage that looks again and again through what stays."""

import gc
import os
import sys

import pytest

# pytest's workers share the processors already; tiny tensors are quickest on one thread, and sums are then the same everywhere
os.environ.setdefault("OMP_NUM_THREADS", "1")
# what they compare to the bit is a CPU's; many fork, which a process that has used CUDA cannot
if os.environ.get("LTX_TRAIN_GPU") != "1":
    os.environ.update(CUDA_VISIBLE_DEVICES="", HIP_VISIBLE_DEVICES="")

LIBRARY = 100
"""Modules that a test has loaded when it has brought a library with it."""
_loaded = {"modules": 0}


@pytest.hookimpl(hookwrapper=True)
def pytest_collection(session):
    """The modules and tests that a session loads first stay to its end."""
    gc.disable()
    yield
    _keep()
    gc.enable()


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item, nextitem):
    """So do the libraries that a test is the first to need: collections after it, which the product asks for, pass them over."""
    if len(sys.modules) > _loaded["modules"] + LIBRARY:
        gc.collect()
        _keep()


def _keep():
    gc.freeze()
    _loaded["modules"] = len(sys.modules)
