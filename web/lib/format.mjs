// Words for numbers and for what a run is doing.

/** Seconds as people say them. */
export function duration(seconds) {
  if (!Number.isFinite(seconds)) return "";
  const whole = Math.max(0, Math.round(seconds));
  if (whole < 60) return `${whole} s`;
  const minutes = Math.round(whole / 60);
  return minutes < 60 ? `${minutes} min` : `${Math.floor(minutes / 60)} h ${minutes % 60} min`;
}

/** A number short enough for a label. */
export function short(value) {
  if (!Number.isFinite(value)) return "";
  const size = Math.abs(value);
  return size !== 0 && (size < 0.001 || size >= 10000) ? value.toExponential(1) : value.toFixed(size < 1 ? 3 : 2);
}

const LIVE = ["queued", "preparing", "running", "parked", "stopping"];
export const isLive = (state) => LIVE.includes(state);

/** Whether a run waits between two parts: alive, and nothing to do for it. */
export const isParked = (state) => state === "parked";

/** The line above the chart. */
export function statusLine(history, status) {
  const state = status?.state || history.state || "queued";
  const parts = [];
  const step = history.lastStep;
  const works = isLive(state) && !isParked(state);
  if (works && history.phase && history.phase !== "train") {
    const p = history.progress;
    const far = p && p.phase === history.phase ? ` ${p.done}${p.total ? ` of ${p.total}` : ""}` : "";
    parts.push(`${history.phase}${far}`);
  } else parts.push(isParked(state) ? "waiting for the next part" : state);
  if (step) {
    parts.push(`step ${step.step} of ${step.total}`);
    if (Number.isFinite(step.loss)) parts.push(`loss ${short(step.loss)}`);
    if (works && step.seconds) parts.push(`${short(step.seconds)} s a step`);
    if (works && step.eta) parts.push(`${duration(step.eta)} left`);
  }
  return parts.join(" · ");
}

/** The one line that needs attention, or nothing. */
export function notice(history, status) {
  if (history.error) return { kind: "error", text: history.error.message, more: history.error.hint || "" };
  if (status?.state === "lost") return { kind: "error", text: "The trainer has gone without a word.", more: "Queue it again: it goes on from its last snapshot." };
  const warning = history.warnings[history.warnings.length - 1];
  return warning ? { kind: "warning", text: warning.message, more: warning.hint || "" } : null;
}

/** The cells of a clip in a report's table: mark, name, bucket, frames used, rate, seconds, sound, caption or why it is left out. */
export function reportRow(clip) {
  const number = (value, digits) => (Number.isFinite(value) ? String(Number(value.toFixed(digits))) : "");
  const frames = Number.isFinite(clip.frames_used) ? `${clip.frames_used}${Number.isFinite(clip.frames) ? ` of ${clip.frames}` : ""}` : "";
  const told = clip.usable ? clip.caption ?? "" : (clip.findings ?? []).join("; ");
  return [clip.usable ? "+" : "\u2715", clip.id, clip.bucket ?? "", frames, number(clip.used_fps, 2), number(clip.used_seconds, 2), clip.sound ? "yes" : "", told];
}
