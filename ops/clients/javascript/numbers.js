// Checks of values: JSON writes NaN and infinity as null, as if the field were missing.

import { HeadwayError } from "./errors.js";

const MAX_DURATION_S = 30 * 24 * 3_600;
/** Limit of Node's timers. */
const MAX_TIMER_S = 2 ** 31 / 1_000 - 1;

/**
 * The *fields* of a request as JSON has them, checked: a value of another kind, such as a BigInt, a
 * function or an object whose `toJSON` gives NaN, is refused instead of lost.
 */
export function plainFields(fields) {
  const plain = JSON.parse(written(fields));
  if (typeof plain !== "object" || plain === null) refuse("a request must be an object with fields");
  const { slo, ttl_s } = plain;
  const durations = { "slo.ttft_s": slo?.ttft_s, "slo.tbt_s": slo?.tbt_s, "slo.ttlt_s": slo?.ttlt_s };
  for (const [name, value] of Object.entries({ ...durations, ttl_s })) {
    if (typeof value === "number" && !(value > 0 && value <= MAX_DURATION_S)) {
      refuse(`${name} is ${value}; it must be above 0 and at most ${MAX_DURATION_S} (seconds)`);
    }
  }
  return plain;
}

/** JSON of *message*; refuses what JSON does not have. */
export function written(message) {
  const paths = new Map();
  // `this` is the object that has the value, and *value* what its `toJSON` has made of it.
  const checked = function (name, value) {
    const above = paths.get(this);
    const path = Array.isArray(this) ? `${above}[${name}]` : above ? `${above}.${name}` : name;
    const made = value instanceof Number ? Number(value) : value;
    if (typeof made === "number" && !Number.isFinite(made)) {
      refuse(`${path} is ${made}; it must be a finite number`);
    }
    if (["bigint", "function", "symbol"].includes(typeof made)) {
      refuse(`${path} is a ${typeof made}, which JSON does not have`);
    }
    if (made === null && this[name] instanceof Date) refuse(`${path} is an invalid date`);
    if (typeof made === "object" && made !== null) paths.set(made, path);
    return made;
  };
  try {
    return JSON.stringify(message, checked) ?? "null";
  } catch (error) {
    if (error instanceof HeadwayError) throw error;
    throw new HeadwayError("invalid_request", `JSON cannot be made: ${error.message}`, {
      cause: error,
    });
  }
}

/** Check the option *name* of a method: a time limit in seconds. */
export function checkTimeLimit(name, value) {
  if (!(typeof value === "number" && value >= 0 && value <= MAX_TIMER_S)) {
    refuse(`${name} is ${value}; it must be a number from 0 to ${Math.floor(MAX_TIMER_S)} (seconds)`);
  }
}

function refuse(text) {
  throw new HeadwayError("invalid_request", text);
}
