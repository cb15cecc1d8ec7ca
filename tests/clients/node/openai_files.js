// OpenAI's Node client: uploads, lists, reads and deletes a file. Prints one JSON object.
import OpenAI, { toFile } from "openai";

const client = new OpenAI({ baseURL: process.env.BASE_URL, apiKey: "unused", maxRetries: 0 });
const text = '{"custom_id": "1"}\n';

const made = await client.files.create({
  file: await toFile(Buffer.from(text), "lines.jsonl"),
  purpose: "batch",
});
const listed = [];
for await (const file of client.files.list({ limit: 1, purpose: "batch" })) {
  listed.push(file.id);
}
const content = await (await client.files.content(made.id)).text();
const deleted = await client.files.delete(made.id);
console.log(JSON.stringify({
  id: made.id, bytes: made.bytes, listed, same: content === text, deleted: deleted.deleted,
}));
