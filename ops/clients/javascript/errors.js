/** Base of the errors of this package; `code` is a stable word. */
export class HeadwayError extends Error {
  constructor(code, message, options) {
    super(message, options);
    this.name = new.target.name;
    this.code = code;
  }
}

/** The broker did not answer in time, or refuses what this client does. */
export class BrokerError extends HeadwayError {}

/** The mesh has answered with an error: a request has ended without its whole answer. */
export class RequestError extends HeadwayError {
  constructor(error) {
    super(error.code, `${error.code}: ${error.message}`);
    this.error = error;
    this.status = error.status ?? 400;
  }
}
