"""Floor 1: errors, configuration, addresses, sampling parameters, units. It imports no other part of Hotset."""
