"""The contact sheet: labels, places, steps chosen, references, sounds, kept latents, files that cannot be read."""

import numpy as np
import pytest
import torch
from PIL import Image

from ltx_train.contact_sheet import CELL, NAME, chosen_steps, middle_frame, thumbnail, write_contact_sheet
from ltx_train.data.writers import write_png, write_video, write_wav
from ltx_train.runs.events import SampleEvent

COLOURS = {(0, 0): (200, 30, 30), (50, 0): (30, 200, 30), (0, 1): (30, 30, 200), (50, 1): (200, 200, 30)}


@pytest.fixture
def run(tmp_path):
    """Two prompts, two steps: each clip of one colour."""
    events = []
    for (step, index), colour in COLOURS.items():
        path = tmp_path / "samples" / f"step_{step:06d}_{index + 1}.mp4"
        path.parent.mkdir(exist_ok=True)
        write_video(path, torch.tensor(colour, dtype=torch.uint8).expand(9, 64, 96, 3), 24.0)
        events.append(SampleEvent(step=step, index=index, path=f"samples/{path.name}", prompt=f"prompt number {index} " + "with many words " * 12))
    return tmp_path, events


def where(picture, colour):
    """(left, top, right, bottom) of the pixels near a colour."""
    near = np.abs(np.asarray(picture).astype(int) - np.array(colour)).max(-1) < 26
    rows, columns = np.nonzero(near)
    return columns.min(), rows.min(), columns.max(), rows.max()


def test_a_row_a_prompt_and_a_column_a_step(run):
    root, events = run
    path = write_contact_sheet(root, events)
    assert path == root / "samples" / NAME
    sheet = Image.open(path)
    boxes = {key: where(sheet, colour) for key, colour in COLOURS.items()}
    assert boxes[0, 0][0] == boxes[0, 1][0] < boxes[50, 0][0] == boxes[50, 1][0]  # columns
    assert boxes[0, 0][1] == boxes[50, 0][1] < boxes[0, 1][1] == boxes[50, 1][1]  # rows
    for left, top, right, bottom in boxes.values():
        assert abs(right - left + 1 - CELL) <= 2 and abs(bottom - top + 1 - CELL * 64 / 96) <= 2
    dark = np.asarray(sheet).max(-1) < 90
    assert dark[34:68, boxes[0, 0][0] : boxes[0, 0][2]].any() and dark[34:68, boxes[50, 0][0] : boxes[50, 0][2]].any()  # step labels
    assert dark[boxes[0, 0][1] : boxes[0, 0][3], : boxes[0, 0][0] - 4].any()  # the prompt, and it does not run into the picture
    assert not dark[68:, boxes[0, 0][0] - 8 : boxes[0, 0][0] - 1].any()


def test_the_reference_comes_first(run):
    root, events = run
    write_png(root / "reference.png", torch.tensor((30, 200, 200), dtype=torch.uint8).expand(50, 50, 3))
    plain = Image.open(write_contact_sheet(root, events)).width
    sheet = Image.open(write_contact_sheet(root, events, {0: root / "reference.png", 7: root / "gone.png"}))
    assert sheet.width == plain + CELL + 10
    assert where(sheet, (30, 200, 200))[2] < where(sheet, COLOURS[0, 0])[0]


def test_what_cannot_be_shown_is_said_and_the_rest_is_drawn(run):
    root, events = run
    (root / events[0].path).write_bytes(b"no clip")
    sheet = Image.open(write_contact_sheet(root, [*events, SampleEvent(step=60, index=0, path="samples/x.video.latent", prompt="p")]))
    assert where(sheet, COLOURS[50, 1]) and sheet.width == 240 + 3 * (CELL + 10) + 10
    assert write_contact_sheet(root, []) is None


def test_steps_are_spread_evenly_with_both_ends():
    assert chosen_steps([3, 1, 2]) == (1, 2, 3)
    many = chosen_steps(range(0, 2001, 100))
    assert len(many) == 8 and many[0] == 0 and many[-1] == 2000 and max(np.diff(many)) - min(np.diff(many)) <= 100


def test_thumbnails(tmp_path):
    frames = torch.stack([torch.full((64, 64, 3), 20 * i, dtype=torch.uint8) for i in range(9)])
    write_video(tmp_path / "a.mp4", frames, 24.0)
    assert abs(int(middle_frame(tmp_path / "a.mp4").mean()) - 80) <= 3
    wave = torch.zeros(2, 16000)
    wave[:, 8000:] = 0.5 * torch.sin(torch.arange(8000) * 0.3)
    write_wav(tmp_path / "a.wav", wave, 16000)
    drawn = np.asarray(thumbnail(tmp_path / "a.wav"))
    blue = (np.abs(drawn.astype(int) - np.array((52, 101, 164))).max(-1) < 5).sum(0)
    assert blue[: CELL // 2 - 8].max() <= 4 < 40 < blue[CELL // 2 + 8 :].mean()
    assert thumbnail(tmp_path / "x.video.latent").size == (CELL, CELL // 2)
