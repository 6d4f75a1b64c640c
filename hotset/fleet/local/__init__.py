"""`hotset serve --disaggregate`: prefill engines, decode engines and a router as processes of this machine."""
