"""`noria status`, `noria ps` and `noria drain`: the fleet as a router sees it."""

import json
import time
from collections.abc import Callable

import click
from google.protobuf.json_format import MessageToDict
from google.protobuf.message import Message
from rich.console import Console
from rich.live import Live
from rich.text import Text

from noria.cli import fleet_tables
from noria.cli.administering import ADDRESS, administering
from noria.client.admin import AdminClient
from noria.client.tls import Tls
from noria.v1 import admin_pb2

_JSON = click.option("--json", "as_json", is_flag=True, help="Print it as JSON.")
_POLL_S = 0.5


@click.command()
@click.option("--watch", is_flag=True, help="Show it anew every second until Ctrl-C.")
@_JSON
@ADDRESS
@click.pass_obj
def status(tls: Tls | None, /, watch: bool, as_json: bool, address: str) -> None:
    """Show models, workers and tokenizers. Needs an administrator's key.

    One router answers with what it knows; the figures of workers are those of all routers.
    """
    if watch and as_json:
        raise click.UsageError("one of --watch and --json")
    with administering(address, tls) as client:
        if watch:
            _watch(lambda: fleet_tables.status(_fleet(client)))
        else:
            fleet = _fleet(client)
            click.echo(_as_json(fleet) if as_json else fleet_tables.status(fleet))


@click.command()
@click.option("--tenant", default="", help="Its requests alone.")
@click.option("--model", default="", help="Requests for this one alone.")
@click.option("--limit", type=click.IntRange(1, 10_000), default=1000, show_default=True)
@_JSON
@ADDRESS
@click.pass_obj
def ps(
    tls: Tls | None, /, tenant: str, model: str, limit: int, as_json: bool, address: str
) -> None:
    """List the requests that a router is answering now. Needs an administrator's key."""
    request = admin_pb2.ListRequestsRequest(tenant=tenant, model=model, limit=limit)
    with administering(address, tls) as client:
        listed = client.call(client.stub.ListRequests, request)
    click.echo(_as_json(listed) if as_json else fleet_tables.requests(listed))


@click.command()
@click.argument("worker")
@click.option("--undo", is_flag=True, help="Let it take requests again.")
@click.option("--wait", is_flag=True, help="Return once it has finished what it had.")
@ADDRESS
@click.pass_obj
def drain(tls: Tls | None, /, worker: str, undo: bool, wait: bool, address: str) -> None:
    """Let WORKER finish what it has and take nothing new, from any router.

    WORKER is its address as `noria status` shows it. Started anew, it takes requests again.
    Needs an administrator's key.
    """
    if undo and wait:
        raise click.UsageError("one of --undo and --wait")
    request = admin_pb2.DrainWorkerRequest(worker_id=worker, undo=undo)
    with administering(address, tls) as client:
        click.echo(fleet_tables.drained(client.call(client.stub.DrainWorker, request), undo=undo))
        if wait:
            _wait_empty(client, worker)
            click.echo(f"{worker} is empty")


def _fleet(client: AdminClient) -> admin_pb2.GetFleetResponse:
    return client.call(client.stub.GetFleet, admin_pb2.GetFleetRequest())


def _wait_empty(client: AdminClient, worker_id: str) -> None:
    """Return once nothing is left at the worker, or it is gone."""
    while True:
        workers = {each.worker_id: each for each in _fleet(client).workers}
        worker = workers.get(worker_id, admin_pb2.WorkerStatus())
        if not (worker.running or worker.waiting or worker.own_requests):
            return
        time.sleep(_POLL_S)


def _watch(draw: Callable[[], str]) -> None:
    with Live(Text(draw()), console=Console(), screen=True, auto_refresh=False) as live:
        try:
            while True:
                time.sleep(1)
                live.update(Text(draw()), refresh=True)
        except KeyboardInterrupt:
            return


def _as_json(message: Message) -> str:
    told = MessageToDict(
        message, preserving_proto_field_name=True, always_print_fields_with_no_presence=True
    )
    return json.dumps(told, indent=2)
