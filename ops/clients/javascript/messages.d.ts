// Made by `python -m ops.generate.typescript` from the AsyncAPI document.

/**
 * History of the request in the mesh.
 */
export type Attempts = {
  hop?: number;
  evictions?: number;
  crashes?: number;
  breaks?: number;
  repeated?: boolean;
  relegated?: boolean;
  evicted_by?: string | null;
  evicted_at?: number | null;
};

/**
 * Body of a message to `headway.requests` in the form of HTTP.
 *
 * `body` may also contain `slo`, `deadline`, `importance`, `application`, `expires_at`, `ttl_s`,
 * `not_before` and `on_late`, as over HTTP; the fields here have precedence.
 */
export type CallRequest = {
  endpoint: string;
  body: unknown;
  events?: boolean;
  model?: string | null;
  id?: string | null;
  slo?: Slo | null;
  deadline?: number | null;
  tenant?: string | null;
  application?: string | null;
  session?: string | null;
  importance?: Importance | null;
  priority?: number | null;
  reply?: ReplyMode | null;
  arrived_at?: number | null;
  expires_at?: number | null;
  ttl_s?: number | null;
  not_before?: number | null;
  on_late?: OnLate | null;
  clamped?: Array<Clamp>;
};

/**
 * One turn of a conversation, OpenAI-style.
 */
export type ChatMessage = {
  role: "assistant" | "developer" | "system" | "tool" | "user";
  content?: string | Array<Record<string, unknown>> | null;
};

/**
 * One answer of a call.
 */
export type ChildAnswer = {
  token_ids: Array<number>;
  text?: string;
  finish_reason: FinishReason;
};

/**
 * A claim of a request beyond its tenant's policy, and what was granted instead.
 */
export type Clamp = {
  field: string;
  asked: string;
  given: string;
};

/**
 * vLLM's encoded request without the tokens of the prompt, or the list of these requests if the
 * model pools. Only gateways with vLLM's application and engine hosts decode it.
 *
 * Its structs are positional, so that another version of vLLM cannot decode it.
 */
export type EnginePayload = {
  version: string;
  parts: Array<string>;
  digest?: string;
};

/**
 * Error in OpenAI's format.
 */
export type ErrorInfo = {
  message: string;
  type?: string;
  code: string;
  param?: string | null;
  status?: number;
  retry_after_s?: number | null;
  response?: unknown;
  requests_limit?: RateLimit | null;
  tokens_limit?: RateLimit | null;
};

/**
 * Reason for which the generation of an answer ended, in vLLM's terms.
 */
export type FinishReason = "length" | "repetition" | "stop";

/**
 * One unplanned step of a request between its queue and its answer.
 */
export type HistoryEntry = {
  at: number;
  instance_id: string;
  what: string;
  why?: string;
  pulled_at?: number | null;
  begun_at?: number | null;
};

/**
 * Importance of a request to its tenant; under overload, low importance is relegated first.
 */
export type Importance = "high" | "low";

/**
 * Body of a message to `headway.requests`.
 *
 * `model` and one of `messages` and `prompt` are required; other fields have defaults. Unknown
 * fields are ignored, except inside `slo`; the fields listed in `unsupported` are refused.
 */
export type InferenceRequest = {
  model: string;
  messages?: Array<ChatMessage> | null;
  prompt?: string | Array<number> | null;
  max_tokens?: number | null;
  max_completion_tokens?: number | null;
  min_tokens?: number;
  temperature?: number | null;
  top_p?: number | null;
  top_k?: number;
  seed?: number | null;
  stop?: string | Array<string> | null;
  presence_penalty?: number;
  frequency_penalty?: number;
  repetition_penalty?: number;
  ignore_eos?: boolean;
  user?: string | null;
  service_tier?: string | null;
  metadata?: Record<string, unknown> | null;
  id?: string | null;
  slo?: Slo | null;
  deadline?: number | null;
  tenant?: string | null;
  application?: string | null;
  session?: string | null;
  importance?: Importance | null;
  priority?: number;
  reply?: ReplyMode | null;
  arrived_at?: number | null;
  prompt_tokens?: number | null;
  engine?: EnginePayload | null;
  input_lengths?: Array<number>;
  expires_at?: number | null;
  ttl_s?: number | null;
  not_before?: number | null;
  on_late?: OnLate | null;
  clamped?: Array<Clamp>;
};

/**
 * What happens to a request that misses its deadline.
 */
export type OnLate = "drop" | "serve";

/**
 * Message format of llm-d-async, accepted without changes.
 */
export type QueueItem = {
  id: string;
  payload: Record<string, unknown>;
  deadline?: number | null;
  created?: number | null;
  metadata?: Record<string, unknown> | null;
  headers?: Record<string, unknown> | null;
  endpoint?: string | null;
};

/**
 * State of one limit per minute, for the headers `x-ratelimit-*`.
 */
export type RateLimit = {
  limit: number;
  remaining?: number;
  reset_s?: number;
};

/**
 * Replies that the producer requests on its reply queue.
 */
