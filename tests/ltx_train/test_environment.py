"""The environment report, and an environment made here that then carries a run."""

import json
import subprocess
import sys

import pytest

from ltx_train.environment import ROOT, create_environment, creation_commands, inspect_environment, main, python_of, release
from ltx_train.errors import RunError
from ltx_train.launch import start


def versions(**changed):
    known = {name: "99" for name in ("torch", "safetensors", "pydantic", "PyYAML", "psutil", "einops", "numpy", "Pillow", "av", "peft", "diffusers", "accelerate", "rich")}
    known |= {"transformers": "4.57.1"} | changed
    return lambda name: known.get(name)


def test_what_is_missing_for_what():
    found = inspect_environment(versions(av="13.1.0", peft=None, rich="1.0"), "linux")
    assert [(package.name, package.state) for package in found.missing] == [("av", "old"), ("peft", "missing")]
    text = found.text()
    assert 'pip install "av>=14" "peft>=0.14"' in text and "too old  av" in text and "(needs 14)" in text


def test_comfyuis_transformers_serves_but_not_for_gemma_4():
    found = inspect_environment(versions(), "linux")
    assert found.missing == () and "Everything that training needs" in found.text()
    states = {package.purpose[:7]: package.state for package in found.packages if package.name == "transformers"}
    assert states == {"text en": "ok", "Gemma 4": "old"}


def test_packages_of_other_systems_are_not_asked_for():
    names = {system: {package.name for package in inspect_environment(versions(), system).packages} for system in ("linux", "win32", "darwin")}
    assert "triton" in names["linux"] and "triton-windows" in names["win32"] and "bitsandbytes" not in names["darwin"]
    assert not {"triton-windows"} & names["linux"] and "bitsandbytes" in names["win32"]


def test_versions_are_compared_as_numbers():
    assert release("4.57.0.dev0") > release("4.50.3") and release("5.10") > release("5.9.9") and release("2.0") == release("2") and release("2.13.0+cpu") == (2, 13)


def test_every_requirement_is_in_the_report():
    wanted = {line.split(";")[0].split(">")[0].strip() for line in (ROOT / "requirements.txt").read_text().splitlines() if line.strip()}
    names = {package.name for system in ("linux", "win32") for package in inspect_environment(versions(), system).packages}
    assert wanted <= names


def test_the_json_form(capsys):
    code = main(["--json"])
    report = json.loads(capsys.readouterr().out)
    assert report["executable"] == sys.executable and report["missing"] == [] and code == 0
    assert {"name", "purpose", "required", "minimum", "installed", "state"} == report["packages"][0].keys()


def test_the_commands_of_a_full_and_of_an_inheriting_environment(tmp_path):
    pip = [str(python_of(tmp_path)), "-m", "pip", "install", "--disable-pip-version-check"]
    everything = [*pip, "-r", str(ROOT / "requirements.txt")]
    assert creation_commands(tmp_path, inherit=True, torch_version="2.9.0+cu128") == [everything]
    assert creation_commands(tmp_path, inherit=False, torch_version="2.9.0+cu128", index_url="https://example.org/cu128") == [
        [*pip, "torch==2.9.0", "--index-url", "https://example.org/cu128"],
        everything,
    ]


def test_an_inheriting_environment_is_made_and_runs_a_job_as_engine_python(engine, tmp_path):
    python = create_environment(tmp_path / "engine python", inherit=True, install=False)
    asked = subprocess.run([python, "-I", "-c", "import sys, yaml, psutil, pydantic; print(sys.prefix)"], capture_output=True, text=True, check=True)
    assert asked.stdout.strip() == str(tmp_path / "engine python")
    run = engine.run(steps=2)
    child = start(run, engine_python=python, python_flags=("-I",))
    assert child.wait(60).ok, child.run.tail()
    with pytest.raises(RunError, match="not empty"):
        create_environment(tmp_path / "engine python")


def test_a_python_without_venv_is_told_what_to_do(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "executable", sys.executable)
    monkeypatch.setattr("ltx_train.environment.shutil.which", lambda name: None)
    monkeypatch.setattr(
        "ltx_train.environment.subprocess.run", lambda command, **options: subprocess.CompletedProcess(command, 1, "", f"No module named {command[2]}")
    )
    with pytest.raises(RunError, match="cannot make a virtual environment") as caught:
        create_environment(tmp_path / "x")
    assert "No module named venv; No module named virtualenv" in caught.value.hint
