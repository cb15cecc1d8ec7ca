// Text for figures.

export function seconds(value) {
  if (value === null || value === undefined) return "–";
  const size = Math.abs(value);
  if (size < 1) return `${(1000 * value).toFixed(0)} ms`;
  if (size < 120) return `${value.toFixed(1)} s`;
  if (size < 7200) return `${(value / 60).toFixed(0)} min`;
  return `${(value / 3600).toFixed(1)} h`;
}

export function share(value) {
  return `${(100 * value).toFixed(1)} %`;
}

export function pair(values) {
  return values === null || values === undefined ? "–" : values.map(seconds).join(" / ");
}

export function interval(values) {
  return values === null ? "–" : values.map(seconds).join(" to ");
}

export function clock(unixTime) {
  return new Date(1000 * unixTime).toLocaleTimeString();
}

export function count(value) {
  return value.toLocaleString();
}
