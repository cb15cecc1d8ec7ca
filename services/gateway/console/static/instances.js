// Instances with their windows, KV memory, pace and health, and LLM serving operations.

import { html } from "./vendor/htm-preact-3.1.1.js";
import { clock, count, seconds, share } from "./format.js";

const MARKS = { serving: "good", silent: "bad", draining: "warn", activating: "warn" };
const OUTCOMES = { failed: "bad", refused: "warn" };

function Instance({ row }) {
  return html`
    <tr>
      <td class="name">${row.instance_id}</td>
      <td class=${`name ${MARKS[row.state] ?? "quiet"}`}>${row.state}${row.state === "silent" ? ` for ${seconds(row.seen_s)}` : ""}</td>
      <td class="name">${row.activating ? `${row.model ?? "none"} → ${row.activating}` : row.model ?? "–"}</td>
      <td>${row.running} / ${row.max_running}</td>
      <td>${row.window} / ${row.max_window}</td>
      <td>${row.swapped_out}</td>
      <td>${seconds(row.backlog_s)}</td>
      <td>${share(row.kv)}</td>
      <td>${seconds(row.pace_s)}</td>
      <td>${count(row.completed)}</td>
      <td class=${row.failed ? "warn" : ""}>${count(row.failed)}</td>
      <td>${count(row.evicted)}</td>
      <td>${count(row.relegated)}</td>
      <td>${count(row.swaps)}</td>
      <td class=${row.crashes ? "bad" : ""}>${count(row.crashes)}</td>
    </tr>`;
}

function Operations({ lsos }) {
  if (lsos.length === 0) return html`<p class="quiet">No operation since the console was opened.</p>`;
  return html`
    <div class="scroll" tabindex="0" role="region" aria-label="Operations"><table>
      <thead><tr>
        <th class="name">time</th><th class="name">instance</th><th class="name">operation</th>
        <th class="name">subject</th><th class="name">outcome</th><th>took</th><th class="name">reason</th>
      </tr></thead>
      <tbody>${lsos.map((each) => html`
        <tr>
          <td class="name">${clock(each.at)}</td>
          <td class="name">${each.instance_id}</td>
          <td class="name">${each.lso.replace("_", " ")}</td>
          <td class="name">${each.subject ?? ""}</td>
          <td class=${`name ${OUTCOMES[each.outcome] ?? ""}`}>${each.outcome}</td>
          <td>${seconds(each.duration_s ?? 0)}</td>
          <td class="wide">${each.reason ?? ""}</td>
        </tr>`)}
      </tbody>
    </table></div>`;
}

export function InstancesView({ frame }) {
  return html`
    ${frame.rows.length === 0 ? html`<p class="quiet">No instance has sent a status yet.</p>` : html`
      <div class="scroll" tabindex="0" role="region" aria-label="Instances"><table>
        <thead><tr>
          <th class="name">instance</th><th class="name">state</th><th class="name">model</th>
          <th>running</th><th>window</th><th>swapped out</th><th>backlog</th><th>KV</th><th>pace</th>
          <th>done</th><th>failed</th><th>evicted</th><th>relegated</th><th>swaps</th><th>crashes</th>
        </tr></thead>
        <tbody>${frame.rows.map((row) => html`<${Instance} key=${row.instance_id} row=${row} />`)}</tbody>
      </table></div>`}
    <h2>LLM serving operations</h2>
    <${Operations} lsos=${frame.lsos} />`;
}
