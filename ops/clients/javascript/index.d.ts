import type {
  CallRequest,
  ErrorInfo,
  InferenceRequest,
  RequestCompleted,
  RequestStatus,
} from "./messages.js";

export type * from "./messages.js";

/** The next part of an answer; successive parts have no gap and no overlap. */
export type Part = {
  /** Index of the first token in the answer. */
  offset: number;
  tokenIds: Array<number>;
  /** The text of a part's tokens can come with a later part. */
  text: string;
  /** Index of the answer, if the request has several. */
  child: number;
};

export type SubmitOptions = {
  /**
   * True: `id` stands for one request. To submit it again, here or elsewhere, returns its answer and
   * never runs it twice, and `status` knows it; it continues when this client closes. The mesh
   * needs a store. While it is in progress at this client, the answers of repeats come with the
   * final; a submit with the same `id` and other fields is rejected with the code `id_conflict`.
   */
  idempotent?: boolean;
  /** W3C trace context that is sent with the request. */
  traceparent?: string;
};

export type ConnectOptions = {
  /** Name of the connections and part of the reply queue's name, for operators. */
  name?: string;
  /** Time limit in seconds for publishing a request while the broker is unavailable. */
  giveUpAfterS?: number;
};

/**
 * Base of the errors of this package; `code` is a stable word. With the code `client_closed`, the
 * client is closed.
 */
export class HeadwayError extends Error {
  constructor(code: string, message: string, options?: ErrorOptions);
  readonly code: string;
}

/**
 * The broker did not answer in time (`broker_unavailable`), refuses what this client does,
 * for example a login or a message that is too large (`broker_refused`), has no queues of a mesh (`unroutable`), or its queue of requests is full
 * (`over_capacity`).
 */
export class BrokerError extends HeadwayError {}

/**
 * The mesh has answered with an error: a request has ended without its whole answer, or a question
 * about a request cannot be answered.
 */
export class RequestError extends HeadwayError {
  constructor(error: ErrorInfo);
  readonly error: ErrorInfo;
  /** Equivalent HTTP status. */
  readonly status: number;
}

/**
 * The answer to a submitted request, for one reader. Each token comes once, also if the request is
 * evicted, its instance dies, the broker restarts or replies are delivered twice.
 */
export class Answer {
  readonly requestId: string;
  /**
   * Parts of the answer as they arrive; together they equal the final. Rejects as `wait`, or with
   * the code `run_diverged` if a repeated run has generated other tokens; `wait` then still resolves.
   */
  stream(): AsyncGenerator<Part, void, void>;
  /** The final; rejects with `RequestError` if the request has ended without its whole answer. */
  wait(): Promise<RequestCompleted>;
  /** Cancel the request, wherever it is; `wait` rejects with the code `cancelled`. */
  cancel(): Promise<void>;
}

/** A connection to the mesh; `connect` opens it. */
export class Client {
  /** Publish a request durably: when the promise resolves, the broker has the request. */
  submit(fields: InferenceRequest | CallRequest, options?: SubmitOptions): Promise<Answer>;
  /**
   * How far an idempotent request of this user has come; rejects with `RequestError` if the mesh
   * does not know it or has no store.
   */
  status(requestId: string, options?: { timeoutS?: number }): Promise<RequestStatus>;
  /** Close the connection; requests in progress are cancelled, except idempotent ones. */
  close(): Promise<void>;
}

/**
 * Open a client. Lost connections are restored in the background.
 *
 * @param url `amqp://user:password@host:port/vhost`, or `amqps://`. The user is the tenant.
 */
export function connect(url: string, options?: ConnectOptions): Promise<Client>;
