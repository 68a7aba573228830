"""bench asked for what cannot be measured: told at once, in one line, before a network is built."""

import pytest

from ltx_train.__main__ import main

ASKED = [
    ("step --size banana", "not WIDTHxHEIGHTxFRAMES"),
    ("step --size 0x0x0", "Nearest: 32x32x1"),
    ("step --size 65x64x10", "Nearest: 64x64x9"),
    ("step --rank 0", "rank: Input should be greater"),
    ("step --rank 100000", "more than the 128 columns"),
    ("step --steps 0", "steps=0 is less than 1"),
    ("step --family ltx2.4", "There is no family"),
    ("step --case link=nan", "link=nan"),
    ("step --case quantization=int3", "'int3' is not known"),
    ("step --case optimizer=moon", "on the device or on the host"),
    ("step --table 5-3", "goes backwards"),
    ("step --table 1-99999999999", "there is no row 99999999999"),
    ("step --table 1 --case rank=4", "Give one of the two"),
    ("step --minutes 4", "for --table"),
    ("step --table 1 --minutes nan", "for --table"),
    ("step --out nodir/rows.jsonl", "Records cannot be kept"),
    ("numerics --rank 1", "rank: Input should be greater"),
    ("load --second 64x64", "not WIDTHxHEIGHTxFRAMES"),
    ("load --file x.safetensors", "--tiny writes its own"),
    ("load --case family=ltx2 --case family=ltx2.3", "of one family"),
    ("sample --steps 0", "steps=0 is less than 1"),
    ("preprocess --full-size-vae ltx9", "There is no family"),
    ("preprocess --full-size-vae ltx2 --encode-seconds 1", "each name the encoder"),
    ("preprocess --video-vae-path x", "belongs to a model"),
    ("preprocess --device banana", "device:"),
    ("preprocess --resolution-bucket 64x64x9;32x32x9", "names several"),
    ("learning --mode t2v --out .", "it is a folder"),
]


@pytest.mark.parametrize(("asked", "told"), ASKED, ids=[asked for asked, _ in ASKED])
def test_what_cannot_be_measured_is_told_at_once(capsys, tmp_path, monkeypatch, asked, told):
    monkeypatch.chdir(tmp_path)
    what, *words = asked.split()
    tiny = ["--tiny"] if what not in ("preprocess", "learning") else []
    assert main(["bench", what, *tiny, *words]) == 2
    said = capsys.readouterr()
    assert said.out == "" and said.err.startswith("error: ") and told in said.err and "Traceback" not in said.err
    assert list(tmp_path.iterdir()) == []
