"""Why a name of 0.1.x is absent, or a call of it is refused here.

Key: a pattern that the whole dotted name matches; the first that matches counts. docs/compatibility.md has the table.
"""

from __future__ import annotations

REASONS: dict[str, str] = {
    r".*\.DataPartitionStatus(\..*)?|.*\.PartitionIndexManager(\..*)?|.*\.controller\.FieldMeta(\..*)?": (
        "inside of the old controller; a sampler gets an object with what samplers read"
    ),
    r".*\.TransferQueueController\..*": "inside of the old controller; no client calls it through Ray",
    r".*\.metrics\..*|.*\.start_metrics": "servers export metrics by themselves: scrape get_metrics_endpoint()",
    r".*\.bootstrap\..*|.*\.yuanrong_utils\..*": "init() and tq up start servers; Yuanrong workers are started before",
    r".*\.(Mooncake(Store|Storage)|Yuanrong|YuanrongStorage|RayStorage)Client\..*|.*\.RayObjectRefStorage(\..*)?": (
        "inside of a built-in store client; clients here move bytes through the store's engine by themselves"
    ),
    r".*\.yuanrong_client\..*|.*\.mooncake_utils\..*|.*\.MooncakeStorageClient": (
        "inside of a built-in store client; clients here move bytes through the store's engine by themselves"
    ),
    r".*\.SimpleStorageUnit": "the first argument is the number of rows of 0.1.5 to 0.1.10; give config by keyword",
    r".*\.(StorageMetaGroup|RoutingGroup|HybridStorageUnitData|SSDEncodedSample|SSDFileStore)(\..*)?": (
        "inside of the old storage unit and its manager"
    ),
    r".*\.StorageUnitData\..*|.*\.build_storage_meta_groups|.*\.StorageUnitTimeout": (
        "inside of the old storage unit and its manager; a unit that does not answer is a WaitTimeoutError"
    ),
    r".*StorageManager(Factory)?(\..*)?|.*\.TransferQueueStorageKVClient": (
        "a manager of 0.1.5 finds its controller later, those of 0.1.6 to 0.1.11 and of this release when made; "
        "what concerns sockets has no meaning"
    ),
    r".*\.zmq_utils\..*|.*\.serial_utils\..*|.*\.accept_probe\..*|.*socket.*": "there is no ZeroMQ",
    r".*\.async_[a-z_]+": "socket, which has no effect in 0.1.x either, is keyword-only; the rest is the same",
    r".*\.log_heavy_operation|.*\.perf_utils\..*": "logs of the old servers; tq top and the metrics show operations",
    r".*\.utils\.sequential_sampler": "a sampler of 0.1.5 as a function, which nothing there uses",
    r".*\.BatchMeta": "in 0.1.5 the first argument is samples; from 0.1.6 on, as here, it is global_indexes",
    r".*\.TransferQueueClient\.get_meta": "in 0.1.5 alone the blocking call lacks mode; give task_name by keyword",
}
