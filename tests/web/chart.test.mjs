// The numbers of the loss chart.

import assert from "node:assert/strict";
import { test } from "node:test";

import { drawn, polyline, range, smoothed, thinned } from "../../web/lib/chart.mjs";

const box = { first: 0, last: 10, low: 0, high: 1, width: 100, height: 50 };

test("corners of the box: low values lie at the bottom, early steps at the left", () => {
  assert.equal(polyline([[0, 0], [10, 1], [5, 0.5]], box), "0,50 100,0 50,25");
});

test("values beyond the box are drawn at its edge", () => {
  assert.equal(polyline([[0, 99], [10, -99]], box), "0,0 100,50");
});

test("smoothing a constant gives the constant from the first step on", () => {
  for (const [, value] of smoothed([[1, 3], [2, 3], [3, 3]], 10)) assert.ok(Math.abs(value - 3) < 1e-12);
});

test("smoothing follows the closed form of a corrected running mean", () => {
  const [[, a], [, b]] = smoothed([[1, 1], [2, 5]], 2);
  assert.equal(a, 1);
  assert.ok(Math.abs(b - (0.5 * 0.5 * 1 + 0.5 * 5) / 0.75) < 1e-12);
});

test("thinning keeps spikes, order and the limit", () => {
  const points = Array.from({ length: 5000 }, (_, i) => [i, 1]);
  points[1234] = [1234, 77];
  const kept = thinned(points, 200);
  assert.ok(kept.length <= 200);
  assert.ok(kept.some(([, value]) => value === 77));
  assert.ok(kept.every(([x], i) => i === 0 || x > kept[i - 1][0]));
});

test("one outlier does not flatten the rest", () => {
  const values = [...Array.from({ length: 99 }, (_, i) => 1 + i / 100), 1e6];
  const { low, high } = range(values);
  assert.ok(low < 1 && high < 3);
});

test("no losses, one loss and equal losses all give a chart without NaN", () => {
  for (const losses of [[], [[1, 0.5]], [[1, 0.5], [2, 0.5]], [[1, 0], [2, 0]]]) {
    const view = drawn(losses, { width: 300, height: 80, total: 10 });
    assert.ok(!`${view.raw} ${view.smooth} ${view.low} ${view.high}`.includes("NaN"));
    assert.ok(view.high > view.low);
  }
});
