"""Parts that connect engines: transfers, handoffs, the router, KV events, the cluster. The core does not need them."""
