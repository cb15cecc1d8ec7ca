// Cases of the npm package over `fake_amqplib.mjs`; prints the outcome of each as one JSON object.

import { broker, IllegalOperationError } from "amqplib";

// A second of the package takes 100 ms.
const setTimer = globalThis.setTimeout;
globalThis.setTimeout = (call, ms, ...given) => setTimer(call, ms / 10, ...given);

/** All maps that have had the id of a question as a key. */
const asked = new Set();
const setEntry = Map.prototype.set;
Map.prototype.set = function (key, value) {
  if (key === "asked") asked.add(this);
  return setEntry.call(this, key, value);
};

const { connect } = await import("headway-client");
const URL = "amqp://127.0.0.1/";
const fields = { model: "m", prompt: "hello" };
const initial = { ...broker };

async function outcome(promise) {
  try {
    await promise;
    return "done";
  } catch (error) {
    return `${error.name} ${error.code}`;
  }
}

const cases = {
  async noUrl() {
    return outcome(connect("nonsense"));
  },

  async wrongLogin() {
    broker.refusal = new Error(
      'Handshake terminated by server: 403 (ACCESS-REFUSED) with message "ACCESS_REFUSED"',
    );
    return outcome(connect(URL));
  },

  async wrongVirtualHost() {
    broker.refusal = new Error("Expected ConnectionOpenOk; got <ConnectionClose channel:0>");
    return outcome(connect(URL));
  },

  async brokerAway() {
    broker.refusal = Object.assign(new Error(""), { code: "ECONNREFUSED" });
    return outcome(connect(URL));
  },

  async lateStatusLeavesNothing() {
    const client = await connect(URL);
    const late = await outcome(client.status("asked", { timeoutS: 1 }));
    const asking = client.status("asked");
    broker.onPublish = (_, { confirmed }) => confirmed(new Error("channel closed"));
    const brief = await connect(URL, { giveUpAfterS: 0 });
    const lost = await outcome(brief.status("asked"));
    await new Promise((resolve) => setTimer(resolve, 1));
    broker.onPublish = initial.onPublish;
    const second = await connect(URL);
    const answered = second.status("asked");
    await new Promise((resolve) => setTimer(resolve, 1));
    broker.reply({ kind: "request.status.v1", request_id: "asked", state: "running" });
    const { state } = await answered;
    await outcome(asking);
    const left = [...asked].filter((map) => map.has("asked")).length;
    return [late, lost, state, left];
  },

  async closeOnLostConnection() {
    const client = await connect(URL);
    broker.close = () => new Promise(() => {});
    return outcome(client.close());
  },

  async closeDuringOutage() {
    const client = await connect(URL);
    broker.onPublish = (_, { confirmed }) => confirmed(new Error("channel closed"));
    const submitting = outcome(client.submit(fields));
    await client.close();
    return [await submitting, await outcome(client.submit(fields))];
  },

  async publishOnClosingConnection() {
    const client = await connect(URL);
    let attempts = 0;
    broker.onPublish = (_, { confirmed }) => {
      attempts += 1;
      if (attempts === 1) throw new IllegalOperationError("Connection closing");
      confirmed(null);
    };
    return [await outcome(client.submit(fields)), attempts];
  },

  async repeatedWhileInProgress() {
    const client = await connect(URL);
    const confirms = [];
    broker.onPublish = (_, { confirmed }) => confirms.push(confirmed);
    const report = { ...fields, id: "report" };
    const submitting = [1, 2].map(() => client.submit(report, { idempotent: true }));
    const other = await outcome(client.submit({ ...report, seed: 1 }, { idempotent: true }));
    const unsafe = await outcome(client.submit(report));
    for (const confirmed of confirms) confirmed(null);
    const answers = await Promise.all(submitting);
    broker.reply({ kind: "run.started.v1", request_id: "report", run_id: "1", instance_id: "a" });
    const chunk = { request_id: "report", run_id: "1", token_ids: [7], text: "seven" };
    broker.reply({ kind: "tokens.emitted.v1", chunks: [chunk] });
    const answer = { token_ids: [7, 8], text: "seven eight" };
    broker.reply({ kind: "request.completed.v1", request_id: "report", run_id: "1", ...answer });
    const parts = [];
    for (const each of answers) {
      const texts = [];
      for await (const part of each.stream()) texts.push(part.text);
      parts.push(texts);
    }
    return [confirms.length, other, unsafe, parts, (await answers[1].wait()).text];
  },

  async repeatedBesideAFailedPublish() {
    const client = await connect(URL, { giveUpAfterS: 0 });
    const confirms = [];
    broker.onPublish = (_, { confirmed }) => confirms.push(confirmed);
    const report = { ...fields, id: "report" };
    const submitting = [1, 2].map(() => outcome(client.submit(report, { idempotent: true })));
    for (const confirmed of confirms) confirmed(new Error("message nacked"));
    const refused = await Promise.all(submitting);
    broker.onPublish = initial.onPublish;
    return [...refused, await outcome(client.submit(report, { idempotent: true }))];
  },

  async numbersThatJsonLacks() {
    const client = await connect(URL);
    const said = async (promise) =>
      promise.then(() => "done", (error) => (error.code ? error.message.split("\n")[0] : `bare ${error}`));
    const looped = { ...fields };
    looped.self = looped;
    const sent = [];
    broker.onPublish = (_, { confirmed }) => sent.push(confirmed(null));
    const found = [];
    for (const asked of [
      { ...fields, slo: { ttft_s: NaN } },
      { ...fields, ttl_s: -1 },
      { ...fields, slo: { tbt_s: 0 } },
      { ...fields, temperature: Infinity },
      { endpoint: "/v1/completions", body: { logit_bias: { 7: -Infinity }, prompt: [1, NaN] } },
      { ...fields, ttl_s: new Number(NaN) },
      { ...fields, ttl_s: new Number(-1) },
      { ...fields, ttl_s: new Date(NaN) },
      { ...fields, ttl_s: { toJSON: () => NaN } },
      { ...fields, ttl_s: () => 5 },
      { ...fields, max_tokens: 10n },
      { ...fields, body: { list: [1, 2n] } },
      looped,
      null,
    ]) {
      found.push(await said(client.submit(asked)));
    }
    found.push(await said(client.status(1n)));
    found.push(await said(client.status("asked", { timeoutS: NaN })));
    found.push(await said(connect(URL, { giveUpAfterS: -1 })));
    return [found, sent.length];
  },

  async unreadableReply() {
    const warned = [];
    process.on("warning", (warning) => warned.push(warning.name));
    const client = await connect(URL);
    const answer = await client.submit({ ...fields, id: "one" });
    broker.reply({ kind: "tokens.emitted.v1" });
    broker.reply({ kind: "request.completed.v1", request_id: "one", token_ids: [7], text: "seven" });
    const { text } = await answer.wait();
    await new Promise((resolve) => setTimer(resolve, 1));
    return [text, broker.acked, warned];
  },

  async tooLargeBesideAnother() {
    const client = await connect(URL);
    let confirms = [];
    broker.onPublish = (channel, { body, confirmed }) => {
      if (body.length < 1_000_000) return confirms?.push(confirmed) ?? confirmed(null);
      const text = "PRECONDITION_FAILED - message size is larger than configured max size";
      setTimer(() => channel.end(Object.assign(new Error(text), { code: 406 })), 1);
    };
    const small = outcome(client.submit(fields));
    const large = await outcome(client.submit({ ...fields, prompt: "x".repeat(2_000_000) }));
    for (const confirmed of confirms) confirmed(null);
    confirms = null;
    return [await small, large];
  },
};

const found = {};
for (const name of process.argv.slice(2)) {
  Object.assign(broker, initial);
  found[name] = await cases[name]();
}
console.log(JSON.stringify(found));
process.exit(0); // clients are left open
