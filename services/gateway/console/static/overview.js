// Attainment by class and tenant, and totals of the mesh.

import { html } from "./vendor/htm-preact-3.1.1.js";
import { clock, count, pair, share } from "./format.js";

function Figure({ name, value, mark }) {
  return html`<div><dt>${name}</dt><dd class=${mark ?? ""}>${value}</dd></div>`;
}

function Attainment({ rows }) {
  if (rows.length === 0) return html`<p class="quiet">No request has ended yet.</p>`;
  return html`
    <div class="scroll" tabindex="0" role="region" aria-label="Attainment"><table>
      <thead><tr>
        <th class="name">class</th><th class="name">tenant</th><th>requests</th>
        <th>in time</th><th></th><th>failed</th>
        <th>first token p50 / p95</th><th>whole answer p50 / p95</th>
      </tr></thead>
      <tbody>${rows.map((row) => html`
        <tr key=${`${row.qos_class} ${row.tenant}`}>
          <td class="name">${row.qos_class.replace("_", " ")}</td>
          <td class="name">${row.tenant}</td>
          <td>${count(row.requests)}</td>
          <td>${share(row.attained)}</td>
          <td><meter min="0" max="1" low="0.9" high="0.99" optimum="1" value=${row.attained}
            aria-label="share in time"></meter></td>
          <td>${count(row.failed)}</td>
          <td>${pair(row.first_token_s)}</td>
          <td>${pair(row.whole_s)}</td>
        </tr>`)}
      </tbody>
    </table></div>`;
}

function Advice({ advice }) {
  const changes = advice.filter((each) => each.advised !== each.present);
  return changes.map((each) => html`
    <p class="note">${each.device}: ${each.advised} instances are advised, ${each.present} are present.</p>`);
}

export function OverviewView({ frame }) {
  const minutes = Math.round(frame.window_s / 60);
  return html`
    <dl class="figures">
      <${Figure} name="instances" value=${count(frame.instances)} />
      <${Figure} name="silent" value=${count(frame.silent)} mark=${frame.silent ? "bad" : ""} />
      <${Figure} name="running" value=${count(frame.running)} />
      <${Figure} name="in windows" value=${count(frame.waiting)} />
      <${Figure} name="in queues" value=${count(frame.queued)} />
      <${Figure} name="expected late" value=${share(frame.late_share)} mark=${frame.late_share > 0.01 ? "warn" : ""} />
      <${Figure} name="leader" value=${frame.leader ?? "none answers"} mark=${frame.leader ? "" : "bad"} />
    </dl>
    <${Advice} advice=${frame.advice} />
    <h2>Requests that ended in the last ${minutes} minutes</h2>
    ${frame.since === null ? null : html`<p class="quiet">Counted since ${clock(frame.since)}.</p>`}
    <${Attainment} rows=${frame.rows} />`;
}
