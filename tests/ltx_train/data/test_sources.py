"""Samples from folders, dataset files in any encoding, ComfyUI's lists and chains."""

from __future__ import annotations

import csv
import io
import json

import pytest
import torch

from ltx_train.data.sources import Captions, ChainSource, FolderSource, MemoryClip, MemorySource, TableSource, open_source
from ltx_train.data.texts import clean_prefix, decode_text
from ltx_train.errors import DataError

CAPTION = "Ein Mädchen läuft über die Straße – “schnell”"


def touch(path, text=b"x"):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def test_folder_is_recursive_and_stems_do_not_collide(tmp_path):
    for name in ("a.mp4", "a.mov", "a.png", "deep/er/b.webm", "deep/er/b.txt", "a.txt", "notes.md", ".ltx_cache/x.mp4"):
        touch(tmp_path / name, "words")
    found = {s.id: s for s in FolderSource(path=str(tmp_path)).samples()}
    assert sorted(found) == ["a.mov", "a.mp4", "a.png", "deep/er/b.webm"]
    assert all(s.caption == "words" and not s.findings for s in found.values())


def test_a_clip_of_an_unknown_name_is_one_where_it_has_a_caption(tmp_path):
    """What it holds is looked at when it is read; notes and what other tools left beside clips are no clips."""
    for name in ("phone.HEIC", "old.r3d", "old.txt", "whole.name", "whole.name.txt", "a.mp4", "a.npz", "a.txt", "b.npz", "notes.md"):
        touch(tmp_path / name, "words")
    assert sorted(s.id for s in FolderSource(path=str(tmp_path)).samples()) == ["a.mp4", "old.r3d", "phone.HEIC", "whole.name"]


def test_caption_beside_the_full_name_wins(tmp_path):
    touch(tmp_path / "a.mp4"), touch(tmp_path / "a.png")
    touch(tmp_path / "a.mp4.txt", "of the film"), touch(tmp_path / "a.caption", "of both")
    assert {s.id: s.caption for s in open_source(tmp_path).samples()} == {"a.mp4": "of the film", "a.png": "of both"}


@pytest.mark.parametrize("content", ['{"caption": "yes"}', '"yes"', '{"prompt": "yes", "other": 1}'])
def test_json_sidecar(tmp_path, content):
    touch(tmp_path / "a.mp4"), touch(tmp_path / "a.json", content)
    assert open_source(tmp_path).samples()[0].caption == "yes"


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16", "utf-16-le", "utf-16-be", "utf-32", "cp1252"])
@pytest.mark.parametrize("kind", ["csv", "json", "jsonl", "txt"])
def test_any_encoding(tmp_path, encoding, kind):
    touch(tmp_path / "clip.mp4")
    rows = [{"media_path": "clip.mp4", "caption": CAPTION}]
    out = io.StringIO()
    if kind == "csv":
        writer = csv.DictWriter(out, ["media_path", "caption"])
        writer.writeheader()
        writer.writerows(rows)
    text = {"csv": out.getvalue(), "json": json.dumps(rows, ensure_ascii=False), "jsonl": json.dumps(rows[0], ensure_ascii=False) + "\n", "txt": CAPTION}[kind]
    path = touch(tmp_path / ("clip.txt" if kind == "txt" else f"set.{kind}"), text.encode(encoding))
    sample = open_source(tmp_path if kind == "txt" else path).samples()[0]
    assert sample.caption == CAPTION and sample.media == tmp_path / "clip.mp4"
    assert [f.code for f in sample.findings] == (["caption.guessed_encoding"] if encoding == "cp1252" else [])


def test_plain_ascii_is_no_guess():
    assert decode_text(b"plain").guessed is False


def test_official_columns_aliases_and_roles(tmp_path):
    for name in ("v.mp4", "r.mp4", "m.png", "a.wav"):
        touch(tmp_path / name)
    lines = [
        {"video": "v.mp4", "caption": "one", "reference_video": "r.mp4", "video_mask": "m.png", "audio": "a.wav"},
        {"media_path": "v.mp4", "caption": "two", "ref_media_path": "r.mp4"},
        {"audio": "a.wav", "caption": "three"},
        {"Video": "v.mp4", "Text": "four"},
    ]
    path = touch(tmp_path / "d.jsonl", "\n".join(json.dumps(line) for line in lines))
    found = open_source(path).samples()
    assert [s.caption for s in found] == ["one", "two", "three", "four"]
    assert [s.id for s in found] == ["v.mp4", "v.mp4#2", "a.wav", "v.mp4#3"]
    assert set(found[0].roles) == {"reference_video", "video_mask", "audio"} and set(found[1].roles) == {"reference_video"}
    assert found[2].media == tmp_path / "a.wav" and not found[2].roles


def test_columns_are_read_from_every_row(tmp_path):
    touch(tmp_path / "v.mp4")
    path = touch(tmp_path / "d.json", json.dumps([{"video": "v.mp4"}, {"video": "v.mp4", "caption": "here"}]))
    first, second = open_source(path).samples()
    assert [f.code for f in first.findings] == ["caption.missing"] and second.caption == "here"


