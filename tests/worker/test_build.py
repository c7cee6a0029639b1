"""What an engine that was built tells of itself."""

from dataclasses import replace

from noria.plan.memory import host_memory
from noria.service.vocabulary import load_vocabulary
from worker.build import _info
from worker.config import WorkerConfig
from worker.network import scripted_network


def test_the_backends_that_were_passed_over_are_told_with_their_reasons(golden_model, script_file):
    config = WorkerConfig(golden_model, script=script_file())
    reasons = ("flash_attn_3: no module", "triton: triton is not installed")
    network = replace(scripted_network(config, host_memory()), passed_over=reasons)
    info = _info(config, network, load_vocabulary(golden_model), "cuda")
    assert tuple(info.rejected_backends) == reasons
    assert (info.device, info.attention_backend) == ("cuda", "scripted")
    assert info.hello.row_exact is network.backend.row_exact
