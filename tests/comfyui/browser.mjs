// Drives a real browser at a real ComfyUI: loads a workflow, looks at its nodes, runs it, looks at the panels, reloads the page.
// usage: node browser.mjs '{"url", "workflow", "also", "out", "queue", "nodes2", "playwright", "chromium"}'  -> JSON on stdout

import { readFileSync } from "node:fs";
import { createRequire } from "node:module";

const options = JSON.parse(process.argv[2]);
const { chromium } = createRequire(import.meta.url)(options.playwright);
const browser = await chromium.launch({ executablePath: options.chromium, args: ["--no-sandbox", "--disable-gpu", "--disable-background-networking"] });
const page = await browser.newPage({ viewport: { width: 1800, height: 1000 } });
const found = { errors: [], console: [] };
page.on("pageerror", (error) => found.errors.push(String(error)));
page.on("console", (message) => message.type() === "error" && found.console.push(message.text()));

async function open() {
  await page.goto(options.url, { waitUntil: "domcontentloaded" });
  await page.waitForFunction(() => window.app?.graph && window.app?.extensionManager && document.querySelector("canvas"), null, { timeout: 120000 });
  await page.waitForTimeout(1500);
  await page.keyboard.press("Escape");
}

async function shot(name) {
  await page.screenshot({ path: `${options.out}/${name}.png` });
}

/** The panels on our nodes, as a person reads them. */
const panels = () =>
  page.evaluate(() =>
    [...document.querySelectorAll(".ltx-train")].map((one) => ({
      kind: one.className,
      text: one.innerText,
      points: one.querySelectorAll("polyline").length ? one.querySelectorAll("polyline")[1].getAttribute("points").split(" ").filter(Boolean).length : 0,
      samples: [...one.querySelectorAll("video, img, audio")].map((m) => ({ kind: m.tagName, ready: m.readyState ?? (m.complete ? 4 : 0), src: m.getAttribute("src") })),
      height: one.getBoundingClientRect().height,
      rows: [...one.querySelectorAll("tr")].map((row) => [...row.children].map((cell) => cell.innerText)),
    })),
  );

await open();
if (options.nodes2 !== undefined) {
  await page.evaluate((on) => window.app.extensionManager.setting.set("Comfy.VueNodes.Enabled", on), options.nodes2);
  await open();
}
/** Load a workflow file; its nodes. */
const load = (path) =>
  page.evaluate(async (workflow) => {
    const data = JSON.parse(workflow);
    if (data.nodes) await window.app.loadGraphData(data);
    else await window.app.loadApiJson(data, "workflow");
    const known = window.LiteGraph.registered_node_types;
    return window.app.graph.nodes.map((n) => ({ id: String(n.id), type: n.type, missing: !known[n.type], error: !!n.has_errors, widgets: n.widgets?.length ?? 0 }));
  }, readFileSync(path, "utf-8"));
found.loaded = await load(options.workflow);
await page.waitForTimeout(2500);
found.each = [[found.loaded, await panels()]];
for (const path of options.also ?? []) {
  const nodes = await load(path);
  await page.waitForTimeout(1000);
  found.each.push([nodes, await panels()]);
}
await page.evaluate(() => window.app.canvas.ds && (window.app.extensionManager.command?.execute?.("Comfy.Canvas.FitView")));
await page.waitForTimeout(1000);
found.before = await panels();
await shot("loaded");
if (options.queue) {
  await page.evaluate(() => window.app.queuePrompt(0));
  const during = Date.now();
  for (;;) {
    await page.waitForTimeout(500);
    const now = await panels();
    const run = now.find((p) => p.kind.includes("ltx-run"));
    if (!found.during && run && run.points >= 3 && /running|validation/.test(run.text)) {
      found.during = now;
      await shot("training");
    }
    if (run && /: (finished|failed|stopped|lost)/.test(run.text)) break;
    if (Date.now() - during > (options.seconds ?? 240) * 1000) break;
  }
  await page.waitForTimeout(2500);
  found.after = await panels();
  await shot("finished");
  for (const kind of options.closeUp ?? []) {
    await page.evaluate((type) => {
      const { app } = window;
      const node = app.graph.nodes.find((n) => n.type === type);
      [node.pos, app.canvas.ds.scale] = [[6000, 0], 1];
      node.setSize([900, node.size[1] + 120]);
      app.canvas.ds.offset = [300 - node.pos[0], 900 - node.size[1]];
      app.canvas.setDirty(true, true);
    }, kind);
    await page.waitForTimeout(1500);
    await shot(kind);
  }
  await page.waitForTimeout(2500); // the frontend keeps the graph of a tab about every second
  await open();
  await page.waitForTimeout(4000);
  found.reloaded = await panels();
  await shot("reloaded");
}
if (options.serialize) found.graph = await page.evaluate(() => window.app.graph.serialize());
await browser.close();
console.log(JSON.stringify(found));
