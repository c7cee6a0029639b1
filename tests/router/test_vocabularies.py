"""Which vocabulary counts for a model, whatever tokenizers say in whatever order."""

from hypothesis import given
from hypothesis import strategies as st

from router.vocabularies import Vocabularies

claims = st.tuples(st.sampled_from("123"), st.sampled_from("ab"), st.sampled_from("xy"))


@given(st.lists(claims, max_size=12))
def test_what_counts_is_said_by_some_tokenizer_and_changes_only_when_it_must(told):
    """As long as one tokenizer of a model keeps to its vocabulary, that one counts."""
    vocabularies, last = Vocabularies(any_name=False), {}
    for tokenizer, model, fingerprint in told:
        before = {name: vocabularies.of(name) for name in "ab"}
        vocabularies.tell(tokenizer, model, fingerprint)
        last[tokenizer] = (model, fingerprint)
        for name in "ab":
            said = {f for m, f in last.values() if m == name}
            counts = vocabularies.of(name)
            assert counts in said if said else counts is None
            assert counts == before[name] or before[name] not in said
            having = {t for t in "123" if vocabularies.has(t, name)}
            assert having == {t for t, claim in last.items() if claim == (name, counts)}


def test_a_lone_tokenizer_has_every_model():
    """Its own name for the model says nothing; its last word counts."""
    vocabularies = Vocabularies(any_name=True)
    assert vocabularies.of("a") is None
    assert not vocabularies.has("1", "a")
    vocabularies.tell("1", "x", "f")
    assert vocabularies.of("a") == vocabularies.of("b") == "f"
    assert vocabularies.has("1", "b")
    vocabularies.tell("1", "y", "g")
    assert vocabularies.of("a") == "g"
