"""The public interface that clients of 0.1.5 to 0.1.11 rely on: names, parameters in order, defaults.

A parameter written ``*name=default`` is keyword-only.

``OPTIONAL`` are parameters that may be left out here though they may not there, with the default that they have.
``EXTENSIONS`` are parameters that this release adds, each keyword-only; ``ADDED`` are its names. ``ABSENT`` are names
that it does not have; docs/compatibility.md gives the reason for every entry of them.
"""

from __future__ import annotations

TOP_LEVEL = {
    "init": "(conf=None)",
    "close": "()",
    "get_client": "()",
    "get_metrics_endpoint": "()",
    "save_checkpoint": "(checkpoint_dir, *include_storage=True, *metadata=None)",
    "load_checkpoint": "(checkpoint_dir, *replace=True)",
    "kv_put": "(key, partition_id, fields=None, tag=None, data_parser=None)",
    "kv_batch_put": "(keys, partition_id, fields=None, tags=None, data_parser=None)",
    "kv_batch_get": "(keys, partition_id, select_fields=None)",
    "kv_batch_get_by_meta": "(meta, select_fields=None)",
    "kv_list": "(partition_id=None)",
    "kv_clear": "(keys, partition_id)",
    "BatchMeta": "(global_indexes, partition_ids, field_schema=None, production_status=None, extra_info=None, "
    "custom_meta=None, _custom_backend_meta=None)",
    "KVBatchMeta": "(keys=<factory>, tags=<factory>, partition_id=None, fields=None, extra_info=<factory>)",
    "TransferQueueClient": "(client_id, controller_info, zmq_io_threads=None, zmq_max_sockets=None)",
    "AsyncTransferQueueClient": "(client_id, controller_info, zmq_io_threads=None, zmq_max_sockets=None)",
    "StreamingTokenBudgetSampler": "(n_samples_per_prompt=1, balance_unit_multiplier=1)",
    "StreamingDataset": "(config, batch_size, micro_batch_size, data_fields, partition_id, task_name, dp_rank, "
    "should_check_consumption_status=False, fetch_batch_fn=None, process_batch_fn=None)",
    "StreamingDataLoader": "(dataset, num_workers=0, collate_fn=None, pin_memory=False, worker_init_fn=None, "
    "multiprocessing_context=None, prefetch_factor=None, persistent_workers=False, pin_memory_device='')",
    "BaseSampler": "()",
    "SequentialSampler": "()",
    "GRPOGroupNSampler": "(n_samples_per_prompt=1)",
    "RankAwareSampler": "()",
    "SeqlenBalancedSampler": "(n_samples_per_prompt=1, dp_size=1)",
    "ZMQServerInfo": "(role, id, ip, ports)",
    "process_zmq_server_info": "(handlers)",
    "get_placement_group": "(num_ray_actors, num_cpus_per_actor=1)",
}
TWINS = ["kv_put", "kv_batch_put", "kv_batch_get", "kv_batch_get_by_meta", "kv_list", "kv_clear"]

CLIENT = {
    "get_meta": "(data_fields, batch_size, partition_id, mode='fetch', task_name=None, sampling_config=None)",
    "put": "(data, metadata=None, partition_id=None, data_parser=None)",
    "get_data": "(metadata)",
    "set_custom_meta": "(metadata)",
    "clear_samples": "(metadata)",
    "clear_partition": "(partition_id)",
    "check_production_completed": "(partition_id)",
    "check_stream_drained": "(task_name, partition_id)",
    "get_production_status": "(data_fields, partition_id)",
    "get_consumption_status": "(task_name, partition_id)",
    "check_production_status": "(data_fields, partition_id)",
    "check_consumption_status": "(task_name, partition_id)",
    "reset_consumption": "(partition_id, task_name=None)",
    "get_partition_list": "()",
    "kv_retrieve_meta": "(keys, partition_id, create=False)",
    "kv_retrieve_keys": "(global_indexes, partition_id)",
    "kv_list": "(partition_id=None)",
    "save_controller_checkpoint": "(path)",
    "load_controller_checkpoint": "(path)",
    "save_storage_checkpoint": "(checkpoint_dir)",
    "load_storage_checkpoint": "(checkpoint_dir)",
}
"""Of ``TransferQueueClient``; each has an ``async_`` twin on both classes."""
CLIENT_PLAIN = {"initialize_storage_manager": "(manager_type, config)", "close": "()"}
"""Not asynchronous on either class."""

