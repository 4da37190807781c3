"""Pretraining of all-attention language models (Sukhbaatar et al. 2019, arXiv 1907.01470), from CPU to cluster."""

__version__ = "0.1.0"
