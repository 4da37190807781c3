"""From text to streams of tokens: tokenizers, corpora, Megatron token files, preparation, training streams."""
