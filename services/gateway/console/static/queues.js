// Virtual queues: the timeline, and the groups that are most likely late.

import { html, useState } from "./vendor/htm-preact-3.1.1.js";
import { interval, seconds, share } from "./format.js";
import { Timeline } from "./timeline.js";

const MOST_ROWS = 100;

function matches(bar, text) {
  return bar.lane.includes(text) || (bar.instance_id ?? "").includes(text);
}

function Group({ bar }) {
  return html`
    <tr>
      <td class="name">${bar.lane}/${bar.number}</td>
      <td class="name">${bar.instance_id ?? "no instance"}</td>
      <td>${bar.requests}</td>
      <td>${seconds(bar.turn_s)}</td>
      <td>${interval(bar.interval_s)}</td>
      <td>${bar.due_s === null ? "best effort" : seconds(bar.due_s)}</td>
      <td class=${bar.late > 0.5 ? "bad" : ""}>${share(bar.late)}</td>
    </tr>`;
}

export function QueuesView({ frame }) {
  const [text, setText] = useState("");
  if (frame.leader === null) {
    return html`<p class="note">No leader answers: is a planner with the leader role running? A new leader collects statuses for a moment before it plans.</p>`;
  }
  const bars = frame.bars.filter((bar) => matches(bar, text));
  const shown = bars.slice(0, MOST_ROWS);
  const left = bars.length - shown.length + frame.more;
  return html`
    <p>Epoch ${frame.epoch} by ${frame.leader}, ${frame.policy}${frame.cause ? `, replanned for ${frame.cause}` : ""};
      ${" "}${share(frame.late_share)} of the weight is expected late.</p>
    <div class="controls">
      <label>Filter by lane or instance
        ${" "}<input id="filter" value=${text} onInput=${(event) => setText(event.target.value)} />
      </label>
      <span class="quiet">Square: predicted turn. Line: its 90 % interval. Tick: deadline. Red: probably late.</span>
    </div>
    ${bars.length ? html`<${Timeline} bars=${bars} />` : html`<p class="quiet">Nothing waits.</p>`}
    ${bars.length ? html`
      <h2>Groups, those most likely late first</h2>
      <div class="scroll" tabindex="0" role="region" aria-label="Groups"><table>
        <thead><tr>
          <th class="name">group</th><th class="name">instance</th><th>requests</th>
          <th>turn in</th><th>90 % interval</th><th>due in</th><th>late</th>
        </tr></thead>
        <tbody>${shown.map((bar) => html`<${Group} key=${`${bar.lane}/${bar.number}`} bar=${bar} />`)}</tbody>
      </table></div>` : null}
    ${left > 0 ? html`<p class="quiet">${left} more groups.</p>` : null}`;
}
