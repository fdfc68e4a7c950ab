"""Default ports, sizes and counts, in one place. Sizes are Kubernetes quantities, ports are TCP ports."""

from __future__ import annotations

from typing import Final

GROUP: Final = "transferqueue.io"
VERSION: Final = "v1alpha1"
SERVED_VERSIONS: Final = (VERSION, "v1beta1")
"""Versions of the resource, one shape; the first is stored."""
API_VERSION: Final = f"{GROUP}/{VERSION}"
KIND: Final = "TransferQueue"

CONTROLLER_PORT: Final = 50060
CONTROLLER_METRICS_PORT: Final = 9060
MOST_SHARDS: Final = 64
JOURNAL_SIZE: Final = "10Gi"
STORAGE_PORT: Final = 50070
STORAGE_METRICS_PORT: Final = 9070
STORAGE_REPLICAS: Final = 2
STORAGE_CAPACITY: Final = "1Gi"
DRAIN_SECONDS: Final = 600
SMALLEST_CAPACITY: Final = "1Mi"

CHECKPOINT_METRICS_PORT: Final = 9080
KEPT_CHECKPOINTS: Final = 3

SIMPLE_NUM_UNITS: Final = 16
SIMPLE_UNIT_SIZE: Final = 1024
SPILL_CAPACITY: Final = "100Gi"
SPILL_THRESHOLD: Final = "1Mi"

YUANRONG_WORKER_PORT: Final = 31501
YUANRONG_REQUEST_TIMEOUT: Final = 20

MASTER_RPC_PORT: Final = 50051
MASTER_HTTP_METADATA_PORT: Final = 8080
MASTER_METRICS_PORT: Final = 9003
MASTER_RPC_INTERFACE: Final = "eth0"
ETCD_PORT: Final = 2379
HA_MASTERS: Final = 3
ETCD_IMAGE: Final = "quay.io/coreos/etcd:v3.5.21"
MOONCAKE_GLOBAL_SEGMENT_SIZE: Final = "64Gi"
MOONCAKE_LOCAL_BUFFER_SIZE: Final = "10Gi"
MOONCAKE_DEVICE_NAME: Final = "auto"
ZERO_COPY_WORKER_BUFFER_SIZE: Final = "2Gi"
ZERO_COPY_CONTROLLER_BUFFER_SIZE: Final = "10Gi"

SHARED_MEMORY_SIZE: Final = "1Gi"
