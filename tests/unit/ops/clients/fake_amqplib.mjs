// The part of amqplib that the npm package uses, without a broker; `broker` says what it does.

import { EventEmitter } from "node:events";

export class IllegalOperationError extends Error {}

export const broker = {
  /** Error of the next `connect`. */
  refusal: null,
  /** (channel, message) => what happens to a publish; by default a confirm. */
  onPublish: (channel, message) => message.confirmed(null),
  /** Passes a reply to the client. */
  reply: () => {},
  /** Number of acknowledged replies. */
  acked: 0,
  close: async () => {},
};

class Channel extends EventEmitter {
  /** Functions that take the confirms of publishes in progress. */
  pending = new Set();

  async assertQueue() {}
  async bindQueue() {}
  async prefetch() {}
  async deleteQueue() {}
  ack() {
    broker.acked += 1;
  }

  async consume(_queue, take) {
    broker.reply = (reply) => take({ content: Buffer.from(JSON.stringify(reply)) });
  }

  publish(exchange, key, body, options, callback) {
    const confirmed = (error) => {
      this.pending.delete(callback);
      callback(error);
    };
    this.pending.add(callback);
    broker.onPublish(this, { exchange, key, body, options, confirmed });
  }

  /** End the channel as the broker does. */
  end(error) {
    this.emit("error", error);
    for (const callback of this.pending) callback(new Error("channel closed"));
    this.emit("close");
  }

  async close() {
    this.emit("close");
  }
}

class Connection extends EventEmitter {
  async createChannel() {
    return new Channel();
  }
  async createConfirmChannel() {
    return new Channel();
  }
  async close() {}
}

async function connect(_url, { recovery }) {
  if (broker.refusal !== null) throw broker.refusal;
  await recovery.setup(new Connection());
  return Object.assign(new EventEmitter(), { close: () => broker.close() });
}

export default { connect, IllegalOperationError };
