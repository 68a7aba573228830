// Numbers of the loss chart: smoothing, thinning, scales, and the points of an SVG line. No DOM here.

/** A running mean over about `span` steps, corrected at its start, over [step, value] pairs. */
export function smoothed(points, span) {
  const keep = 1 - 1 / Math.max(1, span);
  let mean = 0;
  let weight = 0;
  return points.map(([step, value]) => {
    mean = keep * mean + (1 - keep) * value;
    weight = keep * weight + (1 - keep);
    return [step, mean / weight];
  });
}

/** At most `most` points: of each group the lowest and the highest, so that spikes stay. */
export function thinned(points, most) {
  if (points.length <= most) return points;
  const size = Math.ceil((2 * points.length) / most);
  const kept = [];
  for (let i = 0; i < points.length; i += size) {
    const group = points.slice(i, i + size);
    const low = group.reduce((a, b) => (b[1] < a[1] ? b : a));
    const high = group.reduce((a, b) => (b[1] > a[1] ? b : a));
    kept.push(...(low[0] < high[0] ? [low, high] : low[0] > high[0] ? [high, low] : [low]));
  }
  return kept;
}

/** {low, high} of values, with outliers above the 98 % quantile left out and a little air; equal values get some room. */
export function range(values) {
  const sorted = values.filter(Number.isFinite).sort((a, b) => a - b);
  if (!sorted.length) return { low: 0, high: 1 };
  const low = sorted[0];
  const high = sorted[Math.min(sorted.length - 1, Math.ceil(sorted.length * 0.98))];
  const air = (high - low) * 0.05 || Math.abs(high) * 0.1 || 0.1;
  return { low: low - air, high: high + air };
}

/** "x,y x,y ..." of a polyline in a box of width x height, clipped to the box. */
export function polyline(points, { first, last, low, high, width, height }) {
  const across = Math.max(1, last - first);
  const up = high - low || 1;
  const clip = (v) => Math.min(1, Math.max(0, v));
  return points.map(([x, y]) => `${round(((x - first) / across) * width)},${round((1 - clip((y - low) / up)) * height)}`).join(" ");
}

const round = (v) => Math.round(v * 100) / 100;

/** Everything the chart draws for a list of losses: raw and smoothed lines and the labels of the axes. */
export function drawn(losses, { width, height, total, most = 400 }) {
  const span = Math.max(5, Math.round(losses.length / 25));
  const soft = smoothed(losses, span);
  const { low, high } = range(losses.map((p) => p[1]));
  const first = losses.length ? losses[0][0] : 0;
  const last = losses.length ? losses[losses.length - 1][0] : total || 1;
  const box = { first, last, low, high, width, height };
  return { raw: polyline(thinned(losses, most), box), smooth: polyline(thinned(soft, most), box), low, high, first, last, mean: soft.length ? soft[soft.length - 1][1] : null };
}
