"""Floor 1: errors, configuration, addresses, sampling parameters, logging, units. Imports no other part of Hotset."""
