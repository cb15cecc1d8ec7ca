// Client of a Headway mesh over AMQP: submits requests, reads their answers, cancels them, and asks
// about them.

import { randomUUID } from "node:crypto";

import { RequestAssembly } from "./assembly.js";
import { EXCHANGES, KINDS } from "./contract.js";
import { BrokerError, HeadwayError, RequestError } from "./errors.js";
import { userOf, within } from "./link.js";
import { checkTimeLimit, plainFields, written } from "./numbers.js";
import { Publisher } from "./publisher.js";
import { Replies } from "./replies.js";

export { BrokerError, HeadwayError, RequestError };

const GIVE_UP_AFTER_S = 60;
const STATUS_TIMEOUT_S = 10;
const FINISHED_MEMORY = 65_536;
const TICK_MS = 1_000;
const NO_PLANNER = "no planner has answered in time; is the mesh running?";
/** Routing keys of the control exchange. */
const CANCEL = "all.cancel";
const QUESTION = "request.asked";

/** The answer to a submitted request, for one reader. Each token comes once. */
export class Answer {
  #parts = [];
  #changed = () => {};
  #cancel;
  #finished;
  #finish;
  #ended = false;
  #diverged = false;

  constructor(requestId, cancel) {
    this.requestId = requestId;
    this.#cancel = cancel;
    // It always resolves: an answer that is not awaited must not end the process.
    this.#finished = new Promise((resolve) => (this.#finish = resolve));
  }

