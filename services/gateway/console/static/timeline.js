// Virtual queues over time, on a canvas: one line per group, under the name of its instance.

import { html, useEffect, useRef } from "./vendor/htm-preact-3.1.1.js";
import { seconds } from "./format.js";

const ROW = 16;
const LEFT = 190;
const RIGHT = 16;
const AXIS = 22;

// Rows of the picture: each instance's name, followed by its groups in the order of their turns.
export function rowsOf(bars) {
  const byInstance = Map.groupBy(bars, (bar) => bar.instance_id ?? "no instance");
  const names = [...byInstance.keys()].sort();
  return names.flatMap((name) => [
    { name },
    ...byInstance.get(name).toSorted((a, b) => (a.turn_s ?? Infinity) - (b.turn_s ?? Infinity)),
  ]);
}

// Times are drawn by square root, so that the next seconds and the next hours are both visible.
function scaleOf(rows, width) {
  const times = rows.flatMap((row) =>
    row.name === undefined ? [row.turn_s ?? 0, row.interval_s?.[1] ?? 0, Math.max(0, row.due_s ?? 0)] : [],
  );
  const most = Math.max(1, ...times);
  const place = (value) => LEFT + (width - LEFT - RIGHT) * Math.sqrt(Math.max(0, value) / most);
  return { most, place };
}

function draw(canvas, rows) {
  const width = canvas.clientWidth;
  const height = AXIS + ROW * rows.length;
  const ratio = devicePixelRatio || 1;
  canvas.width = width * ratio;
  canvas.height = height * ratio;
  canvas.style.height = `${height}px`;
  const style = getComputedStyle(document.documentElement);
  const color = (name) => style.getPropertyValue(`--${name}`).trim();
  const c = canvas.getContext("2d");
  c.scale(ratio, ratio);
  c.font = "12px system-ui, sans-serif";
  c.textBaseline = "middle";
  const { most, place } = scaleOf(rows, width);
  drawAxis(c, most, place, height, color);
  rows.forEach((row, number) => {
    const y = AXIS + ROW * (number + 0.5);
    if (row.name !== undefined) {
      c.fillStyle = color("text");
      c.fillText(row.name, 6, y, LEFT - 12);
    } else {
      drawGroup(c, row, y, place, color);
    }
  });
}

function drawAxis(c, most, place, height, color) {
  for (const part of [0, 1 / 16, 1 / 4, 9 / 16, 1]) {
    const x = place(part * most);
    c.strokeStyle = color("line");
    c.beginPath();
    c.moveTo(x, AXIS - 4);
    c.lineTo(x, height);
    c.stroke();
    c.fillStyle = color("quiet");
    c.textAlign = part === 1 ? "right" : "left";
    c.fillText(seconds(part * most), x, AXIS / 2);
  }
  c.textAlign = "left";
}

function drawGroup(c, bar, y, place, color) {
  c.fillStyle = color("quiet");
  c.fillText(`${bar.lane} ×${bar.requests}`, 18, y, LEFT - 24);
  if (bar.interval_s !== null) {
    const [low, high] = bar.interval_s.map(place);
    c.fillStyle = color("interval");
    c.fillRect(low, y - 2, Math.max(1, high - low), 4);
  }
  if (bar.turn_s !== null) {
    c.fillStyle = color(bar.late > 0.5 ? "bar-late" : "bar");
    c.fillRect(place(bar.turn_s) - 3, y - 5, 6, 10);
  }
  if (bar.due_s !== null) {
    c.strokeStyle = color("text");
    c.beginPath();
    c.moveTo(place(bar.due_s), y - 6);
    c.lineTo(place(bar.due_s), y + 6);
    c.stroke();
  }
}

export function Timeline({ bars }) {
  const canvas = useRef(null);
  const rows = rowsOf(bars);
  const latest = useRef(rows);
  latest.current = rows;
  useEffect(() => draw(canvas.current, rows));
  useEffect(() => {
    const observer = new ResizeObserver(() => draw(canvas.current, latest.current));
    observer.observe(canvas.current.parentElement);
    return () => observer.disconnect();
  }, []);
  return html`
    <div class="timeline" tabindex="0" role="img"
      aria-label="Predicted turns and deadlines of each group; the table below has the figures">
      <canvas ref=${canvas}></canvas>
    </div>`;
}
