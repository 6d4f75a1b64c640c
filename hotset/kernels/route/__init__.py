"""route: selects the experts of each token and computes their weights."""

import torch
from torch import Tensor

from hotset.base.errors import ConfigError, InternalError
from hotset.kernels.fast_path import has_fast_path, kernels_of
from hotset.kernels.route import reference
from hotset.kernels.route.reference import Routes, RoutingRule

__all__ = ["Routes", "RoutingRule", "route"]

MAX_EXPERTS = 512  # limit of the fast path: one program holds all scores of a token


def route(
    x: Tensor,  # [tokens, hidden]
    router: Tensor,  # [experts, hidden], in the accumulation dtype
    correction: Tensor,  # [experts], in the accumulation dtype
    rule: RoutingRule,
    seats: Tensor | None = None,  # [tokens] int64; EMPTY: a padding token, which gets no expert. None: no padding
) -> Routes:
    """Selects each token's best experts by sigmoid(router @ x) + correction, within its best groups of experts.

    The score of a group is the sum of the corrected scores of its two best experts. If scores are equal, the lower
    expert or group wins. The correction affects only the selection: the weights are the plain sigmoids, normalised to a
    sum of 1 if the rule requires it, times the rule's scale. A token whose scores are all NaN gets no expert.
    Raises ConfigError if the fast path would get more than MAX_EXPERTS experts.
    """
    experts = rule.experts
    if router.shape != (experts, x.shape[1]):
        raise InternalError(f"router {tuple(router.shape)} for tokens of {x.shape[1]} values")
    if correction.shape != (experts,):
        raise InternalError(f"corrections {tuple(correction.shape)} for {experts} experts")
    fast = has_fast_path(x) and router.dtype == torch.float32
    if fast and experts > MAX_EXPERTS:
        raise ConfigError(f"{experts} experts are more than the {MAX_EXPERTS} that can be ranked on a GPU")
    op = kernels_of("route") if fast else reference
    routes: Routes = op.route(x, router, correction, rule, seats)
    return routes
