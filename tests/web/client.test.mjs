// Reading a run by byte offset, and the words on the node.

import assert from "node:assert/strict";
import { test } from "node:test";

import { RunClient } from "../../web/lib/client.mjs";
import { duration, notice, reportRow, short, statusLine } from "../../web/lib/format.mjs";
import { History } from "../../web/lib/history.mjs";

const step = (n, loss) => ({ type: "step", step: n, total: 4, loss, seconds: 2, eta: 90 });

function server(answers) {
  const asked = [];
  return { asked, fetchJson: async (path, options) => (asked.push([path, options?.method ?? "GET"]), answers.shift() ?? null) };
}

test("reads from the start, then from where it left off, and escapes the name", async () => {
  const host = server([
    { offset: 120, events: [step(1, 3)], status: { state: "running" } },
    { offset: 240, events: [step(2, 2)], status: { state: "finished" } },
  ]);
  let shown = 0;
  const client = new RunClient(host.fetchJson, () => (shown += 1));
  await client.open("my run/ü");
  assert.equal(client.live, true);
  await client.refresh();
  assert.deepEqual(host.asked.map((a) => a[0]), ["/ltx_train/runs/my%20run%2F%C3%BC/events?offset=0", "/ltx_train/runs/my%20run%2F%C3%BC/events?offset=120"]);
  assert.deepEqual(client.history.losses, [[1, 3], [2, 2]]);
  assert.equal(client.live, false);
  assert.equal(shown, 2);
});

test("a file that was made anew starts a new history", async () => {
  const host = server([
    { offset: 500, events: [step(1, 3), step(2, 3)], status: { state: "finished" } },
    { offset: 90, events: [step(1, 7)], status: { state: "running" } },
  ]);
  const client = new RunClient(host.fetchJson, () => {});
  await client.open("a");
  await client.refresh();
  assert.deepEqual(client.history.losses, [[1, 7]]);
});

test("calls that come while one is on its way make one more, not one each", async () => {
  const host = server([{ offset: 1, events: [], status: { state: "running" } }, { offset: 1, events: [], status: { state: "running" } }]);
  const client = new RunClient(host.fetchJson, () => {});
  client.run = "a";
  await Promise.all([client.refresh(), client.refresh(), client.refresh(), client.refresh()]);
  await new Promise((done) => setTimeout(done, 10));
  assert.equal(host.asked.length, 2);
});

test("an answer for a run that is no longer shown is dropped", async () => {
  let release;
  const slow = new Promise((done) => (release = done));
  const client = new RunClient(async (path) => (path.includes("/old/") ? slow : { offset: 5, events: [step(1, 1)], status: { state: "finished" } }), () => {});
  const first = client.open("old");
  await new Promise((done) => setTimeout(done, 1));
  client.forget();
  client.run = "new";
  await client.refresh();
  release({ offset: 9, events: [step(1, 99)], status: { state: "running" } });
  await first;
  assert.deepEqual(client.history.losses, [[1, 1]]);
});

test("a run that is not there is shown as not started", async () => {
  const client = new RunClient(async () => null, () => {});
  await client.open("none");
  assert.equal(client.status, null);
  assert.equal(client.live, false);
});

test("asking for a stop is a POST", async () => {
  const host = server([{ asked: "stop" }]);
  const client = new RunClient(host.fetchJson, () => {});
  client.run = "a";
  await client.ask("stop");
  assert.deepEqual(host.asked, [["/ltx_train/runs/a/stop", "POST"]]);
});

test("the status line in every phase", () => {
  const history = new History().addAll([{ type: "phase", phase: "encode video", state: "start" }, { type: "progress", phase: "encode video", done: 3, total: 20 }]);
  assert.equal(statusLine(history, { state: "running" }), "encode video 3 of 20");
  history.addAll([{ type: "phase", phase: "encode video", state: "end" }, { type: "phase", phase: "train", state: "start" }, step(2, 0.25)]);
  assert.equal(statusLine(history, { state: "running" }), "running · step 2 of 4 · loss 0.250 · 2.00 s a step · 2 min left");
  assert.equal(statusLine(history, { state: "finished" }), "finished · step 2 of 4 · loss 0.250");
  assert.equal(statusLine(history, { state: "parked" }), "waiting for the next part · step 2 of 4 · loss 0.250");
});

test("an error is told before a warning, and a lost run as one", () => {
  const history = new History().addAll([{ type: "warning", message: "small" }]);
  assert.equal(notice(history, { state: "running" }).kind, "warning");
  assert.equal(notice(history, { state: "lost" }).kind, "error");
  history.add({ type: "error", message: "Out of memory.", hint: "smaller" });
  assert.deepEqual(notice(history, { state: "failed" }), { kind: "error", text: "Out of memory.", more: "smaller" });
});

test("durations and numbers", () => {
  assert.deepEqual([0, 59.4, 60, 3599, 3600, 7260].map(duration), ["0 s", "59 s", "1 min", "1 h 0 min", "1 h 0 min", "2 h 1 min"]);
  assert.deepEqual([0.00001, 0.5, 12.345, 123456].map(short), ["1.0e-5", "0.500", "12.35", "1.2e+5"]);
});

test("a clip of a report is a row: what is used of it, or why it is left out", () => {
  const used = { id: "a.mp4", usable: true, bucket: "64x64x9", frames: 25, frames_used: 9, used_fps: 24, used_seconds: 0.375, sound: true, caption: "sks walks", findings: [] };
  assert.deepEqual(reportRow(used), ["+", "a.mp4", "64x64x9", "9 of 25", "24", "0.38", "yes", "sks walks"]);
  const left = { id: "b.mp4", usable: false, caption: "", findings: ["no caption", "too short"] };
  assert.deepEqual(reportRow(left), ["\u2715", "b.mp4", "", "", "", "", "", "no caption; too short"]);
});
