// Widget values survive a version with more widgets.

import assert from "node:assert/strict";
import { test } from "node:test";

import { restoreByName, valuesByName } from "../../web/lib/values.mjs";

test("plain values are kept, panels and unsaved widgets are not", () => {
  const widgets = [{ name: "rank", value: 32 }, { name: "panel", value: "", serialize: false }, { name: "mode", value: "t2v" }, { name: "object", value: {} }];
  assert.deepEqual(valuesByName(widgets), { rank: 32, mode: "t2v" });
});

test("values go to their names, whatever the order, and new widgets keep their default", () => {
  const widgets = [{ name: "new", value: "default" }, { name: "mode", value: 32 }, { name: "rank", value: "t2v" }];
  restoreByName(() => widgets, { rank: 32, mode: "t2v", gone: 5 });
  assert.deepEqual(widgets.map((w) => w.value), ["default", "t2v", 32]);
});

test("a choice is set before the parameters that it brings along", () => {
  const widgets = [];
  const choice = {
    name: "optimizer",
    set value(key) {
      this.chosen = key;
      widgets.splice(1, widgets.length, { name: "optimizer.lr", value: 1 });
    },
    get value() {
      return this.chosen ?? "adamw";
    },
  };
  widgets.push(choice);
  restoreByName(() => widgets, { "optimizer.lr": 0.5, optimizer: "prodigy" });
  assert.equal(choice.value, "prodigy");
  assert.equal(widgets[1].value, 0.5);
});

test("a damaged record changes nothing", () => {
  const widgets = [{ name: "rank", value: 32 }];
  for (const kept of [null, undefined, 5, "x", { rank: { evil: true } }]) restoreByName(() => widgets, kept);
  assert.equal(widgets[0].value, 32);
});
