// Made by `python -m ops.generate.typescript` from the AsyncAPI document.

export const EXCHANGES = {
  "control": "headway.control",
  "replies": "headway.replies",
  "requests": "headway.requests"
};

export const KINDS = {
  "RequestAsked": "request.asked.v1",
  "RequestCancel": "request.cancel.v1",
  "RequestCompleted": "request.completed.v1",
  "RequestFailed": "request.failed.v1",
  "RequestStatus": "request.status.v1",
  "RunStarted": "run.started.v1",
  "RunStop": "run.stop.v1",
  "TokensEmitted": "tokens.emitted.v1"
};
