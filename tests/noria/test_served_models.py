"""Names and aliases of served models, and what is wrong with them."""

from pathlib import Path

import pytest

from noria.cli.model_source import ModelSource
from noria.cli.served_models import NamesError, ServedModel, own_names, served_models

A, B = ModelSource(Path("/a"), "a"), ModelSource(Path("/b"), "b")


def test_models_have_their_own_names_or_the_given_ones_in_order():
    assert own_names([A, B]) == (ServedModel(A.path, "a"), ServedModel(B.path, "b"))
    served = served_models([A, A], ["x", "y"], ["z=y", "w=x", "v=y"])
    assert served == (ServedModel(A.path, "x", ("w",)), ServedModel(A.path, "y", ("z", "v")))


@pytest.mark.parametrize(
    ("sources", "names", "aliases", "problem"),
    [
        ([A, B], ["x"], [], "--served-model-name: 1 names for 2 models"),
        ([A], ["x", "y"], [], "--served-model-name: 2 names for 1 models"),
        ([A, A], [], [], "two models are named 'a'"),
        ([A, B], ["x", "x"], [], "two models are named 'x'"),
        ([A], [], ["z"], "--alias z: ALIAS=NAME is needed"),
        ([A], [], ["=a"], "ALIAS=NAME"),
        ([A], [], ["z=b"], "--alias z=b: no such model; served: a"),
        ([A, B], [], ["b=a"], "--alias b=a: 'b' is a name already"),
        ([A, B], [], ["z=a", "z=b"], "--alias z=b: 'z' is a name already"),
    ],
)
def test_names_that_could_mean_two_models_or_none_are_refused(sources, names, aliases, problem):
    with pytest.raises(NamesError, match=problem):
        served_models(sources, names, aliases)
