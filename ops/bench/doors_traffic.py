"""Traffic of `ops.bench doors`: sessions of requests, equal for every door."""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count

from shared.contracts.base import Seconds
from shared.contracts.qos import Slo

PACE_S: Seconds = 0.25
"""Target between two tokens of an answer that a person reads."""
_WORDS = tuple(f"w{number}" for number in range(500))
_SYSTEM_WORDS, _NUM_SYSTEMS = 400, 5
_TURNS, _FAN_OUT_EVERY, _BRANCHES = 8, 4, 3


@dataclass(frozen=True, slots=True)
class RequestClass:
    """What the user wants of one kind of requests."""

    name: str
    slo: Slo
    priority: int
    """What a client gives to a server that orders by priority; lower first."""


@dataclass(frozen=True, slots=True)
class Branch:
    """One request of a step: the session's text so far, and these words."""

    words: str
    answer_tokens: int


@dataclass(frozen=True, slots=True)
class Step:
    """Requests that are sent at the same time, a while after the answers of the step before."""

    branches: tuple[Branch, ...]
    gap_s: Seconds = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Session:
    """Requests of which each continues the text of the ones before; a chat of one turn has one."""

    at_s: Seconds
    """Time of its first request since the begin of the load."""
    request_class: RequestClass
    steps: tuple[Step, ...]
    model: str = "m"
    key: str | None = None
    """Name of the session for doors that keep sessions together; None without later turns."""

    @property
    def prompts_tokens(self) -> int:
        """Number of prompt tokens of all its requests."""
        total = before = 0
        for step in self.steps:
            lengths = [len(branch.words.split()) for branch in step.branches]
            total += sum(before + length for length in lengths)
            before += sum(lengths) + sum(branch.answer_tokens for branch in step.branches)
        return total


MakeSession = Callable[[random.Random, Seconds, str], Session]
"""Makes a session from its own random numbers, its arrival and its name."""

_INTERACTIVE = RequestClass("chat", Slo(ttft_s=1.0, tbt_s=PACE_S), 0)
_BATCH = RequestClass("batch", Slo(ttlt_s=300.0), 2)
_TURN = RequestClass("turn", Slo(ttft_s=2.0, tbt_s=PACE_S), 0)
TIERS = tuple(
    RequestClass(name, Slo(ttft_s=ttft_s, tbt_s=PACE_S), priority)
    for priority, (name, ttft_s) in enumerate((("gold", 0.5), ("silver", 1.5), ("bronze", 4.0)))
)


def sessions(
    make: MakeSession, *, rate_rps: float, seconds: Seconds, seed: int, scale: float = 1.0
) -> list[Session]:
    """
    The sessions that arrive within *seconds*, at random times.

    Args:
        make: Makes one session.
        rate_rps: Sessions per second at full speed.
        seconds: Duration of the arrivals at full speed.
        seed: Seed of all random numbers.
        scale: Slow motion: all times and targets are multiplied by it.
    """
    arrivals, at_s, made = random.Random(seed), 0.0, []
    for number in count(1):
        at_s += arrivals.expovariate(rate_rps)
        if at_s > seconds:
            break
        own = random.Random(seed * 77_777 + number)
        made.append(_slowed(make(own, at_s, f"s{seed}-{number}"), scale))
    return made


def chat_and_batch(
    own: random.Random,
    at_s: Seconds,
    _name: str,
    *,
    models: Sequence[str] = ("m",),
    answers: tuple[tuple[int, int], tuple[int, int]] = ((20, 80), (60, 160)),
) -> Session:
    """
    A chat (60 %) or a batch request.

    Args:
        own: Random numbers of this session.
        at_s: Its arrival.
        models: Models with equal shares.
        answers: Shortest and longest answer of chats, and of batch requests, in tokens.
    """
    is_chat = own.random() < 0.6
    prompt = text(own, *((50, 600) if is_chat else (400, 1500)))
    branch = Branch(prompt, own.randint(*answers[0 if is_chat else 1]))
    return Session(
        at_s=at_s,
        request_class=_INTERACTIVE if is_chat else _BATCH,
        steps=(Step((branch,)),),
        model=own.choice(models),
    )


def tiers(own: random.Random, at_s: Seconds, _name: str) -> Session:
    """A chat of one of three tenants, which have different targets."""
    branch = Branch(text(own, 50, 600), own.randint(20, 80))
    return Session(at_s=at_s, request_class=own.choice(TIERS), steps=(Step((branch,)),))


def agent(own: random.Random, at_s: Seconds, name: str) -> Session:
    """
    An agent: turns that grow, with a tool's time between them, and sometimes three questions at
    once. Its system prompt is one of five that all agents share.
    """
    fans_out = own.random() < 0.25
    steps = []
    for turn in range(_TURNS):
        begin = ""
        if turn == 0:
            begin = text(random.Random(own.randrange(_NUM_SYSTEMS)), _SYSTEM_WORDS, _SYSTEM_WORDS)
        number = _BRANCHES if fans_out and turn % _FAN_OUT_EVERY == _FAN_OUT_EVERY - 1 else 1
        longest = (300, 300) if turn == 0 else (100, 250)
        branches = tuple(
            Branch(f"{begin} {text(own, *longest)}".strip(), own.randint(30, 60))
            for _ in range(number)
        )
        steps.append(Step(branches, own.expovariate(1 / 2.0) if turn else 0.0))
    return Session(at_s=at_s, request_class=_TURN, steps=tuple(steps), key=name)


TWO_MODELS: MakeSession = partial(chat_and_batch, models=("m", "n"))
LONG_ANSWERS: MakeSession = partial(chat_and_batch, answers=((200, 600), (200, 600)))


def text(own: random.Random, least: int, most: int) -> str:
    """Random words, one token each."""
    return " ".join(own.choices(_WORDS, k=own.randint(least, most)))


def _slowed(session: Session, scale: float) -> Session:
    slo = session.request_class.slo
    slowed = Slo(
        ttft_s=slo.ttft_s and scale * slo.ttft_s,
        tbt_s=slo.tbt_s and scale * slo.tbt_s,
        ttlt_s=slo.ttlt_s and scale * slo.ttlt_s,
    )
    given = session.request_class
    return Session(
        at_s=scale * session.at_s,
        request_class=RequestClass(given.name, slowed, given.priority),
        steps=tuple(Step(step.branches, scale * step.gap_s) for step in session.steps),
        model=session.model,
        key=session.key,
    )
