"""Captions: answers however they are wrapped, a fake endpoint, a tiny random Qwen2.5-Omni, and the user's own words kept."""

import base64
import io
import json
import threading
import wave
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import numpy as np
import pytest
import torch

from ltx_train.captioner import CaptionJob, EndpointCaptioner, LocalCaptioner, caption_dataset
from ltx_train.captioner.answers import NoCaption, parse_caption
from ltx_train.captioner.clips import read_excerpt
from ltx_train.captioner.endpoint import EndpointError, check_address
from ltx_train.captioner.local import sound_tokens
from ltx_train.data.sources import TableSource
from ltx_train.errors import ConfigError, DataError, StopRequested
from ltx_train.tiny import media

# -- answers ---------------------------------------------------------------------------------------------------------

WANTED = 'A dog runs. Someone says "hello".'
INNER = json.dumps({"combined_caption_english": WANTED})


@pytest.mark.parametrize(
    "answer",
    [
        INNER,
        f"Sure! Here it is:\n```json\n{INNER}\n```\nAnything else?",
        f"<think>The user wants JSON {{...}}</think>\n{INNER}",
        f"thoughts whose first mark is in the prompt {{x}}</think>{INNER}",
        f'{{"visual": {{"subject": "dog"}}, "Combined_Caption_English": {json.dumps(WANTED)}}}',
        json.dumps({"answer": WANTED}),
        WANTED,
        f"```\n{WANTED}\n```",
        f"  {WANTED}\n\n",
        INNER.replace("runs. ", "runs.\n"),  # a real line break inside a string
        INNER[:-2] + " And then it st",  # cut off in the middle of a sentence
        INNER[:-2] + r" Half an escape \u00",
    ],
)
def test_a_caption_is_found_in(answer):
    assert parse_caption(answer) == WANTED


@pytest.mark.parametrize("answer", ["", "<think>so many thoughts that no room was left", "{}", '{"combined_caption_english": ""}', '{"combined_caption_english": "', "[1, 2", '{"a": "x", "b": "y"}'])
def test_an_answer_without_a_caption_is_named(answer):
    if answer == "[1, 2":
        assert parse_caption(answer) == "[1, 2"  # plain text, whatever it is
        return
    with pytest.raises(NoCaption):
        parse_caption(answer)


def test_a_cut_caption_without_a_whole_sentence_is_kept():
    assert parse_caption('{"combined_caption_english": "a red block moves over') == "a red block moves over"


# -- a fake endpoint -------------------------------------------------------------------------------------------------


class Fake:
    """An OpenAI-compatible server on this machine: answers and statuses as told, requests kept."""

    def __init__(self):
        self.requests, self.headers, self.plan = [], [], []
        self.answer = lambda body: json.dumps({"combined_caption_english": f"caption {len(self.requests)}"})
        fake = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self):
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                fake.requests.append(body)
                fake.headers.append(dict(self.headers) | {"path": self.path})
                status = fake.plan.pop(0) if fake.plan else 200
                if status == "close":
                    self.connection.close()
                    return
                content = json.dumps({"choices": [{"message": {"role": "assistant", "content": fake.answer(body)}}]}) if status == 200 else '{"error": "busy"}'
                self.send_response(status)
                if status in (301, 302):
                    self.send_header("Location", f"http://127.0.0.1:{fake.port}/elsewhere")
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content.encode())

            def log_message(self, *args):
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.port = self.server.server_address[1]
        threading.Thread(target=self.server.serve_forever, args=(0.02,), daemon=True).start()

    @property
    def url(self):
        return f"http://127.0.0.1:{self.port}/v1"


@pytest.fixture
def fake():
    server = Fake()
    yield server
    server.server.shutdown()
    server.server.server_close()


@pytest.fixture(scope="module")
def clips(tmp_path_factory):
    folder = tmp_path_factory.mktemp("clips")
    media.counter_clip(folder / "a.mp4", 48, 24, width=128, height=64, sound=True)
    media.counter_clip(folder / "b.mp4", 24, 24, width=64, height=48)
    media.write_corpus(folder, ["exif6.jpg", "alone.wav", "text.mp4"])
    for text in folder.glob("*.txt"):
        text.unlink()
    return folder


def captioner(fake, **more):
    return EndpointCaptioner(**{"url": fake.url, "pause": 0.0, "model": "m", **more})


