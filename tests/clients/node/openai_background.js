// OpenAI's Node client: background responses as OpenAI's guide documents them. Prints one JSON
// object.
import OpenAI from "openai";

const client = new OpenAI({ baseURL: process.env.BASE_URL, apiKey: "unused", maxRetries: 0 });
const model = process.env.MODEL;
const asked = { model, input: "Say something about queues.", max_output_tokens: 40, temperature: 0 };

let polled = await client.responses.create({ ...asked, background: true });
const first = polled.status;
while (polled.status === "queued" || polled.status === "in_progress") {
  await new Promise((resolve) => setTimeout(resolve, 200));
  polled = await client.responses.retrieve(polled.id);
}

const numbers = [];
let streamed = "";
let id;
function read(event) {
  numbers.push(event.sequence_number);
  id ??= event.response.id;
  if (event.type === "response.output_text.delta") streamed += event.delta;
}
const stream = await client.responses.create({ ...asked, background: true, stream: true });
for await (const event of stream) {
  read(event);
  if (event.sequence_number === 5) break;
}
for await (const event of await client.responses.retrieve(id, { stream: true, starting_after: 5 })) {
  read(event);
}

const next = await client.responses.create({
  model, input: "And then?", previous_response_id: polled.id, max_output_tokens: 5,
});
const items = [];
for await (const item of client.responses.inputItems.list(next.id, { order: "asc" })) {
  items.push(item.role);
}

const long = await client.responses.create({
  ...asked, max_output_tokens: 400, ignore_eos: true, background: true,
});
const cancelled = await client.responses.cancel(long.id);
await client.responses.delete(long.id);
let gone;
try {
  await client.responses.retrieve(long.id);
} catch (error) {
  gone = error.code;
}
console.log(JSON.stringify({
  first, status: polled.status, whole: polled.output_text, numbers, streamed, items,
  cancelled: cancelled.status, gone,
}));