MEMBERS = {
    "KVBatchMeta": {
        "select_keys": "(keys_to_select)",
        "reorder": "(indexes)",
        "chunk": "(chunks)",
        "concat": "(data)",
    },
    "BatchMeta": {
        "get_dtypes": "(field_name)",
        "get_shapes": "(field_name)",
        "get_extra_info": "(key, default=None)",
        "set_extra_info": "(key, value)",
        "update_extra_info": "(info_dict)",
        "remove_extra_info": "(key)",
        "clear_extra_info": "()",
        "has_extra_info": "(key)",
        "get_all_extra_info": "()",
        "get_all_custom_meta": "()",
        "update_custom_meta": "(custom_meta)",
        "clear_custom_meta": "()",
        "add_fields": "(tensor_dict, set_all_ready=True)",
        "select_samples": "(sample_indices)",
        "select_fields": "(field_names)",
        "copy": "()",
        "chunk": "(chunks)",
        "chunk_by_partition": "()",
        "union": "(other, validate=True)",
        "concat": "(data, validate=True)",
        "reorder": "(indices)",
        "empty": "(extra_info=None)",
        "from_samples": "(samples, extra_info=None)",
    },
    "BaseSampler": {
        "sample": "(ready_indexes, batch_size, *args, **kwargs)",
        "has_cached_result": "(partition_id, task_name, sampling_config=None)",
        "clear_cache": "(partition_id)",
        "save_checkpoint": "()",
        "load_checkpoint": "(state)",
    },
    "StreamingDataset": {"reset": "()", "step": "(partition_id)"},
    "StreamingDataLoader": {"reset": "()", "step": "(partition_id)", "get_buffer": "()"},
    "ZMQServerInfo": {"to_addr": "(port_name)", "to_dict": "()"},
}
PROPERTIES = {
    "KVBatchMeta": ["size"],
    "BatchMeta": ["size", "field_names", "is_ready", "samples"],
    "StreamingDataset": ["buffer"],
}

MODULES = {
    "transfer_queue.client": ["TransferQueueClient", "AsyncTransferQueueClient"],
    "transfer_queue.controller": ["TransferQueueController", "DataPartitionStatus"],
    "transfer_queue.metadata": ["BatchMeta", "KVBatchMeta", "FieldMeta", "SampleMeta", "extract_field_schema"],
    "transfer_queue.interface": [*TWINS, *[f"async_{name}" for name in TWINS], "init", "close", "get_client"],
    "transfer_queue.sampler": ["BaseSampler", "SequentialSampler", "GRPOGroupNSampler", "RankAwareSampler"],
    "transfer_queue.sampler.base": ["BaseSampler"],
    "transfer_queue.sampler.sequential_sampler": ["SequentialSampler"],
    "transfer_queue.sampler.grpo_group_n_sampler": ["GRPOGroupNSampler"],
    "transfer_queue.sampler.rank_aware_sampler": ["RankAwareSampler"],
    "transfer_queue.sampler.seqlen_balanced_sampler": [
        "SeqlenBalancedSampler",
        "get_seqlen_balanced_partitions",
        "karmarkar_karp",
    ],
    "transfer_queue.sampler.streaming_token_budget_sampler": ["StreamingTokenBudgetSampler"],
    "transfer_queue.dataloader": [
        "StreamingDataset",
        "StreamingDataLoader",
        "default_fetch_batch_fn",
        "chunk_batch_fn",
    ],
    "transfer_queue.dataloader.streaming_dataset": ["StreamingDataset"],
    "transfer_queue.dataloader.streaming_dataloader": ["StreamingDataLoader"],
    "transfer_queue.storage": [
        "StorageManager",
        "StorageManagerFactory",
        "AsyncSimpleStorageManager",
        "MooncakeStorageManager",
        "YuanrongStorageManager",
        "RayStorageManager",
        "StorageKeyNotFoundError",
        "StorageUnitData",
        "SimpleStorageUnit",
    ],
    "transfer_queue.storage.simple_storage": ["StorageUnitData", "SimpleStorageUnit"],
    "transfer_queue.storage.simple_backend": ["StorageUnitData", "SimpleStorageUnit"],
    "transfer_queue.storage.managers.base": [
        "StorageManager",
        "StorageManagerFactory",
        "KVStorageManager",
        "TransferQueueStorageManager",
        "TransferQueueStorageManagerFactory",
    ],
    "transfer_queue.storage.managers.factory": ["StorageManagerFactory", "TransferQueueStorageManagerFactory"],
    "transfer_queue.storage.managers.simple_storage_manager": ["AsyncSimpleStorageManager"],
    "transfer_queue.storage.managers.simple_backend_manager": ["AsyncSimpleStorageManager"],
    "transfer_queue.storage.managers.mooncake_manager": ["MooncakeStorageManager"],
    "transfer_queue.storage.managers.yuanrong_manager": ["YuanrongStorageManager"],
    "transfer_queue.storage.managers.ray_storage_manager": ["RayStorageManager"],
    "transfer_queue.storage.clients.base": [
        "StorageKVClient",
        "StorageClientFactory",
        "TransferQueueStorageKVClient",
    ],
    "transfer_queue.storage.clients.factory": ["StorageClientFactory"],
    "transfer_queue.storage.clients.mooncake_client": [
        "MooncakeStoreClient",
        "MooncakeStorageClient",
        "RegisterBufferType",
    ],
    "transfer_queue.storage.clients.yuanrong_client": ["YuanrongStorageClient"],
    "transfer_queue.storage.clients.ray_storage_client": ["RayStorageClient"],
    "transfer_queue.storage.bootstrap.provider": ["StorageBootstrapProvider"],
    "transfer_queue.utils.zmq_utils": [
        "ZMQServerInfo",
        "process_zmq_server_info",
        "get_node_ip_address",
        "get_free_port",
        "format_zmq_address",
        "is_ipv6_address",
    ],
    "transfer_queue.utils.common": [
        "limit_pytorch_auto_parallel_threads",
        "get_env_bool",
        "get_placement_group",
        "get_node_round_robin_scheduling_strategies",
    ],
    "transfer_queue.utils.utils": ["TransferQueueRole", "ProductionStatus", "get_env_bool", "get_placement_group"],
    "transfer_queue.utils.enum_utils": ["Role", "TransferQueueRole", "ProductionStatus", "ExplicitEnum"],
    "transfer_queue.utils.logging_utils": ["get_logger"],
    "transfer_queue.utils.serial_utils": ["batch_encode_into", "batch_decode_from"],
}

