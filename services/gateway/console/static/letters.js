// Dead letters; the prompt of one is shown only on request.

import { html, useEffect, useState } from "./vendor/htm-preact-3.1.1.js";
import { useAnswers } from "./answers.js";

function Letter({ letter, onRead }) {
  return html`
    <tr>
      <td class="name">${letter.id ?? "without an id"}</td>
      <td class="wide">${letter.reason}</td>
      <td class="name">${letter.queue}</td>
      <td>${letter.num_bytes}</td>
      <td>${letter.id === null ? null : html`<button onClick=${onRead}>Read</button>`}</td>
    </tr>`;
}

export function LettersView({ onKey, Problem }) {
  const [content, setContent] = useState(null);
  const [opened, setOpened] = useState(null);
  const { ask, problem } = useAnswers();
  const load = () => ask("dead-letters", setContent);
  useEffect(() => { load(); }, []);
  const read = (id) => ask(`dead-letters/${encodeURIComponent(id)}`, setOpened);
  return html`
    <div class="controls">
      <button onClick=${load}>Load again</button>
      <span class="quiet">Reading a prompt needs a key with the scope prompts, and is logged.</span>
    </div>
    ${problem ? html`<${Problem} problem=${problem} onKey=${onKey} />` : null}
    ${content === null ? null : content.letters.length === 0 ? html`<p class="quiet">There are no dead letters.</p>` : html`
      <div class="scroll" tabindex="0" role="region" aria-label="Dead letters"><table>
        <thead><tr>
          <th class="name">id</th><th class="name">reason</th><th class="name">queue</th><th>bytes</th><th></th>
        </tr></thead>
        <tbody>${content.letters.map((letter) => html`
          <${Letter} letter=${letter} onRead=${() => read(letter.id)} />`)}</tbody>
      </table></div>
      ${content.letters.length === content.limit ? html`<p class="quiet">Only the oldest ${content.limit} are shown.</p>` : null}`}
    ${opened === null ? null : html`
      <h2>${opened.letter.id}</h2>
      <pre>${opened.body}</pre>
      ${opened.is_cut ? html`<p class="quiet">The message is longer.</p>` : null}`}
    ${content === null ? null : html`<p class="quiet">In a terminal: <code>${content.command}</code></p>`}`;
}
