"""References made for you: Canny against closed forms, every control on real files, failures named, nothing of the user's touched."""

import json

import numpy as np
import pytest
import torch

from ltx_train.controls import BlurControl, CannyControl, GreyControl, LowResolutionControl, ReferenceJob, make_references
from ltx_train.controls.edges import canny, hysteresis, sobel
from ltx_train.controls.kinds import blur
from ltx_train.data.buckets import ClipOptions, parse_buckets, plan
from ltx_train.data.media import read_clip, read_image
from ltx_train.data.probe import probe
from ltx_train.data.references import plan_reference
from ltx_train.data.sources import TableSource
from ltx_train.errors import ConfigError
from ltx_train.geometry import VideoFactors
from ltx_train.tiny import media

ODD = 63, 49


@pytest.fixture(scope="module")
def clips(tmp_path_factory):
    """Five clips: plain with sound, turned, variable rate, odd sizes, a still; and one file that is no clip."""
    folder = tmp_path_factory.mktemp("clips")
    media.counter_clip(folder / "a.mp4", 12, 24, width=64, height=48, sound=True)
    media.write_corpus(folder / "more", ["turned90.mp4", "variable.mp4", "text.mp4", "exif6.jpg"])
    media.encode(folder / "odd.mkv", (media.counter_frame(n, *ODD) for n in range(9)), 25, media.Coding(pixel_format="yuv444p"))
    (folder / "a.txt").write_text("a block moves", encoding="utf-8")
    return folder


def wide_step(height=40, width=60, at=30, low=20, high=220):
    picture = np.full((height, width, 3), low, np.uint8)
    picture[:, at:] = high
    return picture


def test_sobel_is_the_gradient_of_a_ramp():
    ramp = np.tile(np.arange(20) * 3, (9, 1))
    across, down = sobel(ramp)
    assert (across[:, 1:-1] == 8 * 3).all() and (down == 0).all()
    assert (sobel(ramp.T)[1][1:-1] == 24).all()


def test_canny_draws_one_line_where_a_step_is():
    edges = canny(wide_step(), 100, 200)
    assert set(np.unique(edges)) == {0, 255}
    # both columns beside the step have the same gradient; ties go to the left one (the first that is larger than its left neighbour)
    assert (edges[:, 29] == 255).all() and edges.sum() == 255 * 40
    assert (canny(wide_step().transpose(1, 0, 2), 100, 200)[29] == 255).all()


def test_canny_keeps_weak_edges_only_when_they_hang_on_strong_ones():
    # steps of 40 levels have a gradient of 160 (weak), of 60 levels 240 (strong): Sobel gives 4 times the step
    picture = wide_step(low=100, high=140)
    assert canny(picture, 100, 200).sum() == 0 and canny(picture, 100, 150).sum() > 0
    picture[:10, 30:] = 160
    edges = canny(picture, 100, 200)
    assert (edges[12:, 29] == 255).all(), "the weak part of the line is connected to the strong one"


def test_canny_finds_a_slanted_edge_as_a_thin_line():
    rows, columns = np.mgrid[:50, :50]
    picture = np.where((rows > columns)[..., None], 230, 10).astype(np.uint8).repeat(3, -1)
    edges = canny(picture, 100, 200)[5:-5, 5:-5] > 0
    assert edges.any(1).all() and (edges.sum(1) <= 2).all()


def test_hysteresis_follows_a_snake():
    weak = np.zeros((30, 30), bool)
    for row in range(0, 30, 2):
        weak[row] = True
        weak[row + 1, 29 if row % 4 == 0 else 0] = True
    strong = np.zeros_like(weak)
    strong[0, 0] = True
    assert (hysteresis(weak, strong) == weak).all()
    assert hysteresis(weak, np.zeros_like(weak)).sum() == 0


def test_canny_equals_opencv_on_noise_and_shapes():
    cv2 = pytest.importorskip("cv2", reason="opencv is not installed: Canny is held by closed forms alone")
    rng = np.random.default_rng(0)
    picture = cv2.GaussianBlur(rng.integers(0, 256, (120, 160, 3), dtype=np.uint8), (0, 0), 1.5)
    cv2.circle(picture, (80, 60), 40, (250, 20, 90), -1)
    for low, high in ((100, 200), (30, 90)):
        expected = cv2.Canny(cv2.cvtColor(picture, cv2.COLOR_RGB2GRAY), low, high)
        assert (canny(picture, low, high) == expected).all()


