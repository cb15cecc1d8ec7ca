// Checks of numbers: JSON writes NaN and infinity as null, as if the field were missing.

import { HeadwayError } from "./errors.js";

const MAX_DURATION_S = 30 * 24 * 3_600;
/** Limit of Node's timers. */
const MAX_TIMER_S = 2 ** 31 / 1_000 - 1;

/** Check the numbers of a request's *fields*. */
export function checkNumbers(fields) {
  checkFinite(fields, "");
  const { slo, ttl_s } = fields;
  const durations = { "slo.ttft_s": slo?.ttft_s, "slo.tbt_s": slo?.tbt_s, "slo.ttlt_s": slo?.ttlt_s };
  for (const [name, value] of Object.entries({ ...durations, ttl_s })) {
    if (typeof value === "number" && !(value > 0 && value <= MAX_DURATION_S)) {
      refuse(`${name} is ${value}; it must be above 0 and at most ${MAX_DURATION_S} (seconds)`);
    }
  }
}

/** Check the option *name* of a method: a time limit in seconds. */
export function checkTimeLimit(name, value) {
  if (!(typeof value === "number" && value >= 0 && value <= MAX_TIMER_S)) {
    refuse(`${name} is ${value}; it must be a number from 0 to ${Math.floor(MAX_TIMER_S)} (seconds)`);
  }
}

function checkFinite(value, path) {
  if (typeof value === "number" && !Number.isFinite(value)) {
    refuse(`${path} is ${value}; it must be a finite number`);
  }
  if (typeof value !== "object" || value === null) return;
  for (const [name, part] of Object.entries(value)) {
    checkFinite(part, Array.isArray(value) ? `${path}[${name}]` : path ? `${path}.${name}` : name);
  }
}

function refuse(text) {
  throw new HeadwayError("invalid_request", text);
}
