"""What a tokenizer service tells of itself."""

from tests.support.scraping import scrape
from tests.support.tokenizer_client import decode_client, encode_chat, tokenizer_stub
from tests.support.waiting import until
from tokenizer_svc.app import running_tokenizer
from tokenizer_svc.config import TokenizerConfig


async def test_encodings_open_slots_and_decoded_ids_are_counted(golden_model):
    config = TokenizerConfig(golden_model, "demo", "127.0.0.1:0", "127.0.0.1:0")
    async with running_tokenizer(config) as tokenizer:
        figures = await scrape(tokenizer.metrics_address)
        assert figures["noria_tokenizer_encode_seconds_count",] == 0
        assert figures["noria_tokenizer_decoded_ids_total",] == 0
        await tokenizer.ready()
        async with tokenizer_stub(tokenizer.address) as stub:
            ids = await encode_chat(stub, "네")
            async with decode_client(stub) as client:
                await client.open(1, output_token_ids=[4512, 40])
                await client.feed(1, 41, 42, 43)
                await until(lambda: sum(t.num_ids == 5 for t in client.texts.get(1, [])))
                figures = await scrape(tokenizer.metrics_address)
                assert figures["noria_tokenizer_open_slots",] == 1
        await until(lambda: tokenizer._servicer.num_slots == 0)
        figures = await scrape(tokenizer.metrics_address)
    assert figures["noria_tokenizer_open_slots",] == 0
    assert figures["noria_tokenizer_encode_seconds_count",] == 1
    assert figures["noria_tokenizer_encoded_ids_total",] == len(ids)
    assert figures["noria_tokenizer_decoded_ids_total",] == 5
