"""Classes of requests of the demo, and what is measured of each request."""

from collections.abc import Mapping
from enum import Enum
from typing import Any, Literal

import msgspec
import numpy as np

from shared.contracts.base import Seconds

QUESTIONS = (
    "Why is the sky blue?",
    "Name three uses of a message queue.",
    "What does a scheduler do?",
    "How does a bicycle stay upright?",
    "Explain what a deadline is to a child.",
    "What is the difference between latency and throughput?",
    "Write one sentence about the sea.",
    "Which planets have rings?",
)


class PromptForm(Enum):
    """Form in which a model takes prompts; the value is the endpoint."""

    CHAT = "/v1/chat/completions"
    """For models with a chat template."""
    TEXT = "/v1/completions"

    def fields(self, prompt: str) -> dict[str, Any]:
        """Fields of a request that contain *prompt*."""
        if self is PromptForm.CHAT:
            return {"messages": [{"role": "user", "content": prompt}]}
        return {"prompt": prompt}


class DemoClass(msgspec.Struct, frozen=True, kw_only=True):
    """One class of the load: a number of clients that each wait for their answer."""

    name: str
    door: Literal["HTTP", "AMQP"]
    clients: int
    max_tokens: int
    ttft_s: Seconds | None = None
    """Target of the first token."""
    ttlt_s: Seconds | None = None
    """Target of the whole answer."""

    @property
    def slo(self) -> Mapping[str, Seconds]:
        """The request's `slo`; empty for best effort."""
        targets = {"ttft_s": self.ttft_s, "ttlt_s": self.ttlt_s}
        return {name: value for name, value in targets.items() if value is not None}

    @property
    def target(self) -> str:
        """The target in words."""
        if self.ttft_s is not None:
            return f"first token in {self.ttft_s:g} s"
        return "none" if self.ttlt_s is None else f"whole answer in {self.ttlt_s:g} s"


CLASSES = (
    DemoClass(name="interactive", door="HTTP", clients=3, max_tokens=32, ttft_s=2.0),
    DemoClass(name="deadline", door="AMQP", clients=3, max_tokens=48, ttlt_s=30.0),
    DemoClass(name="batch", door="AMQP", clients=4, max_tokens=96),
)


class Asked(msgspec.Struct, frozen=True, kw_only=True):
    """What became of one request, by the clock of the client."""

    name: str
    """Name of its class."""
    model: str
    prompt: str
    text: str = ""
    first_s: Seconds | None = None
    """Time to the first token; None without one."""
    whole_s: Seconds | None = None
    """Time to the end of the answer; None without a whole answer."""
    error: str | None = None


def is_attained(asked: Asked, demo_class: DemoClass) -> bool:
    """Return whether the answer is whole and within the class's target."""
    if asked.whole_s is None or asked.first_s is None:
        return False
    if demo_class.ttft_s is not None and asked.first_s > demo_class.ttft_s:
        return False
    return demo_class.ttlt_s is None or asked.whole_s <= demo_class.ttlt_s


def quantile(values: list[Seconds], share: float) -> Seconds | None:
    """The smallest value that at least *share* of the values do not exceed; None without values."""
    return float(np.quantile(values, share, method="inverted_cdf")) if values else None


def figures(asked: list[Asked], demo_class: DemoClass) -> dict[str, Any]:
    """Figures of one class: counts, and times in seconds."""
    own = [each for each in asked if each.name == demo_class.name]
    first = [each.first_s for each in own if each.first_s is not None]
    whole = [each.whole_s for each in own if each.whole_s is not None]
    return {
        "class": demo_class.name,
        "door": demo_class.door,
        "target": demo_class.target,
        "requests": len(own),
        "answered": len(whole),
        "attained": sum(is_attained(each, demo_class) for each in own),
        "first_token_s": {"p50": quantile(first, 0.5), "p95": quantile(first, 0.95)},
        "e2e_s": {"p50": quantile(whole, 0.5), "p95": quantile(whole, 0.95)},
        "errors": sorted({each.error for each in own if each.error is not None}),
    }
