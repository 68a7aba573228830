"""The HTTP routes: what the browser reads, and what strangers cannot."""

import asyncio
import json

import pytest
from aiohttp import web
from aiohttp.test_utils import TestClient, TestServer


@pytest.fixture
def ask(pack):
    """ask(method, path) -> (status, body, headers) of our routes on a real server."""

    def ask(method, path):
        async def go():
            routes = web.RouteTableDef()
            pack.routes.add(routes)
            app = web.Application()
            app.add_routes(routes)
            async with TestClient(TestServer(app)) as client:
                answer = await client.request(method, path)
                body = await answer.read()
                return answer.status, json.loads(body) if "json" in answer.content_type else body, answer.headers

        return asyncio.run(go())

    return ask


@pytest.fixture
def run(pack):
    events, event_log, run_dir = (pack.engine(f"runs.{name}") for name in ("events", "event_log", "run_dir"))
    run = run_dir.RunDir.create(pack.paths.run_path("my run ü"))
    run.write_status(run_dir.Status(state="finished", step=2, pid=1234, host="secret-host"))
    log = event_log.EventLog(run.events_path)
    log.write(events.StepEvent(step=1, total=2, loss=3.0))
    log.write(events.ErrorEvent(code="crash", message="boom", traceback="secret traceback"))
    log.close()
    run.samples.mkdir()
    (run.samples / "step_000001_1.mp4").write_bytes(b"video")
    (run.path / "secret.txt").write_text("secret")
    return run


URL = "/ltx_train/runs/my%20run%20%C3%BC"


def test_events_from_an_offset(ask, run):
    status, body, _ = ask("GET", f"{URL}/events")
    assert status == 200
    assert [e["type"] for e in body["events"]] == ["step", "error"] and body["status"]["state"] == "finished"
    assert "secret" not in json.dumps(body)
    status, again, _ = ask("GET", f"{URL}/events?offset={body['offset']}")
    assert again["events"] == [] and again["offset"] == body["offset"]


@pytest.mark.parametrize("offset", ["-5", "abc", "9" * 40, "1e3", "", "٣"])
def test_strange_offsets_read_from_the_start(ask, run, offset):
    status, body, _ = ask("GET", f"{URL}/events?offset={offset}")
    assert status == 200 and len(body["events"]) == 2


def test_runs_are_listed_without_process_numbers(ask, run, pack):
    (pack.paths.jobs_root() / "encode-1").mkdir(parents=True)
    status, body, _ = ask("GET", "/ltx_train/runs")
    assert status == 200 and [r["name"] for r in body["runs"]] == ["my run ü"]
    assert "secret" not in json.dumps(body) and "1234" not in json.dumps(body)


def test_a_sample_is_sent_with_its_type(ask, run):
    status, body, headers = ask("GET", f"{URL}/samples/step_000001_1.mp4")
    assert status == 200 and body == b"video"
    assert headers["Content-Type"] == "video/mp4" and headers["X-Content-Type-Options"] == "nosniff"


@pytest.mark.parametrize("file", ["..%2Fsecret.txt", "%2e%2e%2fsecret.txt", "secret.txt", "..%5Csecret.txt", "step.html", "none.mp4", "%2Fetc%2Fpasswd"])
def test_nothing_else_is_sent(ask, run, file):
    (run.samples / "step.html").write_text("<script>")
    status, body, _ = ask("GET", f"{URL}/samples/{file}")
    assert status == 404 and b"secret" not in (body if isinstance(body, bytes) else json.dumps(body).encode())


def test_damaged_files_of_a_run_are_read_as_far_as_they_go(ask, run, pack):
    host = pack.engine("runs.lock").ProcessId.of().host
    run.events_path.write_text('{"type":"step","step":1,"total":2,"loss":NaN}\n' + "[" * 10**5 + "\n")
    for lock in ("[" * 10**5, json.dumps({"pid": -5, "created": 1.0, "host": host}), json.dumps({"pid": 1, "created": "a", "host": host})):
        run.lock.path.write_text(lock)
        assert ask("POST", f"{URL}/stop")[0] == 400
    run.status_path.write_text("[" * 10**5)
    status, body, _ = ask("GET", f"{URL}/events")
    assert status == 200 and body["events"][0]["loss"] is None and body["status"]["state"] == "lost" and ask("GET", "/ltx_train/runs")[0] == 200


LONG = "x" * 300
FACES = "%F0%9F%98%80" * 120  # few letters, many bytes


@pytest.mark.parametrize("method, path, status", [
    ("GET", f"{URL}/samples/{LONG}.mp4", 404), ("GET", f"/ltx_train/runs/{FACES}/events", 404), ("POST", f"/ltx_train/runs/{FACES}/stop", 404),
    ("GET", f"/ltx_train/inspect?model={LONG}.safetensors", 404), ("GET", f"/ltx_train/inspect?model=a.safetensors&text_encoder={LONG}/", 404),
])  # fmt: skip
def test_names_that_no_disk_takes_are_not_there(ask, run, method, path, status):
    got, body, _ = ask(method, path)
    assert got == status and body["message"] and len(body["message"]) < 120


