"""What the card of a finished run says."""

from types import SimpleNamespace

import pytest
import yaml

from ltx_train.models.families import FAMILIES
from ltx_train.parts import model_card


@pytest.mark.parametrize("family, hub", [("ltxv-2b", "Lightricks/LTX-Video"), ("ltx2.3", "Lightricks/LTX-2.3")])
def test_the_base_model_is_named_as_the_hub_names_it(tmp_path, family, hub):
    """The Hub refuses a card whose ``base_model`` is no repository."""
    config = SimpleNamespace(
        model=SimpleNamespace(open=lambda: SimpleNamespace(family=FAMILIES[family])), data=SimpleNamespace(captions=SimpleNamespace(trigger="sks")), lora=SimpleNamespace(rank=8)
    )
    samples = {"a": SimpleNamespace(path="samples/a.mp4", prompt="a cat", step=4), "b": SimpleNamespace(path="samples/b.mp4", prompt="before", step=2)}
    live = SimpleNamespace(dir=SimpleNamespace(name="cat", path=tmp_path, history=lambda: SimpleNamespace(samples=samples)))
    head = yaml.safe_load(model_card(config, live, 4).text("me/cat", "cat.safetensors").split("---\n", 2)[1])
    assert (head["base_model"], head["instance_prompt"], head["widget"]) == (hub, "sks", [{"text": "a cat", "output": {"url": "samples/a.mp4"}}])
