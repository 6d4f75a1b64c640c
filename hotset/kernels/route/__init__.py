"""route: which experts each row goes to, and with what weights."""

import torch
from torch import Tensor

from hotset.base.errors import ConfigError
from hotset.kernels.fast_path import kernels_of, served_fast
from hotset.kernels.route import reference
from hotset.kernels.route.rule import Routes, RoutingRule

__all__ = ["Routes", "RoutingRule", "route"]

MAX_EXPERTS = 512  # that the fast path ranks: a row's scores are held by one program


def route(
    x: Tensor,  # [rows, hidden]
    router: Tensor,  # [experts, hidden], in the accumulation dtype
    correction: Tensor,  # [experts], in the accumulation dtype
    rule: RoutingRule,
    seats: Tensor | None = None,  # [rows] int64; EMPTY: a padded row, which goes to no expert. None: there are none
) -> Routes:
    """Each row's best experts by sigmoid(router @ x) + correction, within its best groups of experts.

    A group is as good as the sum of its two best. Of equals the lower expert or group wins. The correction bears on the
    choice only: the weights are the bare sigmoids, made to sum to 1 if the rule says so, times its scale.
    A row whose scores are no numbers goes nowhere. Raises ConfigError if there are too many experts for the fast path.
    """
    experts = rule.experts
    assert router.shape == (experts, x.shape[1]), f"a router {tuple(router.shape)} for rows of {x.shape[1]} values"
    assert correction.shape == (experts,), f"corrections {tuple(correction.shape)} for {experts} experts"
    fast = served_fast(x) and router.dtype == torch.float32
    if fast and experts > MAX_EXPERTS:
        raise ConfigError(f"{experts} experts are more than the {MAX_EXPERTS} that can be ranked on a GPU")
    op = kernels_of("route") if fast else reference
    routes: Routes = op.route(x, router, correction, rule, seats)
    return routes
