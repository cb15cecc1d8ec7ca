// Connections to the broker, which amqplib restores after a loss.

import amqp from "amqplib";

import { BrokerError } from "./errors.js";

const TIMEOUT_MS = 5_000;
const CLOSE_TIMEOUT_MS = 5_000;
const HEARTBEAT_S = 10;
const RECOVERY = { initialMaxRetries: 0, initialDelay: 500, maxDelay: 5_000, jitter: 0.5 };

/**
 * Open a connection. *setup* gets each new connection, the first and those after a loss, and makes
 * its channel.
 */
export async function openLink(url, name, setup) {
  const recovery = {
    ...RECOVERY,
    setup: (connection) => {
      connection.on("error", () => {}); // "close" follows
      return setup(connection);
    },
  };
  const options = { timeout: TIMEOUT_MS, clientProperties: { connection_name: name }, recovery };
  const target = withDefaults(url);
  try {
    const link = await amqp.connect(target, options);
    link.on("error", () => {}); // "disconnect" follows
    return link;
  } catch (error) {
    const code = isRefusal(error) ? "broker_refused" : "broker_unavailable";
    const text = `cannot use the broker at ${new URL(target).host}: ${error.message || error.code}`;
    throw new BrokerError(code, text, { cause: error });
  }
}

/** Close *connection* when its *channel* has ended, so that both are made again. */
export function endTogether(connection, channel) {
  channel.once("close", () => connection.close().catch(() => {}));
}

/** Close a link. A connection that is lost meanwhile never answers, so the wait has a limit. */
export async function closeLink(link) {
  await within(CLOSE_TIMEOUT_MS, link.close(), "").catch(() => {});
}

/** The result of *promise*; rejects with `broker_unavailable` and *text* after *ms*. */
export async function within(ms, promise, text) {
  let timer;
  const late = new Promise((_, reject) => {
    timer = setTimeout(reject, ms, new BrokerError("broker_unavailable", text));
  });
  try {
    return await Promise.race([promise, late]);
  } finally {
    clearTimeout(timer);
  }
}

/** User of a URL, which is the tenant. */
export function userOf(url) {
  return decodeURIComponent(checked(url).username) || "guest";
}

/** True if the broker refuses the login, the virtual host or the reply queue. */
function isRefusal(error) {
  // Errors before the connection is open have the broker's answer in their text only.
  return error.code === 403 || /403 \(ACCESS-REFUSED\)|got <ConnectionClose /.test(error.message);
}

function checked(url) {
  const parsed = URL.canParse(url) ? new URL(url) : { protocol: "" };
  if (!["amqp:", "amqps:"].includes(parsed.protocol)) {
    throw new BrokerError("invalid_url", "the broker's URL must begin with amqp:// or amqps://");
  }
  return parsed;
}

function withDefaults(url) {
  const parsed = checked(url);
  if (!parsed.searchParams.has("heartbeat")) parsed.searchParams.set("heartbeat", HEARTBEAT_S);
  return parsed.toString();
}
