"""The commands of ``kubectl tq``: arguments in, exit code out. What talks to a cluster is imported by its command."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Optional

import typer
import yaml

from tq_operator.kubectl.parts import Part
from transfer_queue._printable import printable
from transfer_queue.cli.faults import console, faults, say
from transfer_queue.cli.output import Output, OutputOption, show, unmarked
from transfer_queue.cli.usage import HelpfulCommand
from transfer_queue.errors import ConfigError, ConnectionLostError, TransferQueueError, WaitTimeoutError

if TYPE_CHECKING:
    from tq_operator.kubectl.access import Access
    from tq_operator.plan.queue import Manifest
    from transfer_queue.cli.connection import ControllerConnection

__all__ = ["app"]

app = typer.Typer(
    name="kubectl tq",
    help="TransferQueue in Kubernetes: inspect queues, repair them, and collect support bundles.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
    add_completion=False,  # kubectl completes plugins itself, by kubectl_complete-tq
)


class Replaceable(str, Enum):
    """Parts whose pod can be replaced by another one."""

    controller = "controller"
    mooncake_master = "mooncake-master"
    mooncake_masters = "mooncake-masters"


def _queue_names(context: typer.Context, incomplete: str) -> list[str]:
    from tq_operator.kubectl.access import connect
    from tq_operator.runtime.cluster import ClusterError

    given = context.params
    try:
        access = connect(given.get("kubeconfig"), given.get("context"), given.get("namespace"))
        names = [item["metadata"]["name"] for item in access.queues()]
    except (TransferQueueError, ClusterError):  # a shell has no place for it
        return []
    return [name for name in names if name.startswith(incomplete)]


# typer reads annotations at run time: Optional, as `X | None` needs a newer typer on Python 3.10
Name = Annotated[
    Optional[str],  # noqa: UP045
    typer.Argument(
        metavar="[QUEUE]",
        help="Name of a TransferQueue; by default the only one of the namespace.",
        autocompletion=_queue_names,
        show_default=False,
    ),
]
Namespace = Annotated[Optional[str], typer.Option("--namespace", "-n", help="Namespace of the queue.")]  # noqa: UP045
Context = Annotated[Optional[str], typer.Option("--context", help="Context of the kubeconfig.")]  # noqa: UP045
Kubeconfig = Annotated[Optional[str], typer.Option("--kubeconfig", help="By default KUBECONFIG, then ~/.kube/config.")]  # noqa: UP045
PartOption = Annotated[Optional[Part], typer.Option("--part", help="Only this part.")]  # noqa: UP045
Timeout = Annotated[float, typer.Option("--timeout", min=0, help="Give up after so many seconds.")]


@app.command(cls=HelpfulCommand)
def status(
    name: Name = None,
    namespace: Namespace = None,
    context: Context = None,
    kubeconfig: Kubeconfig = None,
    output: OutputOption = Output.table,
) -> None:
    """Show conditions, parts with their pods, endpoints, storage and bindings of a queue."""
    from tq_operator.kubectl.overview import draw_overview, overview

    with _cluster(kubeconfig, context, namespace) as access:
        seen = overview(access, access.queue(name))
        show(seen, output, lambda: draw_overview(seen))


@app.command(cls=HelpfulCommand)
def top(
    name: Name = None,
    once: Annotated[bool, typer.Option("--once", help="Show it once and end, for scripts.")] = False,
    interval: Annotated[float, typer.Option("--interval", min=0.1, help="Seconds between looks.")] = 1.0,
    namespace: Namespace = None,
    context: Context = None,
    kubeconfig: Kubeconfig = None,
    output: OutputOption = Output.table,
) -> None:
    """Watch partitions, fields, tasks, waiting requests and storage, as tq top does; q quits."""
    with _cluster(kubeconfig, context, namespace) as access:
        from transfer_queue.cli.top import watch

        with _link(access, access.queue(name)) as link:
            watch(link, output, once=once, interval_s=interval)


@app.command(cls=HelpfulCommand)
def why(
    name: Name = None,
    partition: Annotated[Optional[str], typer.Option("--partition", "-p", help="Only requests for this one.")] = None,  # noqa: UP045
    namespace: Namespace = None,
    context: Context = None,
    kubeconfig: Kubeconfig = None,
    output: OutputOption = Output.table,
) -> None:
    """Say what requests wait for, as tq why does."""
    with _cluster(kubeconfig, context, namespace) as access:
        from transfer_queue.runtime.why import explain

        with _link(access, access.queue(name)) as link:
            sentences = explain(link.look(), partition)
        show(sentences, output, lambda: sentences)


@app.command(cls=HelpfulCommand)
def doctor(
    name: Name = None,
    namespace: Namespace = None,
    context: Context = None,
    kubeconfig: Kubeconfig = None,
    output: OutputOption = Output.table,
) -> None:
    """Look for what is wrong with the operator and the queues of a namespace: ok, warn or fail, with the fix.

    Exit code 1 if anything fails. Nothing is changed; whether pods get the queue is asked by a dry run.
    """
    from tq_operator.kubectl.checks import Surroundings, examine

    with _cluster(kubeconfig, context, namespace) as access:
        from transfer_queue.cli.doctor import draw_findings

        findings = examine(Surroundings(access, name, lambda document: _picture(access, document)))
        show([finding._asdict() for finding in findings], output, lambda: draw_findings(findings))
    raise typer.Exit(int(any(finding.state == "fail" for finding in findings)))


@app.command(cls=HelpfulCommand)
def logs(
    name: Name = None,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on with new lines until Ctrl-C.")] = False,
    since: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option("--since", help="Only lines of so long, such as 30s, 10m or 1h30m."),
    ] = None,
    tail: Annotated[Optional[int], typer.Option("--tail", min=0, help="At most so many lines a container.")] = None,  # noqa: UP045
    previous: Annotated[bool, typer.Option("--previous", "-p", help="Of containers before their restart.")] = False,
    part: PartOption = None,
    namespace: Namespace = None,
    context: Context = None,
    kubeconfig: Kubeconfig = None,
) -> None:
    """Show the logs of all parts as one, in the order of time, each line behind the name of its pod."""
    from tq_operator.kubectl import logs as reading

    with faults():
        if follow and previous:
            raise ConfigError("--follow and --previous exclude each other: a container that ended says nothing new")
        wanted = reading.Range(reading.parse_duration(since) if since else None, tail, previous)
    with _cluster(kubeconfig, context, namespace) as access:
        queue = access.queue(name)["metadata"]["name"]
        only = part.value if part else None
        pods = access.pods(queue, only)
        if not pods and not follow:
            raise TransferQueueError(f"queue {queue} has no pods{f' of the part {only}' if only else ''} yet")
        unread: list[str] = []

        def refused(source: str, why: str) -> None:
            unread.append(source)
            say(f"{source}: {why}")

        width = max((len(pod["metadata"]["name"]) for pod in pods), default=0)
        if follow:
            lines = reading.follow(access, lambda: access.pods(queue, only), wanted, refused)
        else:
            lines = reading.merged(access, pods, wanted, refused)
        for line in lines:
            print(printable(f"{line.source:<{width}}  {line.text}"), flush=follow)
        if len(unread) >= sum(len(pod["spec"]["containers"]) for pod in pods):
            raise TransferQueueError("no log could be read")


@app.command("port-forward", cls=HelpfulCommand)
def port_forward(
    name: Name = None,
    ports: Annotated[
        Optional[list[str]],  # noqa: UP045
        typer.Argument(
            metavar="[[LOCAL]:PORT]...",
            help="Ports by name or number, such as metrics, 8080:metrics or :metrics for any free one; default all.",
            show_default=False,
        ),
    ] = None,
    part: Annotated[Part, typer.Option("--part", help="Whose ports.")] = Part.controller,
    pod: Annotated[Optional[str], typer.Option("--pod", help="Which pod of several.")] = None,  # noqa: UP045
    address: Annotated[str, typer.Option("--address", help="Of this machine, to listen on.")] = "127.0.0.1",
    namespace: Namespace = None,
    context: Context = None,
    kubeconfig: Kubeconfig = None,
    output: OutputOption = Output.table,
) -> None:
    """Reach ports of a part from this machine until Ctrl-C; its next pod too, should this one be replaced."""
    from tq_operator.kubectl.forwarding import choose_ports, find_pod, is_controller_port
    from tq_operator.kubectl.streams import Forwarder

    with _cluster(kubeconfig, context, namespace) as access:
        queue = access.queue(name)["metadata"]["name"]
        first = find_pod(access, queue, part.value, pod)
        with ExitStack() as stack:
            opened = []
            for wanted in choose_ports(first, ports or []):
                forwarder = Forwarder(
                    access,
                    lambda: str(find_pod(access, queue, part.value, pod)["metadata"]["name"]),
                    wanted.remote,
                    host=address,
                    local=wanted.local,
                    failed=say,
                )
                stack.enter_context(forwarder)
                opened.append({"name": wanted.name, "port": wanted.remote, "address": forwarder.address})
            document = {"pod": first["metadata"]["name"], "ports": opened}
            show(document, output, lambda: [f"{each['address']} is {each['name']} of {part.value}" for each in opened])
            sys.stdout.flush()
            found = [str(each["address"]) for each in opened if is_controller_port(str(each["name"]))]
            if part is Part.controller and found:
                say(f"export TQ_CONTROLLER_ADDRESS={','.join(found)}    # for tq top, ls, tail, trace")
            while True:
                time.sleep(3600)


@app.command(cls=HelpfulCommand)
def drain(
    unit: Annotated[str, typer.Argument(help="A storage unit, by the name of its pod.", show_default=False)],
    queue: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option("--queue", "-q", help="By default the only one of the namespace.", autocompletion=_queue_names),
    ] = None,
    timeout: Annotated[float, typer.Option(help="Give up after so many seconds; 0: never.", min=0)] = 0.0,
    cancel: Annotated[bool, typer.Option("--cancel", help="Let the unit take new blocks again.")] = False,
    namespace: Namespace = None,
    context: Context = None,
    kubeconfig: Kubeconfig = None,
) -> None:
    """Move all rows of a storage unit to the others while everybody goes on, so that its pod can be deleted."""
    from tq_operator.kubectl.failover import drain as run

    with _cluster(kubeconfig, context, namespace) as access:
        document = access.queue(queue)
        with console.status(unmarked(f"draining {unit}")) as shown:

            def progress(words: str) -> None:
                shown.update(unmarked(f"draining {unit}: {words}"))

            said = run(access, document, unit, timeout_s=timeout, cancel=cancel, progress=progress)
        say(said)


@app.command(cls=HelpfulCommand)
def failover(
    name: Name = None,
    part: Annotated[Replaceable, typer.Option("--part", help="Whose pod.")] = Replaceable.controller,
    timeout: Timeout = 120.0,
    allow_data_loss: Annotated[bool, typer.Option("--allow-data-loss", help="Also if rows end with the pod.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Do not wait for the pod's node, which is gone.")] = False,
    namespace: Namespace = None,
    context: Context = None,
    kubeconfig: Kubeconfig = None,
) -> None:
    """Replace the pod of the controller or of the Mooncake master, of several the one that leads.

    Waits until the queue is Ready again.
    """
    from tq_operator.kubectl.failover import fail_over

    with _cluster(kubeconfig, context, namespace) as access:
        document = access.queue(name)
        began = time.monotonic()
        with console.status(f"replacing the {part.value}") as shown:
            old, new = fail_over(
                access,
                document,
                part.value,
                timeout_s=timeout,
                allow_data_loss=allow_data_loss,
                force=force,
                progress=lambda words: shown.update(unmarked(f"replacing the {part.value}: {words}")),
            )
        say(f"{part.value}: {new} serves in place of {old}; Ready after {time.monotonic() - began:.1f} s")


@app.command("support-bundle", cls=HelpfulCommand)
def support_bundle(
    name: Name = None,
    file: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option("--file", "-f", help="Where to write it; by default QUEUE-support-TIME.tar.gz here."),
    ] = None,
    namespace: Namespace = None,
    context: Context = None,
    kubeconfig: Kubeconfig = None,
) -> None:
    """Write what somebody else needs to see to help: objects, events, logs, metrics, without secrets."""
    from tq_operator.kubectl.bundle import collect, write_archive
    from tq_operator.kubectl.checks import Surroundings, examine

    with _cluster(kubeconfig, context, namespace) as access:
        document = access.queue(name)
        queue = document["metadata"]["name"]
        target = file or Path(f"{queue}-support-{time.strftime('%Y%m%d-%H%M%S')}.tar.gz")
        with console.status("looking for what is wrong") as shown:
            findings = examine(Surroundings(access, queue, lambda each: _picture(access, each)))
            files = collect(access, document, findings, lambda what: shown.update(unmarked(f"reading {what}")))
        write_archive(target, files)
        typer.echo(target)
        say(f"{len(files)} files without secrets; look through them before you pass them on")


@app.command(cls=HelpfulCommand)
def inject(
    filename: Annotated[
        list[str], typer.Option("--filename", "-f", help="Manifests, TransferQueues among them; - is stdin.")
    ],
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print only; the webhook does the rest.")] = False,
    namespace: Annotated[str, typer.Option("--namespace", "-n", help="Of manifests that name none.")] = "default",
    tls: Annotated[str, typer.Option("--tls", help="The chart's value queues.tls: operator or off.")] = "operator",
) -> None:
    """Show pods as admission makes them, without a cluster."""
    with faults():
        from tq_operator.kubectl.inject import injected

        if not dry_run:
            raise ConfigError("say --dry-run: this only prints; pods in the cluster get their queue by the webhook")
        if tls not in ("operator", "off"):
            raise ConfigError(f'--tls: Unsupported value: "{tls}": supported values: "operator", "off"')
        shown = injected(filename, namespace, "off" if tls == "off" else "operator")
        sys.stdout.write(yaml.safe_dump_all(shown, sort_keys=False))


@contextmanager
def _cluster(kubeconfig: str | None, context: str | None, namespace: str | None) -> Iterator[Access]:
    """The cluster that the options mean; what it refuses ends the command in one line."""
    from tq_operator.kubectl.access import cluster_faults, connect

    with cluster_faults():
        yield connect(kubeconfig, context, namespace)


@contextmanager
def _link(access: Access, document: Manifest) -> Iterator[ControllerConnection]:
    """To the controllers of a queue, through the apiserver. An error says why the pod was not reached, if that is
    known."""
    from tq_operator.kubectl.credentials import credentials
    from tq_operator.kubectl.forwarding import choose_ports, find_pod, is_controller_port
    from tq_operator.kubectl.streams import Forwarder
    from transfer_queue.cli.connection import ControllerConnection
    from transfer_queue.config.attach import AttachConfig, ControllerAddresses

    def pod() -> Manifest:
        return find_pod(access, document["metadata"]["name"], "controller")

    with ExitStack() as stack:
        forwarders = [
            stack.enter_context(Forwarder(access, lambda: str(pod()["metadata"]["name"]), port.remote))
            for port in choose_ports(pod(), [])
            if is_controller_port(port.name)
        ]
        addresses = ControllerAddresses(addresses=[forwarder.address for forwarder in forwarders])
        config = AttachConfig(controller=addresses, security=stack.enter_context(credentials(access, document)))
        try:
            # The first answer comes over a connection that the apiserver and the kubelet have to make.
            with ControllerConnection(config, timeout_s=30.0) as link:
                yield link
        except (ConnectionLostError, WaitTimeoutError) as error:
            why = next((forwarder.failure for forwarder in forwarders if forwarder.failure), str(error))
            raise ConnectionLostError(f"the controller cannot be reached through the apiserver: {why}") from None


def _picture(access: Access, document: Manifest) -> dict[str, Any]:
    """What the controller says of itself. Raises TransferQueueError."""
    with _link(access, document) as link:
        return link.look()
