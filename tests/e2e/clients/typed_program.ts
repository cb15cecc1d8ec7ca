// A program that the TypeScript compiler must accept, except where it expects an error.

import { connect, RequestError, type Part, type RequestCompleted } from "headway-client";

const client = await connect("amqp://127.0.0.1/", { giveUpAfterS: 5 });
const answer = await client.submit(
  { model: "m", messages: [{ role: "user", content: "hello" }], slo: { ttft_s: 2 } },
  { idempotent: true },
);
const parts: Part[] = [];
for await (const part of answer.stream()) parts.push(part);
const final: RequestCompleted = await answer.wait();
const reason: "stop" | "length" | "repetition" = final.finish_reason;
await client.submit({ endpoint: "/v1/completions", body: { model: "m", prompt: "a" } });
// @ts-expect-error a misspelt field
await client.submit({ model: "m", prompt: "x", max_token: 3 });
// @ts-expect-error a role that does not exist
await client.submit({ model: "m", messages: [{ role: "robot", content: "x" }] });
export const shown = [reason, new RequestError({ code: "x", message: "y" }).status];
