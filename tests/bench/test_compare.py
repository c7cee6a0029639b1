"""The comparisons: what each policy lets in, by step times that are known."""

import json

import pytest
from click.testing import CliRunner

from bench.compare.batching import long_tailed
from bench.compare.chunks import Budgeted, beside_a_long_prompt
from bench.compare.cli import compare
from bench.compare.drive import VirtualClock
from bench.compare.engine import StepCurve, predicted
from bench.compare.one_by_one import ratios, way_of
from bench.compare.policies import Ask, Batches, Continuous
from bench.compare.prefix import figures_of, prefixed
from bench.compare.routing import Fleet, RoundRobin
from bench.load.distributions import parse_lengths
from bench.load.outcome import Outcome
from bench.load.workload import Workload
from worker.block_pool import BlockPool
from worker.scheduler import Scheduler

# A second for a step of decodes, however many; prompts cost nothing, unless a test says so.
SECOND = StepCurve(((1, 1.0), (64, 1.0)), 0.0)


def scheduler(places=8, budget=512, *, caches=False):
    return Scheduler(
        BlockPool(400, 16),
        max_num_seqs=places,
        max_num_batched_tokens=budget,
        max_model_len=2000,
        enable_prefix_caching=caches,
    )


def driven(asks, policy, curve=SECOND, **settings):
    return predicted(asks, policy, scheduler(**settings), curve)


def ends(run):
    """When each request had its last token, by the order of arrival."""
    ordered = sorted(run.served, key=lambda served: served.ask.prompt)
    return [served.token_times[-1] for served in ordered]


def asks(*lengths, gap=0.0):
    """One prompt id each: its prefill is a step like a decode."""
    return [Ask((number,), length, number * gap) for number, length in enumerate(lengths)]


def test_a_place_that_falls_free_is_taken_at_the_next_step():
    run = driven(asks(1, 4, 2, 1), Continuous(2))
    assert ends(run) == [1, 4, 3, 4]
    assert [step.sequences for step in run.steps] == [2, 2, 2, 2]
    assert run.tokens_per_s == 8 / 4


def test_a_static_batch_runs_to_its_longest_before_the_next_begins():
    run = driven(asks(1, 4, 2, 1), Batches(2))
    assert ends(run) == [1, 4, 6, 5]
    assert [step.sequences for step in run.steps] == [2, 1, 1, 1, 2, 1]


def test_rows_that_are_kept_are_computed_and_owe_nothing():
    """Nobody's tokens come later, but rows are computed for nobody."""
    run = driven(asks(1, 4, 2, 1), Batches(2, keeps_rows=True))
    assert ends(run) == [1, 4, 6, 5]
    assert [step.sequences for step in run.steps] == [2, 2, 2, 2, 2, 2]
    assert [step.useful for step in run.steps] == [2, 1, 1, 1, 2, 1]
    assert sum(len(served.token_times) for served in run.served) == 8


def test_a_static_batch_waits_until_it_is_full_and_a_dynamic_one_only_so_long():
    late = asks(1, 1, gap=10.0)
    assert ends(driven(late, Batches(2))) == [11, 11]
    assert ends(driven(late, Batches(2, patience_s=3.0))) == [4, 11]
    assert ends(driven(late, Batches(2, patience_s=30.0))) == [11, 11]


def test_the_last_batch_of_all_does_not_wait_for_more():
    assert ends(driven(asks(1, 1, 1), Batches(2))) == [1, 1, 2]


def test_step_times_between_and_beyond_measured_sizes_are_on_straight_lines():
    curve = StepCurve(((1, 1.0), (2, 1.5), (4, 3.5)), 0.25)
    sizes = (0, 1, 2, 3, 4, 6)
    assert [curve.seconds(size, 0) for size in sizes] == [0, 1.0, 1.5, 2.5, 3.5, 5.5]
    assert curve.seconds(1, 4) == 2.0


def test_what_is_predicted_takes_the_curves_time():
    """Two prompts of 8 positions, then two more steps of two."""
    curve = StepCurve(((1, 1.0), (2, 3.0)), 0.5)
    run = driven([Ask((7,) * 8, 3), Ask((9,) * 8, 3)], Continuous(2), curve)
    assert [step.took_s for step in run.steps] == [8.0, 3.0, 3.0]


def test_a_clock_that_is_told_the_time_never_goes_back():
    clock = VirtualClock()
    clock.wait_until(5.0)
    clock.wait_until(3.0)
    assert clock.now() == 5.0