  /** Parts of the answer as they arrive; together they equal the final. */
  async *stream() {
    for (;;) {
      while (this.#parts.length > 0) yield this.#parts.shift();
      if (this.#diverged) {
        const text = "a repeated run generated tokens that differ from those sent before";
        throw new HeadwayError("run_diverged", text);
      }
      if (this.#ended) break;
      await new Promise((resolve) => (this.#changed = resolve));
    }
    await this.wait();
  }

  /** The final; rejects with `RequestError` if the request has ended without its whole answer. */
  async wait() {
    const final = await this.#finished;
    if (final.kind === KINDS.RequestFailed) throw new RequestError(final.error);
    return final;
  }

  /** Cancel the request, wherever it is. */
  async cancel() {
    await this.#cancel(this.requestId);
  }

  /** Take an effect of the assembly; the client calls this method. */
  take(effect) {
    if (effect.type === "part") this.#parts.push(effect.part);
    if (effect.type === "diverged") this.#diverged = true;
    if (effect.type === "finished") {
      this.#ended = true;
      this.#finish(effect.final);
    }
    this.#changed();
  }

  /** Take a final and the whole answer in it; the client calls this method. */
  takeWhole(final) {
    const whole = new RequestAssembly(this.requestId, { streaming: false });
    for (const effect of whole.observe(final, 0)) this.take(effect);
  }
}

/** A connection to the mesh; `connect` opens it. */
export class Client {
  #publisher = new Publisher();
  #replies;
  #userId;
  #giveUpAfterMs;
  /**
   * Request id -> {assembly, answers, asked, published} of the requests in progress. The first
   * answer gets its parts as they come, later ones with the final; `asked` is null if the id may
   * not be asked again.
   */
  #outstanding = new Map();
  /** Request id -> reason with which late runs of an ended request are stopped. */
  #finished = new Map();
  /** Request id -> set of functions that take the answer to a question in progress. */
  #questions = new Map();
  #timer;

  constructor(url, { name, giveUpAfterS }) {
    this.#userId = userOf(url);
    this.#giveUpAfterMs = 1_000 * giveUpAfterS;
    this.#replies = new Replies(`reply.${name}.${randomUUID()}`, (reply) => this.#observe(reply));
    this.#timer = setInterval(() => this.#tick(), TICK_MS);
    this.#timer.unref();
  }

  async open(url, name) {
    try {
      await this.#publisher.open(url, `${name} publish`);
      await this.#replies.open(url, `${name} consume`);
    } catch (error) {
      await this.#disconnect();
      throw error;
    }
  }

  /** Publish a request durably: when the promise resolves, the broker has the request. */
  async submit(given, { idempotent = false, traceparent } = {}) {
    const fields = plainFields(given);
    if (idempotent && !fields.id) {
      throw new HeadwayError("invalid_request", "an idempotent request needs an id");
    }
    const requestId = fields.id ?? `req-${randomUUID()}`;
    const asked = idempotent ? JSON.stringify(fields) : null;
    if (this.#outstanding.has(requestId)) return this.#join(requestId, asked);
    const reply = fields.reply ?? (fields.endpoint && !fields.body?.stream ? "final" : "stream");
    const assembly = new RequestAssembly(requestId, { streaming: reply === "stream" });
    const answer = new Answer(requestId, (id) => this.#cancel(id));
    const body = { arrived_at: Date.now() / 1_000, ...fields, id: requestId, reply };
    const headers = { ...(traceparent && { traceparent }) };
    if (idempotent) headers["x-headway-idempotent"] = true;
    const key = fields.slo?.ttft_s == null ? "rest" : "interactive";
    const published = this.#publish(EXCHANGES.requests, key, body, {
      messageId: requestId,
      correlationId: requestId,
      persistent: true,
      replyTo: this.#replies.queue,
      type: "inference.request.v1",
      headers,
    });
    this.#outstanding.set(requestId, { assembly, answers: [answer], asked, published });
    try {
      await published;
    } catch (error) {
      const mayHaveArrived = error.code === "broker_unavailable" && !idempotent;
      if (mayHaveArrived) this.#cancel(requestId);
      else this.#outstanding.delete(requestId);
      throw error;
    }
    return answer;
  }

  /** The answer to a request in progress, which is submitted again. */
  async #join(requestId, asked) {
    const entry = this.#outstanding.get(requestId);
    if (asked === null || entry.asked !== asked) {
      const code = asked === null ? "duplicate_request" : "id_conflict";
      throw new HeadwayError(code, `another request with the id ${requestId} is in progress`);
    }
    const answer = new Answer(requestId, (id) => this.#cancel(id));
    entry.answers.push(answer);
    await entry.published;
    return answer;
  }

  /** How far an idempotent request of this user has come. */
  async status(requestId, { timeoutS = STATUS_TIMEOUT_S } = {}) {
    checkTimeLimit("timeoutS", timeoutS);
    const waiting = this.#questions.get(requestId) ?? new Set();
    this.#questions.set(requestId, waiting);
    let answer, status;
    const answered = new Promise((resolve) => (answer = resolve));
    waiting.add(answer);
    try {
      const question = { request_id: requestId, reply_to: this.#replies.queue };
      await this.#control(QUESTION, KINDS.RequestAsked, question, this.#giveUpAfterMs);
      status = await within(1_000 * timeoutS, answered, NO_PLANNER);
    } finally {
      waiting.delete(answer);
      if (waiting.size === 0) this.#questions.delete(requestId);
    }
    if (status.problem) throw new RequestError(status.problem);
    return status;
  }

  /** Close the connection; requests in progress are cancelled, except idempotent ones. */
  async close() {
    const ending = [...this.#outstanding].map(([requestId, { assembly, asked }]) => {
      if (asked === null) return this.#cancel(requestId);
      return this.#apply(requestId, assembly.cancel(Date.now() / 1_000));
    });
    await Promise.all(ending);
    await this.#replies.deleteQueue();
    await this.#disconnect();
  }

  async #disconnect() {
    clearInterval(this.#timer);
    await Promise.all([this.#publisher.close(), this.#replies.close()]);
  }

  async #cancel(requestId) {
    const entry = this.#outstanding.get(requestId);
    if (entry === undefined) return;
    this.#apply(requestId, entry.assembly.cancel(Date.now() / 1_000));
    const command = { request_id: requestId, reply_to: this.#replies.queue };
    // If the cancellation is lost, each run that starts later is stopped.
    await this.#control(CANCEL, KINDS.RequestCancel, command).catch(() => {});
  }

  #observe(reply) {
    const now = Date.now() / 1_000;
    if (reply.kind === KINDS.TokensEmitted) {
      for (const chunk of reply.chunks) {
        const entry = this.#outstanding.get(chunk.request_id);
        if (entry) this.#apply(chunk.request_id, entry.assembly.observeChunk(chunk, now));
      }
      return;
    }
    const requestId = reply.request_id;
    if (reply.kind === KINDS.RequestStatus) {
      for (const answer of this.#questions.get(requestId) ?? []) answer(reply);
      return;
    }
    const entry = this.#outstanding.get(requestId);
    if (entry) {
      this.#apply(requestId, entry.assembly.observe(reply, now));
    } else if (reply.kind === KINDS.RunStarted && this.#finished.has(requestId)) {
      this.#stop(requestId, reply.run_id, reply.instance_id, this.#finished.get(requestId));
    }
  }

  #apply(requestId, effects) {
    const { answers, assembly } = this.#outstanding.get(requestId);
    const [first, ...joined] = answers;
    for (const effect of effects) {
      if (effect.type === "stop") {
        this.#stop(requestId, effect.runId, effect.instanceId, effect.reason);
      } else {
        first.take(effect);
      }
      if (effect.type === "finished") {
        this.#remember(requestId, assembly.finished);
        for (const each of joined) each.takeWhole(effect.final);
      }
    }
  }

  #remember(requestId, reason) {
    const { asked } = this.#outstanding.get(requestId);
    this.#outstanding.delete(requestId);
    if (asked !== null) return; // its id may be asked again
    this.#finished.set(requestId, reason);
    if (this.#finished.size > FINISHED_MEMORY) {
      this.#finished.delete(this.#finished.keys().next().value);
    }
  }

  /** Stop a run that is not needed; a lost command only wastes work. */
  #stop(requestId, runId, instanceId, reason) {
    const command = { request_id: requestId, run_id: runId, reason };
    this.#control(`instance.${instanceId}`, KINDS.RunStop, command).catch(() => {});
  }

  #tick() {
    const now = Date.now() / 1_000;
    for (const [requestId, { assembly }] of [...this.#outstanding]) {
      this.#apply(requestId, assembly.tick(now));
    }
  }

  /** Publish a command or a question, by default in one attempt. */
  #control(key, kind, message, giveUpAfterMs = 0) {
    const properties = { messageId: randomUUID(), type: kind, mandatory: false, giveUpAfterMs };
    return this.#publish(EXCHANGES.control, key, { kind, ...message }, properties);
  }

  #publish(exchange, key, message, properties) {
    const complete = { userId: this.#userId, giveUpAfterMs: this.#giveUpAfterMs, ...properties };
    return this.#publisher.publish(exchange, key, written(message), complete);
  }
}

/**
 * Open a client. Lost connections are restored in the background.
 *
 * Rejects with a `BrokerError` if the broker does not answer or refuses the login.
 */
export async function connect(url, { name = "client", giveUpAfterS = GIVE_UP_AFTER_S } = {}) {
  checkTimeLimit("giveUpAfterS", giveUpAfterS);
  const client = new Client(url, { name, giveUpAfterS });
  await client.open(url, name);
  return client;
}
