"""Every byte of a card is accounted for; what does not fit is refused with both sizes."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from noria.plan.capacity import DoesNotFitError, Settings, capacity
from noria.plan.cards import CARDS, Card, named_card, this_computer
from noria.plan.kv import blocks_of, blocks_that_fit, host_kv_bytes
from noria.plan.memory import HostMemory
from noria.plan.report import Plan, check_chats, numbers_of
from noria.plan.shape import Count, ModelShape

GIB = 2**30
OPT_13B = ModelShape(
    "opt", (Count("all", 12_853_473_280),), 50272, 5120, 20480, 40, 40, 40, 128, 2048
)
QWEN_7B = ModelShape(
    "qwen2", (Count("all", 7_615_616_512),), 152064, 3584, 18944, 28, 28, 4, 128, 32768
)
SETTINGS = Settings("float16", 16, 512)


def test_32_chats_of_2000_tokens_of_opt_13b_take_52_4_gb():
    held = capacity(OPT_13B, named_card("B200"), SETTINGS)
    plan = Plan("opt", held, 2000, 32, chats=32)
    assert held.kv_bytes_per_token == 819_200
    assert plan.chats_kv_bytes == 52_428_800_000
    assert numbers_of(plan)["chats_kv_bytes"] == 52_428_800_000


def test_qwen_7b_keeps_57344_bytes_a_token():
    assert capacity(QWEN_7B, named_card("h100"), SETTINGS).kv_bytes_per_token == 57_344


def test_weights_activations_workspace_and_kv_are_what_may_be_taken_of_a_card():
    held = capacity(QWEN_7B, Card("c", 80 * GIB), SETTINGS)
    parts = held.weight_bytes + held.activations + held.workspace + held.kv_bytes
    assert parts == held.usable == int(80 * GIB * 0.9)
    assert held.weight_bytes == 7_615_616_512 * 2
    taken = (held.num_blocks + 1) * 16 * 57_344
    assert taken <= held.kv_bytes < taken + 16 * 57_344


def test_the_values_of_a_step_are_counted_by_position_and_its_logits_by_sequence():
    """Bytes of fp16 for 10 positions, and fp32 logits twice for each of them that is sampled."""
    held = capacity(QWEN_7B, Card("c", 80 * GIB), replace(SETTINGS, max_num_batched_tokens=10))
    values = 2 * 3584 + (2 * 28 + 2 * 4) * 128 + 3 * 18944
    assert held.activations == 10 * values * 2 + 2 * 10 * 152064 * 4


def test_prompts_take_the_arithmetic_of_their_parameters_and_of_their_pairs():
    """40 % of it: 2 operations a parameter, and 2 a layer, head value and position seen on average
    for scores and again for values.
    """
    held = capacity(QWEN_7B, Card("c", 80 * GIB, flops=1e14), SETTINGS)
    pairs = 2 * (28 * 28 * 128) * 1000
    expected = 0.4 * 1e14 / (2 * 7_615_616_512 + pairs)
    assert held.prefill_tokens_per_s(1000) == pytest.approx(expected)


def test_a_given_cache_is_that_of_each_worker_on_one_computer():
    card = this_computer(HostMemory(200 * GIB, 100 * GIB, "MemAvailable"))
    weights = capacity(QWEN_7B, card, SETTINGS).weight_bytes
    two = replace(SETTINGS, workers=2, kv_cache_memory_bytes=50 * GIB - weights)
    assert capacity(QWEN_7B, card, two).kv_bytes == 50 * GIB - weights
    with pytest.raises(DoesNotFitError, match="kv_cache_memory_bytes"):
        capacity(QWEN_7B, card, replace(two, kv_cache_memory_bytes=50 * GIB - weights + 1))


def test_a_chat_counts_for_whole_blocks():
    held = replace(capacity(OPT_13B, Card("c", 80 * GIB), SETTINGS), num_blocks=10)
    assert (held.chats_at_once(16), held.chats_at_once(17), held.chats_at_once(161)) == (10, 5, 0)


def test_a_chat_is_suggested_a_place_only_while_it_shares_the_reading_of_the_weights():
    # 2 bytes a parameter read at 1 TB/s against 2 operations at 100 TFLOP/s: 100 sequences.
    card = Card("c", 80 * GIB, bandwidth=1e12, flops=1e14)
    held = capacity(QWEN_7B, card, SETTINGS)
    assert held.paying_batch == 100
    assert held.suggested_max_num_seqs(64) == 100
    assert held.suggested_max_num_seqs(32768) == held.chats_at_once(32768) < 100


def test_a_decode_step_reads_weights_and_the_whole_cache_once():
    held = capacity(QWEN_7B, Card("c", 80 * GIB, bandwidth=1e12), SETTINGS)
    expected = (held.weight_bytes + 10 * 1000 * 57_344) / 1e12
    assert held.step_floor_s(10, 1000) == pytest.approx(expected)


def test_keys_and_values_outweigh_the_weights_from_the_first_token_that_makes_them_larger():
    held = capacity(QWEN_7B, Card("c", 80 * GIB), SETTINGS)
    tokens = held.weights_equal_tokens
    assert (tokens - 1) * 57_344 < held.weight_bytes <= tokens * 57_344


def test_a_model_too_large_for_its_card_is_refused_with_what_is_missing():
    with pytest.raises(DoesNotFitError) as refused:
        capacity(OPT_13B, named_card("l4"), SETTINGS)
    text = str(refused.value)
    usable = int(23_034 * 2**20 * 0.9)
    assert "25,706,946,560 bytes" in text
    assert f"{usable:,} bytes" in text
    assert "are missing" in text


def test_chats_that_do_not_fit_are_refused_with_both_sizes():
    held = capacity(OPT_13B, named_card("a100-40gb"), SETTINGS)
    with pytest.raises(DoesNotFitError, match=r"52,428,800,000 bytes.*: \d at once"):
        check_chats(Plan("opt", held, 2000, 4, chats=32))


def test_a_given_cache_is_taken_as_it_is_unless_it_exceeds_what_is_left():
    given = replace(SETTINGS, kv_cache_memory_bytes=GIB)
    assert capacity(OPT_13B, named_card("h100"), given).kv_bytes == GIB
    with pytest.raises(DoesNotFitError, match=f"{100 * GIB:,}"):
        capacity(OPT_13B, named_card("h100"), replace(given, kv_cache_memory_bytes=100 * GIB))


def test_workers_on_one_computer_divide_what_their_weights_leave():
    card = this_computer(HostMemory(200 * GIB, 100 * GIB, "MemAvailable"))
    held = capacity(QWEN_7B, card, replace(SETTINGS, workers=2))
    assert held.kv_bytes == (100 * GIB - 2 * held.weight_bytes) // 4


@given(
    available=st.integers(0, 1 << 50), weights=st.integers(0, 1 << 50), workers=st.integers(1, 64)
)
def test_workers_never_take_more_than_there_is(available, weights, workers):
    if weights * workers > available:
        with pytest.raises(ValueError, match=f"{available:,}"):
            host_kv_bytes(available, weights, workers)
        return
    each = host_kv_bytes(available, weights, workers)
    assert workers * (weights + each) <= available


@given(per_token=st.integers(1, 10**7), size=st.integers(1, 512), total=st.integers(0, 1 << 45))
def test_blocks_fill_the_memory_beside_the_null_block(per_token, size, total):
    block = per_token * size
    if total < 2 * block:
        with pytest.raises(ValueError, match=f"^{total:,} .* {2 * block:,}$"):
            blocks_that_fit(per_token, size, total)
        return
    blocks = blocks_that_fit(per_token, size, total)
    assert 0 <= total - (blocks + 1) * block < block
    assert blocks_of(size * blocks, size) == blocks


@pytest.mark.parametrize("card", CARDS.values(), ids=CARDS)
def test_cards_hold_about_what_their_names_say(card):
    """Between a sixteenth less of the binary size and the decimal one as the box has it."""
    named = int(card.name.split()[-2])
    assert 0.93 * named * 1e9 < card.memory < 1.08 * named * 1e9
    assert 100e9 < card.bandwidth < 10e12
    assert 100e12 < card.flops < 3e15


def test_an_unknown_card_is_told_those_that_are_known():
    with pytest.raises(ValueError, match=r"'h900' is not known.*h100.*--memory"):
        named_card("h900")
    assert named_card("H100 PCIe") is CARDS["h100-pcie"]
