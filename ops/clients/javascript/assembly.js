// Assembly of one request's answer from the replies of any number of runs.
//
// A request can have several runs, one after another or at the same time, because the broker
// redelivers, agents die and requests move between instances. This state machine combines their
// replies to one answer, by the rules of `shared/producer/assembly.py`. It does no IO: the caller
// executes its effects, {type: "part" | "diverged" | "stop" | "finished", ...}.

import { KINDS } from "./contract.js";

const CANCELLED = {
  message: "the producer cancelled the request",
  type: "cancelled",
  code: "cancelled",
  status: 499,
};

/** A chunk, a run or a final contradicts the received part of the answer. */
class DivergenceError extends Error {}

/** Tokens and text of an answer that have arrived, in order and without repetitions. */
class Received {
  tokenIds = [];
  text = "";
  /** Number of tokens at a chunk boundary -> length of the text that these tokens complete. */
  textLengthAt = new Map([[0, 0]]);

  /** Add the next chunk of a run's part; return the new tokens and the new text. */
  extend(part, chunk) {
    const start = chunk.offset ?? 0;
    const repeated = Math.min(Math.max(this.tokenIds.length - start, 0), chunk.token_ids.length);
    if (!beginsWith(this.tokenIds, start, chunk.token_ids, repeated)) throw new DivergenceError();
    const chunkText = chunk.text ?? "";
    const text = part.textAt === null ? "" : this.#newText(part.textAt, chunkText);
    const tokens = chunk.token_ids.slice(repeated);
    for (const token of tokens) this.tokenIds.push(token);
    part.position = start + chunk.token_ids.length;
    if (part.textAt !== null) {
      part.textAt += chunkText.length;
      this.textLengthAt.set(part.position, part.textAt);
    }
    return [tokens, text];
  }

  /** The tokens and the text that a final adds. */
  complete(tokenIds, text) {
    const known = this.tokenIds.length;
    const isLonger = known > tokenIds.length || this.text.length > text.length;
    if (isLonger || !beginsWith(this.tokenIds, 0, tokenIds, known)) throw new DivergenceError();
    return [tokenIds.slice(known), this.#newText(0, text)];
  }

  #newText(at, text) {
    const overlap = this.text.length - at;
    if (overlap > 0 && !text.startsWith(this.text.slice(at, at + text.length))) {
      throw new DivergenceError();
    }
    const added = text.slice(Math.max(overlap, 0));
    this.text += added;
    return added;
  }
}

function beginsWith(known, start, tokens, count) {
  for (let index = 0; index < count; index += 1) {
    if (known[start + index] !== tokens[index]) return false;
  }
  return true;
}

/** One run of the request. */
class Run {
  #parts = new Map();

  constructor(started) {
    this.started = started;
  }

  /** The run's part of an answer, which at first continues the answer as it is now. */
  part(child, received) {
    if (!this.#parts.has(child)) {
      const offsets = this.started.offsets ?? [this.started.offset ?? 0];
      const offset = offsets[child] ?? 0;
      this.#parts.set(child, {
        position: offset,
        textAt: received.textLengthAt.get(offset) ?? null,
        broken: offset > received.tokenIds.length,
      });
    }
    return this.#parts.get(child);
  }
}

export class RequestAssembly {
  #answers = new Map();
  #current = null;
  #superseded = new Set();
  #held = null;
  #lastSignAt = 0;
  #diverged = false;

  /** Reason for stopping runs that start after the end; null while the request is in progress. */
  finished = null;

  constructor(requestId, { streaming, silenceS = 10 }) {
    this.requestId = requestId;
    this.streaming = streaming;
    this.silenceS = silenceS;
  }

  /** Process one reply that arrived at *now* (Unix seconds); return its effects in order. */
  observe(reply, now) {
    switch (reply.kind) {
      case KINDS.RunStarted:
        return this.#onStarted(reply, now);
      case KINDS.TokensEmitted:
        return reply.chunks
          .filter((chunk) => chunk.request_id === this.requestId)
          .flatMap((chunk) => this.observeChunk(chunk, now));
      case KINDS.RequestCompleted:
        return this.#onCompleted(reply);
      case KINDS.RequestFailed:
        return this.#onFailed(reply, now);
      default:
        return [];
    }
  }