def job(fake, source, out, more=None, **fields):
    return CaptionJob(input=str(source), output=str(out), captioner=captioner(fake, **(more or {})), **fields)


def captions(path):
    return {row.media.name: row.caption for row in TableSource(path=str(path)).samples()}


def parts(body, kind):
    return [p[kind] for p in body["messages"][0]["content"] if p["type"] == kind]


def test_a_folder_is_captioned_and_failures_are_named(fake, clips, tmp_path):
    out = tmp_path / "captions.json"
    done = caption_dataset(job(fake, clips, out))
    assert done.written == ["a.mp4", "alone.wav", "b.mp4", "exif6.jpg"]
    assert list(done.failed) == ["text.mp4"]
    assert captions(out) == {"a.mp4": "caption 1", "alone.wav": "caption 2", "b.mp4": "caption 3", "exif6.jpg": "caption 4"}
    assert {frozenset(r) for r in json.loads(out.read_text())} == {frozenset({"caption", "media_path"})}
    assert {h["path"] for h in fake.headers} == {"/v1/chat/completions"}


def test_what_is_sent_of_a_clip_is_the_clip(fake, clips, tmp_path):
    import av

    caption_dataset(job(fake, clips, tmp_path / "o.json", {"fps": 4.0}, extensions="mp4"))
    body = fake.requests[0]
    assert (body["model"], body["temperature"], body["repetition_penalty"], body["max_tokens"]) == ("m", 0.0, 1.05, 4096)
    (video,), (sound,), (text,) = parts(body, "video_url"), parts(body, "input_audio"), [p["text"] for p in body["messages"][0]["content"] if p["type"] == "text"]
    assert "combined_caption_english" in text and "heard" in text
    raw = base64.b64decode(video["url"].removeprefix("data:video/mp4;base64,"))
    with av.open(io.BytesIO(raw)) as container:
        frames = [f.to_ndarray(format="rgb24") for f in container.decode(video=0)]
        assert container.streams.video[0].average_rate == 4
    # 2 s at 4 a second, each at the middle of its quarter second: frames 3, 9, 15...
    assert [media.read_counter(f) for f in frames] == [3, 9, 15, 21, 27, 33, 39, 45]
    with wave.open(io.BytesIO(base64.b64decode(sound["data"]))) as file:
        assert (file.getnchannels(), file.getframerate(), file.getsampwidth()) == (1, 16000, 2)
        samples = np.frombuffer(file.readframes(file.getnframes()), "<i2") / 32768
    assert len(samples) == pytest.approx(32000, abs=400)
    spectrum = np.abs(np.fft.rfft(samples * np.hanning(len(samples))))
    loudest = {round(float(f) / 10) * 10 for f in np.fft.rfftfreq(len(samples), 1 / 16000)[spectrum > spectrum.max() / 2]}
    assert loudest == {440, 660}, "both channels are in the mono sound"
    assert not parts(fake.requests[1], "input_audio"), "a silent clip sends no sound"


def test_frames_pictures_and_sounds_have_questions_of_their_own(fake, clips, tmp_path):
    from PIL import Image

    settings = {"send": "frames", "max_frames": 5, "side": 64, "thinking": False, "repetition_penalty": None, "image_instruction": "LOOK"}
    caption_dataset(job(fake, clips, tmp_path / "o.json", settings))
    by_name = dict(zip(("a.mp4", "alone.wav", "b.mp4", "exif6.jpg"), fake.requests))
    pictures = [Image.open(io.BytesIO(base64.b64decode(p["url"].split(",")[1]))) for p in parts(by_name["a.mp4"], "image_url")]
    assert [p.size for p in pictures] == [(64, 32)] * 4, "2 s at 2 a second"
    assert by_name["a.mp4"]["chat_template_kwargs"] == {"enable_thinking": False} and "repetition_penalty" not in by_name["a.mp4"]
    texts = {name: next(p["text"] for p in body["messages"][0]["content"] if p["type"] == "text") for name, body in by_name.items()}
    assert texts["exif6.jpg"] == "LOOK" and "0.50 seconds apart" in texts["a.mp4"] and "sound" in texts["alone.wav"]
    assert len(parts(by_name["alone.wav"], "input_audio")) == 1 and not parts(by_name["alone.wav"], "image_url")


