"""The processes that compute steps: the controller's executors, the worker process, and the messages between them."""
