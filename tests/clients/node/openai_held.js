// OpenAI's Node client: streams that are held until NOT_BEFORE. Prints one JSON object of texts.
import OpenAI from "openai";

const client = new OpenAI({ baseURL: process.env.BASE_URL, apiKey: "unused", maxRetries: 0 });
const { MODEL: model, PROMPT: prompt } = process.env;
const asked = {
  model, temperature: 0, stream: true, not_before: Number(process.env.NOT_BEFORE),
};

async function text(stream, delta) {
  let found = "";
  for await (const part of stream) found += delta(part) ?? "";
  return found;
}

const messages = [{ role: "user", content: prompt }];
const [chat, completions, responses] = await Promise.all([
  client.chat.completions
    .create({ ...asked, messages, max_tokens: 24 })
    .then((stream) => text(stream, (part) => part.choices[0]?.delta?.content)),
  client.completions
    .create({ ...asked, prompt, max_tokens: 24 })
    .then((stream) => text(stream, (part) => part.choices[0]?.text)),
  client.responses
    .create({ ...asked, input: prompt, max_output_tokens: 24 })
    .then((stream) => text(
      stream, (event) => event.type === "response.output_text.delta" ? event.delta : "",
    )),
]);
console.log(JSON.stringify({ chat, completions, responses }));
