# SPDX-License-Identifier: Apache-2.0
"""The only place that issues collectives over the PCP group, and over DCP and TP beside it.

groups             DCP groups along the PCP axis
kv_gather          one layer's new keys and values of all ranks, without allocating
peer_caches        instead of it: ranks write to each other's KV cache
peer_kernels       what writes there, and what waits
kv_shards          who keeps which tokens with D > 1
shard_collectives  what these ranks keep, their queries and partial results
collectives        hidden rows back to every rank, sampled tokens in step, experts
side_stream        where collectives run beside computation
step               whether the running step is partitioned, and its plan
"""
