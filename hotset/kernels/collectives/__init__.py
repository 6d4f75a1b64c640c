"""Collectives between ranks that can read and write each other's device memory.

`reference.py` is the specification. `cuda_impl.py` exchanges data through one staging buffer per rank, which is
allocated once, so that CUDA graphs can capture the calls. `hotset/engine/workers/symmetric.py` allocates the buffers.
"""
