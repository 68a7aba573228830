"""The reference page of the config: complete, and the one in web/docs is the one that the sections give today."""

from pathlib import Path

from ltx_train.config import TrainConfig, known_fields
from ltx_train.fields import page

PAGE = Path(__file__).parents[2] / "web" / "docs" / "config.md"


def test_the_page_names_every_field():
    text = page()
    assert all(f"| `{path.rsplit('.', 1)[-1]}` |" in text for path in known_fields(TrainConfig))


def test_the_shipped_page_is_up_to_date():
    assert PAGE.read_text(encoding="utf-8").strip() == page().strip(), "run: python -m ltx_train fields > web/docs/config.md"
