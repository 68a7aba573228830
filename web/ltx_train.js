// Panels on the nodes of LTX Train. The only script that ComfyUI loads by itself; the rest is in lib/.

import { app } from "../../scripts/app.js";
import { api } from "../../scripts/api.js";
import { POLL, RunClient } from "./lib/client.mjs";
import { ReportPanel, RunPanel, TextPanel } from "./lib/panel.mjs";
import { restoreByName, valuesByName } from "./lib/values.mjs";

const WITH_RUN = new Set(["LTXTrainLoRA", "LTXTrainLoadRun"]);
const WITH_TEXT = new Set(["LTXTrainPreprocess", "LTXTrainSaveLoRA", "LTXTrainSplitScenes", "LTXTrainCaption", "LTXTrainMakeReferences"]);
const WITH_REPORT = "LTXTrainDataset";
const MODEL = "LTXTrainLoadModel";

async function fetchJson(path, options) {
  try {
    const answer = await api.fetchApi(path, options);
    if (answer.ok) return await answer.json();
    return { refused: await answer.json().catch(() => ({ message: answer.statusText })) };
  } catch (error) {
    console.debug("LTX Train:", error);
  }
  return null;
}

function addPanel(node, name, element, height) {
  const widget = node.addDOMWidget(name, "ltx_panel", element, { serialize: false, hideOnZoom: false, getMinHeight: () => height, getValue: () => "", setValue: () => {} });
  widget.serialize = false;
  return widget;
}

const valueOf = (node, name) => node.widgets?.find((w) => w.name === name)?.value;

/** Calls back when a widget of the node changes, whoever else listens. */
function onWidget(node, names, callback) {
  for (const widget of node.widgets ?? []) {
    if (!names.includes(widget.name)) continue;
    const before = widget.callback;
    widget.callback = function (...args) {
      const result = before?.apply(this, args);
      callback();
      return result;
    };
  }
}

function watchRun(node, nameWidget) {
  const panel = new RunPanel(document, { urlOf: (path) => api.apiURL(path), ask: (control) => client.ask(control) });
  const client = new RunClient(async (path, options) => {
    const answer = await fetchJson(path, options);
    return answer?.refused ? null : answer;
  }, (it) => panel.show(it));
  addPanel(node, "ltx_run_panel", panel.element, 270);
  const open = (run) => {
    node.properties ??= {};
    if (run && run !== client.run) client.open(run);
    if (run) node.properties.ltx_run = run;
  };
  const mine = (id) => id === String(node.id) || String(id).endsWith(`:${node.id}`);
  const heard = (event) => {
    const { node: id, run } = event.detail ?? {};
    if (!mine(id) && run !== client.run) return;
    if (mine(id)) open(run);
    client.refresh();
  };
  api.addEventListener("ltx_train.events", heard);
  const timer = setInterval(() => client.run && client.live && client.refresh(), POLL);
  const removed = node.onRemoved;
  node.onRemoved = function (...args) {
    clearInterval(timer);
    api.removeEventListener("ltx_train.events", heard);
    return removed?.apply(this, args);
  };
  const executed = node.onExecuted;
  node.onExecuted = function (output) {
    executed?.apply(this, arguments);
    if (output?.ltx_run?.[0]) open(output.ltx_run[0]);
    client.refresh();
  };
  const follows = () => {
    const name = valueOf(node, nameWidget);
    const kept = node.properties?.ltx_run;
    // a run of this name, or one of its later versions (name_002)
    open(kept && typeof name === "string" && (kept === name || kept.startsWith(`${name}_`)) ? kept : name);
  };
  onWidget(node, [nameWidget], follows);
  return follows;
}

function showText(node, panel) {
  const executed = node.onExecuted;
  node.onExecuted = function (output) {
    executed?.apply(this, arguments);
    if (output?.ltx_text?.[0]) panel.show(output.ltx_text[0]);
  };
}

function watchText(node) {
  const panel = new TextPanel(document, "");
  addPanel(node, "ltx_text_panel", panel.element, 90);
  showText(node, panel);
}

function watchReport(node) {
  const panel = new ReportPanel(document);
  addPanel(node, "ltx_report_panel", panel.element, 130);
  const executed = node.onExecuted;
  node.onExecuted = function (output) {
    executed?.apply(this, arguments);
    if (output?.ltx_text?.[0]) panel.show(output.ltx_text[0], output.ltx_table?.[0] ?? []);
  };
}

function watchModel(node) {
  const panel = new TextPanel(document, "");
  addPanel(node, "ltx_text_panel", panel.element, 70);
  showText(node, panel);
  const names = ["model", "text_encoder", "video_vae", "audio_vae"];
  let asked = 0;
  const look = async () => {
    const mine = (asked += 1);
    const query = new URLSearchParams(names.map((name) => [name, valueOf(node, name) ?? ""]));
    if (!query.get("model")) return panel.show("No model file is in models/checkpoints or models/diffusion_models.");
    const answer = await fetchJson(`/ltx_train/inspect?${query}`);
    if (mine !== asked) return;
    if (answer?.text) panel.show(answer.text);
    else panel.show(answer?.refused?.message ?? "This file cannot be read.", "error");
  };
  onWidget(node, names, look);
  return look;
}

/**
 * ComfyUI saves widget values by position; ours are saved by name as well, so that a workflow keeps its values when a
 * later version has more widgets.
 */
function keepByName(node) {
  const serialize = node.onSerialize;
  node.onSerialize = function (data) {
    serialize?.apply(this, arguments);
    data.properties = { ...data.properties, ltx_values: valuesByName(this.widgets) };
  };
  const configured = node.onConfigure;
  node.onConfigure = function (data) {
    const result = configured?.apply(this, arguments);
    restoreByName(() => this.widgets ?? [], data?.properties?.ltx_values);
    return result;
  };
}

app.registerExtension({
  name: "ltx_train",
  nodeCreated(node) {
    const kind = node.comfyClass;
    if (!kind?.startsWith?.("LTXTrain")) return;
    keepByName(node);
    let begin = null;
    if (WITH_RUN.has(kind)) begin = watchRun(node, kind === "LTXTrainLoRA" ? "run_name" : "run");
    else if (WITH_TEXT.has(kind)) watchText(node);
    else if (kind === WITH_REPORT) watchReport(node);
    else if (kind === MODEL) begin = watchModel(node);
    if (!begin) return;
    // widgets get their saved values after this call, in configure
    const configured = node.onConfigure;
    node.onConfigure = function (...args) {
      const result = configured?.apply(this, args);
      begin();
      return result;
    };
    setTimeout(begin, 0);
  },
});

api.addEventListener("execution_error", (event) => {
  const { node_type: kind, exception_message: message } = event.detail ?? {};
  if (!kind?.startsWith?.("LTXTrain")) return;
  const [first, ...rest] = String(message ?? "").trim().split("\n");
  app.extensionManager?.toast?.add({ severity: "error", summary: first.slice(0, 200), detail: rest.join("\n").slice(0, 600), life: 20000 });
});
