"""Pipelines: a model cut into stages, which microbatches pass one after the other."""
