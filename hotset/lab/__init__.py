"""Tools around the engine: load generator, planner, simulator, evaluation. The core does not import them."""
