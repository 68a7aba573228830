"""The environment report where hardly anything is installed, and an environment that cannot be made: nothing half-made stays."""

import subprocess
import sys

import pytest

from ltx_train import environment
from ltx_train.environment import ROOT, create_environment, main, shell_line
from ltx_train.errors import RunError


def bare(*words):
    """The command line in a Python without rich, torch, psutil and pydantic."""
    code = "import sys; sys.modules |= dict.fromkeys(('rich', 'torch', 'psutil', 'pydantic')); from ltx_train.__main__ import main; sys.exit(main(sys.argv[1:]))"
    return subprocess.run([sys.executable, "-c", code, *words], cwd=ROOT, capture_output=True, text=True, encoding="utf-8")


def test_the_report_comes_without_the_packages_that_it_reports_on():
    told = bare("env")
    assert told.returncode in (0, 2) and "torch not installed" in told.stdout and "reading and writing weights" in told.stdout and told.stderr == ""


def test_a_verb_without_its_packages_says_what_to_install():
    told = bare("demo")
    lines = told.stderr.splitlines()
    assert told.returncode == 2 and lines[0].startswith("error: ") and "pip install -r" in lines[1] and "Traceback" not in told.stderr


@pytest.mark.parametrize("failure", [None, KeyboardInterrupt()])
def test_an_environment_that_was_not_filled_is_removed_again(tmp_path, monkeypatch, failure):
    def pip(command, **options):
        assert (tmp_path / "new env" / "half").exists()
        if failure is not None:
            raise failure
        return subprocess.CompletedProcess(command, 1)

    monkeypatch.setattr(environment, "_make_venv", lambda folder: (folder / "half").write_text("x"))
    monkeypatch.setattr(environment.subprocess, "run", pip)
    with pytest.raises(RunError if failure is None else KeyboardInterrupt):
        create_environment(tmp_path / "new env")
    assert not (tmp_path / "new env").exists()


def test_what_contradicts_is_refused(tmp_path, capsys):
    (tmp_path / "file").write_text("x")
    with pytest.raises(RunError, match="This is a file"):
        create_environment(tmp_path / "file")
    for words in (["--inherit"], ["--index-url", "https://example.org"], ["create", str(tmp_path / "new"), "--json"]):
        with pytest.raises(SystemExit):
            main(words)
        assert "env create FOLDER" in capsys.readouterr().err
    assert not (tmp_path / "new").exists()


def test_a_command_is_told_as_a_shell_takes_it():
    assert shell_line(["/a b/python", "-m", "pip"]) in ("'/a b/python' -m pip", '"/a b/python" -m pip')
