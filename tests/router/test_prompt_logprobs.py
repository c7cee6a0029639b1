"""What a worker tells of the prompt reaches the client in order, each token once."""

import asyncio

import grpc
import pytest

from noria.reasons import Reason
from noria.service.limits import MAX_PROMPT_LOGPROBS
from noria.v1 import chat_pb2, common_pb2, worker_pb2
from tests.router.fakes import EOS, FakeWorker, bearer, events, failure, kinds, routed, spec, until
from tests.support.waiting import until as waited

PROMPT = [10, 11, 12, 13, 14]


def told(first, end, alternatives=1):
    """Of prompt tokens [first, end): token i has logprob -i, and 100 i + j beside it."""
    return worker_pb2.PromptLogprobs(
        logprobs=[-float(i) for i in range(first, end)],
        num_alternatives=[alternatives] * (end - first),
        alternative_ids=[100 * i + j for i in range(first, end) for j in range(alternatives)],
        alternative_logprobs=[-i - j - 0.5 for i in range(first, end) for j in range(alternatives)],
    )


def expected(piece_of, prompt=PROMPT, alternatives=1):
    first = chat_pb2.PromptToken(id=prompt[0], bytes=piece_of(prompt[0]))
    return [first] + [
        chat_pb2.PromptToken(
            id=token_id,
            bytes=piece_of(token_id),
            logprob=-i,
            alternatives=[
                chat_pb2.TokenAlternative(
                    id=100 * i + j, bytes=piece_of(100 * i + j), logprob=-i - j - 0.5
                )
                for j in range(alternatives)
            ],
        )
        for i, token_id in enumerate(prompt[1:], start=1)
    ]


def piece_of(setup):
    return lambda token_id: setup.tokenizer.text_of(token_id).encode()


def prompt_of(answer):
    return [token for event in answer for token in event.prompt_delta.tokens]


async def test_chunks_of_the_prompt_become_events_before_the_text():
    async with routed() as setup:
        setup.tokenizer.prompt_ids = PROMPT
        call = setup.stream(prompt_logprobs=1, logprobs=0, n=2)
        assert (await setup.submitted(1)).sampling.prompt_logprobs == 1
        setup.worker.emit(1, prompt_logprobs=told(1, 3))
        setup.worker.emit(1, 20, prompt_logprobs=told(3, 5), chosen=[{"logprob": -0.5}])
        setup.worker.finish(1, "length", 21, choice=1, chosen=[{"logprob": -0.25}])
        answer = await events(call)
        assert prompt_of(answer) == expected(piece_of(setup))
        first = [event for event in answer if event.choice == 0]
        assert list(dict.fromkeys(kinds(first)))[:3] == [
            "message_start", "prompt_delta", "content_block_start",
        ]  # fmt: skip
        assert "prompt_delta" not in kinds([event for event in answer if event.choice])
        tokens = [t for e in first for t in e.content_block_delta.tokens]
        assert tokens == [chat_pb2.TokenInfo(id=20, bytes=piece_of(setup)(20), logprob=-0.5)]


@pytest.mark.parametrize("method", ["Chat", "Completion"])
async def test_a_unary_answer_has_the_whole_prompt(method):
    async with routed() as setup:
        setup.tokenizer.prompt_ids = PROMPT
        sampling = common_pb2.SamplingParams(prompt_logprobs=2)
        if method == "Chat":
            request = chat_pb2.ChatRequest(spec=spec(prompt_logprobs=2))
        else:
            ids = chat_pb2.TokenIds(ids=PROMPT)
            request = chat_pb2.CompletionRequest(
                spec=chat_pb2.CompletionSpec(token_ids=ids, sampling=sampling)
            )
        call = getattr(setup.stub, method)(request, metadata=bearer())
        await setup.submitted(1)
        setup.worker.emit(1, prompt_logprobs=told(1, 5, 2))
        setup.worker.finish(1, "eos", EOS)
        assert list((await call).prompt_tokens) == expected(piece_of(setup), alternatives=2)


