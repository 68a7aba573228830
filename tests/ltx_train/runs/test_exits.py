"""Exit codes in words."""

import pytest

from ltx_train.runs.exits import explain_exit


@pytest.mark.parametrize(
    ("code", "words", "hint"),
    [
        (0, "finished", ""),
        (1, "crashed", "traceback"),
        (2, "cannot be done", ""),
        (3, "stopped", ""),
        (4, "Out of memory", "resolution"),
        (3221225477, "0xC0000005", "driver"),  # as a Windows process ends with an access violation
        (-1073741819, "3221225477 (0xC0000005): access violation", "driver"),
        (0xC0000135, "DLL was not found", "Visual C++"),
        (0xC000012D, "commit limit", "page file"),
        (0xC000013A, "Ctrl+C", "snapshot"),
        (-9, "signal 9: killed (SIGKILL)", "RAM"),
        (137, "signal 9", "RAM"),
        (-7, "SIGBUS", "shm"),
        (-11, "SIGSEGV", "driver"),
        (-6, "SIGABRT", "log"),
        (-12, "signal 12", "log"),
        (77, "exit code 77", "log"),
        (-1073740000, "0xC0000720", "log"),
        (None, "without a word", "snapshot"),
    ],
)
def test_words(code, words, hint):
    text = explain_exit(code)
    assert words in text.message and hint in text.hint and len(text.message) < 120