def test_busy_servers_and_broken_lines_are_tried_again(fake, clips, tmp_path):
    fake.plan = [503, "close", 429, 200]
    done = caption_dataset(job(fake, clips, tmp_path / "o.json", extensions="jpg"))
    assert done.written == ["exif6.jpg"] and len(fake.requests) == 4


def test_an_answer_that_cannot_be_read_is_asked_for_again_a_little_differently(fake, clips, tmp_path):
    fake.answer = lambda body: "{}" if body["temperature"] == 0 else "a block"
    assert caption_dataset(job(fake, clips, tmp_path / "o.json", extensions="jpg")).written == ["exif6.jpg"]
    fake.answer = lambda body: "{}"
    done = caption_dataset(job(fake, clips, tmp_path / "p.json", extensions="jpg"))
    assert "no caption" in done.failed["exif6.jpg"] and not (tmp_path / "p.json").exists()


def test_a_refused_clip_is_one_failure_and_a_refusing_endpoint_is_the_end(fake, clips, tmp_path):
    fake.plan = [400]
    done = caption_dataset(job(fake, clips, tmp_path / "o.json", extensions="mp4,jpg"))
    assert "HTTP 400" in done.failed["a.mp4"] and done.written == ["b.mp4", "exif6.jpg"]
    for status, code in ((401, "caption.refused"), (302, "caption.redirect")):
        fake.plan = [status] * 9
        with pytest.raises(EndpointError) as caught:
            caption_dataset(job(fake, clips, tmp_path / "p.json"))
        assert caught.value.code == code
    assert "/elsewhere" not in {h["path"] for h in fake.headers}, "a redirect is not followed"


def test_a_dead_endpoint_ends_the_job_and_keeps_what_was_written(fake, clips, tmp_path):
    fake.plan = [200] + ["close"] * 9
    with pytest.raises(EndpointError, match="does not answer"):
        caption_dataset(job(fake, clips, tmp_path / "o.json", {"retries": 1}))
    assert captions(tmp_path / "o.json") == {"a.mp4": "caption 1"}


def test_only_this_machine_and_allowed_hosts_are_talked_to(monkeypatch, clips, tmp_path):
    for url in ("http://127.0.0.1:8001/v1", "http://localhost/v1", "http://[::1]:80/v1"):
        check_address(url)
    for url in ("http://example.org/v1", "https://127.0.0.1.example.org/v1", "http://192.168.1.4:8000/v1"):
        with pytest.raises(ConfigError, match="not allowed"):
            check_address(url)
    for url in ("file:///etc/passwd", "127.0.0.1:8001", "http://user:secret@127.0.0.1/v1"):
        with pytest.raises(ConfigError, match="no http"):
            check_address(url)
    check_address("http://192.168.1.4:8000/v1", frozenset({"192.168.1.4:8000"}))
    monkeypatch.setenv("LTX_TRAIN_CAPTION_HOSTS", "other, Example.org")
    check_address("https://example.org/v1")
    with pytest.raises(ConfigError):
        caption_dataset(CaptionJob(input=str(clips), output=str(tmp_path / "o.json"), captioner=EndpointCaptioner(url="http://elsewhere/v1")))


def test_the_key_comes_from_the_environment_and_a_services_key_goes_there_alone(fake, clips, tmp_path, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "for-openai")
    monkeypatch.delenv("LTX_TRAIN_CAPTION_KEY", raising=False)
    caption_dataset(job(fake, clips, tmp_path / "a.json", extensions="jpg"))
    assert "Authorization" not in fake.headers[0]
    monkeypatch.setenv("LTX_TRAIN_CAPTION_KEY", "mine")
    caption_dataset(job(fake, clips, tmp_path / "b.json", extensions="jpg"))
    assert fake.headers[1]["Authorization"] == "Bearer mine"
    assert "mine" not in (tmp_path / "b.json").read_text() and "key" not in " ".join(EndpointCaptioner.model_fields)


# -- the result file -------------------------------------------------------------------------------------------------


class Counting:
    """A captioner that counts, and fails or acts where it is told."""

    def __init__(self, act=lambda n, path: None):
        self.seen, self.act = [], act

    def caption(self, path, sound=None):
        self.seen.append(path.name)
        self.act(len(self.seen), path)
        return f"machine {path.name} {len(self.seen)}"


@pytest.fixture
def many(tmp_path):
    folder = tmp_path / "many"
    media.many_tiny_files(folder, 12)
    for text in folder.glob("*.txt"):
        text.unlink()
    return folder


