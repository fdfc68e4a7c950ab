"""Mistakes that a type checker finds; each line ends with the code of its error. Never run."""

from __future__ import annotations

import transfer_queue as tq

tq.kv_putt("a", "p")  # error: attr-defined
tq.kv_put(5, "p")  # error: arg-type
tq.kv_batch_get(["a"])  # error: call-arg
tq.kv_batch_put("a", "p")  # error: arg-type
meta: int = tq.kv_put("a", "p", tag={})  # error: assignment
tq.get_client().get_meta(["x"], "2", "p")  # error: arg-type
tq.get_client().put(data=None, partition_id="p")  # error: arg-type
tq.BatchMeta().global_index  # error: attr-defined  # noqa: B018
tq.GRPOGroupNSampler(n="2")  # error: call-arg
