"""The process groups of a worker's model parts, none of which leaves the node.

Megatron-core's modules, buffers and optimizers take their groups as one object. Everything that
crosses nodes is done by this project's executor on groups of its own, so these have one member, or
the workers of one node, which share layers. No world group spans the job: a world could not lose
a member.
"""

from datetime import timedelta

import torch
import torch.distributed as dist
from megatron.core.process_groups_config import ProcessGroupCollection

_MEMBERSHIPS = (
    *("tp", "cp", "pp", "mp", "embd", "pos_embd", "dp", "dp_cp", "ep", "tp_cp", "intra_dp_cp"),
    *("expt_dp", "intra_expt_dp", "intra_dist_opt", "inter_dist_opt", "tp_ep_pp", "tp_dp_cp"),
    *("tp_ep", "expt_tp"),
)


def model_groups(tensor_group: dist.ProcessGroup | None = None) -> ProcessGroupCollection:
    """The groups of a worker's model parts: all hold this process alone, but for the tensor
    group if there are several workers on the node."""
    if not dist.is_initialized():
        # Helpers of Megatron ask the default group for rank and size: a world of one.
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    groups = ProcessGroupCollection()
    for name in _MEMBERSHIPS:
        setattr(groups, name, dist.group.WORLD)
    if tensor_group is not None:
        groups.tp = tensor_group
    return groups


def make_tensor_group(
    store: dist.Store, tensor_rank: int, tensor_size: int, timeout: timedelta
) -> dist.ProcessGroup:
    """The workers of one node, which share its layers and live and die together."""
    if torch.cuda.is_available():
        nccl = dist.ProcessGroupNCCL.Options()
        nccl._timeout = timeout
        backend = dist.ProcessGroupNCCL(store, tensor_rank, tensor_size, nccl)
    else:
        gloo = dist.ProcessGroupGloo._Options()
        gloo._timeout = timeout
        gloo._devices = [dist.ProcessGroupGloo.create_device(interface="lo")]
        backend = dist.ProcessGroupGloo(store, tensor_rank, tensor_size, gloo)
    return with_backend(backend, store, tensor_rank, tensor_size)


def with_backend(
    backend: dist.Backend, store: dist.Store, rank: int, size: int
) -> dist.ProcessGroup:
    """A group as the functions of torch.distributed want it, which has its backend inside."""
    group = dist.ProcessGroup(store, rank, size)
    device, kind = torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO
    if torch.cuda.is_available():
        device, kind = torch.device("cuda"), dist.ProcessGroup.BackendType.NCCL
    group._register_backend(device, kind, backend)
    group._set_default_backend(kind)
    return group
