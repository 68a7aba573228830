"""Dataset files that are edited in place: a row is found by its clip, however the clip's path is written."""

import pytest

from ltx_train.data.sources import TableSource
from ltx_train.data.tables import Table


@pytest.mark.parametrize("column", ["video", "media_path", "image", "audio"])
@pytest.mark.parametrize("written", ["sub/a.mp4", "./sub/a.mp4", "sub\\a.mp4", "{root}/sub/a.mp4"])
def test_a_row_is_found_by_the_clip_that_training_reads(tmp_path, column, written):
    clip = tmp_path / "sub" / "a.mp4"
    clip.parent.mkdir()
    clip.touch()
    table = Table(tmp_path / "d.jsonl", [{column: written.format(root=tmp_path), "caption": "old"}, {"caption": "of no clip"}])
    table.write()
    (sample, _) = TableSource(path=str(table.path)).samples()
    table.set(sample.media, {"caption": "new"})
    table.write()
    assert [row["caption"] for row in Table.read(table.path).rows] == ["new", "of no clip"], "no second row of the same clip"
