// Drives a real browser at a real ComfyUI: loads a workflow, looks at its nodes, runs it, looks at the panels, reloads the page.
// usage: node browser.mjs '{"url", "workflow", "out", "queue", "nodes2", "playwright", "chromium"}'  -> JSON on stdout

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
    })),
  );

await open();
if (options.nodes2 !== undefined) {
  await page.evaluate((on) => window.app.extensionManager.setting.set("Comfy.VueNodes.Enabled", on), options.nodes2);
  await open();
}
const text = readFileSync(options.workflow, "utf-8");
found.loaded = await page.evaluate(async (workflow) => {
  const data = JSON.parse(workflow);
  if (data.nodes) await window.app.loadGraphData(data);
  else await window.app.loadApiJson(data, "workflow");
  const known = window.LiteGraph.registered_node_types;
  return window.app.graph.nodes.map((n) => ({ id: String(n.id), type: n.type, missing: !known[n.type], error: !!n.has_errors, widgets: n.widgets?.length ?? 0 }));
}, text);
await page.waitForTimeout(2500);
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
  await page.waitForTimeout(2500); // the frontend keeps the graph of a tab about every second
  await open();
  await page.waitForTimeout(4000);
  found.reloaded = await panels();
  await shot("reloaded");
}
if (options.serialize) found.graph = await page.evaluate(() => window.app.graph.serialize());
await browser.close();
console.log(JSON.stringify(found));