@pytest.mark.parametrize("suffix", [".json", ".jsonl", ".csv"])
def test_a_second_run_writes_only_what_is_missing_and_never_a_persons_words(suffix, many, tmp_path):
    out = tmp_path / f"captions{suffix}"
    first = caption_dataset(CaptionJob(input=str(many), output=str(out)), captioner=Counting())
    assert len(first.written) == 12
    text = out.read_text(encoding="utf-8").replace("machine clip00003.mp4 4", "my own words; with ü").replace("machine clip00005.mp4 6", "")
    out.write_text(text, encoding="utf-8")
    again = Counting()
    second = caption_dataset(CaptionJob(input=str(many), output=str(out)), captioner=again)
    assert again.seen == ["clip00005.mp4"] and len(second.kept) == 11
    over = Counting()
    caption_dataset(CaptionJob(input=str(many), output=str(out), override=True), captioner=over)
    assert len(over.seen) == 11 and "clip00003.mp4" not in over.seen
    read = captions(out)
    assert read["clip00003.mp4"] == "my own words; with ü" and read["clip00005.mp4"].startswith("machine") and len(read) == 12


def test_a_comma_without_quotes_in_a_csv_is_named_and_nothing_is_lost(many, tmp_path):
    out = tmp_path / "o.csv"
    out.write_text("media_path,caption\nmany/clip00000.mp4,red, green and blue\n", encoding="utf-8")
    with pytest.raises(DataError, match="row 1 has more cells"):
        caption_dataset(CaptionJob(input=str(many), output=str(out)), captioner=Counting())
    assert "green and blue" in out.read_text()


def test_text_files_come_as_a_pair(many, tmp_path):
    caption_dataset(CaptionJob(input=str(many), output=str(tmp_path / "o.txt")), captioner=Counting())
    lines = (tmp_path / "o_captions.txt").read_text().splitlines(), (tmp_path / "o_paths.txt").read_text().splitlines()
    assert lines[0][2] == "machine clip00002.mp4 3" and (tmp_path / lines[1][2]).resolve() == (many / "clip00002.mp4").resolve()
    again = Counting()
    caption_dataset(CaptionJob(input=str(many), output=str(tmp_path / "o.txt")), captioner=again)
    assert again.seen == []


def test_a_text_beside_a_clip_is_a_persons_and_goes_into_the_file(many, tmp_path):
    (many / "clip00001.txt").write_text("by hand", encoding="utf-8")
    counting = Counting()
    done = caption_dataset(CaptionJob(input=str(many), output=str(tmp_path / "o.json"), override=True), captioner=counting)
    assert "clip00001.mp4" not in counting.seen and done.kept == ["clip00001.mp4"]
    assert captions(tmp_path / "o.json")["clip00001.mp4"] == "by hand"
    (many / "clip00001.txt").write_text("by hand, better", encoding="utf-8")
    caption_dataset(CaptionJob(input=str(many), output=str(tmp_path / "o.json")), captioner=counting)
    assert captions(tmp_path / "o.json")["clip00001.mp4"] == "by hand, better"


def test_what_a_person_writes_while_it_works_stays(many, tmp_path):
    out = tmp_path / "o.json"

    def edit(n, path):
        if n == 6:  # five are saved
            rows = json.loads(out.read_text())
            rows[0]["caption"] = "edited meanwhile"
            rows[0]["rating"] = 5
            rows.append({"caption": "written ahead", "media_path": str(many / "clip00009.mp4")})
            out.write_text(json.dumps(rows))

    caption_dataset(CaptionJob(input=str(many), output=str(out)), captioner=Counting(edit))
    rows = {row["media_path"].rpartition("/")[2]: row for row in json.loads(out.read_text())}
    assert rows["clip00000.mp4"]["caption"] == "edited meanwhile" and rows["clip00000.mp4"]["rating"] == 5
    assert rows["clip00009.mp4"]["caption"] == "written ahead" and len(rows) == 12


def test_a_broken_result_file_is_not_written_over(many, tmp_path):
    out = tmp_path / "o.json"

    def spoil(n, path):
        if n == 6:
            out.write_text("[{ oops", encoding="utf-8")

    with pytest.raises(DataError, match="o_new.jsonl"):
        caption_dataset(CaptionJob(input=str(many), output=str(out)), captioner=Counting(spoil))
    assert out.read_text() == "[{ oops" and len(captions(tmp_path / "o_new.jsonl")) == 7


