"""The ``TransferQueue`` resource: one data plane, the same YAML for ``kubectl apply`` and ``tq up``.

These types are the only source: the CRD, the chart's values schema and the reference page are generated from them.
Every refusal is one line that names the field and what is allowed, with the text that ``kubectl`` shows for it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, ClassVar, Final, Literal, get_args

from pydantic import ConfigDict, Field, JsonValue, ValidationError, model_validator
from pydantic_core import PydanticCustomError

from transfer_queue.config import defaults
from transfer_queue.config.document import Yaml, problems, read_yaml
from transfer_queue.config.quantity import AtLeast, Quantity
from transfer_queue.config.resource_checkpoint import Checkpoint, Place
from transfer_queue.config.resource_pods import Part, PodTemplate
from transfer_queue.config.resource_security import Security, TlsMode
from transfer_queue.config.rules import Between, Matches, Model, Rule
from transfer_queue.errors import ConfigError

__all__ = [
    "Backend",
    "Checkpoint",
    "Controller",
    "Journal",
    "Metadata",
    "Mooncake",
    "Part",
    "Security",
    "Simple",
    "Spec",
    "SsdOffload",
    "Storage",
    "TlsMode",
    "TransferQueue",
    "Yuanrong",
    "load",
    "parse",
]

Port = Annotated[int, Between(1, 65535)]
Interface = Annotated[str, Matches(r"^[a-zA-Z0-9_.:@-]+$", "the name of a network interface, such as eth0", 15)]
UnitCapacity = Annotated[Quantity, AtLeast(defaults.SMALLEST_CAPACITY, "a storage unit")]
Durability = Literal["none", "process", "node"]
SamplerName = Literal[
    "SequentialSampler",
    "GRPOGroupNSampler",
    "RankAwareSampler",
    "SeqlenBalancedSampler",
    "TokenBudgetSampler",
    "PrioritySampler",
    "ReplaySampler",
]


class Sampler(Model):
    """Which ready rows a consumer gets next."""

    name: SamplerName = Field(default="SequentialSampler", description="Name of the sampler.")
    args: dict[str, JsonValue] = Field(
        default={}, description="Keyword arguments of the sampler, such as n_samples_per_prompt."
    )

    @model_validator(mode="after")
    def _has_group_size(self) -> Sampler:
        """Not a `Rule`: the apiserver cannot look into ``args``, whose values may be anything."""
        if self.name == "GRPOGroupNSampler" and "n_samples_per_prompt" not in self.args:
            problem = "GRPOGroupNSampler needs args: {n_samples_per_prompt: N}; without it each row is a group"
            raise PydanticCustomError("group_size", "{problem}", {"problem": problem})
        return self


class Journal(Model):
    """Where the controller keeps its journal on a cluster, with durability node."""

    size: Quantity = Field(
        default=Quantity(defaults.JOURNAL_SIZE), description="Size of its persistent volume, for all shards."
    )
    storage_class_name: str | None = Field(
        default=None, description="Storage class of persistent volumes; unset: the cluster's default."
    )


class Controller(Part):
    """The process that knows which rows exist, which are ready and who consumed them."""

    replicas: Annotated[int, Between(1, 1)] = Field(default=1, description="Number of controllers.")
    shards: Annotated[int, Between(1, defaults.MOST_SHARDS)] = Field(
        default=1,
        description="Controller processes that share the partitions; each takes the next port and metricsPort. On a "
        "cluster they are containers of one pod, each with these resources.",
    )
    port: Port = Field(default=defaults.CONTROLLER_PORT, description="TCP port for clients and storage units.")
    metrics_port: Port = Field(
        default=defaults.CONTROLLER_METRICS_PORT, description="HTTP port: /metrics, /healthz, /readyz."
    )
    sampler: Sampler = Field(default=Sampler(), description="Which ready rows a consumer gets next.")
    polling_mode: bool = Field(
        default=False, description="Answer at once when too few rows are ready, instead of waiting."
    )
    lease_seconds: Annotated[int, Between(0, 2**31 - 1)] = Field(
        default=0,
        description="Time in which fetched rows are to be acknowledged before they are delivered again, unless the "
        "fetch says otherwise; 0: rows are delivered at most once.",
    )
    durability: Durability = Field(
        default="none",
        description="What acknowledged rows survive. none: nothing; process: the end of any process or container, "
        "but on clusters not of its pod; "
        "node: the end of the machine too, on persistent volumes.",
    )
    journal: Journal = Field(default=Journal(), description="The journal, unless durability is none.")
    sample_capacity: Annotated[int, Between(1, 2**53)] | None = Field(
        default=None, description="Most rows that may be live at once, over all shards; unset: as the backend says."
    )

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            lambda self: abs(self.port - self.metrics_port) >= self.shards,
            "self.port - self.metricsPort >= self.shards || self.metricsPort - self.port >= self.shards",
            "port and metricsPort must differ, by no less than shards: each shard takes the next of both",
        ),
        Rule(
            lambda self: max(self.port, self.metrics_port) + self.shards <= 65536,
            "self.port + self.shards <= 65536 && self.metricsPort + self.shards <= 65536",
            "each shard takes the next port and metricsPort, which end at 65535; choose lower ones",
        ),
    )


class SsdOffload(Model):
    """Blocks on a local disk where the memory of a storage unit is full."""

    path: str | None = Field(
        default=None,
        description="Folder for the blocks, on a local disk. tq up needs it; in pods it is where the volume is "
        "mounted, by default /spill.",
    )
    threshold_bytes: Quantity = Field(
        default=Quantity(defaults.SPILL_THRESHOLD), description="Smaller blocks stay in memory."
    )
    capacity: UnitCapacity = Field(
        default=Quantity(defaults.SPILL_CAPACITY), description="Most bytes on the disk, for each storage unit."
    )
    storage_class_name: str | None = Field(
        default=None,
        description="Storage class of a volume that each pod gets for its blocks; unset: the disk of its node.",
    )


class Simple(Model):
    """Rows in the memory of the storage units."""

    num_units: Annotated[int, Between(1, 65536)] = Field(
        default=defaults.SIMPLE_NUM_UNITS, description="Number of logical units; with unitSize it bounds the live rows."
    )
    unit_size: Annotated[int, Between(1, 2**40)] = Field(
        default=defaults.SIMPLE_UNIT_SIZE, description="Rows in each logical unit."
    )
    ssd_offload: SsdOffload | None = Field(
        default=None, description="A local disk beyond the memory; unset: none. Needs controller.durability none."
    )


class Master(Part):
    """The ``mooncake_master`` with its HTTP metadata server."""

    rpc_port: Port = Field(default=defaults.MASTER_RPC_PORT, description="TCP port of the master's RPC.")
    http_metadata_port: Port = Field(
        default=defaults.MASTER_HTTP_METADATA_PORT, description="HTTP port of the metadata server, path /metadata."
    )
    metrics_port: Port = Field(
        default=defaults.MASTER_METRICS_PORT, description="HTTP port of the admin API and metrics."
    )
    rpc_interface: Interface = Field(
        default=defaults.MASTER_RPC_INTERFACE, description="Network interface in the pod that the RPC binds to."
    )

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            lambda self: len({self.rpc_port, self.http_metadata_port, self.metrics_port}) == 3,
            "self.rpcPort != self.httpMetadataPort && self.rpcPort != self.metricsPort"
            " && self.httpMetadataPort != self.metricsPort",
            "rpcPort, httpMetadataPort and metricsPort must differ",
        ),
    )


class DevelopmentEtcd(Part):
    """An etcd of one member that the operator runs beside the queue; what it holds ends with its pod."""

    port: Port = Field(default=defaults.ETCD_PORT, description="TCP port for its clients.")


_ADDRESS = r"^([^ :;/]+|\[[0-9a-fA-F:.]+\]):[1-9][0-9]{0,4}$"
_HOST_PORT = "a HOST:PORT, an IPv6 HOST in brackets"
EtcdMember = Annotated[str, Matches(_ADDRESS, _HOST_PORT, 260)]


class Etcd(Model):
    """Where the masters agree on their leader: exactly one of the fields is set."""

    endpoints: list[EtcdMember] = Field(
        default=[], max_length=9, description="HOST:PORT of each member of an etcd that runs already, without TLS."
    )
    development: DevelopmentEtcd | None = Field(
        default=None, description="One that the operator runs; for trials, as it has one member and no volume."
    )

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            lambda self: bool(self.endpoints) != (self.development is not None),
            "(has(self.endpoints) && size(self.endpoints) > 0) != has(self.development)",
            "set exactly one of endpoints, development",
        ),
    )


class HighAvailability(Model):
    """Several masters that find each other through etcd: one leads, the others follow its log and take over."""

    masters: Annotated[int, Between(2, 7)] = Field(default=defaults.HA_MASTERS, description="Number of masters.")
    etcd: Etcd = Field(description="The etcd of the masters, of storage units and of clients.")


class ZeroCopy(Model):
    """Registered buffers that bytes move through without a copy."""

    enable: bool = Field(default=True, description="Use registered buffers.")
    tensor_buffer_size: Quantity = Field(
        default=Quantity(defaults.ZERO_COPY_WORKER_BUFFER_SIZE), description="Buffer for tensors in each worker."
    )
    bytes_buffer_size: Quantity = Field(
        default=Quantity(defaults.ZERO_COPY_WORKER_BUFFER_SIZE), description="Buffer for other data in each worker."
    )
    controller_tensor_buffer_size: Quantity = Field(
        default=Quantity(defaults.ZERO_COPY_CONTROLLER_BUFFER_SIZE),
        description="Buffer for tensors beside the controller.",
    )
    controller_bytes_buffer_size: Quantity = Field(
        default=Quantity(defaults.ZERO_COPY_CONTROLLER_BUFFER_SIZE),
        description="Buffer for other data beside the controller.",
    )


class Mooncake(Model):
    """Rows in Mooncake segments that the storage units hold; clients move the bytes themselves."""

    protocol: Literal["tcp", "rdma"] = Field(default="rdma", description="Transport between clients and segments.")
    device_name: Annotated[str, Matches(r"^[^ ]+$", "a comma-separated list of RDMA devices, or auto", 1024)] = Field(
        default=defaults.MOONCAKE_DEVICE_NAME,
        description="RDMA devices, comma-separated; auto: those nearest to the GPU.",
    )
    global_segment_size: UnitCapacity = Field(
        default=Quantity(defaults.MOONCAKE_GLOBAL_SEGMENT_SIZE),
        description="Segment that each storage unit contributes.",
    )
    local_buffer_size: Quantity = Field(
        default=Quantity(defaults.MOONCAKE_LOCAL_BUFFER_SIZE), description="Transfer buffer of each client."
    )
    zero_copy: ZeroCopy = Field(default=ZeroCopy(), description="Registered buffers.")
    master: Master = Field(default=Master(), description="The mooncake_master.")
    high_availability: HighAvailability | None = Field(
        default=None,
        description="Masters that take over from each other; unset: one master, with whose end all rows are lost. "
        "tq up runs one master all the same.",
    )


class Yuanrong(Model):
    """Rows in workers of the openYuanrong data system, which runs outside this resource."""

    worker: Annotated[str, Matches(_ADDRESS, _HOST_PORT, 260)] | None = Field(
        default=None,
        description="HOST:PORT of the worker of all storage units, as clients reach it; unset: workerPort of the own "
        "machine, which on a cluster is the node of the pod.",
    )
    worker_port: Port = Field(
        default=defaults.YUANRONG_WORKER_PORT, description="TCP port of the worker of each machine, if worker is unset."
    )
    request_timeout: Annotated[int, Between(1, 3600)] = Field(
        default=defaults.YUANRONG_REQUEST_TIMEOUT, description="Seconds that one call of the data system may take."
    )


class Ray(Model):
    """Rows in the Ray object store of the job that uses the queue.

    The storage units are actors of that job: transfer_queue.init() starts them, with the settings of its own argument.
    """


BackendKind = Literal["simple", "mooncake", "yuanrong", "ray"]
_BACKENDS: Final[tuple[BackendKind, ...]] = get_args(BackendKind)


class Backend(Model):
    """Where the bytes live: exactly one of the fields is set."""

    simple: Simple | None = Field(default=None, description="The memory of the storage units.")
    mooncake: Mooncake | None = Field(default=None, description="Mooncake segments.")
    yuanrong: Yuanrong | None = Field(default=None, description="The openYuanrong data system.")
    ray: Ray | None = Field(default=None, description="The Ray object store.")

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            lambda self: sum(getattr(self, name) is not None for name in _BACKENDS) == 1,
            f"[{', '.join(f'has(self.{name})' for name in _BACKENDS)}].filter(x, x).size() == 1",
            f"set exactly one of {', '.join(_BACKENDS)}",
        ),
    )

    @property
    def kind(self) -> BackendKind:
        """The name of the field that is set."""
        return next(name for name in _BACKENDS if getattr(self, name) is not None)


class Storage(Part):
    """The storage units: with simple they hold the rows, with mooncake the segments."""

    replicas: Annotated[int, Between(0, 4096)] = Field(
        default=defaults.STORAGE_REPLICAS, description="Number of storage units."
    )
    port: Port = Field(default=defaults.STORAGE_PORT, description="TCP port of each storage unit.")
    metrics_port: Port = Field(
        default=defaults.STORAGE_METRICS_PORT, description="HTTP port: /metrics, /healthz, /readyz."
    )
    topology_spread: list[dict[str, JsonValue]] = Field(
        default=[],
        description="topologySpreadConstraints without labelSelector; unset: over nodes as far as they go.",
    )
    capacity: UnitCapacity = Field(
        default=Quantity(defaults.STORAGE_CAPACITY),
        description="Memory for rows in each storage unit (simple backend).",
    )
    drain_seconds: Annotated[int, Between(0, 86400)] = Field(
        default=defaults.DRAIN_SECONDS,
        description="How long a storage unit that is taken away may take to move its rows to the others (simple "
        "and mooncake backends); 0: it does not, and changes that end one wait until the queue is empty.",
    )

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            lambda self: self.port != self.metrics_port,
            "self.port != self.metricsPort",
            "port and metricsPort must differ",
        ),
    )


DeviceClass = Annotated[
    str,
    Matches(
        r"^[a-z0-9]([a-z0-9-]*[a-z0-9])?([.][a-z0-9]([a-z0-9-]*[a-z0-9])?)*$",
        "the name of a DeviceClass, such as rdma.example.com",
        253,
    ),
]


class RdmaClaim(Model):
    """Devices by dynamic resource allocation (``resource.k8s.io/v1``)."""

    device_class_name: DeviceClass = Field(description="DeviceClass of the RDMA devices.")
    gpu_device_class_name: DeviceClass | None = Field(
        default=None,
        description="DeviceClass of GPUs: each labelled pod gets a GPU and an RDMA device on one PCIe root; unset: "
        "only an RDMA device. Storage units never get a GPU.",
    )


class Rdma(Model):
    """Whether RDMA is used where the backend's protocol is rdma."""

    policy: Literal["off", "auto", "required"] = Field(
        default="auto",
        description='"off" (quoted: YAML reads a bare off as false): TCP; auto: RDMA, or TCP with a warning; '
        "required: never TCP.",
    )
    resource_name: (
        Annotated[
            str,
            Matches(r"^[a-zA-Z0-9.-]+/[a-zA-Z0-9_.-]+$", "the name of an extended resource, such as rdma/shared", 253),
        ]
        | None
    ) = Field(default=None, description="Extended resource that gives a pod its RDMA devices, such as rdma/shared.")
    claim: RdmaClaim | None = Field(
        default=None, description="Devices by resource claims of the pods, instead of resourceName; Kubernetes 1.34 on."
    )

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            lambda self: self.policy != "required" or self.resource_name is not None or self.claim is not None,
            "self.policy != 'required' || has(self.resourceName) || has(self.claim)",
            "policy required needs resourceName, the extended resource of the RDMA device plugin, or claim",
        ),
        Rule(
            lambda self: self.resource_name is None or self.claim is None,
            "!has(self.resourceName) || !has(self.claim)",
            "resourceName and claim exclude each other; set the one by which the cluster gives RDMA devices",
        ),
    )


