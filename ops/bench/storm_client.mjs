// Submits requests through the npm package `headway-client`, and prints one JSON line per answer,
// as storm_client.py does.

import { createInterface } from "node:readline";
import { setTimeout as sleep } from "node:timers/promises";

import { connect } from "headway-client";

const [url, limit] = process.argv.slice(2);
const limitS = Number(limit);

async function ask(client, { number, at_s: atS, fields }) {
  await sleep(1_000 * atS);
  const answer = { number, streamed: [], streamed_text: "" };
  try {
    await Promise.race([read(client, fields, answer), late()]);
  } catch (error) {
    answer.error = `${error.name}: ${error.message}`;
  }
  console.log(JSON.stringify(answer));
}

async function read(client, fields, answer) {
  const submitted = await client.submit(fields);
  for await (const part of submitted.stream()) {
    answer.streamed.push(...part.tokenIds);
    answer.streamed_text += part.text;
  }
  const final = await submitted.wait();
  Object.assign(answer, { tokens: final.token_ids, text: final.text });
}

async function late() {
  await sleep(1_000 * limitS, undefined, { ref: false });
  throw new Error(`no end after ${limitS} s`);
}

const jobs = [];
for await (const line of createInterface({ input: process.stdin })) jobs.push(JSON.parse(line));
const client = await connect(url, { name: "storm-javascript", giveUpAfterS: limitS });
await Promise.all(jobs.map((job) => ask(client, job)));
await client.close();
