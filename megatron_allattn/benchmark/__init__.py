"""Speed and memory, measured as ratios within one run: what `tools/benchmark.py` prints."""
