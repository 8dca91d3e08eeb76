# SPDX-License-Identifier: Apache-2.0
"""Prefill context parallelism inside Model Runner V2.

layout        which rank computes which token: pure numpy, no communication
manager       PCPManager: turns a scheduled batch into this rank's rows and back
graphs        PIECEWISE CUDA graphs of partitioned steps
sampled_rows  the rows that logits are computed from
last_piece    the last layer of a partitioned step, for those rows alone
model_runner  PCPRunnerMixin: where the runner hands its steps to the manager
copies        index arrays to the device in one transfer
token_ids     prompts to the device
late_writes   what only sampling reads, behind the forward pass
pooling       embeddings, normalised or not as a request asks
"""
