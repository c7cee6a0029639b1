"""Two different models on two workers behind one router, interleaved."""

import asyncio
import contextlib
import hashlib
import json
import string

import pytest

from noria import AsyncClient, ModelNotFoundError
from router.app import running_router
from router.config import RouterConfig
from tests.integration.test_command import NORIA
from tests.support.command import running
from tests.support.stack import API_KEY
from tests.support.waiting import until
from tokenizer_svc.app import running_tokenizer
from tokenizer_svc.chat_encoder import ChatMessage
from tokenizer_svc.config import TokenizerConfig
from tokenizer_svc.text_service import load_text_service
from worker.app import running_worker
from worker.config import WorkerConfig

ANY_PORT = "127.0.0.1:0"
CONTROL = ("<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>")


@pytest.fixture
def sentencepiece_model(golden_model, tmp_path):
    """A folder with a vocabulary of single letters, as SentencePiece has it, and Gemma's turns."""
    tokens = ["<unk>", *CONTROL, *(f"<0x{b:02X}>" for b in range(256)), "▁", *string.ascii_letters]
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    definition = {
        "version": "1.0",
        "added_tokens": [
            {"id": tokens.index(t), "content": t, "special": True, **flags} for t in CONTROL
        ],
        "normalizer": {"type": "Replace", "pattern": {"String": " "}, "content": "▁"},
        "decoder": {
            "type": "Sequence",
            "decoders": [
                {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
                {"type": "ByteFallback"},
                {"type": "Fuse"},
            ],
        },
        "model": {
            "type": "BPE",
            "vocab": {t: i for i, t in enumerate(tokens)},
            "merges": [],
            "byte_fallback": True,
        },
    }
    config = json.loads((golden_model / "config.json").read_text())
    config |= {"vocab_size": len(tokens), "eos_token_id": tokens.index("<end_of_turn>")}
    folder = tmp_path / "letters"
    folder.mkdir()
    (folder / "tokenizer.json").write_text(json.dumps(definition))
    (folder / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<bos>"}))
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def script_for(path, question, answer):
    """What a worker of this model replays for a question, in the model's own ids."""
    text = load_text_service(path, "m")
    prompt = text.chat.encode([ChatMessage("user", question)])
    ids = [*text.codec.encode(answer), text.vocabulary.eos_token_ids[0]]
    return {"prompt_token_ids": prompt, "output_token_ids": ids}


@contextlib.asynccontextmanager
async def two_models(models, answers, folder):
    """A router and its client; each model with a tokenizer and a scripted worker."""
    async with contextlib.AsyncExitStack() as held:
        enter = held.enter_async_context
        tokenizers, workers = [], []
        for name, path in models.items():
            script = folder / f"{name}.json"
            scripts = [script_for(path, question, told) for question, told in answers[name].items()]
            script.write_text(json.dumps({"scripts": scripts, "step_seconds": 0.001}))
            tokenizers.append(await enter(running_tokenizer(TokenizerConfig(path, name, ANY_PORT))))
            config = WorkerConfig(
                path, name, ANY_PORT, script=script, aliases=(f"{name}-latest",), num_blocks=200
            )
            workers.append(await enter(running_worker(config)))
        for service in (*tokenizers, *workers):
            await service.ready()
        config = RouterConfig(
            tokenizers=tuple(each.address for each in tokenizers),
            workers=tuple(each.address for each in workers),
            api_key_sha256=hashlib.sha256(API_KEY.encode()).hexdigest(),
            listen=ANY_PORT,
        )
        router = await enter(running_router(config))
        await until(lambda: len(router.registry.models()) == len(models))
        await until(lambda: all(map(router._tokenizers.is_up, models)))
        yield router, await enter(AsyncClient(router.address, api_key=API_KEY))
        await until(lambda: not any(router.held().values()))


async def test_interleaved_chats_keep_their_own_template_ids_and_text(
    golden_model, sentencepiece_model, tmp_path
):
    """A byte-level and a SentencePiece model; bytes beyond the letters, by name and by alias."""
    models = {"golden": golden_model, "letters": sentencepiece_model}
    answers = {
        "golden": {"hi": "네, 네", "and you": "ok"},
        "letters": {"hi": "good day", "and you": "한 ok"},
    }
    async with two_models(models, answers, tmp_path) as (router, client):
        asked = [
            (name, alias, question)
            for question in ("hi", "and you")
            for alias in ("", "-latest")
            for name in models
        ] * 4
        results = await asyncio.gather(
            *(client.chat(q, model=name + alias, temperature=0) for name, alias, q in asked)
        )
        for (name, _, question), result in zip(asked, results, strict=True):
            assert result.text == answers[name][question]
            assert result.usage.input_tokens == len(
                script_for(models[name], question, "")["prompt_token_ids"]
            )
        listed = [(m.limits.model, m.aliases) for m in router.registry.models()]
        assert listed == [("golden", ("golden-latest",)), ("letters", ("letters-latest",))]
        with pytest.raises(ModelNotFoundError, match="served: golden, letters"):
            await client.chat("hi", model="other")


@pytest.mark.model
@pytest.mark.soak
@pytest.mark.timeout(400)
async def test_both_real_models_chat_through_up(
    demo_model_path, gemma_model_path, tmp_path, monkeypatch
):
    """`noria up` with both: interleaved greedy answers equal those given alone."""
    monkeypatch.setenv("NORIA_CONFIG_DIR", str(tmp_path))
    up = ("up", "--port", "0", "--metrics-port", "0", "--alias", "small=smol", "--model",
          str(demo_model_path), "--served-model-name", "smol", "--model", str(gemma_model_path),
          "--served-model-name", "gemma", "--max-model-len", "512")  # fmt: skip
    questions = ("Is a tomato a fruit?", "Name three colours.", "What is two plus two?")
    with running(*NORIA, *up) as command:
        address = await asyncio.to_thread(
            lambda: command.until(r"serving: smol, gemma on (\S+)").group(1)
        )
        async with AsyncClient(address, timeout=200) as client:

            async def ask(question, model):
                asked = client.chat(question, model=model, temperature=0, max_tokens=16)
                return (await asked).text

            pairs = [(q, model) for q in questions for model in ("smol", "gemma")]
            alone = [await ask(*pair) for pair in pairs]
            assert await asyncio.gather(*(ask(*pair) for pair in pairs)) == alone
            # What transformers gives for the same two files in fp32.
            assert alone[0].startswith("A tomato is indeed a fruit. It is a member")
            assert alone[1].startswith("Is a tomato a fruit? mendatang\nIf you are a")
            assert await ask(questions[0], "small") == alone[0]
            told = await client.complete(
                "The capital of France is", model="gemma", temperature=0, max_tokens=4
            )
            assert told.text == " the capital of the"
        command.process.terminate()
        assert await asyncio.to_thread(command.exit_code) == 0
