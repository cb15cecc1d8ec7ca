// OpenAI's Node client: a whole chat, a stream, and a tool call. Prints one JSON object.
import OpenAI from "openai";

const client = new OpenAI({ baseURL: process.env.BASE_URL, apiKey: "unused", maxRetries: 0 });
const model = process.env.MODEL;
const messages = [{ role: "user", content: "Pick some items." }];
const parameters = JSON.parse(process.env.SCHEMA);
const tools = [{ type: "function", function: { name: "pick", parameters, strict: true } }];

const asked = { model, messages, max_tokens: 12, temperature: 0 };
const whole = await client.chat.completions.create(asked);
let streamed = "";
for await (const chunk of await client.chat.completions.create({ ...asked, stream: true })) {
  streamed += chunk.choices[0]?.delta?.content ?? "";
}
const called = await client.chat.completions.create({
  ...asked, max_tokens: 500, tools, tool_choice: "required",
});
console.log(JSON.stringify({
  whole: whole.choices[0].message.content,
  streamed,
  call: called.choices[0].message.tool_calls[0].function,
  request: whole.headway.request_id,
}));
