// Calls of the npm package, for test_javascript_calls.py; prints one JSON object.

import { connect } from "headway-client";

const [url, model] = process.argv.slice(2);
const fields = { model, prompt: "hello", max_tokens: 24, temperature: 0, ignore_eos: true };

async function codeOf(promise) {
  try {
    await promise;
    return "";
  } catch (error) {
    return `${error.name} ${error.code}`;
  }
}

const client = await connect(url, { name: "test" });
const answer = await client.submit({ ...fields, slo: { ttft_s: 5 } });
const streamed = [];
let text = "";
for await (const part of answer.stream()) {
  streamed.push(...part.tokenIds);
  text += part.text;
}
const final = await answer.wait();

const cancelled = await client.submit({ ...fields, max_tokens: 1500 });
await cancelled.stream().next();
await cancelled.cancel();

const unknown = await client.submit({ ...fields, model: "no-model" });
const report = { ...fields, id: "report-js" };
const asked = await client.submit(report, { idempotent: true });
const stored = await asked.wait();
const again = await (await client.submit(report, { idempotent: true })).wait();
const status = await client.status("report-js");

const found = {
  streamed,
  text,
  tokens: final.token_ids,
  finalText: final.text,
  cancelled: await codeOf(cancelled.wait()),
  unknown: await codeOf(unknown.wait()),
  status: await codeOf(client.status("js-1")),
  state: status.state,
  runs: [stored.run_id, again.run_id, status.final.run_id],
};
const first = await client.submit({ ...fields, id: "js-1", max_tokens: 1500 });
found.duplicate = await codeOf(client.submit({ ...fields, id: "js-1" }));
await client.close();
found.closed = await codeOf(first.wait());
found.refused = await codeOf(connect("amqp://guest:wrong@127.0.0.1:1/"));
found.invalid = await codeOf(connect("http://127.0.0.1/"));
console.log(JSON.stringify(found));
