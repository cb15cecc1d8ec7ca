// Vercel's AI SDK: text, a stream, and two steps with a tool. Prints one JSON object.
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateText, jsonSchema, stepCountIs, streamText, tool } from "ai";

const provider = createOpenAICompatible({ name: "headway", baseURL: process.env.BASE_URL });
const model = provider(process.env.MODEL);
const asked = { model, prompt: "Pick some items.", temperature: 0, maxRetries: 0 };

const whole = await generateText({ ...asked, maxOutputTokens: 12 });
let streamed = "";
for await (const part of streamText({ ...asked, maxOutputTokens: 12 }).textStream) streamed += part;
const picked = [];
const pick = tool({
  description: "Pick items",
  strict: true,
  inputSchema: jsonSchema(JSON.parse(process.env.SCHEMA)),
  execute: async (input) => { picked.push(input); return { left: 10 - picked.length }; },
});
const steps = await generateText({
  ...asked, maxOutputTokens: 500, tools: { pick }, toolChoice: "required",
  stopWhen: stepCountIs(2),
});
console.log(JSON.stringify({
  whole: whole.text, streamed, picked,
  results: steps.steps.flatMap((step) => step.toolResults.map((each) => each.output)),
}));
