// The panels on our nodes: a run's chart, status and samples; a report; a model's summary. Built with text nodes only.

import { drawn } from "./chart.mjs";
import { isParked, notice, reportRow, short, statusLine } from "./format.mjs";

const SVG = "http://www.w3.org/2000/svg";
const STYLE = `
.ltx-train { display: flex; flex-direction: column; gap: 4px; width: 100%; box-sizing: border-box; padding: 4px 6px; overflow: hidden;
  font: 11px/1.35 sans-serif; color: var(--input-text, #ddd); background: var(--comfy-input-bg, #222); border-radius: 6px; }
.ltx-train.ltx-run { min-height: 150px; }
.ltx-train.ltx-text { min-height: 48px; max-height: 340px; overflow: auto; white-space: pre-wrap; overflow-wrap: anywhere; user-select: text; }
.ltx-train.ltx-report { min-height: 60px; max-height: 420px; overflow: auto; user-select: text; }
.ltx-train .ltx-head { white-space: pre-wrap; overflow-wrap: anywhere; }
.ltx-train table { border-collapse: collapse; width: 100%; }
.ltx-train th { text-align: left; font-weight: 600; opacity: 0.8; position: sticky; top: -4px; background: var(--comfy-input-bg, #222); }
.ltx-train th, .ltx-train td { padding: 1px 6px 1px 0; vertical-align: top; border-bottom: 1px solid var(--border-color, #444); }
.ltx-train .ltx-status { font-weight: 600; min-height: 15px; }
.ltx-train svg { width: 100%; height: 84px; min-height: 84px; display: block; }
.ltx-train .ltx-axes { display: flex; justify-content: space-between; opacity: 0.7; }
.ltx-train .ltx-error { color: var(--error-text, #ff6b6b); }
.ltx-train .ltx-plan { opacity: 0.8; }
.ltx-train .ltx-plan:empty { display: none; }
.ltx-train .ltx-warning { color: #e0b050; }
.ltx-train .ltx-samples { display: flex; flex-wrap: wrap; gap: 4px; }
.ltx-train .ltx-samples > * { max-width: 100%; max-height: 96px; border-radius: 4px; }
.ltx-train .ltx-buttons { display: flex; gap: 4px; }
.ltx-train button { font: inherit; color: inherit; cursor: pointer; padding: 2px 8px; border-radius: 4px;
  border: 1px solid var(--border-color, #555); background: transparent; }
.ltx-train button:disabled { opacity: 0.5; cursor: default; }
`;

function styled(document) {
  if (document.getElementById("ltx-train-style")) return;
  const style = document.createElement("style");
  style.id = "ltx-train-style";
  style.textContent = STYLE;
  document.head.append(style);
}

function element(document, tag, name, text) {
  const made = document.createElement(tag);
  if (name) made.className = name;
  if (text !== undefined) made.textContent = text;
  return made;
}

/** A run on a node. urlOf(path) makes a URL that the browser may load. */
export class RunPanel {
  constructor(document, { urlOf, ask }) {
    styled(document);
    this.document = document;
    this.urlOf = urlOf;
    this.element = element(document, "div", "ltx-train ltx-run");
    this.status = element(document, "div", "ltx-status", "not started");
    this.svg = document.createElementNS(SVG, "svg");
    this.svg.setAttribute("viewBox", "0 0 300 84");
    this.svg.setAttribute("preserveAspectRatio", "none");
    this.svg.setAttribute("role", "img");
    this.svg.setAttribute("aria-label", "loss by step");
    this.raw = this.line("currentColor", 1, 0.35);
    this.smooth = this.line("#4ea1ff", 2, 1);
    this.axes = element(document, "div", "ltx-axes");
    this.plan = element(document, "div", "ltx-plan");
    this.notice = element(document, "div", "");
    this.samples = element(document, "div", "ltx-samples");
    this.buttons = element(document, "div", "ltx-buttons");
    for (const [control, text, tip] of [
      ["sample", "Sample now", "Make the previews after the step in hand"],
      ["save", "Save now", "Save a snapshot and the LoRA after the step in hand"],
      ["stop", "Stop", "Save a snapshot and end; queue the node again to go on"],
    ]) {
      const button = element(document, "button", "", text);
      button.type = "button";
      button.title = tip;
      button.dataset.control = control;
      button.addEventListener("click", () => {
        button.disabled = true;
        Promise.resolve(ask(control)).finally(() => setTimeout(() => (button.disabled = false), 1500));
      });
      this.buttons.append(button);
    }
    this.element.append(this.status, this.svg, this.axes, this.plan, this.notice, this.samples, this.buttons);
    this.buttons.style.display = "none";
    this.shown = "";
  }

