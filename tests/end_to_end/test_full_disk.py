"""Rank 0's disk is full while several ranks save: all of them end, with its words."""

import os
import time

import pytest

from ltx_train.config import TrainConfig
from ltx_train.runs.command import free_port
from ltx_train.runs.run_dir import RunDir
from ltx_train.training.snapshots import newest_valid
from tests.end_to_end.corridor import FORKS, _work

ROOM = 300_000
"""Bytes a file may have: more than a tiny run's logs, less than the model's snapshot."""


def _work_with_little_room(run, environment, room):
    import resource

    resource.setrlimit(resource.RLIMIT_FSIZE, (room, room))  # a write beyond it gives EFBIG, as a full disk gives ENOSPC
    _work(run, environment)


def job(home, out, mode):
    """One step; the LoRA has a large rank, so that its snapshot does not fit either."""
    data = home.job(out, "ltx2.3", optimization={"steps": 1, "batch_size": 1}, lora={"rank": 128})
    data["model"]["training_mode"] = mode
    if mode == "full":
        del data["lora"]
    return TrainConfig.parse(data)


@pytest.mark.skipif(os.name == "nt", reason="the limit on a file's size is a POSIX one")
@pytest.mark.parametrize("mode", ["full", "lora"])
def test_every_rank_leaves_when_rank_0_cannot_write(home, tmp_path, mode):
    config = job(home, tmp_path / "run", mode)
    run = RunDir.create(tmp_path / "run")
    config.save(run.job_path("train"))
    common = {"OMP_NUM_THREADS": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    ranks = [FORKS.Process(target=_work_with_little_room, args=(str(run.path), {**common, "RANK": str(r), "LOCAL_RANK": str(r)}, ROOM if r == 0 else -1)) for r in range(2)]
    for rank in ranks:
        rank.start()
    end = time.monotonic() + 120
    for rank in ranks:
        rank.join(max(0.1, end - time.monotonic()))
    codes = [rank.exitcode for rank in ranks]
    for rank in ranks:
        rank.kill()
    assert codes == [2, 2], f"{codes}\n" + "\n".join(run.tail(40))
    error = run.history().error
    assert error.code == "run.disk_full" and error.message.startswith("The disk is full: the snapshot state_step_00001")
    assert newest_valid(run.path) is None and [p.name for p in run.checkpoints.iterdir()] == []
