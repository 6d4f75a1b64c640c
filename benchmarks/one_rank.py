"""Measures one rank of eight of DeepSeek-V3.2 or of GLM-5.2, at full size, on one GPU: `decode.py` with --split dp8.

    python benchmarks/one_rank.py --model deepseek-v3.2 --json one_rank.json --markdown one_rank.md

A prompt of 32k tokens is computed as well, tokens are sampled with temperature 1 and top-p 0.95, and KV gets the memory
that weights and prompts leave. All options are those of decode.py.
"""

from decode import main

if __name__ == "__main__":
    main(model=["deepseek-v3.2"], split="dp8", prefill=32768, temperature=1.0, device_gib=0.0, host_gib=96)