async def test_a_prompt_of_one_token_is_told_of_without_a_logprob():
    async with routed() as setup:
        setup.tokenizer.prompt_ids = [7]
        call = setup.stream(prompt_logprobs=0)
        await setup.submitted(1)
        setup.worker.finish(1, "eos", EOS)
        (token,) = prompt_of(await events(call))
        assert (token.id, token.HasField("logprob")) == (7, False)


async def test_nobody_who_did_not_ask_hears_of_the_prompt():
    async with routed() as setup:
        setup.tokenizer.prompt_ids = PROMPT
        call = setup.stream()
        assert not (await setup.submitted(1)).sampling.HasField("prompt_logprobs")
        setup.worker.emit(1, 20, prompt_logprobs=told(1, 5))
        setup.worker.finish(1, "eos", EOS)
        assert prompt_of(await events(call)) == []


@pytest.mark.parametrize("before", [0, 2, 4])
async def test_a_second_worker_tells_the_rest(before):
    """A worker dies during the prefill: what the client has is not sent again."""
    async with routed(FakeWorker(), FakeWorker()) as setup:
        setup.tokenizer.prompt_ids = PROMPT
        call = setup.stream(prompt_logprobs=1)
        lost, other = await setup.holder()
        lost.emit(1, prompt_logprobs=told(1, 1 + before))
        seen = []
        while len(prompt_of(seen)) < 1 + before:
            seen.append((await call.read()).event)
        lost.break_session()
        await until(lambda: other.submits)
        other.emit(1, prompt_logprobs=told(1, 4))
        other.emit(1, 20, prompt_logprobs=told(4, 5))
        other.finish(1, "eos", EOS)
        answer = seen + await events(call)
        assert prompt_of(answer) == expected(piece_of(setup))
        assert kinds(answer).count("message_start") == 1


async def test_bytes_that_a_lost_tokenizer_owed_come_after_it_is_back():
    async with routed() as setup:
        setup.tokenizer.prompt_ids = PROMPT
        call = setup.stream(prompt_logprobs=1)
        await setup.submitted(1)
        setup.tokenizer.decode_gate.clear()
        setup.worker.emit(1, prompt_logprobs=told(1, 5))
        await asyncio.sleep(0)
        setup.tokenizer.break_sessions()
        setup.tokenizer.decode_gate.set()
        setup.worker.finish(1, "length", 20)
        assert prompt_of(await events(call)) == expected(piece_of(setup))


async def test_more_than_a_request_may_ask_for_is_refused_with_both_numbers():
    async with routed(FakeWorker(max_model_len=100_000)) as setup:
        most = MAX_PROMPT_LOGPROBS // 21
        setup.tokenizer.prompt_ids = [5] * (most + 1)
        code, error = await failure(setup.stream(prompt_logprobs=20))
        assert (code, error.reason) == (grpc.StatusCode.INVALID_ARGUMENT, Reason.INVALID_FIELD)
        ((field, problem),) = error.fields
        assert field == "sampling.prompt_logprobs"
        assert f"{(most + 1) * 21}; at most {MAX_PROMPT_LOGPROBS}" in problem
        assert setup.worker.submits == []
        estimate = chat_pb2.EstimateChatRequest(spec=spec(prompt_logprobs=20))
        looked = await setup.stub.EstimateChat(estimate, metadata=bearer())
        assert looked.refusal == common_pb2.REASON_INVALID_FIELD
        # As much as is allowed comes at once, beyond what else may wait unread.
        prompt = setup.tokenizer.prompt_ids = [5] * most
        call = setup.stream(prompt_logprobs=20)
        await setup.submitted(1)
        setup.worker.emit(1, prompt_logprobs=told(1, most, 20))
        setup.worker.finish(1, "eos", EOS)
        answer = await events(call)
        assert prompt_of(answer) == expected(piece_of(setup), prompt, 20)
        assert max(len(event.prompt_delta.tokens) for event in answer) == 64
        await waited(lambda: not any(setup.router.held().values()))
