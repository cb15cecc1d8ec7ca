// OpenAI's Node client: its documented flow of a batch. Prints one JSON object.
import OpenAI, { toFile } from "openai";

const client = new OpenAI({ baseURL: process.env.BASE_URL, apiKey: "unused", maxRetries: 0 });
const url = "/v1/chat/completions";
const lines = [0, 1, 2].map((number) => JSON.stringify({
  custom_id: `c${number}`,
  method: "POST",
  url,
  body: {
    model: process.env.MODEL,
    messages: [{ role: "user", content: `line ${number}` }],
    max_tokens: 4,
  },
}));

const file = await client.files.create({
  file: await toFile(Buffer.from(lines.join("\n")), "lines.jsonl"),
  purpose: "batch",
});
let batch = await client.batches.create({
  input_file_id: file.id, endpoint: url, completion_window: "24h", metadata: { job: "test" },
});
while (!["completed", "failed", "expired", "cancelled"].includes(batch.status)) {
  await new Promise((resolve) => setTimeout(resolve, 200));
  batch = await client.batches.retrieve(batch.id);
}
const listed = [];
for await (const each of client.batches.list({ limit: 1 })) {
  listed.push(each.id);
}
const content = await (await client.files.content(batch.output_file_id)).text();
console.log(JSON.stringify({
  id: batch.id,
  status: batch.status,
  counts: batch.request_counts,
  metadata: batch.metadata,
  listed,
  customIds: content.trim().split("\n").map((line) => JSON.parse(line).custom_id),
}));