def test_faults_are_named_by_row(tmp_path):
    path = touch(tmp_path / "d.jsonl", '{"video": "gone.mp4", "caption": "x"}\n{broken\n{"caption": "y"}\n')
    assert [[f.code for f in s.findings if f.refused] for s in open_source(path).samples()] == [["media.missing"], ["row.broken", "caption.missing"], ["row.no_media"]]


def test_a_line_separator_inside_a_caption_ends_no_row(tmp_path):
    touch(tmp_path / "v.mp4")
    path = touch(tmp_path / "d.jsonl", '{"video": "v.mp4", "caption": "a\u2028b\x85c"}\r\n{"video": "v.mp4", "caption": "d"}')
    assert [s.caption for s in open_source(path).samples()] == ["a\u2028b\x85c", "d"]


@pytest.mark.parametrize("value", ["1" * 5000, "[" * 100000], ids=["digits", "nesting"])
def test_json_that_python_cannot_read_is_a_finding(tmp_path, value):
    row = f'{{"video": "v.mp4", "caption": "x", "n": {value}}}'
    broken, good = open_source(touch(tmp_path / "d.jsonl", f'{row}\n{{"video": "gone.mp4", "caption": "x"}}')).samples()
    assert "row.broken" in [f.code for f in broken.findings] and good.caption == "x"
    with pytest.raises(DataError, match="not valid JSON"):
        open_source(touch(tmp_path / "d.json", f"[{row}]")).samples()


def test_one_bad_path_costs_one_row(tmp_path):
    paths = ["v.mp4", "a" * 5000 + ".mp4", "~nobody/v.mp4", "v\0.mp4"]
    path = touch(tmp_path / "d.json", json.dumps([{"video": touch(tmp_path / p).name if p == "v.mp4" else p, "caption": "x"} for p in paths]))
    assert [[f.code for f in s.findings] for s in open_source(path).samples()] == [[], *[["media.missing"]] * 3]


def test_a_table_without_a_header_says_what_it_reads(tmp_path):
    with pytest.raises(DataError, match="no column that names the clips") as error:
        open_source(touch(tmp_path / "d.csv", "clip0.mp4,a cat\nclip1.mp4,a dog\n")).samples()
    assert "a cat, clip0.mp4" in error.value.hint
    with pytest.raises(DataError, match="holds no rows"):
        open_source(touch(tmp_path / "d.json", "\n")).samples()


def test_a_caption_of_unseen_signs_is_none_and_half_a_character_can_be_stored(tmp_path):
    touch(tmp_path / "v.mp4")
    rows = [{"video": "v.mp4", "caption": "\u200b\ufeff\n"}, {"video": "v.mp4", "caption": "a \ud800 b"}]
    unseen, half = open_source(touch(tmp_path / "d.json", json.dumps(rows))).samples()
    assert [f.code for f in unseen.findings] == ["caption.missing"] and half.caption == "a \ufffd b"


def test_windows_paths_and_semicolons(tmp_path):
    touch(tmp_path / "sub" / "v.mp4")
    path = touch(tmp_path / "d.csv", 'video;caption\nsub\\v.mp4;"a, b; c"\n')
    sample = open_source(path).samples()[0]
    assert sample.media.is_file() and sample.caption == "a, b; c"


def test_mapping_forms_of_json(tmp_path):
    touch(tmp_path / "v.mp4")
    for data in ({"v.mp4": "c"}, {"v.mp4": {"caption": "c"}}, {"data": [{"video": "v.mp4", "caption": "c"}]}):
        assert open_source(touch(tmp_path / "d.json", json.dumps(data))).samples()[0].caption == "c"


def test_folder_with_a_dataset_file(tmp_path):
    touch(tmp_path / "v.mp4"), touch(tmp_path / "metadata.jsonl", '{"file_name": "v.mp4", "text": "from the list"}')
    assert open_source(tmp_path).samples()[0].caption == "from the list"


def test_unknown_column_and_missing_paths_are_named(tmp_path):
    path = touch(tmp_path / "d.csv", "video,caption\nv.mp4,x\n")
    with pytest.raises(DataError, match="no column words"):
        TableSource(path=str(path), columns={"caption": "words"}).samples()
    for bad in (tmp_path / "nothing", tmp_path / "no.csv"):
        with pytest.raises(DataError):
            open_source(bad)
    with pytest.raises(DataError, match="No clip"):
        FolderSource(path=str((tmp_path / "d.csv").parent)).samples()


def test_kohya_repeats(tmp_path):
    touch(tmp_path / "3_cat" / "a.png"), touch(tmp_path / "10_dog" / "b.png")
    source = FolderSource(path=str(tmp_path), captions=Captions(missing="empty"), repeats=2)
    assert {s.id: s.repeats for s in source.samples()} == {"3_cat/a.png": 6, "10_dog/b.png": 20}
    touch(tmp_path / "2024_holiday" / "c.png")  # a year is no repeat count
    assert {s.repeats for s in source.samples()} == {2}


