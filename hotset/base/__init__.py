"""Floor 1: errors, configuration, sampling parameters, units. Imports nothing else of Hotset."""
