# SPDX-License-Identifier: Apache-2.0
"""Workers for prefill context parallelism.

mixin       what they share
gpu_worker  over vLLM's GPU worker; also several ranks on one GPU, to try things out
cpu_worker  over vLLM's CPU worker
"""