OPTIONAL = {
    "BatchMeta": {"global_indexes": (), "partition_ids": ()},
    "get_meta": {"batch_size": None, "partition_id": ""},
    "async_get_meta": {"batch_size": None, "partition_id": ""},
}
EXTENSIONS = {
    "init": {"settings"},
    **{f"{prefix}{name}": {"lock", "placement"} for name in ("kv_put", "kv_batch_put") for prefix in ("", "async_")},
    "BatchMeta": {"samples"},
    "GRPOGroupNSampler": {"group_tag"},
    "reset_consumption": {"idle"},
    "async_reset_consumption": {"idle"},
    "StreamingDataset": {"total_samples", "lease"},
    "get_meta": {"timeout", "lease", "token_budget", "is_last"},
    "async_get_meta": {"timeout", "lease", "token_budget", "is_last"},
    "put": {"custom_meta", "is_last", "placement"},
    "async_put": {"custom_meta", "is_last", "placement"},
    **{
        f"{prefix}{name}": {"zero_copy", "out", "device", "layout"}
        for name in ("kv_batch_get", "kv_batch_get_by_meta", "get_data")
        for prefix in ("", "async_")
    },
}
ADDED = [
    *("PrioritySampler", "ReplaySampler", "TokenBudgetSampler"),
    *("dump_data_by_key", "load_data_by_key", "read_row_index", "status"),
    *(f"{prefix}{name}" for name in ("kv_local_lock", "kv_local_locked") for prefix in ("", "async_")),
    *(f"{prefix}{name}" for name in ("kv_global_lock", "kv_update") for prefix in ("", "async_")),
]
ABSENT = ["TQMetricsExporter"]

CONFIG = {
    "metrics.enabled": False,
    "metrics.port": 0,
    "controller.sampler": "SequentialSampler",
    "controller.polling_mode": False,
    "controller.zmq_info": None,
    "backend.storage_backend": "SimpleStorage",
    "backend.SimpleStorage.total_storage_size": None,
    "backend.SimpleStorage.num_data_storage_units": 2,
    "backend.SimpleStorage.required_node_resource": None,
    "backend.SimpleStorage.zmq_info": None,
    "backend.SimpleStorage.ssd_offload.enabled": False,
    "backend.SimpleStorage.ssd_offload.path": None,
    "backend.SimpleStorage.ssd_offload.threshold_bytes": 1048576,
    "backend.SimpleStorage.ssd_offload.glibc_mmap_threshold_bytes": 1048576,
    "backend.MooncakeStore.auto_init": True,
    "backend.MooncakeStore.metadata_server": "localhost:50050",
    "backend.MooncakeStore.master_server_address": "localhost:50051",
    "backend.MooncakeStore.local_hostname": "",
    "backend.MooncakeStore.protocol": "tcp",
    "backend.MooncakeStore.device_name": "",
    "backend.MooncakeStore.global_segment_size": 4294967296,
    "backend.MooncakeStore.local_buffer_size": 1073741824,
    "backend.MooncakeStore.hard_pin": None,
    "backend.MooncakeStore.offload.enabled": False,
    "backend.MooncakeStore.offload.file_storage_path": "/tmp/mooncake_offload",
    "backend.MooncakeStore.offload.local_buffer_size_bytes": 2147483648,
    "backend.MooncakeStore.offload.use_uring": False,
    "backend.MooncakeStore.offload.heartbeat_interval_seconds": 2,
    "backend.MooncakeStore.offload.client_port": 42052,
    "backend.MooncakeStore.offload.eviction_high_watermark_ratio": 0.9,
    "backend.MooncakeStore.offload.eviction_ratio": 0.1,
    "backend.MooncakeStore.use_gdr": False,
    "backend.MooncakeStore.gdr_staging_buffer_mb": 1024,
    "backend.Yuanrong.auto_init": True,
    "backend.Yuanrong.worker_port": 31501,
    "backend.Yuanrong.metastore_port": 2379,
    "backend.Yuanrong.enable_yr_npu_transport": False,
    "backend.Yuanrong.ds_max_workers": 1,
    "backend.Yuanrong.enable_rdma": False,
    "backend.Yuanrong.worker_args": "--shared_memory_size_mb 8192",
    "backend.RayStore": None,
}