def test_roles_by_stem(tmp_path):
    for name in ("a.mp4", "a_reference.mp4", "a_mask.png", "a.wav", "b.mp4", "only.wav"):
        touch(tmp_path / name)
    found = {s.id: s for s in FolderSource(path=str(tmp_path), captions=Captions(missing="empty")).samples()}
    assert sorted(found) == ["a.mp4", "b.mp4", "only.wav"]
    assert {k: v.name for k, v in found["a.mp4"].roles.items()} == {"reference_video": "a_reference.mp4", "video_mask": "a_mask.png", "audio": "a.wav"}


def test_roles_by_folder_across_types(tmp_path):
    touch(tmp_path / "clips" / "a.mp4"), touch(tmp_path / "clips" / "b.mp4"), touch(tmp_path / "depth" / "a.png")
    source = FolderSource(path=str(tmp_path / "clips"), reference_video=str(tmp_path / "depth"), captions=Captions(missing="empty"))
    a, b = source.samples()
    assert a.roles["reference_video"].name == "a.png" and [f.code for f in b.findings] == ["role.unpaired"]


@pytest.mark.parametrize(
    ("fields", "written", "expected"),
    [
        ({}, "cap", "cap"),
        ({"trigger": "TOK"}, "cap", "TOK cap"),
        ({"trigger": "TOK"}, "TOK cap", "TOK cap"),
        ({"trigger": "TOK"}, "TOKEN", "TOK TOKEN"),
        ({"trigger": "TOK"}, "TOK, cap", "TOK, cap"),
        ({"policy": "file_name"}, "cap", "red car at night"),
        ({"policy": "trigger", "trigger": "TOK"}, "cap", "TOK"),
        ({"policy": "empty"}, "cap", ""),
        ({"missing": "empty"}, None, ""),
        ({"missing": "trigger", "trigger": "TOK"}, None, "TOK"),
        ({"missing": "file_name", "trigger": "TOK"}, "  ", "TOK red car at night"),
        ({"remove_llm_prefixes": True}, "The video shows a cat", "a cat"),
    ],
)
def test_caption_policies(fields, written, expected):
    text, finding = Captions(**fields).resolve(written, "red_car-at_night_03")
    assert (text, finding) == (expected, None)


def test_refused_captions():
    assert Captions().resolve(None, "x")[1].code == "caption.missing"
    assert Captions(policy="trigger").resolve("y", "x")[1].code == "caption.missing"


@pytest.mark.parametrize("opening", ["This video shows ", "The image depicts ", "A clip featuring ", "The footage captures ", "We see "])
def test_prefixes(opening):
    assert clean_prefix(opening.replace("featuring", "features") + "a dog") == "a dog"
    assert clean_prefix("Sunlight falls on a video shop") == "Sunlight falls on a video shop"


def test_memory_lists():
    clips = [MemoryClip("x", torch.zeros(9, 32, 32, 3)), MemoryClip("y", torch.zeros(1, 32, 32, 3))]
    found = MemorySource(clips=clips, texts=["one for all"]).samples()
    assert [s.caption for s in found] == ["one for all"] * 2 and found[0].in_memory is clips[0] and len({s.id for s in found}) == 2
    with pytest.raises(ValueError, match="2 captions for 1 clips"):
        MemorySource(clips=clips[:1], texts=["a", "b"])


def test_chain(tmp_path):
    touch(tmp_path / "one" / "a.png"), touch(tmp_path / "two" / "one" / "a.png")
    first = FolderSource(path=str(tmp_path / "one"), repeats=3, weight=0.5, captions=Captions(policy="trigger", trigger="A"), resolution_buckets="64x64", regularisation="prior")
    second = FolderSource(path=str(tmp_path / "two" / "one"), captions=Captions(policy="trigger", trigger="B"))
    found = ChainSource(sources=[first, second], repeats=2).samples()
    assert [(s.id, s.caption, s.repeats, s.weight, s.buckets) for s in found] == [("one/a.png", "A", 6, 0.5, "64x64"), ("one~2/a.png", "B", 2, 1.0, None)]
    assert [s.regularisation for s in found] == ["prior", ""]


def test_named_columns_and_kinds_by_path(tmp_path):
    from ltx_train.data.dataset import DataSection

    touch(tmp_path / "v.mp4"), touch(tmp_path / "f" / "w.mp4"), touch(tmp_path / "d.csv", "clip,words,caption\nv.mp4,mine,not this\n")
    section = DataSection(sources=[{"path": str(tmp_path / "d.csv"), "columns": {"video": "clip", "caption": "words"}}, {"path": str(tmp_path / "f"), "captions": {"missing": "empty"}}])
    assert [(s.id, s.caption) for s in section.samples()] == [("d/v.mp4", "mine"), ("f/w.mp4", "")]
    assert DataSection.model_validate(section.model_dump(mode="json")) == section
