// The shell of the console: tabs, the stream of the open view, the key and the theme.

import { html, render, useEffect, useState } from "./vendor/htm-preact-3.1.1.js";
import { InstancesView } from "./instances.js";
import { LettersView } from "./letters.js";
import { OverviewView } from "./overview.js";
import { QueuesView } from "./queues.js";
import { RequestsView } from "./requests.js";
import { Refused, frames, setKey } from "./server.js";

const RETRY_MS = 2000;
const VIEWS = {
  overview: { title: "Overview", content: OverviewView, live: true },
  queues: { title: "Virtual queues", content: QueuesView, live: true },
  instances: { title: "Instances", content: InstancesView, live: true },
  requests: { title: "Requests", content: RequestsView, live: false },
  letters: { title: "Dead letters", content: LettersView, live: false },
};
const THEMES = ["auto", "light", "dark"];

function viewOf(hash) {
  const name = hash.slice(1);
  return Object.hasOwn(VIEWS, name) ? name : "overview";
}

function pause(ms, signal) {
  return new Promise((resolve) => {
    const timer = setTimeout(resolve, ms);
    signal.addEventListener("abort", () => { clearTimeout(timer); resolve(); }, { once: true });
  });
}

async function follow(view, signal, show) {
  while (!signal.aborted) {
    try {
      await frames(view, (frame) => show({ frame, problem: null }), signal);
      show({ problem: new Error("the gateway has ended the stream") });
    } catch (error) {
      if (signal.aborted) return;
      show({ problem: error });
    }
    await pause(RETRY_MS, signal);
  }
}

function useFrames(view, isLive, turn) {
  const [state, setState] = useState({ frame: null, problem: null });
  useEffect(() => {
    setState({ frame: null, problem: null });
    if (!isLive) return undefined;
    const controller = new AbortController();
    follow(view, controller.signal, (change) => {
      if (!controller.signal.aborted) setState((before) => ({ ...before, ...change }));
    });
    return () => controller.abort();
  }, [view, isLive, turn]);
  return state;
}

function KeyForm({ onKey }) {
  const [key, setText] = useState("");
  const submit = (event) => {
    event.preventDefault();
    setKey(key);
    onKey();
  };
  return html`
    <form class="controls" onSubmit=${submit}>
      <label>API key with the scope operator
        ${" "}<input type="password" autocomplete="off" value=${key}
          onInput=${(event) => setText(event.target.value)} />
      </label>
      <button>Use this key</button>
    </form>`;
}

function Problem({ problem, onKey }) {
  const needsKey = problem instanceof Refused && [401, 403].includes(problem.status);
  return html`
    <div class="note" role="alert">
      <p>${problem.message}</p>
      ${needsKey ? html`<${KeyForm} onKey=${onKey} />` : null}
    </div>`;
}

function Theme() {
  const [theme, setTheme] = useState(localStorage.getItem("headway-theme") ?? "auto");
  useEffect(() => {
    localStorage.setItem("headway-theme", theme);
    const system = matchMedia("(prefers-color-scheme: dark)");
    const apply = () => {
      const ofSystem = system.matches ? "dark" : "light";
      document.documentElement.dataset.theme = theme === "auto" ? ofSystem : theme;
    };
    apply();
    system.addEventListener("change", apply);
    return () => system.removeEventListener("change", apply);
  }, [theme]);
  const next = THEMES[(THEMES.indexOf(theme) + 1) % THEMES.length];
  return html`<button onClick=${() => setTheme(next)}>Theme: ${theme}</button>`;
}

function Console() {
  const [view, setView] = useState(viewOf(location.hash));
  const [turn, setTurn] = useState(0);
  useEffect(() => {
    const onHash = () => setView(viewOf(location.hash));
    addEventListener("hashchange", onHash);
    return () => removeEventListener("hashchange", onHash);
  }, []);
  const { content: Content, live } = VIEWS[view];
  const { frame, problem } = useFrames(view, live, turn);
  const again = () => setTurn((number) => number + 1);
  const shown = frame !== null && frame.view === view ? frame : null;
  return html`
    <header>
      <h1>Headway</h1>
      <nav aria-label="views">
        ${Object.entries(VIEWS).map(([name, { title }]) => html`
          <a href=${`#${name}`} aria-current=${name === view ? "page" : null}>${title}</a>`)}
      </nav>
      <${Theme} />
    </header>
    <main>
      ${problem ? html`<${Problem} problem=${problem} onKey=${again} />` : null}
      ${live && shown === null && !problem ? html`<p class="quiet">Waiting for the gateway …</p>` : null}
      ${live ? shown && html`<${Content} frame=${shown} />` : html`<${Content} key=${turn} onKey=${again} Problem=${Problem} />`}
    </main>
    ${shown ? html`<footer>In a terminal: <code>${shown.command}</code></footer>` : null}`;
}

render(html`<${Console} />`, document.body);
