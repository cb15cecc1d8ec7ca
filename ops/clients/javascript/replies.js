// The reply queue of a client, and its consumer.

import { EXCHANGES } from "./contract.js";
import { closeLink, endTogether, openLink, within } from "./link.js";

const PREFETCH = 256;
const DELETE_TIMEOUT_MS = 5_000;
const ARGUMENTS = {
  "x-queue-type": "classic",
  "x-max-length-bytes": 256 * 1024 * 1024,
  "x-overflow": "drop-head",
  "x-expires": 600_000,
};

export class Replies {
  #link;
  #channel = null;
  #observe;

  /** *observe* gets each reply, in order. */
  constructor(queue, observe) {
    this.queue = queue;
    this.#observe = observe;
  }

  async open(url, name) {
    this.#link = await openLink(url, name, (connection) => this.#setup(connection));
  }

  async close() {
    if (this.#link) await closeLink(this.#link);
  }

  /** Delete the queue if there is a connection; otherwise it expires. */
  async deleteQueue() {
    if (this.#channel === null) return;
    const deleting = this.#channel.deleteQueue(this.queue);
    await within(DELETE_TIMEOUT_MS, deleting, "").catch(() => {});
  }

  async #setup(connection) {
    const channel = await connection.createChannel();
    channel.on("error", () => {}); // "close" follows
    // The queue is durable, so that it keeps replies until this client is connected again.
    await channel.assertQueue(this.queue, { durable: true, arguments: ARGUMENTS });
    await channel.bindQueue(this.queue, EXCHANGES.replies, this.queue);
    await channel.prefetch(PREFETCH);
    await channel.consume(this.queue, (message) => {
      if (message === null) return void channel.close().catch(() => {}); // the queue is gone
      try {
        this.#observe(JSON.parse(message.content.toString()));
      } catch (error) {
        // No sender can be notified, and the message would fail again.
        process.emitWarning(`a reply cannot be read: ${error.message}`, "HeadwayWarning");
      }
      channel.ack(message);
    });
    channel.once("close", () => {
      if (this.#channel === channel) this.#channel = null;
    });
    endTogether(connection, channel);
    this.#channel = channel;
  }
}
