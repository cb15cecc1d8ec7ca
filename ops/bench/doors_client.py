"""The client of `ops.bench doors`: sends sessions through a door, and times the answers."""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import aiohttp
import msgspec

from ops.bench.doors_fronts import Choice, Door
from ops.bench.doors_scheduling import answer_text
from ops.bench.doors_traffic import Branch, RequestClass, Session
from ops.sim.attached.outcomes import Outcome
from shared.contracts.base import Seconds

CHATS = "/v1/chat/completions"
_TOKEN = b"zq"  # the begin of each of `ANSWER_WORDS`
_CONTENT, _EMPTY = (b'"content":"', b'"content": "'), (b'"content":""', b'"content": ""')
_DONE, _ERROR = b"data: [DONE]", b'"error"'
_ERROR_CHARACTERS = 200
_HEADERS = {"content-type": "application/json"}


@dataclass(slots=True)
class Answer:
    """One request, and the times of its answer's tokens."""

    request_class: RequestClass
    prompt_tokens: int
    outcome: Outcome
    error: str = "no answer in time"
    """Why the answer is lost, if it is not finished."""


@dataclass(slots=True, kw_only=True)
class Client:
    """
    Sends sessions through one door.

    Args:
        http: Connections without a limit.
        door: What a request carries.
        choice: Where it is sent.
        is_simulated: True if the answers are those of simulated servers.
        word_share: Prompts are shortened to this share of their words.
    """

    http: aiohttp.ClientSession
    door: Door
    choice: Choice
    is_simulated: bool = True
    word_share: float = 1.0
    answers: list[Answer] = field(default_factory=list)
    """One for each request, in order of their begins."""

    async def serve(self, sessions: Sequence[Session], patience_s: Seconds) -> None:
        """
        Send all sessions at their times, and wait for their answers.

        Args:
            sessions: The load.
            patience_s: Time after the last arrival at which answers count as lost.
        """
        begun = time.perf_counter()
        tasks = []
        for session in sessions:
            await asyncio.sleep(max(0.0, begun + session.at_s - time.perf_counter()))
            tasks.append(asyncio.create_task(self._session(session)))
        if not tasks:
            return
        _, late = await asyncio.wait(tasks, timeout=patience_s)
        for task in late:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for task in tasks:
            if not task.cancelled() and (error := task.exception()) is not None:
                raise error

    async def _session(self, session: Session) -> None:
        """Each step continues the text of the ones before, as if every answer had come."""
        text = ""
        for step in session.steps:
            await asyncio.sleep(step.gap_s)
            await asyncio.gather(*(self.ask(session, text, each) for each in step.branches))
            for branch in step.branches:
                said = answer_text(branch.answer_tokens)
                text = f"{text}{self._shortened(branch.words)} {said}"

    async def ask(self, session: Session, before: str, branch: Branch) -> None:
        """Send one request, and record its answer."""
        prompt = before + self._shortened(branch.words)
        request_class = session.request_class
        body = {
            "model": session.model,
            "messages": [{"role": "user", "content": prompt}],
            "max_tokens": branch.answer_tokens,
            "stream": True,
        } | self.door.fields(request_class)
        if not self.is_simulated:
            body |= {"ignore_eos": True, "temperature": 0}
        url = self.choice.begin(session.model)
        answer = Answer(request_class, len(prompt.split()), Outcome(time.time()))
        self.answers.append(answer)
        try:
            await self._streamed(url, msgspec.json.encode(body), session, answer)
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            answer.error = type(error).__name__
        finally:
            self.choice.end(url)

    async def _streamed(self, url: str, body: bytes, session: Session, answer: Answer) -> None:
        headers = _HEADERS | self.door.headers(session)
        async with self.http.post(url + CHATS, data=body, headers=headers) as response:
            if response.status != 200:
                text = (await response.text())[:_ERROR_CHARACTERS]
                answer.error = f"status {response.status}: {text}"
                return
            answer.error = "the stream ended early"
            has_error = False
            async for line in response.content:
                if _ERROR in line:
                    answer.error = line.decode(errors="replace")[:_ERROR_CHARACTERS]
                    has_error = True
                elif line.startswith(_DONE):
                    answer.outcome.finished = not has_error
                elif number := self._tokens_in(line):
                    answer.outcome.add(number, time.time())

    def _tokens_in(self, line: bytes) -> int:
        if self.is_simulated:
            return line.count(_TOKEN)
        has_content = any(each in line for each in _CONTENT)
        return int(has_content and not any(each in line for each in _EMPTY))

    def _shortened(self, words: str) -> str:
        if self.word_share == 1.0:
            return words
        split = words.split()
        return " ".join(split[: max(1, round(self.word_share * len(split)))])
