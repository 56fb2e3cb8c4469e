"""Repeatable measurements: the loss of codecs on a real model, their speed, and the results of other codecs.

A bench cuts contexts out of texts, computes their caches with the model once (a work folder keeps them), passes each
cache through every scheme, and compares the results. Only kvabr's commands import this package.
"""
