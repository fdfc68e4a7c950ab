"""The running cluster as a fixture: one for all tests here, or the one that is up already, then left up."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests import artefacts
from tests.cluster import product
from tests.cluster.cluster import Cluster, down, running_cluster, up
from tests.cluster.component import wait_until
from tests.cluster.console import step
from tests.cluster.errors import ClusterError
from tests.cluster.host import require_privileges


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run the tests that need a machine without a cluster before those that share one, and both last."""

    def turn(item: pytest.Item) -> int:
        names = getattr(item, "fixturenames", ())
        if item.path.name == "test_e2e_uninstall.py":  # what it removes, all others need
            return 3
        return 2 if "cluster" in names else 1 if "own_machine" in names else 0

    items.sort(key=turn)


@pytest.fixture(scope="package")
def privileged() -> None:
    """Skip what needs namespaces where this process may not make them."""
    try:
        require_privileges()
    except ClusterError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="package")
def reused(privileged: None) -> bool:
    """Whether a healthy cluster is up already; it is left up then, and as it was."""
    earlier = running_cluster()
    return earlier is not None and earlier.healthy()


@pytest.fixture(scope="package")
def cluster(reused: bool) -> Iterator[Cluster]:
    """A healthy cluster. Tests use namespaces of their own in it and remove them."""
    try:
        running = up()
        events = ("get", "events", "-A", "--sort-by=.lastTimestamp")
        artefacts.follow(running, lambda: {"cluster-events.log": running.kubectl(*events)})
        yield running
        artefacts.leave(running)
    finally:
        if not reused:
            down()


@pytest.fixture(scope="module")
def own_machine(privileged: None) -> Iterator[None]:
    """A machine whose clusters are those of the module's tests; one that somebody uses is left alone. What a killed run
    left without a program is removed by the first `up` or `down`."""
    earlier = running_cluster()
    if earlier is not None and len(earlier.dead()) < len(earlier.components):
        pytest.skip("a cluster is up, and this test would take it down: run `make cluster-down` first")
    try:
        yield
    finally:
        down()


@pytest.fixture
def no_cluster(own_machine: None) -> Iterator[None]:
    """A machine without a cluster, before the test and after it."""
    down()
    try:
        yield
    finally:
        down()


@pytest.fixture(scope="package")
def installed(cluster: Cluster, reused: bool) -> Iterator[Cluster]:
    """The operator, installed by the first command of the quick start. Queues and Jobs go into product.NAMESPACE."""
    product.publish(cluster)
    before = product.ours(cluster)
    assert not before, f"left by an earlier run: {before}"
    cluster.kubectl("create", "namespace", product.NAMESPACE)
    try:
        product.apply(cluster, product.scripts())
        with step("installing the chart"):
            product.follow(cluster, product.blocks(product.PAGE)[0])
        yield cluster
    finally:
        if reused:  # else it goes with the cluster
            product.remove(cluster)


@pytest.fixture(scope="package")
def replicated(installed: Cluster) -> Cluster:
    """The installation upgraded: two operators, a report of each node, a local etcd for masters."""
    settings = {"replicas": "2", "nodeReports.enabled": "true", "nodeReports.seconds": "2"}
    settings["images.etcd"] = product.ETCD_IMAGE
    words = [word for name, value in settings.items() for word in ("--set", f"{name}={value}")]
    with step("upgrading the chart"):
        place = (product.RELEASE, str(product.CHART), "-n", product.SYSTEM)
        installed.helm("upgrade", *place, "--reuse-values", "--wait", "--timeout=120s", *words)
        pods = (
            "get",
            "pods",
            "-n",
            product.SYSTEM,
            "-l",
            "app.kubernetes.io/name=transferqueue-operator",
            "-o",
            "name",
        )
        # Until then the old one leads, with the old images.
        wait_until(lambda: len(installed.kubectl(*pods).split()) == 2, "the old operator is gone", 60)
    return installed
