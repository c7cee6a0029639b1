"""Each field of each family's config is honoured, or refused by name.

Every field that transformers' config class has is changed in turn. Either the changed
config is refused with the field's name, or the model that transformers makes of it gives
the logits that ours gives.
"""

import pytest
import torch

from tests.support.tiny_families import FAMILIES, VOCAB, tiny_family
from tests.support.tiny_models import Forward, randomised, scheduled
from worker.models.loader import open_checkpoint

PROMPT = [(index * 37 + 11) % VOCAB for index in range(41)]
BLOCKS = [7, 3, 12, 1, 30, 22, 9, 15, 2, 18, 40]
CASES = (
    "llama",
    "gemma3",
    *(
        pytest.param(c, marks=pytest.mark.soak)
        for c in ("mistral, window", "qwen2, windows", "qwen3")
    ),
)
# Names of files and programs, and what this very test relies on.
LEFT = {"architectures", "model_type", "transformers_version", "dtype", "layer_types",
        "_name_or_path", "id2label", "label2id"}  # fmt: skip
OTHERS = {
    "hidden_act": ["gelu", "relu", "gelu_pytorch_tanh"],
    "hidden_activation": ["silu", "gelu"],
    "rope_parameters": [
        {"rope_type": "default", "rope_theta": 123.0},
        {"rope_type": "linear", "rope_theta": 500.0, "factor": 2.0},
        {"rope_type": "dynamic", "rope_theta": 500.0, "factor": 2.0},
        {
            "rope_type": "yarn",
            "rope_theta": 500.0,
            "factor": 2.0,
            "original_max_position_embeddings": 32,
        },
    ],
    "final_logit_softcapping": [2.5],
    "attn_logit_softcapping": [2.5],
    "sliding_window": [5, 200],
    "num_hidden_layers": [2, 4],
    "num_attention_heads": [2, 8],
    "num_key_value_heads": [1, 4],
    "head_dim": [16],
    "eos_token_id": [3, [3, 4]],
    "vocab_size": [VOCAB + 5],
}


def changed(name, value):
    if name in OTHERS:
        return OTHERS[name]
    if isinstance(value, bool):
        return [not value]
    if isinstance(value, int):
        return [value + 2]
    if isinstance(value, float):
        return [value * 3 + 0.1]
    return []


def settings(values):
    """(field, another value) for every field of the family's config."""
    kept = {"hidden_size": [96], "intermediate_size": [100], "rms_norm_eps": [1e-2]}
    for name, value in values.items():
        plain = name not in LEFT and not isinstance(value, dict | list | None)
        if plain or name in OTHERS:
            yield from ((name, other) for other in kept.get(name, changed(name, value)))


def verdict(case, values, name, folder):
    """What becomes of a config that was changed in one field."""
    kind, config_class, _ = FAMILIES[case]
    if name in ("num_hidden_layers", "max_window_layers"):
        values = {k: v for k, v in values.items() if k != "layer_types"}
    if name == "rope_parameters" and case == "gemma3":
        local = {"rope_type": "default"}
        values = values | {name: {"full_attention": values[name], "sliding_attention": local}}
    try:
        theirs = randomised(kind, config_class(**values))
        theirs.save_pretrained(folder)
        with torch.inference_mode():
            expected = theirs(torch.tensor([PROMPT])).logits[0]
    except Exception:
        return "impossible"
    try:
        ours = open_checkpoint(folder).load()
    except ValueError as error:
        return "refused" if name in str(error) else f"refused without its name: {error}"
    difference = (Forward(ours).logits(scheduled(0, PROMPT, 0, BLOCKS)) - expected).abs().max()
    return "honoured" if difference < 1e-3 else f"logits differ by {difference}"


@pytest.mark.parametrize("case", CASES)
def test_each_field_is_honoured_or_refused(case, tmp_path):
    values = tiny_family(case).config.to_dict()
    verdicts = {
        (name, str(value)): verdict(case, values | {name: value}, name, tmp_path / str(index))
        for index, (name, value) in enumerate(settings(values))
    }
    right = {"honoured", "refused", "impossible"}
    assert {k: v for k, v in verdicts.items() if v not in right} == {}
    told = list(verdicts.values())
    assert told.count("honoured") > 18
    assert told.count("refused") >= 3
    assert told.count("impossible") < 6