def test_decode_alone_leaves_out_the_steps_with_prompts():
    """One by one: 2 x 2 tokens in 4 s; together: 4 tokens in 2 s."""
    curve = StepCurve(((1, 1.0), (2, 1.0)), 1.0)
    two = [Ask((7,) * 4, 3), Ask((9,) * 4, 3)]
    single = way_of("one by one", driven(two, Continuous(1), curve))
    batch = way_of("2 in one batch", driven(two, Continuous(2), curve))
    assert (single.wall_s, single.decode_tokens_per_s) == (12, 1)
    assert (batch.wall_s, batch.decode_tokens_per_s) == (10, 2)
    assert ratios(single, batch) == (1.2, 2)


def test_a_long_prompt_at_once_makes_one_long_gap_and_in_chunks_many_short_ones():
    curve = StepCurve(((1, 1.0), (64, 1.0)), 0.5)
    requests = beside_a_long_prompt(2, 100, 120, 30.5)

    def run(budget):
        return Budgeted(budget, driven(requests, Continuous(3), curve, budget=budget)).figures()

    whole, chunked = run(512), run(12)
    assert whole["gap_max_ms"] == 51_000
    assert chunked["gap_max_ms"] == 6_000
    assert chunked["long_ttft_s"] > whole["long_ttft_s"]


def test_a_shared_prefix_is_computed_once_with_the_cache():
    """Three prompts, one at a time: the second and third compute what is theirs."""
    requests = prefixed(3, 64, 16, 2)
    positions = [
        figures_of(driven(requests, Continuous(1), caches=caches))["prompt_positions"]
        for caches in (False, True)
    ]
    assert positions == [3 * 79, 79 + 2 * 15]


def test_requests_come_at_the_rate_and_with_the_lengths_that_were_asked():
    requests = long_tailed(2000, 4, parse_lengths("exponential:48:4:384"), 20.0, seed=3)
    assert requests[-1].arrival_s == pytest.approx(100, rel=0.1)
    lengths = [ask.output_tokens for ask in requests]
    assert (min(lengths), max(lengths) <= 384) == (4, True)
    assert len({ask.prompt for ask in requests}) == 2000


def test_a_fleets_capacity_is_its_places_over_a_requests_steps():
    fleet = Fleet(workers=4, places=4, step_s=0.01)
    assert fleet.capacity(parse_lengths("50")) == 32
    assert fleet.capacity(parse_lengths("mix:16@0.9,2000@0.1")) == pytest.approx(7.46, rel=0.02)


class Counted:
    """A target that remembers whom it was asked for."""

    def __init__(self):
        self.asked = []

    async def ask(self, request, outcome):
        self.asked.append(request.index)


async def test_round_robin_asks_each_in_turn():
    targets = [Counted(), Counted(), Counted()]
    for request in Workload().requests(7):
        await RoundRobin(targets).ask(request, Outcome(request.index, 0.0))
    assert [target.asked for target in targets] == [[0, 3, 6], [1, 4], [2, 5]]


TINY = {
    "one-by-one": "--prompts 2 --prompt-tokens 4 --output-tokens 4 --rounds 1",
    "batching": "--requests 6 --output-tokens exponential:4:2:9 --static-size 2 --max-num-seqs 4",
    "prefix-cache": "--requests 3 --prefix-tokens 32 --output-tokens 3 --concurrency 1",
    "chunked-prefill": "--streams 2 --prompt-tokens 64 --output-tokens 40 --at 0.05 --budget 16",
    "routing": "--workers 2 --max-num-seqs 2 --step-ms 5 --requests 20 --output-tokens 4",
}


@pytest.mark.model
@pytest.mark.parametrize(
    "name", [n if n == "one-by-one" else pytest.param(n, marks=pytest.mark.soak) for n in TINY]
)
def test_each_comparison_runs_on_the_demo_model(name, demo_model_path, tmp_path):
    """Its figures are numbers above 0, and its picture is a picture."""
    figures, plot = tmp_path / "figures.json", tmp_path / "plot.png"
    argv = [name, *TINY[name].split(), "--json", str(figures), "--plot", str(plot)]
    result = CliRunner().invoke(compare, argv, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    told = json.loads(figures.read_text())
    assert told.pop("load").startswith("load average")
    assert all(value for value in told.values())
    assert plot.read_bytes().startswith(b"\x89PNG")
