"""What routing goes by, and what comes of it."""

from dataclasses import dataclass

from torch import Tensor

from hotset.base.errors import ConfigError


@dataclass(frozen=True, slots=True)
class RoutingRule:
    """How a row's experts are chosen: `chosen` of those in its best `chosen_groups` groups, which are of equal size."""

    experts: int
    chosen: int
    groups: int = 1
    chosen_groups: int = 1
    normalise: bool = True  # weights of a row sum to 1 before they are scaled
    scale: float = 1.0

    def __post_init__(self) -> None:
        """Raises ConfigError if no row could be served by it."""
        groups, chosen_groups = self.groups, self.chosen_groups
        if groups < 1 or self.experts % groups:
            raise ConfigError(f"{self.experts} experts cannot be divided into {groups} groups")
        group_size = self.experts // groups
        if groups > 1 and group_size < 2:
            raise ConfigError(f"groups of {group_size} expert cannot be ranked by their two best")
        if not 1 <= chosen_groups <= groups:
            raise ConfigError(f"{chosen_groups} groups cannot be chosen of {groups}")
        if not 1 <= self.chosen <= chosen_groups * group_size:
            raise ConfigError(f"{self.chosen} experts cannot be chosen of {chosen_groups} groups of {group_size}")


@dataclass(frozen=True, slots=True)
class Routes:
    """The experts of each row."""

    chosen: Tensor  # [rows, chosen] int64, ascending; a padded row has EMPTY only
    weights: Tensor  # [rows, chosen], in the router's dtype; 0 where EMPTY
