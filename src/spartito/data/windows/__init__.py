"""Windows over the tokens of documents, for language models.

    packed files, tables ──> documents ──> TokenBlock ──> windows ──> batches
    (blocks, hugging_face)   tokenizers    token_blocks   source

All documents stand one behind the other, and an example is a window over their
tokens. How many tokens each block has is counted once and kept in the cache, as are the tokens of
texts; so any window can be found without the ones before it.
"""
