"""Questions from router to router by pub/sub.

Each router hears on a channel of its own name, questions and answers alike. A message may be
lost with a connection: whoever waits for an answer asks again.
"""

import asyncio
import base64
import binascii
import contextlib
import json
import secrets
from collections.abc import Callable
from typing import Any

from router.peers import Answer, Question, Wish
from router.store.base import PREFIX, StoreUnavailableError
from router.store.redis_connection import RedisConnection
from router.store.redis_news import News

# For one asking; whoever asks may ask again.
PATIENCE_S = 0.5
# Answers that wait to be sent. Beyond these a question goes unanswered.
_MAX_ANSWERS = 1000


class RedisPeers:
    """One router's ear and voice. `answer` is called for every question, on the event loop.

    Make it before the news begin to run.
    """

    def __init__(
        self,
        connection: RedisConnection,
        news: News,
        router_id: str,
        answer: Callable[[Question], Answer],
    ) -> None:
        self._connection = connection
        self._channel = _channel(router_id)
        self._answer = answer
        self._waiting: dict[str, asyncio.Future[Answer]] = {}
        self._answers: asyncio.Queue[tuple[str, str]] = asyncio.Queue(_MAX_ANSWERS)
        news.listen(self._channel, self._hear)

    async def ask(self, router_id: str, question: Question) -> Answer | None:
        """Its answer; None if nobody hears, or it does not answer within half a second."""
        number = secrets.token_hex(8)
        asked = {
            "question": number, "channel": self._channel, "wish": question.wish,
            "tenant": question.tenant, "request_id": question.request_id,
        }  # fmt: skip
        answered: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        self._waiting[number] = answered
        try:
            if not await self._publish(_channel(router_id), json.dumps(asked)):
                return None
            async with asyncio.timeout(PATIENCE_S):
                return await answered
        except TimeoutError:
            return None
        finally:
            del self._waiting[number]

    async def run(self) -> None:
        """Send answers until cancelled."""
        while True:
            channel, text = await self._answers.get()
            with contextlib.suppress(StoreUnavailableError):
                await self._publish(channel, text)

    async def _publish(self, channel: str, text: str) -> int:
        """How many hear it. Raises StoreUnavailableError."""
        heard: int = await self._connection.call(lambda client: client.publish(channel, text))
        return heard

    def _hear(self, text: str) -> None:
        """What is no message of a router, the empty one after each connect included, is passed
        over.
        """
        try:
            message = json.loads(text)
            if "question" in message:
                self._hear_question(message)
            else:
                self._hear_answer(message)
        except (ValueError, KeyError, TypeError):
            return

    def _hear_question(self, message: dict[str, Any]) -> None:
        question = Question(Wish(message["wish"]), message["tenant"], message["request_id"])
        answer = self._answer(question)
        told = {
            "answer": message["question"], "found": answer.found,
            "record": base64.b64encode(answer.record).decode(),
        }  # fmt: skip
        with contextlib.suppress(asyncio.QueueFull):
            self._answers.put_nowait((message["channel"], json.dumps(told)))

    def _hear_answer(self, message: dict[str, Any]) -> None:
        waiting = self._waiting.get(message["answer"])
        if waiting is not None and not waiting.done():
            try:
                record = base64.b64decode(message["record"], validate=True)
            except binascii.Error:
                return
            waiting.set_result(Answer(message["found"] is True, record))


def _channel(router_id: str) -> str:
    return f"{PREFIX}router:{router_id}"
