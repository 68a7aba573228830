"""Jobs without a run of their own (encoding, sampling, tools): started, attached to or found done, and followed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ..ltx_train.config import PreprocessJob, SampleJob
from ..ltx_train.launch import attach
from ..ltx_train.run_setup import open_other
from ..ltx_train.runs.run_dir import RunDir
from ..ltx_train.tools import ToolJob, open_tool
from . import compose
from .follow import Screen, follow, free_memory


def carry_out(job: PreprocessJob | SampleJob | ToolJob, screen: Screen) -> RunDir:
    """Do the job in a child and follow it; a child that works on it already is attached to."""
    run = RunDir(job.output_dir)
    child = attach(run.path)
    if child is None:
        if not (isinstance(job, ToolJob) and job.task.kind == "split"):  # which needs no room on a card
            screen.text("Freeing memory")
            free_memory()
        child = compose.start_child(open_tool(job) if isinstance(job, ToolJob) else open_other(job))
    follow(child, screen)
    return run


def done_before(run: RunDir, mark: Path, told: dict[str, Any]) -> bool:
    """Whether the job finished with just these inputs, as the mark beside it says."""
    try:
        return run.read_status().state == "finished" and json.loads(mark.read_text(encoding="utf-8")) == told
    except (OSError, ValueError):
        return False


def mark_done(mark: Path, told: dict[str, Any]) -> None:
    """Remember with which inputs a job finished, for :func:`done_before`."""
    mark.write_text(json.dumps(told), encoding="utf-8")