def test_blur_is_a_gaussian():
    point = torch.zeros(41, 41, 3, dtype=torch.uint8)
    point[20, 20] = 255
    sigma = 1.5
    line = np.exp(-0.5 * (np.arange(-20, 21) / sigma) ** 2)
    expected = 255 * np.outer(line, line) / line.sum() ** 2
    assert np.abs(blur(point, sigma)[..., 0].numpy() - expected).max() <= 0.6  # rounding, and the tails beyond 3 sigma
    flat = torch.full((20, 30, 3), 77, dtype=torch.uint8)
    assert (blur(flat, 5.0) == 77).all()


def test_grey_and_low_resolution_on_known_pictures():
    red = torch.zeros(16, 16, 3, dtype=torch.uint8)
    red[..., 0] = 200
    (grey,) = GreyControl().apply([red])
    assert grey.shape == red.shape and (grey == round(0.2126 * 200)).all()
    fine = torch.zeros(32, 32, 3, dtype=torch.uint8)
    fine[::2] = 255  # lines of one pixel vanish in a picture of a quarter
    (low,) = LowResolutionControl(factor=4).apply([fine])
    assert low.shape == fine.shape and (low[4:-4].int() - 128).abs().max() < 12


@pytest.mark.parametrize("control", [CannyControl(), BlurControl(), LowResolutionControl(), GreyControl()], ids=lambda c: c.kind)
def test_references_have_the_clips_rate_length_and_size(control, clips, tmp_path):
    before = {p: p.stat().st_mtime_ns for p in clips.rglob("*")}
    done = make_references(ReferenceJob(dataset=str(clips), output=str(tmp_path / "out"), control=control))
    assert sorted(done.made) == ["a.mp4", "more/exif6.jpg", "more/turned90.mp4", "more/variable.mp4", "odd.mkv"]
    assert list(done.failed) == ["more/text.mp4"] and done.failed["more/text.mp4"]
    assert {p: p.stat().st_mtime_ns for p in clips.rglob("*")} == before, "the user's folder is only read"
    rows = TableSource(path=str(done.table)).samples()
    assert len(rows) == 5
    for row in rows:
        clip, made = probe(row.media), probe(row.roles["reference_video"])
        assert (made.width, made.height, made.frames) == (clip.width, clip.height, clip.frames), row.id
        if clip.kind == "video":
            assert made.timeline.rate == clip.timeline.rate and made.timeline.constant
    assert [r.caption for r in rows if r.media.name == "a.mp4"] == ["a block moves"]


def test_a_reference_shows_the_same_moment_as_its_clip(clips, tmp_path):
    job = ReferenceJob(dataset=str(clips), output=str(tmp_path / "out"), control=GreyControl())
    done = make_references(job)
    for row in TableSource(path=str(done.table)).samples():
        found = probe(row.media)
        if found.kind == "image" or row.media.name == "odd.mkv":
            continue
        (piece,) = plan(row, found, parse_buckets(f"{found.width}x{found.height}x9"), ClipOptions())
        paired = plan_reference(piece, probe(row.roles["reference_video"]), VideoFactors(8, 1, 1))
        counters = [[media.read_counter(frame.numpy()) for frame in read_clip(p, sound=False).frames] for p in (piece, paired)]
        assert counters[0] == counters[1], row.id


def test_a_second_run_makes_only_what_is_new_or_changed(clips, tmp_path):
    out = tmp_path / "out"
    make_references(ReferenceJob(dataset=str(clips), output=str(out)))
    (out / "a.mp4").unlink()
    again = make_references(ReferenceJob(dataset=str(clips), output=str(out)))
    assert again.made == ["a.mp4"] and len(again.kept) == 4
    other = make_references(ReferenceJob(dataset=str(clips), output=str(out), control=CannyControl(low=50)))
    assert len(other.made) == 5
    assert len(make_references(ReferenceJob(dataset=str(clips), output=str(out), control=CannyControl(low=50), override=True)).made) == 5


