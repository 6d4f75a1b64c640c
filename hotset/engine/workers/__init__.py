"""The workers that compute steps. The controller (the engine process) sends them plans through an `Executor`."""
