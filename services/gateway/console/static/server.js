// Requests to the gateway. The key is kept for the tab only.

const KEY = "headway-key";

export class Refused extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

export function setKey(key) {
  sessionStorage.setItem(KEY, key);
}

async function answer(path, signal) {
  const key = sessionStorage.getItem(KEY);
  const headers = key ? { authorization: `Bearer ${key}` } : {};
  const response = await fetch(path, { headers, signal, cache: "no-store" });
  if (response.ok) return response;
  let message = response.statusText;
  try {
    message = (await response.json()).error.message;
  } catch {
    // A proxy in between may answer with another body.
  }
  throw new Refused(response.status, message);
}

export async function get(path) {
  return (await answer(path)).json();
}

// Calls onFrame with each frame of a view, until the signal is aborted or the stream ends.
export async function frames(view, onFrame, signal) {
  const response = await answer(`events?view=${encodeURIComponent(view)}`, signal);
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const events = (rest + value).split("\n\n");
    rest = events.pop();
    // If the browser was busy, only the newest frame matters.
    const newest = events.at(-1);
    if (newest !== undefined) onFrame(JSON.parse(newest.slice("data: ".length)));
  }
}
