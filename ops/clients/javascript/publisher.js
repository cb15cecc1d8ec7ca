// Publishes messages with confirms, repeatedly until the broker has answered.

import { setTimeout as sleep } from "node:timers/promises";

import { BrokerError } from "./errors.js";
import { endTogether, openLink } from "./link.js";

const CONFIRM_TIMEOUT_MS = 5_000;
const FIRST_RETRY_MS = 50;
const MAX_RETRY_MS = 2_000;
const NO_MESH = "the mesh's queues do not exist; has a planner been started?";
/** Reply codes of the broker that a repetition gets again. */
const REFUSALS = new Set([403, 404, 406]);

export class Publisher {
  #link;
  #channel = null;
  /** Message id of a publish in progress -> function that rejects it. */
  #inFlight = new Map();

  async open(url, name) {
    this.#link = await openLink(url, name, (connection) => this.#setup(connection));
  }

  async close() {
    await this.#link?.close();
  }

  /**
   * Publish *content* (a string) under *messageId*, which a repetition has also.
   *
   * Rejects with the codes `over_capacity` (the queue is full), `unroutable`, `broker_refused`, or
   * `broker_unavailable` after *giveUpAfterMs*.
   */
  async publish(exchange, key, content, { messageId, giveUpAfterMs, ...properties }) {
    const until = Date.now() + giveUpAfterMs;
    for (let retryMs = FIRST_RETRY_MS; ; retryMs = Math.min(2 * retryMs, MAX_RETRY_MS)) {
      try {
        return await this.#once(exchange, key, content, { messageId, ...properties });
      } catch (error) {
        if (error.code !== "broker_unavailable" || Date.now() + retryMs > until) throw error;
      }
      await sleep(retryMs * (0.5 + Math.random() / 2));
    }
  }

  #once(exchange, key, content, properties) {
    const channel = this.#channel;
    return new Promise((resolve, reject) => {
      const lost = (text) => reject(new BrokerError("broker_unavailable", text));
      if (channel === null) return lost("the connection to the broker is lost");
      const timer = setTimeout(lost, CONFIRM_TIMEOUT_MS, "the broker has not answered in time");
      this.#inFlight.set(properties.messageId, reject);
      const options = { contentType: "application/json", mandatory: true, ...properties };
      channel.publish(exchange, key, Buffer.from(content), options, (error) => {
        clearTimeout(timer);
        if (this.#inFlight.get(properties.messageId) === reject) {
          this.#inFlight.delete(properties.messageId);
        }
        if (error) reject(channel.refusal ?? confirmError(error));
        else resolve();
      });
    });
  }

  async #setup(connection) {
    const channel = await connection.createConfirmChannel();
    channel.on("error", (error) => {
      const text = error.code === 404 ? NO_MESH : error.message;
      if (REFUSALS.has(error.code)) channel.refusal = new BrokerError("broker_refused", text);
    });
    channel.on("return", (message) => {
      // The confirm follows, and finds the publish rejected.
      this.#inFlight.get(message.properties.messageId)?.(new BrokerError("unroutable", NO_MESH));
    });
    channel.once("close", () => {
      if (this.#channel === channel) this.#channel = null;
    });
    endTogether(connection, channel);
    this.#channel = channel;
  }
}

function confirmError(error) {
  return error.message === "message nacked"
    ? new BrokerError("over_capacity", "the broker's queue of requests is full")
    : new BrokerError("broker_unavailable", "the connection to the broker was lost");
}
