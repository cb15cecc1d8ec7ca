// Publishes messages with confirms, repeatedly until the broker has answered.

import { setTimeout as sleep } from "node:timers/promises";

import amqp from "amqplib";

import { BrokerError, HeadwayError } from "./errors.js";
import { closeLink, endTogether, openLink, within } from "./link.js";

const CONFIRM_TIMEOUT_MS = 5_000;
const FIRST_RETRY_MS = 50;
const MAX_RETRY_MS = 2_000;
/**
 * Size of a body from which a message has a channel of its own. The broker closes the channel of a
 * message that is too large for it, and with it all publishes in progress there.
 */
const LARGE_BYTES = 1 << 20;
const LATE = "the broker has not answered in time";
const NO_MESH = "the mesh's queues do not exist; has a planner been started?";
/** Reply codes of the broker that a repetition gets again. */
const REFUSALS = new Set([403, 404, 406]);

export class Publisher {
  #link;
  #connection = null;
  #channel = null;
  #isClosed = false;
  /** Message id of a publish in progress -> function that rejects it. */
  #inFlight = new Map();

  async open(url, name) {
    this.#link = await openLink(url, name, (connection) => this.#setup(connection));
  }

  async close() {
    this.#isClosed = true;
    if (this.#link) await closeLink(this.#link);
  }

  /**
   * Publish *content* (a string) under *messageId*, which a repetition has also.
   *
   * Rejects with the codes `over_capacity` (the queue is full), `unroutable`, `broker_refused`,
   * `client_closed`, or `broker_unavailable` after *giveUpAfterMs*.
   */
  async publish(exchange, key, content, { messageId, giveUpAfterMs, ...properties }) {
    const body = Buffer.from(content);
    const until = Date.now() + giveUpAfterMs;
    for (let retryMs = FIRST_RETRY_MS; ; retryMs = Math.min(2 * retryMs, MAX_RETRY_MS)) {
      if (this.#isClosed) throw new HeadwayError("client_closed", "the client is closed");
      try {
        return await this.#once({ exchange, key, body, properties: { messageId, ...properties } });
      } catch (error) {
        if (error.code !== "broker_unavailable" || Date.now() + retryMs > until) throw error;
      }
      await sleep(retryMs * (0.5 + Math.random() / 2));
    }
  }

  async #once(message) {
    if (this.#channel === null) throw lost("the connection to the broker is lost");
    if (message.body.length < LARGE_BYTES) return this.#publishOn(this.#channel, message);
    const channel = await this.#ownChannel();
    try {
      return await this.#publishOn(channel, message);
    } finally {
      channel.close().catch(() => {}); // the broker may have closed it
    }
  }

  #publishOn(channel, { exchange, key, body, properties }) {
    return new Promise((resolve, reject) => {
      const done = (error) => {
        clearTimeout(timer);
        if (this.#inFlight.get(properties.messageId) === reject) {
          this.#inFlight.delete(properties.messageId);
        }
        if (error) reject(error);
        else resolve();
      };
      const timer = setTimeout(done, CONFIRM_TIMEOUT_MS, lost(LATE));
      this.#inFlight.set(properties.messageId, reject);
      const options = { contentType: "application/json", mandatory: true, ...properties };
      const confirmed = (error) => done(error && (channel.refusal ?? confirmError(error)));
      try {
        channel.publish(exchange, key, body, options, confirmed);
      } catch (error) {
        // The channel or its connection is closing, or amqplib cannot encode the message.
        done(error instanceof amqp.IllegalOperationError ? confirmError(error) : error);
      }
    });
  }

  /** A channel for one message. */
  async #ownChannel() {
    const opening = this.#connection.createConfirmChannel();
    try {
      // On a connection that the broker has blocked, the channel opens late.
      const channel = await within(CONFIRM_TIMEOUT_MS, opening, LATE);
      this.#watch(channel);
      return channel;
    } catch (error) {
      opening.then((channel) => channel.close()).catch(() => {});
      throw error instanceof BrokerError ? error : lost("the connection to the broker is lost");
    }
  }

  async #setup(connection) {
    const channel = await connection.createConfirmChannel();
    this.#watch(channel);
    channel.once("close", () => {
      if (this.#channel === channel) this.#channel = null;
    });
    endTogether(connection, channel);
    this.#connection = connection;
    this.#channel = channel;
  }

  /** Keep the reasons for which the broker closes *channel* or returns its messages. */
  #watch(channel) {
    channel.on("error", (error) => {
      const text = error.code === 404 ? NO_MESH : error.message;
      if (REFUSALS.has(error.code)) channel.refusal = new BrokerError("broker_refused", text);
    });
    channel.on("return", (message) => {
      // The confirm follows, and finds the publish rejected.
      this.#inFlight.get(message.properties.messageId)?.(new BrokerError("unroutable", NO_MESH));
    });
  }
}

function lost(text) {
  return new BrokerError("broker_unavailable", text);
}

function confirmError(error) {
  return error.message === "message nacked"
    ? new BrokerError("over_capacity", "the broker's queue of requests is full")
    : lost("the connection to the broker was lost");
}
