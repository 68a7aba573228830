"""In a real browser: examples load without red nodes, the panels live while training, and are there again after a reload."""

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.comfyui.host import MODELS, ROOT

HERE = Path(__file__).parent
CHROMIUM = os.environ.get("CHROMIUM", "") or shutil.which("chromium") or ""
PLAYWRIGHT = os.environ.get("PLAYWRIGHT_CORE", "")
pytestmark = pytest.mark.skipif(
    not (shutil.which("node") and CHROMIUM and PLAYWRIGHT and Path(PLAYWRIGHT).is_dir()),
    reason="no browser here: set PLAYWRIGHT_CORE (the folder of the npm package playwright-core), CHROMIUM, and install node",
)
EXAMPLES = sorted((ROOT / "example_workflows").glob("*.json"))


def drive(server, tmp_path, workflow, **more):
    options = {"url": server.url, "workflow": str(workflow), "out": str(tmp_path), "playwright": PLAYWRIGHT, "chromium": CHROMIUM, **more}
    done = subprocess.run(["node", str(HERE / "browser.mjs"), json.dumps(options)], capture_output=True, text=True, timeout=1500)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)


def panel(panels, kind):
    return next(one for one in panels if kind in one["kind"])


def test_the_examples_load_without_red_nodes(server, tmp_path):
    found = drive(server, tmp_path, EXAMPLES[0], also=[str(path) for path in EXAMPLES[1:]])
    assert found["errors"] == []
    assert len(found["each"]) == len(EXAMPLES)
    for example, (nodes, panels) in zip(EXAMPLES, found["each"]):
        assert [node for node in nodes if node["missing"]] == [], example.stem
        assert {node["type"] for node in nodes} >= {"LTXTrainLoadModel", "LTXTrainDataset", "LTXTrainPreprocess", "LTXTrainLoRA"}
        assert "not started" in panel(panels, "ltx-run")["text"]


def test_every_example_has_its_picture_and_its_twin():
    assert len(EXAMPLES) >= 8
    for example in EXAMPLES:
        assert example.with_suffix(".jpg").stat().st_size > 10000
        assert (HERE / "workflows" / "examples" / f"{example.stem}.api.json").is_file()


@pytest.mark.parametrize("vue", [False, True], ids=["litegraph", "nodes 2.0"])
def test_the_panels_live_and_are_there_after_a_reload(server, tmp_path, workflow, vue):
    prompt = workflow("train_with_previews", MODEL=MODELS["ltx2.3"], RUN=f"seen in the browser {int(vue)}")
    prompt["4"]["inputs"] |= {"steps": 150}
    prompt["5"]["inputs"] |= {"interval": 150, "skip_initial_validation": True}
    prompt["4"]["inputs"]["memory"] = ["6", 0]
    prompt["6"] = {"class_type": "LTXTrainMemorySettings", "inputs": {"memory_limit_gb": 8.0}}
    path = tmp_path / "workflow.json"
    path.write_text(json.dumps(prompt))
    found = drive(server, tmp_path, path, queue=True, nodes2=vue, seconds=1000, closeUp=["LTXTrainDataset"])
    assert found["errors"] == []
    during, after, again = (panel(found[part], "ltx-run") for part in ("during", "after", "reloaded"))
    assert during["points"] >= 3 and "step" in during["text"] and "Stop" in during["text"]
    assert after["points"] == 150 and "finished" in after["text"] and "Stop" not in after["text"]
    assert again["points"] == 150 and "finished" in again["text"]
    assert [one["kind"] for one in again["samples"]] == ["VIDEO"] and again["samples"][0]["ready"] >= 1
    report = panel(found["after"], "ltx-report")
    assert "3 of 3 clips usable" in report["text"]
    assert [row[0] for row in report["rows"]] == ["", "+", "+", "+"] and report["rows"][0][1] == "clip" and all("sks" in row[-1] for row in report["rows"][1:])
    assert "GiB on cpu" in during["text"] and "a step" in during["text"], "the plan of what was left to auto"
    assert any("LTX-2.3" in one["text"] for one in found["after"])
    if vue:
        assert during["height"] >= 60
