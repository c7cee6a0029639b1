"""Asks a server with OpenAI's chat API over HTTP (server-sent events)."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import aiohttp

from bench.load.outcome import BROKEN, CANCELLED, SERVED, Outcome
from bench.load.workload import Request

_DATA = b"data:"


class OpenAITarget:
    """`url` is the server's, without the path. `ignore_eos` is asked for, as vLLM, SGLang and
    llama.cpp name it; a server that ignores it shows in the streams' faults.
    """

    def __init__(
        self,
        session: aiohttp.ClientSession,
        url: str,
        api_keys: Sequence[str],
        *,
        model: str,
        temperature: float,
        clock: Callable[[], float],
    ) -> None:
        self._session = session
        self._url = url.rstrip("/") + "/v1/chat/completions"
        self._api_keys = api_keys
        self._model = model
        self._temperature = temperature
        self._clock = clock

    async def ask(self, request: Request, outcome: Outcome) -> None:
        key = self._api_keys[request.tenant % len(self._api_keys)]
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        outcome.sent_at = self._clock()
        try:
            async with (
                asyncio.timeout(request.deadline_s),
                self._session.post(self._url, json=self._body(request), headers=headers) as answer,
            ):
                if answer.status == 200:
                    await self._read(answer.content, request, outcome)
                else:
                    outcome.ended = f"HTTP_{answer.status}"
        except TimeoutError:
            outcome.ended = "DEADLINE_EXCEEDED"
        except (aiohttp.ClientError, ValueError) as error:
            outcome.ended = type(error).__name__
        finally:
            outcome.ended_at = self._clock()

    async def _read(self, lines: aiohttp.StreamReader, request: Request, outcome: Outcome) -> None:
        finish = None
        async for line in lines:
            if not line.startswith(_DATA) or (data := line[len(_DATA) :].strip()) == b"[DONE]":
                continue
            event = json.loads(data)
            if "error" in event:
                outcome.ended = "ERROR_EVENT"
                return
            _take_usage(event.get("usage") or {}, outcome)
            for choice in event.get("choices") or ():
                finish = choice.get("finish_reason") or finish
                if (choice.get("delta") or {}).get("content"):
                    outcome.message_times.append(self._clock())
                    if len(outcome.message_times) == request.cancel_after:
                        outcome.ended = CANCELLED
                        return
                    if request.pause_s:
                        await asyncio.sleep(request.pause_s)
        outcome.ended = SERVED if finish else BROKEN
        outcome.check(request.output_tokens, stopped_at_limit=finish == "length")

    def _body(self, request: Request) -> dict[str, Any]:
        system = [{"role": "system", "content": request.system}] if request.system else []
        return {
            "model": self._model,
            "messages": [*system, {"role": "user", "content": request.prompt}],
            "max_tokens": request.output_tokens,
            "temperature": self._temperature,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }


def _take_usage(usage: dict[str, Any], outcome: Outcome) -> None:
    outcome.input_tokens = usage.get("prompt_tokens") or outcome.input_tokens
    outcome.output_tokens = usage.get("completion_tokens") or outcome.output_tokens
    cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens")
    outcome.cached_tokens = cached or outcome.cached_tokens


@asynccontextmanager
async def openai_target(
    url: str,
    api_keys: Sequence[str],
    *,
    model: str,
    temperature: float,
    clock: Callable[[], float],
) -> AsyncIterator[OpenAITarget]:
    """A new connection for each request: some servers close those they have answered on."""
    connector = aiohttp.TCPConnector(limit=0, force_close=True)
    forever = aiohttp.ClientTimeout(total=None)
    async with aiohttp.ClientSession(connector=connector, timeout=forever) as session:
        yield OpenAITarget(
            session, url, api_keys, model=model, temperature=temperature, clock=clock
        )
