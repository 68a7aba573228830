// What a run has done so far, rebuilt from its events: the same rules as ltx_train/runs/history.py has.

export class History {
  constructor() {
    this.steps = new Map();
    this.samples = new Map();
    this.snapshots = [];
    this.loras = [];
    this.warnings = [];
    this.error = null;
    this.phase = "";
    this.progress = null;
    this.plan = null;
    this.state = "";
    this.attempts = 0;
    this.last = 0;
  }

  /** Takes in one event, in the order of the file. */
  add(event) {
    switch (event.type) {
      case "step":
        // a step that comes again: the run went on from an older snapshot, and what came after it is void
        if (event.step <= this.last) for (const step of [...this.steps.keys()]) if (step >= event.step) this.steps.delete(step);
        this.steps.set(event.step, event);
        this.last = event.step;
        break;
      case "job":
        this.attempts += 1;
        this.error = null;
        break;
      case "state":
        this.state = event.state;
        break;
      case "phase":
        this.phase = event.state === "start" ? event.phase : "";
        break;
      case "progress":
        this.progress = event;
        break;
      case "plan":
        this.plan = event;
        break;
      case "sample":
        this.samples.set(event.path, event);
        break;
      case "snapshot":
        this.snapshots.push(event);
        break;
      case "lora":
        this.loras.push(event);
        break;
      case "warning":
        this.warnings.push(event);
        break;
      case "error":
        this.error = event;
        break;
    }
  }

  addAll(events) {
    for (const event of events) this.add(event);
    return this;
  }

  /** [step, loss] of every step whose loss was finite. */
  get losses() {
    return [...this.steps.values()].filter((e) => Number.isFinite(e.loss)).map((e) => [e.step, e.loss]);
  }

  get lastStep() {
    return this.steps.get(this.last) ?? null;
  }

  /** The newest sample of each prompt, in the order of the prompts. */
  get newestSamples() {
    const byPrompt = new Map();
    for (const sample of this.samples.values()) {
      const known = byPrompt.get(sample.index ?? 0);
      if (!known || known.step <= sample.step) byPrompt.set(sample.index ?? 0, sample);
    }
    return [...byPrompt.entries()].sort((a, b) => a[0] - b[0]).map((entry) => entry[1]);
  }
}
