"""autotune on a tiny model: its trials are real runs in children of their own."""

from ltx_train import launch
from ltx_train.__main__ import main
from ltx_train.config import TrainConfig
from ltx_train.runs.run_dir import RunDir
from tests.end_to_end.corridor import Forked


def test_a_config_is_tuned(home, tmp_path, capsys, monkeypatch):
    """One sample a step on the CPU leaves nothing to change: the sanity run alone, which a whole child carries out."""
    monkeypatch.setattr(launch, "spawn", Forked)
    config = home.config(tmp_path / "run", optimization={"batch_size": 1, "steps": 9})
    config.save(tmp_path / "job.yaml")
    assert main(["autotune", str(tmp_path / "job.yaml"), "--steps", "2", "--write", str(tmp_path / "tuned.yaml")]) == 0
    told = capsys.readouterr().out
    assert "sanity run, 2 steps" in told and "the fastest" in told
    assert (tmp_path / "autotune.log").read_text().count("\n") == 2
    trial = RunDir(tmp_path / "run_autotune" / "0_sanity")
    assert len(trial.history().steps) == 2 and not trial.checkpoints.exists()
    assert not (tmp_path / "run").exists(), "the run itself is not begun"
    assert TrainConfig.load(tmp_path / "tuned.yaml") == config
