"""What is asked comes from a seed alone; lengths are as described or refused."""

import random
from statistics import fmean

import pytest

from bench.load.arrivals import replayed
from bench.load.distributions import DistributionError, parse_lengths
from bench.load.workload import Workload


def drawn(text, count=4000):
    rng = random.Random(5)
    return [parse_lengths(text).draw(rng) for _ in range(count)]


def test_lengths_follow_their_distribution():
    assert set(drawn("7")) == {7}
    assert (min(drawn("uniform:3:5")), max(drawn("uniform:3:5"))) == (3, 5)
    assert fmean(drawn("exponential:100")) == pytest.approx(100, rel=0.05)
    assert max(drawn("exponential:100:4:150")) <= 150
    assert drawn("mix:16@0.9,2000@0.1").count(2000) / 4000 == pytest.approx(0.1, abs=0.02)


@pytest.mark.parametrize(
    "text",
    ["", "0", "-1", "1.5", "x", "1000001", "9" * 5000, "uniform:5", "uniform:5:3", "mix:4@0.5",
     "mix:4@0.5,5@0.6", "mix:4@-1,5@2", "exponential:10:5000:6000", "normal:3:4", "uniform:a:b"],
)  # fmt: skip
def test_a_text_that_is_no_distribution_is_refused(text):
    with pytest.raises(DistributionError):
        parse_lengths(text)


def test_the_same_seed_asks_the_same_and_more_requests_begin_with_the_same():
    workload = Workload(output_tokens=parse_lengths("uniform:4:90"), cancel_share=0.5)
    assert workload.requests(30)[:20] == workload.requests(20)
    assert Workload(seed=2).requests(3) != Workload().requests(3)


def test_prompts_share_no_beginning_but_the_prefix():
    requests = Workload(prefix_words=20, prefix_share=0.5).requests(200)
    assert len({request.prompt.split()[0] for request in requests}) == 200
    systems = [request.system for request in requests if request.system]
    assert len(set(systems)) == 1
    assert 70 <= len(systems) <= 130


def test_tenants_take_turns_and_shares_are_kept():
    requests = Workload(num_tenants=3, slow_share=0.25, slow_pause_s=2.0).requests(300)
    assert [request.tenant for request in requests[:4]] == [0, 1, 2, 0]
    assert 50 <= sum(request.pause_s == 2.0 for request in requests) <= 100


@pytest.mark.parametrize("text", ["0\n1\n0.5\n", "0\nx\n2\n", "0\n1\n", "-1\n0\n1\n", "0\nnan\n2"])
def test_a_file_of_times_is_refused_by_its_line(tmp_path, text):
    path = tmp_path / "times"
    path.write_text(text)
    with pytest.raises(ValueError, match="times"):
        replayed(path, 3)


def test_replayed_times_may_go_faster(tmp_path):
    path = tmp_path / "times"
    path.write_text("0\n1\n3\n9\n")
    assert replayed(path, 3, speed=2.0).times_s == (0, 0.5, 1.5)
