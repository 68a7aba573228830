// Reads a run over HTTP by byte offset: from the start after a page reload, from where it left off afterwards.

import { History } from "./history.mjs";
import { isLive } from "./format.mjs";

export const POLL = 3000;

export class RunClient {
  /** fetchJson(path, options) answers parsed JSON, or null when there is no such run. */
  constructor(fetchJson, changed) {
    this.fetchJson = fetchJson;
    this.changed = changed;
    this.forget();
  }

  forget() {
    this.run = "";
    this.offset = 0;
    this.history = new History();
    this.status = null;
    this.busy = null;
  }

  /** Show another run, or the same one from its start. */
  open(run) {
    this.forget();
    this.run = run || "";
    return this.run ? this.refresh() : Promise.resolve();
  }

  /** Read what is new; calls that come while one is on its way wait for it and one more. */
  refresh() {
    if (this.busy) {
      this.again = true;
      return this.busy;
    }
    this.busy = this.read().finally(() => {
      this.busy = null;
      if (this.again) {
        this.again = false;
        this.refresh();
      }
    });
    return this.busy;
  }

  async read() {
    const run = this.run;
    for (;;) {
      const answer = await this.fetchJson(`/ltx_train/runs/${encodeURIComponent(run)}/events?offset=${this.offset}`);
      if (run !== this.run) return;
      if (!answer) {
        this.status = null;
        break;
      }
      if (answer.offset < this.offset) this.history = new History(); // the file was made anew
      this.history.addAll(answer.events);
      this.status = answer.status;
      const more = answer.events.length > 0 && answer.offset > this.offset && answer.more;
      this.offset = answer.offset;
      if (!more) break;
    }
    this.changed(this);
  }

  get live() {
    return isLive(this.status?.state);
  }

  /** Ask the run to stop, save or sample. */
  ask(control) {
    return this.fetchJson(`/ltx_train/runs/${encodeURIComponent(this.run)}/${control}`, { method: "POST" });
  }
}
