// Requests that were late, and the life of one request.

import { html, useEffect, useState } from "./vendor/htm-preact-3.1.1.js";
import { clock, pair, seconds } from "./format.js";
import { useAnswers } from "./answers.js";

function Late({ requests, onOpen }) {
  if (requests.length === 0) return html`<p class="quiet">No request was late in the last ten minutes.</p>`;
  return html`
    <div class="scroll" tabindex="0" role="region" aria-label="Late requests"><table>
      <thead><tr>
        <th class="name">ended</th><th class="name">request</th><th class="name">tenant</th>
        <th class="name">class</th><th class="name">why it was late</th>
      </tr></thead>
      <tbody>${requests.map((each) => html`
        <tr key=${each.id}>
          <td class="name">${clock(each.finished_at)}</td>
          <td class="name"><button onClick=${() => onOpen(each.id)}>${each.id}</button></td>
          <td class="name">${each.tenant}</td>
          <td class="name">${each.qos_class.replace("_", " ")}</td>
          <td class="wide">${each.sentence}</td>
        </tr>`)}
      </tbody>
    </table></div>`;
}

function Phases({ life }) {
  const whole = life.finished_at - life.arrived_at;
  return html`
    <div class="scroll" tabindex="0" role="region" aria-label="Phases of the request"><table>
      <thead><tr>
        <th class="name">phase</th><th>begun after</th><th>took</th><th></th>
        <th class="name">instance</th><th class="name">reason</th>
      </tr></thead>
      <tbody>${life.phases.map((phase) => html`
        <tr>
          <td class="name">${phase.phase}</td>
          <td>${seconds(phase.begun_at - life.arrived_at)}</td>
          <td>${seconds(phase.duration_s)}</td>
          <td><meter min="0" max=${whole} value=${phase.duration_s} aria-label="share of the whole time"></meter></td>
          <td class="name">${phase.instance ?? ""}</td>
          <td class="wide">${phase.why}</td>
        </tr>`)}
      </tbody>
    </table></div>`;
}

function Life({ life }) {
  return html`
    <h2>${life.id}</h2>
    <p class=${life.late ? "note" : ""}>${life.sentence}</p>
    <dl class="figures">
      <div><dt>tenant</dt><dd>${life.tenant}</dd></div>
      <div><dt>model</dt><dd>${life.model}</dd></div>
      <div><dt>lane</dt><dd>${life.lane}</dd></div>
      <div><dt>wait: predicted / actual</dt><dd>${pair([life.predicted_wait_s, life.waited_s])}</dd></div>
      <div><dt>tokens: prompt / answer</dt><dd>${life.prompt_tokens} / ${life.output_tokens}</dd></div>
      <div><dt>evictions</dt><dd>${life.evictions}</dd></div>
      <div><dt>engine deaths</dt><dd>${life.crashes}</dd></div>
      <div><dt>outcome</dt><dd>${life.outcome}</dd></div>
    </dl>
    <${Phases} life=${life} />
    <p class="quiet">In a terminal: <code>headway request show ${life.id}</code></p>`;
}

export function RequestsView({ onKey, Problem }) {
  const [late, setLate] = useState(null);
  const [life, setLife] = useState(null);
  const [id, setId] = useState("");
  const { ask, problem } = useAnswers();
  const load = () => ask("requests", setLate);
  useEffect(() => { load(); }, []);
  const open = (name) => ask(`requests/${encodeURIComponent(name)}`, setLife);
  const submit = (event) => {
    event.preventDefault();
    open(id);
  };
  return html`
    <form class="controls" onSubmit=${submit}>
      <label>Id of a request
        ${" "}<input id="request" value=${id} onInput=${(event) => setId(event.target.value)} />
      </label>
      <button>Show</button>
      <button type="button" onClick=${load}>Load late requests again</button>
    </form>
    ${problem ? html`<${Problem} problem=${problem} onKey=${onKey} />` : null}
    ${life === null ? null : html`<${Life} life=${life} />`}
    ${late === null ? null : html`
      <h2>Late in the last ten minutes</h2>
      <${Late} requests=${late.requests} onOpen=${open} />
      <p class="quiet">Records are kept since ${clock(late.kept_since)}. In a terminal: <code>${late.command}</code></p>`}`;
}