def test_a_dataset_file_gets_the_column_and_keeps_its_own(tmp_path):
    media.dataset(tmp_path / "clips", 2, frames=9, width=64, height=48, sound=False)
    table = tmp_path / "clips" / "dataset.json"
    rows = [{"caption": f"mine {n}", "media_path": f"clip{n}.mp4", "note": n} for n in range(2)]
    table.write_text(json.dumps(rows), encoding="utf-8")
    done = make_references(ReferenceJob(dataset=str(tmp_path / "clips"), output=str(table)))
    after = json.loads(table.read_text(encoding="utf-8"))
    assert [{k: r[k] for k in ("caption", "media_path", "note")} for r in after] == rows
    assert [r["reference_video"] for r in after] == ["dataset_canny/clip0.mp4", "dataset_canny/clip1.mp4"]
    assert done.failed == {} and all(s.roles for s in TableSource(path=str(table)).samples())


def test_clips_of_one_stem_do_not_share_a_reference(tmp_path):
    folder = tmp_path / "clips"
    for name in ("a.mp4", "a.mov", "a.mkv"):
        media.counter_clip(folder / name, 5, width=32, height=32)
    media.write_corpus(folder, ["grey.png"])
    done = make_references(ReferenceJob(dataset=str(folder), output=str(tmp_path / "out"), control=GreyControl()))
    references = [s.roles["reference_video"].resolve() for s in TableSource(path=str(done.table)).samples()]
    assert len(references) == len(set(references)) == 4 and all(p.is_file() for p in references)


def test_the_default_place_is_hidden_from_the_dataset_and_others_files_are_not_mixed_with(clips, tmp_path):
    assert ReferenceJob(dataset=str(clips)).places()[0] == clips / ".ltx_references" / "canny"
    (tmp_path / "mine.txt").write_text("x")
    with pytest.raises(ConfigError, match="holds other files"):
        make_references(ReferenceJob(dataset=str(clips), output=str(tmp_path)))
    with pytest.raises(ValueError, match="above high"):
        CannyControl(low=300, high=200)


def test_depth_of_a_model_in_a_folder_is_near_bright_and_steady(tmp_path):
    import transformers

    from ltx_train.controls.depth import DepthControl

    backbone = transformers.Dinov2Config(image_size=28, patch_size=14, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, out_indices=[1, 2], reshape_hidden_states=False)
    config = transformers.DepthAnythingConfig(backbone_config=backbone, reassemble_hidden_size=16, neck_hidden_sizes=[8, 8], reassemble_factors=[2, 1], fusion_hidden_size=8, head_hidden_size=4)
    torch.manual_seed(0)
    model = transformers.DepthAnythingForDepthEstimation(config)
    model.save_pretrained(tmp_path / "depth")
    transformers.DPTImageProcessor(size={"height": 28, "width": 28}, ensure_multiple_of=14).save_pretrained(tmp_path / "depth")
    frames = [torch.from_numpy(media.counter_frame(n, 64, 48)) for n in range(3)]
    made = list(DepthControl(model_path=str(tmp_path / "depth"), device="cpu", trim=0).apply(iter(frames)))
    assert len(made) == 3 and all(f.shape == (48, 64, 3) and f.dtype == torch.uint8 for f in made)
    values = torch.stack(made)
    assert int(values.max()) > 240 and int(values.min()) < 15, "one scale over the clip"
    processor = transformers.AutoImageProcessor.from_pretrained(tmp_path / "depth")
    with torch.no_grad():
        depth = torch.cat([model.eval()(**processor(images=f.numpy(), return_tensors="pt")).predicted_depth for f in frames])
    expected = (depth - depth[:, ::8, ::8].min()) / (depth[:, ::8, ::8].max() - depth[:, ::8, ::8].min())
    expected = torch.nn.functional.interpolate(expected[:, None], size=(48, 64), mode="bilinear").clamp(0, 1)[:, 0]
    assert (values[..., 0] / 255 - expected).abs().max() < 0.01


def test_a_folder_without_a_depth_model_is_named(tmp_path):
    from ltx_train.controls.depth import DepthControl

    with pytest.raises(ConfigError, match="no depth model"):
        next(DepthControl(model_path=str(tmp_path)).apply([torch.zeros(8, 8, 3, dtype=torch.uint8)]))


def test_pictures_keep_their_size(clips, tmp_path):
    done = make_references(ReferenceJob(dataset=str(clips), output=str(tmp_path / "o"), control=CannyControl()))
    assert read_image(done.folder / "more" / "exif6.png").shape == (96, 128, 3)
    assert probe(done.folder / "odd.mp4").width == ODD[0]
