# SPDX-License-Identifier: Apache-2.0
"""The only place that issues collectives over the PCP group.

kv_gather    one layer's new keys and values of all ranks, without allocating
collectives  hidden rows back to every rank, sampled tokens in step, experts
step         whether the running step is partitioned
"""