class Injection(Model):
    """What pods labelled ``transferqueue.io/inject`` get."""

    init_containers: bool = Field(default=False, description="Inject into init containers and native sidecars too.")
    exclude_containers: list[str] = Field(
        default=["istio-proxy", "linkerd-proxy"], description="Containers left as they are."
    )
    shared_memory: Quantity = Field(
        default=Quantity(defaults.SHARED_MEMORY_SIZE), description="Size of /dev/shm, unless the pod mounts its own."
    )
    env: dict[str, str] = Field(default={}, description="Further environment variables; those of the pod win.")


class Access(Model):
    """Who may use the queue from other namespaces."""

    namespaces: list[Annotated[str, Field(pattern=r"^([a-z0-9]([-a-z0-9]*[a-z0-9])?|[*])$")]] = Field(
        default=[], description='Namespaces whose pods may attach besides the own; "*" is all.'
    )


class Spec(Model):
    """Desired state of one data plane."""

    backend: Backend = Field(description="Where the bytes live.")
    controller: Controller = Field(default=Controller(), description="The control plane.")
    storage: Storage = Field(default=Storage(), description="The storage units.")
    rdma: Rdma = Field(default=Rdma(), description="Use of RDMA.")
    injection: Injection = Field(default=Injection(), description="What labelled pods get.")
    access: Access = Field(default=Access(), description="Who may attach.")
    security: Security = Field(default=Security(), description="What is refused.")
    checkpoint: Checkpoint | None = Field(default=None, description="Saves of the whole queue; unset: none.")
    restore_from: Place | None = Field(
        default=None,
        description="Checkpoint, or series of them, that the queue starts with. It is loaded once, before the queue is "
        "Ready, and never into a queue that has rows.",
    )
    pod_template: PodTemplate = Field(
        default=PodTemplate(), description="Template that is merged over every pod of the queue."
    )
    disruption_budget: bool = Field(
        default=True, description="Refuse evictions of the pods, whose memory holds rows, such as kubectl drain makes."
    )
    layout: Literal["jagged", "dense"] = Field(
        default="jagged", description="Form in which a get returns rows of two or more dimensions and one shape."
    )

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            lambda self: (
                self.backend.simple is None
                or self.backend.simple.ssd_offload is None
                or self.controller.durability == "none"
            ),
            "!has(self.backend.simple) || !has(self.backend.simple.ssdOffload) || !has(self.controller)"
            " || !has(self.controller.durability) || self.controller.durability == 'none'",
            "backend.simple.ssdOffload needs controller.durability none: blocks on the disk end with their unit",
        ),
        Rule(
            lambda self: self.backend.simple is not None or self.security.policy is None,
            "has(self.backend.simple) || !has(self.security) || !has(self.security.policy)",
            "security.policy needs backend simple: clients of other backends move rows past the storage units",
        ),
        Rule(
            lambda self: self.sample_capacity is None or self.sample_capacity >= self.controller.shards,
            "!has(self.controller) || !has(self.controller.shards) || (has(self.controller.sampleCapacity)"
            " ? self.controller.sampleCapacity >= self.controller.shards : !has(self.backend.simple)"
            " || !has(self.backend.simple.numUnits) || !has(self.backend.simple.unitSize)"
            " || self.backend.simple.numUnits * self.backend.simple.unitSize >= self.controller.shards)",
            "controller.sampleCapacity, or numUnits times unitSize of backend simple, must be at least "
            "controller.shards: rows are shared out to them",
        ),
        Rule(
            lambda self: self.backend.ray is None or self.security.tls_mode("off") == "off",
            "!has(self.backend.ray) || !has(self.security) || !has(self.security.tls) || !has(self.security.tls.mode)"
            " || self.security.tls.mode == 'off'",
            "backend ray has no TLS: its storage units are actors of the job; encrypt the network of the Ray cluster",
        ),
        Rule(
            lambda self: self.backend.ray is None or (self.checkpoint is None and self.restore_from is None),
            "!has(self.backend.ray) || (!has(self.checkpoint) && !has(self.restoreFrom))",
            "checkpoint and restoreFrom need another backend than ray, whose rows only a process of the Ray job reads: "
            "call save_checkpoint and load_checkpoint there",
        ),
    )

    def tls_mode(self, default: TlsMode) -> TlsMode:
        """See :meth:`Security.tls_mode`."""
        return "off" if self.backend.ray is not None else self.security.tls_mode(default)

    @property
    def scheduled(self) -> Checkpoint | None:
        """The settings of saves on a schedule; None without a schedule."""
        return self.checkpoint if self.checkpoint is not None and self.checkpoint.schedule is not None else None

    @property
    def saves(self) -> bool:
        """Whether a process restores the queue or saves it."""
        return self.restore_from is not None or self.scheduled is not None

    @property
    def transport(self) -> Literal["tcp", "rdma"]:
        """How bytes move: the protocol of the backend, which the RDMA policy ``off`` overrides."""
        mooncake = self.backend.mooncake
        return mooncake.protocol if mooncake and self.rdma.policy != "off" else "tcp"

    @property
    def unit_capacity(self) -> Quantity:
        """Bytes of each storage unit: the segment that it contributes, or its memory for rows."""
        return self.backend.mooncake.global_segment_size if self.backend.mooncake else self.storage.capacity

    @property
    def sample_capacity(self) -> int | None:
        """Most rows that may be live at once; None is unlimited."""
        simple = self.backend.simple
        if self.controller.sample_capacity is None and simple is not None:
            return simple.num_units * simple.unit_size
        return self.controller.sample_capacity