def test_a_stop_saves_and_the_next_run_goes_on(many, tmp_path):
    out, counting = tmp_path / "o.json", Counting()

    def stop():
        if len(counting.seen) >= 7:
            raise StopRequested

    with pytest.raises(StopRequested):
        caption_dataset(CaptionJob(input=str(many), output=str(out)), captioner=counting, check=stop)
    assert len(captions(out)) == 7
    caption_dataset(CaptionJob(input=str(many), output=str(out), workers=3), captioner=counting)
    assert len(captions(out)) == 12 == len(counting.seen) == len(set(counting.seen))


def test_rows_of_a_dataset_file_are_filled_in_place(many):
    table = many / "mine.csv"
    table.write_text("video,caption,note\nclip00000.mp4,given,x\nclip00001.mp4,,y\n", encoding="utf-8")
    counting = Counting()
    done = caption_dataset(CaptionJob(input=str(table)), captioner=counting)
    assert counting.seen == ["clip00001.mp4"] and done.kept == ["clip00000.mp4"]
    assert table.read_text(encoding="utf-8") == "video,caption,note\nclip00000.mp4,given,x\nclip00001.mp4,machine clip00001.mp4 1,y\n"


def test_a_csv_keeps_its_delimiter(many):
    table = many / "mine.csv"
    table.write_text("video;caption\nclip00000.mp4;red, green\nclip00001.mp4;\n", encoding="utf-8")
    caption_dataset(CaptionJob(input=str(table)), captioner=Counting())
    assert table.read_text(encoding="utf-8") == "video;caption\nclip00000.mp4;red, green\nclip00001.mp4;machine clip00001.mp4 1\n"


def test_openings_of_language_models_are_taken_off(many, tmp_path):
    class Wordy:
        def caption(self, path, sound=None):
            return "The video shows a block."

    caption_dataset(CaptionJob(input=str(many / "clip00000.mp4"), output=str(tmp_path / "o.json")), captioner=Wordy())
    assert captions(tmp_path / "o.json") == {"clip00000.mp4": "a block."}


def test_the_result_file_must_have_a_known_ending(many):
    with pytest.raises(ConfigError, match="cannot be written"):
        CaptionJob(input=str(many), output="captions.xml").result()


# -- a local model ---------------------------------------------------------------------------------------------------

SPECIAL = ["<|im_start|>", "<|im_end|>", "<|vision_bos|>", "<|vision_eos|>", "<|audio_bos|>", "<|audio_eos|>", "<|AUDIO|>", "<|IMAGE|>", "<|VIDEO|>"]


@pytest.fixture(scope="module")
def omni(tmp_path_factory):
    """A random Qwen2.5-Omni thinker of a few thousand weights with a byte-level tokenizer, as a Hugging Face folder."""
    import transformers

    if not hasattr(transformers, "Qwen2_5OmniThinkerForConditionalGeneration"):
        pytest.skip(f"transformers {transformers.__version__} has no Qwen2.5-Omni (4.52 has)")
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers.models.qwen2_5_omni.configuration_qwen2_5_omni import Qwen2_5OmniThinkerConfig

    folder = tmp_path_factory.mktemp("omni")
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: n for n, letter in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, additional_special_tokens=SPECIAL)
    fast.save_pretrained(folder)
    ids = {token: fast.convert_tokens_to_ids(token) for token in SPECIAL}
    names = {
        "audio_token_index": "<|AUDIO|>", "image_token_index": "<|IMAGE|>", "video_token_index": "<|VIDEO|>", "audio_start_token_id": "<|audio_bos|>",
        "audio_end_token_id": "<|audio_eos|>", "vision_start_token_id": "<|vision_bos|>", "vision_end_token_id": "<|vision_eos|>",
    }  # fmt: skip
    config = Qwen2_5OmniThinkerConfig(
        text_config={
            "vocab_size": len(fast), "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
            "rope_scaling": {"type": "default", "mrope_section": [1, 1, 2]}, "max_position_embeddings": 4096,
        },
        vision_config={"depth": 2, "hidden_size": 32, "intermediate_size": 48, "num_heads": 2, "out_hidden_size": 32, "window_size": 56, "fullatt_block_indexes": [1]},
        audio_config={"d_model": 32, "encoder_layers": 1, "encoder_attention_heads": 2, "encoder_ffn_dim": 48, "output_dim": 32, "num_mel_bins": 128},
        **{name: ids[token] for name, token in names.items()},
    )  # fmt: skip
    torch.manual_seed(0)
    transformers.Qwen2_5OmniThinkerForConditionalGeneration(config).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def model(omni):
    return LocalCaptioner(model_path=str(omni), device="cpu", max_tokens=16, side=112, max_frames=5).build()


