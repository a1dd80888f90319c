"""Process groups of one member, which is all that a worker's model parts need.

Megatron-core's modules, buffers and optimizers take their groups as one object. Everything that
crosses workers is done by this project's executor on groups of its own, so these have one member,
and no world group spans the job: a world could not lose a member.
"""

import torch.distributed as dist
from megatron.core.process_groups_config import ProcessGroupCollection

_MEMBERSHIPS = (
    *("tp", "cp", "pp", "mp", "embd", "pos_embd", "dp", "dp_cp", "ep", "tp_cp", "intra_dp_cp"),
    *("expt_dp", "intra_expt_dp", "intra_dist_opt", "inter_dist_opt", "tp_ep_pp", "tp_dp_cp"),
    *("tp_ep", "expt_tp"),
)


def single_member_groups() -> ProcessGroupCollection:
    """A collection whose groups all hold this process alone."""
    if not dist.is_initialized():
        # Helpers of Megatron ask the default group for rank and size: a world of one.
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    groups = ProcessGroupCollection()
    for name in _MEMBERSHIPS:
        setattr(groups, name, dist.group.WORLD)
    return groups
