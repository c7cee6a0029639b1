"""A name means what the connected workers say; what is gone is only remembered."""

from dataclasses import replace

import pytest

from noria.reasons import Reason, RequestError
from router.registry import Registry
from router.worker_state import WorkerFigures, WorkerState

FIGURES = WorkerFigures("i", "m", (), "v", 100, 4, 16, 100, 0)


def worker(worker_id, model, *aliases):
    return WorkerState(worker_id, replace(FIGURES, model=model, aliases=aliases), None)


@pytest.fixture
def registry():
    registry = Registry()
    registry.tell_vocabulary("t", "m", "v")
    return registry


def reason(registry, name, allowed=None):
    with pytest.raises(RequestError) as caught:
        registry.limits(name, allowed)
    return caught.value.reason


def test_a_name_that_was_once_a_models_may_be_anothers_alias(registry):
    old, new = worker("a", "chat-v1"), worker("b", "chat-v2", "chat-v1")
    registry.add(old)
    registry.add(new)
    assert registry.limits("chat-v1").model == "chat-v1"
    registry.remove(old)
    assert registry.limits("chat-v1").model == "chat-v2"
    assert registry.limits("chat-v1", frozenset({"chat-v1"})).model == "chat-v2"
    registry.remove(new)
    assert reason(registry, "chat-v2") is Reason.NO_WORKER


def test_an_alias_that_is_given_up_is_no_name_any_more_and_opens_nothing(registry):
    before = worker("a", "m", "x")
    registry.add(before)
    assert registry.limits("x", frozenset({"x"})).model == "m"
    registry.remove(before)
    registry.add(worker("a", "m"))
    assert reason(registry, "x") is Reason.MODEL_NOT_FOUND
    assert reason(registry, "m", frozenset({"x"})) is Reason.MODEL_FORBIDDEN


def test_of_two_that_claim_an_alias_one_has_it_until_it_leaves(registry):
    first, second = worker("a", "one", "x"), worker("b", "two", "x")
    registry.add(second)
    registry.add(first)
    assert registry.limits("x").model == "one"
    registry.used(first)
    assert registry.limits("x").model == "one"
    registry.remove(first)
    assert registry.limits("x").model == "two"


def test_a_tokenizer_that_comes_back_as_another_takes_its_models_requests_with_it():
    """Also where a second one keeps to the vocabulary: its own slots cannot go on."""
    registry = Registry(any_name=False)
    registry.add(worker("a", "m"))
    for tokenizer in ("t1", "t2"):
        assert registry.tell_vocabulary(tokenizer, "m", "v") == set()
    assert registry.tell_vocabulary("t2", "m", "v") == set()
    assert registry.tell_vocabulary("t2", "m", "w") == {"m"}
    assert registry.vocabulary("m") == "v"
    assert registry.tell_vocabulary("t1", "other", "v") == {"m"}
