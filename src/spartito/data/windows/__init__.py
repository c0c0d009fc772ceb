"""Windows over the tokens of documents, for language models.

    packed files ──> documents ──> TokenBlock ──> windows ──> batches
    (blocks)         tokenizers    token_blocks   source

The documents of all files stand one behind the other, and an example is a window over their
tokens. How many tokens each block has is counted once and kept in the cache, as are the tokens of
texts; so any window can be found without the ones before it.
"""
