"""Replicas follow from decode tokens demanded, the TTFT from stated formulas."""

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from noria.plan.load import Load, erlang_c, expected_ttft, plan_fleet

LOAD = Load(10, 1000, 500, 1000.0, 20_000.0, 32, 0.8)


def test_replicas_give_the_tokens_demanded_within_the_planned_part():
    fleet = plan_fleet(LOAD)
    assert fleet.decode_tokens_per_s == 5000
    assert fleet.at_full_load == 5
    assert fleet.replicas == 7  # 5000 / 800 = 6.25
    assert fleet.utilization == pytest.approx(5000 / 7000)
    assert fleet.in_flight == pytest.approx(32 * 5000 / 7000)


def test_an_exact_quotient_needs_no_further_replica():
    assert plan_fleet(replace(LOAD, request_rate=1.6 * 3)).replicas == 3


def test_the_ttft_is_the_wait_for_a_place_for_prompts_and_the_prompt():
    ttft = expected_ttft(replace(LOAD, max_num_seqs=1, request_rate=1), 1)
    # One place: M/M/1, the wait is u S / (1 - u) with u = 1 x 500 / 1000 and S = 0.5 s.
    assert ttft.place_s == pytest.approx(0.5)
    assert ttft.prefill_s == pytest.approx(0.05)
    assert ttft.prefill_queue_s == pytest.approx(0.05 * 0.05 / (2 * 0.95))
    assert ttft.total_s == ttft.place_s + ttft.prefill_queue_s + ttft.prefill_s


def test_without_prefill_speed_or_with_prompts_beyond_it_no_ttft_is_claimed():
    assert plan_fleet(replace(LOAD, prefill_tokens_per_s=None)).ttft is None
    fleet = plan_fleet(replace(LOAD, prefill_tokens_per_s=1000.0))
    assert fleet.ttft is None
    assert fleet.prefill_replicas == 13  # 10,000 / 800


@given(servers=st.integers(1, 20), utilization=st.floats(0.01, 0.99))
def test_erlang_c_is_its_textbook_sum(servers, utilization):
    offered = servers * utilization
    terms = [offered**k / math.factorial(k) for k in range(servers)]
    last = offered**servers / math.factorial(servers) / (1 - utilization)
    assert erlang_c(servers, utilization) == pytest.approx(last / (sum(terms) + last))


@given(
    rate=st.floats(0.01, 1e4), output=st.integers(1, 10**5), speed=st.floats(1, 1e6),
    share=st.floats(0.05, 0.99),
)  # fmt: skip
def test_no_replica_is_busier_than_planned_and_one_less_would_be(rate, output, speed, share):
    load = replace(LOAD, request_rate=rate, output_len=output, tokens_per_s=speed)
    fleet = plan_fleet(replace(load, utilization=share, prefill_tokens_per_s=None))
    assert fleet.utilization <= share + 1e-6
    if fleet.replicas > 1:
        assert rate * output / ((fleet.replicas - 1) * speed) > share - 1e-6