def test_a_local_model_answers_about_video_with_sound_pictures_and_sound(model, clips):
    for name in ("a.mp4", "b.mp4", "exif6.jpg", "alone.wav"):
        excerpt = read_excerpt(clips / name, fps=2, most=5, side=112, with_sound=True, multiple=28)
        inputs = model.inputs(excerpt)
        made = model.model.generate(**inputs, max_new_tokens=16, min_new_tokens=16, do_sample=False)
        assert made.shape[1] == inputs["input_ids"].shape[1] + 16, name
        assert isinstance(model.answer(excerpt), str)


def test_the_local_models_inputs_say_where_pictures_and_sound_stand(model, clips):
    inputs = model.inputs(read_excerpt(clips / "a.mp4", fps=2, most=5, side=112, with_sound=True, multiple=28))
    ids, config = inputs["input_ids"][0], model.config
    # 128x64 at 2 frames a second for 2 s: 112x56 pixels, 4 frames in pairs: 2 x 4 x 8 patches, 4 of them a place
    assert inputs["video_grid_thw"].tolist() == [[2, 4, 8]] and int((ids == config.video_token_id).sum()) == 16
    assert float(inputs["video_second_per_grid"][0]) == 1.0
    mels = int(inputs["feature_attention_mask"].sum())
    assert mels == pytest.approx(200, abs=5) and int((ids == config.audio_token_id).sum()) == sound_tokens(mels)
    places = (ids == config.video_token_id).nonzero().flatten()
    assert model.tokenizer.convert_ids_to_tokens(int(ids[places[0] - 1])) == "<|vision_bos|>" and int(places[-1] - places[0]) == 15


def test_the_local_models_patches_equal_the_librarys(model):
    from transformers.models.qwen2_vl import image_processing_pil_qwen2_vl as library

    picture = torch.from_numpy(media.counter_frame(7, 112, 56))
    processor = library.Qwen2VLImageProcessorPil(size={"shortest_edge": 28 * 28, "longest_edge": 1 << 20})
    expected = processor(images=picture.numpy(), return_tensors="pt")
    patches, grid = model.patches(picture[None])
    assert grid.tolist() == expected["image_grid_thw"][0].tolist()
    assert (patches - expected["pixel_values"]).abs().max() < 1e-5


def test_the_local_model_captions_a_dataset_and_what_it_sees_matters(model, clips, tmp_path, monkeypatch):
    seen = {}

    def answer(excerpt):
        inputs = model.inputs(excerpt)
        with torch.no_grad():
            seen[excerpt.kind] = model.model(**inputs).logits[0, -1]
        return f"a {excerpt.kind}"

    monkeypatch.setattr(model, "answer", answer)
    done = caption_dataset(CaptionJob(input=str(clips), output=str(tmp_path / "o.json")), captioner=model)
    assert captions(tmp_path / "o.json") == {"a.mp4": "a video", "alone.wav": "a audio", "b.mp4": "a video", "exif6.jpg": "a image"} and list(done.failed) == ["text.mp4"]
    bright = read_excerpt(clips / "a.mp4", fps=2, most=5, side=112, with_sound=True, multiple=28)
    other = type(bright)("video", 255 - bright.frames, bright.fps, bright.sound)
    quiet = type(bright)("video", bright.frames, bright.fps, bright.sound * 0)
    logits = []
    for excerpt in (bright, other, quiet):
        answer(excerpt)
        logits.append(seen["video"])
    assert (logits[0] - logits[1]).abs().max() > 1e-4 and (logits[0] - logits[2]).abs().max() > 1e-5


def test_a_wrong_or_missing_model_folder_is_named(tmp_path):
    with pytest.raises(ConfigError, match="no model in"):
        LocalCaptioner(model_path=str(tmp_path)).build()
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(ConfigError, match="llama"):
        LocalCaptioner(model_path=str(tmp_path)).build()