@pytest.mark.parametrize("file, path, named", [("events.jsonl", f"{URL}/events", "events.jsonl"), ("status.json", f"{URL}/events", "status of the run"), ("control", f"{URL}/stop", "control")])
def test_a_folder_in_place_of_a_run_s_file_is_told(ask, run, pack, file, path, named):
    (run.path / file).unlink() if file != "control" else run.control.rmdir()
    (run.path / file).write_text("") if file == "control" else (run.path / file).mkdir()
    token = run.lock.take(pack.engine("runs.lock").ProcessId.of())
    status, body, _ = ask("POST" if file == "control" else "GET", path)
    run.lock.release(token)
    assert status == 400 and named in body["message"] and str(run.path) not in body["message"]
    assert ask("GET", "/ltx_train/runs")[0] == 200


def test_a_link_out_of_the_samples_is_not_followed(ask, run):
    (run.samples / "link.mp4").symlink_to(run.path / "secret.txt")
    assert ask("GET", f"{URL}/samples/link.mp4")[0] == 404


@pytest.mark.parametrize("name", ["..", "%2e%2e", "..%2f..", "none", "con", "a%00b"])
def test_other_folders_are_no_runs(ask, run, name):
    assert ask("GET", f"/ltx_train/runs/{name}/events")[0] == 404


def test_only_a_live_run_can_be_asked_and_only_by_post(ask, run, pack):
    status, body, _ = ask("POST", f"{URL}/stop")
    assert status == 400 and body["error"] == "run.not_live"
    assert ask("GET", f"{URL}/stop")[0] == 405
    assert ask("POST", f"{URL}/delete")[0] == 404
    own = pack.engine("runs.lock").ProcessId.of()
    token = run.lock.take(own)
    try:
        assert ask("POST", f"{URL}/stop")[0] == 200
    finally:
        run.lock.release(token)
    assert run.requested("stop")


def test_inspect_names_what_is_wrong(ask, run, pack):
    status, body, _ = ask("GET", "/ltx_train/inspect?model=none.safetensors")
    assert status == 404 and "none.safetensors" in body["message"]
    (pack.host.base / "models/checkpoints/bad.safetensors").write_bytes(b"no")
    status, body, _ = ask("GET", "/ltx_train/inspect?model=bad.safetensors")
    assert status == 400 and body["message"]
    assert ask("GET", "/ltx_train/inspect?model=../../secret.safetensors")[0] == 404


def test_inspect_tells_the_family(ask, pack):
    from ltx_train.tiny.checkpoints import write_tiny

    write_tiny(pack.host.base / "models", "ltx2.3")
    status, body, _ = ask("GET", "/ltx_train/inspect?model=ltx-2.3-tiny.safetensors")
    assert status == 200, body
    assert body["family"] == "ltx2.3" and body["missing"] == {}
    assert "gemma_3_tiny.safetensors (auto)" in body["text"]


@pytest.mark.parametrize("path, status", [
    ("LTX%20Trainer%20%C3%BC/ltx_train.js", 200), ("LTX%20Trainer%20%C3%BC/docs/LTXTrainLoRA.md", 200), ("LTX%20Trainer%20%C3%BC/none.js", 404),
    ("LTX%20Trainer%20%C3%BC/..%2Fnodes%2Fpaths.py", 404), ("LTX%20Trainer%20%C3%BC/%2Fetc%2Fpasswd", 404), ("other/ltx_train.js", 404),
    (f"LTX%20Trainer%20%C3%BC/{'x' * 300}.js", 404),
])  # fmt: skip
def test_a_folder_with_a_space_and_an_umlaut_still_has_its_scripts(pack, tmp_path, path, status):
    """aiohttp 3.14 finds no static file below such a prefix; the pack's own route does."""
    folder = tmp_path / "LTX Trainer ü"
    (folder / "web" / "docs").mkdir(parents=True)
    (folder / "nodes").mkdir()
    for name in ("web/ltx_train.js", "web/docs/LTXTrainLoRA.md", "nodes/paths.py"):
        (folder / name).write_text("content")

    async def go():
        routes = web.RouteTableDef()
        pack.routes.serve_web(routes, folder)
        app = web.Application()
        app.router.add_static("/extensions/LTX Trainer ü", folder / "web")
        app.add_routes(routes)
        async with TestClient(TestServer(app)) as client:
            from yarl import URL as Url

            answer = await client.get(Url(f"/extensions/{path}", encoded=True))
            return answer.status, await answer.text()

    got, text = asyncio.run(go())
    assert got == status and (text == "content") == (status == 200)