  line(colour, width, opacity) {
    const line = this.document.createElementNS(SVG, "polyline");
    for (const [name, value] of Object.entries({ fill: "none", stroke: colour, "stroke-width": width, "stroke-opacity": opacity, "vector-effect": "non-scaling-stroke", "stroke-linejoin": "round" })) line.setAttribute(name, value);
    this.svg.append(line);
    return line;
  }

  /** Show a client's run. */
  show(client) {
    const { history, status } = client;
    this.status.textContent = client.run ? (status ? `${client.run}: ${statusLine(history, status)}` : `${client.run}: not started`) : "not started";
    const view = drawn(history.losses, { width: 300, height: 84, total: status?.total });
    this.raw.setAttribute("points", view.raw);
    this.smooth.setAttribute("points", view.smooth);
    this.axes.replaceChildren();
    if (history.losses.length) {
      for (const text of [`step ${view.first}`, `loss ${short(view.low)} to ${short(view.high)}, mean ${short(view.mean)}`, `step ${view.last}`]) this.axes.append(element(this.document, "span", "", text));
    }
    this.plan.textContent = history.plan?.message ?? "";
    const told = notice(history, status);
    this.notice.className = told ? `ltx-${told.kind}` : "";
    this.notice.textContent = told ? told.text : "";
    this.notice.title = told ? told.more : "";
    this.buttons.style.display = client.live ? "" : "none";
    for (const button of this.buttons.children) button.style.display = isParked(status?.state) && button.dataset.control !== "stop" ? "none" : "";
    this.showSamples(client);
  }

  showSamples(client) {
    const samples = client.history.newestSamples.slice(0, 4);
    const key = samples.map((s) => s.path).join("|") + client.run;
    if (key === this.shown) return;
    this.shown = key;
    this.samples.replaceChildren(...samples.map((sample) => this.media(client.run, sample)).filter(Boolean));
  }

  media(run, sample) {
    const file = sample.path.split("/").pop();
    const kind = { mp4: "video", png: "img", wav: "audio" }[file.split(".").pop()];
    if (!kind) return null;
    const made = element(this.document, kind, "");
    made.title = `step ${sample.step}: ${sample.prompt || ""}`;
    if (kind !== "img") made.controls = true;
    if (kind === "video") Object.assign(made, { loop: true, muted: true, autoplay: true, playsInline: true });
    made.src = this.urlOf(`/ltx_train/runs/${encodeURIComponent(run)}/samples/${encodeURIComponent(file)}`);
    return made;
  }
}

/** A text on a node, such as a dataset's report. */
export class TextPanel {
  constructor(document, text = "") {
    styled(document);
    this.element = element(document, "div", "ltx-train ltx-text", text);
  }

  show(text, kind = "") {
    this.element.textContent = text;
    this.element.classList.toggle("ltx-error", kind === "error");
  }
}

const COLUMNS = ["", "clip", "bucket", "frames", "fps", "seconds", "sound", "caption or reason"];

/** A dataset's report: its totals and findings as text, its clips as a table, those that are left out first. */
export class ReportPanel {
  constructor(document) {
    styled(document);
    this.document = document;
    this.element = element(document, "div", "ltx-train ltx-report");
    this.head = element(document, "div", "ltx-head");
    this.element.append(this.head);
    this.table = null;
  }

  /** text: what it says of all clips together; rows: the clips (see reportRow). */
  show(text, rows) {
    this.head.textContent = text;
    this.table?.remove();
    this.table = rows?.length ? this.made(rows) : null;
    if (this.table) this.element.append(this.table);
  }

  made(rows) {
    const table = element(this.document, "table", "");
    const row = (cells, tag, name) => {
      const made = element(this.document, "tr", name);
      for (const text of cells) made.append(element(this.document, tag, "", text));
      return made;
    };
    const head = element(this.document, "thead", "");
    head.append(row(COLUMNS, "th", ""));
    const body = element(this.document, "tbody", "");
    for (const one of rows) {
      const made = row(reportRow(one), "td", one.usable ? "" : "ltx-error");
      made.title = [one.id, ...(one.findings ?? [])].join("\n");
      body.append(made);
    }
    table.append(head, body);
    return table;
  }
}