  observeChunk(chunk, now) {
    const run = this.#current;
    if (this.finished || run === null || chunk.run_id !== run.started.run_id) return [];
    this.#lastSignAt = now;
    const child = chunk.child ?? 0;
    const received = this.#answer(child);
    const part = run.part(child, received);
    if (!this.streaming || this.#diverged || part.broken) return [];
    const end = (chunk.offset ?? 0) + chunk.token_ids.length;
    if ((chunk.offset ?? 0) !== part.position || chunk.token_ids.length === 0) {
      // A chunk that ends at or before the run's position is repeated. Any other cannot be placed;
      // the final contains all tokens.
      part.broken = end > part.position || (chunk.token_ids.length === 0 && Boolean(chunk.text));
      return [];
    }
    return this.#added(child, () => received.extend(part, chunk));
  }

  /** Cancel the request for its consumer; a run that starts later is stopped. */
  cancel(now) {
    if (this.finished) return [];
    const failed = { kind: KINDS.RequestFailed, request_id: this.requestId, at: now };
    return this.#finish({ ...failed, error: CANCELLED }, "cancelled");
  }

  /** End the request with a held-back failure if the live run has been silent for too long. */
  tick(now) {
    if (this.finished || this.#held === null) return [];
    return now - this.#lastSignAt < this.silenceS ? [] : this.#finish(this.#held, "completed");
  }

  #answer(child) {
    if (!this.#answers.has(child)) this.#answers.set(child, new Received());
    return this.#answers.get(child);
  }

  #onStarted(started, now) {
    const old = this.#current;
    if (this.finished || this.#superseded.has(started.run_id)) {
      return [stop(started, this.finished ?? "superseded")];
    }
    if (old !== null && started.run_id === old.started.run_id) {
      this.#lastSignAt = now;
      return [];
    }
    if (old !== null && precedes(started, old.started)) {
      this.#superseded.add(started.run_id);
      return [stop(started, "superseded")];
    }
    // At the same hop the newer run may be the same message, redelivered because the older run's
    // agent died. To stop the newer run would then lose the request.
    this.#lastSignAt = now;
    this.#current = new Run(started);
    for (const [child, received] of this.#answers) this.#current.part(child, received);
    if (old === null) return [];
    this.#superseded.add(old.started.run_id);
    return [stop(old.started, "superseded")];
  }

  #onCompleted(final) {
    if (this.finished) return [];
    const wholes = final.children?.length ? final.children : [final];
    const tail = wholes.flatMap((whole, child) =>
      this.#diverged
        ? []
        : this.#added(child, () => this.#answer(child).complete(whole.token_ids, whole.text ?? "")),
    );
    return [...tail, ...this.#finish(final, "completed")];
  }

  #added(child, take) {
    const offset = this.#answer(child).tokenIds.length;
    let tokenIds, text;
    try {
      [tokenIds, text] = take();
    } catch (error) {
      if (!(error instanceof DivergenceError)) throw error;
      // Emitted tokens cannot be withdrawn: from here on only the final counts.
      this.#diverged = true;
      return [{ type: "diverged" }];
    }
    if (tokenIds.length === 0 && text === "") return [];
    return [{ type: "part", part: { offset, tokenIds, text, child } }];
  }

  #onFailed(failed, now) {
    if (this.finished) return [];
    const run = this.#current;
    const runId = failed.run_id ?? null;
    if (run === null || runId === run.started.run_id || this.#isEnd(failed)) {
      return this.#finish(failed, "completed");
    }
    // The first token has come, and the mesh had not heard of it.
    if (runId === null && failed.error.code === "deadline_expired") return [];
    // A run's start may be lost, so a failure of an unknown run may end the request; a failure of
    // a superseded run never does.
    if (!this.#superseded.has(runId) && this.#held === null) {
      this.#held = failed;
      this.#lastSignAt = Math.max(this.#lastSignAt, now);
    }
    return [];
  }

  /** True if the request has reached its end while it waited. */
  #isEnd(failed) {
    if ((failed.run_id ?? null) !== null || failed.error.code !== "deadline_expired") return false;
    const hasTokens = [...this.#answers.values()].some((each) => each.tokenIds.length > 0);
    return failed.error.param !== "slo.ttft_s" || !hasTokens;
  }

  #finish(final, reason) {
    this.finished = reason;
    this.#answers.clear();
    this.#held = null;
    return [{ type: "finished", final }];
  }
}

function stop(started, reason) {
  return { type: "stop", runId: started.run_id, instanceId: started.instance_id, reason };
}

/** True if the run of *one* is older, although its start arrived later. */
function precedes(one, other) {
  const [hop, otherHop] = [one.hop ?? 0, other.hop ?? 0];
  const isSame = one.instance_id === other.instance_id && hop === otherHop;
  return hop < otherHop || (isSame && one.at < other.at);
}
