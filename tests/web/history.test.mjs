// The run's history in the browser follows the rules of the engine's.

import assert from "node:assert/strict";
import { test } from "node:test";

import { History } from "../../web/lib/history.mjs";

const step = (n, loss, more = {}) => ({ type: "step", step: n, total: 10, loss, ...more });

test("a step that comes again voids what came after it", () => {
  const history = new History().addAll([step(1, 5), step(2, 4), step(3, 3), { type: "job" }, step(2, 3.5)]);
  assert.deepEqual(history.losses, [[1, 5], [2, 3.5]]);
  assert.equal(history.lastStep.loss, 3.5);
});

test("a loss that is not finite is left out of the curve, and its step is known", () => {
  const history = new History().addAll([step(1, 5), step(2, null), step(3, 4)]);
  assert.deepEqual(history.losses, [[1, 5], [3, 4]]);
  assert.equal(history.lastStep.step, 3);
});

test("a fresh start clears the error of the last one", () => {
  const history = new History().addAll([{ type: "error", message: "gone" }]);
  assert.equal(history.error.message, "gone");
  history.add({ type: "job" });
  assert.equal(history.error, null);
});

test("the newest sample of each prompt, in the prompts' order", () => {
  const sample = (s, index) => ({ type: "sample", step: s, index, path: `samples/step_${s}_${index + 1}.mp4` });
  const history = new History().addAll([sample(0, 0), sample(0, 1), sample(5, 1), sample(5, 0)]);
  assert.deepEqual(history.newestSamples.map((s) => s.path), ["samples/step_5_1.mp4", "samples/step_5_2.mp4"]);
  const first = new History().addAll([{ type: "sample", step: 3, path: "samples/a.mp4" }]); // the writer leaves out index 0
  assert.equal(first.newestSamples.length, 1);
});

test("an event of a newer version is passed over", () => {
  const history = new History().addAll([{ type: "telepathy", step: 9 }, step(1, 2)]);
  assert.deepEqual(history.losses, [[1, 2]]);
});
