"""`noria plan` reads a config alone and says its numbers, or what is wrong, by name."""

import json
import subprocess
import sys

import pytest
from click.testing import CliRunner

from noria.cli.main import main

OPT_13B = {
    "architectures": ["OPTForCausalLM"], "vocab_size": 50272, "hidden_size": 5120,
    "ffn_dim": 20480, "num_hidden_layers": 40, "num_attention_heads": 40,
    "max_position_embeddings": 2048, "word_embed_proj_dim": 5120, "torch_dtype": "float16",
}  # fmt: skip
GEMMA = {
    "architectures": ["Gemma3ForCausalLM"], "vocab_size": 262144, "hidden_size": 640,
    "intermediate_size": 2048, "num_hidden_layers": 18, "num_attention_heads": 4,
    "num_key_value_heads": 1, "head_dim": 256, "sliding_window": 512,
    "max_position_embeddings": 32768,
}  # fmt: skip
QWEN = {
    "architectures": ["Qwen2ForCausalLM"], "vocab_size": 152064, "hidden_size": 3584,
    "intermediate_size": 18944, "num_hidden_layers": 28, "num_attention_heads": 28,
    "num_key_value_heads": 4, "max_position_embeddings": 32768, "rope_theta": 1000000.0,
    "sliding_window": 131072, "max_window_layers": 28, "use_sliding_window": False,
    "tie_word_embeddings": False, "torch_dtype": "bfloat16",
}  # fmt: skip
LOAD = ("--request-rate", "2", "--input-len", "1000", "--output-len", "500")


@pytest.fixture
def run(tmp_path):
    """The command over a folder with this config.json alone."""

    def invoke(*arguments, config=OPT_13B):
        folder = tmp_path / "opt-13b"
        folder.mkdir(exist_ok=True)
        (folder / "config.json").write_text(json.dumps(config))
        return CliRunner().invoke(main, ["plan", "--model", str(folder), *arguments])

    return invoke


def test_the_known_numbers_are_shown_with_both_units(run):
    told = run("--card", "b200", "--chats", "32").output
    assert "opt-13b in float16 on B200 180 GB" in told
    for number in ("819,200 bytes", "52.4 GB = 48.8 GiB", "12,853,473,280"):
        assert number in told
    assert "52,428,800,000" in " ".join(told.split())


def test_json_has_the_numbers_alone(run):
    made = json.loads(run("--card", "b200", "--chats", "32", "--json").output)
    assert made["kv_bytes_per_token"] == 819_200
    assert made["chats_kv_bytes"] == 52_428_800_000
    assert made["weight_bytes"] == 25_706_946_560
    assert made["chats_at_once"]["2000"] == made["num_blocks"] // 125


def test_a_load_gives_replicas_and_apart_from_them_the_ttft(run):
    options = ("--card", "h100", *LOAD, "--tokens-per-s", "500")
    made = json.loads(run(*options, "--json").output)["load"]
    assert (made["replicas_at_full_load"], made["replicas"]) == (2, 3)
    assert made["ttft"]["total_s"] > made["ttft"]["prefill_s"] > 0
    told = run(*options).output
    assert "TTFT, mean" in told
    assert "replicas" in told


def test_places_that_were_assumed_are_said_to_be(run):
    options = ("--card", "h100", *LOAD, "--tokens-per-s", "500")
    made = json.loads(run(*options, "--json").output)
    assert made["max_num_seqs"] == made["suggested_max_num_seqs"]
    assert not made["max_num_seqs_given"]
    told = " ".join(run(*options).output.split())
    assert f"places, each replica {made['max_num_seqs']:,} assumed as suggested above" in told
    given = (*options, "--max-num-seqs", "7")
    assert json.loads(run(*given, "--json").output)["max_num_seqs_given"]
    told = " ".join(run(*given).output.split())
    assert "places, each replica 7 as given with --max-num-seqs" in told
    assert "assumed" not in told


def test_without_a_known_speed_the_ttft_is_asked_for_not_invented(run):
    options = ("--memory", "80GiB", *LOAD, "--tokens-per-s", "500")
    assert "--prefill-tokens-per-s" in run(*options).output
    assert json.loads(run(*options, "--json").output)["load"]["ttft"] is None


def test_windows_are_told_and_not_promised(run):
    told = " ".join(run("--card", "l4", config=GEMMA).output.split())
    assert "15 of 18 layers see 512 tokens only. Noria keeps all tokens in all layers" in told
    per_token = 2 * 18 * 1 * 256 * 2
    assert f"{per_token:,} bytes" in told


def test_this_computer_is_the_card_if_none_is_named(run):
    small = {**GEMMA, "vocab_size": 1000}
    assert "this computer" in run(config=small).output
    assert json.loads(run("--json", config=small).output)["dtype"] == "float32"


def test_the_known_models_keep_the_known_bytes(run):
    """OPT-13B: 800 KiB a token, 52.4 GB for 32 chats of 2,000; Qwen2.5-7B: 57,344 a token."""
    made = json.loads(run("--card", "b200", "--chats", "32", "--json").output)
    assert (made["kv_bytes_per_token"], made["chats_kv_bytes"]) == (819_200, 52_428_800_000)
    made = json.loads(run("--card", "h100", "--json", config=QWEN).output)
    assert (made["kv_bytes_per_token"], made["num_parameters"]) == (57_344, 7_615_616_512)
    told = run("--card", "h100", config=QWEN).output
    assert "57,344 bytes" in told


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"quantization_config": {"quant_method": "awq"}}, "quantization_config"),
        (
            {"rope_scaling": {"type": "dynamic", "factor": 2.0}},
            "rope_scaling.rope_type = 'dynamic'",
        ),
        ({"_own_field": 1}, "_own_field = 1"),
    ],
)
def test_what_a_worker_would_refuse_is_refused_in_its_words(run, change, named):
    result = run("--card", "h100", config=QWEN | change)
    assert result.exit_code != 0
    assert named in result.output


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (("--card", "h900"), "'h900' is not known"),
        (("--card", "l4"), "are missing before any KV cache"),
        (("--card", "h100", "--chats", "1000"), "at once"),
        (("--card", "h100", "--chat-len", "4096"), "chat_len 4,096 exceeds the model's 2,048"),
        (("--card", "h100", *LOAD), "missing: --tokens-per-s"),
        (("--card", "h100", "--memory", "1GiB"), "leave out --card"),
        (("--card", "h100", "--workers", "2"), "--card cpu alone"),
        (("--memory", "much"), "'much' is no size"),
        (("--memory", "0"), "usable are 0 bytes"),
        (("--card", "h100", "--block-size", str(1 << 30)), "the null block and one more"),
    ],
)
def test_what_cannot_be_is_refused_by_name(run, arguments, named):
    result = run(*arguments)
    assert result.exit_code != 0
    assert named in " ".join(result.output.split())
    assert "Traceback" not in result.output


def test_it_needs_neither_torch_nor_any_service(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(OPT_13B))
    program = (
        "import sys; from noria.cli.main import main\n"
        "main(['plan', '--model', sys.argv[1], '--card', 'h100'], standalone_mode=False)\n"
        "print([n for n in ('torch', 'numpy', 'structlog', 'worker') if n in sys.modules])"
    )
    command = [sys.executable, "-c", program, str(tmp_path)]
    told = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert told.rstrip().endswith("[]")