class Metadata(Model):
    """The Kubernetes metadata that matters here; other fields of it are kept."""

    model_config = ConfigDict(extra="allow")

    name: Annotated[
        str,
        Matches(
            r"^[a-z0-9]([a-z0-9.-]*[a-z0-9])?$",
            "a name of lower-case letters, digits, - and . that Kubernetes accepts",
            253,
        ),
    ]
    namespace: str = Field(default="default")
    labels: dict[str, str] = Field(default={})
    annotations: dict[str, str] = Field(default={})


class TransferQueue(Model):
    """A data plane between rollout workers and trainers."""

    api_version: Literal["transferqueue.io/v1alpha1", "transferqueue.io/v1beta1"]
    kind: Literal["TransferQueue"]
    metadata: Metadata
    spec: Spec = Field(description="Desired state.")
    status: dict[str, JsonValue] | None = None


def load(source: Path | str) -> TransferQueue:
    """Read a TransferQueue from a file, or from text if ``source`` is a string of more than one line.

    Raises :class:`ConfigError` with one line for each problem, which names the file and the line in it.
    """
    found = read_yaml(source, "TransferQueue")
    return parse(found.value, found)


def parse(document: Any, source: Yaml | None = None) -> TransferQueue:
    """Check a parsed document, for example an object from the apiserver. ``source``: what it was read from.

    Raises :class:`ConfigError` with one line for each problem.
    """
    try:
        return TransferQueue.model_validate(document)
    except ValidationError as error:
        lines = _empty_backends(document, source) or problems(TransferQueue, error, source)
    raise ConfigError("\n".join(f"{source.name}: {line}" if source else line for line in lines))


def _empty_backends(document: Any, source: Yaml | None) -> list[str]:
    """Errors for backends without a value, which YAML reads as null."""
    backend: Any = document
    for name in ("spec", "backend"):
        backend = backend.get(name) if isinstance(backend, dict) else None
    names = [name for name, value in backend.items() if value is None] if isinstance(backend, dict) else []
    return [
        f"spec.backend.{name}: has no value; for its defaults write {name}: {{}}"
        + (source.line(("spec", "backend", name)) if source else "")
        for name in names
    ]
