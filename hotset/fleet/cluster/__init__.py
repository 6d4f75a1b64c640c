"""`hotset cluster`: prefill engines, decode engines and routers as processes on a Ray cluster."""
