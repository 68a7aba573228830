// Widget values by name: what a workflow keeps beside ComfyUI's list by position.

const PLAIN = new Set(["string", "number", "boolean"]);

/** {name: value} of the widgets that hold plain values and are saved. */
export function valuesByName(widgets) {
  const kept = {};
  for (const widget of widgets ?? []) {
    if (widget.serialize === false || !PLAIN.has(typeof widget.value)) continue;
    kept[widget.name] = widget.value;
  }
  return kept;
}

/**
 * Give widgets their values back. Those that bring further widgets along (a choice with parameters, whose names begin
 * with its own and a dot) come first; widgets() is asked again after them.
 */
export function restoreByName(widgets, kept) {
  if (!kept || typeof kept !== "object") return;
  const names = Object.keys(kept).sort((a, b) => a.split(".").length - b.split(".").length);
  for (const name of names) {
    const widget = widgets().find((w) => w.name === name);
    if (widget && widget.serialize !== false && PLAIN.has(typeof kept[name]) && widget.value !== kept[name]) widget.value = kept[name];
  }
}
