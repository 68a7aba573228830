"""One home of tiny models and caches for all end-to-end tests."""

import pytest
import torch

from tests.end_to_end.corridor import Home


@pytest.fixture(scope="session")
def home(tmp_path_factory):
    return Home(tmp_path_factory.mktemp("home"))


@pytest.fixture(autouse=True, scope="module")
def _one_thread():
    """Tiny tensors are quickest on one thread; sums are then the same on every machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
