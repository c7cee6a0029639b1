"""Programs that behave like services towards their supervisor.

    stub_service.py cli BEHAVIOURS ARGUMENTS...   the `noria` command with stub services
    stub_service.py run MODULE BEHAVIOUR ...      one stub service

BEHAVIOURS is a JSON object: module -> behaviour. A stub dies on SIGUSR1.
"""

import json
import os
import queue
import signal
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent.parent))

from noria.service.parent import die_with_parent


def emit(event, **values):
    print(json.dumps({"event": event, "level": "info", **values}), file=sys.stderr, flush=True)


def serve_chat(stack):
    import grpc
    from grpc_health.v1 import health, health_pb2, health_pb2_grpc

    from noria.v1 import chat_pb2_grpc
    from tests.noria.fake_chat import FakeChat

    pool = stack.enter_context(ThreadPoolExecutor(4))
    server = grpc.server(pool)
    checks = health.HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(checks, server)
    chat_pb2_grpc.add_ChatServiceServicer_to_server(FakeChat(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    stack.callback(lambda: server.stop(0).wait())
    return port, lambda: checks.set("", health_pb2.HealthCheckResponse.SERVING)


def run(module, behaviour, arguments):
    import contextlib

    die_with_parent(int(arguments[arguments.index("--parent-pid") + 1]))
    # Not an Event: its lock may be held where the signal comes.
    told = queue.SimpleQueue()
    signal.signal(signal.SIGTERM, lambda *_: behaviour == "stubborn" or told.put(None))
    # Whatever a failed test leaves behind ends by itself.
    signal.alarm(300)
    signal.signal(signal.SIGUSR1, lambda *_: os._exit(4))
    emit("pid", pid=os.getpid())
    if behaviour == "dies":
        sys.exit("no such weights")
    with contextlib.ExitStack() as stack:
        port, ready = serve_chat(stack) if module == "router" else (1, lambda: None)
        emit("listening", address=f"127.0.0.1:{port}")
        if behaviour == "loads-for-ever":
            emit("progress", stage="loading weights", done=3, total=9)
            told.get()
            return
        emit("progress", stage="loading weights", done=9, total=9)
        ready()
        emit("ready")
        told.get()
        emit("stopped", module=module)


def cli(behaviours, arguments):
    from noria.cli import stack
    from noria.cli.main import main
    from noria.cli.supervisor import ChildSpec

    def stub(name, module, *flags, **environment):
        behaviour = behaviours.get(module, "ready")
        return ChildSpec(name, stub_argv(module, behaviour, *flags), environment)

    stack._service = stub
    main(arguments, prog_name="noria")


def stub_argv(module, behaviour, *flags):
    return (sys.executable, str(Path(__file__).resolve()), "run", module, behaviour, *flags)


if __name__ == "__main__":
    if sys.argv[1] == "cli":
        cli(json.loads(sys.argv[2]), sys.argv[3:])
    else:
        run(sys.argv[2], sys.argv[3], sys.argv[4:])
