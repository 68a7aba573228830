"""A run that keeps no training state goes on from the newest weights it has written, and says so."""

import pytest
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from ltx_train.errors import RunError
from ltx_train.runs.events import StepEvent, WarningEvent
from tests.end_to_end.corridor import Killed, at_step, train

KEPT = {"interval": 2, "keep_last_n": 0, "save_training_state": "off", "precision": "float32"}


def test_a_run_without_snapshots_goes_on_from_its_newest_weights(home, tmp_path):
    """Killed after step 3 of 4 it starts at step 3 with the weights of step 2: the same batch and noise give the same loss again."""
    cache = str(home.cache("ltx2.3", home.clips))
    config = home.config(tmp_path / "run", optimization={"steps": 4}, data={"preprocessed_data_root": cache}, checkpoints=KEPT)

    def die():
        raise Killed

    with pytest.raises(Killed):
        train(config, lambda live: at_step(live, 3, die))
    done = train(config)
    assert [e.step for e in done.events(StepEvent)] == [1, 2, 3, 3, 4]
    before, after = (e.loss for e in done.events(StepEvent) if e.step == 3)
    assert after == pytest.approx(before, rel=1e-4)
    (told,) = [e for e in done.events(WarningEvent) if e.code == "resume.own_weights"]
    assert "step 2" in told.message and "afresh" in told.hint
    assert not list((tmp_path / "run" / "checkpoints").glob("state_*"))

    newest = tmp_path / "run" / "checkpoints" / "lora_weights_step_00004.safetensors"
    with safe_open(newest, "pt") as file:
        metadata = file.metadata()
    save_file(load_file(newest), newest, {**metadata, "ltx_train.base": "another"})
    with pytest.raises(RunError, match="another training: base changed"):
        train(config.model_copy(update={"optimization": config.optimization.model_copy(update={"steps": 5})}))
