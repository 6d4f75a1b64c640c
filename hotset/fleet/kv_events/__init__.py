"""KV events: which prefixes an engine has in its cache, published over ZeroMQ in vLLM's format (docs/kv-events.md)."""