export type ReplyMode = "final" | "stream";

/**
 * Question about a request; a grouper answers with `RequestStatus`.
 *
 * The AMQP `user_id` of the question is the tenant, which must be that of the request.
 */
export type RequestAsked = {
  kind: "request.asked.v1";
  request_id: string;
  reply_to: string;
  tenant?: string | null;
};

/**
 * A producer's command to cancel a request, wherever the request is.
 */
export type RequestCancel = {
  kind: "request.cancel.v1";
  request_id: string;
  reply_to?: string | null;
};

/**
 * Final reply with the whole answer; complete even for a consumer that missed all tokens.
 *
 * A successful final reply of any run completes the request.
 */
export type RequestCompleted = {
  kind: "request.completed.v1";
  request_id: string;
  run_id: string;
  instance_id: string;
  model: string;
  token_ids: Array<number>;
  text: string;
  finish_reason: FinishReason;
  usage: Usage;
  timings: Timings;
  verdict: SloVerdict;
  attempts?: Attempts;
  history?: Array<HistoryEntry>;
  engine: string;
  details?: Array<StepDetails>;
  response?: unknown;
  children?: Array<ChildAnswer>;
  clamped?: Array<Clamp>;
};

/**
 * Final reply of a failed run, without an answer.
 *
 * A live run or a successful final reply overrides this reply.
 */
export type RequestFailed = {
  kind: "request.failed.v1";
  request_id: string;
  run_id?: string | null;
  error: ErrorInfo;
  at: number;
  history?: Array<HistoryEntry>;
};

/**
 * How far a request has come.
 */
export type RequestState = "cancelled" | "completed" | "failed" | "queued" | "running";

/**
 * What the store knows about a request: answer to `RequestAsked`.
 */
export type RequestStatus = {
  kind: "request.status.v1";
  request_id: string;
  state?: RequestState | null;
  problem?: ErrorInfo | null;
  model?: string | null;
  endpoint?: string | null;
  created_at?: number | null;
  grouped_at?: number | null;
  lane?: string | null;
  expected_at?: number | null;
  started_at?: number | null;
  instance_id?: string | null;
  runs?: number;
  ended_at?: number | null;
  expires_at?: number | null;
  final?: unknown;
};

/**
 * A run of the request begins; this message precedes the run's tokens.
 *
 * Tokens before `offset` came from earlier runs and remain valid.
 */
export type RunStarted = {
  kind: "run.started.v1";
  request_id: string;
  run_id: string;
  hop?: number;
  instance_id: string;
  offset?: number;
  at: number;
  offsets?: Array<number>;
};

/**
 * A producer's command to end a run that the producer does not need.
 */
export type RunStop = {
  kind: "run.stop.v1";
  request_id: string;
  run_id: string;
  reason: StopReason;
};

/**
 * Latency targets of one request; best effort if all fields are empty.
 *
 * A request with `ttft_s` is interactive, regardless of its other fields.
 */
export type Slo = {
  ttft_s?: number | null;
  tbt_s?: number | null;
  ttlt_s?: number | null;
  deadline_at?: number | null;
};

/**
 * Result of a finished request against its SLO, measured on the instance that ran it.
 */
export type SloVerdict = {
  attained: boolean;
  ttft_s?: number | null;
  ttlt_s?: number | null;
  max_tbt_s?: number | null;
  late_tokens?: number;
};

/**
 * What one step of an answer has beside its token ids.
 */
export type StepDetails = [number, Array<string>, string, number];

/**
 * Reason why a producer ends a run of its request.
 */
export type StopReason = "cancelled" | "completed" | "duplicate" | "superseded";

/**
 * Times at which the request passed each stage, Unix seconds.
 */
export type Timings = {
  arrived_at: number;
  grouped_at: number;
  pulled_at: number;
  submitted_at: number;
  first_token_at: number;
  finished_at: number;
  predicted_wait?: WaitForecast | null;
};

/**
 * Consecutive tokens of one run, identified by (request, run, offset).
 */
export type TokenChunk = {
  request_id: string;
  run_id: string;
  offset?: number;
  token_ids: Array<number>;
  text?: string;
  details?: Array<StepDetails>;
  child?: number;
};

/**
 * One flush of an agent to one reply queue: chunks of several requests.
 */
export type TokensEmitted = {
  kind: "tokens.emitted.v1";
  chunks: Array<TokenChunk>;
};

/**
 * Token counts of a finished request; all fields are always written.
 */
export type Usage = {
  prompt_tokens: number;
  completion_tokens: number;
  total_tokens: number;
  cached_tokens?: number;
};

/**
 * Predicted time from `grouped_at` until the request is served.
 */
export type WaitForecast = {
  mean_s: number;
  sd_s: number;
};

export type Control =
  | RequestAsked
  | RequestCancel
  | RunStop;

export type Reply =
  | RequestCompleted
  | RequestFailed
  | RequestStatus
  | RunStarted
  | TokensEmitted;

export type Request =
  | CallRequest
  | InferenceRequest
  | QueueItem;
